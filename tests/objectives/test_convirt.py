"""ConVIRT: the checks of spec 2.1 (a) to (d), in float64, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlp.core.types import VLOutput
from fedvlp.objectives.convirt import ConVIRT, ConVIRTConfig, info_nce


def units(rows: int, d: int, seed: int) -> Tensor:
    noise = torch.randn(rows, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return F.normalize(noise, dim=-1)


def test_orthonormal_pairs() -> None:
    """(a) x = y orthonormal: the row is 1/tau at the pair and 0 elsewhere, so L = log(1 + (B-1) e^(-1/tau))."""
    for temperature in [0.07, 0.5, 1.0]:
        for rows in [1, 2, 5, 8]:
            x = torch.eye(8, dtype=torch.float64)[:rows]
            expected = math.log1p((rows - 1) * math.exp(-1 / temperature))
            for direction in info_nce(x, x, temperature):
                assert direction.item() == pytest.approx(expected, abs=1e-14)


def test_identical_vectors_give_log_b() -> None:
    """(b) all logits equal: the softmax is uniform, each direction is log B."""
    for rows in [1, 2, 7, 32]:
        x = units(1, 16, 0).expand(rows, -1)
        for direction in info_nce(x, x, 0.07):
            assert direction.item() == pytest.approx(math.log(rows), abs=1e-12)


def test_autocast_lowers_nothing() -> None:
    """In bfloat16 a logit, of up to 14 here, would be off by up to 2^-8 of it; float32 agrees with float64 to 1e-6."""
    x, y = units(8, 16, 0), units(8, 16, 1)
    expected = [loss.item() for loss in info_nce(x, y, 0.07)]
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            found = info_nce(x.float(), y.float(), 0.07)
        assert [loss.item() for loss in found] == pytest.approx(expected, rel=1e-6)
        assert {loss.dtype for loss in found} == {torch.float32}
    assert info_nce(x.bfloat16(), y.bfloat16(), 0.07)[0].dtype == torch.float32
    assert info_nce(x, y.float(), 0.07)[0].dtype == torch.float64


def test_directions_swap_with_modalities() -> None:
    """(c) L_i2t(x, y) = L_t2i(y, x)."""
    x, y = units(9, 16, 1), units(9, 16, 2)
    forward, backward = info_nce(x, y, 0.07), info_nce(y, x, 0.07)
    torch.testing.assert_close(forward, backward[::-1], rtol=0, atol=1e-14)
    assert forward[0].item() != pytest.approx(forward[1].item(), abs=1e-6)


def test_distance_bound() -> None:
    """(d) L_i2t <= log B + mean_i ||x_i - y_i||^2 / (2 tau)."""
    for temperature in [0.07, 0.3, 1.0]:
        for noise in [0.0, 0.1, 1.0, 10.0]:
            for seed in range(20):
                x = units(6, 12, seed)
                y = F.normalize(x + noise * units(6, 12, seed + 100), dim=-1)
                bound = math.log(6) + (x - y).square().sum(-1).mean().item() / (2 * temperature)
                assert info_nce(x, y, temperature)[0].item() <= bound + 1e-12


def test_two_pairs_by_hand() -> None:
    """tau = 1, x = (e1, e2), y = (e1, e1): logits [[1, 1], [0, 0]].

    i2t: both rows are uniform, log 2. t2i: columns (1, 0) with targets 0 and 1:
    1/2 [log(1 + e^-1) + log(1 + e)] = 1/2 [0.3132617 + 1.3132617] = 0.8132617.
    """
    x = torch.eye(2, dtype=torch.float64)
    i2t, t2i = info_nce(x, x[[0, 0]], 1.0)
    assert i2t.item() == pytest.approx(math.log(2), abs=1e-12)
    assert t2i.item() == pytest.approx(0.8132616875, abs=1e-9)


def test_reductions() -> None:
    output = VLOutput(units(4, 8, 3), units(4, 8, 4))
    i2t, t2i = info_nce(units(4, 8, 3), units(4, 8, 4), 0.07)
    assert torch.equal(ConVIRT()(output, {})["contrastive"], i2t + t2i)
    assert torch.equal(ConVIRT(reduction="mean")(output, {})["contrastive"], (i2t + t2i) / 2)
    assert ConVIRT.needs == ("image", "text")


def test_absent_modality_is_skipped() -> None:
    assert ConVIRT()(VLOutput(image=units(4, 8, 0)), {}) == {}
    assert ConVIRT()(VLOutput(text=units(4, 8, 0)), {}) == {}
    assert ConVIRT()(VLOutput(), {}) == {}


@pytest.mark.parametrize("rows", [0, 1])
def test_small_batches_give_zero_and_a_gradient(rows: int) -> None:
    x, y = torch.randn(rows, 8, requires_grad=True), torch.randn(rows, 8, requires_grad=True)
    loss = ConVIRT()(VLOutput(F.normalize(x, dim=-1), F.normalize(y, dim=-1)), {})["contrastive"]
    loss.backward()
    assert loss.item() == 0
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()


def test_refuses_temperature() -> None:
    for temperature in [0.0, -0.1, math.nan, math.inf]:
        with pytest.raises(ValueError, match="temperature"):
            ConVIRT(temperature)
        with pytest.raises(ValueError, match="temperature"):
            ConVIRTConfig(temperature=temperature)


def test_refuses_reduction_and_shapes() -> None:
    with pytest.raises(ValueError, match=r"reduction 'max', expected 'sum' or 'mean'"):
        ConVIRTConfig(reduction="max")
    with pytest.raises(ValueError, match=r"image \[4, 8\], text \[3, 8\]"):
        info_nce(units(4, 8, 0), units(3, 8, 0), 0.07)


def test_config_builds() -> None:
    objective = ConVIRTConfig(0.1, "mean").build()
    assert isinstance(objective, ConVIRT)
    assert (objective.temperature, objective.reduction) == (0.1, "mean")
    assert not list(objective.parameters())
