"""The options of the loop: what each changes, and that it changes nothing else."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.towers import client, encoder
from support.toy import SGD, Toy, clone, differs, pairs, same_bytes
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fedvlp.core.client import Client
from fedvlp.core.method import Method
from fedvlp.core.types import Batch, Broadcast
from fedvlp.objectives.convirt import ConVIRT
from fedvlp.training import autotune
from fedvlp.training.local_training import train
from fedvlp.training.settings import DeviceError, Training

STEP = replace(SGD, batch_size=10, lr=0.002)


def go(one: Client, training: Training, steps: int = 1, **scalars: float) -> dict[str, float]:
    return train(Method(local_steps=steps), one, Broadcast(0, "train", {}, **scalars), training, lambda: False)


def after(training: Training, steps: int = 1, **model: Any) -> dict[str, Tensor]:
    """The state after ``steps`` on the small dual encoder."""
    one = client(encoder(**model))
    go(one, training, steps)
    return clone(one.state())


def furthest(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    return max(float((left[n].double() - right[n].double()).abs().max()) for n in left)


def moved(training: Training, **scalars: float) -> Tensor:
    """The first step of a toy as one vector: -lr times the gradient."""
    one = Client("a", 0, Toy(), ConVIRT(), pairs(1))
    before = clone(one.state())
    go(one, training, **scalars)
    return torch.cat([(tensor - before[name]).reshape(-1) for name, tensor in one.state().items()])


def test_clipping_by_hand() -> None:
    """With SGD at rate 0.1 the step is -0.1 g; clipped to norm c it is -0.1 g min(1, c/|g|)."""
    step = moved(SGD)
    norm = step.norm().item() / SGD.lr
    assert torch.equal(moved(replace(SGD, clip_norm=2 * norm)), step)
    clipped = moved(replace(SGD, clip_norm=norm / 4))
    assert clipped.norm().item() == pytest.approx(SGD.lr * norm / 4, rel=1e-5)
    assert torch.allclose(clipped, step / 4, rtol=1e-4, atol=1e-8)


def test_plain_accumulation_is_the_mean_of_the_parts_own_losses() -> None:
    """Batches of 4 in parts of 2: by hand, one backward pass per part at half weight. Not the loss of the batch."""
    one = Client("a", 0, Toy(), ConVIRT(), pairs(1))
    (batch,) = pairs(1).train_batches(1, 4, batches_generator())
    metrics = go(one, replace(SGD, micro_batch=2, accumulation="plain"))
    hand = Toy()
    losses = []
    for start in (0, 2):
        piece = {name: t[start : start + 2] for name, t in batch.items()}
        losses.append(ConVIRT()(hand(piece), piece)["contrastive"])
    (sum(losses) / 2).backward()
    assert metrics["contrastive"] == pytest.approx(sum(losses).item() / 2)
    for name, parameter in hand.named_parameters():
        assert torch.allclose(one.state()[name], parameter - SGD.lr * parameter.grad, atol=1e-7), name
    assert moved(SGD).sub(moved(replace(SGD, micro_batch=2, accumulation="plain"))).abs().max() > 1e-3


def batches_generator() -> torch.Generator:
    """That of site a in round 0 of a run with seed 0."""
    from fedvlp.core.seeds import seed

    return torch.Generator().manual_seed(seed(0, "a", 0, 0, "batches"))


def test_unequal_parts_weigh_by_their_rows() -> None:
    """5 rows in parts of 2 and 3: a loss that is a mean over rows comes out as the mean over all five."""

    class Rows(torch.nn.Module):
        def forward(self, output: Any, batch: Batch) -> dict[str, Tensor]:
            return {"rows": (output.image - output.text).square().sum(dim=1).mean()}

    results = []
    for training in (replace(SGD, batch_size=5), replace(SGD, batch_size=5, micro_batch=2, accumulation="plain")):
        one = Client("a", 0, Toy(), Rows(), pairs(1))
        results.append((go(one, training)["rows"], clone(one.state())))
    assert results[1][0] == pytest.approx(results[0][0], rel=1e-6)
    assert furthest(results[0][1], results[1][1]) < 1e-6


def test_cached_accumulation_trains_as_the_whole_batch_does() -> None:
    assert furthest(after(replace(STEP, micro_batch=4), steps=3), after(STEP, steps=3)) < 1e-5
    assert furthest(after(replace(STEP, micro_batch=4, accumulation="plain"), steps=3), after(STEP, steps=3)) > 1e-4


def test_a_micro_batch_as_large_as_the_batch_changes_no_bit() -> None:
    same_bytes(after(replace(STEP, micro_batch=10, accumulation="plain")), after(STEP))


@pytest.mark.parametrize(("precision", "low"), [("bfloat16", torch.bfloat16), ("float16", torch.float16)])
def test_autocast_lowers_the_towers_and_neither_weights_nor_loss(precision: str, low: torch.dtype) -> None:
    one = client()
    seen: dict[str, torch.dtype] = {}
    one.model.image_encoder.blocks[0].qkv.register_forward_hook(lambda m, i, out: seen.update(tower=out.dtype))
    one.objective.register_forward_hook(lambda m, i, out: seen.update(loss=out["contrastive"].dtype))
    before = clone(one.state())
    loss = go(one, replace(STEP, precision=precision))["contrastive"]
    assert seen == {"tower": low, "loss": torch.float32}
    assert {t.dtype for t in one.state().values() if t.is_floating_point()} == {torch.float32}
    assert differs(before, one.state())
    full = go(client(), STEP)["contrastive"]
    assert loss == pytest.approx(full, rel=0.05)
    assert loss != full


def test_float16_scales_the_loss_so_that_small_gradients_survive() -> None:
    """A loss of a millionth has gradients below float16's least number (6e-8); unscaled, SGD would hardly move."""
    tiny, scale = {}, 1e-6
    for precision in ("float32", "float16"):
        one = client()
        before = clone(one.state())
        go(one, replace(STEP, precision=precision, lr=0.002 / scale), loss_scale=scale)
        name = "image_encoder.blocks.0.qkv.weight"
        tiny[precision] = one.state()[name] - before[name]
    cosine = torch.nn.functional.cosine_similarity(tiny["float16"].flatten(), tiny["float32"].flatten(), dim=0)
    assert cosine > 0.97


