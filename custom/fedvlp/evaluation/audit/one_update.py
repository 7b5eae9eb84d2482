"""Membership of one update: can its receiver, who knows the model before it, say which records it was trained on?

Measured where the records are, before the update leaves: on the records that it was trained on against the site's
held-out ones of as many findings and texts of like length. Scores are loss and cosine of each record after the update,
how far it moved them, and whether it went against the record's gradient (gradients.py).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedvlp.core.client import Client
from fedvlp.core.seeds import seed
from fedvlp.core.site_error import SiteError
from fedvlp.core.types import MODALITIES, Batch, State
from fedvlp.evaluation.audit.gradients import ALIGNED
from fedvlp.evaluation.audit.membership import (
    MEMBERS,
    OTHERS,
    POOL,
    Batches,
    Membership,
    classifies,
    matching_weights,
    membership,
    record_directions,
    record_scores,
)
from fedvlp.evaluation.intervals import Figure, Interval, area_of, bootstrap

OUTGOING, MOVED = "update", ", moved"
MOST = 512
"""Records on either side, by lot; more only narrow the interval."""

REFERENCE, BATCH = 64, 32
HELD_OUT = ("val", "test")


class UnmeasuredError(SiteError, ValueError):
    """Membership of this update cannot be measured with what this site holds; the text says what is missing."""


def strongest(client: Client, before: State, sent: State, trained: Iterable[int], resamples: int = 200) -> Membership:
    """The strongest of the attacks on an update. ``before``: the whole model that it starts from, on the site.

    ``sent``: the tensors that leave. ``trained``: positions in the training split. The client's own tensors must be
    none of ``before``, and hold the model with ``sent`` in the end. Raises UnmeasuredError.
    """
    after = before | {name: tensor.detach().clone() for name, tensor in client.here(sent).items() if name in before}
    change = {name: after[name].cpu() - before[name].cpu() for name in sent if name in before}
    if not change:
        raise UnmeasuredError(public="the update holds no tensors of the model")
    batches = _batches(client, trained)
    client.set_trainable(lambda name: True)
    client.load(before)
    start = record_scores(client.model, batches)
    aligned = record_directions(client.model, batches, change).alignment()
    client.load(after)
    scores = record_scores(client.model, batches)
    scores |= {name + MOVED: score - start[name] for name, score in scores.items()}
    member, weight = _sides(batches)
    if not bool((weight > 0).any()):
        raise UnmeasuredError(public="no held-out record is like one that was trained on")
    rows = range(len(member))
    measured = [
        membership(OUTGOING, attack, client.name, of.cpu(), member, weight, rows, resamples)
        for attack, of in {**scores, ALIGNED: aligned}.items()
    ]
    return max(measured, key=lambda row: row.area.low)


def _batches(client: Client, trained: Iterable[int]) -> Batches:
    """What is compared; held-out records come first to the pool, at most a quarter of them.

    Of more than ``MOST`` records a side is a sample, always the same: the first rows of a table may be of one year or
    of one machine.
    """
    data: Any = client.data
    generator = torch.Generator().manual_seed(seed(client.seed, client.name, "membership"))
    rows = _sampled(sorted(trained), generator)
    members = list(data.batches("train", BATCH, drop_last=False, rows=rows))
    held = _sampled(range(sum(data.sizes.get(split, 0) for split in HELD_OUT)), generator)
    others: list[Batch] = []
    for split in HELD_OUT:
        size = data.sizes.get(split, 0)
        mine, held = held[held < size], held[held >= size] - size  # positions go on from one split to the next
        others += data.batches(split, 8, drop_last=False, rows=mine)
    pool = others[: min(REFERENCE // 8, len(others) // 4)]
    if not members or not pool:
        raise UnmeasuredError(public="there are too few held-out records to compare with")
    of = {MEMBERS: members, OTHERS: others[len(pool) :], POOL: pool}
    client.model.eval()
    paired = all(set(MODALITIES) <= batch.keys() for batch in (*members, *others))
    if not paired and not classifies(client.model, members):
        raise UnmeasuredError(public="records lack an image or a report")
    return of


def _sampled(rows: Sequence[int], generator: torch.Generator) -> Tensor:
    """At most ``MOST`` of the rows, [n] int64, in an order by lot."""
    order = torch.randperm(len(rows), generator=generator)[:MOST]
    return torch.tensor(rows, dtype=torch.int64)[order]


def _sides(batches: Batches) -> tuple[Tensor, Tensor]:
    """Which records are members, [N] bool, and what each weighs, so that both sides are alike."""
    asked = [*batches[MEMBERS], *batches[OTHERS]]
    count = sum(_size(batch) for batch in batches[MEMBERS])
    strata = _strata(asked)
    member = torch.arange(len(strata)) < count
    return member, matching_weights(strata, member)


def _size(batch: Batch) -> int:
    return len(batch["row"])


def _strata(batches: Sequence[Batch]) -> list[tuple[int, bool]]:
    """Of each record how many findings it has, up to three, and whether its report is longer than the median."""
    present = [(batch["labels"] == 1).sum(dim=1).cpu() if "labels" in batch else _none(batch) for batch in batches]
    words = [batch["text_mask"].sum(dim=1).cpu() if "text_mask" in batch else _none(batch) for batch in batches]
    lengths = torch.cat(words)
    longer = lengths > lengths.double().median()
    return list(zip(torch.cat(present).clamp(max=3).tolist(), longer.tolist(), strict=True))


def _none(batch: Batch) -> Tensor:
    return torch.zeros(_size(batch), dtype=torch.int64)


# Words read off an update: only the rows of words that occurred have a gradient in a word embedding (MedLeak's start).
#
# AdamW's decay shrinks every row alike, so that the rows of words that occurred are those that changed otherwise.

TOLERANCE = 4e-6
"""Largest change, relative to a row's largest number, that float32's rounding makes of a shrunk row."""


@dataclass(frozen=True)
class Words:
    """What an update of one site tells of the words of the reports that it was trained on, percent."""

    site: str
    reports: int
    steps: int
    words: int  # different ones in these reports
    recovered: float  # of these, the share whose rows stand out
    right: float  # of the rows that stand out, the share whose words are in the reports; nan where none does
    guess: float  # the same if every word of the vocabulary were named

    HEAD = ("site", "reports", "steps", "words", "recovered, %", "right, %", "by guessing, %")

    def cells(self) -> tuple[str, ...]:
        """A line of a table of ``HEAD``."""
        shares = ("none" if math.isnan(of) else f"{of:.1f}" for of in (self.recovered, self.right, self.guess))
        return self.site, f"{self.reports:,}", str(self.steps), f"{self.words:,}", *shares


def standing_out(before: Tensor, after: Tensor) -> Tensor:
    """[V] bool: the rows of an embedding [V, W] that changed otherwise than by the decay that all rows share."""
    before, after = before.double(), after.double()
    norms = before.square().sum(dim=1)
    known = norms > 0
    shrunk = ((after * before).sum(dim=1)[known] / norms[known]).median() if bool(known.any()) else torch.tensor(1.0)
    rest = (after - shrunk * before).abs().amax(dim=1)
    return rest > TOLERANCE * before.abs().amax(dim=1)


def recovered(site: str, before: Tensor, after: Tensor, read: Tensor, reports: int, steps: int) -> Words:
    """The attack on one update. ``read``: ids of the words of the reports that were trained on, any shape."""
    out = standing_out(before, after)
    there = torch.zeros(len(before), dtype=torch.bool)
    there[read.flatten()] = True
    both, named = int((out & there).sum()), int(out.sum())
    count = int(there.sum())
    right = 100 * both / named if named else float("nan")
    return Words(site, reports, steps, count, 100 * both / count, right, 100 * count / len(before))


# Whose update is it? An attacker who holds some records of each site tells an update that names no site.
#
# An update goes against the gradient of records that are like those it was trained on. So the attack compares, for
# every batch of every known site, the cosine of minus its gradient with each update (as gradient-based property
# inference does; Melis et al., 2019, https://arxiv.org/abs/1805.04049), less the batch's mean over the updates. The
# control are the same figures with the updates given to the sites in every order, their own among them: a few sites are
# told apart by chance rather often. Fewer than five sites have so few orders that not even the best of them lies above
# where 95 % are.

ORDERS = 200  # in which updates are given to sites, at most


@dataclass(frozen=True)
class SiteInference:
    """How well updates are told by whose they are, percent."""

    count: int  # of updates, one a site
    batches: int  # of held-out records of the sites
    area: Interval  # the site's own batches against the others'; over the batches
    chance: Interval  # the same with updates and sites in all orders: their mean, and where at least 95 % of them are
    right: float  # updates whose own site scores highest
    guess: float

    HEAD = ("updates", "batches", "area, %", "by chance, %", "right, %", "by guessing, %")

    def cells(self) -> tuple[str, ...]:
        """A line of a table of ``HEAD``."""
        areas = (self.area.unsigned(), self.chance.unsigned())
        return str(self.count), str(self.batches), *areas, f"{self.right:.1f}", f"{self.guess:.1f}"


def told(cosines: Tensor, owner: Sequence[int], resamples: int = 1000) -> SiteInference:
    """The attack on U updates. ``cosines`` [B, U]: of minus the gradient of each batch with each update.

    ``owner`` [B]: the number of the update that the batch's site made; every update has a batch.
    """
    batches, count = cosines.shape
    scores = cosines.double() - cosines.double().mean(dim=1, keepdim=True)  # [B, U]
    own = torch.tensor(list(owner))
    whose = [batch for batch in range(batches) for _ in range(count)]
    area = bootstrap(_area(scores, own), whose, resamples)
    once = torch.ones(1, batches * count, dtype=torch.float64)
    by_chance = [float(_area(scores, torch.tensor(order)[own])(once)) for order in _orders(count)]
    # A bound is the AUC of an order. Between two of these it would leave out the larger, be it the sites' own or not.
    low = float(np.quantile(by_chance, 0.025, method="lower"))
    high = float(np.quantile(by_chance, 0.975, method="higher"))
    of_site = torch.stack([scores[own == number].mean(dim=0) for number in range(count)])  # [sites, U]
    right = float((of_site.argmax(dim=0) == torch.arange(count)).double().mean())
    chance = Interval(float(np.mean(by_chance)), low, high)
    return SiteInference(count, batches, area, chance, 100 * right, 100 / count)


def _area(scores: Tensor, own: Tensor) -> Figure:
    """Percent: of scores [B, U], those of each batch with the update ``own`` [B] against the others."""
    truth = (own[:, None] == torch.arange(scores.shape[1])).double()
    figure = area_of(scores.flatten(), truth.flatten())
    return lambda times: 100 * figure(times)


def _orders(count: int) -> list[tuple[int, ...]]:
    """All orders of so many updates; where there are more, their own and others at random, ``ORDERS`` in all."""
    if count <= 5:
        return list(itertools.permutations(range(count)))
    rng = np.random.default_rng(0)
    return [tuple(range(count)), *(tuple(rng.permutation(count).tolist()) for _ in range(ORDERS - 1))]
