"""A site's privacy budget: the releases it has made of a data set, kept on its disk, and the epsilon they add up to."""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
        raise PrivacyError(public="the accountant is missing at this site: pip install 'fedvlp[privacy]'") from None
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

    Each entry carries a hash of itself and of the entry before it. ``marker`` is a second file, which the site keeps
    in another place: the number of releases, the last hash, and a random number of this site's that the first hash
    begins with. So a ledger that is gone, cut, replaced by an older copy or by another site's is an error and no empty
    book. Whoever brings back both files as they were before is not noticed.
    """

    def __init__(self, path: Path, marker: Path) -> None:
        self.path = path
        self.marker = marker

    def spend(self, dataset: str, noise_multiplier: float, limit: float, delta: float) -> tuple[int, float]:
        """Books one release; returns how many there are now, and their epsilon.

        Raises PrivacyError, nothing booked, when epsilon would pass ``limit`` or the files cannot be trusted.
        """
        with self._locked():
            mark = self._mark()
            entries = self._entries(mark)
            noise_multiplier = float(noise_multiplier)  # 8 and 8.0 are one number, but not one text to hash
            releases: dict[float, int] = {}
            for entry in entries:
                if entry["data"] == dataset:
                    releases[entry["noise_multiplier"]] = releases.get(entry["noise_multiplier"], 0) + 1
            before = epsilon(releases, delta)
            releases[noise_multiplier] = releases.get(noise_multiplier, 0) + 1
            after = epsilon(releases, delta)
            if not after <= limit:
                raise PrivacyError(
                    f"the privacy budget of {dataset!r} is used up: epsilon {before:.3f} of {limit:g} at delta "
                    f"{delta:g}, and one more release would make it {after:.3f}; nothing was sent",
                    public=(
                        "the privacy budget is used up: epsilon {before:.3f} of {limit:g} at delta {delta:g}, and one"
                        " more release would make it {after:.3f}; nothing was sent"
                    ),
                    before=before,
                    limit=limit,
                    delta=delta,
                    after=after,
                )
            link = _link(entries[-1]["link"] if entries else mark["site"], dataset, noise_multiplier)
            entries.append({"data": dataset, "noise_multiplier": noise_multiplier, "link": link})
            # The ledger first: when a kill comes between the two, it is ahead of its marker, which hides nothing.
            save_json(self.path, entries)
            save_json(self.marker, {**mark, "releases": len(entries), "link": link})
        return sum(releases.values()), after

    def _mark(self) -> dict[str, Any]:
        """The marker; at the very first use of the ledger a new one, written before the ledger is."""
        if not self.marker.exists():
            if self.path.exists():
                raise PrivacyError(
                    public=(
                        "the marker of this site's privacy ledger is gone, so the ledger's completeness cannot be "
                        "verified; restore it from a copy; until then nothing is sent"
                    )
                )
            new = {"site": secrets.token_hex(16), "releases": 0, "link": ""}
            save_json(self.marker, new)
            return new
        try:
            mark = json.loads(self.marker.read_text(encoding="utf-8"))
            if type(mark["releases"]) is int and mark["releases"] >= 0 and len(mark["site"]) == 32:
                return {"site": str(mark["site"]), "releases": mark["releases"], "link": str(mark["link"])}
        except (ValueError, KeyError, TypeError):
            pass
        raise PrivacyError(public="the marker of this site's privacy ledger is damaged; restore it from a copy")

    def _entries(self, mark: dict[str, Any]) -> list[dict[str, Any]]:
        """The entries, each one's hash checked. Raises PrivacyError unless they continue from what the marker knows."""
        made = mark["releases"]
        if not self.path.exists():
            if made:
                raise PrivacyError(
                    public=(
                        "the privacy ledger of this site is gone, and its marker says that {made} releases were made;"
                        " restore it from a copy; until then nothing is sent"
                    ),
                    made=made,
                )
            return []
        entries = self._read()
        last = mark["site"]
        for entry in entries:
            last = _link(last, entry["data"], entry["noise_multiplier"])
            if entry["link"] != last:
                raise PrivacyError(
                    public=(
                        "the privacy ledger of this site was altered, or is another site's; restore it from a copy; "
                        "until then nothing is sent"
                    )
                )
        if len(entries) < made or (made and entries[made - 1]["link"] != mark["link"]):
            raise PrivacyError(
                public=(
                    "the privacy ledger of this site is cut or an older copy: it holds {count} releases and its "
                    "marker says {made}; restore the newest copy; until then nothing is sent"
                ),
                count=len(entries),
                made=made,
            )
        return entries

    def _read(self) -> list[dict[str, Any]]:
        """What the file holds, with the right types. Raises PrivacyError for anything else."""
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            entries = [
                {"data": entry["data"], "noise_multiplier": float(entry["noise_multiplier"]), "link": entry["link"]}
                for entry in content
            ]
            if all(isinstance(entry["data"], str) and 0 < entry["noise_multiplier"] < math.inf for entry in entries):
                return entries
        except (ValueError, KeyError, TypeError):
            pass
        raise PrivacyError(
            public="the privacy ledger of this site is damaged; restore it from a copy; until then nothing is sent"
        )

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path.with_suffix(".lock"), "w") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)  # let go when the file is closed, also by a kill
            yield


def _link(previous: str, dataset: str, noise_multiplier: float) -> str:
    """The hash of an entry: of what it says and of the one before (of the site's number, at the first)."""
    said = json.dumps([previous, dataset, noise_multiplier])
    return hashlib.blake2b(said.encode(), digest_size=16).hexdigest()
