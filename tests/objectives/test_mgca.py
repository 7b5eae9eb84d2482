"""MGCA: the checks of spec 2.3, against plain float64 loops, Sinkhorn against POT, freeze and masks."""

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

from fedvlp.core.types import Batch, VLOutput
from fedvlp.models.dual_encoder import ModelConfig
from fedvlp.objectives.mgca import MGCA, MGCAConfig, prototype_loss, sinkhorn, token_alignment, token_weights
from fedvlp.run.config import from_config, to_config

MODEL = ModelConfig(
    embedding_dim=6, image_size=16, vocabulary=16, max_tokens=8, text_layers=1, head_hidden=8, head_norm="layer"
)
LENGTHS = [5, 8, 3, 1]  # tokens of each report with [CLS], so 4, 7, 2 and no words
MASK = torch.tensor([[i < n for i in range(8)] for n in LENGTHS])
BATCH: Batch = {"text": torch.where(MASK, torch.arange(2, 10), 0)}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def units(*shape: int, seed: int = 0) -> Tensor:
    return F.normalize(random(*shape, seed=seed), dim=-1)


def output_of(dtype: torch.dtype = torch.float64) -> VLOutput:
    """Four pairs with four regions each; tokens of width 128."""
    seen = random(4, 8, seed=5).masked_fill(~MASK, -torch.inf).softmax(1)
    parts = (units(4, 6, seed=1), units(4, 6, seed=2), random(4, 5, 128, seed=3), random(4, 8, 128, seed=4))
    return VLOutput(
        *(t.to(dtype) for t in parts), MASK,
        image_attention=random(4, 5, seed=6).softmax(1)[:, 1:].to(dtype), text_attention=seen[:, 1:].to(dtype),
    )  # fmt: skip


def objective_of(dtype: torch.dtype = torch.float64, **settings: Any) -> MGCA:
    objective = MGCAConfig(**{"prototypes": 7, **settings}).build(MODEL.build(0), 0).to(dtype)
    assert isinstance(objective, MGCA)
    return objective


# An independent version, straight from the formulas


def softmax(values: Any) -> np.ndarray:
    powers = np.array([math.exp(value - max(values)) for value in values])
    return powers / powers.sum()


def unit(v: np.ndarray) -> np.ndarray:
    return v / np.linalg.norm(v)


def omega(attention: np.ndarray) -> np.ndarray:
    clipped = np.clip(attention, np.percentile(attention, 10), np.percentile(attention, 90))
    return clipped / clipped.sum()


def one_side(own: list[np.ndarray], other: list[np.ndarray], weights: list[np.ndarray], tau: float) -> float:
    """L_word of spec 2.3 (own are the words), or L_patch, over samples of any length."""
    total = 0.0
    for t, v, w in zip(own, other, weights, strict=True):
        attended = []
        for t_j in t:
            alpha = softmax([float(t_j @ v_k) / tau for v_k in v])
            attended.append(unit(sum(a * v_k for a, v_k in zip(alpha, v, strict=True))))
        s = np.array([[float(t_j @ o_l) / tau for o_l in attended] for t_j in t])
        for j in range(len(t)):
            total -= w[j] * (math.log(softmax(s[j])[j]) + math.log(softmax(s[:, j])[j]))
    return total / 2 / len(LENGTHS)


def codes_by_loops(scores: np.ndarray) -> np.ndarray:
    q = np.exp(scores / 0.05).T  # [K, B]
    q /= q.sum()
    for _ in range(3):
        for k in range(len(q)):
            q[k] /= q[k].sum() * len(q)
        for b in range(q.shape[1]):
            q[:, b] /= q[:, b].sum() * q.shape[1]
    return np.array([q[:, b] / q[:, b].sum() for b in range(q.shape[1])])


