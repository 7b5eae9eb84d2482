"""Drawn vectors: both halves of a record tell the same hidden vector, and nothing else of a record does."""

from __future__ import annotations

import numpy as np
import pytest

from fedvlp.data.cohort import Cohort
from fedvlp.data.synthetic.latent import COLUMNS, LEVELS, SIDE, WORD, LatentCohort
from fedvlp.models.tiny import HashTokenizer


@pytest.fixture(scope="module")
def cohort() -> Cohort:
    return LatentCohort(size=2000).build()


def halves(cohort: Cohort) -> tuple[np.ndarray, np.ndarray]:
    """The pixels [N, 64], and the levels of the words [N, 48], as numbers."""
    image = cohort.images(np.arange(len(cohort))).reshape(len(cohort), -1).astype(float)
    text = [[LEVELS.index(word[-1]) for word in report.split()] for report in cohort.reports]
    return image, np.array(text, dtype=float)


def explained(inputs: np.ndarray, outputs: np.ndarray) -> float:
    """Share of the outputs' variance that a linear map of the inputs explains in the second half of the rows."""
    rows = len(inputs) // 2
    inputs = np.hstack([inputs - inputs.mean(0), np.ones((len(inputs), 1))])
    weights, *_ = np.linalg.lstsq(inputs[:rows], outputs[:rows], rcond=None)
    left = outputs[rows:] - inputs[rows:] @ weights
    return 1 - float((left**2).mean() / outputs[rows:].var(0).mean())


def test_an_image_tells_its_own_report_and_no_others(cohort: Cohort) -> None:
    image, text = halves(cohort)
    assert explained(image, text) > 0.1
    assert explained(image, np.roll(text, 1, axis=0)) < 0.02


def test_the_labels_are_signs_of_what_both_halves_tell(cohort: Cohort) -> None:
    assert set(np.unique(cohort.labels)) == {0, 1}
    assert np.abs(cohort.labels.mean(0) - 0.5).max() < 0.05
    assert np.abs(np.corrcoef(cohort.labels.T) - np.eye(5)).max() < 0.1, "five signs of their own"
    for half in halves(cohort):
        assert explained(half, cohort.labels) > 0.2


def test_without_noise_the_halves_tell_more(cohort: Cohort) -> None:
    clear = LatentCohort(size=2000, noise=0.0).build()
    assert np.array_equal(clear.labels, cohort.labels)
    assert explained(*halves(clear)) > explained(*halves(cohort)) + 0.3


def test_pixels_are_grey_and_neither_end_is_where_many_lie(cohort: Cohort) -> None:
    """Clipped pixels would be noise that nobody asked for."""
    image = cohort.images(np.arange(len(cohort)))
    assert image.shape == (len(cohort), SIDE, SIDE)
    assert image.dtype == np.uint8
    assert np.mean((image == 0) | (image == 255)) < 0.005


def test_every_word_has_an_id_of_its_own_and_a_report_fits(cohort: Cohort) -> None:
    tokenizer = HashTokenizer(4096, COLUMNS + 1)
    words = [f"{WORD}{column}{level}" for column in range(COLUMNS) for level in LEVELS]
    assert len({tokenizer.word_id(word) for word in words}) == len(words)
    assert {word for report in cohort.reports for word in report.split()} == set(words)
    tokenizer(cohort.reports)
    assert tokenizer.truncated == 0


def test_patients_are_apart_and_six_eighths_are_trained_on(cohort: Cohort) -> None:
    assert len(set(cohort.patients)) == len(set(cohort.studies)) == len(set(cohort.ids)) == len(cohort)
    assert [len(cohort.rows(split)) for split in ("train", "val", "test")] == [1500, 250, 250]
    assert cohort.sites is None


def test_equal_specifications_give_equal_bytes_and_another_seed_others() -> None:
    one = LatentCohort(size=64, seed=3).build()
    assert one.fingerprint == LatentCohort(size=64, seed=3).build().fingerprint  # of another process: test_cohort.py
    other = LatentCohort(size=64, seed=4).build()
    assert one.fingerprint != other.fingerprint
    assert not set(one.reports) & set(other.reports)


def test_other_settings_are_refused() -> None:
    for settings, said in [
        ({"size": 15}, "latent: 15 records; expected at least 16"),
        ({"seed": -1}, "latent: seed is -1; expected 0 or more"),
        ({"noise": -0.1}, "latent: noise is -0.1; expected 0 or more"),
        ({"noise": float("nan")}, "latent: noise is nan"),
        ({"noise": float("inf")}, "latent: noise is inf"),
    ]:
        with pytest.raises(ValueError, match=said):
            LatentCohort(**settings)  # type: ignore[arg-type]
