"""Canaries: reports of random words that are planted among the records, and how far training gives them away.

Exposure (Carlini et al., 2019, https://arxiv.org/abs/1802.08232, definition 2): log2 of the number of candidates minus
log2 of the rank of the planted phrase among them. A phrase that was never trained on has rank 1 to K with equal
probability, so an exposure of about 1.44 bits (:func:`by_chance`); one that the model has memorised has log2 K. The
paper ranks by a language model's perplexity, an image-text model ranks by its cosine with the canary's image.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlp.core.client import Client
from fedvlp.core.types import Batch
from fedvlp.evaluation.audit.membership import TEMPERATURE
from fedvlp.evaluation.intervals import Interval, bootstrap, mean_of

UNSEEN, PLANTED, MEMORISED = "never trained on", "among the records", "trained on alone"
"""The first and the last are controls: what must not be exposed, and what must."""

CANARIES, WORDS, CANDIDATES = 16, 12, 1024


@dataclass(frozen=True)
class Exposure:
    """How exposed canaries are, in bits."""

    canaries: str  # UNSEEN, PLANTED or MEMORISED
    site: str  # whose training they are planted in
    count: int
    times: float  # that each was seen, on average
    mean: Interval  # of their exposures
    largest: float
    chance: float  # mean of canaries that nobody trained on
    most: float  # of a canary that ranks first

    HEAD = ("canaries", "site", "count", "seen, times", "exposure, bits", "the most exposed", "by chance", "at most")

    def cells(self) -> tuple[str, ...]:
        """A line of a table of ``HEAD``."""
        bits = (f"{value:.2f}" for value in (self.largest, self.chance, self.most))
        return self.canaries, self.site, str(self.count), f"{self.times:.1f}", self.mean.unsigned(2), *bits


def phrases(count: int, vocabulary: Sequence[str], seed: int) -> list[str]:
    """So many reports of ``WORDS`` words, each drawn from ``vocabulary``."""
    rng = np.random.default_rng([seed, 3])
    return [" ".join(rng.choice(list(vocabulary), WORDS)) for _ in range(count)]


def exposures(film: Tensor, own: Tensor, others: Tensor) -> Tensor:
    """Exposure [C] of C canaries: unit vectors of their images [C, d], their phrases [C, d] and other phrases [K-1, d].

    A tie counts a half.
    """
    cosine = (film.double() * own.double()).sum(dim=1, keepdim=True)
    against = film.double() @ others.double().T  # [C, K-1]
    rank = 1 + (against > cosine).sum(dim=1) + (against == cosine).sum(dim=1) / 2
    return math.log2(1 + len(others)) - rank.log2()


def by_chance(candidates: int) -> float:
    """The expectation where each rank 1..K is as probable: log2 K - log2(K!) / K, towards 1 / ln 2 = 1.4427."""
    return math.log2(candidates) - math.lgamma(candidates + 1) / math.log(2) / candidates


def exposure(canaries: str, site: str, bits: Tensor, times: float, candidates: int) -> Exposure:
    """The figures of exposures [C], with an interval over the canaries."""
    mean = bootstrap(mean_of(bits), range(len(bits)))
    largest, most = float(bits.max()), math.log2(candidates)
    return Exposure(canaries, site, len(bits), times, mean, largest, by_chance(candidates), most)


# Training by which an audit plants what its attacks must find: of a client, on batches that are given.


def own_loss(output: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """CLIP's loss of an image-text model's output; of a classifier's, cross-entropy over labels that are 1 or 0."""
    if output.logits is not None:
        labels = batch["labels"].to(output.logits.device)
        known = (labels == 0) | (labels == 1)
        target = torch.where(known, labels, 0.0)
        return F.binary_cross_entropy_with_logits(output.logits, target, weight=known.float())
    scores = output.image @ output.text.T / TEMPERATURE
    own = torch.arange(len(scores), device=scores.device)
    return (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2


def train_on(client: Client, batches: Iterable[Batch], optimizer: torch.optim.Optimizer) -> None:
    """A step of the optimiser on each batch."""
    for batch in batches:
        loss = own_loss(client.model(batch), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def joined(batches: list[Batch]) -> Batch:
    """One batch of several; reports are padded to the longest."""
    longest = max(batch["text"].shape[1] for batch in batches)
    films = torch.cat([batch["image"] for batch in batches])
    padded = {
        name: torch.cat([F.pad(batch[name], (0, longest - batch[name].shape[1])) for batch in batches])
        for name in ("text", "text_mask")
    }
    return {"image": films, **padded}
