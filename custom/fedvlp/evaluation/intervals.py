"""95 % intervals: Student's t over paired seeds, and a bootstrap over the patients whose records were measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np

DRAWS = 2000
"""Of a bootstrap."""


@dataclass(frozen=True)
class Interval:
    """A figure, or a difference of two, with its 95 % interval; nan where there is none."""

    mean: float
    low: float
    high: float

    @property
    def side(self) -> int:
        """On which side of 0 the whole interval lies, 1 or -1; 0: it does not exclude 0, or there is none."""
        return int(self.low > 0) - int(self.high < 0)

    def __str__(self) -> str:
        bounds = "" if math.isnan(self.low) else f" [{self.low:+.1f}, {self.high:+.1f}]"
        return f"{self.mean:+.1f}{bounds}"

    def unsigned(self) -> str:
        """The same for a figure that is no difference."""
        return f"{self.mean:.1f} [{self.low:.1f}, {self.high:.1f}]"


def over_seeds(differences: Sequence[float]) -> Interval:
    """Mean and interval (Student's t) of paired differences, one a seed. Raises ValueError where there are none."""
    if not differences:
        raise ValueError("interval: no seed, so no difference; measure at least one")
    mean = fmean(differences)
    if len(differences) < 2:
        return Interval(mean, math.nan, math.nan)
    from scipy.stats import t

    reach = float(t.ppf(0.975, len(differences) - 1)) * stdev(differences) / math.sqrt(len(differences))
    return Interval(mean, mean - reach, mean + reach)


class Bootstrap:
    """Draws the patients of every site again, with replacement; the same draws for every model that is compared.

    What it measures is how far the figures of these models would move with other patients. How far another seed of the
    training would move them it does not say.
    """

    def __init__(self, patients: Mapping[str, Sequence[str]], draws: int = DRAWS, seed: int = 0) -> None:
        """``patients``: site -> the patient [n] of each of its records that were measured."""
        rng = np.random.default_rng(seed)
        self._records: dict[str, np.ndarray] = {}  # site -> [draws, n], how often each record was drawn
        for site, of_records in patients.items():
            number = np.unique(np.asarray(of_records), return_inverse=True)[1]  # [n], 0..P-1
            count = int(number.max()) + 1
            drawn = rng.multinomial(count, np.full(count, 1 / count), size=draws)  # [draws, P]
            self._records[site] = drawn[:, number].astype(np.float64)

    def average(self, of_records: Mapping[str, np.ndarray]) -> np.ndarray:
        """Unweighted mean over sites of the mean figure of a site's records: as measured, then by draw [1 + draws].

        ``of_records``: site -> the figure [n] of each record.
        """
        return self._by_site(of_records).mean(axis=0)

    def worst(self, of_records: Mapping[str, np.ndarray]) -> np.ndarray:
        """The same of the worst site, whichever that is in a draw: [1 + draws]."""
        return self._by_site(of_records).min(axis=0)

    def _by_site(self, of_records: Mapping[str, np.ndarray]) -> np.ndarray:
        """Mean figure of each site, as measured and by draw: [sites, 1 + draws]."""
        rows = []
        for site, figures in of_records.items():
            drawn = self._records[site]
            rows.append([figures.mean(), *(drawn @ figures / drawn.sum(axis=1))])
        return np.asarray(rows)


def of_draws(values: np.ndarray) -> Interval:
    """The value as measured, which is the first of ``values`` [1 + draws], and the percentiles of the others."""
    low, high = np.percentile(values[1:], [2.5, 97.5])
    return Interval(float(values[0]), float(low), float(high))
