"""GLoRIA: the checks of spec 2.2, against plain float64 loops, masks, gradients and what it refuses."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlp.core.types import VLOutput
from fedvlp.models.dual_encoder import ModelConfig
from fedvlp.objectives import gloria
from fedvlp.objectives.gloria import GLoRIA, GLoRIAConfig, similarities, word_index
from fedvlp.run.config import from_config, to_config

PIECES = torch.tensor([0, 0, 1, 1, 2, 2], dtype=torch.int8)  # ids: padding, [SEP], two words, two continuations
IDS = torch.tensor([[0, 2, 4, 3, 1, 0, 0], [0, 3, 2, 4, 5, 2, 1], [0, 2, 1, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0, 0]])
MASK = torch.tensor([[i < n for i in range(7)] for n in (5, 7, 3, 2)])
WORDS = [[[1, 2], [3]], [[1], [2, 3, 4], [5]], [[1]], []]  # positions of the pieces of each word of each report


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def output_of(regions: int = 5, dtype: torch.dtype = torch.float64) -> VLOutput:
    """Four reports of two, three, one and no words; images of width 6, texts of width 8."""
    image, text = (F.normalize(random(4, 3, seed=s), dim=1).to(dtype) for s in (1, 2))
    return VLOutput(image, text, random(4, 1 + regions, 6, seed=3).to(dtype), random(4, 7, 8, seed=4).to(dtype), MASK)


def objective_of(dtype: torch.dtype = torch.float64, **settings: Any) -> GLoRIA:
    torch.manual_seed(0)
    return GLoRIA(GLoRIAConfig(**settings), 6, 8, PIECES).to(dtype)


def softmax(values: list[float]) -> list[float]:
    powers = [math.exp(value - max(values)) for value in values]
    return [power / sum(powers) for power in powers]


def z_by_loops(v: np.ndarray, w: np.ndarray, temp1: float = 4.0, temp2: float = 5.0) -> float:
    """Z of one image, regions v [R, D], and one caption, words w [N, D]: spec 2.2, line by line."""
    a = np.array([softmax([float(v_r @ w_j) for w_j in w]) for v_r in v])  # A_rj, over words
    total = 0.0
    for j, w_j in enumerate(w):
        over_regions = softmax([temp1 * a[r, j] for r in range(len(v))])
        c_j = sum(share * v_r for share, v_r in zip(over_regions, v, strict=True))
        total += math.exp(temp2 * float(w_j @ c_j) / (np.linalg.norm(w_j) * np.linalg.norm(c_j)))
    return math.log(total)


def both_directions(logits: np.ndarray) -> float:
    """Cross entropy of rows plus that of columns, targets on the diagonal, each a mean."""
    return sum(-math.log(softmax(list(m[i]))[i]) / len(m) for m in (logits, logits.T) for i in range(len(m)))


def by_loops(output: VLOutput, weight: Tensor) -> tuple[float, float]:
    """(global, local) of a batch."""
    assert output.image is not None
    assert output.text is not None
    assert output.image_tokens is not None
    assert output.text_tokens is not None
    x, y = output.image.double().numpy(), output.text.double().numpy()
    cosine = np.array([[a @ b / np.linalg.norm(a) / np.linalg.norm(b) for b in y] for a in x])
    regions = output.image_tokens[:, 1:].double().numpy() @ weight.detach().double().numpy().T
    tokens = output.text_tokens.double().numpy()
    captions = [
        np.stack([t[0], *(sum(t[piece] for piece in word) for word in words)])
        for t, words in zip(tokens, WORDS, strict=True)
    ]
    z = np.array([[z_by_loops(v, w) for w in captions] for v in regions])
    return both_directions(10 * cosine), both_directions(10 * z)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_against_plain_loops(dtype: torch.dtype, tolerance: float) -> None:
    output, objective = output_of(dtype=dtype), objective_of(dtype)
    terms = objective(output, {"text": IDS})
    expected = by_loops(output, objective.image_local.weight)
    assert terms.keys() == {"contrastive", "local"}
    assert [terms["contrastive"].item(), terms["local"].item()] == pytest.approx(expected, rel=tolerance, abs=tolerance)


def test_weights_of_the_terms() -> None:
    output, batch = output_of(), {"text": IDS}
    one, other = objective_of()(output, batch), objective_of(local_weight=0.5, global_weight=3.0)(output, batch)
    assert other["local"].item() == pytest.approx(0.5 * one["local"].item(), rel=1e-12)
    assert other["contrastive"].item() == pytest.approx(3 * one["contrastive"].item(), rel=1e-12)


def z(v: Tensor, w: Tensor) -> Tensor:
    return similarities(v[None], w[None], torch.ones(1, len(w), dtype=torch.bool), 4.0, 5.0)[0, 0]


def test_one_region_is_what_every_word_attends_to() -> None:
    """R = 1: c_j = v_1, so Z = log sum_j exp(5 cos(w_j, v_1))."""
    v, w = random(1, 8, seed=5), random(4, 8, seed=6)
    expected = torch.logsumexp(5 * F.cosine_similarity(w, v), 0)
    assert z(v, w).item() == pytest.approx(expected.item(), abs=1e-12)


def test_one_word_and_one_region() -> None:
    """Z = temp2 cos(w, v): (3, 4) and (1, 0) give 5 * 0.6 = 3."""
    found = z(torch.tensor([[1.0, 0.0]]).double(), torch.tensor([[3.0, 4.0]]).double())
    assert found.item() == pytest.approx(3.0, abs=1e-12)


def test_the_order_of_regions_does_not_matter() -> None:
    v, w, order = random(6, 8, seed=7), random(4, 8, seed=8), [3, 0, 5, 1, 4, 2]
    assert z(v[order], w).item() == pytest.approx(z(v, w).item(), abs=1e-12)
    assert z(v[:5], w).item() != pytest.approx(z(v, w).item(), abs=1e-6)


def test_equal_regions_are_attended_to_equally() -> None:
    """All regions v: c_j = v however many there are."""
    v, w = random(1, 8, seed=9), random(4, 8, seed=10)
    assert z(v.expand(7, -1), w).item() == pytest.approx(z(v, w).item(), abs=1e-12)


def test_logits_of_all_pairs_have_images_in_rows() -> None:
    v, w, mask = random(2, 5, 8, seed=11), random(3, 4, 8, seed=12), torch.ones(3, 4, dtype=torch.bool)
    found = similarities(v, w, mask, 4.0, 5.0)
    assert found.shape == (2, 3)
    for b in range(2):
        for c in range(3):
            assert found[b, c].item() == pytest.approx(z(v[b], w[c]).item(), abs=1e-12)
    order = [2, 0, 1]
    # another order of the rows is another block of a matrix product, which may add up in another order
    torch.testing.assert_close(similarities(v, w[order], mask, 4.0, 5.0), found[:, order], rtol=0, atol=1e-12)


def test_swapping_captions_and_images_together_changes_nothing() -> None:
    output, order = output_of(), [2, 0, 3, 1]
    shuffled = VLOutput(*(t[order] for t in (
        output.image, output.text, output.image_tokens, output.text_tokens, output.text_mask
    )))  # fmt: skip
    one, other = objective_of()(output, {"text": IDS}), objective_of()(shuffled, {"text": IDS[order]})
    for name in one:
        assert one[name].item() == pytest.approx(other[name].item(), abs=1e-12)


def test_more_padding_changes_nothing() -> None:
    output = output_of()
    assert output.text_tokens is not None
    tokens = torch.cat([output.text_tokens, 9 * random(4, 6, 8, seed=13)], 1)
    longer = replace(output, text_tokens=tokens, text_mask=F.pad(MASK, (0, 6)))
    one, other = objective_of()(output, {"text": IDS}), objective_of()(longer, {"text": F.pad(IDS, (0, 6))})
    assert other["local"].item() == pytest.approx(one["local"].item(), abs=1e-12)


def test_the_separator_and_the_summary_of_the_image_are_left_out() -> None:
    output, objective = output_of(), objective_of()
    assert output.text_tokens is not None
    assert output.image_tokens is not None
    tokens, patches = output.text_tokens.clone(), output.image_tokens.clone()
    tokens[IDS == 1] += 5.0  # [SEP]
    patches[:, 0] += 5.0
    other = replace(output, text_tokens=tokens, image_tokens=patches)
    assert torch.equal(objective(other, {"text": IDS})["local"], objective(output, {"text": IDS})["local"])
    tokens[:, 0] += 5.0  # [CLS] is one of the words
    assert not torch.equal(objective(other, {"text": IDS})["local"], objective(output, {"text": IDS})["local"])


def test_captions_in_lots_give_the_same_loss_and_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> tuple[float, Tensor]:
        output, objective = output_of(), objective_of()
        assert output.text_tokens is not None
        output.text_tokens.requires_grad_(True)
        loss = objective(output, {"text": IDS})["local"]
        loss.backward()
        assert output.text_tokens.grad is not None
        return loss.item(), torch.cat([output.text_tokens.grad.flatten(), objective.image_local.weight.grad.flatten()])

    whole = run()
    monkeypatch.setattr(gloria, "LARGEST", 1)  # one caption at a time
    single = run()
    assert single[0] == pytest.approx(whole[0], abs=1e-12)
    torch.testing.assert_close(single[1], whole[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize(("largest", "lots"), [(1, [1, 1, 1, 1]), (279, [1, 1, 1, 1]), (280, [2, 2]), (10**6, [4])])
def test_a_lot_holds_as_many_captions_as_fit(largest: int, lots: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Four images of 5 regions against captions of 7 words: 140 elements a caption, at least one caption a lot."""
    seen = []

    def noting(regions: Tensor, words: Tensor, *rest: Any) -> Tensor:
        seen.append(len(words))
        return similarities(regions, words, *rest)

    monkeypatch.setattr(gloria, "similarities", noting)
    monkeypatch.setattr(gloria, "LARGEST", largest)
    with torch.no_grad():
        objective_of()(output_of(), {"text": IDS})
    assert seen == lots