def by_loops(output: VLOutput, objective: MGCA) -> list[float]:
    """(contrastive, local, prototype)."""
    assert output.image is not None
    assert output.text is not None
    assert output.image_tokens is not None
    assert output.text_tokens is not None
    assert output.image_attention is not None
    assert output.text_attention is not None
    x, y = output.image.double().numpy(), output.text.double().numpy()
    logits = x @ y.T / 0.07
    instance = sum(-math.log(softmax(m[i])[i]) / 4 for m in (logits, logits.T) for i in range(4))
    with torch.no_grad():
        local = [
            [np.array([unit(row) for row in head(rows).double().numpy()]) for rows in tokens]
            for head, tokens in (
                (objective.image_local, [t[1:] for t in output.image_tokens]),
                (objective.text_local, [t[1:n] for t, n in zip(output.text_tokens, LENGTHS, strict=True) if n > 1]),
            )
        ]
    regions, words = local[0][:3], local[1]  # the last report has no word
    of_words = [omega(output.text_attention[i, : n - 1].double().numpy()) for i, n in enumerate(LENGTHS[:3])]
    of_regions = [omega(a.double().numpy()) for a in output.image_attention[:3]]
    pairs = one_side(words, regions, of_words, 0.1) + one_side(regions, words, of_regions, 0.1)
    c = np.array([unit(row) for row in objective.prototypes.detach().double().numpy()])
    clusters = 0.0
    for a, b in ((x, y), (y, x)):
        codes, scores = codes_by_loops(a @ c.T), b @ c.T
        for i in range(4):
            clusters -= sum(q * math.log(p) for q, p in zip(codes[i], softmax(scores[i] / 0.2), strict=True))
    return [instance, pairs, clusters / 4 / 2]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_against_plain_loops(dtype: torch.dtype, tolerance: float) -> None:
    output, objective = output_of(dtype), objective_of(dtype)
    terms = objective(output, BATCH)
    assert list(terms) == ["contrastive", "local", "prototype"]
    found = [term.item() for term in terms.values()]
    assert found == pytest.approx(by_loops(output, objective), rel=tolerance, abs=tolerance)


# Sinkhorn


def test_sinkhorn_is_optimal_transport() -> None:
    """Converged, B q is POT's entropic plan between K clusters and B records, cost -scores."""
    import ot

    scores = units(12, 6, seed=1) @ units(9, 6, seed=2).T
    plan = ot.sinkhorn(np.full(9, 1 / 9), np.full(12, 1 / 12), -scores.T.numpy(), 0.05, numItermax=5000, stopThr=1e-15)
    np.testing.assert_allclose(sinkhorn(scores, iterations=3000).numpy(), 12 * plan.T, rtol=0, atol=1e-9)


def test_sinkhorn_of_equal_scores_is_uniform() -> None:
    torch.testing.assert_close(sinkhorn(torch.full((5, 8), 0.3)), torch.full((5, 8), 1 / 8))


def test_sinkhorn_marginals() -> None:
    """q sums to 1 for every record at once; after many iterations, to B/K for every cluster."""
    scores = units(12, 6, seed=3) @ units(9, 6, seed=4).T
    few, many = sinkhorn(scores), sinkhorn(scores, iterations=2000)
    torch.testing.assert_close(few.sum(1), torch.ones(12).double(), rtol=0, atol=1e-12)
    torch.testing.assert_close(many.sum(0), torch.full((9,), 12 / 9, dtype=torch.float64), rtol=0, atol=1e-9)
    assert not torch.allclose(few.sum(0), many.sum(0), atol=1e-9)


def test_sinkhorn_of_one_record_says_nothing() -> None:
    torch.testing.assert_close(sinkhorn(random(1, 8)), torch.full((1, 8), 1 / 8).double())


