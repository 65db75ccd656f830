"""`kdist bench`: how fast a model trains on this machine, by the number of workers, and where the time goes."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdist.launch.module import run_module
from kdist.launch.plan import count_cores
from kdist.measuring.drawing import COLORS, GREY, Chart, Report, draw_shares
from kdist.measuring.shares import COMPUTE, EXCHANGE, INPUT, MESSAGES, PROGRAM, PYTHON, shares_of
from kdist.tracing import Totals
from kdist.tracing.pace import Pace, pace_of
from kdist.version import __version__


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Args:
        model: "module:function"; `None` for the small network of `kdist bench` itself.
        backend: The Keras backend; `None` for what the environment says.
        batch_size: Rows of a global batch.
        steps: Steps of a round.
        rounds: How often they are repeated; the median counts.
    """

    model: str | None = None
    backend: str | None = None
    batch_size: int = 256
    steps: int = 20
    rounds: int = 5


@dataclass(frozen=True)
class Measured:
    """What came of one number of workers.

    Args:
        about: What the chief says: the backend, the devices, whether programs exchange inside.
        rounds: What each worker has done in each of them.
    """

    about: dict[str, Any]
    rounds: Sequence[Sequence[Totals]]

    @property
    def num_workers(self) -> int:
        """Of how many workers."""
        return int(self.about["num_workers"])

    @property
    def steps(self) -> int:
        """Steps of a round: fewer than were asked for where there are not as many rows."""
        return self.rounds[0][0].steps

    @property
    def is_fused(self) -> bool:
        """Whether the exchange cannot be told from computing: of one replica, there is none."""
        return bool(self.about["exchanges_in_programs"]) and self.about["num_replicas"] > 1

    def paces(self) -> list[Pace]:
        """How fast each round was."""
        return [pace_of(workers, self.about["exchanges_in_programs"]) for workers in self.rounds]

    @property
    def rows_per_second(self) -> float:
        """Rows of global batches, of the median round."""
        return statistics.median(pace.rows_per_second for pace in self.paces())

    @property
    def steps_per_second(self) -> float:
        """Steps, of the median round."""
        longest = [max(totals.training for totals in workers) for workers in self.rounds]
        return statistics.median(
            workers[0].steps / seconds for workers, seconds in zip(self.rounds, longest, strict=True)
        )

    def shares(self) -> dict[str, float]:
        """Where the time went, as a mean over workers and rounds."""
        all_shares = [shares_of(totals, self.is_fused) for workers in self.rounds for totals in workers]
        return {name: statistics.mean(shares[name] for shares in all_shares) for name in all_shares[0]}


def measure(plan: Plan, num_workers: int) -> Measured:
    """Trains on so many workers of this machine, started as `kdist run` starts them.

    Raises:
        LaunchError: They failed; what they said has been printed.
    """
    flags = ["--batch-size", plan.batch_size, "--steps", plan.steps, "--rounds", plan.rounds]
    flags += ["--model", plan.model] if plan.model else []
    with tempfile.TemporaryDirectory(prefix="kdist-bench-") as folder:
        result = run_module(
            "kdist.measuring.bench_worker",
            plan.backend,
            num_workers,
            Path(folder) / "result.json",
            *map(str, flags),
        )
    rounds = [[Totals(**totals) for totals in workers] for workers in result["rounds"]]
    return Measured(result["about"], rounds)


def efficiency(measured: Measured, first: Measured) -> float:
    """Returns how much of what the first number of workers promises this one has kept; 1 is all.

    Replicas are what promises: a single worker may have all GPUs of the machine, of which two have a half each.
    """
    return measured.rows_per_second / _promised(measured, first)


def _promised(measured: Measured, first: Measured) -> float:
    return first.rows_per_second * measured.about["num_replicas"] / first.about["num_replicas"]


def table(everyone: Sequence[Measured]) -> list[list[str]]:
    """Returns the rows of the table, the first of which is its head; `-` stands for what cannot be told."""
    head = ["workers", "steps/s", "rows/s", "efficiency", "compute", "exchange", "both", "input", "Python"]
    return [head, *(_row(measured, everyone[0]) for measured in everyone)]


def _row(measured: Measured, first: Measured) -> list[str]:
    shares = measured.shares()
    both = sum(shares[name] for name in (PROGRAM, MESSAGES, COMPUTE, EXCHANGE) if name in shares)
    told = ["-", "-"] if measured.is_fused else [f"{shares[name]:.0%}" for name in (COMPUTE, EXCHANGE)]
    return [
        str(measured.num_workers),
        f"{measured.steps_per_second:.2f}",
        f"{measured.rows_per_second:,.0f}",
        f"{efficiency(measured, first):.0%}",
        *told,
        *(f"{share:.0%}" for share in (both, shares[INPUT], shares[PYTHON])),
    ]


def notes(plan: Plan, everyone: Sequence[Measured]) -> list[str]:
    """Returns what is to be known of the table, a sentence or two each."""
    steps, rows = everyone[0].steps, everyone[0].rounds[0][0].rows
    said = [
        f"{plan.model or 'A small convolutional network'} on {everyone[0].about['backend']}: global batch size "
        f"{min(plan.batch_size, rows)}, median of {len(everyone[0].rounds)} rounds with {steps} steps each."
    ]
    if rows < plan.batch_size * plan.steps:
        said.append(
            f"The data has only {rows:,} rows, fewer than {plan.steps} steps of {plan.batch_size} rows need."
        )
    if any(measured.is_fused for measured in everyone):
        said.append("-: not measured, because the compiled step includes the exchange.")
    if len(everyone) > 1 and everyone[0].about["device"].startswith("cpu"):
        said.append(
            f"All workers share the {count_cores()} cores of this machine, so more workers do not add computing power."
        )
    return said


def as_json(plan: Plan, everyone: Sequence[Measured]) -> dict[str, Any]:
    """Returns all that was measured, the rounds of single workers too."""
    return {
        "kdist": __version__,
        "model": plan.model,
        "batch_size": plan.batch_size,
        "steps": everyone[0].steps,
        "results": [
            {
                **measured.about,
                "steps_per_second": measured.steps_per_second,
                "rows_per_second": measured.rows_per_second,
                "efficiency": efficiency(measured, everyone[0]),
                "shares": measured.shares(),
                "rounds": [[totals.as_json() for totals in workers] for workers in measured.rounds],
            }
            for measured in everyone
        ],
    }


def report(plan: Plan, everyone: Sequence[Measured]) -> Report:
    """Returns the table and its charts."""

    def speeds(axes: Any) -> None:
        numbers = [measured.num_workers for measured in everyone]
        rows = [measured.rows_per_second for measured in everyone]
        ideal = [_promised(measured, everyone[0]) for measured in everyone]
        axes.plot(numbers, ideal, color=GREY, linestyle="--", label="ideal")
        axes.plot(numbers, rows, color=COLORS[0], marker="o", label="measured")
        axes.set(xlabel="workers", ylabel="rows/s", xticks=numbers)
        axes.set_ylim(bottom=0)
        axes.legend()

    def shares(axes: Any) -> None:
        draw_shares(axes, [(f"{one.num_workers} worker(s)", one.shares()) for one in everyone])

    charts = [
        Chart("Speed", "Rows of global batches per second, by number of workers.", speeds),
        Chart("Where the time goes", "Mean over all workers.", shares),
    ]
    return Report("kdist bench", " ".join(notes(plan, everyone)), table(everyone), charts)
