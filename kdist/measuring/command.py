"""`kdist bench` and `kdist plot`."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence

from kdist.errors import InvalidArgumentError
from kdist.launch.options import whole_number
from kdist.whole_files import check_output, whole_file

_BENCH_EXAMPLES = """examples:
  kdist bench --num-workers 1,2
  kdist bench --model train:make_model --num-workers 1,2,4 --batch-size 512 --plot bench.html
  kdist bench --backend torch --num-workers 2 --json bench.json

MODULE:FUNCTION returns a compiled model, or (model, x, y); without x and y, data are made up.
"""
_PLOT_EXAMPLES = """examples:
  kdist plot runs/first
  kdist plot runs/first --output report.png
"""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the commands to the command line of kdist."""
    bench = commands.add_parser(
        "bench", help="how fast a model trains here, by the number of workers", epilog=_BENCH_EXAMPLES
    )
    bench.add_argument(
        "--model", metavar="MODULE:FUNCTION", help="makes your model; by default a small one of its own"
    )
    bench.add_argument(
        "--num-workers", "-n", default="1,2", metavar="N,N,…", help="which numbers (default 1,2)"
    )
    bench.add_argument("--backend", choices=("tensorflow", "jax", "torch"))
    bench.add_argument(
        "--batch-size", default="256", metavar="N", help="rows of a global batch (default 256)"
    )
    bench.add_argument("--steps", default="20", metavar="N", help="of each of five rounds (default 20)")
    bench.add_argument("--json", metavar="FILE", help="write all that was measured")
    bench.add_argument("--plot", metavar="FILE", help="draw it, as .html or .png")
    plot = commands.add_parser("plot", help="draw the records and the trace of a run", epilog=_PLOT_EXAMPLES)
    plot.add_argument(
        "folder", metavar="FOLDER", help="where kdist.callbacks.RunLog and KDIST_TRACE have written"
    )
    plot.add_argument("--output", "-o", default="", metavar="FILE", help="(default FOLDER/report.html)")


def main(options: argparse.Namespace) -> int:
    """Runs one of the commands."""
    return _bench(options) if options.command == "bench" else _plot(options)


def _plot(options: argparse.Namespace) -> int:
    from kdist.measuring import drawing, run_report

    if not os.path.isdir(options.folder):
        raise InvalidArgumentError(
            "FOLDER must be there, and be that of a run.",
            received={"folder": options.folder},
            hint='Write one: model.fit(…, callbacks=[kdist.callbacks.RunLog("runs/first")])',
        )
    output = options.output or os.path.join(options.folder, "report.html")
    drawing.check_output(output)
    drawing.write(run_report.read_report(options.folder), output)
    print(output)
    return 0


def _bench(options: argparse.Namespace) -> int:
    from kdist.measuring import bench, drawing

    numbers = [whole_number("--num-workers", text.strip(), 1) for text in options.num_workers.split(",")]
    plan = bench.Plan(
        options.model,
        options.backend,
        whole_number("--batch-size", options.batch_size, 1),
        whole_number("--steps", options.steps, 1),
    )
    if options.plot:
        drawing.check_output(options.plot)
    if options.json:
        check_output(options.json)
    everyone = []
    for number in sorted(set(numbers)):
        print(f"{number} worker(s) …", flush=True)
        everyone.append(bench.measure(plan, number))
    print("\n" + _lines(bench.table(everyone)) + "\n")
    print("\n".join(bench.notes(plan, everyone)))
    if options.json:
        with whole_file(options.json) as file:
            file.write(json.dumps(bench.as_json(plan, everyone), indent=1).encode() + b"\n")
    if options.plot:
        drawing.write(bench.report(plan, everyone), options.plot)
    return 0


def _lines(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(word.rjust(width) for word, width in zip(row, widths, strict=True)) for row in rows
    )