def test_sinkhorn_by_hand() -> None:
    """exp(scores / eps) = [[3, 1], [1, 1]] (clusters in rows). Rows to 1/2: [3/8, 1/8], [1/4, 1/4]; then columns to 1:
    [3/5, 1/3], [2/5, 2/3]. One iteration: record 0 is 3/5 in cluster 0, record 1 is 1/3.
    """
    scores = 0.05 * torch.tensor([[3.0, 1.0], [1.0, 1.0]]).log()
    torch.testing.assert_close(sinkhorn(scores, iterations=1), torch.tensor([[3 / 5, 2 / 5], [1 / 3, 2 / 3]]))


@pytest.mark.parametrize("epsilon", [0.029, 0.01, 0.001])
def test_hard_codes_are_those_of_exact_arithmetic(epsilon: float) -> None:
    """Exponentials of cosines by a small epsilon leave float32; the codes are those of 80 digits all the same."""
    import mpmath

    scores = (units(6, 5, seed=3) @ units(4, 5, seed=4).T).float()
    with mpmath.workdps(80):
        q = [[mpmath.exp(mpmath.mpf(float(value)) / mpmath.mpf(epsilon)) for value in row] for row in scores]
        for _ in range(3):
            sums = [mpmath.fsum(column) for column in zip(*q, strict=True)]
            q = [[value / total for value, total in zip(row, sums, strict=True)] for row in q]
            q = [[value / mpmath.fsum(row) for value in row] for row in q]
        expected = torch.tensor([[float(value) for value in row] for row in q])
    torch.testing.assert_close(sinkhorn(scores, epsilon), expected, rtol=2e-3, atol=1e-6)


# Words and regions


def everywhere(tokens: Tensor) -> Tensor:
    return torch.ones(tokens.shape[:2], dtype=torch.bool)


def test_word_loss_vanishes_where_every_word_has_its_own_region() -> None:
    """Words and regions both e_1..e_4 at a low temperature: o_j = t_j, S is 1/tau on the diagonal alone."""
    eye = torch.eye(4, dtype=torch.float64)[None]
    uniform = torch.full((1, 4), 0.25, dtype=torch.float64)
    assert token_alignment(eye, everywhere(eye), eye, everywhere(eye), uniform, 0.01).item() < 1e-30
    same = eye[:, :1].expand(-1, 4, -1)  # all words alike: log 4 in both directions
    found = token_alignment(same, everywhere(same), eye, everywhere(eye), uniform, 0.1).item()
    assert found == pytest.approx(math.log(4), abs=1e-12)


def test_the_order_of_regions_does_not_matter() -> None:
    output, objective, order = output_of(), objective_of(), [0, 3, 1, 4, 2]
    assert output.image_tokens is not None
    assert output.image_attention is not None
    patches = [index - 1 for index in order[1:]]
    other = replace(
        output, image_tokens=output.image_tokens[:, order], image_attention=output.image_attention[:, patches]
    )
    found = objective(other, BATCH)["local"].item()
    assert found == pytest.approx(objective(output, BATCH)["local"].item(), abs=1e-12)
    without = replace(output, image_tokens=output.image_tokens[:, order])  # weights stay with their regions
    assert found != pytest.approx(objective(without, BATCH)["local"].item(), abs=1e-6)


def test_weights_are_clipped_to_the_percentiles_of_real_tokens_and_sum_to_1() -> None:
    """Of 0, 1, ..., 10 the percentiles are 1 and 9: (1, 1, 2, ..., 9, 9) / 55. Padding counts for nothing."""
    attention = torch.cat([torch.arange(11.0), torch.tensor([100.0, 0.0])]).double()[None] / 155
    mask = torch.tensor([[True] * 11 + [False] * 2])
    expected = torch.tensor([1.0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 0, 0]).double()[None] / 55
    torch.testing.assert_close(token_weights(attention, mask), expected, rtol=0, atol=1e-12)


def test_weights_without_attention_are_uniform_and_of_nothing_are_0() -> None:
    mask = torch.tensor([[True, True, False], [False, False, False]])
    for attention in (None, torch.full((2, 3), 0.2)):
        assert token_weights(attention, mask).tolist() == [[0.5, 0.5, 0.0], [0.0, 0.0, 0.0]]


