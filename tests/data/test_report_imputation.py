"""Retrieved reports (spec 7.4): same labels first, else the largest Jaccard index; deterministic, and written down."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fedvlp.core.client import Client
from fedvlp.data.cohort import PUBLIC, Cohort
from fedvlp.data.report_imputation import best_matches, match_scores, provenance, retrieve_reports
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.evaluation.retrieval import Retrieval
from fedvlp.methods import FedAvg
from fedvlp.run.assembly import Assembly
from fedvlp.run.experiment import Experiment, Partition

NAN = np.nan


def table(rows: list[tuple[str, str, str, list[float]]]) -> Cohort:
    """Rows of (site, split, report, labels)."""
    names = tuple(f"r{index}" for index in range(len(rows)))
    return Cohort(
        ids=names, patients=names, studies=names, reports=tuple(row[2] for row in rows),
        labels=np.array([row[3] for row in rows], dtype=np.float32), label_names=("a", "b", "c"),
        splits=np.array([row[1] for row in rows]), sites=tuple(row[0] for row in rows),
        images=lambda chosen: np.zeros((len(chosen), 8, 8), dtype=np.uint8), fingerprint="x",
    )  # fmt: skip


CORPUS = [
    (PUBLIC, "train", "a alone", [1, 0, 0]),
    (PUBLIC, "train", "a and b", [1, 1, 0]),
    (PUBLIC, "train", "healthy", [0, 0, 0]),
    (PUBLIC, "test", "c, held out", [0, 0, 1]),
    (PUBLIC, "train", "a, hedged c", [1, 0, -1]),
]


def found(labels: list[float], split: str = "train") -> str:
    cohort = table([*CORPUS, ("site-1", "train", "c of another hospital", [0, 0, 1]), ("site-2", split, "", labels)])
    return retrieve_reports(cohort, 0).reports[-1]


def test_by_hand() -> None:
    """Exact vectors win, blank and uncertain included; {a,b,c}: {a,b} has 2/3, {a} 1/3; {b}: {a,b} has 1/2."""
    assert found([1, 0, 0]) == "a alone"
    assert found([1, 0, -1]) == "a, hedged c"
    assert found([1, 1, 1]) == "a and b"
    assert found([0, 1, 0]) == "a and b"
    assert found([NAN, NAN, NAN]) == "healthy"


def test_a_held_out_record_gets_no_report() -> None:
    """Found by its labels, a report would be judged as if it were the record's own."""
    for split in ["val", "test"]:
        assert found([1, 0, 0], split) == ""


def test_no_report_of_a_site_or_of_a_held_out_split_is_given_away() -> None:
    """Only c matches exactly, at another hospital and in the public test split: neither may be taken."""
    assert found([0, 0, 1]) in {"a alone", "a and b", "healthy", "a, hedged c"}


def test_scores() -> None:
    codes = np.array([[1, 0, 2], [1, 1, 0], [0, 0, 0]])
    assert match_scores(np.array([1, 0, 2]), codes).tolist() == [2.0, 0.5, 0.0]
    assert match_scores(np.array([2, 2, 2]), codes).tolist() == [0.0, 0.0, 1.0]
    labels = np.array([[1, 0, NAN], [0, 0, 0]], dtype=np.float32)
    corpus = np.array([[1, 0, NAN], [1, 0, NAN], [0, NAN, 0]], dtype=np.float32)
    assert [[tier.tolist() for tier in tiers] for tiers in best_matches(labels, corpus)] == [[[0, 1]], [[2]]]


def test_tiers_hold_as_many_as_are_wanted_and_their_equals() -> None:
    """{a}: itself scores 2, {a, b} 1/2, healthy 0; four more than there are gives all."""
    corpus = np.array([[1, 1, 0], [1, 0, 0], [0, 0, 0], [1, 0, 0], [1, 0, 1]], dtype=np.float32)
    wanted = np.array([[1, 0, 0]], dtype=np.float32)

    def tiers(count: int) -> list[list[int]]:
        return [tier.tolist() for tier in best_matches(wanted, corpus, count)[0]]

    assert tiers(2) == [[1, 3]]
    assert tiers(3) == [[1, 3], [0, 4]]
    assert tiers(9) == [[1, 3], [0, 4], [2]]


