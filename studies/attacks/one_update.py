"""What one update tells: words of the reports that it was trained on, and whose it is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedvlp.evaluation.audit.one_update import standing_out
from fedvlp.evaluation.intervals import Figure, Interval, area_of, bootstrap


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