def test_attention_of_a_words_pieces_is_summed() -> None:
    """Two reports that differ in one split: its pieces' features and attention add up to the whole word's."""
    objective = objective_of()
    objective.pieces = torch.tensor([0, 0, 1, 1, 2], dtype=torch.int8)
    tokens, seen = random(1, 5, 128, seed=7), torch.tensor([[0.1, 0.2, 0.3, 0.15]], dtype=torch.float64)
    image = {"image_tokens": random(1, 5, 128, seed=8), "image": units(1, 6), "text": units(1, 6)}
    split = VLOutput(**image, text_tokens=tokens, text_mask=torch.ones(1, 5, dtype=torch.bool), text_attention=seen)
    merged = torch.cat([tokens[:, :2], tokens[:, 2:4].sum(1, keepdim=True), tokens[:, 4:]], 1)
    whole = VLOutput(
        **image, text_tokens=merged, text_mask=torch.ones(1, 4, dtype=torch.bool),
        text_attention=torch.tensor([[0.1, 0.5, 0.15]], dtype=torch.float64),
    )  # fmt: skip
    one = objective(split, {"text": torch.tensor([[0, 2, 3, 4, 2]])})["local"]
    other = objective(whole, {"text": torch.tensor([[0, 2, 3, 2]])})["local"]
    assert one.item() == pytest.approx(other.item(), abs=1e-12)


@pytest.mark.parametrize("norm", ["layer", "batch"])
def test_more_padding_changes_nothing(norm: str) -> None:
    """Also with batch statistics: they are those of real words."""
    output = output_of()
    assert output.text_tokens is not None
    assert output.text_attention is not None
    longer = replace(
        output, text_tokens=torch.cat([output.text_tokens, 9 * random(4, 3, 128, seed=9)], 1),
        text_mask=F.pad(MASK, (0, 3)), text_attention=F.pad(output.text_attention, (0, 3)),
    )  # fmt: skip
    objective = MGCAConfig(prototypes=7).build(replace(MODEL, head_norm=norm).build(0)).double()
    one, other = objective(output, BATCH), objective(longer, {"text": F.pad(BATCH["text"], (0, 3))})
    for name in one:
        assert other[name].item() == pytest.approx(one[name].item(), abs=1e-12)


def test_gradients_reach_real_words_and_regions_and_no_attention() -> None:
    output, objective = output_of(), objective_of()
    leaves = [output.text_tokens, output.image_tokens, output.text_attention, output.image_attention]
    for leaf in leaves:
        assert leaf is not None
        leaf.requires_grad_(True)
    objective(output, BATCH)["local"].backward()
    text, image, *attention = (None if leaf is None else leaf.grad for leaf in leaves)
    assert text is not None
    assert image is not None
    used = MASK.clone()
    used[:, 0] = False
    assert torch.equal(text.abs().sum(2) > 0, used)
    assert not image[:, 0].any()
    assert not image[3].any(), "a report without a word aligns no region"
    assert (image[:3, 1:].abs().sum(2) > 0).all()
    assert attention == [None, None]
    for head in (objective.image_local, objective.text_local):
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in head.parameters())


@pytest.mark.parametrize("rows", [[0], [2], [3], [3, 3], [2, 3]])
@pytest.mark.parametrize("norm", ["layer", "batch"])
def test_one_pair_few_words_and_no_word_are_finite(rows: list[int], norm: str) -> None:
    output = output_of()
    some = VLOutput(**{n: None if t is None else t[rows] for n, t in vars(output).items()})
    assert some.image_tokens is not None
    some.image_tokens.requires_grad_(True)
    objective = MGCAConfig(prototypes=7).build(replace(MODEL, head_norm=norm).build(0)).double()
    terms = objective(some, {"text": BATCH["text"][rows]})
    sum(terms.values()).backward()
    assert all(torch.isfinite(term) for term in terms.values())
    assert torch.isfinite(some.image_tokens.grad).all()
    if rows == [3]:
        assert terms["local"].item() == 0


