"""The study of real X-rays: its fast closed form is the method's, folds part patients, the interval is by hand."""

from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fedvlp.evaluation.intervals import Interval
from fedvlp.methods import OneRoundCCA
from fedvlp.methods.one_round_cca import CROSS, IMAGE, IMAGE_MEAN, TEXT, TEXT_MEAN, heads
from studies import real_federation_page as page

sys.path.insert(0, str(Path(__file__).parents[2] / "studies" / "programs"))
study = importlib.import_module("real_federation")


def small(count: int = 60, seed: int = 0) -> object:
    """A federation of small random features: 20 X-rays a site, three of each patient."""
    draw = np.random.default_rng(seed)
    sites = np.repeat(study.SITES, count // 3)
    total = len(sites)
    own = np.isin(sites, study.PAIRS)
    report = np.full(total, -1)
    report[own] = np.arange(own.sum())
    image, texts, corpus = (
        torch.from_numpy(draw.standard_normal((n, w))).float() for n, w in ((total, 9), (own.sum(), 7), (50, 7))
    )
    labels = (draw.random((total, 10)) < 0.3).astype(float)
    labels[own] = 0
    patients = np.array([f"{site} {index // 3}" for index, site in enumerate(sites)])
    corpus_labels = draw.random((50, 10)) < 0.3
    return study.Federation(sites, patients, labels, labels[:, 8] > 0, image, report, texts, corpus, corpus_labels)


def test_the_fast_closed_form_is_the_methods() -> None:
    """Vectors by both agree to the sign of a direction."""
    federation = small()
    rows = np.flatnonzero(federation.sites == "nih-pa")
    image, text, owner, _ = study.pairs_of(federation, study.Draws(federation), rows, [0])
    sums = study.sums_of(image, text, owner)
    model = study.solved(sums, 2.0)
    method = OneRoundCCA(image_ridge=2.0 / 9, text_ridge=study.TEXT_RIDGE / 7, standardised=True)
    mean = {IMAGE_MEAN: sums.x, TEXT_MEAN: sums.t, IMAGE: sums.xx, TEXT: sums.tt, CROSS: sums.xt}
    state = {"image_head.0.weight": torch.zeros(7, 9), "image_head.0.bias": torch.zeros(7)}
    state |= {"text_head.0.weight": torch.zeros(7, 7), "text_head.0.bias": torch.zeros(7)}
    found = heads(method, mean, {name: tensor.double() for name, tensor in state.items()})
    vectors = torch.nn.functional.normalize(
        image.double() @ found["image_head.0.weight"].T + found["image_head.0.bias"], dim=1
    )
    torch.testing.assert_close(model.images(image).abs().double(), vectors.abs(), atol=1e-4, rtol=1e-4)


def test_pooled_sums_are_those_of_all_records() -> None:
    """With the sites' means in, two sites give what their records give as one."""
    federation = small()
    rows = np.flatnonzero(np.isin(federation.sites, ("eurorad", "sirm")))
    image, text, owner, _ = study.pairs_of(federation, study.Draws(federation), rows, [0])
    half = len(rows) // 2
    parts = [slice(0, half), slice(half, None)]
    sites = [study.sums_of(image[one], text[one], torch.arange(len(image[one]))) for one in parts]
    whole, both = study.sums_of(image, text, owner), study.pooled(sites, means=True)
    for name in ("n", "x", "t", "xx", "tt", "xt"):
        torch.testing.assert_close(
            torch.as_tensor(getattr(both, name)).double(),
            torch.as_tensor(getattr(whole, name)).double(),
            atol=1e-5,
            rtol=1e-5,
        )
    assert not torch.allclose(study.pooled(sites, means=False).xx, whole.xx)


def test_every_x_ray_is_tested_once_a_repeat_and_no_patient_is_on_two_sides() -> None:
    federation = small()
    tested: list[int] = []
    for fold in study.folds(federation, 1):
        sides = [set(federation.patients[np.concatenate(list(of.values()))]) for of in (fold.fit, fold.val, fold.test)]
        assert len(set.union(*sides)) == sum(map(len, sides)), "a patient is on two sides"
        tested += np.concatenate(list(fold.test.values())).tolist()
    assert sorted(tested) == list(range(len(federation.sites)))


def test_reports_are_those_that_agree_best() -> None:
    """Of a corpus of fifty, three have the very labels: they come first, whoever is drawn after them."""
    federation = small()
    wanted = np.zeros(10)
    wanted[[1, 4]] = 1
    federation.corpus_labels[[3, 20, 41]] = wanted == 1
    exact = np.flatnonzero((federation.corpus_labels == (wanted == 1)).all(axis=1))
    chosen = study.Draws(federation).of(wanted, np.random.default_rng(0), 8)
    assert set(exact) <= set(chosen)
    assert set(chosen[: len(exact)]) == set(exact)
    assert len(set(chosen)) == 8


def test_rows_are_compared_on_the_folds_that_both_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Differences 1, 2, 3 and one fold without a figure: mean 2, variance 1, and a quarter as many tested as trained.

    t(2) is 4.3027, (1/3 + 1/4) has the root 0.7638: 2 -+ 3.2863.
    """
    one = {(0, 0): 2.0, (0, 1): 3.0, (0, 2): 4.0, (0, 3): math.nan, (1, 0): 9.0}
    other = {(0, 0): 1.0, (0, 1): 1.0, (0, 2): 1.0, (0, 3): 1.0}
    rows = {("a", page.MEAN, "zero-shot"): one, ("b", page.MEAN, "zero-shot"): other}
    monkeypatch.setattr(page, "figures", lambda: rows)
    interval = page.minus("a", "b")
    assert interval.value == 2.0
    assert interval.high - 2.0 == pytest.approx(4.302653 * math.sqrt(7 / 12), abs=1e-5)


def test_an_x_ray_with_several_reports_has_the_weight_of_one() -> None:
    """Two images at 1 and 3; texts 0 and 4 of the first, 2 of the second: means 2 and 2, S_tt = (4 + 4) / 2 / 2."""
    sums = study.sums_of(torch.tensor([[1.0], [3.0]]), torch.tensor([[0.0], [4.0], [2.0]]), torch.tensor([0, 0, 1]))
    assert (float(sums.x), float(sums.t), float(sums.tt), float(sums.xt)) == (2.0, 2.0, 2.0, 0.0)


def test_same_pixels_are_one_patient() -> None:
    draw = torch.Generator().manual_seed(0)
    films = torch.rand(3, 1, 64, 64, generator=draw)
    films[2] = films[0] * 0.5 + 0.1
    assert study.same_pixels(np.array(["a", "b", "c"]), films).tolist() == ["a", "b", "a"]


def test_the_pages_say_what_the_tables_say() -> None:
    """`python -m studies.real_federation_page` writes them anew."""
    for path, block in page.PAGES.items():
        text = path.read_text(encoding="utf-8")
        assert page.replaced(text, block()) == text, path.name


def test_the_verdict_names_who_is_ahead_and_who_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven intervals above 0: ahead of every site alone; one that holds 0, and one below: said by name."""
    above, within, below = Interval(2.0, 1.0, 3.0), Interval(2.0, -1.0, 5.0), Interval(-2.0, -3.0, -1.0)
    monkeypatch.setattr(page, "primary", lambda: dict.fromkeys(page.SITES, above))
    assert page.verdict() == "**Federating is ahead of every site alone.**"
    mixed = dict.fromkeys(page.SITES, above) | {"adult": within, "sirm": below}
    monkeypatch.setattr(page, "primary", lambda: mixed)
    assert "undecided against `adult`, behind `sirm`" in page.verdict()
    assert "not shown to be ahead" in page.verdict()