def test_clipping_under_float16_sees_the_gradient_not_the_scaled_one() -> None:
    clipped = []
    for precision in ("float32", "float16"):
        one = client()
        before = clone(one.state())
        # the first scale is 65,536: larger gradients than these would overflow, and the step be left out
        go(one, replace(STEP, precision=precision, clip_norm=1e-5, lr=1e3), loss_scale=1e-3)
        names = [name for name, _ in one.parameters()]
        clipped.append(torch.stack([(one.state()[n] - before[n]).norm() for n in names]).norm().item())
    assert clipped == pytest.approx([0.01, 0.01], rel=1e-3)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_explicit_attention_is_attention(dropout: float) -> None:
    """Same function as the fused one, padding masked; in training each drops a share of its weights."""
    one, other = encoder(dropout), encoder(dropout)
    other.set_attention("explicit")
    batch = next(client().data.train_batches(1, 10, torch.Generator()))
    left, right = one.eval()(batch), other.eval()(batch)
    assert torch.allclose(left.image, right.image, atol=1e-5)
    assert torch.allclose(left.text, right.text, atol=1e-5)
    assert torch.equal(other.train()(batch).image, other(batch).image) == (dropout == 0)


def test_attention_is_set_for_the_training_and_its_anchors() -> None:
    one = client()
    go(one, replace(STEP, attention="explicit"))
    anchor = one.anchor(clone(one.state()))
    for model in (one.model, anchor):
        assert not any(module.fused_attn for module in model.modules() if hasattr(module, "fused_attn"))
    go(one, STEP)
    assert one.model.image_alignment.fused_attn


