"""Words read off an update: only the rows of words that occurred have a gradient in a word embedding (MedLeak's start).

AdamW's decay shrinks every row alike, so that the rows of words that occurred are those that changed otherwise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

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
