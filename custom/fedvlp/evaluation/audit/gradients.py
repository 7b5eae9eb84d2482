"""Membership by a record's gradient: how long it is, and whether the model went the way that it points.

A record that was trained on has a shorter gradient (Nasr et al., 2019, https://arxiv.org/abs/1812.00910), and an
update that it took part in goes against it. The latter is so for one update: over a whole run the model turns, and a
leak that the former finds is not seen in the direction of the total change. Counted over the weights of the linear
layers, which are most of a transformer's: of these the gradient of every record of a batch follows from what went into
the layer and what came back to it (Goodfellow, 2015, https://arxiv.org/abs/1510.01799).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedvlp.core.types import Batch

GRADIENT, ALIGNED = "gradient", "alignment"
"""Scores: minus the length of the record's gradient, and the cosine of its opposite with the change of the model."""


@dataclass(frozen=True)
class Directions:
    """Of N records: the length of each gradient, and its product with the change of the model. Both [N] float64."""

    length: Tensor
    product: Tensor
    change: float  # length of the change, over the same weights

    def shortness(self) -> Tensor:
        """Minus the lengths [N]: higher is more like a member."""
        return -self.length

    def alignment(self) -> Tensor:
        """Cosine [N] of minus the gradient and the change: higher is more like a member; 0 where one of them is 0."""
        return -self.product / (self.length * self.change).clamp(min=1e-30)


def directions(
    model: nn.Module, batches: Sequence[Batch], loss: Callable[[Batch], Tensor], change: Mapping[str, Tensor]
) -> Directions:
    """The gradients of ``loss`` (a batch of B records to their losses [B], each of its own record alone).

    ``change``: by the names of the model's tensors; one that it lacks did not change.
    """
    lengths, products = [], []
    covered: dict[str, float] = {}
    with _noting(model) as seen:
        for batch in batches:
            seen.clear()
            with torch.enable_grad():
                losses = loss(batch)
                back = torch.autograd.grad(losses.sum(), [output for _, _, output in seen], allow_unused=True)
            square = torch.zeros(len(losses), dtype=torch.float64)
            product = torch.zeros(len(losses), dtype=torch.float64)
            for name, gradient in _of_records(seen, back, len(losses)):
                square += gradient.double().square().sum(dim=(1, 2)).cpu()
                moved = change.get(f"{name}.weight")
                if moved is not None:
                    product += (gradient.cpu() * moved.cpu()).double().sum(dim=(1, 2))
                    covered[name] = float(moved.double().square().sum())
            lengths.append(square.sqrt())
            products.append(product)
    return Directions(torch.cat(lengths), torch.cat(products), sum(covered.values()) ** 0.5)


Seen = list[tuple[str, Tensor, Tensor]]
"""A layer's name, what went into it [B, ..., in], and what came out [B, ..., out], in the order of the calls."""


@contextmanager
def _noting(model: nn.Module) -> Iterator[Seen]:
    """Notes every call of a linear layer on the way of which a gradient comes back."""
    seen: Seen = []

    def hook(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def note(_: nn.Module, inputs: Any, output: Tensor) -> None:
            if output.requires_grad:
                seen.append((name, inputs[0].detach(), output))

        return note

    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    hooks = [module.register_forward_hook(hook(name)) for name, module in layers]
    try:
        yield seen
    finally:
        for one in hooks:
            one.remove()


def _of_records(seen: Seen, back: Sequence[Tensor | None], records: int) -> Iterator[tuple[str, Tensor]]:
    """Each layer's name and the gradient [B, out, in] of its weight for every record, over all of its calls."""
    calls: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for (name, inputs, _), gradient in zip(seen, back, strict=True):
        if gradient is not None and len(inputs) == records:
            calls.setdefault(name, []).append((inputs, gradient))
    for name, of_layer in calls.items():
        of_calls = [
            gradient.reshape(records, -1, gradient.shape[-1]).mT @ inputs.reshape(records, -1, inputs.shape[-1])
            for inputs, gradient in of_layer
        ]
        yield name, torch.stack(of_calls).sum(dim=0) if len(of_calls) > 1 else of_calls[0]
