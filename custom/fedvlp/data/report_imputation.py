"""Retrieves reports from the public set for records that have none, by their labels (PMS-FM's sites without reports).

PMS-FM (Wang et al., 2025, https://openreview.net/forum?id=zfLHmnU1fs) names "label-based report retrieval" without
detail. Here a record gets the k reports of public training records whose labels agree best: the same label vector
first, then by the Jaccard index of the findings present. Among equals, the seed and the record's id alone decide.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedvlp.data.cohort import PUBLIC, Cohort, digest


def retrieve_reports(cohort: Cohort, seed: int, count: int = 1) -> Cohort:
    """The cohort with ``count`` reports for every training row that had none.

    ``report_from`` has the ids of the rows that they are from. The first of a row's reports is in ``reports``, the
    others in ``more_reports``; there are fewer where the public set is smaller. Held-out rows stay as they are: a
    report that was found by their labels would be judged as if it were their own. Only reports of the public set are
    searched, so no report of one site reaches another. Raises ValueError where the public set has no training record
    with a report.
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
    matches = best_matches(cohort.labels[missing], cohort.labels[corpus], count)
    reports = list(cohort.reports)
    more: list[tuple[str, ...]] = [()] * len(cohort)
    source: list[tuple[str, ...]] = [()] * len(cohort)
    for row, tiers in zip(missing.tolist(), matches, strict=True):
        chosen = corpus[_drawn(tiers, int(digest(str(seed), cohort.ids[row])[:12], 16), count)].tolist()
        reports[row], *others = (cohort.reports[one] for one in chosen)
        more[row], source[row] = tuple(others), tuple(cohort.ids[one] for one in chosen)
    mark = digest(cohort.fingerprint, "retrieved", *(name for of_row in source for name in (of_row or ("",))))
    return replace(
        cohort,
        reports=tuple(reports),
        more_reports=tuple(more) if any(more) else None,
        report_from=tuple(source),
        fingerprint=mark,
    )


def _drawn(tiers: list[np.ndarray], draw: int, count: int) -> list[int]:
    """``count`` of the rows of ``tiers``, better ones first, equals as ``draw`` says; all where there are fewer.

    The first is the same whatever the count.
    """
    first = int(tiers[0][draw % len(tiers[0])])
    order = np.concatenate([np.random.default_rng(draw).permutation(tier) for tier in tiers]).tolist()
    return [first, *(row for row in order if row != first)][:count]


def best_matches(labels: np.ndarray, corpus: np.ndarray, count: int = 1) -> list[list[np.ndarray]]:
    """For each row of ``labels`` [n, L] the rows of ``corpus`` [M, L] that match best, in tiers of equals, best first.

    Rows ascend within a tier; the tiers hold at least ``count`` rows together, or all.
    """
    kinds, kind_of = np.unique(_codes(labels), axis=0, return_inverse=True)
    ranked = []
    for kind in kinds:
        score = match_scores(kind, _codes(corpus))
        least = np.sort(score)[-min(count, len(score))]
        ranked.append([np.flatnonzero(score == one) for one in np.unique(score[score >= least])[::-1]])
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
    for row, sources in enumerate(cohort.report_from or ()):
        for source in sources:
            score = match_scores(codes[row], codes[row_of[source]][None])[0]
            rows.append((cohort.ids[row], source, "exact" if score == 2 else f"{score:.3f}"))
    return rows


def _codes(labels: np.ndarray) -> np.ndarray:
    """Labels with 2 in place of nan (not mentioned), so that two blanks are equal."""
    return np.nan_to_num(labels, nan=2.0)
