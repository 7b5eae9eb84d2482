"""What a process imports before it does its first useful thing, counted in a fresh interpreter each.

Seconds depend on the machine; which packages are imported, and how many modules, do not. Each limit is a tenth to a
fifth above what is imported today, so that a heavy package shows and a new file of fedvlp does not.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

COUNT = "\nimport sys\nprint(len(sys.modules), *sorted(set(sys.modules) & {heavy!r}))"
COMPILE = {"torch._dynamo", "torch._inductor", "sympy"}
TOWERS = {"timm", "transformers", "monai", "torchvision"}
TENSORBOARD = {"tensorboard", "torch.utils.tensorboard"}
TORCH = {"torch", "numpy"}

VISIT = """
from fedvlp.flare import messages
from fedvlp.flare.curves import SiteCurves
from fedvlp.flare.relay import HeldDecomposer
from fedvlp.flare.site_executor import SiteExecutor
from nvflare.app_common.widgets.convert_to_fed_event import ConvertToFedEvent
from fedvlp.flare.job_check import JobCheck
SiteCurves(), SiteExecutor(settings={"name": "feddra"}), messages.register(HeldDecomposer()), JobCheck("client")
"""
"""What FLARE builds in a simulator's process of a site of a committed job, and in its process that lives on there."""

SERVER = """
from fedvlp.flare.controller import FederatedController
from fedvlp.flare.tracking import TensorBoardReceiver
from fedvlp.run import presets
from fedvlp.run.assembly import Assembly
Assembly(presets.get("feddra")).server(("site-1", "site-2"))
"""

STEP = """
from dataclasses import replace
from fedvlp.core.types import Broadcast
from fedvlp.run import presets
from fedvlp.run.assembly import Assembly
from fedvlp.run.config import override
experiment = presets.get("feddra")
for key, value in {"data.size": 60, "data.sites": 2, "method.align_steps": 1, "training.batch_size": 4}.items():
    experiment = override(experiment, key, str(value))
assembly = Assembly(experiment)
server = assembly.server(assembly.sites())
assembly.site("site-1").handle(Broadcast(0, "align", server.state))
"""


@pytest.mark.parametrize(
    ("code", "absent", "most"),
    [
        ("from fedvlp.cli import main", TORCH | {"nvflare"} | TOWERS, 235),
        (VISIT, TORCH | TOWERS | TENSORBOARD, 740),
        (SERVER, COMPILE | TOWERS, 2350),
        (STEP, COMPILE | TOWERS | TENSORBOARD | {"nvflare"}, 1600),
    ],
    ids=["the command", "a site's process in the simulator", "the server", "a site's first step"],
)
def test_a_process_imports_only_what_it_needs(code: str, absent: set[str], most: int) -> None:
    code += COUNT.format(heavy=absent)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-2000:]
    count, *heavy = done.stdout.split()
    assert heavy == []
    assert int(count) <= most