@pytest.mark.parametrize(("words", "counts"), [(0, False), (1, False), (2, True), (3, True)])
def test_two_words_in_a_batch_are_enough_for_the_local_term(words: int, counts: bool) -> None:
    """One report: its first token is the summary token, each of the next ``words`` a word."""
    output = output_of()
    some = VLOutput(**{n: None if t is None else t[:1] for n, t in vars(output).items()})
    mask = (torch.arange(8) <= words)[None]
    batch = {"text": torch.where(mask, torch.arange(2, 10), 0)}
    objective = MGCAConfig(prototypes=7).build(MODEL.build(0)).double()
    term = objective(replace(some, text_mask=mask), batch)["local"].item()
    assert (term != 0) == counts


# Prototypes


def test_codes_have_no_gradient() -> None:
    """The gradient is that of the cross entropy against fixed codes."""
    image, text = units(5, 6, seed=1).requires_grad_(True), units(5, 6, seed=2)
    prototypes, config = units(7, 6, seed=3), MGCAConfig()
    prototype_loss(image, text, prototypes, config).backward()
    copy = image.detach().clone().requires_grad_(True)
    codes = sinkhorn(text @ prototypes.T)
    (-(codes * (copy @ prototypes.T / 0.2).log_softmax(1)).sum(1).mean() / 2).backward()
    torch.testing.assert_close(image.grad, copy.grad, rtol=0, atol=1e-14)


def test_the_entropy_of_the_codes_is_the_least_of_the_prototype_loss() -> None:
    """By hand: 1/2 of the mean of -sum_k q_k log q_k over the codes of each modality, times the term's weight."""
    output = output_of()
    objective = MGCAConfig(prototypes=7, prototype_weight=3.0).build(MODEL.build(0)).double()
    assert output.image is not None
    assert output.text is not None
    prototypes = F.normalize(objective.prototypes, dim=1)
    by_hand = 0.0
    for embedding in (output.image, output.text):
        codes = sinkhorn(embedding.double() @ prototypes.T)
        by_hand -= float((codes * codes.clamp_min(1e-300).log()).sum(1).mean()) / 2
    least = objective.entropy(output, BATCH)
    assert least.keys() == {"prototype"}
    assert least["prototype"].item() == pytest.approx(3.0 * by_hand, rel=1e-6)
    assert objective(output, BATCH)["prototype"].item() > least["prototype"].item()
    assert objective.entropy(replace(output, text=None), BATCH) == {}


def test_swapping_the_modalities_changes_nothing() -> None:
    image, text, prototypes = units(5, 6, seed=1), units(5, 6, seed=2), units(7, 6, seed=3)
    one, other = (prototype_loss(*pair, prototypes, MGCAConfig()) for pair in ((image, text), (text, image)))
    assert one.item() == pytest.approx(other.item(), abs=1e-12)


def test_the_length_of_prototypes_does_not_count() -> None:
    output, objective = output_of(), objective_of()
    before = objective(output, BATCH)["prototype"].item()
    with torch.no_grad():
        objective.prototypes.mul_(torch.arange(1.0, 8)[:, None])
    assert objective(output, BATCH)["prototype"].item() == pytest.approx(before, abs=1e-12)


@pytest.mark.parametrize("steps", [0, 1, 3, 7, 50, 1237])
def test_prototypes_thaw_after_so_many_steps_exactly(steps: int) -> None:
    output, objective = output_of(torch.float32), objective_of(torch.float32, freeze_steps=steps)

    def moves() -> bool:
        objective.prototypes.grad = None
        objective(output, BATCH)["prototype"].backward()
        assert objective.prototypes.grad is not None
        return bool(objective.prototypes.grad.any())

    for _ in range(max(0, steps - 1)):
        objective.after_step()
    if steps:
        assert not moves()
        objective.eval().after_step()  # a phase that does not train it
        assert not moves()
        objective.train().after_step()
    assert moves()
    for _ in range(3):
        objective.after_step()
    assert objective.thawed.item() == 1
    assert moves()


