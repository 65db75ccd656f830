"""The secret of a job, and the proof that a process has it."""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
import tempfile
import threading
from pathlib import Path

import pytest

from kdist.cluster import is_loopback
from kdist.cluster.secret import job_secret, prove
from kdist.errors import ClusterConfigError


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("KDIST_CLUSTER_TOKEN", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"kdist-{os.geteuid()}"


def test_the_token_is_the_secret(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDIST_CLUSTER_TOKEN", " a secret ")
    assert job_secret(["10.0.0.1:1", "127.0.0.1:2"]) == "a secret"
    assert not directory.exists()


@pytest.mark.kills("secret_not_required_on_several_machines")
@pytest.mark.parametrize(
    "other", ["10.0.0.1:1", "host1:2222", "[fe80::1]:5", "127.example.org:1", "0.0.0.0:1"]
)
def test_without_a_token_other_machines_are_refused(directory: Path, other: str) -> None:
    with pytest.raises(ClusterConfigError, match="not set") as refused:
        job_secret(["127.0.0.1:1", other])
    assert refused.value.hint.splitlines()[-1] == "export KDIST_CLUSTER_TOKEN=$(openssl rand -hex 16)"
    assert not directory.exists()


def test_loopback_is_a_matter_of_numbers() -> None:
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.9.8.7", "::1")))
    assert not any(
        map(is_loopback, ("127.example.org", "127", "0.0.0.0", "::", "10.0.0.1", "", "localhost.a"))
    )


def test_each_user_has_one_secret_on_a_machine(directory: Path) -> None:
    found: list[str] = []
    places = ["127.0.0.1:1", "localhost:2", "[::1]:3"]
    threads = [threading.Thread(target=lambda: found.append(job_secret(places))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(found) == 16
    assert set(found) == {job_secret([])}
    assert len(bytes.fromhex(found[0])) == 32
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert [path.name for path in directory.iterdir()] == ["secret"]
    assert stat.S_IMODE((directory / "secret").stat().st_mode) == 0o600


def make_open(directory: Path) -> None:
    directory.mkdir()
    directory.chmod(0o755)


def make_link(directory: Path) -> None:
    (directory.parent / "elsewhere").mkdir(mode=0o700)
    directory.symlink_to(directory.parent / "elsewhere")


def make_file(directory: Path) -> None:
    directory.write_text("no directory")


def make_open_secret(directory: Path) -> None:
    directory.mkdir(mode=0o700)
    (directory / "secret").write_text("0" * 64)
    (directory / "secret").chmod(0o644)


def make_short_secret(directory: Path) -> None:
    directory.mkdir(mode=0o700)
    (directory / "secret").touch(0o600)


def make_fifo(directory: Path) -> None:
    directory.mkdir(mode=0o700)
    os.mkfifo(directory / "secret", 0o600)


def make_linked_secret(directory: Path) -> None:
    directory.mkdir(mode=0o700)
    (directory.parent / "known").write_text("0" * 64)
    (directory / "secret").symlink_to(directory.parent / "known")


@pytest.mark.kills("secret_file_of_another_user_believed")
@pytest.mark.parametrize(
    "prepare",
    [make_open, make_link, make_file, make_open_secret, make_short_secret, make_fifo, make_linked_secret],
)
def test_a_directory_that_others_may_have_prepared_is_refused(directory: Path, prepare) -> None:
    prepare(directory)
    with pytest.raises(
        ClusterConfigError, match=r"(?s)Cannot use the private directory.*export KDIST_CLUSTER_TOKEN="
    ):
        job_secret(["localhost:1"])


@pytest.mark.kills("secret_file_of_another_user_believed")
def test_a_directory_of_another_user_is_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = os.geteuid()
    job_secret([])
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    directory.rename(directory.with_name(f"kdist-{own + 1}"))
    with pytest.raises(ClusterConfigError, match="another user"):
        job_secret([])


def test_a_proof_covers_everything() -> None:
    ours, theirs = os.urandom(16), os.urandom(16)
    proof = prove("secret", "addresses", "server", [ours, theirs], b"message")
    fields = [b"kdist 1", b"addresses", b"server", ours, theirs, b"message"]
    framed = b"".join(len(field).to_bytes(8, "big") + field for field in fields)
    assert proof == hmac.new(b"secret", framed, hashlib.sha256).digest()
    for others in (
        ("Secret", "addresses", "server", [ours, theirs], b"message"),
        ("secret", "another", "server", [ours, theirs], b"message"),
        ("secret", "addresses", "client", [ours, theirs], b"message"),
        ("secret", "addresses", "server", [theirs, ours], b"message"),
        ("secret", "addresses", "server", [os.urandom(16), theirs], b"message"),
        ("secret", "addresses", "server", [ours, theirs], b"massage"),
        ("secret", "addresses", "server", [ours, theirs + b"message"], b""),
    ):
        assert proof != prove(*others)
