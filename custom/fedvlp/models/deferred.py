"""Towers that run only when a model aligns their outputs: used while gradients are cached (training/grad_cache.py)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from fedvlp.core.types import IMAGE_TOKENS, TEXT_TOKENS, Batch, VLOutput

if TYPE_CHECKING:
    from fedvlp.core.client import MicroBatching

INPUTS = ("image", "text", "text_mask", "views", IMAGE_TOKENS, TEXT_TOKENS)
"""Keys of a batch that the towers read, or that stand for what they would make of it."""


@dataclass(frozen=True)
class Deferred:
    """Stands for ``encoder.towers(batch)`` until a model aligns it: outputs take less memory after alignment."""

    encoder: Any  # a DualEncoder
    batch: Batch
    micro_batches: MicroBatching
    gradient: bool = field(default_factory=torch.is_grad_enabled)  # whether gradients were on when it was made

    def aligned(self, model: Any) -> VLOutput:
        """``model.align`` of the towers' outputs, computed chunk by chunk."""

        def towers(batch: Batch) -> VLOutput:
            with torch.set_grad_enabled(self.gradient and torch.is_grad_enabled()):
                encoded = self.encoder.towers(batch)
            return model.align(encoded)

        return self.micro_batches.map(towers, self.batch)
