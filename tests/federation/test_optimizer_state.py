"""Moments that stay at the site: the optimiser goes on as if there were no rounds, and nothing of it leaves."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import cases
from support.laboratory import METHODS
from support.toy import ADAMW, Fuse, Recorder, Toy, World, clone, forked, pairs, same_bytes, small

from fedvlp.core.checkpoint import load_tensors
from fedvlp.core.metric_keys import TIMES
from fedvlp.core.optimizers import AdamW
from fedvlp.core.types import EVALUATE, Broadcast, State, group
from fedvlp.federation.exchange import WorkerPool
from fedvlp.federation.loop import Rounds
from fedvlp.federation.site import MOMENTS
from fedvlp.methods import FedAvg, FedDRA, FedRGB
from fedvlp.methods.softpull import SoftPull
from fedvlp.training.settings import Training

KEEP = replace(ADAMW, optimizer_state="keep", warmup_steps=2)
SMALL = {name: small(kind) for name, kind in METHODS.items() if name != "centralized"}
DRA = FedDRA(align_steps=3, local_steps=2, dro_batch=4)


def world(method: Any, folder: Path | None = None, training: Training = KEEP, rounds: int = 3, **options: Any) -> World:
    """Three sites, dropout: everything that draws random numbers."""
    options = {"model": lambda: Toy(norm=True, dropout=0.3), **options}
    return World(
        method, training=training, folder=folder, rounds=Rounds(rounds=rounds, evaluate_every=0), **options
    )  # fmt: skip


def files(folder: Path) -> dict[str, bytes]:
    """Everything that the sites remember."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("sites/*/**/[0-9]*"))}


def moments(one: World, site: str) -> State:
    """The optimiser's tensors of a site after its last task."""
    assert one.folder is not None
    return load_tensors(max((one.folder / "sites" / site / MOMENTS).iterdir()))[0]


# What it does


def whole_batches(training: Training, rounds: int, steps: int) -> State:
    """FedAvg with one site whose batch is all that it has: the model after ``rounds`` of ``steps``."""
    training = replace(training, batch_size=8, warmup_steps=0)
    return world(FedAvg(local_steps=steps), None, training, rounds, data={"a": pairs(3, 8)}, model=Toy).run().state


def test_rounds_of_one_site_are_one_long_phase() -> None:
    """Three rounds of two steps are torch's AdamW over six; with fresh moments they are not."""
    one = world(FedAvg(), data={"a": pairs(3, 8)}, model=Toy).client("a")
    optimizer = AdamW([p for _, p in one.parameters()], lr=KEEP.lr, weight_decay=KEEP.weight_decay)
    batch = next(one.data.batches("train", 8, drop_last=False))
    for _ in range(6):
        optimizer.zero_grad()
        sum(one.objective(one.model(batch), batch).values()).backward()
        optimizer.step()
    expected = clone(one.state())
    kept, reset = (whole_batches(replace(KEEP, optimizer_state=state), 3, 2) for state in ("keep", "reset"))
    for name, tensor in expected.items():
        torch.testing.assert_close(kept[name], tensor, atol=2e-6, rtol=1e-5)
    assert max(float((reset[name] - expected[name]).abs().max()) for name in expected) > 1e-3


def test_each_parameter_has_the_moments_of_the_phases_that_train_it(tmp_path: Path) -> None:
    """FedDRA: after three rounds of 3 + 2 steps encoders have taken 6, alignment and heads 15."""
    one = world(DRA, tmp_path)
    one.run()
    steps = {name: int(tensor) for name, tensor in moments(one, "a").items() if name.endswith("/step")}
    assert {group(name): count for name, count in steps.items()} == {"encoder": 6, "alignment": 15, "head": 15}
    assert {name.rpartition("/")[0] for name in steps} == {name for name, _ in one.client("a").parameters()}


