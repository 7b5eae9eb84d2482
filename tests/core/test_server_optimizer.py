"""FedAvgM, FedAdam and FedYogi: two rounds of each by hand, what they leave alone, and what refuses them."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import cases
from support.toy import ADAMW, Toy, World, same_bytes, small

from fedvlp.core.aggregation import MeanAggregator
from fedvlp.core.optimizers import FIRST, OPTIMIZERS, SECOND, ServerOptimizer
from fedvlp.core.server_state import Server
from fedvlp.core.types import Update
from fedvlp.federation.loop import Rounds
from fedvlp.methods import METHODS, FedAvg
from fedvlp.run import presets
from fedvlp.run.config import override

USED = OPTIMIZERS[1:]


def round_of(server: Server, optimizer: ServerOptimizer, **sent: Any) -> float:
    """One round with one site, which sends these tensors; returns the weight w of the server's model."""
    average = MeanAggregator(server, dict(server.state), lambda server, update: 1.0, 1.0)
    aggregator = optimizer.around(average, server)
    aggregator.add(Update("a", 0, "train", 1, {name: torch.as_tensor(value) for name, value in sent.items()}))
    aggregator.commit()
    return server.state["w"].item()


def model(**others: Any) -> Server:
    return Server(("a",), {"w": torch.tensor(1.0), **others})


def test_two_rounds_of_momentum_by_hand() -> None:
    """Delta = 2: m = 2, w = 1 + 2/2 = 2. Delta = 2: m = 2/2 + 2 = 3, w = 2 + 3/2."""
    server, optimizer = model(), ServerOptimizer("momentum", 0.5, 0.5)
    assert round_of(server, optimizer, w=3.0) == 2.0
    assert round_of(server, optimizer, w=4.0) == 3.5


@pytest.mark.parametrize(("kind", "first", "second"), [("adam", 2.5, 1.75), ("yogi", 3.0, 2.5)])
def test_two_rounds_of_adam_and_yogi_by_hand(kind: str, first: float, second: float) -> None:
    """v = 1 at first, all decays 1/2, tau = 1, eta = 2. Delta = 2, then 1: m = 2/2 = 1, then 1/2 + 1/2 = 1.

    Adam: v = 1/2 + 4/2 = 5/2, then 5/4 + 1/2 = 7/4. Yogi: v = 1 + 4/2 = 3 as 1 < 4, then 3 - 1/2 = 5/2 as 3 > 1.
    """
    server, optimizer = model(), ServerOptimizer(kind, 2.0, 0.5, 0.5, 1.0)
    one = 1 + 2 / (sqrt(first) + 1)
    assert round_of(server, optimizer, w=3.0) == pytest.approx(one)
    assert round_of(server, optimizer, w=server.state["w"] + 1) == pytest.approx(one + 2 / (sqrt(second) + 1))
    assert (server.memory[FIRST + "w"].item(), server.memory[SECOND + "w"].item()) == pytest.approx((1.0, second))


@pytest.mark.parametrize("kind", USED)
def test_running_statistics_and_integers_are_as_the_average_leaves_them(kind: str) -> None:
    server = model(**{"norm.running_mean": torch.tensor(1.0), "count": torch.tensor(4)})
    round_of(server, ServerOptimizer(kind), w=3.0, count=9, **{"norm.running_mean": 2.0})
    assert (server.state["norm.running_mean"].item(), server.state["count"].item()) == (2.0, 4)
    assert {name.rpartition("/")[2] for name in server.memory} == {"w"}


@pytest.mark.parametrize("kind", USED)
def test_a_round_without_samples_leaves_model_and_memory(kind: str) -> None:
    server, optimizer = model(), ServerOptimizer(kind)
    optimizer.around(MeanAggregator(server, dict(server.state), lambda *_: 0.0, 1.0), server).commit()
    assert (server.state["w"].item(), server.memory) == (1.0, {})


ROUNDS = Rounds(rounds=3, evaluate_every=0)


@pytest.mark.parametrize("name", cases(sorted({"fedavg", "feddra", "scaffold", "pms-fm", "fednova"} & METHODS.keys())))
def test_momentum_without_memory_at_a_rate_of_1_is_the_average(name: str) -> None:
    plain, momentum = (
        World(small(METHODS[name]), rounds=rounds, training=ADAMW).run().state
        for rounds in (ROUNDS, replace(ROUNDS, server_optimizer="momentum", server_beta1=0.0))
    )
    same_bytes(plain, momentum)


@pytest.mark.parametrize(("kind", "averaging"), [("momentum", "mean"), ("adam", "median"), ("yogi", "mean")])
def test_a_run_that_was_stopped_ends_with_the_same_bytes(tmp_path: Path, kind: str, averaging: str) -> None:
    rounds = replace(ROUNDS, server_optimizer=kind, averaging=averaging)
    stopped = World(
        FedAvg(local_steps=2), rounds=replace(rounds, rounds=1), folder=tmp_path, model=lambda: Toy(norm=True)
    )
    stopped.run()
    resumed, whole = replace(stopped, rounds=rounds).run(), replace(stopped, rounds=rounds, folder=None).run()
    same_bytes(resumed.state, whole.state)
    same_bytes(resumed.memory, whole.memory)


@pytest.mark.parametrize("name", ["local", "creamfl"])
def test_it_is_refused_where_nothing_is_averaged(name: str) -> None:
    with pytest.raises(ValueError, match=r"averages no tensors of the model; rounds.server_optimizer=adam"):
        World(small(METHODS[name]), rounds=replace(ROUNDS, server_optimizer="adam")).run()


def test_it_is_refused_where_heads_are_solved_for() -> None:
    with pytest.raises(ValueError, match="OneRoundCCA's heads are solved for"):
        override(presets.get("one-round-cca"), "rounds.server_optimizer", "momentum")
