"""Distributionally robust site weights (Shuai et al., 2024, https://arxiv.org/abs/2404.03854): hard sites weigh more.

The part that FedDRA and FedRGB share: the server holds a point w of the simplex, moves it towards sites with a high
loss by an exponentiated-gradient step and projects it onto a divergence ball around the uniform vector.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedvlp.core.aggregation import Aggregator
from fedvlp.core.client import Client, NoLossError
from fedvlp.core.method import Method
from fedvlp.core.seeds import seed
from fedvlp.core.server_state import Server
from fedvlp.core.types import Batch, Broadcast, Update, VLOutput
from fedvlp.core.validate import require
from fedvlp.methods.math.dro import dro_weights, step_multiplier

WEIGHTS, LOSSES = "dro_weights", "dro_losses"
"""In the server's memory: w and the last known v, float64 [N] each."""

HARDNESS, ERROR = "loss", "loss_error"
"""The scalar of an update that holds v_i; and a figure for people, the standard error of v_i over its batches."""

LEAST_BATCHES = 4
"""The probe reads at least so many batches where a site has them: one has a standard deviation of 0.3 nats."""

ACTIONS = ("lr", "loss", "aggregate")


@dataclass(frozen=True)
class RobustWeights(Method):
    """Site weights w in ``server.memory``, moved once a round; ``rho = 0`` keeps them uniform, bit for bit.

    Differs from the printed algorithm: the loss v_i of the model that a round starts from travels with the reply of
    the round's first phase (no visit of its own), so w moves right after that phase and acts from the next phase on;
    the initial model's loss (round 0) does not move it.
    """

    weighting: str = "uniform"  # lines 3 and 5: 1/N
    gamma: float = 0.5  # step of the exponentiated gradient, >= 0 (released code: 0.01 x 50 steps)
    rho: float = 0.1  # radius of the divergence ball, >= 0; 0 is uniform weights
    divergence: str = "chi2"  # chi2 (released code) | kl
    projection: str = "euclid"  # euclid (released code) | kl
    dro_apply: str = "lr"  # what N*w_i scales: lr (eta w_i in the paper), loss (released code: a no-op under AdamW),
    #                        aggregate (the server's mean)
    dro_fraction: float = 1.0  # share of a site's training records on which v_i is measured (released code: 0.1)
    dro_records: int = 0  # v_i is measured on at most so many records; 0: however many
    dro_batch: int = 32  # the same at every site: the contrastive loss contains log B
    loss_cap: float = 100.0  # a larger reported v_i counts as this

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.gamma < math.inf, f"gamma is {self.gamma}; a finite step size that is not negative")
        require(self.rho >= 0, f"rho is {self.rho}; the radius must not be negative (0 = uniform weights)")
        require(self.divergence in ("chi2", "kl"), f"divergence is {self.divergence!r}; choose chi2 or kl")
        require(self.projection in ("euclid", "kl"), f"projection is {self.projection!r}; choose euclid or kl")
        require(self.dro_apply in ACTIONS, f"dro_apply is {self.dro_apply!r}; choose one of {', '.join(ACTIONS)}")
        require(0 < self.dro_fraction <= 1, f"dro_fraction is {self.dro_fraction}; it must be in (0, 1]")
        require(self.dro_records >= 0, f"dro_records is {self.dro_records}; 0 = however many")
        require(self.dro_batch >= 2, f"dro_batch is {self.dro_batch}; a contrastive batch needs at least 2")
        require(self.loss_cap > 0, f"loss_cap is {self.loss_cap}; it must be positive")

    def probes(self) -> tuple[str, ...]:
        return (HARDNESS,) if self.rho > 0 else ()  # uniform weights need no losses

    def probe_records(self) -> int:
        return self.dro_batch if self.probes() else 0

    def start(self, server: Server) -> None:
        count = len(server.sites)
        server.memory[WEIGHTS] = torch.full((count,), 1 / count, dtype=torch.float64)
        server.memory[LOSSES] = torch.full((count,), math.nan, dtype=torch.float64)

    def multiplier(self, server: Server, site: str) -> float:
        """m_i = N w_i: exactly 1.0 under uniform weights."""
        return float(step_multiplier(server.memory[WEIGHTS].numpy())[server.sites.index(site)])  # line 1

    def broadcast(self, server: Server, site: str) -> Broadcast:
        message = super().broadcast(server, site)
        if self.dro_apply == "lr":
            return replace(message, lr_scale=self.multiplier(server, site))  # line 1
        if self.dro_apply == "loss":
            return replace(message, loss_scale=self.multiplier(server, site))
        return message

    def weight(self, server: Server, update: Update) -> float:
        weight = super().weight(server, update)
        return weight * self.multiplier(server, update.site) if self.dro_apply == "aggregate" else weight

    def aggregator(self, server: Server, phase: str) -> Aggregator:
        return RobustAggregator(self, server, super().aggregator(server, phase))

    def reweigh(self, server: Server, losses: Mapping[str, float]) -> None:
        """w <- Proj(EG(w, v)) (spec 3.1); a site whose v_i is unknown counts with its last one."""
        known = server.memory[LOSSES].clone()
        for site, loss in losses.items():
            known[server.sites.index(site)] = min(loss, self.loss_cap)
        weights = dro_weights(  # lines 6b and 6c
            server.memory[WEIGHTS].numpy(), known.numpy(), self.gamma, self.rho, self.divergence, self.projection
        )
        server.memory |= {WEIGHTS: torch.from_numpy(weights), LOSSES: known}

    def probe(self, client: Client, message: Broadcast) -> dict[str, float]:
        """v_i: mean hardness of the received model over batches of the training records, and its standard error.

        The records are a fixed ``dro_fraction`` and at most ``dro_records``, of at least ``LEAST_BATCHES`` batches
        (spec 3.6, Z4). v_i is nan at a site with fewer records than one batch of ``dro_batch``; a single batch has no
        standard error.
        """
        count = client.data.num_train
        if count < self.dro_batch:
            return {HARDNESS: math.nan}
        # The same records in every round: the site's losses of two rounds can be compared.
        wanted = min(math.floor(self.dro_fraction * count), self.dro_records or count)
        wanted = max(LEAST_BATCHES * self.dro_batch, wanted)
        generator = torch.Generator().manual_seed(seed(client.seed, client.name, "dro"))
        rows = torch.randperm(count, generator=generator)[:wanted]
        batches = client.data.batches("train", self.dro_batch, drop_last=True, rows=rows)
        outputs = ((batch, self.received(client, batch, message)) for batch in batches)
        losses = torch.stack([self.hardness(client.divergences(output, batch)) for batch, output in outputs])
        measured = {HARDNESS: float(losses.mean())}  # line 6a
        if len(losses) > 1:
            measured[ERROR] = float(losses.std()) / math.sqrt(len(losses))
        return measured

    def received(self, client: Client, batch: Batch, message: Broadcast) -> VLOutput:
        """What the received model makes of a training batch."""
        output: VLOutput = client.model(batch)
        return output

    def hardness(self, terms: dict[str, Tensor]) -> Tensor:
        """v_i of one batch from the objective's terms (``Client.divergences``): the contrastive loss."""
        return contrastive(terms)  # line 6a


