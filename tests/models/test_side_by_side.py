"""Towers in two threads: the same outputs, gradients and trained weights as one after the other, bit for bit."""

from __future__ import annotations

import copy
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.cases import cases
from support.toy import same_bytes

from fedvlp.core.types import VLOutput
from fedvlp.models import side_by_side
from fedvlp.models.dual_encoder import ModelConfig
from fedvlp.models.side_by_side import apart, both, junction, may_gain
from fedvlp.run import presets
from fedvlp.run.assembly import Assembly
from fedvlp.run.config import override

BATCH = {
    "image": torch.randn(4, 1, 64, 64, generator=torch.Generator().manual_seed(0)),
    "text": torch.randint(0, 4096, (4, 12), generator=torch.Generator().manual_seed(1)),
    "text_mask": torch.arange(12) < torch.tensor([[12], [5], [8], [1]]),
    "labels": torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0]]),
}


def model(two: bool, **settings: Any) -> Any:
    made = ModelConfig(**settings).build(0)
    made.side_by_side = two
    return made.train()


def loss(output: VLOutput) -> torch.Tensor:
    """Something of every output: each token counts, and both towers meet."""
    assert output.image is not None
    total = (output.image @ output.text.T).logsumexp(0).sum()
    return total + output.image_tokens.square().mean() + (output.text_tokens.sin() * 3).mean()


def trained(made: Any) -> dict[str, torch.Tensor]:
    loss(made(BATCH)).backward()
    return {name: parameter.grad for name, parameter in made.named_parameters() if parameter.grad is not None}


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the threads in which towers and backward passes ran."""
    seen: list[str] = []
    carried = side_by_side._carry_on

    def carry_on(*args: Any) -> None:
        seen.append(threading.current_thread().name)
        carried(*args)

    monkeypatch.setattr(side_by_side, "_carry_on", carry_on)
    return seen


@pytest.mark.parametrize(
    "settings", [{}, {"alignment": False}, {"text_pooling": "mean", "head_norm": "batch"}], ids=str
)
def test_outputs_and_gradients_are_the_same_bits(settings: dict[str, Any], threads: list[str]) -> None:
    one, two = model(False, **settings), model(True, **settings)
    with torch.no_grad():
        expected, seen = one(BATCH), two(BATCH)
    for name in ("image", "text", "image_tokens", "text_tokens"):
        assert torch.equal(getattr(expected, name), getattr(seen, name)), name
    same_bytes(trained(two), trained(one))
    assert sorted(name.partition("_")[0] for name in threads) == ["MainThread", "tower"]


def test_two_forward_passes_before_one_backward_add_up_as_ever() -> None:
    """As a method does that looks at a batch twice."""
    gradients = []
    for two in (False, True):
        made = model(two)
        (loss(made(BATCH)) + loss(made({**BATCH, "image": BATCH["image"] * 0.5}))).backward()
        gradients.append({name: parameter.grad for name, parameter in made.named_parameters()})
    same_bytes(*gradients)


@pytest.mark.parametrize("used", [(0, 1), (0,), (1,)], ids=str)
def test_two_projections_of_one_encoding_add_up_as_ever(used: tuple[int, ...], threads: list[str]) -> None:
    """As FedRGB's: by the model itself and by a copy that is frozen, either of which the loss may leave out."""
    gradients = []
    for two in (False, True):
        made = model(two)
        frozen = copy.deepcopy(made).requires_grad_(False)
        encoded = made.encode(BATCH)
        outputs = [made.project(encoded), frozen.project(encoded)]
        torch.stack([(number + 1) * loss(outputs[number]) for number in used]).sum().backward()
        gradients.append({n: p.grad for n, p in made.named_parameters() if p.grad is not None})
    same_bytes(*gradients)
    assert len(threads) == 2, "the towers were walked through once"


def test_one_tower_alone_needs_no_second_thread(threads: list[str]) -> None:
    made = model(True)
    images = made({"image": BATCH["image"]})
    images.image.sum().backward()
    for part in (made.image_encoder, made.image_alignment, made.image_head):
        part.requires_grad_(False)
    made(BATCH).text.sum().backward()
    assert threads == ["MainThread", "MainThread"]


