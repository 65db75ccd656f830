"""The commands `kdist bench` and `kdist plot`."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence

from kdist.cluster import environment
from kdist.cluster.keras_backends import BACKENDS
from kdist.errors import InvalidArgumentError
from kdist.launch.options import BACKEND_HELP, whole_number
from kdist.measuring.contenders import CHOICES, read_contenders
from kdist.whole_files import check_output, whole_file

_BENCH_EXAMPLES = """examples:
  kdist bench --num-workers 1,2
  kdist bench --model train:make_model --num-workers 1,2,4 --batch-size 512 --plot bench.html
  kdist bench --backend torch --num-workers 2 --json bench.json
  kdist bench --compare keras,ddp --backend torch
  kdist bench --collectives --num-workers 2

MODULE:FUNCTION returns a compiled model, or (model, x, y). Without x and y, kdist draws random data.
"""
_PLOT_EXAMPLES = """examples:
  kdist plot runs/first
  kdist plot runs/first --output report.png
"""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    bench = commands.add_parser(
        "bench", help="measure training speed for several numbers of workers", epilog=_BENCH_EXAMPLES
    )
    add = bench.add_argument
    add(
        "--model",
        metavar="MODULE:FUNCTION",
        help="function that returns your model (default: a small convolutional network)",
    )
    add(
        "-n",
        "--num-workers",
        default="1,2",
        metavar="COUNT,...",
        help="numbers of workers to compare (default: 1,2)",
    )
    add("--backend", choices=BACKENDS, metavar="BACKEND", help=BACKEND_HELP)
    add("--batch-size", default="256", metavar="ROWS", help="global batch size (default: 256)")
    add("--steps", default="20", metavar="COUNT", help="steps per round (default: 20)")
    add("--rounds", default="5", metavar="COUNT", help="number of rounds (default: 5)")
    add(
        "--compare",
        default="",
        metavar="NAME,...",
        help=f"also train without kdist, by {', '.join(CHOICES)} (default: no comparison)",
    )
    add("--collectives", action="store_true", help="measure all_reduce instead of training, by size")
    add("--json", metavar="FILE", help="write all measurements to FILE")
    add("--plot", metavar="FILE", help="draw a chart to FILE, .html or .png")
    plot = commands.add_parser("plot", help="draw the speed and the timeline of a run", epilog=_PLOT_EXAMPLES)
    plot.add_argument(
        "folder", metavar="DIR", help="directory written by kdist.callbacks.RunLog and KDIST_TRACE"
    )
    plot.add_argument(
        "-o",
        "--output",
        default="",
        metavar="FILE",
        help="output file, .html or .png (default: DIR/report.html)",
    )


def main(options: argparse.Namespace) -> int:
    return _bench(options) if options.command == "bench" else _plot(options)


def _plot(options: argparse.Namespace) -> int:
    from kdist.measuring import drawing, run_report

    if not os.path.isdir(options.folder):
        raise InvalidArgumentError(
            f"No run found: {options.folder!r} is not a directory.",
            hint='Record a run: model.fit(…, callbacks=[kdist.callbacks.RunLog("runs/first")])',
        )
    output = options.output or os.path.join(options.folder, "report.html")
    drawing.check_output(output)
    drawing.write(run_report.read_report(options.folder), output)
    print(output)
    return 0


def _bench(options: argparse.Namespace) -> int:
    from kdist.measuring import bench, collectives, drawing

    named = options.num_workers.split(",")
    numbers = sorted({whole_number("--num-workers", text.strip(), 1) for text in named})
    batch_size = whole_number("--batch-size", options.batch_size, 1)
    steps = whole_number("--steps", options.steps, 1)
    rounds = whole_number("--rounds", options.rounds, 1)
    plan = bench.Plan(options.model, options.backend, batch_size, steps, rounds)
    backend = options.backend or environment.keras_backend_name()
    contenders = read_contenders(options.compare, backend, batch_size, numbers)
    if options.collectives and (contenders or options.model or numbers[-1] == 1):
        raise InvalidArgumentError(
            "--collectives needs at least two workers, and measures no training, so omit --compare and --model.",
            received={"num_workers": numbers, "compare": contenders, "model": options.model},
            hint="For example: kdist bench --collectives --num-workers 2",
        )
    if options.plot:
        drawing.check_output(options.plot)
    if options.json:
        check_output(options.json)
    if options.collectives:
        everyone = [bench.run(plan, number, "collectives", rounds) for number in numbers if number > 1]
        report, found = collectives.report(everyone), {"all_reduce": everyone}
    else:
        measured = bench.measure(plan, numbers, contenders)
        report, found = bench.report(plan, *measured), bench.as_json(plan, *measured)
    for table in (report.table, report.second):
        print("\n" + _lines(table) if table else "")
    print(report.lead.replace(". ", ".\n"))
    if options.json:
        with whole_file(options.json) as file:
            file.write(json.dumps(found, indent=1).encode() + b"\n")
    if options.plot:
        drawing.write(report, options.plot)
    return 0


def _lines(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(word.rjust(width) for word, width in zip(row, widths, strict=True)) for row in rows
    )
