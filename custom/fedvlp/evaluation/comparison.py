"""Whether one model's area under the ROC curve differs from another's on the same records: DeLong's test, and Holm's.

DeLong, DeLong and Clarke-Pearson, 1988 (doi:10.2307/2531595), by the midranks of Sun and Xu, 2014
(doi:10.1109/LSP.2014.2337313): N log N instead of a comparison of every positive with every negative. The test takes
records for independent; where patients have several, read the bootstrap interval over patients beside it.
Holm, 1979 (https://www.jstor.org/stable/4615733): several comparisons at one familywise level.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DeLong:
    """Two areas on the same records, 0..1, and the test of their difference."""

    one: float
    other: float
    variance: float  # of ``one - other``
    p: float  # two-sided; 1 where the models order the records alike, nan where they differ without any variance

    @property
    def difference(self) -> float:
        """``one - other``."""
        return self.one - self.other


def midranks(scores: Tensor) -> Tensor:
    """Ranks [N] float64 from 1 of scores [N]; equal scores share the mean of their ranks."""
    _, distinct, counts = scores.unique(return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts - 1) / 2).double()[distinct]


def components(scores: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    """DeLong's V10 [P] of the P positives and V01 [M] of the M negatives; the mean of either is the area.

    V10 of a positive is the share of negatives that it outscores (a tie a half), V01 of a negative that of the
    positives that outscore it. With midranks T among all and T' among its own class, V10 = (T - T') / M and
    V01 = 1 - (T - T') / P.
    """
    scores, positive = scores.double(), truth == 1
    ranks = midranks(scores)
    v10 = (ranks[positive] - midranks(scores[positive])) / int((~positive).sum())
    v01 = 1 - (ranks[~positive] - midranks(scores[~positive])) / int(positive.sum())
    return v10, v01


def delong(one: Tensor, other: Tensor, truth: Tensor) -> DeLong:
    """Compares the scores ``one`` and ``other`` [N] on records of ``truth`` [N] in {1, 0}.

    Raises ValueError unless all have one length and both classes have at least 2 records.
    """
    positives, negatives = int((truth == 1).sum()), int((truth == 0).sum())
    if not len(one) == len(other) == len(truth) == positives + negatives or min(positives, negatives) < 2:
        raise ValueError(
            f"delong: {len(one)} and {len(other)} scores, {positives} positives and {negatives} negatives; expected "
            "one score of each model a record, and at least 2 records of each class; measure on more records"
        )
    pairs = [components(scores, truth) for scores in (one, other)]
    v10, v01 = (torch.stack([pair[side] for pair in pairs]) for side in (0, 1))  # [2, P], [2, M]
    apart = v10[0] - v10[1], v01[0] - v01[1]
    variance = float(apart[0].var() / positives + apart[1].var() / negatives)
    first, second = (float(area) for area in v10.mean(dim=1))
    return DeLong(first, second, variance, _two_sided(first - second, variance))


def _two_sided(difference: float, variance: float) -> float:
    """p of a normal difference. Without variance the models order every pair alike, or in the same other way.

    In the second case there is nothing to judge the difference by: nan. Four records would make it certain.
    """
    if variance <= 0:
        return 1.0 if abs(difference) < 1e-12 else math.nan
    return math.erfc(abs(difference) / math.sqrt(2 * variance))


def holm(p: Sequence[float]) -> list[float]:
    """The p of several comparisons, adjusted: below 0.05 is significant at a familywise level of 0.05.

    In rising order the k-th of m is multiplied by m - k + 1, and none may fall below the one before it. A comparison
    without p, nan, is none of the m and stays nan.
    """
    adjusted, least = [math.nan] * len(p), 0.0
    judged = sorted((index for index, value in enumerate(p) if not math.isnan(value)), key=lambda index: p[index])
    for rank, index in enumerate(judged):
        least = max(least, min(1.0, p[index] * (len(judged) - rank)))
        adjusted[index] = least
    return adjusted
