"""Models that a dishonest server makes to single out records, on the real towers; and honest ones, which must pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from fedvlp.core.client import named_state
from fedvlp.core.crafted import check_crafted, signs_of, start_of
from fedvlp.core.types import Broadcast, State
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.methods import FedAvg
from fedvlp.models.dual_encoder import DualEncoder, ModelConfig
from fedvlp.run import presets
from fedvlp.run.assembly import Assembly
from fedvlp.run.experiment import Experiment
from fedvlp.training.local_training import train
from fedvlp.training.settings import Training

PRESETS = ("fedavg", "feddra", "fedbn", "car-mfl", "pms-fm", "creamfl")


@cache
def _built(preset: str) -> State:
    model: DualEncoder = presets.get(preset).model.build(0)
    return dict(model.state_dict())


def built(preset: str) -> State:
    return {name: tensor.clone() for name, tensor in _built(preset).items()}


def first_of(state: State, ending: str) -> str:
    return next(name for name in state if name.startswith("image_encoder.") and name.endswith(ending))


def binning(state: State) -> None:
    """Robbing the Fed: every row measures the mean brightness, against staggered thresholds; noise hides nothing."""
    weight = state[first_of(state, "expand.weight")]
    generator = torch.Generator().manual_seed(0)
    weight.copy_(torch.ones_like(weight) / weight.shape[1])
    weight.add_(torch.randn(weight.shape, generator=generator) * 0.2 / weight.shape[1])


def thresholds(state: State) -> None:
    """The thresholds alone: quantiles of a normal distribution, in order."""
    bias = state[first_of(state, "expand.bias")]
    bias.copy_(-torch.distributions.Normal(0.0, 1.0).icdf(torch.linspace(0.001, 0.999, len(bias))))


def pixels_through(state: State) -> None:
    """MedLeak: the convolutions hand the pixels on: one weight of each kernel is 1, the others are 0."""
    weight = state[first_of(state, "stem.0.weight")]
    flat = weight.zero_().flatten(1)
    flat[torch.arange(len(flat)), torch.arange(len(flat)) % flat.shape[1]] = 1.0


def identity(state: State) -> None:
    """An attention block that hands its tokens on, with a little noise so that nothing is exactly 0."""
    weight = state[first_of(state, "out.weight")]
    weight.copy_(torch.eye(len(weight)) + 0.001 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))


def dead_text_tower(state: State) -> None:
    """Only the image is of interest: the words give nothing."""
    state["text_encoder.words.weight"].zero_()


def dead_norm(state: State) -> None:
    state[first_of(state, "norm.weight")].zero_()


def exploding(state: State) -> None:
    """One batch of gradients is to outweigh all others."""
    state[first_of(state, "qkv.weight")].mul_(1e4)


def one_loud_word(state: State) -> None:
    """A row of the word embedding that drowns every other word: reports with this word are singled out."""
    state["text_encoder.words.weight"][77] = 100.0


def noisy_identity(state: State) -> None:
    """So much noise that the rest is not next to 0, and the diagonal alone tells."""
    identity(state)
    weight = state[first_of(state, "out.weight")]
    weight.add_(0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(4)))


CRAFTED = {
    binning: "measures one direction", thresholds: "staggered thresholds", pixels_through: "is 0 in",
    identity: "of its values next to 0", noisy_identity: "nearly the identity", dead_text_tower: "is 0 in 100%",
    dead_norm: "is 0 in 100%", exploding: "has a root mean square", one_loud_word: "next to 0",
}  # fmt: skip
"""What is said of each."""


@pytest.mark.parametrize(
    ("preset", "craft"),
    [*(("fedavg", craft) for craft in CRAFTED), *zip(PRESETS[1:], [*CRAFTED][:5], strict=True)],
)
def test_every_construction_is_refused_and_named(preset: str, craft: Callable[[State], None]) -> None:
    honest, start = built(preset), start_of(built(preset))
    assert check_crafted(honest, start) is None
    craft(honest)
    why = check_crafted(honest, start)
    assert why is not None
    assert "single out records" in why
    assert CRAFTED[craft] in why
    changed = [name for name, tensor in built(preset).items() if not torch.equal(tensor, honest[name])]
    assert why.split()[0] in changed


def test_what_the_start_has_too_is_no_sign() -> None:
    """A run that starts from an identity, as some adapters do, is not refused for it."""
    state = built("fedavg")
    identity(state)
    assert check_crafted(state, start_of(state)) is None


def test_adapters_that_began_at_zero_pass_after_their_first_steps() -> None:
    """Of the words' adapter only the rows of words that were read are no longer 0."""
    model = ModelConfig(init="tiny-pool", adapters="lora", adapter_layers="every", adapter_rank=8)
    data, training = SyntheticCohort(sites=1, size=40, image_size=64), Training(batch_size=8, warmup_steps=0)
    assembly = Assembly(Experiment("small", FedAvg(local_steps=2), model, data=data, training=training))
    client, start = assembly.client("site-1", assembly.data("site-1")), start_of(assembly.initial())
    client.load(assembly.initial())
    train(FedAvg(local_steps=2), client, Broadcast(0, "train", assembly.initial()), training, lambda: False)
    trained = client.state()
    assert float((trained["text_adapter.words.up"] == 0).float().mean()) > 0.5
    assert check_crafted(trained, start) is None
    craft = trained["text_adapter.words.up"]
    craft.copy_(1000 * torch.eye(*craft.shape))
    assert check_crafted(trained, start) is not None


