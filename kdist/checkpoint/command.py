"""`kdist checkpoint show|verify|convert`. `show` and `verify` import neither Keras nor a backend."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

from kdist.checkpoint import layout, storage
from kdist.checkpoint.checked_reading import read_index, verify
from kdist.checkpoint.index import Index
from kdist.cluster.roles import number_of
from kdist.errors import CheckpointError, KdistError

_EXAMPLES = """examples:
  kdist checkpoint show checkpoints
  kdist checkpoint verify checkpoints/ckpt-12
  kdist checkpoint convert checkpoints/ckpt-12 model.keras
  kdist checkpoint convert checkpoints/ckpt-12 model.weights.h5 --model train:make_model
"""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    checkpoint = commands.add_parser(
        "checkpoint",
        help="inspect, verify or convert a checkpoint",
        epilog=_EXAMPLES,
    )
    actions = checkpoint.add_subparsers(dest="action", required=True, metavar="ACTION")
    path_help = "checkpoint, or directory of checkpoints (the newest is used)"
    actions.add_parser("show", help="list the contents").add_argument("path", help=path_help)
    actions.add_parser("verify", help="read every byte and compare checksums").add_argument(
        "path", help=path_help
    )
    convert = actions.add_parser("convert", help="write a file that Keras can open without kdist")
    convert.add_argument("path", help=path_help)
    convert.add_argument("output", help="output file, .weights.h5 or .keras")
    convert.add_argument("--name", help="name of the model, if the checkpoint contains several")
    convert.add_argument(
        "--model",
        metavar="MODULE:FUNCTION",
        help="function that builds the model, if Keras cannot build it from its configuration",
    )


def main(options: argparse.Namespace) -> int:
    """Runs the command. Returns 1 for a problem with the checkpoint, and 2 for other errors."""
    try:
        path = find(options.path)
        if options.action == "show":
            print(describe(path, read_index(path)))
        elif options.action == "verify":
            index = verify(path)
            held = f"{len(index.tensors)} tensors, {index.num_bytes:,} bytes in {number_of('file', len(index.files))}"
            print(f"{path}: complete and undamaged, {held}.")
        else:
            from kdist.checkpoint.convert import convert

            note = convert(path, options.output, name=options.name, model=options.model)
            print(f"Wrote {options.output}. {note}".rstrip())
    except KdistError as error:
        print(f"kdist checkpoint {options.action}: {error}", file=sys.stderr)
        return 1 if isinstance(error, CheckpointError) else 2
    return 0


def find(path: str) -> str:
    """Returns the path itself if it is a checkpoint, or else the newest checkpoint in the directory."""
    path = path if os.path.lexists(path) else layout.standing(path)
    if storage.of(path).exists(os.path.join(path, layout.INDEX)):
        return path
    return layout.latest_checkpoint(path) or path


def describe(path: str, index: Index) -> str:
    """Returns the contents of a checkpoint as lines of text."""
    by = index.saved_by
    saved_at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(index.saved_at))
    lines = [
        path,
        f"  saved at      {saved_at}",
        f"  saved by      {number_of('worker', by.get('num_workers', 0))}, {by.get('backend')}, "
        f"Keras {by.get('keras')}, kdist {by.get('kdist')}",
        f"  on disk       {index.num_bytes:,} bytes of tensors in {number_of('file', len(index.files))}",
        "  objects",
    ]
    for name, part in index.parts.items():
        tensors = [t for t in index.tensors if t.name.partition("/")[0] == name]
        held = f"{len(tensors)} tensors, {sum(t.num_bytes for t in tensors):,} bytes" if tensors else ""
        if name in index.values:
            held = _short(json.dumps(index.values[name]))
        elif name in index.states:
            state = index.states[name][0]
            held = _short(json.dumps(state))
            if isinstance(state, dict) and "history" in state:  # a position of `fit`
                epoch, step = state.get("epoch"), state.get("step")
                held = (
                    f"resumes at {layout.position(epoch, step)}" if type(epoch) is type(step) is int else held
                )
        lines.append(f"    {name:28} {part['kind']:15} {held}".rstrip())
    lines.append("  tensors")
    width = max((len(t.name) for t in index.tensors), default=0)
    lines += [f"    {t.name:{width}}  {t.dtype:8}  {list(t.shape)}" for t in index.tensors]
    return "\n".join(lines)


def _short(text: str, length: int = 60) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
