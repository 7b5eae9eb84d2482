"""A site's privacy budget: the releases it has made of a data set, kept on its disk, and the epsilon they add up to."""

from __future__ import annotations

import fcntl
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from fedvlp.core.checkpoint import save_json
from fedvlp.core.privacy import SENSITIVITY, PrivacyError

ORDERS = [1 + x / 10 for x in range(1, 100)] + [float(x) for x in (*range(11, 64), 96, 128, 192, 256, 512, 1024)]
"""Renyi orders that are tried; opacus' own list, and larger ones for small budgets."""


def epsilon(releases: Mapping[float, int], delta: float) -> float:
    """Epsilon at ``delta`` of ``releases`` {noise multiplier: how many}, an upper bound by opacus' RDP accountant.

    Neighbours are any two data sets of the site, so the sensitivity is twice the clipping norm. No sampling is
    assumed: a site takes part in every round and everybody knows it.
    """
    try:
        from opacus.accountants.analysis.rdp import compute_rdp, get_privacy_spent
    except ImportError:
        raise PrivacyError("the accountant is missing at this site: pip install 'fedvlp[privacy]'") from None
    if not any(releases.values()):
        return 0.0
    total = sum(
        compute_rdp(q=1.0, noise_multiplier=noise / SENSITIVITY, steps=count, orders=ORDERS)
        for noise, count in releases.items()
    )
    return float(get_privacy_spent(orders=ORDERS, rdp=total, delta=delta)[0])


class Ledger:
    """All releases of a site by data set, in one JSON file; several jobs may run at once.

    A release is written down, durably, before it is made: a kill in between wastes budget and never hides a release.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def spend(self, dataset: str, noise_multiplier: float, limit: float, delta: float) -> tuple[int, float]:
        """Books one release; returns how many there are now, and their epsilon.

        Raises PrivacyError, nothing booked, when epsilon would pass ``limit`` or the file cannot be trusted.
        """
        with self._locked():
            book = self._read()
            releases = book.setdefault(dataset, {})
            before = epsilon(releases, delta)
            releases[noise_multiplier] = releases.get(noise_multiplier, 0) + 1
            after = epsilon(releases, delta)
            if not after <= limit:
                raise PrivacyError(
                    f"the privacy budget of {dataset!r} is used up: epsilon {before:.3f} of {limit:g} at delta "
                    f"{delta:g}, and one more release would make it {after:.3f}; nothing was sent"
                )
            save_json(self.path, {name: {str(k): n for k, n in kept.items()} for name, kept in book.items()})
        return sum(releases.values()), after

    def _read(self) -> dict[str, dict[float, int]]:
        if not self.path.exists():
            return {}
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            book = {name: {float(k): n for k, n in kept.items()} for name, kept in content.items()}
            counts = [(k, n) for kept in book.values() for k, n in kept.items()]
            if all(0 < k < math.inf and isinstance(n, int) and n > 0 for k, n in counts):
                return book
        except (ValueError, AttributeError, TypeError):
            pass
        raise PrivacyError("the privacy ledger of this site is damaged; restore it from a copy, nothing is sent before")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path.with_suffix(".lock"), "w") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)  # let go when the file is closed, also by a kill
            yield