def adapters(**changes: Any) -> tuple[State, float]:
    """The tensors that travel where every layer of frozen towers has an adapter, and alpha / r of these."""
    config = ModelConfig(init="tiny-pool", adapters="lora", adapter_layers="every", **changes)
    state = named_state(config.build(0), torch.nn.Module())
    return {name: tensor.clone() for name, tensor in state.items()}, config.adapter_alpha / config.adapter_rank


SETTINGS = [{"adapter_rank": 8}, {"adapter_rank": 32, "adapter_alpha": 128.0}]


@pytest.mark.parametrize("settings", SETTINGS)
def test_an_adapters_first_steps_in_one_direction_pass(settings: dict[str, Any]) -> None:
    """AdamW moves every weight by about its learning rate, in the signs of a gradient, which are nearly of rank 1.

    0.01 is seven times what fifty steps of the preset fedavg reach. The towers' own weights, to which that is added,
    lie in every direction.
    """
    state, _ = adapters(**settings)
    start = start_of(state)
    generator = torch.Generator().manual_seed(0)
    for name, tensor in state.items():
        if name.endswith(".up"):
            signs = [torch.randn(size, generator=generator).sign() for size in tensor.shape]
            tensor.copy_(0.01 * torch.outer(*signs))
            before = signs_of(name, tensor)
            assert before is not None
            assert before.one_direction > 0.99
    assert check_crafted(state, start) is None


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("layer", ["image_adapter.blocks/0/expand", "image_adapter.stem/0"])
@pytest.mark.parametrize("large", [1.0, 3.0], ids=["up", "down"])
def test_an_adapter_that_drowns_its_tower_in_one_direction_is_refused(
    settings: dict[str, Any], layer: str, large: float
) -> None:
    """Robbing the Fed on a frozen layer: in every row the adapter adds the same, four times as large as the tower's.

    It does not matter in which half of the adapter the size is.
    """
    state, scale = adapters(**settings)
    start = start_of(state)
    up, down = state[f"{layer}.up"], state[f"{layer}.down"]
    tower = ModelConfig(init="tiny-pool", adapters="lora", adapter_rank=0).build(0).state_dict()
    own = tower[layer.replace("adapter", "encoder").replace("/", ".") + ".weight"].flatten(1)
    down[0] *= large
    up[:, 0] = 4 * own.norm() / (scale * down[0].norm() * len(up) ** 0.5)
    whole = own + scale * up @ down
    assert signs_of("weight", whole).one_direction > 0.9  # type: ignore[union-attr]
    why = check_crafted(state, start)
    assert why is not None
    assert why.startswith(f"{layer}.up measures one direction in all of its rows")


def test_another_start_with_other_random_weights_passes() -> None:
    """A continued run holds weights that this site never built."""
    config = replace(presets.get("fedavg").model, init="")
    start, other = (start_of(config.build(seed).state_dict()) for seed in (0, 1))
    assert start.keys() == other.keys()
    assert check_crafted(config.build(1).state_dict(), start) is None


def test_what_a_preset_trains_beside_its_model_passes_at_the_start() -> None:
    assembly = Assembly(presets.get("creamfl"))
    start = start_of(assembly.initial())
    assert any(name.startswith("objective.") for name in assembly.initial())
    assert check_crafted(assembly.initial(), start) is None


def test_honest_steps_at_a_hundred_times_the_learning_rate_pass() -> None:
    """The limits are far from what training reaches: AdamW moves no weight by more than about the learning rate."""
    state, start = built("fedavg"), start_of(built("fedavg"))
    generator = torch.Generator().manual_seed(2)
    for tensor in state.values():
        if tensor.is_floating_point():
            tensor.add_(0.05 * torch.randn(tensor.shape, generator=generator))
    assert check_crafted(state, start) is None


def test_small_tensors_and_statistics_are_not_looked_at() -> None:
    assert signs_of("head.running_mean", torch.zeros(64)) is None
    assert signs_of("temperature", torch.ones(1)) is None
    assert signs_of("steps", torch.zeros(64, dtype=torch.int64)) is None
    few = signs_of("classifier.weight", torch.ones(5, 64))
    assert few is not None
    assert few.one_direction == 0.0


@pytest.mark.parametrize("craft", [None, exploding, one_loud_word, identity])
def test_noise_on_every_weight_is_no_sign(craft: Callable[[State], None] | None) -> None:
    """A privacy policy may add noise far above the weights to all; what a crafted layer says may then drown in it."""
    state, start = built("fedavg"), start_of(built("fedavg"))
    generator = torch.Generator().manual_seed(3)
    for tensor in state.values():
        if tensor.is_floating_point():
            tensor.add_(8.0 * torch.randn(tensor.shape, generator=generator))
    if craft is not None:
        craft(state)
    assert (check_crafted(state, start) is None) == (craft in (None, one_loud_word))
