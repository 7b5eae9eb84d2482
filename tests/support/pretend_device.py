"""Trains presets on a pretended accelerator and on the CPU, and prints how far apart the two end, a JSON line each.

    python tests/support/pretend_device.py 'feddra method.mu=2' 'local --evaluate' ...

A tensor on the device "pretend" holds one on the CPU, which computes everything. An operation that is given tensors of
both devices fails, as it does on a GPU. What is queued on which stream, and what the host would wait for, is noted
(pretend_streams.py). What it cannot tell: speed, memory, the GPU's own rounding, autocast (it does nothing here) and
recurrent layers (a GRU is replaced by a transformer).
"""

from __future__ import annotations

import json
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import library
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from fedvlp.core.checkpoint import load_tensors
from fedvlp.run import presets
from fedvlp.run.config import override
from fedvlp.run.evaluate import EVALUATIONS, Choices
from fedvlp.run.experiment import Experiment, Partition
from fedvlp.run.folder import RunFolder
from fedvlp.run.simulate import simulate
from fedvlp.training.settings import Training

sys.path.append(str(Path(__file__).parents[1]))  # this file is a program, too
from support import pretend_streams
from support.pretend_streams import COPIES, Backend

NAME = "pretend"
INDEXING = ("aten::index.Tensor", "aten::_index_put_impl_")  # a tensor on the device, by one on either
FACTORIES = ("arange", "arange.start", "arange.start_step", "full", "scalar_tensor", "eye", "linspace")


class Pretended(torch.Tensor):
    """A tensor on the device; ``held`` is the one on the CPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Pretended:
        of = {"dtype": held.dtype, "strides": held.stride(), "storage_offset": held.storage_offset()}
        tensor = torch.Tensor._make_wrapper_subclass(cls, held.shape, device=torch.device(NAME, 0), **of)
        tensor.held = held
        return tensor

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(op, *args, **(kwargs or {}))


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """``function`` of every leaf of lists, tuples and dictionaries: torch's own tree_map is half of a run's time."""
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(function, one) for one in value)
    if isinstance(value, dict):
        return {key: mapped(function, one) for key, one in value.items()}
    return function(value)


def run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """The operation on the CPU; its results are on the device unless they were asked for on the CPU."""
    mine: dict[int, Pretended] = {}
    others = False

    def real(value: Any) -> Any:
        nonlocal others
        if isinstance(value, Pretended):
            mine[id(value.held)] = value
            return value.held
        others = others or (isinstance(value, torch.Tensor) and value.dim() > 0)
        return torch.device("cpu") if isinstance(value, torch.device) else value

    name, (unwrapped, options) = op.name(), mapped(real, (args, kwargs))
    pretend_streams.observe(name, args, kwargs, lambda value: isinstance(value, Pretended))
    free = name in COPIES or (name in INDEXING and isinstance(args[0], Pretended))
    if mine and others and not free:
        raise RuntimeError(f"{name}: all tensors must be on one device")
    if name == "aten::copy_" and not isinstance(args[0], Pretended):
        return args[0].copy_(unwrapped[1])
    with torch.no_grad():
        out = op(*unwrapped, **options)
    device = kwargs.get("device")
    if (not mine and device is None) or (device is not None and torch.device(device).type == "cpu"):
        return out

    def pretended(value: Any) -> Any:
        known = mine.get(id(value))
        return known if known is not None else Pretended(value) if isinstance(value, torch.Tensor) else value

    return mapped(pretended, out)


def factory(name: str) -> Callable[..., Pretended]:
    """An operation that makes a tensor from nothing."""
    base, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, base), overload or "default")
    return lambda *args, **kwargs: Pretended(op(*args, dtype=kwargs.get("dtype")))


def install() -> None:
    """Makes the device known to torch."""
    _setup_privateuseone_for_python_backend(NAME, Backend())
    torch.Tensor.pin_memory = pretend_streams.pin_memory
    whole, aten = library.Library("_", "IMPL"), library.Library("aten", "IMPL")
    whole.fallback(run, "PrivateUse1")
    whole.fallback(library.fallthrough_kernel, "AutocastPrivateUse1")
    for name in FACTORIES:
        aten.impl(name, factory(name), "PrivateUse1")
    globals()["kept"] = (whole, aten)  # torch forgets them with the last reference


SETTINGS = {
    "data.size": "160", "rounds.rounds": "2", "training.batch_size": "8", "training.optimizer": "sgd",
    "training.lr": "0.01",
}  # fmt: skip
STEPS = {
    "local_steps": "1", "align_steps": "1", "server_steps": "1", "distil_steps": "1", "local_epochs": "1",
    "aligner_steps": "1", "dro_batch": "8", "distil_phases": "1",
}  # fmt: skip


def small(name: str, settings: dict[str, str]) -> Experiment:
    """The preset, two rounds of a few steps of SGD, without recurrent layers."""
    chosen = presets.get(name)
    steps = {f"method.{key}": value for key, value in STEPS.items() if hasattr(chosen.method, key)}
    sites = {"data.sites": "2"} if chosen.partition == Partition() else {}
    for key, value in {**SETTINGS, **steps, **sites, **settings}.items():
        chosen = override(chosen, key, value)
    models = [(site, replace(model, text_tower=chosen.model.text_tower)) for site, model in chosen.site_models]
    return replace(chosen, site_models=tuple(models))


def trained(chosen: Experiment, evaluated: bool = False) -> dict[str, torch.Tensor]:
    """The tensors that a run leaves on disk, the server's and the sites', without hashes and running statistics."""
    with tempfile.TemporaryDirectory() as root:
        folder = RunFolder.create(Path(root), chosen)
        simulate(chosen, folder)
        for what in EVALUATIONS.values() if evaluated else ():
            assert what(folder, Choices(steps=1))
        files = [
            file for file in sorted(folder.path.rglob("*.safetensors")) if file.parent.name not in ("wire", "sent")
        ]
        found = {f"{file.relative_to(root)}:{n}": t for file in files for n, t in load_tensors(file)[0].items()}
        return {name: tensor for name, tensor in found.items() if ".running_" not in name}


def compared(case: str) -> dict[str, Any]:
    """How far apart the two runs of ``case`` end, tensor by tensor, or the traceback of the one that failed."""
    name, *settings = case.split()
    chosen = small(name, dict(setting.split("=", 1) for setting in settings if "=" in setting))
    try:
        expected = trained(chosen)
        with patch.object(Training, "torch_device", lambda self: torch.device(NAME, 0)):
            seen = trained(chosen, "--evaluate" in settings)
    except Exception:
        return {"case": case, "error": traceback.format_exc()}
    apart = {
        n: float((t.double() - seen[n].double()).abs().nan_to_num().max()) for n, t in expected.items() if t.numel()
    }
    return {"case": case, "same": seen.keys() == expected.keys(), "apart": apart}


def main(*cases: str) -> None:
    install()  # before the first backward pass, which counts the devices
    for case in cases:
        print(json.dumps(compared(case)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
