"""The report's section on the public set."""

from __future__ import annotations

import pytest
import torch

from fedvlp.report.sections import components, drift, public_set, samples


def test_samples_are_those_of_the_modality_by_site() -> None:
    names = ("sample/image/b", "sample/image/a", "sample/text/a", "consensus/image")
    memory = {name: torch.ones(1, 2) for name in names}
    assert list(samples(memory, "image")) == ["a", "b"]
    assert list(samples(memory, "text")) == ["a"]


def test_components_by_hand() -> None:
    """Points (0,0), (4,0), (0,2), (4,2): the first axis is x, the second y, both from the centre (2, 1)."""
    sent = {"a": torch.tensor([[0.0, 0.0], [4.0, 0.0]]), "b": torch.tensor([[0.0, 2.0], [4.0, 2.0]])}
    found = components(sent)
    assert found["a"].tolist() == [pytest.approx([-2, -1]), pytest.approx([2, -1])]
    assert found["b"].tolist() == [pytest.approx([-2, 1]), pytest.approx([2, 1])]


def test_drift_by_hand() -> None:
    """Items (0,0) and (6,8) at a, the same point (0,0) at b: the means are (0,0) and (3,4), distances 0 and 5."""
    sent = {"a": torch.tensor([[0.0, 0.0], [6.0, 8.0]]), "b": torch.zeros(2, 2)}
    assert drift(sent) == pytest.approx({"a": 2.5, "b": 2.5})
    assert drift({"a": sent["a"], "b": sent["a"]}) == pytest.approx({"a": 0.0, "b": 0.0})


def test_the_section_draws_recall_and_both_modalities() -> None:
    generator = torch.Generator().manual_seed(0)
    memory = {f"sample/{m}/{s}": torch.randn(5, 4, generator=generator) for m in ("image", "text") for s in ("a", "b<")}
    history = [{"round": r, "server": {"val/all/mean/r1": 10.0 * r}} for r in range(3)]
    page = public_set(history, memory)
    assert page.count("<figure>") == 5
    assert "The server&#x27;s model on the public set" in page
    assert "b&lt;" in page
    assert "b<" not in page


def test_a_run_without_a_public_set_says_so() -> None:
    assert public_set([{"round": 0}], {}) == ""
    assert "<figure>" not in public_set([{"round": 0}], {"sample/image/a": torch.ones(2, 2)}), (
        "one site drifts from nobody"
    )