def test_several_reports_of_a_record_best_first_each_once() -> None:
    """Of {a}: "a alone" is exact; "a and b" and "a, hedged c" share 1/2 and 1; "healthy" is last."""
    cohort = table([*CORPUS, ("site-1", "train", "", [1, 0, 0])])
    one, three, all_of_them = (retrieve_reports(cohort, 0, count) for count in (1, 3, 9))
    assert one.more_reports is None
    assert one.reports[-1] == three.reports[-1] == "a alone"
    assert three.more_reports is not None
    assert three.more_reports[-1] == ("a, hedged c", "a and b"), "its finding present is the same: 1; then 1/2"
    assert three.more_reports[:-1] == ((),) * 5
    assert all_of_them.more_reports is not None
    assert all_of_them.more_reports[-1] == ("a, hedged c", "a and b", "healthy")
    assert three.report_from is not None
    assert three.report_from[-1] == ("r0", "r4", "r1")
    assert [row[1:] for row in provenance(three)] == [("r0", "exact"), ("r4", "1.000"), ("r1", "0.500")]
    assert one.fingerprint != three.fingerprint
    with_site = three.named_by("site-1")
    assert with_site.report_from is not None
    assert len(set(with_site.report_from[-1])) == 3
    assert not set(with_site.report_from[-1]) & {"r0", "r4", "r1"}


def experiment(seed: int = 0) -> Experiment:
    data, partition = (
        SyntheticCohort(sites=3, size=240, image_size=72),
        Partition(image_only=1, public=0.2, retrieve=True),
    )
    base = Experiment("x", FedAvg(), data=data, partition=partition)
    return replace(base, rounds=replace(base.rounds, seed=seed))


def test_the_built_in_cohort_with_a_site_without_reports() -> None:
    """Every training row has a report then; the last site's come from public training rows, and all is written down."""
    assembly = Assembly(experiment())
    cohort = assembly.cohort
    bare = [row for row, report in enumerate(cohort.reports) if not report]
    assert {(cohort.sites[row], cohort.splits[row]) for row in bare} == {  # type: ignore[index]
        ("site-3", "val"), ("site-3", "test")
    }  # fmt: skip
    assert cohort.report_from is not None
    place = {name: row for row, name in enumerate(cohort.ids)}
    retrieved = [row for row, source in enumerate(cohort.report_from) if source]
    assert {cohort.sites[row] for row in retrieved} == {"site-3"}  # type: ignore[index]
    assert len(retrieved) + len(bare) == sum(site == "site-3" for site in cohort.sites or ())
    for row in retrieved:
        source = place[cohort.report_from[row][0]]
        assert cohort.reports[row] == cohort.reports[source]
        assert (cohort.sites[source], cohort.splits[source]) == (PUBLIC, "train")  # type: ignore[index]
    rows = provenance(cohort)
    assert [row[0] for row in rows] == [cohort.ids[row] for row in retrieved]
    exact = [np.array_equal(cohort.labels[place[a]], cohort.labels[place[b]], equal_nan=True) for a, b, _ in rows]
    assert [how == "exact" for _, _, how in rows] == exact
    assert any(exact)
    data = assembly.data("site-3")
    assert data.modalities == data.modalities_in("train") == ("image", "text")
    assert data.modalities_in("test") == ("image",)
    assert "text" not in next(data.batches("test", 4, drop_last=False))
    assert Retrieval()(Client("site-3", 0, *assembly.modules(), data), ("val", "test")) == {}, "no pair to be found"
    subset = cohort.take(np.array(retrieved[:3]))
    assert subset.report_from == tuple(cohort.report_from[row] for row in retrieved[:3])


def test_deterministic_by_seed_and_in_the_fingerprint() -> None:
    cohort = experiment().data.build()
    public = np.arange(240) % 3 == 0
    sites = np.where(public, PUBLIC, "site-1").tolist()
    bare = cohort.with_sites(sites).without(reports=~public, images=np.zeros(240, dtype=bool))
    one, same, other = retrieve_reports(bare, 0), retrieve_reports(bare, 0), retrieve_reports(bare, 1)
    assert (one.reports, one.fingerprint) == (same.reports, same.fingerprint)
    assert one.reports != other.reports
    assert len({bare.fingerprint, one.fingerprint, other.fingerprint}) == 3


def test_another_record_does_not_change_what_a_record_gets() -> None:
    rows = [*CORPUS, *[("site-1", "train", "", [1, 1, 1])] * 3]
    assert retrieve_reports(table(rows), 3).report_from[5:7] == retrieve_reports(table(rows[:-1]), 3).report_from[5:7]  # type: ignore[index]


def test_without_public_reports_it_says_what_to_set() -> None:
    with pytest.raises(ValueError, match=r"set partition\.public"):
        retrieve_reports(table([("site-1", "train", "", [0, 0, 0])]), 0)
