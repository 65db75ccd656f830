"""The worker's side of `kdist.launch(fn)`."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
from collections.abc import Sequence

from kdist.launch import shipping


def main(argv: Sequence[str]) -> None:
    """Reads a call from a file, carries it out, and writes the result to another file: `argv` has their paths."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    payload, destination = argv
    with open(payload, "rb") as file:
        data = file.read()
    sys.argv = ["kdist.launch"]
    result = shipping.perform(data)
    # Under its name only once it is complete: a worker that is killed while writing has no result.
    with open(f"{destination}.part", "wb") as file:
        pickle.dump(result, file)
    os.replace(f"{destination}.part", destination)
    if not result.ok:
        sys.stdout.flush()
        sys.stderr.flush()
        # Frameworks wait for their peers at exit. The launcher ends those; it must hear of the failure first.
        os._exit(1)
