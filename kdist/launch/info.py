"""`kdist info`: prints the versions, devices and cluster variables for a bug report."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Mapping

from kdist.cluster import alone_by_mistake, keras_backend_choice, survey
from kdist.cluster.keras_backends import BACKENDS
from kdist.errors import ClusterConfigError
from kdist.launch.plan import count_cores

_PACKAGES = {
    "kdist": ("kdist",),
    "keras": ("keras", "keras-nightly"),
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tensorflow-rocm", "tf-nightly"),
    "jax": ("jax",),
    "torch": ("torch",),
    "numpy": ("numpy",),
}
# A separate process, because a broken installation can crash or hang, and a query must not occupy a device.
_DEVICES = {
    "tensorflow": (
        "import tensorflow as tf; names = [d.name for d in tf.config.list_logical_devices()]; "
        "print(*[name.split('device:')[-1].lower() for name in names], sep=', ')"
    ),
    "jax": (
        "import jax; kinds = [(f'{d.platform}:{d.id}', d.device_kind) for d in jax.devices()]; "
        "print(*[n if n.startswith(kind) else f'{n} ({kind})' for n, kind in kinds], sep=', ')"
    ),
    "torch": (
        "import torch; n = torch.cuda.device_count(); "
        "print(*[f'gpu:{i} ({torch.cuda.get_device_name(i)})' for i in range(n)] or ['cpu:0'], sep=', ')"
    ),
}
_WIDEST = 300


def version_of(package: str) -> str:
    """Returns the version of a package by its import name, or "not installed", without importing it."""
    for name in _PACKAGES.get(package, (package,)):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return version if name == package else f"{version} ({name})"
    if package == "kdist":
        return "not installed (running from a source tree)"
    return "not installed"


def devices_of(backend: str, environ: Mapping[str, str] | None = None, timeout: float = 60.0) -> str:
    """Returns the devices of a backend, or the reason why they cannot be listed. Runs a separate process."""
    if backend not in _DEVICES:
        return f"unknown backend; kdist supports {', '.join(BACKENDS)}"
    quiet = {**(os.environ if environ is None else environ), "TF_CPP_MIN_LOG_LEVEL": "3"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _DEVICES[backend]],
            env=quiet, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"no response within {timeout:g} s"
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return f"cannot list devices: {lines[-1] if lines else f'exit code {done.returncode}'}"
    lines = done.stdout.splitlines()
    return lines[-1] if lines else "none"


def _memory() -> str:
    try:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return "unknown"
    return f"{size / 2**30:.1f} GiB"


def cluster_lines(environ: Mapping[str, str] | None = None) -> list[str]:
    """Returns lines that describe each cluster source, and why kdist uses it or not."""
    reports = survey(environ)
    lines = []
    for report in reports:
        lines.append(
            f"  {report.source}: {report.says}; {'used' if report.won else 'not used'} because {report.why}"
        )
        for name, value in report.variables.items():
            lines.append(f"    {name}={value if len(value) <= _WIDEST else value[:_WIDEST] + '…'}")
    if not any(report.won for report in reports):
        lines.append("  default: one worker; used because no variable describes a cluster")
    with contextlib.suppress(ClusterConfigError):  # the line of the source reports the error
        if warning := alone_by_mistake(os.environ if environ is None else environ):
            lines.append(f"  warning: {warning}")
    return lines


def print_info() -> int:
    """Prints the report, and returns the exit code."""
    print(f"python: {platform.python_version()} ({sys.executable})")
    for package in _PACKAGES:
        print(f"{package}: {version_of(package)}")
    print(f"os: {platform.platform()}, {count_cores()} cores, {_memory()} memory")
    backend, why = keras_backend_choice()
    print(f"backend: {backend} ({why})")
    print("devices: ", end="", flush=True)  # the query takes seconds
    print(devices_of(backend), flush=True)
    print("cluster sources, in order of priority:")
    print("\n".join(cluster_lines()))
    return 0
