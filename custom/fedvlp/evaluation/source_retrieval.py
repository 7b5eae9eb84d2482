"""Whole-set retrieval beside what knowing the source alone would give (spec 0 Z11): chance, oracle, within sources.

Where records come from several sources, telling the sources apart already finds some pairs. The **source oracle** knows
only which source a film and a text come from and guesses within it: a query of a source with n candidates is found
among its first k with probability min(1, k / n). A recall below the oracle's shows nothing but sources.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedvlp.data.cohort import Cohort
from fedvlp.data.loader import SiteData
from fedvlp.evaluation.downstream import TEST, VAL
from fedvlp.evaluation.intervals import Interval, bootstrap, mean_of
from fedvlp.evaluation.output import write_csv
from fedvlp.evaluation.retrieval import ranks
from fedvlp.evaluation.site_metrics import embed

EVERYTHING, WITHIN = "all", "within sources"
KS = (1, 5, 10)


@dataclass(frozen=True)
class Row:
    """Recall@k of one set of candidates, percent, mean of both directions."""

    scope: str  # "all" candidates, those "within sources" (each query's own), or "within NAME" for the queries of one
    k: int
    queries: int  # films, and as many texts
    recall: Interval  # over resamples of the patients; the candidates stay
    chance: float  # of a random order
    oracle: float  # the source oracle's; within sources it is chance


def by_chance(k: int, candidates: Tensor) -> float:
    """Recall@k in percent of a random order, for queries with ``candidates`` [Q] each."""
    return 100 * float((k / candidates.double()).clamp(max=1).mean())


def recall_rows(
    image: Tensor,
    text: Tensor,
    sources: Sequence[str],
    patients: Sequence[Hashable],
    ks: Sequence[int] = KS,
    resamples: int = 1000,
) -> list[Row]:
    """The rows of pairs image [N, d] and text [N, d], unit vectors; ``sources`` and ``patients`` [N] of each.

    Raises ValueError as ``ranks`` does.
    """
    names = sorted(set(sources))
    member = {name: torch.tensor([source == name for source in sources]) for name in names}
    count = torch.zeros(len(image), dtype=torch.int64)  # candidates of each query's own source
    inner = torch.zeros(2, len(image), dtype=torch.int64)  # rank of both directions within it
    for here in member.values():
        count[here] = int(here.sum())
        inner[:, here] = torch.stack(ranks(image[here], text[here]))
    outer = torch.stack(ranks(image, text))  # [2, N]
    every = torch.ones(len(image), dtype=torch.bool)
    scopes = [(EVERYTHING, outer, every, torch.full_like(count, len(image))), (WITHIN, inner, every, count)]
    scopes += [(f"within {name}", inner, here, count) for name, here in member.items() if len(names) > 1]
    rows = []
    for scope, rank, asked, candidates in scopes:
        for k in ks:
            hits = 50 * (rank < k).double().sum(dim=0)  # [N] percent
            whose = [patient for patient, one in zip(patients, asked.tolist(), strict=True) if one]
            recall = bootstrap(mean_of(hits[asked]), whose, resamples)
            chance, oracle = by_chance(k, candidates[asked]), by_chance(k, count[asked])
            rows.append(Row(scope, k, int(asked.sum()), recall, chance, oracle))
    return rows


def source_retrieval(model: Any, cohort: Cohort, resamples: int = 1000) -> tuple[str, list[Row]]:
    """The split that was measured (test, or val where that has no pairs) and the rows of ``model``, a DualEncoder.

    A record's source is its site. Raises ValueError where neither split has 2 pairs.
    """
    paired = cohort.has_image() & cohort.has_report()
    for split in (TEST, VAL):
        rows = cohort.rows(split)
        rows = rows[paired[rows]]
        if len(rows) < 2:
            continue
        data = SiteData(cohort, {split: rows}, model.tokenizer, model.config.image_size)
        image, text = embed(model, data.batches(split, 32, drop_last=False))
        sources, patients = (
            [""] * len(rows) if column is None else [column[row] for row in rows]
            for column in (cohort.sites, cohort.patients)
        )
        return split, recall_rows(image, text, sources, patients, resamples=resamples)
    raise ValueError("retrieval: neither test nor val holds 2 images with reports; choose data that have both")


def write_retrieval(split: str, rows: Sequence[Row], path: Path) -> list[Path]:
    """Writes ``<path>.csv``."""
    header = ["split", "scope", "k", "queries", "recall", "recall_low", "recall_high", "chance", "source_oracle"]
    lines = [[split, r.scope, r.k, r.queries, *vars(r.recall).values(), r.chance, r.oracle] for r in rows]
    return [write_csv(path, [header, *lines])]
