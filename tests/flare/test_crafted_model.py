"""A site does not train a model that looks made to single out records; what it tells the server is a fixed sentence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedvlp.core.types import Broadcast, State
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.flare.paths import SitePaths
from fedvlp.flare.task_handler import RefusedError, TaskHandler
from fedvlp.methods import FedAvg
from fedvlp.models.dual_encoder import ModelConfig
from fedvlp.models.initial import save_initial
from fedvlp.run.assembly import Assembly
from fedvlp.run.config import identity
from fedvlp.run.experiment import Experiment
from fedvlp.training.settings import Training

SMALL = Experiment(
    "small", FedAvg(local_steps=1), ModelConfig(head_norm="layer"), data=SyntheticCohort(sites=2, size=80),
    training=Training(batch_size=8),
)  # fmt: skip


def answer(experiment: Experiment, state: State, folder: Path) -> object:
    handler = TaskHandler(experiment, SitePaths("site-1", str(folder / "runs"), ""))
    return handler.answer(Broadcast(0, "train", state), identity(experiment, "small/001"), lambda: False)


def crafted(state: State) -> State:
    """One layer of the image tower hands on what it gets."""
    name = next(name for name in state if name.startswith("image_encoder.") and name.endswith("out.weight"))
    return {**state, name: torch.eye(len(state[name]))}


def test_it_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    honest = Assembly(SMALL).server(("site-1",)).state
    assert answer(SMALL, honest, tmp_path / "honest")
    with pytest.raises(RefusedError, match="is 0 in 99% of its values") as refused:
        answer(SMALL, crafted(honest), tmp_path / "crafted")
    assert not list((tmp_path / "crafted" / "runs").rglob("*.safetensors"))
    said = refused.value.public
    assert "looks made to single out records" in said
    assert "image_encoder" not in said


def test_a_site_without_the_weights_of_the_start_looks_too(tmp_path: Path) -> None:
    """Sites need no file of ``model.init`` where weights are averaged; they compare with random weights then."""
    save_initial(SMALL.model.build(3), tmp_path / "towers", {})
    started = replace(SMALL, model=replace(SMALL.model, init=str(tmp_path / "towers"))).pinned()
    honest = Assembly(started).server(("site-1",)).state
    (tmp_path / "towers" / "model.safetensors").unlink()
    assert answer(started, honest, tmp_path / "honest")
    with pytest.raises(RefusedError, match="is 0 in 99% of its values"):
        answer(started, crafted(honest), tmp_path / "crafted")