def test_frozen_prototypes_still_teach_the_towers() -> None:
    output, objective = output_of(), objective_of()
    assert output.image is not None
    output.image.requires_grad_(True)
    objective(output, BATCH)["prototype"].backward()
    assert output.image.grad is not None
    assert output.image.grad.abs().sum() > 0


# The rest


def test_weights_of_the_terms() -> None:
    output = output_of()
    one = objective_of()(output, BATCH)
    other = objective_of(instance_weight=2.0, local_weight=0.5, prototype_weight=0.0)(output, BATCH)
    ratios = [(other[name] / one[name]).item() for name in one]
    assert ratios == pytest.approx([2.0, 0.5, 0.0], rel=1e-12)


def test_absent_modalities_and_tokens() -> None:
    output, objective = output_of(), objective_of()
    assert objective(replace(output, text=None), BATCH) == {}
    assert objective(replace(output, image=None), BATCH) == {}
    assert objective(VLOutput(output.image, output.text), {}).keys() == {"contrastive", "prototype"}
    for absent in ("image_tokens", "text_tokens", "text_mask"):
        assert objective(replace(output, **{absent: None}), BATCH).keys() == {"contrastive", "prototype"}, absent


def test_the_seed_is_0_unless_another_is_given() -> None:
    one, other = (MGCAConfig(prototypes=7).build(MODEL.build(0), *seed).state_dict() for seed in ((), (0,)))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_computed_in_float32_under_autocast() -> None:
    output, objective = output_of(torch.float32), objective_of(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside, least = objective(output, BATCH), objective.entropy(output, BATCH)["prototype"]
    outside = objective(output, BATCH)
    exact = objective_of().entropy(output_of(), BATCH)["prototype"]
    assert least.item() == pytest.approx(exact.item(), rel=1e-6)
    assert all(term.dtype == torch.float32 for term in inside.values())
    assert torch.equal(inside["prototype"], outside["prototype"])
    assert inside["local"].item() == pytest.approx(outside["local"].item(), rel=0.05)  # the heads are in bfloat16


def test_its_tensors_are_seeded_and_named() -> None:
    one, same = (objective_of().state_dict() for _ in range(2))
    other = MGCAConfig(prototypes=7).build(MODEL.build(0), 1).state_dict()
    assert {name.partition(".")[0] for name in one} == {"prototypes", "thawed", "image_local", "text_local"}
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["prototypes"].float(), other["prototypes"])
    torch.testing.assert_close(one["prototypes"].norm(dim=1), torch.ones(7).double(), atol=1e-6, rtol=0)


def test_config_comes_back_from_json_and_refuses() -> None:
    config = MGCAConfig(freeze_steps=0, prototypes=9)
    assert from_config(json.loads(json.dumps(to_config(config)))) == config
    MGCAConfig(temperature=0.5, local_temperature=0.5, proto_temperature=0.5, epsilon=0.5, prototypes=2, iterations=1)
    MGCAConfig(freeze_steps=0, instance_weight=0.0, local_weight=0.0, prototype_weight=0.0)
    for wrong in ({"temperature": 0.0}, {"epsilon": math.inf}, {"prototypes": 1}, {"iterations": 0},
                  {"freeze_steps": -1}, {"local_weight": -1.0}, {"local_weight": math.inf},
                  {"prototype_weight": math.nan}):  # fmt: skip
        with pytest.raises(ValueError, match=f"MGCA: {next(iter(wrong))}"):
            MGCAConfig(**wrong)  # type: ignore[arg-type]
