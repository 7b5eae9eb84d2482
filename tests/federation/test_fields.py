"""Every setting of Training, Rounds, Wire and the methods trains another model, or a list says why not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from support import films, toy_multimodal
from support.cases import cases
from support.laboratory import METHODS, OURS
from support.toy import ADAMW, Pairs, Wired, World, differs, small
from torch import nn

from fedvlp.core.method import Method
from fedvlp.core.types import State
from fedvlp.federation.codec import Wire
from fedvlp.federation.exchange import SequentialExchange
from fedvlp.federation.loop import Rounds
from fedvlp.methods import AdapterConfig, ContextConfig, FedAvg
from fedvlp.models.dual_encoder import ModelConfig
from fedvlp.models.selector import SelectorConfig
from fedvlp.objectives.convirt import ConVIRT
from fedvlp.training.settings import Training
from studies.rivals.vae import DistillerConfig

BASE = {
    Training: ADAMW,
    Rounds: Rounds(rounds=2, evaluate_every=0, quorum=1, clip_to_median=0.0, max_share=1.0),
    Wire: Wire(),
}


@dataclass(frozen=True)
class Other:
    """Another value of a field, and what else has to be set, in both runs, for the field to count."""

    value: Any
    beside: Mapping[str, Any] = field(default_factory=dict)


PRIVATE = {"dp_noise": 1.0, "dp_group": 2, "batch_size": 8}
CHANGED: dict[type, dict[str, Other]] = {
    Training: {
        "batch_size": Other(6),
        "optimizer": Other("sgd"),
        "lr": Other(0.02),
        "weight_decay": Other(0.5),
        "beta1": Other(0.5),
        "beta2": Other(0.5),  # it cancels in the first step
        "momentum": Other(0.9, {"optimizer": "sgd"}),
        "optimizer_state": Other("keep"),
        "warmup_steps": Other(3),
        "make_up_warmup": Other(True, {"warmup_steps": 3}),
        "local_epochs": Other(1),
        "cosine_rounds": Other(2),
        "precision": Other("bfloat16"),
        "clip_norm": Other(0.001, {"optimizer": "sgd"}),
        "dp_noise": Other(2.0, PRIVATE),
        "dp_clip": Other(0.01, PRIVATE),
        "dp_group": Other(4, PRIVATE),
        "micro_batch": Other(2, {"accumulation": "plain"}),
    },
    Rounds: {
        "rounds": Other(3),
        "seed": Other(1),
        "max_samples": Other(10),  # of sites with 8, 12 and 16
        "max_share": Other(0.34),
        "clip_to_median": Other(1.0),
        "averaging": Other("median"),
        "trim": Other(0.4, {"averaging": "trimmed", "trim": 0.0}),
        "server_optimizer": Other("momentum"),
        "server_lr": Other(0.5, {"server_optimizer": "momentum"}),
        "server_beta1": Other(0.5, {"server_optimizer": "momentum"}),
        "server_beta2": Other(0.5, {"server_optimizer": "adam"}),
        "server_tau": Other(1.0, {"server_optimizer": "adam"}),
    },
    Wire: {
        "down": Other("bfloat16"),
        "up": Other("bfloat16"),
    },
}
MACHINE = "the same training by other means: other last bits at most"
WHO = "whom the server asks, or counts, when replies are missing: federation/test_loop.py"
SAME: dict[type, dict[str, str]] = {
    Training: {
        "threads": MACHINE,
        "attention": MACHINE,
        "compile": MACHINE,
        "channels_last": MACHINE,
        "device": MACHINE,
        "cache_features": "features of frozen towers, which a toy has not: training/test_frozen_features.py",
        "accumulation": "cached needs the towers of a dual encoder; a toy is refused: training/test_grad_cache.py",
        "gather_negatives": "over several processes: training/test_distributed.py",
        "checkpoint_steps": "where a killed site goes on, to the same bytes: training/test_local_training.py",
        "dp_delta": "epsilon is told at it: training/test_dp_sgd.py",
    },
    Rounds: {
        "quorum": WHO,
        "samples_factor": WHO,
        "max_missed": WHO,
        "probe_every": WHO,
        "max_empty": WHO,
        "evaluate_every": "when the model is measured",
    },
    Wire: {},
}


def test_every_field_is_on_one_of_the_lists() -> None:
    for kind in BASE:
        assert sorted([*CHANGED[kind], *SAME[kind]]) == sorted(one.name for one in fields(kind)), kind.__name__


@cache
def trained(training: Training, rounds: Rounds, wire: Wire) -> State:
    return Wired(FedAvg(local_steps=4), training=training, rounds=rounds, wire=wire).run().state


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in CHANGED.items() for name in names])
def test_another_value_trains_another_model(kind: type, name: str) -> None:
    other = CHANGED[kind][name]
    mine: Any = replace(BASE[kind], **other.beside)  # type: ignore[type-var]
    states = [
        trained(*({**BASE, kind: settings}.values())) for settings in (mine, replace(mine, **{name: other.value}))
    ]
    assert differs(*states), f"{kind.__name__}.{name}={other.value} trains the same model"


# Methods


STUDY = ModelConfig(embedding_dim=8, image_size=16, max_tokens=8, vocabulary=64, head_hidden=16, text_layers=1)
SELECTOR = SelectorConfig(sites=2, classes=("Edema", "Pneumonia"), hidden=8)


def studies(extra: Any, method: Method) -> World:
    """Two sites of random films and words, and a part of the model that one method alone has."""
    draw = torch.Generator().manual_seed(0)
    image, text = torch.randn(8, 1, 16, 16, generator=draw), torch.randint(2, 64, (8, 8), generator=draw)

    def objective() -> nn.Module:
        made = ConVIRT()
        made.add_module("extra", extra.build(STUDY, 0))
        return made

    sites = {"a": Pairs(image, text), "b": Pairs(image[:4], text[:4])}
    for site in sites.values():
        site.labels = torch.randint(0, 2, (8, 2), generator=draw).float()
    return World(method, sites, ADAMW, model=lambda: STUDY.build(0), objective=objective)


ON_FILMS = {"fedema": films.BYOL, "fedu": films.BYOL, "fedx": replace(films.NT_XENT, predictor=True)}
WORLDS: dict[str, Callable[[Method], World]] = {
    "mfedavg": toy_multimodal.world,
    "car-mfl": toy_multimodal.world,
    "fediot": toy_multimodal.world,
    "pms-fm": partial(studies, SELECTOR),
    "fedsm": partial(studies, SELECTOR),
    "fedfed": partial(studies, DistillerConfig(channels=4, latent=2)),
    "prompt-learning": partial(studies, ContextConfig(("Edema", "Pneumonia"), context=2)),
    "clip-adapter": partial(studies, AdapterConfig(("Edema", "Pneumonia"), private_hidden=4)),
    **{name: partial(films.world, objective=objective) for name, objective in ON_FILMS.items()},
}
"""Where a method has what all its fields need; others train on the toy's pairs."""

