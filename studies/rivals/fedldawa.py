"""FedLDAWA (Rehman et al., 2023, https://arxiv.org/abs/2307.07393): tensors count by their angle to the model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedvlp.core.aggregation import Aggregator, blocks
from fedvlp.core.method import Method
from fedvlp.core.server_state import Server
from fedvlp.core.types import LazyState, Update, is_statistic
from fedvlp.core.validate import require


@dataclass(frozen=True)
class FedLDAWA(Method):
    """Sites train as in FedAvg; the server averages tensor by tensor, w^l being tensor l of the model:

        delta_k^l = min(1, cos(w_k^l, w^l)),   w^l <- 1/K sum_k delta_k^l w_k^l

    over the K sites that have samples, whatever their number. Nothing renormalises the weights: they shrink by their
    mean cosine. A site whose tensor points the other way, delta < 0, is added with its sign turned, as released.

    What leaves a site is what leaves it under FedAvg. No memory.
    ``plain_rounds`` of at least the run's rounds is FedAvg, bit for bit.
    Differs: running statistics, which the released code scales as well, are a plain mean over the sites; so are tensors
    of a single number, and those of which one of the two is zero. Integer buffers are never averaged.
    """

    plain_rounds: int = 3  # first rounds that are FedAvg's, >= 0 (released code: round index <= 2)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.plain_rounds >= 0, f"plain_rounds is {self.plain_rounds}; 0 = none")

    def aggregator(self, server: Server, phase: str) -> Aggregator:
        plain = super().aggregator(server, phase)
        return plain if server.round < self.plain_rounds else LayerwiseMean(self, server, phase)


class LayerwiseMean:
    """The plain mean over sites of delta_k^l w_k^l."""

    def __init__(self, method: FedLDAWA, server: Server, phase: str) -> None:
        self._method = method
        self._server = server
        self._mean = server.mean({name: t for name, t in server.state.items() if method.shares(name, phase)})

    def add(self, update: Update) -> None:
        if self._method.weight(self._server, update):
            self._mean.add(scaled(update.state, self._server.state), 1.0)

    def commit(self) -> None:
        self._server.replace(self._mean.result())


def scaled(own: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> LazyState:
    """delta^l w^l of one site's tensors, each made when it is asked for."""

    def made(name: str) -> Tensor:
        tensor = own[name]
        if is_statistic(name) or tensor.dim() == 0 or not tensor.is_floating_point():
            return tensor
        return tensor * divergence(tensor, reference[name])

    return LazyState(own, made)


@torch.no_grad()
def divergence(own: Tensor, reference: Tensor) -> float:
    """delta: the cosine of two tensors of one shape, at most 1, in float64; 1 where one of them is zero."""
    # Block by block, so that no float64 copy of a whole tensor is made.
    product = squares = reference_squares = 0.0
    for one, other in blocks(own, reference):
        one, other = one.double(), other.double()
        product += float((one * other).sum())  # of a block on one thread: ``@`` has other last bits on more
        squares += float(one.square().sum())
        reference_squares += float(other.square().sum())
    if squares == 0 or reference_squares == 0:
        return 1.0
    return min(1.0, product / math.sqrt(squares * reference_squares))
