"""Sets up the environment of processes that tests start."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Outside the checkout, so that all clones share the files.
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kdist-tests"

# Prefixes of variables that describe a backend, a cluster or kdist's own settings.
DESCRIBING = (
    "KERAS_",
    "TF_CONFIG",
    "SLURM_",
    "OMPI_",
    "PMI_",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "MASTER_",
    "KDIST_",
    "JOB_COMPLETION_INDEX",
    "JAX_COORDINATOR_",
    "JAX_NUM_PROCESSES",
    "JAX_PROCESS_ID",
    "COORDINATOR_",
    "NUM_PROCESSES",
    "PROCESS_ID",
    "PET_",
    "SM_",
    "TPU_",
    "MEGASCALE_",
    "FLUX_",
    "JSM_",
    "LSB_",
    "LWS_",
    "CLUSTER_SPEC",
)


def keep_bytecode() -> None:
    """Lets this process and its children write compiled modules, whatever the shell has set.

    Pytest rewrites asserts when it compiles a module, and each worker imports the modules again.
    """
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False


def clean_environment() -> dict[str, str]:
    """Returns this process's environment for few threads, without variables for a backend or a cluster."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(DESCRIBING)}
    return kept | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TF_NUM_INTRAOP_THREADS": "1",
        "TF_NUM_INTEROP_THREADS": "2",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "PYTHONUNBUFFERED": "1",
        "KDIST_PORT_RANGE": own_ports(),
    }


def own_ports() -> str:
    """Returns the ports of this pytest-xdist process, so that two tests never use the same port."""
    first = 15000 + 3000 * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 5)
    return f"{first}-{first + 2999}"
