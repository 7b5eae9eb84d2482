"""Image and text tower in two threads of one process, with the bits of one tower after the other.

The towers meet in the loss alone, so neither sees a difference: each computes what it computed alone, on one thread.
Forward that is two calls at a time. Backward, autograd would walk through both in one thread; so the outputs are cut
off from the towers, and the gradients that reach the cut are carried on in two threads. An encoding may be projected
more than once (FedRGB does, by its own aligners and by a frozen copy): its junction keeps what has come until all of it
is there, so that the towers are walked through once, in autograd's order. It pays where towers take about the same time
and a core is idle.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from fedvlp.core.types import IMAGE_TOKENS, TEXT_TOKENS, Batch, VLOutput

if TYPE_CHECKING:
    from fedvlp.core.client import MicroBatching


First = TypeVar("First")
Second = TypeVar("Second")
Pair = tuple[Tensor, Tensor]
"""A tensor and its gradient."""
Arrival = tuple[list[Pair], list[Pair]]
"""What has come to one cut: of the image's side, and of the text's."""
IMAGE, TEXT = ("image", "image_tokens", "views"), ("text", "text_tokens")
"""What of an output comes from either tower and may have a gradient."""


def may_gain(model: Any, threads: int) -> bool:
    """Whether towers of so many ``threads`` each find a core, and draw no random numbers, whose order would change.

    Of the towers here only the tiny ones draw none. Checkpointed blocks set the state of all threads' random numbers
    when they are run again.
    """
    config = model.config
    if config.gradient_checkpointing:
        return False
    return {config.image_tower, config.text_tower} == {"tiny"} and len(os.sched_getaffinity(0)) >= 2 * threads


@cache
def _helper(process: int) -> ThreadPoolExecutor:
    """The second thread of this process; it stays, with what its library has set up for it."""
    return ThreadPoolExecutor(1, "tower")


def both(first: Callable[[], First], second: Callable[[], Second]) -> tuple[First, Second]:
    """The results of two calls, the second made in another thread meanwhile, with gradients on or off as here."""
    graded = torch.is_grad_enabled()

    def there() -> Second:
        with torch.set_grad_enabled(graded):
            return second()

    running = _helper(os.getpid()).submit(there)
    try:
        mine = first()
    except BaseException:
        running.exception()  # no call goes on behind an error
        raise
    return mine, running.result()


@dataclass(frozen=True)
class Junction:
    """Where the gradients of all projections of one encoding meet before they continue through its towers."""

    gate: Tensor  # every projection's cut hangs on it, so autograd comes to it after the last one
    waiting: list[Arrival]


def junction() -> Junction:
    """A new one, for one encoding."""
    waiting: list[Arrival] = []
    return Junction(_Onward.apply(torch.ones((), requires_grad=True), waiting), waiting)


def apart(output: VLOutput, meeting: Junction) -> VLOutput:
    """The output, whose gradients will continue from its encoding's junction, through its two towers side by side."""
    sides = [
        [(name, tensor) for name in names if (tensor := getattr(output, name)) is not None and tensor.requires_grad]
        for names in (IMAGE, TEXT)
    ]
    if not any(sides):
        return output
    tensors = [[tensor for _, tensor in side] for side in sides]
    cut = _Cut.apply(meeting.gate, meeting.waiting, tensors)
    return replace(output, **dict(zip((name for side in sides for name, _ in side), cut, strict=True)))


class _Cut(torch.autograd.Function):
    """Hands tensors on without their graph; what gradients come wait at the junction."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, waiting: list[Arrival], sides: Sequence[Sequence[Tensor]]) -> Any:
        ctx.waiting, ctx.sides = waiting, sides
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for side in sides for tensor in side)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, None, None]:
        image, text = ctx.sides
        ctx.waiting.append((_came(image, gradients[: len(image)]), _came(text, gradients[len(image) :])))
        return torch.ones(()), None, None


class _Onward(torch.autograd.Function):
    """The junction's gate: sends what waits there into the graphs of both towers itself."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, waiting: list[Arrival]) -> Tensor:
        ctx.waiting = waiting
        return start.detach()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[None, None]:
        """Adds to the gradients of all parameters above the cuts."""
        image, text = ([pair for arrival in ctx.waiting for pair in arrival[side]] for side in (0, 1))
        ctx.waiting.clear()
        if image and text:
            both(lambda: _carry_on(image), lambda: _carry_on(text))
        else:
            _carry_on(image or text)
        return None, None


def _came(tensors: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Pair]:
    return [(tensor, gradient) for tensor, gradient in zip(tensors, gradients, strict=True) if gradient is not None]


def _carry_on(pairs: Sequence[Pair]) -> None:
    torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])


# Towers that run only when a model aligns their outputs: used while gradients are cached (training/grad_cache.py).

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
