"""Image and text tower in two threads of one process, with the bits of one tower after the other.

The towers meet in the loss alone, so neither sees a difference: each computes what it computed alone, on one thread.
Forward that is two calls at a time. Backward, autograd would walk through both in one thread; so the outputs are cut
off from the towers, and the gradients that reach the cut are carried on in two threads. It pays where towers take about
the same time and a core is idle.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedvlp.core.types import VLOutput

First = TypeVar("First")
Second = TypeVar("Second")
IMAGE, TEXT = ("image", "image_tokens", "views"), ("text", "text_tokens")
"""What of an output comes from either tower and may have a gradient."""


def may_gain(model: Any, threads: int) -> bool:
    """Whether towers of so many ``threads`` each find a core, and draw no random numbers, whose order would change.

    Of the towers here only the tiny ones draw none.
    """
    config = model.config
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


def apart(output: VLOutput) -> VLOutput:
    """The output, whose gradients will go through its two towers side by side. One tower alone is left as it is."""
    sides = [
        [(name, tensor) for name in names if (tensor := getattr(output, name)) is not None and tensor.requires_grad]
        for names in (IMAGE, TEXT)
    ]
    if not all(sides):
        return output
    tensors = [[tensor for _, tensor in side] for side in sides]
    cut = _Cut.apply(torch.ones((), requires_grad=True), tensors)
    return replace(output, **dict(zip((name for side in sides for name, _ in side), cut, strict=True)))


class _Cut(torch.autograd.Function):
    """Hands tensors on without their graph; what gradients come, it sends into the graphs of both sides itself."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, sides: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
        ctx.sides = sides
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for side in sides for tensor in side)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None]:
        """Adds to the gradients of all parameters above the cut."""
        image, text = ctx.sides
        both(
            lambda: _carry_on(image, gradients[: len(image)]),
            lambda: _carry_on(text, gradients[len(image) :]),
        )
        return None, None


def _carry_on(tensors: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    reached = [(tensor, gradient) for tensor, gradient in zip(tensors, gradients, strict=True) if gradient is not None]
    if reached:
        torch.autograd.backward([tensor for tensor, _ in reached], [gradient for _, gradient in reached])