def test_gradients_reach_real_words_regions_and_the_projection_alone() -> None:
    output, objective = output_of(), objective_of()
    assert output.text_tokens is not None
    assert output.image_tokens is not None
    leaves = output.text_tokens.requires_grad_(True), output.image_tokens.requires_grad_(True)
    objective(output, {"text": IDS})["local"].backward()
    text, image = (leaf.grad for leaf in leaves)
    assert text is not None
    assert image is not None
    used = (word_index(IDS, MASK, PIECES) >= 0) | (torch.arange(7) == 0)  # words and [CLS]
    assert torch.equal(text.abs().sum(2) > 0, used)
    assert not image[:, 0].any()
    assert (image[:, 1:].abs().sum(2) > 0).all()
    assert objective.image_local.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("rows", [[0], [2], [3], [3, 3]])
def test_one_pair_one_word_and_no_word_are_finite(rows: list[int]) -> None:
    output, objective = output_of(), objective_of()
    some = VLOutput(*(t[rows] for t in (
        output.image, output.text, output.image_tokens, output.text_tokens, output.text_mask
    )))  # fmt: skip
    terms = objective(some, {"text": IDS[rows]})
    sum(terms.values()).backward()
    assert all(torch.isfinite(term) for term in terms.values())
    assert torch.isfinite(objective.image_local.weight.grad).all()
    if len(rows) == 1:
        assert [term.item() for term in terms.values()] == pytest.approx([0.0, 0.0], abs=1e-12)


