"""Checks of settings that must be equal on all workers: Python, packages, backend, devices, secret."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kdist.cluster import is_loopback
from kdist.cluster.keras_backends import BACKENDS
from kdist.cluster.secret import EXPORT_TOKEN
from kdist.doctor.facts import Facts
from kdist.doctor.report import FAIL, OK, WARN, Line, spread

_MISSING = "not installed"


def judge_software(everyone: Sequence[Facts]) -> Iterator[Line]:
    """Yields the report lines for the facts of one worker or of all workers."""
    yield _python(everyone)
    yield from _packages(everyone)
    yield _backend(everyone)
    if any(facts.devices for facts in everyone):  # unknown before joining
        yield _devices(everyone)
    yield _token(everyone)


def _spread(everyone: Sequence[Facts], value: Callable[[Facts], object]) -> str:
    return spread([(facts.name, value(facts)) for facts in everyone], len(everyone))


def _differ(everyone: Sequence[Facts], value: Callable[[Facts], object]) -> bool:
    return len({str(value(facts)) for facts in everyone}) > 1


def _python(everyone: Sequence[Facts]) -> Line:
    says = _spread(everyone, lambda facts: facts.python)
    if _differ(everyone, lambda facts: facts.python):
        status = FAIL if _differ(everyone, lambda facts: facts.python.split(".")[:2]) else WARN
        return Line(status, "python", says, "Use the same Python version on all workers")
    return Line(OK, "python", f"{says}, {everyone[0].executable}")


def _packages(everyone: Sequence[Facts]) -> Iterator[Line]:
    alike = []
    for package in dict.fromkeys(name for facts in everyone for name in facts.versions):

        def version(facts: Facts, package: str = package) -> str:
            return facts.versions.get(package, "not checked")

        says = f"{package} {_spread(everyone, version)}"
        if any(version(facts) == _MISSING for facts in everyone):
            yield Line(FAIL, "packages", says, command=f"pip install {package}")
        elif _differ(everyone, version):
            status = WARN if package == "numpy" else FAIL
            wanted = f"{package}=={version(everyone[0]).split()[0]}"
            remedy, command = ("On the other workers", f"pip install {wanted}")
            if package == "kdist":  # kdist is not on PyPI
                remedy, command = ("On all workers, in the same checkout of kdist", "pip install .")
            yield Line(status, "packages", says, remedy, command)
        else:
            alike.append(f"{package} {version(everyone[0])}")
    if alike:
        yield Line(OK, "packages", ", ".join(alike))


def _backend(everyone: Sequence[Facts]) -> Line:
    broken = [facts for facts in everyone if facts.import_error]
    says = _spread(everyone, lambda facts: " ".join([facts.backend[0], f"({facts.backend[1]})"]))
    if any(facts.backend[0] not in BACKENDS for facts in everyone):
        says = f"{says}; kdist supports {', '.join(BACKENDS)}"
        return Line(FAIL, "backend", says, "Choose one", "export KERAS_BACKEND=jax")
    if _differ(everyone, lambda facts: facts.backend[0]):
        command = f"export KERAS_BACKEND={everyone[0].backend[0]}"
        return Line(FAIL, "backend", says, "Set the same backend on all workers", command)
    if broken:
        name = broken[0].backend[0]
        reasons = spread([(facts.name, facts.import_error) for facts in broken], len(everyone))
        command = f"KERAS_BACKEND={name} python -c 'import keras'"
        return Line(FAIL, "backend", f"{name} cannot be imported: {reasons}", "See the whole error", command)
    return Line(OK, "backend", says)


def _devices(everyone: Sequence[Facts]) -> Line:
    says = _spread(everyone, lambda facts: ", ".join(facts.devices))
    if _differ(everyone, lambda facts: (len(facts.devices), facts.accelerators)):
        remedy = "Give all workers the same number and kind of devices, for example"
        return Line(FAIL, "devices", says, remedy, "export CUDA_VISIBLE_DEVICES=0")
    unused = [facts for facts in everyone if facts.devices and facts.gpus and not facts.accelerators]
    if unused:
        backend = unused[0].backend[0]
        who = spread([(facts.name, f"{facts.gpus} GPUs") for facts in unused], len(everyone))
        says = f"{says}; {backend} does not see {who}"
        return Line(
            WARN, "devices", says, f"Install {backend} with CUDA, then check the devices", "kdist info"
        )
    return Line(OK, "devices", says)


def _token(everyone: Sequence[Facts]) -> Line:
    do, command = "Create a secret once, and set it on all workers", EXPORT_TOKEN
    # If the secrets differ, this shows their fingerprints, which do not reveal them.
    if _differ(everyone, lambda facts: facts.token):
        says = _spread(everyone, lambda facts: f"secret {facts.token}" if facts.token else "none")
        return Line(FAIL, "token", says, do, command)
    if everyone[0].token:
        return Line(OK, "token", "the same on all workers")
    hosts = {host for facts in everyone for host in (*facts.resolved, *facts.unresolved)}
    if all(map(is_loopback, hosts)):
        return Line(OK, "token", "not set; on one machine, the workers use a secret of the user")
    return Line(WARN, "token", "not set; the workers cannot verify connections to their ports", do, command)
