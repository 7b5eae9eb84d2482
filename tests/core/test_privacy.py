"""What clipping and noise do to an update, measured; and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from support.toy import clone, same_bytes
from torch import Tensor

from fedvlp.core import privacy
from fedvlp.core.privacy import (
    PrivacyError,
    allowed_metrics,
    clip_and_noise,
    gaussian,
    is_mistake,
    is_named,
    refuse_named,
)

RECEIVED = {"w": torch.zeros(3), "b": torch.ones(1)}


def silent(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.float64)


@pytest.fixture
def noiseless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(privacy, "gaussian", silent)


def test_a_pattern_of_a_frozen_tower_is_no_mistake() -> None:
    """The shipped list has the text tower's words; with adapters they do not travel, or as adapters of that layer."""
    for travels, mistake in [
        (["text_encoder.words.weight", "text_head.w"], False), (["text_encoder.norm.w", "text_head.w"], True),
        (["text_head.w", "text_alignment.w"], False), (["text_adapter.layer.up", "text_head.w"], False),
        (["text_encoder.norm.w", "text_adapter.words.up"], False), (["text_encoder.norm.w", "text_adapter.q.up"], True),
    ]:  # fmt: skip
        assert is_mistake("text_encoder*word*", travels) is mistake
        assert is_mistake("txt_encoder*word*", travels), "a misspelt one"
        assert is_named("text_adapter.words.up", "text_encoder*word*")
        assert is_named("change/text_adapter.words.up", "text_encoder*word*")
        assert not is_named("text_adapter.q.up", "text_encoder*word*")


@pytest.mark.usefixtures("noiseless")
def test_the_whole_change_is_clipped_as_one_vector() -> None:
    """d = (2, 4, 4, -8) has norm 10; to norm 5 it is halved; every tensor by the same factor."""
    update = {"w": torch.tensor([2.0, 4.0, 4.0]), "b": torch.tensor([-7.0])}
    before = clone(update)
    released = clip_and_noise(update, RECEIVED, clip=5.0, noise_multiplier=1.0)
    same_bytes(released, {"w": torch.tensor([1.0, 2.0, 2.0]), "b": torch.tensor([-3.0])})
    same_bytes(update, before)


@pytest.mark.usefixtures("noiseless")
def test_a_small_change_is_left_as_it_is() -> None:
    update = {"w": torch.tensor([0.5, 0.0, 0.0]), "b": torch.tensor([1.0])}
    same_bytes(clip_and_noise(update, RECEIVED, clip=5.0, noise_multiplier=1.0), update)
    same_bytes(clip_and_noise(RECEIVED, RECEIVED, clip=5.0, noise_multiplier=1.0), RECEIVED)


def test_what_is_sent_as_a_change_is_clipped_and_noised_with_the_rest() -> None:
    """w moved by (3, 0, 0) and the change of (0, 4): together 5 long, and 1 is left of them. A batch statistic's is not
    protected either."""
    update = {"w": RECEIVED["w"] + torch.tensor([3.0, 0.0, 0.0]), "change/m": torch.tensor([0.0, 4.0])}
    released = clip_and_noise(update, RECEIVED, clip=1.0, noise_multiplier=1e-9)
    torch.testing.assert_close(released["w"] - RECEIVED["w"], torch.tensor([0.6, 0.0, 0.0]))
    torch.testing.assert_close(released["change/m"], torch.tensor([0.0, 0.8]))
    with pytest.raises(PrivacyError, match="batch norm"):
        clip_and_noise({"change/norm.running_var": torch.ones(1)}, RECEIVED, clip=1.0, noise_multiplier=1.0)


def test_the_noise_is_there_with_the_stated_deviation() -> None:
    """400,000 values: mean within 5 standard errors of 0, variance of (2 * 0.3)^2, the normal's fourth moment."""
    received = {"w": torch.zeros(200_000, dtype=torch.float64), "b": torch.zeros(400, 500, dtype=torch.float64)}
    released = clip_and_noise(received, received, clip=0.3, noise_multiplier=2.0)
    noise = torch.cat([released["w"], released["b"].reshape(-1)]) / 0.6
    n = len(noise)
    assert abs(noise.mean()) < 5 / math.sqrt(n)
    assert abs(noise.var() - 1) < 5 * math.sqrt(2 / n)
    assert abs(noise.pow(4).mean() - 3) < 5 * math.sqrt(96 / n)
    assert abs((noise[:-1] * noise[1:]).mean()) < 5 / math.sqrt(n)
    assert len(noise.unique()) == n


