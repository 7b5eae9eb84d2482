"""What a run starts from: the same weights with every method, part of its identity, and not needed to go on."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support import programs
from support.cases import KINDS, cases
from support.laboratory import METHODS
from support.presets import MODEL, SMALL
from support.toy import same_bytes

from fedvlp.core.client import TARGET
from fedvlp.core.types import State, group
from fedvlp.federation.loop import Rounds
from fedvlp.flare.jobs import experiment_of, job_files, write_job
from fedvlp.models.initial import SHIPPED, InitialWeightsError, refuse_other_folder, save_initial
from fedvlp.run.assembly import Assembly
from fedvlp.run.config import fingerprint, override
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder
from fedvlp.run.presets import PRESETS, get
from fedvlp.run.simulate import simulate

TWO = replace(SMALL, rounds=Rounds(rounds=2, evaluate_every=0))


def encoders(state: State) -> State:
    return {name: tensor for name, tensor in state.items() if group(name) == "encoder"}


def starting(experiment: Experiment, init: Path | str) -> Experiment:
    return replace(experiment, model=replace(experiment.model, init=str(init)))


def towers(folder: Path, seed: int = 7) -> Path:
    save_initial(MODEL.build(seed), folder, {})
    return folder


@pytest.mark.parametrize("name", cases(METHODS, often=KINDS, seconds=1))
def test_every_method_starts_from_given_encoders(name: str, tmp_path: Path) -> None:
    """The server's state, and what a site that keeps a model of its own begins with; the rest is the seed's."""
    preset = get(name)
    given = preset.model.build(7)
    save_initial(given, tmp_path, {})
    expected = {n: t.half().float() for n, t in encoders(given.state_dict()).items()}
    assembly, plain = Assembly(starting(preset, tmp_path)), Assembly(starting(preset, "random"))
    state, random = assembly.initial(), plain.initial()
    same_bytes(encoders(state), expected)
    assert state.keys() == random.keys()
    target = {n: t for n, t in state.items() if n.startswith(f"{TARGET}encoder.")}  # begins as a copy of the encoder
    same_bytes(target, {n: expected["image_" + n.removeprefix(TARGET)] for n in target})
    given_ones = expected.keys() | target.keys()
    same_bytes(
        {n: t for n, t in state.items() if n not in given_ones},
        {n: t for n, t in random.items() if n not in given_ones},
    )
    same_bytes(encoders(assembly.initial("site-with-a-model-of-its-own")), expected)


def test_the_weight_averaging_demos_start_from_the_shipped_encoders() -> None:
    """And so do those that they are compared with; one setting away is a random start."""
    ours = (
        "fedavg", "fedprox", "scaffold", "fednova", "fedbn", "fedmoon", "feddra", "fedrgb", "local",
        "centralized", "one-round-cca",
        "prompt-learning", "clip-adapter", "recommended",
    )  # fmt: skip
    assert {PRESETS[name].model.init for name in ours} == {f"tiny-pool@{SHIPPED['tiny-pool']}"}
    assert {PRESETS[name].model.init for name in PRESETS if name not in ours} == {""}
    states = [encoders(Assembly(PRESETS[name]).initial()) for name in ours]
    for state in states[1:]:
        same_bytes(state, states[0])
    random = override(PRESETS["fedavg"], "model.init", "random")
    assert random.model == replace(PRESETS["fedavg"].model, init="")
    start = Assembly(random).initial()
    assert not any(torch.equal(start[name], tensor) for name, tensor in states[0].items() if tensor.dim() > 1)


def test_what_is_fresh_is_not_what_the_encoders_were_trained_beside() -> None:
    """Seed 0's heads once were those of the pre-training, and its runs began at R@1 12 where others began at 3."""
    start = Assembly(PRESETS["feddra"]).initial()
    pool = Assembly(PRESETS["tiny-pool"]).initial()
    drawn = [name for name in start if group(name) != "encoder" and start[name].unique().numel() > 1]
    assert len(drawn) >= 8
    assert not [name for name in drawn if torch.equal(start[name], pool[name])]


def test_the_pool_is_of_other_people_than_any_demo() -> None:
    """Pre-training must not see what is judged: another seed means other patients, scanners and wording."""
    pool = PRESETS["tiny-pool"].data.build()
    demo = PRESETS["fedavg"].data.build()
    assert not set(pool.patients) & set(demo.patients)
    assert not set(pool.reports) >= set(demo.reports)
    styles = [set(PRESETS[name].data.cases().styles) for name in ("tiny-pool", "fedavg")]  # type: ignore[attr-defined]
    assert not {(s.contrast, s.noise) for s in styles[0]} & {(s.contrast, s.noise) for s in styles[1]}


