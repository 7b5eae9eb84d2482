"""Every method trains on another device than the CPU: no operation mixes the two, and what rests, rests on the CPU.

Weights move by 0.001 to 0.05 in these runs; what two ways of computing the same differ by is a hundredth of that.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import toy
from torch.utils import backend_registration

from fedvlp.methods import METHODS

PROGRAM = Path(toy.__file__).parent / "pretend_device.py"
EVALUATED = ("local", "pms-fm")  # sites with models of their own, at the sites and at the server
ADAM = 0.02  # of FedSM and PMS-FM, whose selector takes full-sized steps where a gradient is mere rounding
OPTIONS = [
    "objective=gloria training.micro_batch=4",
    "objective=mgca training.micro_batch=4 training.accumulation=plain",
    "training.clip_norm=1 training.checkpoint_steps=1 training.channels_last=true model.image_tower=resnet18",
    "wire.down=bfloat16 wire.difference=true wire.up=int8 wire.skip_unchanged=true rounds.clip_to_median=2",
]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
        reason="this torch cannot pretend a device in Python",
    ),
]


def apart(name: str, settings: str = "") -> float:
    """The largest difference between what two runs leave, one on the device, one on the CPU."""
    command = [sys.executable, str(PROGRAM), name, *settings.split()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["same"]
    return float(max(found["apart"].values()))


@pytest.mark.parametrize("name", [name for name in METHODS if name not in EVALUATED])
def test_every_method_trains_on_another_device(name: str) -> None:
    assert apart(name) < (ADAM if name == "fedsm" else 5e-4)


@pytest.mark.parametrize("name", EVALUATED)
def test_a_run_trains_and_is_evaluated_on_another_device(name: str) -> None:
    assert apart(name, "--evaluate") < ADAM


@pytest.mark.parametrize("settings", OPTIONS)
def test_every_option_works_on_another_device(settings: str) -> None:
    assert apart("fedavg", settings) < 5e-4
