"""95 % intervals: Student's t over paired seeds, and the bootstrap over the patients whose records were measured.

Images of one patient are alike, so a resample of the bootstrap (Efron, 1979, doi:10.1214/aos/1176344552; percentiles)
draws patients and takes all of a patient's records as often as it drew him. A figure of a resample is a function of how
often each record is in it: ``Figure``. With other patients a figure would move that far; how far another seed of the
training would move it, the bootstrap does not say.

The worst site is a minimum, and that of a resample lies below it: whichever site was drawn worst is taken. Percentiles
lie below it with it, so the interval of a worst site is that of the basic bootstrap too, reflected at the figure
(``of_worst``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np
import torch
from torch import Tensor

from fedvlp.evaluation.classification import refuse_nan

Figure = Callable[[Tensor], Tensor]
"""Figures [B] of B resamples from ``weights`` [B, N], how often each has each record; nan where it is undefined."""

AT_ONCE = 2**22  # weights held at once: 32 MB

DRAWS = 2000
"""Resamples by which runs are compared."""


@dataclass(frozen=True)
class Interval:
    """A figure, or a difference of two, with its 95 % interval; nan where there is none."""

    value: float  # nan where the records have none
    low: float
    high: float

    @property
    def side(self) -> int:
        """On which side of 0 the whole interval lies, 1 or -1; 0: it does not exclude 0, or there is none."""
        return int(self.low > 0) - int(self.high < 0)

    def __str__(self) -> str:
        bounds = "" if math.isnan(self.low) else f" [{_bound(self.low)}, {_bound(self.high)}]"
        return f"{self.value:+.1f}{bounds}"

    def unsigned(self, digits: int = 1) -> str:
        """The same for a figure that is no difference, with so many decimals."""
        bounds = "" if math.isnan(self.low) else f" [{self.low:.{digits}f}, {self.high:.{digits}f}]"
        return f"{self.value:.{digits}f}{bounds}"


def _bound(value: float) -> str:
    """A bound of a difference with one decimal; with the first digit that is not 0, where that would hide its sign."""
    text = f"{value:+.1f}"
    if value and not float(text):
        return f"{value:+.1g}"
    return text if value else "+0.0"  # without the sign of -0.0, which is none


def over_seeds(differences: Sequence[float], splits: float = 0.0) -> Interval:
    """Mean and interval (Student's t) of paired differences, one a seed.

    ``splits``: where every seed splits the same records anew, the number of tested records over that of trained ones;
    0 where a seed has records of its own. Such differences are no independent ones, since the splits overlap: their
    variance s^2 / n becomes (1 / n + splits) s^2 (Nadeau and Bengio, 2003, doi:10.1023/A:1024068626366, the corrected
    resampled t-test). Raises ValueError where there are no differences, and for splits below 0.
    """
    if splits < 0:
        raise ValueError(f"interval: splits is {splits}; expected tested records over trained ones, 0 or more")
    if not differences:
        raise ValueError("interval: no seed, so no difference; measure at least one")
    mean = fmean(differences)
    if len(differences) < 2:
        return Interval(mean, math.nan, math.nan)
    from scipy.stats import t

    reach = float(t.ppf(0.975, len(differences) - 1)) * stdev(differences) * math.sqrt(1 / len(differences) + splits)
    return Interval(mean, mean - reach, mean + reach)


def resampled(patients: Sequence[Hashable], resamples: int, seed: int) -> Iterator[Tensor]:
    """How often each of N records is in each resample of the P patients: weights [b, N] float64, some rows at a time.

    A resample draws P patients with replacement.
    """
    number: dict[Hashable, int] = {}
    owner = torch.tensor([number.setdefault(patient, len(number)) for patient in patients])  # [N]
    generator = torch.Generator().manual_seed(seed)
    for rows in torch.arange(resamples).split(max(1, AT_ONCE // max(1, len(patients)))):
        drawn = torch.randint(len(number), (len(rows), len(number)), generator=generator)  # [b, P]
        times = torch.zeros(drawn.shape, dtype=torch.float64).scatter_add_(1, drawn, torch.ones(drawn.shape).double())
        yield times[:, owner]


def bootstrap(figure: Figure, patients: Sequence[Hashable], resamples: int = 1000, seed: int = 0) -> Interval:
    """The figure of N records and its interval. ``patients`` [N]: the patient of each.

    Resamples without the figure (of one class alone, for an AUC) are left out. Raises ValueError without a record.
    """
    if not patients:
        raise ValueError("bootstrap: no record; expected at least one; measure on a split that has records.")
    value = float(figure(torch.ones(1, len(patients), dtype=torch.float64)))
    if len(set(patients)) < 2 or resamples < 2:
        return Interval(value, math.nan, math.nan)
    values = torch.cat([figure(weights) for weights in resampled(patients, resamples, seed)]).numpy()
    defined = values[~np.isnan(values)]
    low, high = np.quantile(defined, (0.025, 0.975)).tolist() if len(defined) else (math.nan, math.nan)
    return Interval(value, low, high)


def mean_of(values: Tensor, weight: Tensor | None = None) -> Figure:
    """The mean of ``values`` [N], each record weighing ``weight`` [N] (None: 1; 0 leaves it out)."""
    weight = torch.ones(len(values), dtype=torch.float64) if weight is None else weight.double()
    total = torch.where(weight > 0, values.double(), 0.0) * weight
    return lambda times: (times @ total) / (times @ weight)


def area_of(scores: Tensor, truth: Tensor) -> Figure:
    """The area under the ROC curve of scores [N] and truth [N] in {1, 0, nan: left out}; ties count a half.

    With weights p of the positives and n of the negatives, summed over equal scores in rising order, it is
    sum_d p_d (n_1 + ... + n_(d-1) + n_d / 2) / (sum p sum n). With weights 1 this is ``rank_sum_auc``.
    Raises ValueError for a score that is nan, unless its record is left out.
    """
    refuse_nan(scores[~truth.isnan()], "auc")
    _, distinct = scores.double().unique(return_inverse=True)  # [N], in rising order
    positive, negative = (truth == 1).double(), (truth == 0).double()

    def figure(times: Tensor) -> Tensor:
        zeros = torch.zeros(len(times), int(distinct.max()) + 1, dtype=torch.float64)
        p, n = (zeros.index_add(1, distinct, times * of_class) for of_class in (positive, negative))  # [B, D]
        below = n.cumsum(1) - n / 2
        return (p * below).sum(1) / (p.sum(1) * n.sum(1))

    return figure


def macro(figures: Sequence[Figure]) -> Figure:
    """The mean of those figures that a resample has."""
    return lambda times: torch.stack([figure(times) for figure in figures]).nanmean(dim=0)


def difference(one: Figure, other: Figure) -> Figure:
    """``one`` minus ``other`` on the same resamples."""
    return lambda times: one(times) - other(times)


class Bootstrap:
    """Draws the patients of every site again, with replacement; the same draws for every model that is compared.

    What it measures is how far the figures of these models would move with other patients. How far another seed of the
    training would move them it does not say. Nor does it say anything of a site with records of one patient: its draws
    are nan, and with them what is made of several sites.
    """

    def __init__(self, patients: Mapping[str, Sequence[str]], draws: int = DRAWS, seed: int = 0) -> None:
        """``patients``: site -> the patient [n] of each of its records that were measured."""
        self._records: dict[str, np.ndarray] = {}  # site -> [draws, n], how often each record was drawn
        for index, (site, of_records) in enumerate(patients.items()):
            drawn = torch.cat(list(resampled(of_records, draws, seed + index))).numpy()
            self._records[site] = drawn if len(set(of_records)) > 1 else np.full_like(drawn, math.nan)

    def average(self, of_records: Mapping[str, np.ndarray]) -> np.ndarray:
        """Unweighted mean over sites of the mean figure of a site's records: as measured, then by draw [1 + draws].

        ``of_records``: site -> the figure [n] of each record.
        """
        return self.by_site(of_records).mean(axis=0)

    def worst(self, of_records: Mapping[str, np.ndarray]) -> np.ndarray:
        """The same of the worst site, whichever that is in a draw: [1 + draws]."""
        return self.by_site(of_records).min(axis=0)

    def by_site(self, of_records: Mapping[str, np.ndarray]) -> np.ndarray:
        """Mean figure of each site, as measured and by draw: [sites, 1 + draws], in the order of ``of_records``."""
        rows = []
        for site, figures in of_records.items():
            drawn = self._records[site]
            rows.append([figures.mean(), *(drawn @ figures / drawn.sum(axis=1))])
        return np.asarray(rows)


def of_draws(values: np.ndarray) -> Interval:
    """The value as measured, which is the first of ``values`` [1 + draws], and the percentiles of the others."""
    low, high = np.percentile(values[1:], [2.5, 97.5])
    return Interval(float(values[0]), float(low), float(high))


def of_worst(values: np.ndarray, least: float = 0.0, most: float = 100.0) -> Interval:
    """The same of a worst site, or of the difference of two: the percentiles and the basic bootstrap interval together.

    The basic interval is twice the value minus the percentiles (Davison and Hinkley, 1997, section 5.2,
    doi:10.1017/CBO9780511802843). The draws lie below a minimum much as the minimum lies below the truth; percentiles
    have that bias twice, and the reflection takes it back, where sites are alike. Where one site is clearly the worst
    there is no bias, the percentiles are right, and the reflection would bring one in. Which it is nobody knows, so the
    interval holds both: as far to either side of the value as the farther percentile lies. It is cut to what the figure
    can be, ``least`` to ``most``. With ten or more equal sites it is still biased low.
    """
    drawn = of_draws(values)
    reach = max(drawn.value - drawn.low, drawn.high - drawn.value)
    return Interval(drawn.value, max(drawn.value - reach, least), min(drawn.value + reach, most))  # nan first: it stays


# Whether one model's area under the ROC curve differs from another's on the same records: DeLong's test, and Holm's.
#
# DeLong, DeLong and Clarke-Pearson, 1988 (doi:10.2307/2531595), by the midranks of Sun and Xu, 2014
# (doi:10.1109/LSP.2014.2337313): N log N instead of a comparison of every positive with every negative. The test takes
# records for independent; where patients have several, read the bootstrap interval over patients beside it.
# Holm, 1979 (https://www.jstor.org/stable/4615733): several comparisons at one familywise level.


@dataclass(frozen=True)
class DeLong:
    """Two AUCs on the same records, 0..1, and the test of their difference."""

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
