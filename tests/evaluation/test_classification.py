"""Macro AUC against the rank-sum statistic and its invariances; classifier weights by modality."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.toy import Pairs, Toy

from fedvlp.core.client import Client
from fedvlp.evaluation.classification import AUC, Classification, auc, modality_shares, predict, roc
from fedvlp.models.multimodal import MultimodalConfig
from fedvlp.objectives.bce import BCE

nan = float("nan")


def column(values: list[float]) -> torch.Tensor:
    return torch.tensor(values)[:, None]


def area(scores: list[float], targets: list[float]) -> float:
    return auc(column(scores), column(targets), ("a",)).by_label["a"]


def test_by_hand() -> None:
    """Of the 4 pairs (positive, negative) 3 are in order; the tie counts a half."""
    assert area([0.9, 0.4, 0.5, 0.1], [1, 1, 0, 0]) == pytest.approx(0.75)
    assert area([0.9, 0.5, 0.5, 0.1], [1, 1, 0, 0]) == pytest.approx(0.875)
    assert area([0.2, 0.2, 0.2], [1, 0, 0]) == pytest.approx(0.5)


def test_the_roc_curve_by_hand_and_its_area_is_the_auc() -> None:
    """Positives at 0.9 and 0.5, negatives at 0.5 and 0.1: the tie is a slope from (0, 1/2) to (1/2, 1)."""
    scores, truth = torch.tensor([0.9, 0.5, 0.5, 0.1]), torch.tensor([1, 1, 0, 0])
    assert roc(scores, truth, (0, 0.25, 0.5, 1)) == pytest.approx([0.5, 0.75, 1, 1])
    rng = np.random.default_rng(0)
    scores, truth = torch.from_numpy(rng.integers(0, 8, 60) / 8), torch.from_numpy(rng.integers(0, 2, 60))
    rates = np.linspace(0, 1, 100_001)
    found = np.trapezoid(roc(scores, truth, rates.tolist()), rates)
    assert found == pytest.approx(area(scores.tolist(), truth.double().tolist()), abs=1e-4)


def test_agrees_with_the_rank_sum_and_inversion_gives_the_complement() -> None:
    for seed in range(5):
        from scipy.stats import mannwhitneyu

        rng = np.random.default_rng(seed)
        scores, targets = rng.integers(0, 8, 60) / 8, rng.integers(0, 2, 60).astype(float)
        wins = mannwhitneyu(scores[targets == 1], scores[targets == 0]).statistic
        expected = wins / ((targets == 1).sum() * (targets == 0).sum())
        seen = area(scores.tolist(), targets.tolist())
        assert seen == pytest.approx(expected)
        assert area((1 - scores).tolist(), targets.tolist()) == pytest.approx(1 - seen)


def test_findings_with_one_class_are_skipped_by_name_and_unknown_labels_left_out() -> None:
    """b has no negative once its unknown label is gone, c is never known; a's unknown row would break its order."""
    scores = torch.tensor([[0.9, 0.1, 0.5], [0.1, 0.2, 0.5], [1.0, 0.3, 0.5]])
    targets = torch.tensor([[1, 1, nan], [0, nan, nan], [nan, 1, nan]])
    found = auc(scores, targets, ("a", "b", "c"))
    assert found == AUC({"a": 1.0}, (), ("b", "c"))
    assert found.macro() == 1.0
    assert found.macro(found.rare) is None
    for wrong in (
        (scores, targets, ("a", "b")),
        (scores[:2], targets, ("a", "b", "c")),
        (scores[0], targets[0], "abc"),
    ):
        with pytest.raises(ValueError, match=f"{len(wrong[2])} names"):
            auc(*wrong)


def test_scores_that_are_no_numbers_have_no_area() -> None:
    """Sorted last, nan made an area of 1 where the positives come last, whatever the model."""
    for truth in [[1, 1, 0, 0], [0, 0, 1, 1], [1, 0, 1, 0]]:
        with pytest.raises(ValueError, match="auc: 4 of 4 scores are nan; expected numbers"):
            area([nan] * 4, truth)
        with pytest.raises(ValueError, match="auc: 1 of 4 scores"):
            area([0.1, 0.2, nan, 0.3], truth)
        assert auc(column([nan, 0.2, 0.1]), column([nan, 1, 0]), ("a",)).by_label == {"a": 1.0}, (
            "its label is not known"
        )