class RobustAggregator:
    """The mean of the updates; then w moves by the losses v that came with them."""

    def __init__(self, method: RobustWeights, server: Server, mean: Aggregator) -> None:
        self._method = method
        self._server = server
        self._mean = mean
        self._losses: dict[str, float] = {}

    def add(self, update: Update) -> None:
        self._mean.add(update)
        loss = update.scalars.get(HARDNESS, math.nan)  # sent in the first phase of a round alone
        if not math.isnan(loss):
            self._losses[update.site] = loss

    def commit(self) -> None:
        self._mean.commit()
        # In round 0 nothing has been trained, and losses of a random model say nothing of a site.
        if self._losses and self._server.round > 0:
            self._method.reweigh(self._server, self._losses)


def contrastive(terms: Mapping[str, Tensor]) -> Tensor:
    """The contrastive one of the objective's terms. Raises NoLossError where there is none."""
    if "contrastive" not in terms:
        raise NoLossError(
            f"the terms of the objective for this site's records are: {', '.join(sorted(terms)) or 'none'}; FedDRA and "
            "FedRGB need a contrastive one. Give them sites with images and reports and an objective that contrasts "
            "the two, or choose another method",
            public=(
                "the objective has no contrastive loss for this site's records, and FedDRA and FedRGB need "
                "one. Give them sites with images and reports and an objective that contrasts the two, or "
                "choose another method"
            ),
        )
    return terms["contrastive"]