SMALL: dict[str, dict[str, Any]] = {
    "feddra": {"dro_batch": 2, "rho": 1e-3},
    "fedrgb": {"dro_batch": 2, "rho": 1e-3, "aligner_steps": 2},
    "fedfed": {"distil_phases": 1, "distil_steps": 2, "share": True, "shared": 2, "image_size": 16, "embedding_dim": 8},
    "fednova": {"batch_size": 4},
    "fedldawa": {"plain_rounds": 1},
    **{name: {"local_epochs": 1, "server_steps": 1} for name in ("creamfl", "fedmd", "fedet", "fedgems")},
}
"""What a method is given beside ``toy.KNOBS``, so that every field counts."""

VALUES: dict[str, Other] = {
    "weighting": Other("uniform"),
    "feddra.weighting": Other("samples"),
    "fedrgb.weighting": Other("samples"),
    "rho": Other(0.5),
    "divergence": Other("kl"),
    "projection": Other("kl"),
    "dro_apply": Other("loss"),
    "loss_cap": Other(0.1),
    "constraint_reduction": Other("mean_dim"),
    "loss_form": Other("eq2", {"alpha": 0.5}),
    "avg_aligner": Other(True),
    "order": Other("paper"),
    "kd_norm": Other("squared"),
    "aggregation": Other("mean"),
    "mfedavg.private": Other(False, {"public": True}),
    "k": Other(1),
    "renorm": Other("linear"),
    "scale": Other(0.5),
    "share": Other(False),
    "fednova.local_steps": Other(3, {"local_epochs": 0}),
    "fednova.batch_size": Other(8),
    "warmup_steps": Other(3),
    "sites_per_round": Other(2),
}
"""Another value of a field, of every method or of one; of others half as much, one more, or the opposite."""

MEASURED = "counts when a model is measured or chosen: "
METHODS_SAME = {
    "local.weighting": "no weights are averaged",
    **{f"{name}.weighting": "no weights are averaged" for name in ("creamfl", "fedmd", "fedet", "fedgems")},
    "scaffold.weighting": "uniform alone is taken: methods/test_scaffold.py",
    **{f"{name}.order": "no site sees what the server's model makes of P" for name in ("fedmd", "fedet")},
    "distil_augmented": "a toy augments nothing: methods/test_creamfl_faults.py",
    "iot_alpha": "a site that lacks images or reports counts less: methods/test_creamfl.py",
    "best_by": MEASURED + "methods/test_mfedavg.py",
    "one-round-cca.tower": "a toy's heads are no wider than its towers: methods/test_one_round_cca.py",
    "finding_ridge": "of the findings' heads",
    "findings": "a toy knows none: methods/test_one_round_cca.py",
    "threshold": MEASURED + "methods/test_pms_fm.py",
    "car-mfl.public": "true alone is taken",
    "car-mfl.private": "true alone is taken",
    "image_size": "follows the model",
    "embedding_dim": "follows the model",
}  # fmt: skip
"""Fields, of every method or of one, of which another value trains the same model, and why."""


def trained_by(name: str, **settings: Any) -> list[State]:
    """What server and sites hold after a run."""
    method = replace(small(METHODS[name]), **(SMALL.get(name, {}) | settings))
    world = WORLDS.get(name, partial(World, training=ADAMW))(method)
    sites: dict[str, Any] = {}
    server = world.run(SequentialExchange(lambda site: sites.setdefault(site, world.site(site))))
    return [server.state, server.memory, *(one.memory.newest() or {} for one in sites.values())]


def other_of(name: str, setting: str) -> Other:
    value = getattr(replace(small(METHODS[name]), **SMALL.get(name, {})), setting)
    return Other(not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else value / 2 or 0.1)


@pytest.mark.parametrize("name", cases(METHODS, often=OURS.keys() - {"fedsm"}))
def test_another_value_of_a_method_trains_another_model(name: str) -> None:
    ignored, mine = [], trained_by(name)
    for setting in [one.name for one in fields(METHODS[name])]:
        if METHODS_SAME.keys() & {setting, f"{name}.{setting}"}:
            continue
        other = VALUES.get(f"{name}.{setting}") or VALUES.get(setting) or other_of(name, setting)
        before = trained_by(name, **other.beside) if other.beside else mine
        after = trained_by(name, **{**other.beside, setting: other.value})
        same = all(one.keys() == two.keys() and not differs(one, two) for one, two in zip(before, after, strict=True))
        ignored += [setting] if same else []
    assert not ignored, f"{name} trains the same model whatever these are"
