"""What an objective draws: crops that are no mirror images, of its own generator alone, the same for the same seed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.films import BYOL, MAE, NT_XENT, Films, drawn, model, world
from support.toy import ADAMW, SGD, clone, differs
from torch import Tensor

from fedvlp.core.client import Client
from fedvlp.core.types import Batch, Broadcast
from fedvlp.methods import FedAvg
from fedvlp.objectives import ConVIRTConfig
from studies.rivals import NTXentConfig
from studies.rivals.views import jittered, random_crops

pytestmark = pytest.mark.slow(seconds=5)


def ramp(count: int, size: int = 32) -> Tensor:
    """[count, 2, size, size]: channel 0 rises from -1 to 1 with the column, channel 1 with the row."""
    line = torch.linspace(-1, 1, size).expand(size, size)
    return torch.stack([line, line.T]).expand(count, -1, -1, -1)


def test_a_crop_is_an_enlarged_rectangle_neither_flipped_nor_turned() -> None:
    crops = random_crops(ramp(200), 0.3, torch.Generator().manual_seed(0))
    x, y = crops.unbind(1)
    assert (x.diff(dim=2) > -1e-6).all(), "columns rise from left to right"
    assert (y.diff(dim=1) > -1e-6).all(), "rows from top to bottom"
    torch.testing.assert_close(x, x[:, :1].expand_as(x), rtol=0, atol=1e-5)
    width, height = (x[:, 0, -1] - x[:, 0, 0]) / 2, (y[:, -1, 0] - y[:, 0, 0]) / 2
    area = width * height
    assert 0.25 < area.min() < 0.4, "a pixel less than 0.3 at least"
    assert area.max() > 0.8
    ratio = width / height
    assert 0.70 < ratio.min() < 0.85
    assert 1.2 < ratio.max() < 1.42
    assert (x[:, 0, 0] > -0.99).any()
    assert (x[:, 0, -1] < 0.99).any()


def test_intensities_change_by_what_is_said() -> None:
    """Contrast is a factor of 0.6 to 1.4 about the film's mean, brightness adds -0.4 to 0.4."""
    films = ramp(300)[:, :1] * 0.2
    seen = jittered(films, 0.4, torch.Generator().manual_seed(0))
    factor = (seen[:, 0, 0, -1] - seen[:, 0, 0, 0]) / 0.4
    shift = seen.mean(dim=(1, 2, 3))
    for found, low, high in ((factor, 0.6, 1.4), (shift, -0.4, 0.4)):
        assert low - 1e-5 < found.min() < low + 0.05
        assert high - 0.05 < found.max() < high + 1e-5
    torch.testing.assert_close(jittered(films, 0.0, torch.Generator()), films)
    bright = jittered(torch.full((50, 1, 2, 2), 0.9), 0.4, torch.Generator().manual_seed(1))
    assert bright.max() == 1.0


@pytest.mark.parametrize("config", [NT_XENT, BYOL, MAE], ids=lambda config: type(config).__name__)
def test_what_is_drawn_depends_on_the_generator_alone(config: Any) -> None:
    objective, films = config.build(model(), 0), Films(0, 4).content["train"][0]
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = drawn(objective, films)
    assert torch.equal(torch.get_rng_state(), before), "the global stream is dropout's"
    torch.manual_seed(2)
    again, other = drawn(objective, films), drawn(objective, films, seed=1)
    assert first.keys() == again.keys() > {"image"}
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["views"], other["views"])
    assert torch.equal(first["image"], films), "the film itself is matched with its report"


def test_two_views_of_a_film_differ() -> None:
    views = drawn(NT_XENT.build(model(), 0), Films(0, 4).content["train"][0])["views"]
    assert views.shape == (4, 2, 1, 16, 16)
    assert (views[:, 0] - views[:, 1]).abs().amax(dim=(1, 2, 3)).min() > 0.1
    assert views.abs().max() <= 1


def test_nothing_is_drawn_without_a_film_or_a_weight() -> None:
    generator = torch.Generator().manual_seed(0)
    objective = NT_XENT.build(model(), 0)
    batch = {"text": torch.ones(2, 3, dtype=torch.int64)}
    assert objective.draw(batch, generator) is batch  # type: ignore[operator]
    weightless = NTXentConfig(weight=0.0).build(model(), 0)
    assert drawn(weightless, Films(0, 2).content["train"][0]).keys() == {"image"}


def test_the_loop_draws_from_seed_site_and_round() -> None:
    """The same task twice gives the same views; another round or site gives others. Films are as without views."""
    seen: list[Batch] = []

    class Spy(FedAvg):
        def losses(self, client: Client, batch: Batch, message: Broadcast) -> dict[str, Tensor]:
            seen.append(batch)
            return super().losses(client, batch, message)

    for objective in (NT_XENT, ConVIRTConfig()):
        one = world(Spy(local_steps=1), objective)
        for site, round in (("a", 0), ("a", 0), ("a", 1), ("b", 0)):
            one.site(site).handle(Broadcast(round, "train", one.server().state))
    views, plain = [batch["views"] for batch in seen[:4]], seen[4:]
    assert torch.equal(views[0], views[1])
    assert not torch.equal(views[0], views[2])
    assert not torch.equal(views[0], views[3])
    assert all("views" not in batch for batch in plain)
    assert all(torch.equal(with_views["image"], batch["image"]) for with_views, batch in zip(seen, plain, strict=False))


def test_half_a_batch_has_the_views_of_the_whole() -> None:
    """Plain micro-batches of two rows see the views that belong to their films."""
    seen: list[Batch] = []

    class Spy(FedAvg):
        def losses(self, client: Client, batch: Batch, message: Broadcast) -> dict[str, Tensor]:
            seen.append(batch)
            return super().losses(client, batch, message)

    for size in (0, 2):
        training = replace(ADAMW, micro_batch=size, accumulation="plain")
        one = world(Spy(local_steps=1), NT_XENT, training=training)
        one.site("a").handle(Broadcast(0, "train", one.server().state))
    whole, *halves = seen
    assert len(halves) == 2
    assert torch.equal(torch.cat([half["views"] for half in halves]), whole["views"])


@pytest.mark.parametrize("config", [NT_XENT, BYOL, MAE], ids=lambda config: type(config).__name__)
def test_cached_micro_batches_give_the_gradient_of_the_whole_batch(config: Any) -> None:
    """A step of SGD on a batch of four, its rows through the towers two at a time: the same weights, to rounding."""
    states = []
    for size in (0, 2):
        one = world(FedAvg(local_steps=1), config, training=replace(SGD, micro_batch=size))
        states.append(clone(one.site("a").handle(Broadcast(0, "train", one.server().state)).state))
    start = world(FedAvg(), config).server().state
    assert differs(states[0], start)
    torch.testing.assert_close(states[1], states[0], rtol=1e-4, atol=1e-6)
