"""Gradient caching (Gao et al., 2021, https://arxiv.org/abs/2101.06983): contrastive batches larger than memory.

A batch goes through the towers in parts, of which only the pooled features are kept; heads and loss see them all. When
the loss is differentiated, each part runs once more, with the same random numbers, and hands its gradients on: the
gradient is that of the whole batch, exactly, because a tower treats every record by itself. Several processes share
the parts among them (``gather``). Differs: autograd's checkpointing does the book-keeping that the paper does by hand,
so that any loss, and any number of models under one loss, can be differentiated as if nothing were cached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fedvlp.core.seeds import seed, set_global
from fedvlp.core.types import Batch, VLOutput
from fedvlp.training import distributed

LOCAL = {"words", "patches"}
"""What an objective that reads tokens lists in ``needs``."""


@dataclass(frozen=True)
class MicroBatches:
    """How the rows of a batch go through the towers."""

    micro_batch: int = 0  # rows at a time; 0 = all
    gather: bool = False  # share the rows with the other processes
    tokens: bool = False  # keep the tokens and all else that the towers return, not only the pooled features

    def map(self, towers: Callable[[Batch], VLOutput], batch: Batch) -> VLOutput:
        """``towers(batch)``, computed part by part. Per record it keeps 2 W numbers, or all that ``towers`` returns."""
        total = len(next(iter(batch.values())))
        # Each process runs the towers on its own rows; ``whole`` puts those of all together.
        rows = distributed.my_rows(total, 1) if self.gather else slice(0, total)
        size = self.micro_batch or total
        with random_numbers_of_this_rank(self.gather):
            outputs = []
            for start in range(rows.start, rows.stop, size):
                piece = slice(start, min(start + size, rows.stop))
                outputs.append(self._run(towers, rows_of(batch, piece)))

        def whole(name: str) -> Tensor | None:
            pieces = [getattr(output, name) for output in outputs]
            if pieces[0] is None:
                return None
            joined = torch.cat(pieces)
            return distributed.gather(joined, rows, total) if self.gather else joined

        return VLOutput(**{field.name: whole(field.name) for field in fields(VLOutput)})

    def _run(self, towers: Callable[[Batch], VLOutput], batch: Batch) -> VLOutput:
        def run(batch: Batch) -> VLOutput:
            output = towers(batch)
            if self.tokens:
                return output
            summaries = None if output.views is None else output.views[:, :, :1]
            pooled = (output.image, output.text, summaries)  # slices, as a rule, which would keep all tokens alive
            image, text, views = (None if features is None else features.clone() for features in pooled)
            return VLOutput(image, text, views=views)

        return checkpoint(run, batch, use_reentrant=False) if torch.is_grad_enabled() else run(batch)


def rows_of(batch: Batch, rows: slice) -> Batch:
    """Some rows of a batch."""
    return {name: tensor[rows] for name, tensor in batch.items()}


@contextmanager
def random_numbers_of_this_rank(several: bool) -> Iterator[None]:
    """Among several processes each draws its own dropout, and all continue with the same random numbers afterwards."""
    if not several:
        yield
        return
    drawn = int(torch.randint(2**62, ()))
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        set_global(seed(drawn, distributed.rank()))
        yield
