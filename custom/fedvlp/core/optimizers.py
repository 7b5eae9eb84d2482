"""torch's own optimisers, without torch._dynamo; the schedule of a site's rounds; the server's optimisers.

Every optimiser of torch imports that compiler to mark its methods as not to be compiled, when it is built and at every
step: 2 seconds of processor time and 150 MB in each process that trains, for nothing where only towers are compiled.
Here the same methods are called without the mark, so the arithmetic is torch's, to the last bit.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fedvlp.core.aggregation import Aggregator
from fedvlp.core.server_state import Server
from fedvlp.core.types import State, Update, is_statistic
from fedvlp.core.validate import require


class _Unmarked(Optimizer):
    """The methods that torch marks, as they are without the mark."""

    add_param_group: Any = inspect.unwrap(Optimizer.add_param_group)
    state_dict: Any = inspect.unwrap(Optimizer.state_dict)
    load_state_dict: Any = inspect.unwrap(Optimizer.load_state_dict)
    zero_grad: Any = inspect.unwrap(Optimizer.zero_grad)


def _eager(step: Any) -> Any:
    """An optimiser's ``step`` without the mark; torch switches gradients off together with it."""
    return torch.no_grad()(inspect.unwrap(step))


class Adam(_Unmarked, torch.optim.Adam):
    """torch.optim.Adam."""

    step = _eager(torch.optim.Adam.step)


class AdamW(_Unmarked, torch.optim.AdamW):
    """torch.optim.AdamW."""

    step = _eager(torch.optim.AdamW.step)


class SGD(_Unmarked, torch.optim.SGD):
    """torch.optim.SGD."""

    step = _eager(torch.optim.SGD.step)


# How fast and how long sites train in the rounds of a run.


def cosine(round: int, rounds: int) -> float:
    """The factor of the learning rate: from 1 in round 0 to 0 in round ``rounds`` and after; 0 rounds: always 1.

    Loshchilov and Hutter, 2017, https://arxiv.org/abs/1608.03983, eq. 5, without restarts.
    """
    return (1 + math.cos(math.pi * min(1.0, round / rounds))) / 2 if rounds else 1.0


def one_pass(records: int, size: int) -> int:
    """Steps of one pass over the records, without the smaller last batch."""
    return max(1, records // size)


# Server optimisers round any method's average: FedAvgM, FedAdam and FedYogi.
#
# Hsu et al., 2019, https://arxiv.org/abs/1909.06335, section 4.3 (FedAvgM); Reddi et al., 2021,
# https://arxiv.org/abs/2003.00295, algorithm 2 (FedAdam, FedYogi). The server takes what an average would change as the
# negative of a gradient.

NONE, MOMENTUM, ADAM, YOGI = OPTIMIZERS = ("none", "momentum", "adam", "yogi")

RATES = {NONE: 1.0, MOMENTUM: 1.0, ADAM: 0.01, YOGI: 0.01}
"""The learning rate of each where the settings say 0."""

FIRST, SECOND = "server_optimizer/first/", "server_optimizer/second/"
"""In the server's memory, before a tensor's name: m and v."""


@dataclass(frozen=True)
class ServerOptimizer:
    """How the server moves the model x by the change Delta that a method's average makes of it.

    m <- beta_1 m + Delta (momentum) or beta_1 m + (1 - beta_1) Delta (adam, yogi), 0 at first;
    v <- beta_2 v + (1 - beta_2) Delta^2 (adam) or v - (1 - beta_2) Delta^2 sign(v - Delta^2) (yogi), tau^2 at first;
    x <- x + eta m (momentum) or x + eta m / (sqrt(v) + tau) (adam, yogi).

    Momentum with beta_1 = 0 and eta = 1 is the average itself, bit for bit. Raises ValueError for values outside of
    their range.
    """

    kind: str = NONE
    rate: float = 0.0  # eta, at least 0; 0 is that of ``RATES``
    beta1: float = 0.9  # beta_1, 0 to below 1
    beta2: float = 0.99  # beta_2, 0 to below 1
    tau: float = 1e-3  # above 0

    def __post_init__(self) -> None:
        known = ", ".join(OPTIMIZERS)
        require(self.kind in OPTIMIZERS, f"server_optimizer is {self.kind!r}; choose one of {known}")
        require(0 <= self.rate < math.inf, f"server_lr is {self.rate}; it is finite and not negative, 0 = the usual")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            require(0 <= value < 1, f"server_{name} is {value}; it must be in [0, 1)")
        require(0 < self.tau < math.inf, f"server_tau is {self.tau}; it must be positive and finite")

    def around(self, average: Aggregator, server: Server) -> Aggregator:
        """The method's aggregator, its change of the model taken as this optimiser takes it."""
        return average if self.kind == NONE else ServerStep(self, average, server)

    @torch.no_grad()
    def step(self, server: Server, name: str, old: Tensor, averaged: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The new value of one tensor, which was ``old`` and would be ``averaged``, and its new m and v by key."""
        rate = self.rate or RATES[self.kind]
        change = averaged - old  # Delta
        m = server.memory.get(FIRST + name, torch.zeros_like(old)) * self.beta1
        if self.kind == MOMENTUM:
            m = m + change
            # averaged - Delta is old; written so that eta m = Delta gives the average's own bytes.
            return averaged + (rate * m - change), {FIRST + name: m}
        m = m + (1 - self.beta1) * change
        v = server.memory.get(SECOND + name, torch.full_like(old, self.tau**2))
        square = change * change
        target = square if self.kind == ADAM else v - (v - square).sign() * square
        v = self.beta2 * v + (1 - self.beta2) * target
        return old + rate * m / (v.sqrt() + self.tau), {FIRST + name: m, SECOND + name: v}


class ServerStep:
    """An aggregator whose change of the model goes through a server optimiser.

    Integer buffers and running statistics stay as the average leaves them: they follow no gradient. So does every
    tensor that the average leaves alone, with its m and v.
    """

    def __init__(self, optimizer: ServerOptimizer, average: Aggregator, server: Server) -> None:
        self._optimizer = optimizer
        self._average = average
        self._server = server

    def add(self, update: Update) -> None:
        self._average.add(update)

    def commit(self) -> None:
        server, before = self._server, self._server.state
        self._average.commit()
        moved: State = {}
        moments: State = {}
        for name, averaged in server.state.items():
            if averaged is before[name] or not averaged.is_floating_point() or is_statistic(name):
                continue
            moved[name], own = self._optimizer.step(server, name, before[name], averaged)
            moments |= own
        server.replace(moved)
        server.memory |= moments
