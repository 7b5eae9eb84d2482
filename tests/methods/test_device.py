"""Every method trains on another device than the CPU: no operation mixes the two, and what rests, rests on the CPU.

Weights move by 0.001 to 0.05 in these runs; what two ways of computing the same differ by is a hundredth of that.
All cases share two processes, which learn to pretend a device; this one does not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support import lock, toy
from torch.utils import backend_registration

from fedvlp.methods import METHODS

PROGRAM = Path(toy.__file__).parent / "pretend_device.py"
CLOSE = 5e-4
FEATURES = 5e-3  # of CreamFL, whose sites remember features: they magnify what weights differ by, 2e-5 here
ADAM = 0.02  # of FedSM and PMS-FM, whose selector takes full-sized steps where a gradient is rounding
EVALUATED = ("local", "pms-fm")  # sites with models of their own, at the sites and at the server
CASES = {
    **{f"{name} --evaluate" if name in EVALUATED else name: CLOSE for name in METHODS},
    "fedsm": ADAM, "pms-fm --evaluate": ADAM, "creamfl": FEATURES,
    "fedavg objective=gloria training.micro_batch=4": CLOSE,
    "fedavg objective=mgca training.micro_batch=4 training.accumulation=plain": CLOSE,
    "fedavg training.clip_norm=1 training.checkpoint_steps=1 training.channels_last=true "
    "model.image_tower=resnet18 model.init=random":
        CLOSE,
    "fedavg wire.down=bfloat16 wire.up=int8 rounds.clip_to_median=2":
        CLOSE,
}  # fmt: skip
"""Method and settings, and how far apart the two devices may end."""

PROCESSES = [tuple(CASES)[0::2], tuple(CASES)[1::2]]


@cache
def compared(process: int) -> dict[str, dict[str, Any]]:
    """What the program prints of every case of one process."""
    command = [sys.executable, str(PROGRAM), *PROCESSES[process]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"case"')]
    return {one["case"]: one for one in found}


def require_a_pretended_device() -> None:
    """It needs a private part of torch: missing from the pinned version, that is a failure; from another, a skip."""
    if hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        return
    pinned = lock.pinned("torch")
    assert torch.__version__.partition("+")[0] != pinned, "the pinned torch can no longer pretend a device in Python"
    pytest.skip(f"torch {torch.__version__} cannot pretend a device in Python; {pinned} can")


@pytest.mark.slow(seconds=100)
@pytest.mark.parametrize(
    ("process", "case"),
    [
        pytest.param(process, case, id=f"process {process}: {case}")
        for process, cases in enumerate(PROCESSES)
        for case in cases
    ],
)
def test_it_trains_on_another_device_as_on_the_cpu(process: int, case: str) -> None:
    require_a_pretended_device()
    found = compared(process)[case]
    assert "error" not in found, found["error"][-3000:]
    assert found["same"], "the two runs leave other tensors"
    assert max(found["apart"].values()) < CASES[case]


def test_a_torch_without_the_private_part_fails_if_it_is_the_pinned_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(backend_registration, "_setup_privateuseone_for_python_backend", raising=False)
    monkeypatch.setattr(torch, "__version__", "0.1")
    with pytest.raises(pytest.skip.Exception):
        require_a_pretended_device()
    pinned = lock.pinned("torch")
    monkeypatch.setattr(torch, "__version__", f"{pinned}+cpu")
    with pytest.raises(AssertionError, match="can no longer pretend"):
        require_a_pretended_device()
