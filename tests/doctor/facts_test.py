"""A worker finds its own facts, and workers gather their facts together. Threads stand for the workers."""

from __future__ import annotations

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kdist.cluster import discover, free_ports
from kdist.doctor import facts, probes
from kdist.doctor.facts import Facts, gather, port_problem, reach, resolve
from kdist.launch.plan import count_cores


def told(*addresses, index=0, **more):
    task = {"cluster": {"worker": list(addresses)}, "task": {"type": "worker", "index": index}}
    return {"TF_CONFIG": json.dumps(task), "KERAS_BACKEND": "jax", **more}


def test_facts():
    port = free_ports(1)[0]
    environ = told(
        f"localhost:{port}", "no-such-host.invalid:2222", OMP_NUM_THREADS="3", CUDA_VISIBLE_DEVICES="0,1"
    )
    found = gather(discover(environ=environ), environ)
    assert found.name == "worker 0" and found.host == socket.gethostname()
    assert found.backend == ("jax", "KERAS_BACKEND is set") and set(found.versions) == {
        "kdist",
        "keras",
        "numpy",
        "jax",
    }
    assert found.sources == [("TF_CONFIG", f"worker 0 (localhost:{port}) of 2", True)]
    assert found.resolved["localhost"] in ("127.0.0.1", "::1") and list(found.unresolved) == [
        "no-such-host.invalid"
    ]
    assert (found.port, found.threads, found.gpus, found.token) == ("", 3, 2, "")
    assert len(found.cores) == count_cores() and found.open_files != 0 and found.import_error == ""


def test_the_secret_is_not_told():
    environ = told("localhost:2222", KDIST_CLUSTER_TOKEN="a secret")
    found = gather(discover(environ=environ), environ)
    assert found.token and "secret" not in str(found)
    other = told("localhost:2222", KDIST_CLUSTER_TOKEN="another")
    assert gather(discover(environ=other), other).token != found.token


def test_ports():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert port_problem(f"127.0.0.1:{port}").startswith(f"Cannot listen on port {port}: ")
        # torchrun's agent uses this port itself.
        environ = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        taken = environ | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
        assert gather(discover(environ=environ), environ).port
        assert not gather(discover(environ=taken), taken).port
    assert "not an address of this machine" in port_problem("192.0.2.1:2222")
    assert port_problem("no-such-host.invalid:2222") == "" == port_problem("")


def test_a_name_server_that_does_not_answer():
    stop = threading.Event()

    def slow(host, port, type):
        if host == "slow":
            stop.wait(10)
        if host == "wrong":
            raise socket.gaierror(-2, "Name or service not known")
        return [(0, 0, 0, "", ("10.0.0.1", 0))]

    start = time.monotonic()
    found, failed = resolve(["slow", "quick", "wrong"], 0.3, slow)
    assert time.monotonic() - start < 5
    stop.set()
    assert found == {"quick": "10.0.0.1"}
    assert failed == {"slow": "no response within 0.3 s", "wrong": "Name or service not known"}


def test_facts_travel():
    environ = told("localhost:2222")
    found = gather(discover(environ=environ), environ)
    again = Facts(**json.loads(json.dumps(vars(found))))
    assert vars(again) == json.loads(json.dumps(vars(found)))


def together(number, function):
    """Calls a function in threads that exchange values as workers do."""
    barrier, board = threading.Barrier(number, timeout=30), [None] * number

    def worker(index):
        def exchange(value):
            board[index] = value
            barrier.wait()
            everyone = list(board)
            barrier.wait()
            return everyone

        return function(index, exchange)

    with ThreadPoolExecutor(number) as pool:
        return list(pool.map(worker, range(number)))


def test_clocks():
    ahead = (0.0, 5.0, -100.0)
    found = together(3, lambda i, exchange: probes.clock_offsets(exchange, lambda: time.time() + ahead[i]))
    for i, offsets in enumerate(found):
        for j, (offset, doubt) in enumerate(offsets):
            assert abs(offset - (ahead[j] - ahead[i])) < 1 and 0 <= doubt < 10


def check_shared(folders):
    return together(len(folders), lambda i, exchange: probes.shared_folder(str(folders[i]), i, exchange))


def test_a_folder_that_is_shared(tmp_path):
    assert check_shared([tmp_path] * 3) == [[""] * 3] * 3
    assert not list(tmp_path.iterdir())


@pytest.mark.kills("doctor_folder_not_read")
def test_folders_that_are_not(tmp_path, monkeypatch):
    monkeypatch.setattr(probes, "_PATIENCE", 0.2)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    a, b = check_shared([tmp_path / "a", tmp_path / "b"])
    assert a == b == ["the files of worker 1 are not visible", "the files of worker 0 are not visible"]
    assert not list(tmp_path.rglob(".kdist*"))


def test_a_folder_that_is_not_there(tmp_path):
    said = check_shared([tmp_path, tmp_path / "missing"])
    assert said == [["", "cannot be written (No such file or directory)"]] * 2
    assert not list(tmp_path.iterdir())


def test_files_that_are_replaced_piece_by_piece(tmp_path, monkeypatch):
    def in_pieces(path):
        for number in range(200):
            path.write_text("ab"[number % 2] * 2500)
            time.sleep(0.001)
        return ""

    monkeypatch.setattr(probes, "_replace", in_pieces)
    monkeypatch.setattr(probes, "_REPLACEMENTS", 2000)
    assert check_shared([tmp_path] * 2) == [["", "a file is incomplete while it is replaced"]] * 2


def test_threads_are_those_that_are_told():
    for environ, number in (({}, 8), ({"OMP_NUM_THREADS": "2"}, 2), ({"OMP_NUM_THREADS": "zero"}, 8)):
        assert facts._threads(8, environ) == number


def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "file").touch()
    assert check_shared([tmp_path / "file"]) == [["cannot be written (Not a directory)"]]


def test_what_comes_of_a_connection():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert reach(address) == f"{address} is reachable."
    assert reach(address) == f"No process listens at {address}."
    assert "Cannot connect to" in reach("no-such-host.invalid:2222") and reach(None) == ""
