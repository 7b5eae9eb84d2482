"""Every method with every objective, one round on tiny towers; and no method keeps anything but tensors."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from typing import Any

import pytest
import torch
from support.cases import cases
from support.toy import ADAMW, Pairs, World, aggregate, clone, differs, same_bytes, small, three_sites
from torch import Tensor, nn

import fedvlp.methods
import fedvlp.objectives
from fedvlp.core.client import Client
from fedvlp.core.method import Method
from fedvlp.core.server_state import Server
from fedvlp.core.types import EVALUATE, Broadcast
from fedvlp.federation.exchange import SequentialExchange, answer
from fedvlp.methods import METHODS
from fedvlp.methods.ensemble import PublicEnsemble
from fedvlp.methods.robust import RobustWeights
from fedvlp.models.dual_encoder import ModelConfig
from fedvlp.models.multimodal import MultimodalConfig
from fedvlp.run.config import from_config, to_config

MODEL = ModelConfig(embedding_dim=16, image_size=16, max_tokens=8, vocabulary=64, head_hidden=16, text_layers=1)
CLASSIFIER = MultimodalConfig(**{**vars(MODEL), "alignment": True}, labels=("a", "b", "c", "d", "e"))


def objectives() -> dict[str, Any]:
    """Every configuration of an objective that fedvlp.objectives holds, by class name."""
    found = {}
    for module in pkgutil.iter_modules(fedvlp.objectives.__path__, "fedvlp.objectives."):
        for name, kind in vars(importlib.import_module(module.name)).items():
            if dataclasses.is_dataclass(kind) and hasattr(kind, "build") and kind.__module__ == module.name:
                found[name] = kind
    return found


OBJECTIVES = objectives()
SIZED = {
    "CreamFLTaskConfig": {"dim": MODEL.embedding_dim}, "MGCAConfig": {"prototypes": 8, "freeze_steps": 0},
    "NTXentConfig": {"hidden": 16, "dim": 8, "predictor": True}, "BYOLConfig": {"hidden": 16, "dim": 8},
    "MAEConfig": {"width": 16, "blocks": 1, "heads": 2},
}  # fmt: skip
"""Settings of an objective that follow from the model, or let all of it learn in a step."""


class Studies(Pairs):
    """Random images [n, 1, 16, 16] and token ids [n, 8] with their mask."""

    def __init__(self, seed: int, count: int = 8) -> None:
        generator = torch.Generator().manual_seed(seed)
        image = torch.randn(count, 1, 16, 16, generator=generator)
        super().__init__(image, torch.randint(2, 64, (count, 8), generator=generator))

    def _batch(self, split: str, rows: Tensor) -> dict[str, Tensor]:
        batch = super()._batch(split, rows)
        return {**batch, "text_mask": torch.ones(len(rows), 8, dtype=torch.bool), "labels": torch.ones(len(rows), 5)}


def test_there_is_something_to_test() -> None:
    assert "ConVIRTConfig" in OBJECTIVES
    assert {"fedavg", "fedprox", "local", "centralized", "feddra"} <= METHODS.keys()


ALL_OBJECTIVES = ("feddra", "creamfl")
"""The methods that are tried with every objective at every commit: one averages weights in two phases, one does not."""


def quick(name: str, objective: str) -> bool:
    """Whether a pair is tried at every commit: each method meets one objective, each objective those two methods."""
    numbers = list(METHODS).index(name), list(OBJECTIVES).index(objective)
    return name in ALL_OBJECTIVES or numbers[0] % len(OBJECTIVES) == numbers[1]


GRID = [
    pytest.param(name, objective, marks=() if quick(name, objective) else pytest.mark.slow(seconds=1))
    for name in METHODS
    for objective in OBJECTIVES
]


@pytest.mark.parametrize(("name", "objective"), GRID)
def test_every_method_trains_every_objective_on_tiny_towers(name: str, objective: str) -> None:
    """One step of each phase: something learns, every number is finite, everything that is shared comes back."""
    method = dataclasses.replace(small(METHODS[name]), local_steps=1)
    settings = OBJECTIVES[objective](**SIZED.get(objective, {}))
    if objective == "BCEConfig" and isinstance(method, RobustWeights):
        pytest.skip("weighs sites by their contrastive loss, which a classifier's objective does not have")
    model, data = CLASSIFIER if objective == "BCEConfig" else MODEL, {"a": Studies(0)}

    def dual_encoder() -> nn.Module:
        built = model.build(0)
        built.attention = objective == "MGCAConfig"
        return built

    world = World(
        method, data, ADAMW, model=dual_encoder, objective=lambda: settings.build(dual_encoder(), 0), public=Studies(9)
    )
    server, site = world.server(), world.site("a")
    method.start(server)
    server.round = int(not any(method.steps(phase) for phase in method.phases(0)))  # FedCCA's first trains nothing
    for phase in method.phases(server.round):
        server.phase = phase
        method.prepare(server)
        message = method.broadcast(server, "a")
        before = clone(site.client.initial() if isinstance(method, PublicEnsemble) else message.state)
        update = site.handle(message)
        assert update.state.keys() == method.expects(server, "a").state.keys()
        trained = dict(site.client.state())
        assert differs(trained, before, [n for n in server.state if method.trains(n, phase) and "head" in n])
        own = [n for n in server.state if method.trains(n, phase) and n.startswith("objective.")]
        assert not own or differs(trained, before, own)
        aggregate(method, server, [update], phase)
    assert all(torch.isfinite(t).all() for t in server.state.values() if t.is_floating_point())


PLAIN = (bool, int, float, str, type(None))


def plain(value: Any) -> bool:
    return isinstance(value, PLAIN) or (isinstance(value, tuple) and all(map(plain, value)))


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_a_frozen_dataclass_of_plain_values(name: str) -> None:
    kind = METHODS[name]
    assert issubclass(kind, Method)
    assert kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    method = small(kind)
    assert all(plain(value) for value in vars(method).values())
    assert from_config(to_config(method)) == method
    assert kind() == kind()  # everything has a default


@pytest.mark.parametrize("name", cases(METHODS, seconds=1))
def test_what_a_method_remembers_is_declared_memory_of_tensors(name: str) -> None:
    """After a run no attribute was added to method, client, server or modules, and memories hold tensors alone."""
    method = small(METHODS[name])
    before = dict(vars(method))
    world = World(method, rounds=dataclasses.replace(World(method).rounds, rounds=3))
    made: list[Any] = []

    class Keeping:
        def __call__(self, name: str) -> Any:
            made.append(world.site(name))
            return made[-1]

    model, objective = world.modules()
    attributes = [set(vars(module)) for module in (*model.modules(), *objective.modules())]
    server = world.run(SequentialExchange(Keeping()))
    assert vars(method) == before
    assert set(vars(server)) == {f.name for f in dataclasses.fields(Server)}
    assert [set(vars(module)) for module in (*model.modules(), *objective.modules())] == attributes
    for memory in (server.memory, *(site.client.memory for site in made)):
        assert all(type(key) is str and type(value) is Tensor for key, value in memory.items())
    for site in made:
        assert set(vars(site.client)) == {f.name for f in dataclasses.fields(Client)}


def test_modules_of_methods_hold_no_state() -> None:
    """No module or tensor and no mutable container at module level, except the registry."""
    for info in pkgutil.iter_modules(fedvlp.methods.__path__, "fedvlp.methods."):
        for name, value in vars(importlib.import_module(info.name)).items():
            if not name.startswith("__"):
                assert not isinstance(value, (nn.Module, Tensor, dict, list, set)), f"{info.name}.{name}"


@pytest.mark.parametrize("name", cases(METHODS, seconds=1))
def test_a_new_site_object_for_every_task_gives_the_same_bytes(name: str, tmp_path: Any) -> None:
    """As in a simulator with fewer threads than sites: nothing may live in the process between two tasks."""
    method = small(METHODS[name])
    kept, renewed = World(method, folder=tmp_path / "kept"), World(method, folder=tmp_path / "renewed")

    def forgetful(messages: Any) -> Any:
        for site, message in messages.items():
            renewed._modules = None
            yield site, answer(renewed.site(site), message)

    expected, seen = kept.run(SequentialExchange(kept.site)), renewed.run(forgetful)
    same_bytes(seen.state, expected.state)
    same_bytes(seen.memory, expected.memory)


@pytest.mark.parametrize("name", cases(METHODS, seconds=1))
def test_evaluation_changes_nothing(name: str) -> None:
    method = small(METHODS[name])
    rounds = World(method).rounds
    evaluated = World(method, rounds=dataclasses.replace(rounds, evaluate_every=1), evaluate=lambda c, s: {"x": 1.0})
    same_bytes(evaluated.run().state, World(method, rounds=rounds).run().state)


@pytest.mark.parametrize("name", cases(METHODS, seconds=1))
def test_a_site_that_left_is_welcome_back(name: str) -> None:
    """b is away in round 1: the others go on, and b finds its way in round 2, in every phase."""
    method = small(METHODS[name])
    world = World(method, rounds=dataclasses.replace(World(method).rounds, rounds=3, max_missed=9))
    inner = SequentialExchange(world.site)

    def absent(messages: Any) -> Any:
        for site, reply in inner(messages):
            away = site == "b" and messages[site].round == 1
            yield site, (ConnectionError("away") if away else reply)

    history = world.run(absent).history
    assert {r["round"] for r in history if "b" in r["dropped"]} == {1}
    assert all(set(record["dropped"]) <= {"b"} for record in history)


@pytest.mark.parametrize("name", METHODS)
def test_phases_are_distinct_and_none_is_called_evaluate(name: str) -> None:
    method = METHODS[name]()
    for round in range(4):
        phases = method.phases(round)
        assert len(set(phases)) == len(phases) > 0
        assert EVALUATE not in phases


@pytest.mark.parametrize("name", METHODS)
def test_a_method_sends_what_a_site_needs_and_nothing_of_another_site(name: str) -> None:
    method = small(METHODS[name])
    server = World(method).server()
    method.start(server)
    server.phase = method.phases(0)[0]
    method.prepare(server)
    messages = [method.broadcast(server, site) for site in three_sites()]
    assert all(isinstance(message, Broadcast) for message in messages)
    for message in messages:
        assert message.state.keys() == (set() if isinstance(method, PublicEnsemble) else server.state.keys())
        assert all(isinstance(value, float) for value in message.scalars.values())