def test_films_that_are_learned_get_their_gradient() -> None:
    gradients = []
    for two in (False, True):
        films = torch.nn.Parameter(BATCH["image"].clone())
        (loss(model(two)({**BATCH, "image": films * 2})) + films.sum()).backward()
        gradients.append({"films": films.grad})
    same_bytes(*gradients)


def test_out_of_training_autograd_sees_every_layer() -> None:
    """As those ask it who compare the gradients of records with a change."""
    made = model(True).eval()
    layers = [module for module in made.modules() if isinstance(module, torch.nn.Linear)]
    seen: list[torch.Tensor] = []
    for layer in layers:
        layer.register_forward_hook(lambda module, inputs, output: seen.append(output))
    found = torch.autograd.grad(loss(made(BATCH)), seen, allow_unused=True)
    assert len(found) >= len(layers) > 10
    assert all(gradient is not None for gradient in found)


def test_what_has_no_gradient_is_left_as_it_is() -> None:
    made = model(True).requires_grad_(False)
    output = made(BATCH)
    assert apart(output, junction()) is output


@pytest.mark.parametrize(
    ("name", "second"), cases([("fedrgb", "aligner"), ("feddra", "align"), ("fedfed", "distil")], often=("fedrgb",))
)
def test_a_phase_ends_with_the_same_bytes(name: str, second: str, threads: list[str]) -> None:
    """All phases of a method at one site: the anchor, the probe and the optimiser included.

    FedRGB projects an encoding twice; FedFed's films come from a network that learns with the towers.
    """
    experiment = presets.get(name)
    settings = {
        "data.size": 80, "data.sites": 2, f"method.{second}_steps": 2, "method.local_steps": 2,
        "training.batch_size": 8, "training.threads": 1,
        **({"method.dro_batch": 8} if experiment.method.probe_records() else {}),
    }  # fmt: skip
    for key, value in settings.items():
        experiment = override(experiment, key, str(value))
    updates = []
    for two in (False, True):
        assembly = Assembly(experiment)
        assembly.side_by_side = two
        site, server = assembly.site("site-1"), assembly.server(assembly.sites())
        experiment.method.start(server)
        for phase in experiment.method.phases(0):
            server.phase = phase
            updates.append(site.handle(replace(experiment.method.broadcast(server, "site-1"), evaluate=1)))
    half = len(updates) // 2
    for expected, seen in zip(updates[:half], updates[half:], strict=True):
        same_bytes(seen.state, expected.state)
        assert seen.scalars == expected.scalars
        assert seen.metrics.get("loss/contrastive") == expected.metrics.get("loss/contrastive")
    cores = len(side_by_side.os.sched_getaffinity(0))
    assert bool(threads) == (cores >= 2), "where a core is idle it was used"


def test_an_error_in_either_tower_is_the_callers_and_leaves_nothing_running() -> None:
    done = threading.Event()

    def slow() -> None:
        done.wait(5)
        raise ValueError("the second")

    def fails() -> None:
        done.set()
        raise KeyError("the first")

    with pytest.raises(KeyError, match="the first"):
        both(fails, slow)
    with pytest.raises(ValueError, match="the second"):
        both(lambda: None, slow)
    assert both(lambda: 1, torch.is_grad_enabled) == (1, True)
    with torch.no_grad():
        assert both(lambda: 1, torch.is_grad_enabled) == (1, False)


@pytest.mark.parametrize(("cores", "threads", "text", "gains"), [
    (2, 1, "tiny", True), (1, 1, "tiny", False), (2, 2, "tiny", False), (4, 2, "tiny", True), (2, 1, "gru", False),
])  # fmt: skip
def test_it_may_gain_where_a_core_is_idle_and_no_random_number_is_drawn(
    monkeypatch: pytest.MonkeyPatch, cores: int, threads: int, text: str, gains: bool
) -> None:
    monkeypatch.setattr(side_by_side.os, "sched_getaffinity", lambda _: set(range(cores)))
    assert may_gain(ModelConfig(text_tower=text).build(0), threads) == gains
    assert not may_gain(ModelConfig(text_tower=text, gradient_checkpointing=True).build(0), threads)
