"""What the tests of mFedAvg and CAR-MFL share: labelled toy sites of which some lack images or reports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from fedvlp.core.method import Method
from fedvlp.core.server_state import Server
from fedvlp.core.types import MODALITIES, Batch, State, Update
from fedvlp.objectives.bce import BCE
from support.toy import ADAMW, IMAGE, TEXT, Pairs, Toy, World, aggregate, clone

LABELS = 3


def labelled(seed: int, count: int, modalities: tuple[str, ...] = MODALITIES, **options: Any) -> Pairs:
    """Random pairs with random findings; a site of one modality serves that one alone."""
    generator = torch.Generator().manual_seed(seed)
    image, text = torch.randn(count, IMAGE, generator=generator), torch.randn(count, TEXT, generator=generator)
    data = Pairs(image, text, **options)
    data.labels = torch.randint(0, 2, (count, LABELS), generator=generator).float()
    data.modalities = modalities
    return data


class OfTraining(Pairs):
    """A site whose held-out records have both modalities, and its training records images alone."""

    def modalities_in(self, split: str) -> tuple[str, ...]:
        return ("image",) if split == "train" else self.modalities

    def _batch(self, split: str, rows: torch.Tensor) -> Batch:
        return {name: t for name, t in super()._batch(split, rows).items() if split != "train" or name != "text"}


def of_training(seed: int, count: int) -> OfTraining:
    """As ``labelled``, of such a site."""
    pairs, data = labelled(seed, count), OfTraining(*labelled(seed, count).content["train"])
    data.labels = pairs.labels
    return data


def mixed(tick: Callable[[], None] = lambda: None) -> dict[str, Pairs]:
    """a is paired, b has images only, c reports only."""
    sites = {"a": MODALITIES, "b": ("image",), "c": ("text",)}
    return {name: labelled(i, 8 + 4 * i, held, tick=tick) for i, (name, held) in enumerate(sites.items())}


def paired(*counts: int) -> dict[str, Pairs]:
    return {name: labelled(i, count) for i, (name, count) in enumerate(zip("abc", counts, strict=False))}


def world(method: Method, data: dict[str, Pairs] | None = None, **options: Any) -> World:
    options.setdefault("training", ADAMW)
    public = options.pop("public", None) or labelled(99, 10)
    data = mixed() if data is None else data
    return World(method, data, model=partial(Toy, labels=LABELS), objective=BCE, public=public, **options)


def updates(server: Server, sites: dict[str, tuple[float, int]], method: Method) -> Iterator[Update]:
    """One update a site, every tensor it sends filled with its (value, number of samples)."""
    for name, (value, count) in sites.items():
        reference = method.expects(server, name).state
        state = {n: torch.full_like(t, value) for n, t in reference.items()}
        yield Update(name, server.round, server.phase, count, state)


def aggregated(method: Method, data: dict[str, Pairs], sites: dict[str, tuple[float, int]]) -> tuple[State, State]:
    """The global model after one aggregation of constant updates, and the virtual client's own."""
    server = world(method, data).server()
    method.start(server)
    server.phase = "train"
    assert server.trainer is not None
    start = clone(server.state)
    own = clone(server.trainer.trained(method, server, "public"))
    aggregate(method, server, updates(server, sites, method), "train")
    assert all(not torch.equal(own[n], start[n]) for n in own if "head" in n), "the virtual client trained"
    return server.state, own
