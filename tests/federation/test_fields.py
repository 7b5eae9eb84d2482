"""Every setting of Training, Rounds and Wire changes the trained model, or stands on a list that says why not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any

import pytest
from support.toy import ADAMW, Wired, differs

from fedvlp.core.types import State
from fedvlp.federation.codec import Wire
from fedvlp.federation.loop import Rounds
from fedvlp.methods import FedAvg
from fedvlp.training.config import Training

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
    },
    Wire: {
        "down": Other("bfloat16"),
        "up": Other("bfloat16"),
        "difference": Other(True, {"up": "bfloat16"}),
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
        "checkpoint_steps": "where a killed site goes on, to the same bytes: training/test_loop.py",
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
    Wire: {"skip_unchanged": "fewer bytes of the same tensors: federation/test_codec.py"},
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
        trained(*({**BASE, kind: settings}.values()))  # type: ignore[arg-type]
        for settings in (mine, replace(mine, **{name: other.value}))
    ]
    assert differs(*states), f"{kind.__name__}.{name}={other.value} trains the same model"