def test_a_finding_that_nobody_has_is_skipped() -> None:
    found = auc(torch.rand(4, 2), torch.tensor([[0.0, 1], [0, 0], [0, 1], [0, nan]]), ("a", "b"))
    assert found.skipped == ("a",)


def test_one_in_ten_is_not_rare() -> None:
    """Rare is less than a tenth: 1 of 10 is not, 1 of 11 is."""
    for count, rare in ((10, ()), (11, ("a",))):
        targets = torch.zeros(count, 1)
        targets[0] = 1
        assert auc(torch.rand(count, 1), targets, ("a",)).rare == rare


def test_macro_is_unweighted_and_rare_findings_have_a_view_of_their_own() -> None:
    """a: 1 positive of 20 (5 %), ranked last, area 0; b: half are positive, area 1."""
    scores = torch.stack([torch.linspace(0, 1, 20), torch.linspace(0, 1, 20)], dim=1)
    targets = torch.zeros(20, 2)
    targets[0, 0], targets[10:, 1] = 1, 1
    found = auc(scores, targets, ("a", "b"))
    assert (found.macro(), found.rare, found.macro(found.rare)) == (0.5, ("a",), 0.0)


def test_scores_are_sigmoids_whatever_the_logits() -> None:
    """Bug M3: logits all inside [0, 1] in one batch must not stay on another scale than those of the next."""
    model = Toy(labels=1)
    with torch.no_grad():
        model.classifier.weight.zero_()
        model.classifier.bias.fill_(0.5)
    data = Pairs(torch.randn(4, 6), torch.randn(4, 5))
    data.labels = torch.ones(4, 1)
    scores, _ = predict(model, BCE(), data.batches("train", 2, drop_last=False))
    torch.testing.assert_close(scores, torch.full((4, 1), 0.5).sigmoid())


def test_modality_shares_by_hand() -> None:
    """Absolute weights 1 + 2 on the image, 0 + 9 on the text."""
    shares = modality_shares(torch.tensor([[1.0, -2.0, 0.0, 9.0]]))
    assert shares == {"image": pytest.approx(0.25), "text": pytest.approx(0.75)}


def test_the_figures_of_a_split() -> None:
    names = ("a", "b")
    model = MultimodalConfig(embedding_dim=8, image_size=16, max_tokens=8, vocabulary=64, labels=names).build()

    class Films(Pairs):
        def _batch(self, split: str, rows: torch.Tensor) -> dict[str, torch.Tensor]:
            labels = torch.tensor([[1.0, 1.0], [0.0, -1.0], [1.0, 1.0], [0.0, nan]])
            return {**super()._batch(split, rows), "labels": labels[rows]}

    films = torch.randn(4, 1, 16, 16), torch.randint(2, 64, (4, 8))
    data = Films(*films, val=films)
    metrics = Classification()(Client("s", 0, model, BCE(), data), ("val", "test"))
    assert metrics.keys() == {
        "classifier/image", "val/auc/macro", "val/auc/a", "val/auc/macro without image", "val/auc/macro without text"
    }, "no known negative of b"  # fmt: skip
    assert metrics["val/auc/macro"] == metrics["val/auc/a"]
    assert Classification(batch_size=3)(Client("s", 0, model, BCE(), data), ("val", "test")) == pytest.approx(metrics)
    with torch.no_grad():  # the classifier reads the image alone
        model.classifier.weight[:, 8:] = 0
    alone = Classification()(Client("s", 0, model, BCE(), data), ("val",))
    assert alone["val/auc/macro without text"] == alone["val/auc/macro"]
    assert alone["val/auc/macro without image"] == 0.5, "all records are the same to it"
    data.modalities = ("image",)
    assert "val/auc/macro without text" not in Classification()(Client("s", 0, model, BCE(), data), ("val",))
