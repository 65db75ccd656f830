"""The fault matrix: after any fault of a worker at any place, the other workers end in time and name it.

A restarted job resumes from its backup, and ends with the weights of an uninterrupted job. These workers have no
launcher, so each of them must end by itself. A thread runs a few cells at a time, because cells mostly wait. Each cell
is a test, which waits for the result of the cell.
"""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest

from tests.fault_cells import CELLS, SAVES, SCRIPT, STEPS, Cell, all_cells, said_by, weights_of
from tests.helpers.processes import BACKENDS, full_unless
from tests.helpers.scripts import RUN, Script

AT_ONCE = 3
TIMEOUT = 300.0


class Runner:
    """Runs cells in a thread: each until all workers have ended and, if `restarts` is set, again from its backup.

    Args:
        folder: The directory to which the workers write.
        cells: The cells of one backend.
    """

    def __init__(self, folder: Path, cells: list[Cell]) -> None:
        self._folder, self._waiting, self._running = folder, list(cells), list[Cell]()
        self._closes = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="fault matrix", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            expected = self._uninterrupted(self._waiting[0].backend)
            while (self._waiting or self._running) and not self._closes:
                while self._waiting and len(self._running) < AT_ONCE:
                    self._running.append(self._waiting.pop(0))
                    self._running[-1].start(self._folder)
                for cell in [cell for cell in self._running if cell.has_ended()]:
                    if not self._goes_on(cell, expected):
                        self._running.remove(cell)
                        cell.done.set()
                time.sleep(0.05)
        except BaseException as error:
            self._error = error

    def _goes_on(self, cell: Cell, expected: list[float]) -> bool:
        try:
            if cell.is_restarted:
                cell.check_restart(expected)
            else:
                cell.check()
                if cell.restarts:
                    cell.restart(self._folder)
                    return True
        except Exception as error:
            cell.problem = str(error).strip() or repr(error)
            for worker in cell.workers:
                worker.kill()
        return False

    def _uninterrupted(self, backend: str) -> list[float]:
        """Returns the weights of a job without a fault."""
        cell = Cell(backend, "none", "begin", 0, 2, True, True, is_restarted=True)
        cell.start(self._folder)
        self._running.append(cell)
        while not cell.has_ended():
            time.sleep(0.05)
        assert cell.workers[0].exit_code == 0, cell.report()
        self._running.remove(cell)
        assert said_by(cell.workers[0], "STEPS") == f"{STEPS} BEGINS"
        return weights_of(cell.workers[0])

    def wait(self, cell: Cell) -> None:
        """Waits until a cell has ended."""
        deadline = time.monotonic() + TIMEOUT
        while not cell.done.wait(0.1):
            if self._error is not None:
                raise self._error
            assert time.monotonic() < deadline, f"not ended within {TIMEOUT:g} s: {self._running}"

    def close(self) -> None:
        """Ends the thread and the workers that it has started."""
        self._closes = True
        self._thread.join(10)
        for worker in itertools.chain.from_iterable(cell.workers for cell in self._running):
            worker.kill()


@pytest.mark.parametrize("first", [0, 7, 100])
def test_eighteen_turns_run_every_kind_at_every_place_on_every_backend(first: int) -> None:
    turns = [cell for now in range(first, first + 18) for b in BACKENDS for cell in all_cells(b, now)]
    chosen = [cell for cell in turns if cell.is_pair]
    for names in (("kind", "place", "backend", "strategy"), ("kind", "victim", "num_workers")):
        met = [{tuple(getattr(cell, n) for n in names) for cell in cells} for cells in (chosen, CELLS)]
        assert met[0] == met[1], names
    restarted = {cell.place for cell in chosen if cell.restarts and not cell.strategy}
    assert restarted >= {*SAVES}


@pytest.fixture(scope="module")
def runner(request: pytest.FixtureRequest, backend: str, tmp_path_factory: Any) -> Iterator[Runner]:
    items = [item for item in request.session.items if item.path == request.path]
    params = [item.callspec.params for item in items if hasattr(item, "callspec")]
    cells = [p["cell"] for p in params if "cell" in p and p["backend"] == backend]
    if request.config.getoption("--full") or request.config.getoption("--kills"):
        for cell in cells:
            cell.restarts = True
    runner = Runner(tmp_path_factory.mktemp(backend), cells)
    yield runner
    runner.close()


@pytest.mark.kills(
    failed_save_not_named="[torch-exception-save-write-1-of-2]",
    fault_hits_all_workers="[torch-exception-validation-1-of-3]",
    heartbeat_ignored="[torch-freeze-step-1-of-2]",
    hung_worker_not_ended="[torch-hang-epoch-end-1-of-3]",
    hung_worker_not_named="[torch-hang-epoch-end-1-of-3]",
    lost_worker_not_named="[torch-kill-validation-0-of-2]",
    resume_nothing_restored_after_a_fault="[torch-kill-save-publish-0-of-2]",
    wait_in_shared_memory_looks_like_progress="[jax-hang-step-0-of-2]",
)
@pytest.mark.parametrize(
    ("backend", "cell"),
    [pytest.param(cell.backend, cell, id=str(cell), marks=full_unless(cell.is_pair)) for cell in CELLS],
    scope="module",
)
@pytest.mark.timeout(TIMEOUT + 30)
def test_the_others_end_and_name_the_worker(
    backend: str, cell: Cell, runner: Runner, record_property: Any
) -> None:
    runner.wait(cell)
    what = f"{cell.strategy} {cell.kind}".strip()
    row = f"{backend}: {what} of worker {cell.victim} of {cell.num_workers}"
    result = "FAIL" if cell.problem else f"{cell.ended_after:.1f} s{' ↺' if cell.is_restarted else '  '}"
    record_property("fault matrix", [row, cell.place, result])
    assert not cell.problem, cell.report()


@pytest.mark.in_turn(4)
@pytest.mark.kills(resume_nothing_restored_by_the_launcher="[jax]")
@pytest.mark.parametrize(
    "backend",
    # All backends use the same launcher, and its workers are not forked. JAX is the fastest to import.
    [pytest.param(backend, marks=full_unless(backend == "jax")) for backend in BACKENDS],
)
def test_the_launcher_starts_again_after_a_hang(backend: str, tmp_path: Path) -> None:
    options = ("--max-restarts", "1", "--hang-timeout", "3", "--inject", "hang:worker=1,step=6")
    command = (*RUN, "-n", "2", "--backend", backend)
    undisturbed = Script(tmp_path, "undisturbed", SCRIPT, {"BACKUP": "other"}, command)
    job = Script(tmp_path, "train", SCRIPT, {}, (*command, *options))
    try:
        assert undisturbed.wait(90) == 0, undisturbed.stderr()
        assert job.wait(90) == 0, job.stderr()
        assert re.search(
            r"──── kdist: worker 1 \([\d.:]+\) failed first: it ended with exit code 70", job.stderr()
        )
        assert (
            "kdist: restart 1 of 1 because worker 1 ended with exit code 70; starting 2 workers."
            in job.stderr()
        )
        assert job.stdout().count("FINISHED") == 2
        # Resumed from the backup after step 2 or 4, although the script starts with different weights.
        assert len(re.findall(r"STEPS (10|8) GOES ON", job.stdout())) == 2, job.stdout()
        numpy.testing.assert_allclose(weights_of(job), weights_of(undisturbed), rtol=1e-5, atol=1e-6)
    finally:
        undisturbed.kill()
        job.kill()