def test_each_model_of_a_site_has_moments_of_its_own(tmp_path: Path) -> None:
    """SoftPull's two phases train the global model and the site's own: after three rounds of 2 steps, 6 of each."""
    one = world(SoftPull(local_steps=2, softpull=1.0), tmp_path, model=Toy, data={"a": pairs(3, 8)})
    one.run()
    kept = moments(one, "a")
    own = {name.removeprefix("trainee/personal/"): t for name, t in kept.items() if name.startswith("trainee/")}
    shared = {name: tensor for name, tensor in kept.items() if not name.startswith("trainee/")}
    assert shared.keys() == own.keys()
    for model in (shared, own):
        assert {int(tensor) for name, tensor in model.items() if name.endswith("/step")} == {6}


def test_fedrgb_s_teacher_has_moments_of_its_own_and_its_copy_of_the_encoders_has_none(tmp_path: Path) -> None:
    """After three rounds of 2 + 3 steps: enc and al_i have taken 6, al* 9; f' is a new copy in every round."""
    one = world(FedRGB(local_steps=2, aligner_steps=3, dro_batch=4), tmp_path, model=Toy, data={"a": pairs(3, 8)})
    one.run()
    steps = {name: int(tensor) for name, tensor in moments(one, "a").items() if name.endswith("/step")}
    counts = {
        (name.startswith("trainee/teacher/"), group(name.removeprefix("trainee/teacher/"))): count
        for name, count in steps.items()
    }
    assert counts == {
        (False, "encoder"): 6, (False, "alignment"): 6, (False, "head"): 6, (True, "alignment"): 9, (True, "head"): 9,
    }  # fmt: skip
    assert len(steps) == sum(1 if group(n) == "encoder" else 2 for n, _ in one.client("a").parameters())


