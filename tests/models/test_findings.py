"""Heads for findings: their probabilities by hand, both files of the format, and Platt's calibration."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from fedvlp.models.findings import SAID, TENSORS, FindingHeads, calibrated

HEADS = FindingHeads(
    ("Edema", "Pneumonia"),
    torch.tensor([[1.0, 0.0], [0.0, 2.0]]),
    torch.tensor([0.0, -2.0]),
    "by hand",
    {"Edema": {"auc": 0.75}},
)


def test_probabilities_by_hand() -> None:
    """sigmoid(0) = 1/2 and sigmoid(2 * 1 - 2) = 1/2; sigmoid(ln 3) = 3/4 and sigmoid(-2)."""
    seen = HEADS.probabilities(torch.tensor([[0.0, 1.0], [math.log(3), 0.0]]))
    expected = torch.tensor([[0.5, 0.5], [0.75, 1 / (1 + math.exp(2))]], dtype=torch.float64)
    torch.testing.assert_close(seen, expected, atol=1e-7, rtol=0)


def test_what_is_saved_is_read(tmp_path: Path) -> None:
    assert FindingHeads.read(tmp_path) is None
    HEADS.save(tmp_path)
    read = FindingHeads.read(tmp_path)
    assert read is not None
    assert (read.names, read.origin) == (HEADS.names, HEADS.origin)
    assert torch.equal(read.weight, HEADS.weight)
    assert torch.equal(read.bias, HEADS.bias)
    assert read.figures == {"Edema": {"auc": 0.75}, "Pneumonia": {}}
    said = json.loads((tmp_path / SAID).read_text())
    assert said["findings"] == [{"name": "Edema", "auc": 0.75}, {"name": "Pneumonia"}]


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda said: said | {"format": 2}, "format 2, this fedvlp reads 1"),
        (lambda said: {"format": 1, "origin": ""}, "lacks 'findings'"),
        (lambda said: said | {"findings": said["findings"][:1]}, r"weight \[2, 2\] and bias \[2\] for 1 findings"),
        (lambda said: said | {"findings": [{"auc": 1.0}]}, "lacks 'name'"),
    ],
)
def test_a_damaged_description_is_refused(tmp_path: Path, damage: object, match: str) -> None:
    HEADS.save(tmp_path)
    said = json.loads((tmp_path / SAID).read_text())
    (tmp_path / SAID).write_text(json.dumps(damage(said)))  # type: ignore[operator]
    with pytest.raises(ValueError, match=match):
        FindingHeads.read(tmp_path)


def test_damaged_tensors_are_refused(tmp_path: Path) -> None:
    HEADS.save(tmp_path)
    content = bytearray((tmp_path / TENSORS).read_bytes())
    content[-1] ^= 1
    (tmp_path / TENSORS).write_bytes(content)
    with pytest.raises((ValueError, RuntimeError), match="findings"):
        FindingHeads.read(tmp_path)


def test_features_of_another_width_are_refused() -> None:
    with pytest.raises(ValueError, match="width 3, not 2"):
        HEADS.probabilities(torch.zeros(1, 3))


def test_heads_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ValueError, match="not finite"):
        FindingHeads(("a",), torch.tensor([[math.nan]]), torch.zeros(1))


def test_calibration_by_hand() -> None:
    """Eight records, four of each kind: the smoothed targets are 5/6 and 1/6.

    At score 1 three of four are positive, at score 0 one of four. The fit of two numbers to two scores is exact: the
    mean target at 1 is (3 * 5/6 + 1/6) / 4 = 2/3, at 0 it is 1/3. So b = ln(1/2) and a + b = ln 2.
    """
    scores = torch.tensor([1.0, 1, 1, 1, 0, 0, 0, 0])
    truth = torch.tensor([1.0, 1, 1, 0, 1, 0, 0, 0])
    scale, offset = calibrated(scores, truth)
    assert offset == pytest.approx(-math.log(2), abs=1e-6)
    assert scale + offset == pytest.approx(math.log(2), abs=1e-6)


def test_separable_scores_stay_finite_and_one_kind_is_refused() -> None:
    scale, offset = calibrated(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0]))
    assert math.isfinite(scale)
    assert math.isfinite(offset)
    with pytest.raises(ValueError, match="2 of 2 records are positive"):
        calibrated(torch.tensor([0.0, 1.0]), torch.ones(2))
