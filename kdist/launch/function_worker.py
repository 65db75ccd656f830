"""The worker process of `kdist.launch(fn)`."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
from collections.abc import Sequence

from kdist.launch import shipping


def main(argv: Sequence[str]) -> None:
    """Reads a call from the file `argv[0]`, runs it, and writes the result to the file `argv[1]`."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    payload, destination = argv
    with open(payload, "rb") as file:
        data = file.read()
    sys.argv = ["kdist.launch"]
    result = shipping.perform(data)
    # Renamed only when complete, so that a worker that is killed during the write leaves no result.
    with open(f"{destination}.part", "wb") as file:
        pickle.dump(result, file)
    os.replace(f"{destination}.part", destination)
    if not result.ok:
        sys.stdout.flush()
        sys.stderr.flush()
        # At exit, frameworks wait for their peers. The launcher terminates these after this process exits.
        os._exit(1)
