"""The secret of a job, and the proofs that two processes exchange instead of the secret.

This module uses only the standard library.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import os
import secrets
import stat
import tempfile
from collections.abc import Sequence

from kdist.cluster.addresses import is_loopback, split_address
from kdist.cluster.environment import TOKEN_VARIABLE, cluster_token
from kdist.errors import ClusterConfigError

PROOF_BYTES = hashlib.sha256().digest_size
EXPORT_TOKEN = f"export {TOKEN_VARIABLE}=$(openssl rand -hex 16)"
_HINT = f"Create a secret once, and set it on all machines of the job:\n{EXPORT_TOKEN}"
_MOST_BYTES = 256  # maximum size of the file with the secret


def job_secret(addresses: Sequence[str]) -> str:
    """Returns the secret that all processes of a job with these addresses share. Do not log it.

    This is the value of `KDIST_CLUSTER_TOKEN`. If it is not set and all addresses are loopback addresses, the
    secret comes from a private file of the current user.

    Raises:
        ClusterConfigError: If `KDIST_CLUSTER_TOKEN` is not set and an address is not a loopback address, or
            the user's secret cannot be read or created.
    """
    if token := cluster_token():
        return token
    others = [address for address in addresses if not is_loopback(split_address(address)[0])]
    if others:
        raise ClusterConfigError(
            f"{TOKEN_VARIABLE} is not set, but other machines can connect to this job.",
            received={"addresses": others[:3]},
            hint=_HINT,
        )
    return _user_secret()


def _user_secret() -> str:
    """Returns the secret of the current user. The first process that needs it creates the file."""
    directory = os.path.join(tempfile.gettempdir(), f"kdist-{os.geteuid()}")
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory, 0o700)
        opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            _check_private(os.fstat(opened), "another user owns or can access it")
            try:
                return _read(opened)
            except FileNotFoundError:
                _create(opened)
                return _read(opened)
        finally:
            os.close(opened)
    except OSError as error:
        raise ClusterConfigError(
            f"Cannot use the private directory with your secret: {error.strerror or 'unknown error'}.",
            received={"directory": directory},
            hint=f"Remove the directory, set TMPDIR to another directory, or set the secret yourself:\n{EXPORT_TOKEN}",
        ) from error


def _check_private(status: os.stat_result, problem: str) -> None:
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise PermissionError(errno.EACCES, problem)


def _read(directory: int) -> str:
    # Without O_NONBLOCK, a FIFO in place of the file would block forever.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open(os.open("secret", flags, dir_fd=directory), "rb") as file:
        status = os.fstat(file.fileno())
        _check_private(status, "another user owns or can access the file in it")
        content = file.read(_MOST_BYTES) if stat.S_ISREG(status.st_mode) else b""
    if len(content) != 2 * PROOF_BYTES:
        raise OSError(errno.EINVAL, "the file in it does not contain a secret")
    return content.decode("ascii", "replace")


def _create(directory: int) -> None:
    """Creates the file atomically. If several processes do so at once, the first file wins."""
    name = f"new-{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        with open(os.open(name, flags, 0o600, dir_fd=directory), "wb") as file:
            file.write(secrets.token_hex(PROOF_BYTES).encode())
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(name, "secret", src_dir_fd=directory, dst_dir_fd=directory)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=directory)


def prove(secret: str, purpose: str, role: str, nonces: Sequence[bytes], message: bytes = b"") -> bytes:
    """Returns the proof that the sender of a message knows the secret.

    The proof is an HMAC-SHA256 of the other arguments with the secret as the key. It cannot be replayed on
    another connection, for another purpose, or to its sender. `nonces` has one nonce from each side, always in
    the same order. `role` is the role of the sender.

    Example:

    >>> from kdist.cluster.secret import prove
    >>> nonces = [b"of the client", b"of the server"]
    >>> prove("secret", "meeting", "client", nonces) == prove("secret", "meeting", "server", nonces)
    False
    """
    parts = (b"kdist 1", purpose.encode(), role.encode(), *nonces, message)
    covered = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    return hmac.new(secret.encode(), covered, hashlib.sha256).digest()
