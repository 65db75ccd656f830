"""Options, test selection and reports of the whole test suite."""

from __future__ import annotations

import functools
import os
import signal
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests import reports, rest, turn
from tests.helpers import processes, zygote
from tests.helpers.environment import CACHE, DESCRIBING, keep_bytecode, own_ports
from tests.helpers.own_process import pytest_runtest_teardown as pytest_runtest_teardown

pytest_plugins = ("tests.mutants.kills",)

# The longest tests run first, so that no process of pytest-xdist starts a long test at the end.
FIRST = (
    "tests/faults_multi_process_test.py",
    "two_hosts_multi_process_test.py",
    "any_workers_multi_process_test.py",
    "fuzz_test.py",
    "tutorials_test.py",
    "contract_multi_process_test.py",
)

# The workers must not inherit these variables from the shell.
for name in [*os.environ]:
    if name.startswith(DESCRIBING):
        del os.environ[name]
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["KDIST_PORT_RANGE"] = own_ports()
keep_bytecode()
# With several test processes on few cores, even simple examples sometimes take too long for these checks.
hypothesis.settings.register_profile(
    "kdist", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("kdist")

# Background commands of a shell ignore Ctrl-C, and all their child processes inherit this.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# The same applies to SIGHUP under `nohup`. Child processes do not inherit a handler, so pytest continues to ignore it.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)


def pytest_report_header() -> str:
    return f"turn {turn.turn()} of what runs in turn; repeat it with {turn.VARIABLE}={turn.turn()}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="every product instead of pairs")
    parser.addoption(
        "--rest", action="store_true", help="only the tests that `make test` runs in turn or never"
    )
    parser.addoption(
        "--no-forks",
        action="store_true",
        help="start workers as a user does, instead of forking them, and optimize programs as usual",
    )
    parser.addoption(
        "--part", default=None, metavar="I/N", help="only this part of the groups of tests, such as 2/8"
    )
    parser.addoption(
        "--contract-results", default=None, help="write the result of each contract cell to this file"
    )
    parser.addoption("--gpu-report", default=None, help="write what the tests found on GPUs to this file")
    parser.addoption(
        "--foreign-backward",
        action="store_true",
        help="the contract with PyTorch's backward pass in another thread, as on a GPU",
    )
    parser.addoption("--support-results", default=None, help="write what each strategy can do to this file")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full: of a product; runs with --full, or when it is named")
    config.addinivalue_line(
        "markers", "in_turn(number): `make test` runs every number-th item of the test, others each turn"
    )
    config.addinivalue_line(
        "markers", "gpu: needs an NVIDIA GPU; skipped where there is none; `make test-gpu`"
    )
    zygote.lender = getattr(config, "workerinput", {}).get("lender", "")
    processes.forks = not config.getoption("--no-forks")
    if config.option.markexpr != "gpu" and Path("/dev/nvidia0").exists():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # CUDA does not start in a forked process
    if processes.forks:
        # Workers compile the same programs again and again. Entries of JAX's cache depend only on the program.
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(CACHE / "jax")
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        # Compiling takes longer than running. With --no-forks, programs are optimized as for users.
        zygote.is_quick = True
        os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
        # Older versions of XLA terminate the process, because they do not support these flags. Set XLA_FLAGS= then.
        os.environ.setdefault(
            "XLA_FLAGS", "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
        )


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["lender"] = _lender()


@functools.cache
def _lender() -> str:
    return zygote.lend()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not (config.getoption("--full") or config.getoption("--kills")):
        named = {Path(argument).name for argument in config.args}
        turn.leave_out(items)
        _keep(
            config,
            items,
            [
                item
                for item in items
                if not item.get_closest_marker("full") or item.nodeid.split("/")[-1] in named
            ],
        )
    for item in items:
        backend = _backend(item)
        if item.get_closest_marker("xdist_group") is None:
            # The tests of a module share workers; in a module with several backends, the tests of each backend do.
            item.add_marker(
                pytest.mark.xdist_group("-".join([item.path.stem, *([backend] if backend else [])]))
            )
    if config.getoption("--rest"):
        rotating = [i for i in items if i.get_closest_marker("full") or i.get_closest_marker("in_turn")]
        _keep(config, items, rotating)
    if part := config.getoption("--part"):
        _keep(config, items, rest.part_of(items, part, _group))
    items.sort(key=_rank)


def _keep(config: pytest.Config, items: list[pytest.Item], kept: list[pytest.Item]) -> None:
    chosen = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = kept


def _group(item: pytest.Item) -> str:
    marker = item.get_closest_marker("xdist_group")
    assert marker is not None
    return str(marker.args[0])


def _backend(item: pytest.Item) -> str:
    callspec = getattr(item, "callspec", None)
    return callspec.params.get("backend", "") if callspec else ""


def _rank(item: pytest.Item) -> tuple[int, str]:
    """Returns the sort key: tests of one backend are consecutive, so workers start once, not once per module."""
    path = item.path.as_posix()
    return next((i for i, part in enumerate(FIRST) if part in path), len(FIRST)), _backend(item)


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.getoption("loadgroup", False) and not all("@" in item.nodeid for item in session.items):
        raise pytest.UsageError(
            "pytest-xdist must keep the tests of a group together, and does not with this pytest. "
            f"Received: pytest {pytest.__version__}. Install the one in constraints.txt."
        )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    reports.print_contract(terminalreporter, config.getoption("--contract-results"))
    reports.print_faults(terminalreporter)
    reports.print_modules(terminalreporter)
    reports.write_gpus(terminalreporter, config.getoption("--gpu-report"))
    reports.write_support(terminalreporter, config.getoption("--support-results"))
