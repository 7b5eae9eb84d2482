"""What `server_memory.py` puts into its job: a model of a given size, and a site that sends back what it received."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from aggregation import shapes
from common import MIB
from nvflare.apis.executor import Executor
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from torch import nn

from fedvlp.core.types import Update
from fedvlp.flare import messages
from fedvlp.models.dual_encoder import ModelConfig

NOTE = "SERVER_MEMORY_NOTE"
"""Environment variable: the file into which the server's process writes its id and its size before the model is."""


@dataclass(frozen=True)
class EchoModel(ModelConfig):
    """ViT-B/16 and BERT-base with a block and a head more each; ``part`` < 1 makes every layer narrower."""

    part: float = 1.0

    def named(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors."""
        width = 8 * round(96 * self.part**0.5)
        named = shapes(12, width, round(28_996 * self.part**0.5))
        for tower in ("image", "text"):
            for name, shape in shapes(1, width, 1).items():
                if name.startswith(f"{tower}_encoder.0."):
                    named[name.replace("_encoder.0", "_alignment")] = shape
            named[f"{tower}_head.weight"] = (512, width)
        return named

    def build(self, seed: int) -> Echo:
        """The model; the process that builds it is the server, and says so."""
        note = Path(os.environ[NOTE])
        if not note.exists():
            note.write_text(json.dumps({"pid": os.getpid()}), encoding="utf-8")
        return Echo(self.named(), seed)


class Echo(nn.Module):
    """Tensors without a model around them."""

    def __init__(self, named: dict[str, tuple[int, ...]], seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self._tensors = {name: torch.randn(shape, generator=generator) for name, shape in named.items()}

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return dict(self._tensors)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """The trained tensors in place of the model's own."""
        self._tensors = dict(state_dict)

    def save(self, folder: Path, *_: Any) -> None:
        """A note instead of a model."""
        folder.mkdir(parents=True, exist_ok=True)
        size = sum(t.numel() * t.element_size() for t in self._tensors.values())
        (folder / "model.safetensors").write_text(f"{size / MIB:.0f} MiB", encoding="utf-8")


class EchoSite(Executor):
    """Sends back the tensors that it received."""

    def __init__(self) -> None:
        super().__init__()
        messages.register()

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        message, _ = messages.receive_broadcast(shareable)
        update = Update(fl_ctx.get_identity_name(), message.round, message.phase, 10, message.state)
        return messages.send_update(update)
