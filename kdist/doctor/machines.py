"""Checks of the machines and the network: cluster, host names, ports, cores, limits, clocks, directories."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence

from kdist.cluster import is_loopback, split_address
from kdist.doctor.facts import Facts
from kdist.doctor.report import FAIL, OK, REPORT_BUG, WARN, Line, names_of, spread

_MOST_OFFSET = 1.0  # seconds
_FEW_FILES = 1024
_LITTLE_MEMORY = 128 << 20
_NOTHING = "does not describe a cluster"


def judge_machines(everyone: Sequence[Facts]) -> Iterator[Line]:
    """Yields the report lines for the facts of one worker or of all workers."""
    yield from _cluster(everyone)
    yield _hosts(everyone)
    yield from _ports(everyone)
    yield from _threads(everyone)
    yield from _limits(everyone)


def _cluster(everyone: Sequence[Facts]) -> Iterator[Line]:
    winners = spread(
        [(f.name, next((s for s, _, won in f.sources if won), "none")) for f in everyone], len(everyone)
    )
    found = False
    for facts in everyone:
        says = next((_without_addresses(says) for _, says, won in facts.sources if won), "")
        for source, other, won in facts.sources:
            if other.startswith("invalid: "):
                found = True
                status, text = FAIL if won else WARN, f"{source} on {facts.name} is {other}"
                yield Line(status, "cluster", text, "See all sources", "kdist info")
            elif not won and other != _NOTHING and _without_addresses(other) != says:
                found = True
                yield Line(
                    WARN,
                    "cluster",
                    f"{winners} describes the cluster, but {source} contradicts it on {facts.name}: {other}",
                    "Unset the variables of the wrong source. To list them, run",
                    "kdist info",
                )
        if found:
            return  # the other workers would repeat it
    single = "no cluster is configured: single worker"
    yield Line(OK, "cluster", single if winners.startswith("none") else f"described by {winners}")


def _without_addresses(says: str) -> str:
    return re.sub(r" \([^)]*\)", "", says)


def _hosts(everyone: Sequence[Facts]) -> Line:
    for facts in everyone:
        for host, why in facts.unresolved.items():
            text = f"{facts.name} cannot resolve {host!r}: {why}"
            return Line(FAIL, "names", text, "On its machine, check the name", f"getent hosts {host}")
    several = len(everyone[0].resolved) > 1
    for facts in everyone:
        own = split_address(facts.address)[0] if facts.address else ""
        for host, number in facts.resolved.items():
            if several and is_loopback(number) and not is_loopback(host):
                says = f"{facts.name} resolves {host!r} to {number}, which other machines cannot reach"
                status = WARN if host == own else FAIL
                remedy = "In /etc/hosts of its machine, set the real address of the host. Check it"
                return Line(status, "names", says, remedy, f"getent hosts {host}")
    count = len({host for facts in everyone for host in facts.resolved})
    hosts = f"{count} host{'s' * (count > 1)} can be resolved"
    return Line(OK, "names", hosts if count else "no addresses to resolve")


def _ports(everyone: Sequence[Facts]) -> Iterator[Line]:
    taken = [facts for facts in everyone if facts.port]
    for facts in taken:
        # All backends listen at the address of worker 0. Only TensorFlow also uses the other addresses.
        is_taken = facts.port.startswith("Cannot listen on port")
        status = FAIL if facts.name == "worker 0" and is_taken else WARN
        advice = ("Check the index of this worker and the order of the hosts. On its machine", "hostname -I")
        if is_taken:
            advice = ("Find the process", f"ss -ltnp 'sport = :{split_address(facts.address)[1]}'")
        yield Line(status, "ports", f"{facts.name} ({facts.address}): {facts.port}", *advice)
    known = [facts for facts in everyone if facts.address]
    if not taken:
        yield Line(
            OK,
            "ports",
            f"free on {names_of([f.name for f in known], len(everyone))}" if known else "no port chosen yet",
        )


def _threads(everyone: Sequence[Facts]) -> Iterator[Line]:
    hosts: dict[str, list[Facts]] = {}
    for facts in everyone:
        hosts.setdefault(facts.host, []).append(facts)
    well = []
    for host, there in hosts.items():
        cores = len({core for facts in there for core in facts.cores})
        threads = sum(facts.threads for facts in there)
        some = f"{cores} core{'s' * (cores > 1)}"
        if len(there) > cores:
            says = f"{len(there)} workers share {some} of {host}"
            most = f"Start at most {cores} worker{'s' * (cores > 1)} on this machine, or give them more cores"
            yield Line(WARN, "threads", says, most)
        elif threads > cores:
            share = cores // len(there)
            command = f"export OMP_NUM_THREADS={share} TF_NUM_INTRAOP_THREADS={share}"
            says = f"the workers on {host} use {threads} threads, but have {some}"
            yield Line(WARN, "threads", says, "Limit the threads per worker, as `kdist run` does", command)
        else:
            well.append(f"{threads} thread{'s' * (threads > 1)} on {some} of {host}")
    if len(well) == len(hosts):
        yield Line(OK, "threads", ", ".join(well[:4]))


def _limits(everyone: Sequence[Facts]) -> Iterator[Line]:
    few = [(f.name, f.open_files) for f in everyone if 0 <= f.open_files < _FEW_FILES]
    little = [
        (f.name, f"{f.shared_memory >> 20} MiB") for f in everyone if 0 <= f.shared_memory < _LITTLE_MEMORY
    ]
    if few:
        says = f"open files: {spread(few, len(everyone))}"
        yield Line(WARN, "limits", says, "Raise the limit", "ulimit -n 4096")
    if little:
        says = f"/dev/shm has {spread(little, len(everyone))}, but NCCL and DataLoader workers need more"
        remedy = "Start the container with more shared memory, for example"
        yield Line(WARN, "limits", says, remedy, "docker run --shm-size=2g")
    if not few and not little:
        yield Line(OK, "limits", "open files and /dev/shm are sufficient")


def judge_clocks(offsets: Sequence[tuple[float, float]]) -> Line:
    """Returns the report line for the seconds by which each worker's clock is ahead, and their uncertainties."""
    far = {i: offset for i, (offset, doubt) in enumerate(offsets) if abs(offset) - doubt > _MOST_OFFSET}
    if far:
        wrong = [f"worker {i} is {abs(s):.1f} s {'ahead' if s > 0 else 'behind'}" for i, s in far.items()]
        says = f"{', '.join(wrong)}; times in logs and of files are not comparable"
        return Line(WARN, "clocks", says, "On the machines with wrong clocks", "timedatectl set-ntp true")
    most = max(abs(offset) + doubt for offset, doubt in offsets)
    return Line(OK, "clocks", f"within {max(most, 0.001) * 1000:.0f} ms")


def judge_shared(folder: str, problems: Sequence[str]) -> Line:
    """Returns the report line for a shared directory. `problems` has one entry per worker, or "" if none."""
    found = {f"worker {i}": text for i, text in enumerate(problems) if text}
    if found:
        says = f"{folder}: {spread(list(found.items()), len(problems))}"
        remedy = "Use a directory that all workers can read and write. On each machine, check its file system"
        command = f"df {folder}" if os.path.isdir(folder) else f"mkdir -p {folder}"
        return Line(FAIL, "shared", says, remedy, command)
    return Line(OK, "shared", f"{folder}: all workers can write and read; files are replaced atomically")


def judge_all_reduce(times: Sequence[float], num_bytes: int, is_right: bool) -> Line:
    """Returns the report line for the times of a single number and of an array of `num_bytes`, in seconds."""
    small, large = times
    says = (
        f"{small * 1000:.1f} ms for one number, {large * 1000:.0f} ms for {num_bytes >> 20} MB "
        f"({num_bytes / 1e6 / max(large, 1e-9):.0f} MB/s)"
    )
    if not is_right:
        return Line(FAIL, "all-reduce", f"{says}, but the sum is wrong", *REPORT_BUG)
    return Line(OK, "all-reduce", says)