def test_the_content_of_a_folder_is_part_of_the_experiment(tmp_path: Path) -> None:
    """Two machines with other weights under one name are refused; a run is not gone on with from others."""
    experiment = starting(TWO, towers(tmp_path / "towers"))
    first = experiment.pinned()
    folder = RunFolder.create(tmp_path / "runs", experiment)
    assert folder.experiment() == first
    assert RunFolder.latest(tmp_path / "runs", experiment) == folder
    towers(tmp_path / "towers", seed=8)
    assert fingerprint(experiment.pinned()) != fingerprint(first)
    assert RunFolder.latest(tmp_path / "runs", experiment) is None
    with pytest.raises(InitialWeightsError, match="restore those weights, or begin anew with these"):
        simulate(folder.experiment(), folder)


def test_a_job_names_weights_with_their_checksum(tmp_path: Path) -> None:
    experiment = starting(TWO, towers(tmp_path / "towers"))
    job = write_job(experiment, tmp_path / "job")
    assert experiment_of(job) == experiment.pinned()
    experiment_of(job).refuse_unpinned()
    with pytest.raises(ValueError, match=r"model\.init 'towers' lacks the checksum of the weights"):
        experiment.refuse_unpinned()
    hidden = replace(TWO, site_models=(("site-1", experiment.model),))
    with pytest.raises(ValueError, match=r"model\.init 'towers' lacks the checksum"):
        hidden.refuse_unpinned()
    assert hidden.pinned().site_models[0][1].init == experiment.pinned().model.init
    files = job_files(PRESETS["fedavg"])
    client = json.loads(files["app/config/config_fed_client.json"])
    model = client["executors"][0]["executor"]["args"]["settings"]["model"]["args"]
    assert model["init"] == f"tiny-pool@{SHIPPED['tiny-pool']}"


def test_a_run_goes_on_without_what_it_started_from(tmp_path: Path) -> None:
    """Stopped after a round, it has the weights in its checkpoint; the model that it brings needs no others either."""
    experiment = starting(TWO, towers(tmp_path / "towers"))
    whole = RunFolder.create(tmp_path / "runs", experiment)
    simulate(experiment, whole)
    stopped = RunFolder.create(tmp_path / "runs", experiment)

    def stop(record: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(experiment, stopped, report=stop)
    shutil.rmtree(tmp_path / "towers")
    simulate(stopped.experiment(), stopped)
    assert stopped.model.read_bytes() == whole.model.read_bytes()
    with pytest.raises(InitialWeightsError, match="cannot be read there"):
        simulate(whole.experiment(), RunFolder(tmp_path / "runs" / "new"))


def test_a_random_start_is_another_run(tmp_path: Path) -> None:
    given = Assembly(starting(TWO, towers(tmp_path))).server(("site-1",)).state
    random = Assembly(TWO).server(("site-1",)).state
    assert not any(torch.equal(given[name], random[name]) for name, t in encoders(given).items() if t.dim() > 1)


BEGINNING = """
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from fedvlp.methods import FedAvg
from fedvlp.models.dual_encoder import ModelConfig
from fedvlp.run.assembly import Assembly
from fedvlp.run.experiment import Experiment

def resident(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))

class Large(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ParameterList(torch.ones(1 << 20) for _ in range(32))

@dataclass(frozen=True)
class LargeConfig(ModelConfig):
    def build(self, seed):
        return Large()

assembly = Assembly(Experiment("large", FedAvg(), LargeConfig()))
before = resident("VmRSS:")
server = assembly.server(("a", "b"))
print((resident("VmHWM:") - before) / 128)
"""


def test_a_server_begins_with_two_copies_of_its_model(tmp_path: Path) -> None:
    """In a process of its own, a model of 128 MiB: the untrained one and the server's own, and no third."""
    done = programs.forked(["python", "-c", BEGINNING], tmp_path, os.environ)
    assert done.returncode == 0, done.stderr
    assert 1.9 < float(done.stdout) < 2.4


@pytest.mark.parametrize(
    ("file", "text"),
    [("notes.txt", "x"), ("config.json", '{"format": 2}'), ("config.json", "[]"), ("config.json", "{")],
)
def test_a_folder_of_something_else_is_not_written_over(file: str, text: str, tmp_path: Path) -> None:
    """A trained model has a config.json and a model.safetensors too, which were replaced."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / file).write_text(text)
    with pytest.raises(FileExistsError, match=r"is not empty and its config\.json is not that of weights to"):
        refuse_other_folder(tmp_path / "other")
    for folder in ("new", "empty", "towers"):
        refuse_other_folder(tmp_path / folder)
        save_initial(MODEL.build(0), tmp_path / folder, {})
        refuse_other_folder(tmp_path / folder)


def test_weights_of_another_model_are_refused_before_anything_is_trained(tmp_path: Path) -> None:
    save_initial(MODEL.build(0), tmp_path / "towers", {})
    experiment = override(PRESETS["fedavg"], "model.init", str(tmp_path / "towers")).pinned()
    run = RunFolder.create(tmp_path / "runs", experiment)
    with pytest.raises(InitialWeightsError, match=r"model\.init 'towers' does not fit this model: "):
        simulate(experiment, run)
    assert run.history() == []