def test_the_noise_follows_no_seed_of_the_run() -> None:
    torch.manual_seed(0)
    first = gaussian(8)
    torch.manual_seed(0)
    assert not torch.equal(first, gaussian(8))
    assert gaussian(0).shape == (0,)


def test_every_draw_is_a_finite_quantile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 64 random bits the lower 52, b, give the quantile of (b + 1/2) / 2^52: never of 0 or 1, which are infinite."""
    for drawn, numerator in [(0, 0.5), (1, 1.5), (1 << 52, 0.5), (-1, 2**52 - 0.5), (2**51, 2**51 + 0.5)]:
        monkeypatch.setattr(
            privacy.os, "urandom", lambda count, drawn=drawn: drawn.to_bytes(8, "little", signed=True) * (count // 8)
        )
        expected = torch.special.ndtri(torch.tensor(numerator, dtype=torch.float64) / 2**52)
        assert gaussian(2).tolist() == [expected.item()] * 2
        assert math.isfinite(expected)


def test_the_quantiles_are_the_normals() -> None:
    from scipy.stats import kstest

    assert kstest(gaussian(100_000).numpy(), "norm").pvalue > 1e-6


def test_what_noise_cannot_protect_is_refused() -> None:
    for name, tensor, says in [
        ("w", torch.tensor([1, 2, 3]), "int64"),
        ("w", torch.zeros(3, dtype=torch.bfloat16), "bfloat16"),
        ("w", torch.zeros(2), "not received in this shape"),
        ("w", torch.zeros(1), "not received in this shape"),
        ("w", torch.zeros(3, dtype=torch.float64), "not received in this shape"),
        ("new", torch.zeros(3), "not received"),
        ("norm.running_var", torch.ones(3), "batch norm"),
        ("norm.num_batches_tracked", torch.tensor(1), "batch norm"),
        ("w", torch.tensor([0.0, math.nan, 0.0]), "NaN"),
        ("w", torch.tensor([0.0, math.inf, 0.0]), "NaN"),
    ]:
        received = {**RECEIVED, "norm.running_var": torch.ones(3), "norm.num_batches_tracked": torch.tensor(1)}
        with pytest.raises(PrivacyError, match=says):
            clip_and_noise({"b": torch.ones(1), name: tensor}, received, clip=1.0, noise_multiplier=1.0)


def test_a_forbidden_tensor_is_named_and_a_misspelt_name_is_an_error() -> None:
    update = {"text_head.weight": torch.ones(1), "image_head.weight": torch.ones(1)}
    refuse_named({"image_head.weight": torch.ones(1)}, update, ["text_head.*"])
    with pytest.raises(PrivacyError, match=r"text_head.weight go \(1 tensors match 'text_\*'\)"):
        refuse_named(update, update, ["text_*"])
    with pytest.raises(PrivacyError, match=r"'texthead\.\*' matches no tensor"):
        refuse_named(update, update, ["texthead.*"])
    with pytest.raises(PrivacyError, match="matches no tensor"):
        refuse_named(update, update, ["text_head"])  # exact, no prefix


def test_a_forbidden_tensor_is_forbidden_in_what_tells_of_it() -> None:
    """SCAFFOLD's mean gradient of a tensor."""
    with pytest.raises(PrivacyError, match=r"change/text_head.weight go \(1 tensors match 'text_\*'\)"):
        refuse_named({"change/text_head.weight": torch.ones(1), "image_head.weight": torch.ones(1)}, {}, ["text_*"])


def test_metrics_leave_by_name_and_as_numbers_alone() -> None:
    metrics = {"loss/contrastive": 1.5, "seconds": 2}
    assert allowed_metrics(metrics, ["loss/*", "seconds"], drop=False) == metrics
    assert allowed_metrics({**metrics, "Jane Doe": 1.0}, ["loss/*"], drop=True) == {"loss/contrastive": 1.5}
    with pytest.raises(PrivacyError) as caught:
        allowed_metrics({**metrics, "Jane Doe": 1.0}, ["loss/*", "seconds"], drop=False)
    assert "Doe" not in str(caught.value)
    for value in ("Jane Doe", True, math.nan, math.inf, [1.0], None):
        with pytest.raises(PrivacyError, match="no finite number"):
            allowed_metrics({"seconds": value}, ["seconds"], drop=True)