def test_without_a_compiler_compile_says_so_and_trains(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(torch, "compile", broken)
    with caplog.at_level(logging.WARNING):
        trained = after(replace(STEP, compile=True))
    assert "no working compiler here (RuntimeError)" in caplog.text
    same_bytes(trained, after(STEP))


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str], float]:
    """The probe finds bfloat16 with explicit attention fastest, and of float32 the fused one."""
    found = dict(zip(autotune.VARIANTS, (2.0, 3.0, 1.5, 1.0), strict=True))
    monkeypatch.setattr(autotune, "measured", lambda device, threads: found)
    return found


@pytest.mark.parametrize(
    ("asked", "chosen"),
    [
        (("float32", "sdpa"), ("float32", "sdpa")),
        (("auto", "auto"), ("bfloat16", "explicit")),
        (("float32", "auto"), ("float32", "sdpa")),
        (("auto", "sdpa"), ("bfloat16", "sdpa")),
        (("float16", "auto"), ("float16", "sdpa")),
    ],
)
def test_auto_takes_what_is_fastest_and_nothing_else(
    timed: dict[tuple[str, str], float], asked: tuple[str, str], chosen: tuple[str, str]
) -> None:
    assert autotune.choose(*asked, torch.device("cpu")) == chosen


@pytest.mark.slow(seconds=20)
def test_the_probe_says_how_every_variant_did_and_leaves_the_generator_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    state = torch.get_rng_state()
    found = autotune.measured.__wrapped__(torch.device("cpu"), 1)
    said = capsys.readouterr().out
    assert all(f"{precision} {attention} " in said for precision, attention in autotune.VARIANTS)
    assert list(found) == autotune.VARIANTS
    assert all(0 < seconds < 60 for seconds in found.values())
    assert torch.equal(torch.get_rng_state(), state)


def test_the_probe_of_a_gpu_times_arithmetic_and_not_launches() -> None:
    """On an H100 (67 TFLOP/s in float32) its block must take far longer than the hundred launches of 10 us.

    With the CPU's block it took less, and float32, which launches fewer kernels, looked the fastest.
    """
    records, width, heads = autotune.SIZES["cuda"]
    with FlopCounterMode(display=False) as counter:
        tokens = torch.empty(records, autotune.TOKENS, width, device="meta")
        shapes = ((3 * width, width), (width, width), (4 * width, width), (width, 4 * width))
        weights = [torch.empty(shape, device="meta", requires_grad=True) for shape in shapes]
        autotune._block(tokens, weights, heads, "explicit").sum().backward()
    assert counter.get_total_flops() / 67e12 > 10 * 100 * 10e-6


def test_what_is_chosen_is_logged(timed: dict[tuple[str, str], float], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        go(client(), replace(STEP, precision="auto", attention="auto"))
    assert "a: bfloat16, explicit attention, on cpu" in caplog.text


def test_wrong_options_fail_when_they_are_built() -> None:
    for wrong, said in [
        ({"precision": "float64"}, "precision is 'float64'"), ({"attention": "flash"}, "attention is 'flash'"),
        ({"accumulation": "exact"}, "cached or plain"), ({"device": "gpu"}, "device is 'gpu'"),
        ({"clip_norm": -1.0}, "clip_norm"), ({"micro_batch": -1}, "micro_batch"),
        ({"checkpoint_steps": -1}, "checkpoint_steps"), ({"clip_norm": float("nan")}, "clip_norm"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=said):
            Training(**wrong)


def test_auto_is_the_cpu_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert Training(device="auto").torch_device() == torch.device("cpu")
    with pytest.raises(DeviceError, match="finds no GPU on this machine; set it to auto or cpu"):
        Training(device="cuda").torch_device()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert Training(device="auto").torch_device() == torch.device("cuda", 3)
    assert Training().torch_device() == torch.device("cpu")
