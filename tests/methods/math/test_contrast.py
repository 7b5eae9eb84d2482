"""Contrast, scores and ensembles of the public set against their plain definitions, in tiles of any size."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import pytest
import torch
from support.toy import SGD, World, pairs

from fedvlp.methods import CreamFL
from fedvlp.methods.math.contrast import (
    Ensemble,
    best_is_own,
    contrast_scores,
    inter_contrast,
    intra_contrast,
    only,
    opposite,
    representations,
    sampled_contrast,
    sampled_scores,
)


def units(count: int, dim: int = 6, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(count, dim, generator=generator, dtype=torch.float64), dim=1)


def test_scores_by_hand() -> None:
    """Own (1,0), (0,1); paired (1,0), (1,0). s_0 = 1 - log e^1 = 0 and s_1 = 0 - log e^0 = 0 without the positive;

    with it, s_0 = 1 - log(e + e) = -log 2 and s_1 = 0 - log(1 + 1) = -log 2.
    """
    own, paired = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    assert contrast_scores(own, paired).tolist() == pytest.approx([0.0, 0.0])
    assert contrast_scores(own, paired, exclude_positive=False).tolist() == pytest.approx([-math.log(2)] * 2)
    half = torch.tensor([[1.0, 0.0], [0.5, 0.0]])
    assert contrast_scores(half, half, temperature=0.5)[0].item() == pytest.approx(2.0 - 1.0)  # (1 - 0.5) / T


@pytest.mark.parametrize("tile", [1, 3, 7, 100])
@pytest.mark.parametrize("exclude", [True, False])
def test_scores_are_equation_4_in_any_tiling(tile: int, exclude: bool) -> None:
    own, paired = units(7, seed=1), units(7, seed=2)
    for temperature in (1.0, 0.1):
        matrix = own @ paired.T / temperature
        others = matrix.masked_fill(torch.eye(7, dtype=torch.bool), -torch.inf) if exclude else matrix
        expected = matrix.diagonal() - others.logsumexp(1)
        assert torch.allclose(contrast_scores(own, paired, temperature, exclude, tile), expected, atol=1e-12)


def test_the_papers_and_the_released_scores_differ_by_the_odds() -> None:
    """With p = exp(s) over all j, exp(s) over j != k is p / (1 - p) (spec 6.2)."""
    own, paired = units(9, seed=3), units(9, seed=4)
    share = contrast_scores(own, paired, exclude_positive=False).exp()
    assert torch.allclose(contrast_scores(own, paired).exp(), share / (1 - share), atol=1e-12)


def test_a_single_pair_has_score_zero() -> None:
    """The sum over the others is empty."""
    assert contrast_scores(units(1), units(1, seed=1)).tolist() == [0.0]
    assert contrast_scores(units(1), units(1, seed=1), exclude_positive=False).tolist() == [0.0]


def test_matching_the_partner_scores_higher() -> None:
    paired = units(5)
    assert (contrast_scores(paired, paired) > contrast_scores(-paired, paired)).all()


@pytest.mark.parametrize("tile", [2, 5, 100])
def test_inter_contrast_is_cross_entropy_over_the_whole_public_set(tile: int) -> None:
    """Value and gradient, whatever is kept or computed again."""
    others, rows = units(5, seed=5), torch.tensor([4, 0, 4])
    one, other = (units(3, seed=6).requires_grad_() for _ in range(2))
    expected = torch.nn.functional.cross_entropy(one @ others.T / 0.5, rows, reduction="none")
    seen = inter_contrast(other, others, rows, 0.5, tile)
    assert torch.allclose(seen, expected, atol=1e-12)
    expected.sum().backward()
    seen.sum().backward()
    assert torch.allclose(other.grad, one.grad, atol=1e-12)


def drawn(count: int, of: int) -> list[torch.Tensor]:
    """All samples of that size."""
    return [torch.tensor(chosen) for chosen in itertools.combinations(range(of), count)]


def test_a_sampled_contrast_by_hand() -> None:
    """Scores 2, 0, 1, -1 with T = 1; k = 0. Of items 1 and 3: e^2 + 3/2 (1 + e^-1); of 0 and 2: e^2 + 3/1 e^1."""
    own = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    others = torch.tensor([[2.0, 5.0], [0.0, 1.0], [1.0, 0.0], [-1.0, 3.0]], dtype=torch.float64)
    for sample, total in (([1, 3], math.e**2 + 1.5 * (1 + 1 / math.e)), ([0, 2], math.e**2 + 3 * math.e)):
        loss = sampled_contrast(own, others, torch.tensor([0]), torch.tensor(sample), 1.0)
        assert loss.item() == pytest.approx(math.log(total) - 2)


@pytest.mark.parametrize("tile", [1, 2, 5, 100])
def test_a_sample_of_all_items_is_the_whole_sum(tile: int) -> None:
    """Value and gradient, in any order of the items."""
    others, rows = units(5, seed=5), torch.tensor([4, 0, 4])
    one, other = (units(3, seed=6).requires_grad_() for _ in range(2))
    whole = inter_contrast(one, others, rows, 0.5)
    seen = sampled_contrast(other, others, rows, torch.tensor([3, 0, 4, 1, 2]), 0.5, tile)
    assert torch.allclose(seen, whole, atol=1e-12)
    whole.sum().backward()
    seen.sum().backward()
    assert torch.allclose(other.grad, one.grad, atol=1e-12)


@pytest.mark.parametrize("count", [2, 4, 7])
def test_the_sampled_sum_is_unbiased(count: int) -> None:
    """The mean over every sample that can be drawn is the whole sum, whether k is among them or not."""
    own, others, rows = units(2, seed=7), 3 * units(8, seed=8), torch.tensor([1, 6])
    positive = (own * others[rows]).sum(1) / 0.5
    whole = (inter_contrast(own, others, rows, 0.5) + positive).exp()
    sums = [(sampled_contrast(own, others, rows, some, 0.5) + positive).exp() for some in drawn(count, 8)]
    assert torch.allclose(torch.stack(sums).mean(0), whole, rtol=1e-9)
    assert not torch.allclose(sums[0], whole, rtol=1e-2), "the samples differ from it"


def test_the_logarithm_of_the_sampled_sum_is_too_small_by_half_its_relative_variance() -> None:
    own, others, rows = units(2, seed=7), units(14, seed=8), torch.tensor([1, 6])
    positive = (own * others[rows]).sum(1) / 0.5
    whole = inter_contrast(own, others, rows, 0.5)
    losses = torch.stack([sampled_contrast(own, others, rows, some, 0.5) for some in drawn(10, 14)])
    variance = (losses + positive).exp().var(dim=0, correction=0) / (2 * whole + 2 * positive).exp()
    too_small = whole - losses.mean(dim=0)
    assert (too_small > 0).all()
    assert torch.allclose(too_small, variance / 2, rtol=0.1)


def test_a_sample_of_the_positive_alone_has_no_negatives() -> None:
    """The loss is 0, and its gradient no NaN."""
    own = units(2).requires_grad_()
    loss = sampled_contrast(own, units(5, seed=1), torch.tensor([3, 3]), torch.tensor([3]), 0.5)
    loss.sum().backward()
    assert loss.tolist() == [0.0, 0.0]
    assert not own.grad.any()


@pytest.mark.parametrize("tile", [3, 100])
@pytest.mark.parametrize("exclude", [True, False])
def test_sampled_scores_estimate_the_sum_of_equation_4(tile: int, exclude: bool) -> None:
    """All items give the scores themselves; over all samples the mean of the sums is the whole sum."""
    own, paired = units(7, seed=1), units(7, seed=2)
    everything = torch.tensor([2, 6, 0, 1, 5, 4, 3])
    whole = contrast_scores(own, paired, 0.4, exclude)
    assert torch.allclose(sampled_scores(own, paired, everything, 0.4, exclude, tile), whole, atol=1e-12)
    positive = (own * paired).sum(1) / 0.4
    sums = [(positive - sampled_scores(own, paired, some, 0.4, exclude, tile)).exp() for some in drawn(3, 7)]
    assert torch.allclose(torch.stack(sums).mean(0), (positive - whole).exp(), rtol=1e-9)


def test_intra_contrast_by_hand() -> None:
    """r = (1, 0), g = (1, 0), p = (0, 1), T = 0.5: -log(e^2 / (e^2 + e^0)) = log(1 + e^-2)."""
    r, g, p = torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    assert intra_contrast(r, g, p, 0.5).item() == pytest.approx(math.log(1 + math.exp(-2)))
    assert intra_contrast(r, p, g, 0.5).item() == pytest.approx(math.log(1 + math.exp(2)))


def test_intra_contrast_of_equals_is_log_two() -> None:
    r, g = units(4), units(4, seed=1)
    assert intra_contrast(r, g, g, 0.5).tolist() == [math.log(2)] * 4


def test_the_ensemble_is_a_softmax_over_suppliers() -> None:
    """Item 0 has log-weights log 3 and log 1, item 1 equal ones: (3 a + b) / 4 and (a + b) / 2."""
    ensemble = Ensemble()
    a, b = torch.tensor([[4.0], [4.0]]), torch.tensor([[8.0], [8.0]])
    ensemble.add(a, torch.tensor([math.log(3), 5.0]))
    ensemble.add(b, torch.tensor([0.0, 5.0]))
    assert ensemble.mean().flatten().tolist() == pytest.approx([5.0, 6.0])


def test_the_ensemble_is_the_same_for_any_level_of_the_log_weights_and_order() -> None:
    sent = [units(6, seed=seed) for seed in range(4)]
    logs = torch.randn(4, 6, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    weights = logs.softmax(0)
    expected = sum(w[:, None] * r for w, r in zip(weights, sent, strict=True))
    for order, level in (([0, 1, 2, 3], 0.0), ([3, 1, 0, 2], 0.0), ([0, 1, 2, 3], 700.0), ([2, 3, 1, 0], -700.0)):
        ensemble = Ensemble()
        for index in order:
            ensemble.add(sent[index], logs[index] + level)
        assert torch.allclose(ensemble.mean(), expected, atol=1e-12)


def test_one_supplier_is_returned_exactly_and_equals_give_their_common_value() -> None:
    alone, together = Ensemble(), Ensemble()
    reps = units(5).float()
    alone.add(reps, torch.randn(5))
    assert torch.equal(alone.mean(), reps)
    for seed in range(4):
        together.add(reps, torch.randn(5, generator=torch.Generator().manual_seed(seed)))
    assert torch.allclose(together.mean(), reps, atol=1e-6)
    assert torch.equal(reps, units(5).float()), "the supplier's tensor is not changed"


def test_a_weight_of_zero_counts_nothing_and_all_zeros_count_alike() -> None:
    ensemble = Ensemble()
    for value, log in ((1.0, -torch.inf), (3.0, 0.0)):
        ensemble.add(torch.tensor([[value]]), torch.tensor([log]))
    assert ensemble.mean().item() == 3.0
    none = Ensemble()
    for value in (1.0, 3.0):
        none.add(torch.tensor([[value]]), torch.tensor([-torch.inf]))
    assert none.mean().item() == 2.0


@pytest.mark.parametrize("tile", [2, 100])
def test_best_is_own(tile: int) -> None:
    paired = torch.eye(5)
    assert best_is_own(paired, paired, tile).all()
    assert best_is_own(paired.roll(1, 0), paired, tile).tolist() == [False] * 5
    swapped = paired.clone()
    swapped[[0, 4]] = swapped[[4, 0]]
    assert best_is_own(swapped, paired, tile).tolist() == [False, True, True, True, False]


def test_only_drops_the_other_modality() -> None:
    batch = {name: torch.zeros(1) for name in ("image", "text", "text_mask", "row", "labels")}
    assert only(batch, ["image"]).keys() == {"image", "row", "labels"}
    assert only(batch, ["text"]).keys() == {"text", "text_mask", "row", "labels"}
    assert only(batch, ["image", "text"]).keys() == batch.keys()
    assert opposite("image") == "text"
    assert opposite("text") == "image"


def test_representations_are_in_order_in_eval_mode_and_leave_the_model_alone() -> None:
    """C2: no dropout, no batch statistics; C3: no augmentation, so twice the same."""
    from support.toy import Toy

    world = World(CreamFL(), training=SGD, model=lambda: Toy(norm=True, dropout=0.5), public=pairs(3, 7))
    client = world.client("a")
    client.model.train()
    before = {name: tensor.clone() for name, tensor in client.model.state_dict().items()}
    torch.manual_seed(0)
    first = representations(client, ("image", "text"), batch_size=3)
    torch.manual_seed(1)
    second = representations(client, ("image", "text"), batch_size=7)
    assert first.keys() == {"image", "text"}
    for name in first:
        assert first[name].shape == (7, 4)
        assert not first[name].requires_grad
        assert torch.allclose(first[name], second[name], atol=1e-6)
    assert all(torch.equal(tensor, before[name]) for name, tensor in client.model.state_dict().items())
    image = client.model(next(iter(client.public.batches("train", 7, drop_last=False)))).image
    assert torch.allclose(first["image"], image, atol=1e-6)


@pytest.mark.slow(seconds=10)
def test_twenty_thousand_items_take_a_few_hundred_megabytes() -> None:
    """A [20000, 20000] matrix alone would take 1.6 GB (the benchmark measures 50,000)."""
    code = """
import resource, torch
torch.set_num_threads(1)
from fedvlp.methods.math.contrast import contrast_scores, inter_contrast
own = torch.nn.functional.normalize(torch.randn(20000, 16), dim=1)
low = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
contrast_scores(own, own)
batch = own[:256].clone().requires_grad_()
inter_contrast(batch, own, torch.arange(256), 0.5).sum().backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - low) / 1024)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout) < 200


@pytest.mark.parametrize("tile", [4, 64])
def test_contrasts_are_computed_in_float32_under_autocast(tile: int) -> None:
    """At a temperature of 0.01 bfloat16 would be off by up to 0.4."""
    own, others = units(5, 16).float(), units(20, 16, 1).float()
    rows, sample = torch.arange(5), torch.arange(12)
    for contrast, drawn in ((inter_contrast, ()), (sampled_contrast, (sample,))):
        plain = contrast(own, others, rows, *drawn, 0.01, tile)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(contrast(own, others, rows, *drawn, 0.01, tile), plain)
