"""TLS for calls between the tasks of a job. Each side proves that it has the job's secret without sending it.

All tasks derive the same private key from the secret. A task presents a certificate that is signed with this
key, and trusts only certificates that are signed with this key.
"""

from __future__ import annotations

import datetime
import functools
import importlib
from types import ModuleType

from kdist.errors import InvalidArgumentError

NAME = "kdist"
"""The host name in the certificates. The real name is unknown here, for example behind a load balancer."""
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551  # the order of the curve P-256
_FIRST, _LAST = datetime.datetime(2000, 1, 1), datetime.datetime(9999, 1, 1)  # clocks may be wrong


def required(name: str) -> ModuleType:
    """Imports and returns a module of a package that only parameter servers need."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InvalidArgumentError(
            f"Cannot import {name}, which parameter servers on JAX and PyTorch need: {error}.",
            hint="In your checkout of kdist, run: pip install '.[servers]'",
        ) from error


def grpc() -> ModuleType:
    return required("grpc")


def client_credentials(secret: str) -> object:
    """Returns the credentials of a gRPC channel that connects only to tasks with the secret."""
    key, certificate, root = _identity(secret)
    return grpc().ssl_channel_credentials(root, key, certificate)


def server_credentials(secret: str) -> object:
    """Returns the credentials of a gRPC server that accepts only tasks with the secret."""
    key, certificate, root = _identity(secret)
    return grpc().ssl_server_credentials([(key, certificate)], root, require_client_auth=True)


@functools.lru_cache(maxsize=8)
def _identity(secret: str) -> tuple[bytes, bytes, bytes]:
    """Returns the private key, the certificate to present and the certificate to trust, as PEM."""
    x509 = required("cryptography.x509")
    hashes, serialization, hkdf, ec = (
        required(f"cryptography.hazmat.primitives.{name}")
        for name in ("hashes", "serialization", "kdf.hkdf", "asymmetric.ec")
    )
    # 128 bits more than the order of the curve, so that all keys are equally likely.
    derivation = hkdf.HKDF(hashes.SHA256(), length=48, salt=None, info=b"kdist parameter servers")
    number = int.from_bytes(derivation.derive(secret.encode()), "big") % (_ORDER - 1) + 1
    key = ec.derive_private_key(number, ec.SECP256R1())

    def certificate(name: str, is_root: bool) -> bytes:
        # Signatures are random, so the certificates of two tasks differ even with the same key. Therefore a
        # task does not trust particular certificates, but a root certificate with the common name and key.
        subject, issuer = (
            x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, one)]) for one in (name, "kdist job")
        )
        made = x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
        made = made.not_valid_before(_FIRST).not_valid_after(_LAST)
        made = made.add_extension(x509.BasicConstraints(is_root, None), critical=True)
        if not is_root:
            made = made.add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
        return made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return pem, certificate(NAME, False), certificate("kdist job", True)
