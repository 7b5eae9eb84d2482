"""Recall beside chance and the source oracle: by hand, of an embedding of the source alone, and of the four sources."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from support.probing import model
from torch.nn import functional as F

from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.evaluation.retrieval import (
    EVERYTHING,
    WITHIN,
    by_chance,
    recall_rows,
    retrieval,
    source_retrieval,
    write_retrieval,
)

SOURCES = ["a"] * 6 + ["b"] * 3
PATIENTS = [str(row // 2) for row in range(9)]


def test_the_oracle_of_the_four_real_sources() -> None:
    """35, 12, 10 and 10 validation pairs: (5 + 5 + 5 + 5) / 67 are found among the first five."""
    count = torch.tensor([35] * 35 + [12] * 12 + [10] * 20)
    assert by_chance(5, count) == pytest.approx(29.85, abs=0.01)
    assert by_chance(5, torch.full((67,), 67)) == pytest.approx(500 / 67)
    assert by_chance(10, torch.tensor([4, 20])) == pytest.approx(75.0)


def test_perfect_and_collapsed_embeddings() -> None:
    rows = recall_rows(torch.eye(9), torch.eye(9), SOURCES, PATIENTS, resamples=20)
    assert all(row.recall.value == row.recall.low == 100 for row in rows)
    assert [row.queries for row in rows if row.k == 1] == [9, 9, 6, 3]
    same = torch.ones(9, 4) / 2
    (first, *_) = recall_rows(same, same, SOURCES, PATIENTS, ks=(5,), resamples=20)
    assert first.recall.value == pytest.approx(first.chance) == pytest.approx(500 / 9)


def test_an_embedding_of_the_source_alone_scores_the_oracle() -> None:
    """Ties go to the lower index, so of n equal candidates the first k are found: k of the n queries."""
    vectors = F.one_hot(torch.tensor([source == "b" for source in SOURCES]).long(), 2).float()
    for row in recall_rows(vectors, vectors, SOURCES, PATIENTS, ks=(1, 2, 5), resamples=20):
        assert row.recall.value == pytest.approx(row.oracle), row.scope
        if row.scope != EVERYTHING:
            assert row.oracle == row.chance
        else:
            assert row.oracle > row.chance


def test_recalls_are_those_of_the_whole_set_and_of_each_source() -> None:
    image, text = F.normalize(torch.randn(2, 9, 3, generator=torch.Generator().manual_seed(0)), dim=-1).unbind()
    found = {(row.scope, row.k): row for row in recall_rows(image, text, SOURCES, PATIENTS, resamples=50)}
    parts = {"a": slice(0, 6), "b": slice(6, 9)}
    for k in (1, 5):
        name = f"mean/r{k}"
        assert found[EVERYTHING, k].recall.value == pytest.approx(retrieval(image, text)[name])
        inner = {source: retrieval(image[part], text[part])[name] for source, part in parts.items()}
        assert {source: found[f"within {source}", k].recall.value for source in parts} == pytest.approx(inner)
        assert found[WITHIN, k].recall.value == pytest.approx((6 * inner["a"] + 3 * inner["b"]) / 9)
    assert found[EVERYTHING, 1].recall.low < found[EVERYTHING, 1].recall.high


def test_a_model_on_a_cohort(tmp_path: Path) -> None:
    cohort = SyntheticCohort(sites=2, size=40, image_size=32).build()
    split, rows = source_retrieval(model(), cohort, 20)
    assert (split, rows[0].queries) == ("test", len(cohort.rows("test")))
    assert {row.scope for row in rows} == {EVERYTHING, WITHIN, "within site-1", "within site-2"}
    (first, *_) = csv.DictReader(write_retrieval(split, rows, tmp_path / "r")[0].open())
    assert float(first["source_oracle"]) == rows[0].oracle
    val = cohort.take(cohort.rows("val"))
    assert source_retrieval(model(), val, 20)[0] == "val"
    with pytest.raises(ValueError, match="neither test nor val"):
        source_retrieval(model(), cohort.take(cohort.rows("train")))
