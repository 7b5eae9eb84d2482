"""Label-wise Dirichlet partition of one cohort over sites, as FedDRA and FedRGB split MIMIC-CXR.

Source: the "LDA" split of both papers, which is Dirichlet over classes with a balance cap (Yan et al., SSL-FL,
https://arxiv.org/abs/2205.08576, ``data_split.py``, seed 2022). Smaller beta = more heterogeneous.
Differs: units (studies or patients) are split, never single images, so no study crosses sites; retries are bounded; if
every site is full the smallest takes the class; the order of the records within a site is left to the loader.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedvlp.data.cohort import digest

FORMAT = 1

PUBLISHED = ("Edema", "Pleural Effusion", "Consolidation", "Pneumothorax", "Pneumonia")
"""The findings whose mention makes the 32 classes of the published split, in its order."""


def published_columns(labels: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """Of ``labels`` [N, L] the columns of the published split [N, 5]; all of them where one of the five is lacking.

    Of 14 findings nearly every study would be a class of its own, and a skew over such classes deals all sites alike.
    """
    if not set(PUBLISHED) <= set(names):
        return labels
    return labels[:, [list(names).index(name) for name in PUBLISHED]]


def class_codes(labels: np.ndarray, label_code: str = "mention") -> np.ndarray:
    """The class of each row of ``labels`` [N, L]: [N] int64, sum_j b_j 2^j.

    b_j is 1 where the cell is not blank (``label_code`` "mention": 1, 0 or -1, as published) or where it is 1
    ("positive"). With more than 62 labels the sum does not fit: the combinations that occur are numbered instead.
    Raises ValueError for another ``label_code`` or shape.
    """
    if label_code not in ("mention", "positive"):
        raise ValueError(f"partition: label_code is {label_code!r}; expected 'mention' or 'positive'")
    labels = np.asarray(labels, dtype=np.float32)
    if labels.ndim != 2:
        raise ValueError(f"partition: labels have shape {labels.shape}; expected [N, L]")
    bits = ~np.isnan(labels) if label_code == "mention" else labels == 1
    if labels.shape[1] > 62:
        return np.unique(bits, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)
    return bits.astype(np.int64) @ (1 << np.arange(labels.shape[1], dtype=np.int64))


def dirichlet_partition(
    labels: np.ndarray,
    groups: Sequence[str] | np.ndarray,
    sites: int,
    beta: float,
    seed: int,
    *,
    min_size: int = 10,
    label_code: str = "mention",
    max_tries: int = 1000,
) -> np.ndarray:
    """Site index [N] int64 in 0..sites-1 of each row; rows of one group (study or patient) stay together.

    Args:
        labels: [N, L], as in a cohort.
        groups: [N] ids; the class of a group is that of its first row.
        sites: number of sites, at least 1.
        beta: Dirichlet concentration, above 0; smaller is more heterogeneous.
        seed: of the draws; the same seed gives the same assignment.
        min_size: least number of rows at a site; a draw that gives some site fewer is repeated.
        label_code: what a class is made of, see ``class_codes``.
        max_tries: draws before giving up.

    Raises:
        ValueError: an argument is out of range, or no draw gave every site ``min_size`` rows.
    """
    labels, groups = np.asarray(labels), np.asarray(groups)
    rows = len(labels)
    if len(groups) != rows:
        raise ValueError(f"partition: {len(groups)} groups for {rows} rows of labels")
    if sites < 1 or not beta > 0 or max_tries < 1:
        raise ValueError(f"partition: sites={sites}, beta={beta}, max_tries={max_tries}; all must be positive")
    if sites * min_size > rows:
        raise ValueError(f"partition: {rows} rows cannot give each of {sites} sites the asked {min_size}")
    _, first, unit_of_row = np.unique(groups, return_index=True, return_inverse=True)
    order = np.argsort(np.argsort(first))  # units in order of first appearance: independent of how ids are spelt
    unit_of_row = order[unit_of_row.reshape(-1)]
    codes = class_codes(labels, label_code)[np.sort(first)]  # [U]
    weights = np.bincount(unit_of_row)  # [U] rows per unit
    rng = np.random.default_rng(seed)
    for _ in range(max_tries):
        unit_site = _draw(codes, weights, sites, beta, rng)
        if np.bincount(unit_site, weights=weights, minlength=sites).min() >= min_size:
            return unit_site[unit_of_row]
    raise ValueError(
        f"partition: after {max_tries} tries some site still had under {min_size} rows "
        f"({rows} rows, {sites} sites, beta {beta}); raise beta or lower min_size"
    )


def _draw(codes: np.ndarray, weights: np.ndarray, sites: int, beta: float, rng: np.random.Generator) -> np.ndarray:
    """One attempt: the site [U] of each unit. Classes are assigned in turn; a site with its fair share gets no more."""
    unit_site = np.empty(len(codes), dtype=np.int64)
    sizes = np.zeros(sites)  # rows of each site so far
    fair = weights.sum() / sites
    for code in np.unique(codes):
        members = rng.permutation(np.flatnonzero(codes == code))
        share = rng.dirichlet(np.full(sites, beta)) * (sizes < fair)
        if not share.sum() > 0:  # all sites full, or every open site drew an exact 0 (tiny beta)
            share = np.eye(sites)[sizes.argmin()]
        cuts = np.floor(np.cumsum(share / share.sum())[:-1] * len(members)).astype(np.int64)
        for site, units in enumerate(np.split(members, cuts)):
            unit_site[units] = site
            sizes[site] += weights[units].sum()
    return unit_site


def write_assignment(
    path: str | Path, assignment: np.ndarray, ids: Sequence[str], seed: int, **settings: str | int | float
) -> str:
    """Writes the site [N] of each of the N ``ids`` as JSON, with seed, ``settings`` and a SHA-256, which it returns.

    Raises ValueError where lengths differ or an id repeats.
    """
    assignment = np.asarray(assignment)
    if len(assignment) != len(ids) or len(set(ids)) != len(ids):
        raise ValueError(f"partition: {len(assignment)} sites for {len(ids)} ids ({len(set(ids))} distinct)")
    body: dict[str, Any] = {
        "format": FORMAT,
        "seed": int(seed),
        "settings": dict(sorted(settings.items())),
        "counts": np.bincount(assignment).tolist() if len(assignment) else [],
        "ids": list(ids),
        "assignment": assignment.tolist(),
    }
    body["sha256"] = _hash(body)
    target = Path(path)
    partial = target.with_name(target.name + ".partial")
    partial.write_text(json.dumps(body), encoding="utf-8")
    os.replace(partial, target)
    return body["sha256"]


def _hash(body: dict[str, Any]) -> str:
    """SHA-256 over everything but the hash itself, keys in order."""
    return digest(json.dumps({k: v for k, v in body.items() if k != "sha256"}, sort_keys=True))
