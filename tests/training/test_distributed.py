"""Two processes under torchrun (gloo) train as one does on the whole batch, and agree to the last bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support import two_ranks
from support.toy import same_bytes
from support.two_ranks import CASES, handled

from fedvlp.core.checkpoint import load_tensors
from fedvlp.core.metric_keys import TIMES
from fedvlp.training import distributed
from fedvlp.training.grad_cache import random_numbers_of_this_rank

pytestmark = pytest.mark.slow(seconds=20)

TESTS = Path(two_ranks.__file__).parents[1]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What both ranks wrote."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(TESTS / "support" / "two_ranks.py"), str(folder)],
        env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def ended(out: Path, name: str, rank: int) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    return load_tensors(out / f"{name}-{rank}.safetensors")


def close(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert torch.allclose(left[name].double(), right[name].double(), rtol=0, atol=1e-5), name


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("apart", "films", "dropout", "kept, joint")])
def test_gathered_it_is_one_process_on_the_whole_batch(name: str, out: Path) -> None:
    """Loss, weights and the running statistics of the heads' BatchNorm."""
    update, state = handled(name)
    theirs, metrics = ended(out, name, 0)
    close(theirs, state)
    assert metrics == pytest.approx({n: v for n, v in update.metrics.items() if n not in TIMES}, rel=1e-5)


def test_apart_it_is_the_mean_of_each_ranks_own_loss(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As plain micro-batches of half the batch in one process, BatchNorm's running statistics aside."""
    method, phase, training, dropout = CASES["apart"]
    halves = replace(training, micro_batch=5, accumulation="plain")
    monkeypatch.setitem(CASES, "halves", (method, phase, halves, dropout))
    update, state = handled("halves")
    theirs, metrics = ended(out, "apart", 0)
    weights = [name for name in state if "running" not in name and "tracked" not in name]
    close({name: theirs[name] for name in weights}, {name: state[name] for name in weights})
    assert metrics["loss/contrastive"] == pytest.approx(update.metrics["loss/contrastive"], rel=1e-5)
    whole, _ = handled("gathered")
    assert whole.metrics["loss/contrastive"] > 1.1 * metrics["loss/contrastive"], "more negatives, more loss"


def test_apart_each_rank_reads_its_own_films_and_learns_the_same(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three batches of 10: 15 films at each of two ranks, of a batch that is drawn as a whole."""
    method, phase, training, dropout = CASES["films"]
    halves = replace(training, micro_batch=5, accumulation="plain")
    monkeypatch.setitem(CASES, "films in halves", (method, phase, halves, dropout))
    update, state = handled("films in halves")
    theirs, metrics = ended(out, "films", 0)
    weights = [name for name in state if "running" not in name and "tracked" not in name]
    close({name: theirs[name] for name in weights}, {name: state[name] for name in weights})
    assert (update.metrics["read"], metrics["read"]) == (30, 15)


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_end_with_the_same_bytes(name: str, out: Path) -> None:
    (first, ours), (second, theirs) = ended(out, name, 0), ended(out, name, 1)
    same_bytes(first, second)
    assert ours == theirs


def test_each_rank_draws_its_own_dropout_and_all_go_on_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    inside, outside = [], []
    for rank in (0, 1):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        torch.manual_seed(0)
        with random_numbers_of_this_rank(True):
            inside.append(torch.rand(4))
        outside.append(torch.rand(4))
    assert not torch.equal(*inside)
    assert torch.equal(*outside)


def test_what_rank_0_says_reaches_the_other(out: Path) -> None:
    for rank in (0, 1):
        tensors, content = load_tensors(out / f"told-{rank}.safetensors")
        assert content == {"a": [1, "x"]}
        same_bytes(tensors, {"w": torch.arange(6.0).view(2, 3), "n": torch.tensor(7)})


def test_a_batch_too_small_for_all_is_refused(out: Path) -> None:
    assert "a batch of 3 records for 2 processes; each needs at least 2" in json.loads(
        (out / "refused-1.json").read_text()
    )


def test_alone_there_is_nothing_to_exchange() -> None:
    assert not distributed.together()
    assert distributed.rank() == 0
