"""Cohorts side by side: every row keeps its pixels, words, labels and site."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fedvlp.data.combine import combine
from fedvlp.data.record import Cohort
from fedvlp.data.synthetic import SyntheticCohort


def small(seed: int, site: str) -> Cohort:
    cohort = SyntheticCohort(sites=1, size=8, image_size=32, seed=seed).build()
    return cohort.with_sites([site] * len(cohort))


def test_rows_keep_everything_in_any_order_of_reading() -> None:
    one, other = small(0, "a"), small(1, "b")
    both = combine([one, other])
    assert len(both) == 16
    rows = np.array([9, 0, 15, 7])
    theirs = [(other, 1), (one, 0), (other, 7), (one, 7)]
    expected = np.concatenate([cohort.images(np.array([row])) for cohort, row in theirs])
    np.testing.assert_array_equal(both.images(rows), expected)
    np.testing.assert_array_equal(both.images(np.array([8, 10])), other.images(np.array([0, 2])))
    assert both.reports[8:] == other.reports
    assert both.sites == ("a",) * 8 + ("b",) * 8
    np.testing.assert_array_equal(both.labels[8:], other.labels)
    assert both.fingerprint != combine([other, one]).fingerprint


def test_records_without_images_stay_without() -> None:
    one = small(0, "a")
    bare = small(1, "b")
    bare = bare.without(reports=np.zeros(8, dtype=bool), images=np.ones(8, dtype=bool))
    assert combine([one, bare]).has_image().tolist() == [True] * 8 + [False] * 8


def test_other_labels_or_no_sites_are_refused() -> None:
    one = small(0, "a")
    with pytest.raises(ValueError, match="2 lists of label names"):
        combine([one, replace(small(1, "b"), label_names=("a", "b", "c", "d", "e"))])
    with pytest.raises(ValueError, match="no sites"):
        combine([one, replace(small(1, "b"), sites=None)])
