"""Every method with every objective, one round on tiny towers; and no method keeps anything but tensors."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from math import inf, nan
from typing import Any

import pytest
import torch
from support.cases import KINDS, cases
from support.laboratory import METHODS
from support.toy import ADAMW, Pairs, World, aggregate, clone, differs, same_bytes, small, three_sites
from torch import Tensor, nn

import fedvlp.methods
import fedvlp.objectives
from fedvlp.core.client import Client
from fedvlp.core.method import Method
from fedvlp.core.server_state import Server
from fedvlp.core.types import EVALUATE, Broadcast
from fedvlp.federation.exchange import SequentialExchange
from fedvlp.methods.ensemble import PublicEnsemble
from fedvlp.methods.robust import RobustWeights
from fedvlp.models.dual_encoder import ModelConfig
from fedvlp.models.multimodal import MultimodalConfig
from fedvlp.run.config import from_config, to_config
from studies import rivals

MODEL = ModelConfig(embedding_dim=16, image_size=16, max_tokens=8, vocabulary=64, head_hidden=16, text_layers=1)
CLASSIFIER = MultimodalConfig(**{**vars(MODEL), "alignment": True}, labels=("a", "b", "c", "d", "e"))


def objectives() -> dict[str, Any]:
    """Every configuration of an objective that fedvlp.objectives and a clone's rivals hold, by class name."""
    found = {}
    for module in pkgutil.iter_modules(fedvlp.objectives.__path__, "fedvlp.objectives."):
        for name, kind in vars(importlib.import_module(module.name)).items():
            if dataclasses.is_dataclass(kind) and hasattr(kind, "build") and kind.__module__ == module.name:
                found[name] = kind
    return found | {kind.__name__: kind for kind in rivals.OBJECTIVES.values()}


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


ALL_OBJECTIVES = ("feddra", "creamfl")
"""The methods that are tried with every objective: one averages weights in two phases, one does not."""


RIVALS = {*rivals.METHODS, *(kind.__name__ for kind in rivals.OBJECTIVES.values())}

GRID = [
    pytest.param(name, objective, marks=[pytest.mark.slow(seconds=1)] if {name, objective} & RIVALS else [])
    for number, name in enumerate(METHODS)
    for place, objective in enumerate(OBJECTIVES)
    if name in ALL_OBJECTIVES or number % len(OBJECTIVES) == place
    # sites are weighed by their contrastive loss, which a classifier's objective does not have
    if not (objective == "BCEConfig" and issubclass(METHODS[name], RobustWeights))
]


@pytest.mark.parametrize(("name", "objective"), GRID)
def test_every_method_trains_an_objective_and_every_objective_two_methods(name: str, objective: str) -> None:
    """One step of each phase: something learns, every number is finite, everything that is shared comes back."""
    method = dataclasses.replace(small(METHODS[name]), local_steps=1)
    settings = OBJECTIVES[objective](**SIZED.get(objective, {}))
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
    server.round = int(not any(method.steps(phase) for phase in method.phases(0)))  # OneRoundCCA's first trains nothing
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


def test_a_method_is_a_frozen_dataclass_of_plain_values() -> None:
    for name in METHODS:
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


REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "fedprox": [({"mu": -1}, "mu is -1")],
    "fedmoon": [({"mu": -1.0}, "mu is"), ({"temperature": 0.0}, "temperature is 0"), ({"temperature": inf}, "is inf")],
    "one-round-cca": [
        ({name: 0}, f"{name} is 0; it must be above 0") for name in ("image_ridge", "text_ridge", "tower")
    ],
    "fedfed": [({"noise": -1.0}, "noise"), ({"shared": 0}, "shared"), ({"distil_phases": -1}, "distil_phases")],
    "fedu": [({"threshold": -0.1}, r"threshold is -0\.1")],
    "fedema": [({"tau": 1.5}, r"tau is 1\.5"), ({"scale": -1.0}, r"scale is -1\.0")],
    "fedx": [
        ({"contrast_weight": -1.0}, "contrast_weight"), ({"relation_weight": -1.0}, "relation_weight"),
        ({"temperature": 0.0}, "temperature"), ({"teacher_temperature": 0.0}, "teacher_temperature"),
    ],
    "scaffold": [({"weighting": "samples"}, "weighting is 'samples'; SCAFFOLD's control variates are plain means")],
    "mfedavg": [({"public": False, "private": False}, "neither public nor private"), ({"local_steps": -1}, "local_st")],
    "car-mfl": [
        ({"k": 0}, "k"), ({"alpha": 1.5}, "alpha"), ({"alpha": -0.1}, "alpha"), ({"local_steps": -1}, "local_steps"),
        ({"renorm": "none"}, "renorm"), ({"public": False}, "public"), ({"private": False}, "private"),
    ],
    "feddra": [
        ({"align_steps": -1}, "align_steps"), ({"mu": -1.0}, "mu is -1"), ({"align_every": 0}, "align_every"),
        ({"align_steps": 0, "local_steps": 0}, "nothing would train"), ({"constraint_reduction": "sum"}, "sum_dim"),
        ({"local_steps": 0, "align_every": 2}, "align_every must be 1"), ({"rho": -1.0}, "rho"), ({"rho": nan}, "rho"),
        ({"gamma": -1.0}, "gamma"), ({"gamma": inf}, "gamma"), ({"divergence": "chi"}, "divergence"),
        ({"projection": "l2"}, "projection"), ({"dro_apply": "weights"}, "dro_apply"), ({"dro_batch": 1}, "dro_batch"),
        ({"dro_fraction": 0.0}, "dro_fraction"), ({"dro_fraction": 1.1}, "dro_fraction"), ({"loss_cap": 0.0}, "loss_c"),
        ({"loss_cap": nan}, "loss_cap"), ({"dro_records": -1}, "dro_records"), ({"weighting": "none"}, "weighting"),
    ],
    "fedrgb": [
        ({"alpha": -1.0}, "alpha"), ({"beta": -1.0}, "beta"), ({"loss_form": "eq3"}, "eq2"), ({"gamma": -1.0}, "gamma"),
        ({"aligner_steps": 0}, "avg_aligner"), ({"local_steps": 0}, "local_steps"),
    ],
    "pms-fm": [
        ({"softpull": 0.0}, "softpull"), ({"softpull": 1.1}, "softpull"), ({"threshold": -1.0}, "threshold"),
        ({"selector_lr": -1.0}, "selector_lr"), ({"local_steps": -1}, "local_steps"),
    ],
    "fedsm": [({"softpull": 0.0}, "softpull"), ({"selector_lr": -1.0}, "selector_lr")],
    "creamfl": [
        ({"gamma": -1.0}, "gamma is -1.0"), ({"temperature": 0.0}, "temperature is 0.0"),
        ({"gca_temperature": -1.0}, "gca_temperature"), ({"iot_alpha": 0.0}, "iot_alpha"),
        ({"aggregation": "median"}, "choose one of gca, mean, avg, iot"), ({"order": "x"}, "released, paper"),
        ({"kd_norm": "l1"}, "mse, squared, l2"), ({"kd_weight": -0.1}, "kd_weight"),
        ({"local_epochs": 0}, "local_epochs"), ({"server_steps": -1}, "server_steps"),
        ({"distil_steps": -1}, "distil_steps"), ({"sites_per_round": -1}, "sites_per_round"),
        ({"contrast_sample": -1}, "contrast_sample is -1"), ({"gca_sample": -2}, "gca_sample is -2"),
    ],
}  # fmt: skip
"""Settings that make no sense, and what is said of them; those of the weights of sites are FedDRA's."""


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_make_no_sense_are_refused(name: str) -> None:
    for wrong, said in REFUSED[name]:
        with pytest.raises(ValueError, match=said):
            METHODS[name](**wrong)


def test_modules_of_methods_hold_no_state() -> None:
    """No module or tensor and no mutable container at module level, except the registry."""
    for info in pkgutil.iter_modules(fedvlp.methods.__path__, "fedvlp.methods."):
        for name, value in vars(importlib.import_module(info.name)).items():
            if not name.startswith("__"):
                assert not isinstance(value, (nn.Module, Tensor, dict, list, set)), f"{info.name}.{name}"


@pytest.mark.parametrize("name", KINDS)
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


def test_phases_are_distinct_and_none_is_called_evaluate() -> None:
    for name in METHODS:
        method = METHODS[name]()
        for round in range(4):
            phases = method.phases(round)
            assert len(set(phases)) == len(phases) > 0
            assert EVALUATE not in phases


def test_a_method_sends_what_a_site_needs_and_nothing_of_another_site() -> None:
    for name in METHODS:
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
