"""FedNova (Wang et al., 2020, https://arxiv.org/abs/2007.07481): averages directions, not lengths, of unequal steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Generator, Tensor

from fedvlp.core.aggregation import Aggregator
from fedvlp.core.client import Client
from fedvlp.core.method import Method
from fedvlp.core.optimizers import one_pass
from fedvlp.core.server_state import Server
from fedvlp.core.types import Batch, Broadcast, State, Update, is_statistic
from fedvlp.core.validate import require

LENGTH = "length"
"""Name of |a_i| in its average."""


@dataclass(frozen=True)
class FedNova(Method):
    """For sites that pass over their own records, and so take different numbers of steps; in the paper's symbols.

    x: the model; y_i: that of site i after tau_i steps; p_i = n_i / n; |a_i|: the length of its path in steps, which is
    tau_i under plain SGD:

        d_i = (x - y_i) / (eta |a_i|)                                                              (1)
        x <- x - tau_eff eta sum_i p_i d_i,  tau_eff = sum_i p_i |a_i|                             (2)

    FedAvg's mean is the same with p_i |a_i| / tau_eff in the place of p_i: a site that takes more steps counts for more
    than its records.

    What leaves a site is what leaves it under FedAvg: the server counts |a_i| from n_i and the settings. No memory.
    Equal numbers of steps, as with ``local_epochs=0``, are FedAvg bit for bit.
    Differs: running statistics follow no gradient and are FedAvg's mean. AdamW has no a_i in the paper and counts as
    SGD. Of a learning rate that warms up a step counts its share; steps that make up for a warm-up, and moments that
    are kept across rounds, are not in a_i. With kept moments a site warms up in its first round alone, and the server
    cannot tell which round that was: a warm-up is then refused. Where a limit lowers n_i (``rounds.max_share``), d_i
    has the steps that the site took, and tau_eff, which is free to choose, those of the lowered count. Under a trimmed
    mean or a median (``rounds.averaging``) that average of the d_i takes the place of their sum, and that of the |a_i|
    the place of tau_eff.
    """

    local_epochs: int = 1  # E, passes of a site over its records in a round; 0: local_steps at every site
    batch_size: int = field(default=32, metadata={"follows": "training.batch_size"})  # B
    momentum: float = field(default=0.0, metadata={"follows": "training.momentum"})  # rho, of SGD
    warmup_steps: int = field(default=0, metadata={"follows": "training.warmup_steps"})  # of every phase

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.local_epochs >= 0, f"local_epochs is {self.local_epochs}; 0 = local_steps at every site")

    def refuse_settings(self, experiment: Any) -> None:
        training = experiment.training
        require(
            not training.local_epochs,
            f"training.local_epochs is {training.local_epochs}: FedNova counts its own; set method.local_epochs",
        )
        require(
            training.optimizer_state == "reset" or not training.warmup_steps or not self.local_epochs,
            f"training.optimizer_state is {training.optimizer_state} and warmup_steps {training.warmup_steps}: FedNova "
            "counts the steps of a warm-up, and with kept moments a site warms up in its first round alone; set "
            "warmup_steps to 0 or optimizer_state to reset",
        )

    def taken(self, samples: int) -> int:
        """tau_i: the steps of a site with ``samples`` records."""
        return self.local_epochs * one_pass(samples, self.batch_size) if self.local_epochs else self.local_steps

    def path(self, steps: int) -> float:
        """|a_i|: how often the gradients of ``steps`` steps count in x - y_i, all together, in units of eta.

        With momentum step k moves by all gradients so far, v = rho v + g: (1 - rho^k) / (1 - rho) of one.
        """
        length = velocity = 0.0
        for step in range(steps):
            velocity = self.momentum * velocity + 1
            length += velocity * min(1.0, (step + 1) / max(1, self.warmup_steps))
        return length

    # Server half
    def aggregator(self, server: Server, phase: str) -> Aggregator:
        return NormalisedMean(self, server, phase) if self.local_epochs else super().aggregator(server, phase)

    # Site half
    def batches(self, client: Client, message: Broadcast, batch_size: int, generator: Generator) -> Iterator[Batch]:
        if not self.local_epochs:
            return super().batches(client, message, batch_size, generator)
        return client.data.train_batches(self.taken(client.data.num_train), batch_size, generator)


class NormalisedMean:
    """x + W (M - x): M is the mean of the y_i with weights u_i = p_i / |a_i|, and W = tau_eff sum_i u_i.

    A robust average has no such weights to divide by: it is given x - eta d_i, so M is what it makes of these (in units
    of the first site's |a|), and W its average of the |a_i|.
    """

    def __init__(self, method: FedNova, server: Server, phase: str) -> None:
        self._method = method
        self._server = server
        shared = {name: t for name, t in server.state.items() if method.shares(name, phase)}
        statistics = {name: t for name, t in shared.items() if is_statistic(name)}
        weights = {name: t for name, t in shared.items() if name not in statistics}
        self._names = [name for name, t in weights.items() if t.is_floating_point()]
        self._moved = server.mean(weights, method.expected_weight(server), server.spare)
        self._plain = server.mean(statistics)
        self._robust = server.averaging.robust
        self._lengths = server.mean({LENGTH: torch.zeros((), dtype=torch.float64)})
        self._first = 0.0  # |a| of the first site: u_i in its units, so that equal steps leave n_i as it is
        self._equal = True
        self._samples = self._normalised = self._path = 0.0  # sums of n_i, of u_i and of n_i |a_i|

    def add(self, update: Update) -> None:
        method, server = self._method, self._server
        weight = method.weight(server, update)
        if weight == 0:
            return
        # |a_i| of the steps that the site took, and of those that the server counts for it.
        own = method.path(method.taken(server.samples.get(update.site, update.num_samples)))  # that the site took
        counted = method.path(method.taken(update.num_samples))
        self._first = self._first or own
        self._equal &= own == counted == self._first
        # u_i in units of the first |a|, so that equal steps give the very weights of FedAvg.
        normalised = weight * (self._first / own)  # eq. 1
        if self._robust:
            self._moved.add(self._stretched(update.state, self._first / own), weight)  # eq. 1
            self._lengths.add({LENGTH: torch.tensor(counted, dtype=torch.float64)}, weight)
        else:
            self._moved.add(update.state, normalised)
        self._plain.add(update.state, weight)
        self._samples += weight
        self._normalised += normalised
        self._path += weight * counted

    def commit(self) -> None:
        mean = self._moved.result()
        self._server.replace(mean if self._equal else self._stretched(mean, self._factor()))
        self._server.replace(self._plain.result())

    def _factor(self) -> float:
        """W."""
        if self._robust:
            return float(self._lengths.result()[LENGTH]) / self._first
        effective = self._path / self._samples  # eq. 2: tau_eff
        return effective * self._normalised / (self._samples * self._first)

    def _stretched(self, weights: Mapping[str, Tensor], factor: float) -> State:
        """x + W (M - x), M being ``weights`` and W the ``factor``; in float64."""
        state = self._server.state
        stretched = {}
        for name in self._names:
            moved = torch.lerp(state[name].double(), weights[name].double(), factor)
            stretched[name] = moved.to(state[name].dtype)
        return stretched
