"""`kdist info` lists the devices that the frameworks themselves report."""

from __future__ import annotations

from pathlib import Path

import pytest

from kdist.launch import info
from tests.helpers.environment import clean_environment

NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "3"}


def is_as_expected(backend: str, said: str) -> bool:
    names = said.split(", ")
    if backend == "jax":
        return len(names) == 3 and all("CPU" in name.upper() for name in names) and len(set(names)) == 3
    return said == "cpu:0"


@pytest.mark.in_turn(12)
@pytest.mark.parametrize("backend", ["tensorflow", "jax", "torch"])
def test_devices_without_a_gpu(backend: str) -> None:
    said = info.devices_of(backend, clean_environment() | NO_GPU, timeout=300)
    assert is_as_expected(backend, said), said


def test_names_of_gpus(tmp_path: Path) -> None:
    # A fake PyTorch that reports two GPUs.
    (tmp_path / "torch.py").write_text(
        "class cuda:\n"
        "    device_count = staticmethod(lambda: 2)\n"
        "    get_device_name = staticmethod(lambda index: f'Model {index + 7}')\n"
    )
    said = info.devices_of("torch", clean_environment() | {"PYTHONPATH": str(tmp_path)})
    assert said == "gpu:0 (Model 7), gpu:1 (Model 8)"
