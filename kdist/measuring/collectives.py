"""`kdist bench --collectives`: the time of `all_reduce` by size, over the framework's own all-reduce."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from kdist.measuring.contenders import spread
from kdist.measuring.drawing import COLORS, Chart, Report, draw_spread

SIZES = tuple(4**power * 1024 for power in range(9))  # bytes: 1 KiB to 64 MiB
_KINDS = ("kdist", "raw")


def report(everyone: Sequence[dict[str, Any]]) -> Report:
    """Returns the table and its charts."""
    rows = [["workers", "bytes", "kdist µs", "raw µs", "kdist GB/s", "raw GB/s", "time of kdist over raw"]]
    lines: dict[str, list[tuple[float, list[float]]]] = {}
    for result in everyone:
        for one in result["sizes"]:
            size = one["bytes"]
            speeds = [f"{size / statistics.median(one[kind]) / 1e9:.3f}" for kind in _KINDS]
            times = {kind: [seconds * 1e6 for seconds in one[kind]] for kind in _KINDS}
            ratios = [ours / raw for ours, raw in zip(one["kdist"], one["raw"], strict=True)]
            told = [spread(times[kind], ",.0f") for kind in _KINDS]
            rows.append([str(result["num_workers"]), f"{size:,}", *told, *speeds, spread(ratios)])
            for kind in _KINDS:
                lines.setdefault(f"{kind}, {result['num_workers']} workers", []).append((size, times[kind]))

    def draw(axes: Any) -> None:
        for color, (label, points) in zip(COLORS * len(lines), lines.items(), strict=False):
            draw_spread(axes, points, color, label)
        axes.set(xlabel="bytes", ylabel="µs", xscale="log", yscale="log")
        axes.legend()

    lead = f"all_reduce of float32 on {everyone[0]['backend']} over {everyone[0]['communication']}, median of rounds."
    lead += " Brackets: lowest and highest. GB/s: bytes of one worker by time. Below 1, kdist is faster."
    return Report("kdist bench --collectives", lead, rows, [Chart("all_reduce", "Time of a call.", draw)])


def measure(rounds: int, sizes: Sequence[int] = SIZES) -> dict[str, Any]:
    """Runs in every worker. Returns facts, and the seconds of a call in each round, by size."""
    import keras

    import kdist
    from kdist.measuring.native import native

    strategy, raw = kdist.MultiWorkerMirroredStrategy(), native()

    @kdist.function
    def total(values: Any) -> Any:
        def add(x: Any) -> Any:
            context = kdist.get_replica_context()
            return context and context.all_reduce("SUM", x)

        return strategy.run(add, args=(values,))

    def seconds(call: Callable[[], object], calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            raw.wait(call())
        return (time.perf_counter() - start) / calls

    def times_of(size: int) -> dict[str, Any]:
        # Each replica has its own array, because XLA computes the sum of a constant without an exchange.
        values = strategy.experimental_distribute_values_from_function(
            lambda context: keras.ops.ones(size // 4) * (1 + context.replica_id_in_sync_group)
        )
        both = (
            lambda: strategy.experimental_local_results(total(values))[0],
            raw.all_reduce(strategy, size // 4),
        )
        calls = min(max(2**22 // size, 1), 20)  # a clock cannot measure a single short call
        times = [[seconds(call, calls) for call in both] for _ in range(1 + rounds)]
        ours, theirs = zip(*times[1:], strict=True)  # the first round compiles
        return {"bytes": size, "kdist": ours, "raw": theirs}

    runtime = strategy.runtime
    about = {"backend": keras.backend.backend(), "communication": runtime.communication}
    about |= {"num_workers": runtime.num_workers, "device": runtime.devices[0]}
    return {**about, "sizes": [times_of(size) for size in sizes]}
