"""`kdist bench`, which measures training speed and time shares for several numbers of workers."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdist.cluster.roles import number_of
from kdist.launch.module import run_module
from kdist.launch.plan import count_cores
from kdist.measuring.drawing import COLORS, GREY, Chart, Report, draw_shares
from kdist.measuring.shares import COMPUTE, EXCHANGE, INPUT, MESSAGES, PROGRAM, PYTHON, shares_of
from kdist.tracing import Totals
from kdist.tracing.pace import Pace, pace_of
from kdist.version import __version__


@dataclass(frozen=True)
class Plan:
    """The options of a measurement.

    Args:
        model: "module:function", or `None` for the small built-in network.
        backend: The Keras backend, or `None` for the default of the environment.
        batch_size: The number of rows in a global batch.
        steps: The number of steps per round.
        rounds: The number of rounds, of which kdist reports the median.
    """

    model: str | None = None
    backend: str | None = None
    batch_size: int = 256
    steps: int = 20
    rounds: int = 5


@dataclass(frozen=True)
class Measured:
    """The results for one number of workers.

    Args:
        about: Facts from the chief: the backend, the device, whether compiled programs include the exchange.
        rounds: The totals of each worker in each round.
    """

    about: dict[str, Any]
    rounds: Sequence[Sequence[Totals]]

    @property
    def num_workers(self) -> int:
        """The number of workers."""
        return int(self.about["num_workers"])

    @property
    def steps(self) -> int:
        """The number of steps per round. It may be lower than requested if the data has too few rows."""
        return self.rounds[0][0].steps

    @property
    def is_fused(self) -> bool:
        """Whether the exchange is not measurable. With one replica, there is no exchange."""
        return bool(self.about["exchanges_in_programs"]) and self.about["num_replicas"] > 1

    def paces(self) -> list[Pace]:
        """Returns the speed of each round."""
        return [pace_of(workers, self.about["exchanges_in_programs"]) for workers in self.rounds]

    @property
    def rows_per_second(self) -> float:
        """The rows of global batches per second, in the median round."""
        return statistics.median(pace.rows_per_second for pace in self.paces())

    @property
    def steps_per_second(self) -> float:
        """The steps per second, in the median round."""
        longest = [max(totals.training for totals in workers) for workers in self.rounds]
        return statistics.median(
            workers[0].steps / seconds for workers, seconds in zip(self.rounds, longest, strict=True)
        )

    def shares(self) -> dict[str, float]:
        """Returns the share of the time per activity, averaged over workers and rounds."""
        all_shares = [shares_of(totals, self.is_fused) for workers in self.rounds for totals in workers]
        return {name: statistics.mean(shares[name] for shares in all_shares) for name in all_shares[0]}


@dataclass(frozen=True)
class KerasSpeed:
    """The speed of plain Keras: the same model and batches, without a strategy.

    Args:
        seconds: The seconds of each round.
        rows: The rows per round.
        steps: The steps per round.
    """

    seconds: Sequence[float]
    rows: int
    steps: int

    def as_json(self) -> dict[str, Any]:
        """Returns the speed of the median round, and all rounds."""
        median = statistics.median(self.seconds)
        speeds = {"steps_per_second": self.steps / median, "rows_per_second": self.rows / median}
        return {**speeds, "seconds": list(self.seconds)}


def measure_keras(plan: Plan) -> KerasSpeed:
    """Trains without kdist in one process.

    Raises:
        LaunchError: If the process failed. Its output has been printed.
    """
    return KerasSpeed(**_run(plan, 0, "--without-kdist"))


def measure(plan: Plan, num_workers: int) -> Measured:
    """Trains with `num_workers` workers on this machine, and starts them as `kdist run` does.

    Raises:
        LaunchError: If the workers failed. Their output has been printed.
    """
    result = _run(plan, num_workers)
    rounds = [[Totals(**totals) for totals in workers] for workers in result["rounds"]]
    return Measured(result["about"], rounds)


def _run(plan: Plan, num_workers: int, *more: str) -> dict[str, Any]:
    flags = ["--batch-size", plan.batch_size, "--steps", plan.steps, "--rounds", plan.rounds]
    flags += ["--model", plan.model] if plan.model else []
    with tempfile.TemporaryDirectory(prefix="kdist-bench-") as folder:
        return run_module(
            "kdist.measuring.bench_worker",
            plan.backend,
            num_workers,
            Path(folder) / "result.json",
            *map(str, flags),
            *more,
        )


def efficiency(measured: Measured, first: Measured) -> float:
    """Returns the speed relative to linear scaling from the first result; 1 is ideal.

    This compares replicas, not workers. A single worker may have all GPUs, and two workers half of them each.
    """
    return measured.rows_per_second / _promised(measured, first)


def _promised(measured: Measured, first: Measured) -> float:
    return first.rows_per_second * measured.about["num_replicas"] / first.about["num_replicas"]


def table(everyone: Sequence[Measured], plain: KerasSpeed | None = None) -> list[list[str]]:
    """Returns the rows of the table. The first row is the header, and `-` marks unknown values."""
    head = ["workers", "steps/s", "rows/s", "efficiency", "compute", "exchange", "both", "input", "Python"]
    rows = [_row(measured, everyone[0]) for measured in everyone]
    if plain is not None:
        speeds = plain.as_json()
        numbers = [f"{speeds['steps_per_second']:.2f}", f"{speeds['rows_per_second']:,.0f}"]
        rows.insert(0, ["plain Keras", *numbers, *["-"] * (len(head) - 3)])
    return [head, *rows]


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
    """Returns notes on the table, of one or two sentences each."""
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


def as_json(plan: Plan, everyone: Sequence[Measured], plain: KerasSpeed | None = None) -> dict[str, Any]:
    """Returns all measurements, including each round of each worker."""
    return {
        "kdist": __version__,
        "model": plan.model,
        "batch_size": plan.batch_size,
        "steps": everyone[0].steps,
        "plain_keras": None if plain is None else plain.as_json(),
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


def report(plan: Plan, everyone: Sequence[Measured], plain: KerasSpeed | None = None) -> Report:
    """Returns the table and its charts."""

    def speeds(axes: Any) -> None:
        numbers = [measured.num_workers for measured in everyone]
        rows = [measured.rows_per_second for measured in everyone]
        ideal = [_promised(measured, everyone[0]) for measured in everyone]
        axes.plot(numbers, ideal, color=GREY, linestyle="--", label="ideal")
        axes.plot(numbers, rows, color=COLORS[0], marker="o", label="measured")
        if plain is not None:
            axes.axhline(plain.as_json()["rows_per_second"], color=COLORS[1], label="plain Keras")
        axes.set(xlabel="workers", ylabel="rows/s", xticks=numbers)
        axes.set_ylim(bottom=0)
        axes.legend()

    def shares(axes: Any) -> None:
        draw_shares(axes, [(number_of("worker", one.num_workers), one.shares()) for one in everyone])

    charts = [
        Chart("Speed", "Rows of global batches per second, by number of workers.", speeds),
        Chart("Where the time goes", "Mean over all workers.", shares),
    ]
    return Report("kdist bench", " ".join(notes(plan, everyone)), table(everyone, plain), charts)
