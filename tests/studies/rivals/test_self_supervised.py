"""Methods on films with views: forked workers, a kill in the middle and a new site for every task change no byte."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.films import BYOL, MAE, NT_XENT, sites, world
from support.toy import ADAMW, Fuse, World, forked, same_bytes

from fedvlp.federation.exchange import SequentialExchange, WorkerPool
from fedvlp.methods import FedAvg, FedDRA
from fedvlp.run import presets
from studies.rivals import FedEMA, FedU, FedX

pytestmark = pytest.mark.slow(seconds=5)

CASES = {
    "fedu": (FedU(local_steps=2), BYOL),
    "fedema": (FedEMA(local_steps=2), BYOL),
    "fedx": (FedX(local_steps=2), replace(NT_XENT, predictor=True)),
    "fedmae": (FedAvg(local_steps=2), MAE),
    "feddra": (FedDRA(local_steps=1, align_steps=1, dro_batch=4), BYOL),
}
"""Method and objective; FedDRA is one of those that were there before these objectives."""


def one(name: str, folder: Path, **settings: Any) -> World:
    method, objective = CASES[name]
    return world(method, objective, folder=folder, **settings)


def memories(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("sites/*/[0-9]*"))}


LONG = [pytest.param(name, marks=pytest.mark.slow(seconds=10)) for name in ("fedx", "fedema", "fedmae", "feddra")]


@pytest.mark.slow(seconds=5)
@pytest.mark.parametrize("name", ["fedu", *LONG])
def test_forked_workers_and_a_kill_in_the_middle_of_a_phase_change_no_byte(name: str, tmp_path: Path) -> None:
    """The second run is of two workers; the third is killed at b's second step of the second round, and resumed.

    It goes on within the phase, at the step before: views are drawn again for the steps that are done.
    """
    training = replace(ADAMW, checkpoint_steps=1)
    alone, aside = one(name, tmp_path / "alone"), one(name, tmp_path / "aside", training=training)
    expected = alone.run()
    with WorkerPool(aside.site, ("a", "b"), 2) as exchange:
        same_bytes(aside.run(exchange).state, expected.state)
    assert memories(tmp_path / "aside") == memories(tmp_path / "alone")

    def killed() -> None:
        one(name, tmp_path / "killed", training=training, data=sites(Fuse(8))).run()

    assert forked(killed) == -signal.SIGKILL
    if name != "feddra":
        assert list((tmp_path / "killed" / "sites" / "b").glob("unfinished*")), "killed within a phase"
    resumed = one(name, tmp_path / "killed", training=training)
    same_bytes(resumed.run().state, expected.state)
    assert memories(tmp_path / "killed") == memories(tmp_path / "alone")


@pytest.mark.slow(seconds=3)
@pytest.mark.parametrize("name", ["fedu", "fedema"])
def test_a_new_site_for_every_task_gives_the_same_bytes(name: str, tmp_path: Path) -> None:
    """As in a simulator with fewer threads than sites: the target network and the divergence are on disk."""
    kept, renewed = one(name, tmp_path / "kept"), one(name, tmp_path / "renewed")

    def anew(site: str) -> Any:
        renewed._modules = None
        return renewed.site(site)

    expected = kept.run()
    same_bytes(renewed.run(SequentialExchange(anew)).state, expected.state)
    assert memories(tmp_path / "renewed") == memories(tmp_path / "kept")


def test_the_presets_have_the_objectives_that_their_methods_need() -> None:
    """FedU and FedEMA without a predictor, FedX without views and FedMAE without masks would be FedAvg, unsaid."""
    objectives = {name: type(presets.get(name).objective).__name__ for name in ("fedu", "fedema", "fedx", "fedmae")}
    assert objectives == {"fedu": "BYOLConfig", "fedema": "BYOLConfig", "fedx": "NTXentConfig", "fedmae": "MAEConfig"}
    fedx: Any = presets.get("fedx").objective
    assert (fedx.temperature, fedx.predictor) == (0.1, True)
    assert type(presets.get("fedmae").method) is FedAvg
