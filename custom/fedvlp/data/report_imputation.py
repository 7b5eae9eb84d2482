"""Retrieves a report from the public set for records that have none, by their labels (PMS-FM's sites without reports).

PMS-FM (Wang et al., 2025, https://openreview.net/forum?id=zfLHmnU1fs) names "label-based report retrieval" without
detail. Here a record gets the report of a public training record with the same label vector, or, without one, with the
largest Jaccard index of the findings present. Among equals, the seed and the record's id alone decide.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedvlp.data.cohort import PUBLIC, Cohort, digest


def retrieve_reports(cohort: Cohort, seed: int) -> Cohort:
    """The cohort with a report in every training row. ``report_from`` has the id of the public record it came from.

    Held-out rows stay as they are: a report that was found by their labels would be judged as if it were their own.
    Only reports of the public set are searched, so no report of one site reaches another. Raises ValueError where the
    public set has no training record with a report.
    """
    train = np.asarray(cohort.splits) == "train"
    missing = np.flatnonzero(train & ~cohort.has_report())
    public = np.asarray(cohort.sites or ()) == PUBLIC
    corpus = np.flatnonzero(public & cohort.has_report() & train)
    if not len(corpus):
        raise ValueError(
            "retrieve_reports: the public set has no training record with a report; set partition.public, "
            "or name site 'public' in the table"
        )
    matches = best_matches(cohort.labels[missing], cohort.labels[corpus])
    reports, source = list(cohort.reports), [""] * len(cohort)
    for row, candidates in zip(missing.tolist(), matches, strict=True):
        draw = int(digest(str(seed), cohort.ids[row])[:12], 16)
        chosen = int(corpus[candidates[draw % len(candidates)]])
        reports[row], source[row] = cohort.reports[chosen], cohort.ids[chosen]
    mark = digest(cohort.fingerprint, "retrieved", *source)
    return replace(cohort, reports=tuple(reports), report_from=tuple(source), fingerprint=mark)


def best_matches(labels: np.ndarray, corpus: np.ndarray) -> list[np.ndarray]:
    """For each row of ``labels`` [n, L], the rows of ``corpus`` [M, L] that match best: ascending, at least one."""
    kinds, kind_of = np.unique(_codes(labels), axis=0, return_inverse=True)
    ranked = []
    for kind in kinds:
        score = match_scores(kind, _codes(corpus))
        ranked.append(np.flatnonzero(score == score.max()))
    return [ranked[index] for index in kind_of.reshape(-1)]


def match_scores(one: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """How well ``codes`` [M, L] match ``one`` [L]: [M], 2 where equal, else the Jaccard index of the findings present.

    The index is 1 where neither has a finding.
    """
    present, others = one == 1, codes == 1
    union = (present | others).sum(axis=1)
    jaccard = np.where(union == 0, 1.0, (present & others).sum(axis=1) / np.maximum(union, 1))
    return np.where((codes == one).all(axis=1), 2.0, jaccard)


def provenance(cohort: Cohort) -> list[tuple[str, str, str]]:
    """(id, id of the record that its report came from, "exact" or the Jaccard index) of every retrieved report."""
    row_of = {name: row for row, name in enumerate(cohort.ids)}
    codes, rows = _codes(cohort.labels), []
    for row, source in enumerate(cohort.report_from or ()):
        if source:
            score = match_scores(codes[row], codes[row_of[source]][None])[0]
            rows.append((cohort.ids[row], source, "exact" if score == 2 else f"{score:.3f}"))
    return rows


def _codes(labels: np.ndarray) -> np.ndarray:
    """Labels with 2 in place of nan (not mentioned), so that two blanks are equal."""
    return np.nan_to_num(labels, nan=2.0)
