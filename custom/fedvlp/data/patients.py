"""Who the patients of a data set are, for counting those whom two sites share; no name ever leaves a site."""

from __future__ import annotations

import hashlib
import hmac
import unicodedata
from collections.abc import Iterable
from typing import Any


def patient_names(source: Any, site: str | None = None, column: str = "") -> list[str]:
    """The patients of a source as its table writes them, "" where it has none; no image is read.

    ``site``: those of one site alone, where the source deals its records to several. ``column``: of the table, in the
    place of the source's own. Raises ValueError where the source cannot tell.
    """
    if hasattr(source, "patient_names"):
        names: list[str] = source.patient_names(site, column)
        return names
    if column:
        raise ValueError(f"{type(source).__name__} has no columns to choose from; leave overlap.column out")
    cohort = source.build()
    if site is None:
        return list(cohort.patients)
    if cohort.sites is None:
        raise ValueError(f"{type(source).__name__} does not say which site a patient belongs to")
    return [name for name, own in zip(cohort.patients, cohort.sites, strict=True) if own == site]


def normalised(name: str) -> str:
    """A name as two tables should agree on it: Unicode NFKC, no case, no space around it and one at most within."""
    return " ".join(unicodedata.normalize("NFKC", name).casefold().split())


def keyed(names: Iterable[str], key: bytes) -> list[str]:
    """HMAC-SHA256 of each distinct patient in hex, sorted; names that are empty are nobody's."""
    patients = {normalised(name) for name in names} - {""}
    return sorted(hmac.new(key, b"patient\0" + name.encode(), hashlib.sha256).hexdigest() for name in patients)