def test_absent_modalities_and_tokens() -> None:
    output, objective = output_of(), objective_of()
    assert objective(replace(output, text=None), {"text": IDS}) == {}
    assert objective(replace(output, image=None), {"text": IDS}) == {}
    assert objective(VLOutput(output.image, output.text), {}).keys() == {"contrastive"}
    for absent in ("image_tokens", "text_tokens", "text_mask"):
        assert objective(replace(output, **{absent: None}), {"text": IDS}).keys() == {"contrastive"}, absent


def test_computed_in_float32_under_autocast() -> None:
    output, objective = output_of(dtype=torch.float32), objective_of(torch.float32)
    assert output.image_tokens is not None
    assert output.text_tokens is not None
    regions, index = objective.image_local(output.image_tokens[:, 1:]), word_index(IDS, MASK, PIECES)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = objective.local(regions, output.text_tokens, index)
        assert all(term.dtype == torch.float32 for term in objective(output, {"text": IDS}).values())
    assert torch.equal(inside, objective.local(regions, output.text_tokens, index))


def test_its_tensors_are_seeded_and_named() -> None:
    model = ModelConfig(embedding_dim=4, image_size=16, vocabulary=16, max_tokens=8, text_layers=1).build(0)
    one, same, other = GLoRIAConfig().build(model), *(GLoRIAConfig().build(model, seed) for seed in (0, 1))
    assert list(one.state_dict()) == ["image_local.weight"]
    assert torch.equal(one.image_local.weight, same.image_local.weight)
    assert not torch.equal(one.image_local.weight, other.image_local.weight)
    assert one.image_local.weight.shape == (128, 128)


def test_config_comes_back_from_json_and_refuses() -> None:
    config = GLoRIAConfig(temp1=2.0, local_weight=0.0)
    assert from_config(json.loads(json.dumps(to_config(config)))) == config
    GLoRIAConfig(temp1=0.5, temp2=0.5, temp3=0.5, local_weight=0.0, global_weight=0.0)
    refused = ({"temp1": 0.0}, {"temp3": math.inf}, {"local_weight": -1.0}, {"local_weight": math.inf})
    for wrong in (*refused, {"global_weight": math.nan}):
        with pytest.raises(ValueError, match=f"GLoRIA: {next(iter(wrong))}"):
            GLoRIAConfig(**wrong)