def rates(training: Training, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The share of the learning rate that each step of site a has, in two rounds of FedDRA."""
    seen: list[float] = []
    step = AdamW.step

    def noting(self: AdamW, *arguments: Any) -> Any:
        seen.append(self.param_groups[0]["lr"] / training.lr)
        return step(self, *arguments)

    monkeypatch.setattr(AdamW, "step", noting)
    world(replace(DRA, rho=0.0), None, training, 2, data={"a": pairs(3, 8)}).run()
    return [round(rate, 3) for rate in seen]


def test_only_a_phase_with_parameters_that_have_no_moments_warms_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three align steps and two joint ones a round; the encoders have no moments before the first ``joint``."""
    assert rates(KEEP, monkeypatch) == [0.5, 1, 1, 0.5, 1, 1, 1, 1, 1, 1]


def test_otherwise_every_phase_does(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rates(replace(KEEP, optimizer_state="reset"), monkeypatch) == [0.5, 1, 1, 0.5, 1] * 2


def test_a_warm_up_is_made_up_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warm-up of 3 takes one step away, so each phase has one more; with kept moments only the first two have."""
    three = replace(KEEP, warmup_steps=3, make_up_warmup=True)
    third = [0.333, 0.667]
    assert rates(three, monkeypatch) == [*third, 1, 1, *third, 1, 1, 1, 1, 1, 1]
    assert rates(replace(three, optimizer_state="reset"), monkeypatch) == [*third, 1, 1, *third, 1] * 2


# What it must not do


@pytest.mark.parametrize("name", cases(SMALL))
def test_nothing_of_it_leaves_the_site_or_is_taken_for_the_methods_memory(name: str, tmp_path: Path) -> None:
    """The server's own optimiser, of methods that train there, is another."""
    one = world(SMALL[name], tmp_path, rounds=2)
    recorder = Recorder(one)
    server = one.run(recorder)
    parameters = {parameter for parameter, _ in one.client("a").parameters()}
    sent = {tensor for _, update in recorder.replies for tensor in (*update.state, *update.aux, *update.metrics)}
    sent |= {tensor for _, message in recorder.sent for tensor in (*message.state, *message.aux)}
    assert not [tensor for tensor in sent if "exp_avg" in tensor]
    assert {key for _, update in recorder.replies for key in update.scalars} <= set(one.method.probes())
    own = re.compile("trainee/(personal|teacher)/")
    trained = {own.sub("", tensor).rpartition("/")[0] for tensor in moments(one, "a")}
    assert trained
    assert trained <= parameters
    assert not [tensor for tensor in one.site("a").memory.newest() if "exp_avg" in tensor]
    assert not [tensor for tensor in server.memory if "exp_avg" in tensor and not tensor.startswith("optimizer/")]


def test_a_task_that_comes_again_starts_from_the_same_moments(tmp_path: Path) -> None:
    """Also in one process, where the optimiser works in place."""
    for folder in (None, tmp_path):
        site = world(FedAvg(local_steps=2), folder).site("a")
        message = Broadcast(0, "train", world(FedAvg()).server().state)
        site.handle(message)
        first = clone(site.handle(replace(message, round=1)).state)
        same_bytes(clone(site.handle(replace(message, round=1)).state), first)


def test_a_measurement_leaves_them_alone(tmp_path: Path) -> None:
    site = world(FedAvg(local_steps=2), tmp_path).site("a")
    message = Broadcast(0, "train", world(FedAvg()).server().state)
    site.handle(message)
    before = files(tmp_path)
    site.handle(replace(message, round=1, phase=EVALUATE))
    assert files(tmp_path) == before


def test_without_it_nothing_is_written(tmp_path: Path) -> None:
    world(FedAvg(local_steps=1), tmp_path, ADAMW).run()
    assert files(tmp_path) == {}


# Bytes and kills


def test_forked_workers_give_the_same_bytes_as_in_turn(tmp_path: Path) -> None:
    alone, aside = world(DRA, tmp_path / "alone"), world(DRA, tmp_path / "aside")
    expected = alone.run()
    with WorkerPool(aside.site, ("a", "b", "c"), 2) as exchange:
        seen = aside.run(exchange)
    same_bytes(seen.state, expected.state)
    assert files(tmp_path / "aside") == files(tmp_path / "alone")
    kept = {site: [n for n in files(tmp_path / "alone") if f"/{site}/{MOMENTS}/" in n] for site in "abc"}
    assert all(kept.values())


def burning(one: World, monkeypatch: pytest.MonkeyPatch, fuse: Callable[[], None]) -> None:
    """Burns ``fuse`` before every training batch and before every rename of a file."""
    for data in one.data.values():
        data.tick = fuse
    real = os.replace

    def replacing(*arguments: Any) -> None:
        fuse()
        real(*arguments)

    monkeypatch.setattr(os, "replace", replacing)


@pytest.mark.parametrize("checkpoint_steps", [0, pytest.param(1, marks=pytest.mark.slow(seconds=25))])
def test_killed_at_any_moment_and_resumed_is_uninterrupted(
    checkpoint_steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL before a batch, or between the files that a task writes; also in the middle of a phase that goes on."""
    training = replace(KEEP, checkpoint_steps=checkpoint_steps)
    whole = world(DRA, tmp_path / "whole", training)
    expected = whole.run()
    with monkeypatch.context() as patch:
        count = Fuse()
        one = world(DRA, tmp_path / "counted", training)
        burning(one, patch, count)
        one.run()
    drawn = random.Random(checkpoint_steps).sample(range(1, count.count + 1), 8 if checkpoint_steps else 2)
    for moment in sorted({1, count.count, *drawn}):
        folder = tmp_path / str(moment)

        def until_killed(folder: Path = folder, moment: int = moment) -> None:
            one = world(DRA, folder, training)
            with pytest.MonkeyPatch.context() as patch:
                burning(one, patch, Fuse(moment))
                one.run()

        assert forked(until_killed) == -9
        again = world(DRA, folder, training).run()
        same_bytes(again.state, expected.state)
        assert files(folder) == files(tmp_path / "whole"), moment
        assert _facts(again.history) == _facts(expected.history)


def _facts(history: list[dict[str, Any]]) -> list[Any]:
    return [
        {site: {n: repr(v) for n, v in metrics.items() if n not in TIMES} for site, metrics in record["sites"].items()}
        for record in history
    ]
