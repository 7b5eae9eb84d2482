"""A phase that is broken off goes on from its checkpoint and ends with the same bytes; another task's is not used."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.towers import client, encoder
from support.toy import Fuse, clone, forked, same_bytes

from fedvlp.core.checkpoint import load_tensors
from fedvlp.core.client import Client
from fedvlp.core.method import Method
from fedvlp.core.metric_keys import TIMES
from fedvlp.core.types import Broadcast, Update
from fedvlp.federation.site import Site
from fedvlp.federation.site_memory import SiteMemory
from fedvlp.training.local_training import Aborted
from fedvlp.training.settings import Training

STEPS = 7
TRAINING = Training(batch_size=6, lr=1e-3, warmup_steps=4, checkpoint_steps=2)


@dataclass(frozen=True)
class Counting(Method):
    """Remembers the sum of the first weight over the steps, and draws a random number in every loss."""

    local_steps: int = STEPS

    def losses(self, client: Client, batch: Any, message: Broadcast) -> Any:
        terms = super().losses(client, batch, message)
        step = int(client.memory.get("count", torch.zeros(()))) + 1
        return {**terms, **({"even": terms["contrastive"] * torch.rand(())} if step % 2 == 0 else {})}

    def after_step(self, client: Client, message: Broadcast) -> None:
        client.memory = {
            "count": client.memory.get("count", torch.zeros(())) + 1,
            "sum": client.memory.get("sum", torch.zeros(())) + client.model.image_head[0].weight[0, 0].detach(),
        }


def site(folder: Path, training: Training = TRAINING, tick: Any = None) -> Site:
    one = client(encoder(dropout=0.2))
    if tick:
        one.data.tick = tick  # type: ignore[attr-defined]
    return Site(one, Counting(), training, SiteMemory(folder))


def message(round: int = 0, **options: float) -> Broadcast:
    return Broadcast(round, "train", clone(client(encoder()).state()), **options)


def same(left: Update, right: Update, folders: tuple[Path, Path]) -> None:
    same_bytes(left.state, right.state)
    assert {n: v for n, v in left.metrics.items() if n not in TIMES} == {
        n: v for n, v in right.metrics.items() if n not in TIMES
    }
    memories = [(folder / "00000-0.safetensors").read_bytes() for folder in folders]
    assert memories[0] == memories[1]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Update, Path]:
    folder = tmp_path_factory.mktemp("undisturbed")
    update = site(folder, replace(TRAINING, checkpoint_steps=0)).handle(message())
    return replace(update, state=clone(update.state)), folder


@pytest.mark.parametrize("killed_at", [2, 4, STEPS])
@pytest.mark.parametrize("precision", ["float32", pytest.param("float16", marks=pytest.mark.slow(seconds=2))])
def test_killed_and_resumed_it_ends_with_the_same_bytes(
    killed_at: int, precision: str, undisturbed: tuple[Update, Path], tmp_path: Path
) -> None:
    """SIGKILL before batch 2, 4 or 7 of a phase that is checkpointed after steps 2, 4 and 6."""
    training = replace(TRAINING, precision=precision)
    fuse = Fuse(killed_at)
    assert forked(lambda: site(tmp_path, training, fuse).handle(message()) and None) == -9
    unfinished = tmp_path / "unfinished.safetensors"
    assert unfinished.exists() == (killed_at >= 3)
    if killed_at >= 3:
        assert load_tensors(unfinished)[1]["numbers"]["done"] == (killed_at - 1) // 2 * 2
    again = site(tmp_path, training).handle(message())
    expected, folder = undisturbed
    if precision != "float32":
        folder = tmp_path / "whole"
        expected = site(folder, replace(training, checkpoint_steps=0)).handle(message())
    same(again, expected, (tmp_path, folder))
    assert not unfinished.exists()


def steps_done(folder: Path, training: Training, sent: Broadcast) -> int:
    """How many steps a task still takes in ``folder``."""
    asked: list[int] = []
    site(folder, training).handle(sent, lambda: bool(asked.append(1)))
    return len(asked)


def break_off(folder: Path) -> None:
    asked: list[int] = []

    def fifth_time() -> bool:
        asked.append(1)
        return len(asked) == 5

    with pytest.raises(Aborted):
        site(folder).handle(message(), fifth_time)
    assert (folder / "unfinished.safetensors").exists()


def test_an_aborted_task_that_comes_again_goes_on(tmp_path: Path) -> None:
    break_off(tmp_path)
    assert steps_done(tmp_path, TRAINING, message()) == STEPS - 4


@pytest.fixture(scope="module")
def broken_off(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("broken off")
    break_off(folder)
    return folder


@pytest.mark.parametrize("other", ["round", "lr_scale", "state", "training"])
def test_another_tasks_checkpoint_is_not_used(other: str, broken_off: Path, tmp_path: Path) -> None:
    shutil.copytree(broken_off, tmp_path, dirs_exist_ok=True)
    sent, training = message(), TRAINING
    if other == "round":
        sent = message(1)
    elif other == "lr_scale":
        sent = message(lr_scale=2.0)
    elif other == "state":
        sent.state["image_encoder.summary"][0, 0, 0] += 1e-3
    else:
        training = replace(TRAINING, lr=2e-3)
    assert steps_done(tmp_path, training, sent) == STEPS
    assert not (tmp_path / "unfinished.safetensors").exists()


def test_a_damaged_checkpoint_is_not_used(tmp_path: Path) -> None:
    break_off(tmp_path)
    file = tmp_path / "unfinished.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    assert steps_done(tmp_path, TRAINING, message()) == STEPS


def test_nothing_is_written_unless_asked_for(tmp_path: Path) -> None:
    seen: list[bool] = []
    one = site(tmp_path, replace(TRAINING, checkpoint_steps=0))
    one.handle(message(), lambda: bool(seen.append((tmp_path / "unfinished.safetensors").exists())))
    assert len(seen) == STEPS
    assert not any(seen)
