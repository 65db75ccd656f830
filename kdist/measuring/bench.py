"""`kdist bench`, which measures training speed and time shares for several numbers of workers."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kdist.cluster.roles import number_of
from kdist.launch.local_workers import run_module
from kdist.launch.plan import count_cores
from kdist.measuring.contenders import CONTENDERS, Compared, spread
from kdist.measuring.drawing import COLORS, GREY, Chart, Report, draw_shares, draw_spread
from kdist.measuring.shares import COMPUTE, EXCHANGE, INPUT, MESSAGES, PROGRAM, PYTHON, shares_of
from kdist.tracing import Totals
from kdist.tracing.pace import Pace, pace_of
from kdist.version import __version__


@dataclass(frozen=True)
class Plan:
    """The options of a measurement."""

    model: str | None = None  # "module:function", or `None` for the small built-in network
    backend: str | None = None  # the Keras backend, or `None` for the default of the environment
    batch_size: int = 256  # rows of a global batch
    steps: int = 20  # per round
    rounds: int = 5  # kdist reports their median


@dataclass(frozen=True)
class Measured:
    """The results for one number of workers."""

    # Facts from the chief: the backend, the device, whether compiled programs include the exchange.
    about: dict[str, Any]
    rounds: Sequence[Sequence[Totals]]  # the totals of each worker in each round

    @classmethod
    def of(cls, results: Sequence[dict[str, Any]]) -> Measured:
        """Joins the results of jobs with equal workers."""
        rounds = [workers for result in results for workers in result["rounds"]]
        return cls(results[0]["about"], [[Totals(**totals) for totals in workers] for workers in rounds])

    @property
    def num_workers(self) -> int:
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
    def seconds(self) -> list[float]:
        """The seconds of the slowest worker in each round."""
        return [max(totals.training for totals in workers) for workers in self.rounds]

    @property
    def steps_per_second(self) -> float:
        """The steps per second, in the median round."""
        return statistics.median(self.steps / seconds for seconds in self.seconds)

    def over(self, compared: Compared) -> list[float]:
        """Returns the time divided by the time of a contender, per round. Below 1, kdist is faster."""
        return [ours / theirs for ours, theirs in zip(self.seconds, compared.seconds, strict=True)]

    def shares(self) -> dict[str, float]:
        """Returns the share of the time per activity, averaged over workers and rounds."""
        all_shares = [shares_of(totals, self.is_fused) for workers in self.rounds for totals in workers]
        return {name: statistics.mean(shares[name] for shares in all_shares) for name in all_shares[0]}


def measure(
    plan: Plan, numbers: Sequence[int], contenders: Sequence[str] = ()
) -> tuple[list[Measured], list[Compared]]:
    """Trains with each number of workers on this machine, with kdist and with contenders.

    With contenders, each round consists of new jobs, one after another, so that other load affects all alike.

    Raises:
        LaunchError: If the workers failed. Their output has been printed.
    """
    jobs = [("kdist", number) for number in numbers]
    jobs += [(name, number) for name in contenders for number in ([0] if name == "keras" else numbers)]
    results: dict[tuple[str, int], list[dict[str, Any]]] = {job: [] for job in jobs}
    turns = plan.rounds if contenders else 1
    for turn in range(turns):
        for name, number in jobs:
            print(f"round {turn + 1} of {turns}, {CONTENDERS[name][0]}: ", end="") if contenders else None
            results[name, number].append(run(plan, number, name, plan.rounds // turns))
    ours = [Measured.of(results.pop(("kdist", number))) for number in numbers]
    return ours, [
        Compared(*job, [s for part in found for s in part["seconds"]], found[-1]["loss"])
        for job, found in results.items()
    ]


def run(plan: Plan, num_workers: int, kind: str, rounds: int) -> dict[str, Any]:
    """Runs a job that measures kdist, a contender or collectives, and returns its result as JSON."""
    print(number_of("worker", num_workers) if num_workers else "one device", "…", flush=True)
    flags = ["--kind", kind, "--batch-size", plan.batch_size, "--steps", plan.steps, "--rounds", rounds]
    flags += ["--model", plan.model] if plan.model else []
    with tempfile.TemporaryDirectory(prefix="kdist-bench-") as folder:
        result = Path(folder) / "result.json"
        module = "kdist.measuring.bench_worker"
        return run_module(module, plan.backend, num_workers, result, *map(str, flags))


def efficiency(measured: Measured, first: Measured) -> float:
    """Returns the speed relative to linear scaling from the first result; 1 is ideal.

    This compares replicas, not workers. A single worker may have all GPUs, and two workers half of them each.
    """
    return measured.rows_per_second / _promised(measured, first)


def _promised(measured: Measured, first: Measured) -> float:
    return first.rows_per_second * measured.about["num_replicas"] / first.about["num_replicas"]


def table(everyone: Sequence[Measured]) -> list[list[str]]:
    """Returns the rows of the table. The first row is the header, and `-` marks unknown values."""
    head = ["workers", "steps/s", "rows/s", "efficiency", "compute", "exchange", "both", "input", "Python"]
    return [head, *(_row(measured, everyone[0]) for measured in everyone)]


def comparison(everyone: Sequence[Measured], compared: Sequence[Compared]) -> list[list[str]]:
    """Returns the rows of the table of contenders; empty without contenders."""
    rows = [["workers", "trained by", "steps/s", "time of kdist over it"]]
    for measured in everyone:
        number, steps = str(measured.num_workers), measured.steps
        rows.append([number, "kdist", spread([steps / seconds for seconds in measured.seconds]), "-"])
        for one in _beside(measured, compared):
            speeds = spread([steps / seconds for seconds in one.seconds])
            rows.append([number, CONTENDERS[one.name][0], speeds, spread(measured.over(one))])
    return rows if compared else []


def _beside(measured: Measured, compared: Sequence[Compared]) -> list[Compared]:
    """Returns the contenders for the same number of workers. Plain Keras is a contender for every number."""
    return [one for one in compared if one.num_workers in (0, measured.num_workers)]


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


def notes(plan: Plan, everyone: Sequence[Measured], compared: Sequence[Compared] = ()) -> list[str]:
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
    if compared:
        keras = "Plain Keras trains on one device. " if any(one.name == "keras" for one in compared) else ""
        said.append(f"Below 1, kdist is faster. {keras}Brackets: lowest and highest.")
    if len(everyone) > 1 and everyone[0].about["device"].startswith("cpu"):
        said.append(
            f"All workers share the {count_cores()} cores of this machine, so more workers do not add computing power."
        )
    return said


def as_json(plan: Plan, everyone: Sequence[Measured], compared: Sequence[Compared] = ()) -> dict[str, Any]:
    """Returns all measurements, including each round of each worker."""
    return {
        "kdist": __version__,
        "model": plan.model,
        "batch_size": plan.batch_size,
        "steps": everyone[0].steps,
        "contenders": [asdict(one) for one in compared],
        "results": [
            {
                **measured.about,
                "steps_per_second": measured.steps_per_second,
                "rows_per_second": measured.rows_per_second,
                "efficiency": efficiency(measured, everyone[0]),
                "shares": measured.shares(),
                "over": {one.name: measured.over(one) for one in _beside(measured, compared)},
                "rounds": [[totals.as_json() for totals in workers] for workers in measured.rounds],
            }
            for measured in everyone
        ],
    }


def report(plan: Plan, everyone: Sequence[Measured], compared: Sequence[Compared] = ()) -> Report:
    """Returns the table and its charts."""

    def speeds(axes: Any) -> None:
        numbers = [measured.num_workers for measured in everyone]
        ours = [(one.num_workers, [pace.rows_per_second for pace in one.paces()]) for one in everyone]
        ideal = [_promised(measured, everyone[0]) for measured in everyone]
        axes.plot(numbers, ideal, color=GREY, linestyle="--", label="ideal")
        draw_spread(axes, ours, COLORS[0], "kdist" if compared else "measured")
        for color, name in zip(COLORS[1:], dict.fromkeys(one.name for one in compared), strict=False):
            theirs = [
                (measured.num_workers, [measured.rounds[0][0].rows / seconds for seconds in one.seconds])
                for measured in everyone
                for one in _beside(measured, compared)
                if one.name == name
            ]
            draw_spread(axes, theirs, color, CONTENDERS[name][0])
        axes.set(xlabel="workers", ylabel="rows/s", xticks=numbers)
        axes.set_ylim(bottom=0)
        axes.legend()

    def shares(axes: Any) -> None:
        draw_shares(axes, [(number_of("worker", one.num_workers), one.shares()) for one in everyone])

    charts = [
        Chart("Speed", "Rows of global batches per second, by number of workers.", speeds),
        Chart("Where the time goes", "Mean over all workers.", shares),
    ]
    lead = " ".join(notes(plan, everyone, compared))
    return Report("kdist bench", lead, table(everyone), charts, comparison(everyone, compared))
