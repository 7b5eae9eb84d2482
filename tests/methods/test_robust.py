"""Robust site weights: they move towards hard sites inside the ball, act as they say, and nobody can capture them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from nvflare.apis.fl_context import FLContext
from support.toy import SGD, Pairs, World, aggregate, clone, pairs, same_bytes
from torch import Tensor

from fedvlp.core.client import NoLossError
from fedvlp.core.objective import ObjectiveModule
from fedvlp.core.server_state import Server
from fedvlp.core.types import Batch, Broadcast, Failure, Reply, Update, VLOutput
from fedvlp.federation.exchange import SequentialExchange
from fedvlp.federation.loop import Federation, QuorumLostError, Rounds
from fedvlp.flare.privacy_filters import AllowMetrics
from fedvlp.methods import FedAvg, FedDRA, FedRGB
from fedvlp.methods.math.dro import divergence
from fedvlp.methods.robust import LOSSES, WEIGHTS, RobustWeights, contrastive

FIVE = (2.0, 1.0, 1.5, 0.5, 3.0)
TOY = {"local_steps": 2, "dro_batch": 4}


def server(count: int = 5, round: int = 1, **options: Any) -> tuple[RobustWeights, Server]:
    method = RobustWeights(**options)
    one = Server(tuple("abcdefghijklmnopqrstuvwxyz"[:count]), {}, round=round)
    method.start(one)
    return method, one


def told(method: RobustWeights, one: Server, losses: dict[str, float] | tuple[float, ...]) -> list[float]:
    """The weights after a phase in which the sites reported these losses."""
    losses = losses if isinstance(losses, dict) else dict(zip(one.sites, losses, strict=True))
    updates = [Update(s, one.round, "train", 1, scalars={"loss": loss}) for s, loss in sorted(losses.items())]
    aggregate(method, one, updates, "train")
    return one.memory[WEIGHTS].tolist()


def test_the_weights_by_hand() -> None:
    """gamma 0.5 from uniform: e^(0.5 v)/sum; rho 1 does not bind, rho 0.1 does."""
    free = told(*server(gamma=0.5, rho=1.0), FIVE)
    assert free == pytest.approx([0.221906, 0.134593, 0.172820, 0.104821, 0.365861], abs=1e-6)
    bound = told(*server(gamma=0.5, rho=0.1), FIVE)
    assert bound == pytest.approx([0.221361, 0.136219, 0.173496, 0.107187, 0.361737], abs=1e-6)
    kl = told(*server(gamma=1.0, rho=0.1, divergence="kl", projection="kl"), FIVE)
    assert kl == pytest.approx([0.221919, 0.133829, 0.172334, 0.103927, 0.367991], abs=1e-6)


def test_weights_start_uniform_and_hard_sites_gain() -> None:
    method, one = server(gamma=0.5, rho=10.0)
    assert one.memory[WEIGHTS].tolist() == [0.2] * 5
    first = told(method, one, FIVE)
    second = told(method, one, FIVE)
    order = sorted(range(5), key=FIVE.__getitem__)
    assert sorted(range(5), key=first.__getitem__) == sorted(range(5), key=second.__getitem__) == order
    assert second[4] > first[4] > 0.2 > first[3] > second[3]


def test_round_0_does_not_move_them() -> None:
    """The initial model's loss says nothing of a site; and it is not remembered either."""
    method, one = server(round=0)
    assert told(method, one, FIVE) == [0.2] * 5
    assert one.memory[LOSSES].isnan().all()


def test_a_phase_without_losses_does_not_move_them() -> None:
    method, one = server()
    before = told(method, one, FIVE)
    aggregate(method, one, [Update("a", 1, "train", 1, metrics={"loss/contrastive": 9.0})], "train")
    assert one.memory[WEIGHTS].tolist() == before


def test_rho_0_is_exactly_1_for_any_number_of_sites() -> None:
    """N * (1/N) is not 1.0 for N = 49."""
    for count in range(2, 61):
        method, one = RobustWeights(rho=0.0), Server(tuple(f"s{index:02d}" for index in range(count)), {}, round=1)
        method.start(one)
        told(method, one, {site: float(index) for index, site in enumerate(one.sites)})
        assert {method.multiplier(one, site) for site in one.sites} == {1.0}, count


def test_the_multiplier_is_n_times_the_weight() -> None:
    method, one = server(gamma=0.5, rho=1.0)
    weights = told(method, one, FIVE)
    assert [method.multiplier(one, site) for site in one.sites] == pytest.approx([5 * w for w in weights])


def test_a_site_without_a_loss_keeps_its_weight() -> None:
    """With no ball to project onto, the weight of the silent site is untouched and the others share the rest."""
    method, one = server(gamma=0.5, rho=math.inf)
    weights = told(method, one, {"a": 2.0, "b": 1.0, "d": 0.5, "e": 3.0})
    assert weights[2] == 0.2
    assert sum(weights) == pytest.approx(1.0)
    assert weights[4] > weights[0] > weights[1] > weights[3]


def test_a_site_that_is_missing_counts_with_its_last_loss() -> None:
    method, one = server(gamma=0.5, rho=1.0)
    told(method, one, FIVE)
    other = Server(one.sites, {}, dict(one.memory), round=1)
    absent = told(method, one, {"a": 2.0, "b": 1.0, "c": 1.5, "d": 0.5})
    assert absent == told(method, other, FIVE)


@pytest.mark.parametrize("claim", [3.5, 100.0, 1e9, 1e300])
def test_a_claimed_loss_counts_as_the_cap_at_most(claim: float) -> None:
    capped = told(*server(rho=10.0, loss_cap=3.0), (*FIVE[:4], claim))
    assert capped == told(*server(rho=10.0, loss_cap=3.0), FIVE)
    assert capped != told(*server(rho=10.0), (*FIVE[:4], claim))


def test_nobody_captures_the_weights() -> None:
    """After many rounds of the same claim: on the simplex, in the ball, and max w below its bound in the ball.

    chi2: (N/2)|w - u|^2 <= rho gives max w <= 1/N + sqrt(2 rho (N - 1))/N (spec 3.2: 0.3789 for N = 5, rho = 0.1).
    """
    for claim in [1e9, -1e9, 0.0]:
        for rho in [0.01, 0.1, 1.0]:
            method, one = server(rho=rho, gamma=10.0)
            for _ in range(30):
                weights = told(method, one, (*FIVE[:4], claim))
            assert sum(weights) == pytest.approx(1.0)
            assert min(weights) >= 0
            assert divergence(weights) <= rho + 1e-9
            assert max(weights) <= 0.2 + math.sqrt(2 * rho * 4) / 5 + 1e-9


def claims(loss: float) -> Federation:
    """Sites a and b of Local-like emptiness; b reports ``loss`` in round 1."""

    def exchange(messages: Mapping[str, Broadcast]) -> Iterator[tuple[str, Update]]:
        for site, message in messages.items():
            value = loss if (site, message.round) == ("b", 1) else 1.0
            yield site, Update(site, message.round, message.phase, 1, scalars={"loss": value})

    rounds = Rounds(rounds=2, evaluate_every=0)
    return Federation(RobustWeights(rho=math.inf), Server(("a", "b"), {}), rounds, exchange)


@pytest.mark.parametrize("loss", [math.inf, -math.inf])
def test_a_loss_that_is_not_finite_drops_the_update_and_keeps_the_weight(loss: float) -> None:
    run = claims(loss)
    run.run()
    assert list(run.server.history[1]["dropped"]) == ["b"]
    assert "scalar 'loss'" in run.server.history[1]["dropped"]["b"]
    assert run.server.memory[WEIGHTS].tolist() == [0.5, 0.5]
    assert run.server.memory[LOSSES].isnan().tolist() == [False, True]


def test_the_weights_are_logged_in_every_record() -> None:
    run = claims(3.0)
    run.run()
    first, second = (record["memory"][WEIGHTS] for record in run.server.history)
    assert first == [0.5, 0.5]
    assert second == run.server.memory[WEIGHTS].tolist()
    assert second[1] > second[0]


@pytest.mark.parametrize("action", ["lr", "loss", "aggregate"])
def test_how_the_weights_act(action: str) -> None:
    """Weights (0.25, 0.75): N w = (0.5, 1.5) goes to the site as lr_scale or loss_scale, or weighs its update."""
    method, one = server(2, dro_apply=action)
    one.phase = "train"
    one.memory[WEIGHTS] = torch.tensor([0.25, 0.75], dtype=torch.float64)
    sent = [method.broadcast(one, site) for site in "ab"]
    factors = [(message.lr_scale, message.loss_scale) for message in sent]
    shares = [method.weight(one, Update(site, 1, "train", 10)) for site in "ab"]
    if action == "aggregate":
        assert factors == [(1.0, 1.0), (1.0, 1.0)]
        assert shares == [0.5, 1.5]
        assert method.weight(one, Update("a", 1, "train", 0)) == 0.0
    else:
        assert factors == ([(0.5, 1.0), (1.5, 1.0)] if action == "lr" else [(1.0, 0.5), (1.0, 1.5)])
        assert shares == [1.0, 1.0]


def test_aggregate_by_hand() -> None:
    """(0.5*2 + 1.5*6)/2 = 5."""
    method, one = server(2, dro_apply="aggregate", round=0)
    one.state = {"w": torch.zeros(1)}
    one.memory[WEIGHTS] = torch.tensor([0.25, 0.75], dtype=torch.float64)
    updates = [Update(site, 0, "train", 9, {"w": torch.tensor([value])}) for site, value in (("a", 2.0), ("b", 6.0))]
    aggregate(method, one, updates, "train")
    assert one.state["w"].item() == 5.0


@pytest.mark.parametrize("action", ["lr", "loss", "aggregate"])
def test_rho_0_is_fedavg_with_uniform_weights_bit_for_bit(action: str) -> None:
    robust = World(RobustWeights(rho=0.0, dro_apply=action, **TOY), rounds=Rounds(rounds=3, evaluate_every=0)).run()
    plain = World(FedAvg(local_steps=2, weighting="uniform"), rounds=Rounds(rounds=3, evaluate_every=0)).run()
    same_bytes(robust.state, plain.state)


def test_the_hard_site_gains_over_a_real_run() -> None:
    """Site c's texts carry nothing of its images, and its batches are as large: its loss stays highest."""
    data: dict[str, Pairs] = {}
    for index, site in enumerate("abc"):
        image, _ = pairs(index, 64).content["train"]
        text = image[:, :5].clone() if site != "c" else pairs(9, 64).content["train"][1]
        data[site] = Pairs(image, text)
    method = RobustWeights(rho=1.0, gamma=0.5, local_steps=10, dro_batch=8, dro_fraction=1.0)
    run = World(method, data, replace(SGD, batch_size=16), Rounds(rounds=6, evaluate_every=0)).run()
    weights = run.memory[WEIGHTS].tolist()
    assert weights[2] > 0.36 > max(weights[:2])


def test_the_probe_by_hand() -> None:
    """All 12 records in batches of 4: the mean of three batch losses of the received model, in eval mode.

    Its standard error is sqrt(sum_b (v_b - v)^2 / 2 / 3), v_b being the loss of a batch.
    """
    method = RobustWeights(dro_fraction=1.0, dro_batch=4)
    world = World(method)
    client = world.client("b")
    client.model.eval()
    seen: list[torch.Tensor] = []
    real = client.data.batches
    client.data.batches = lambda *a, **k: (seen.append(b["row"]) or b for b in real(*a, **k))  # type: ignore
    with torch.no_grad():
        found = method.probe(client, Broadcast(0, "train", {}))
        losses = [
            client.objective(client.model(b), b)["contrastive"].item()
            for b in (client.data._batch("train", rows) for rows in list(seen))  # type: ignore[attr-defined]
        ]
    assert [len(rows) for rows in seen] == [4, 4, 4]
    assert sorted(torch.cat(seen).tolist()) == list(range(12))
    mean = sum(losses) / 3
    assert found["loss"] == pytest.approx(mean)
    assert found["loss_error"] == pytest.approx(math.sqrt(sum((v - mean) ** 2 for v in losses) / 6), rel=1e-4)


def test_the_probe_uses_a_fixed_part_in_whole_batches() -> None:
    """floor(fraction * count) records, at most so many, but four batches where there are so many; no short last one."""
    for count, fraction, most, rows in [
        (4, 0.1, 0, 4),
        (12, 0.1, 0, 12),
        (15, 0.1, 0, 12),
        (19, 0.1, 0, 16),
        (100, 0.1, 0, 16),
        (100, 0.5, 0, 48),
        (103, 1.0, 0, 100),
        (100, 1.0, 30, 28),
        (100, 0.2, 30, 20),
        (100, 1.0, 3, 16),
        (20, 1.0, 30, 20),
    ]:
        method = RobustWeights(dro_fraction=fraction, dro_records=most, dro_batch=4)
        drawn = []
        for round in (0, 5):
            torch.manual_seed(round)
            client = World(method, {"a": pairs(0, count)}).client("a")
            seen: list[int] = []
            real = client.data.batches
            client.data.batches = lambda *a, real=real, seen=seen, **k: (  # type: ignore
                seen.extend(b["row"].tolist()) or b for b in real(*a, **k)
            )
            with torch.no_grad():
                method.probe(client, Broadcast(round, "train", {}))
            drawn.append(seen)
        assert drawn[0] == drawn[1]
        assert len(drawn[0]) == len(set(drawn[0])) == rows


def test_a_site_smaller_than_a_probe_batch_knows_no_loss() -> None:
    """A smaller batch would have a smaller loss: InfoNCE contains log B."""
    method = RobustWeights(dro_batch=32, local_steps=1)
    known = method.probe(World(method).client("a"), Broadcast(0, "train", {}))
    assert known.keys() == {"loss"}
    assert math.isnan(known["loss"])
    run = World(method, rounds=Rounds(rounds=3, evaluate_every=0)).run()
    assert run.memory[WEIGHTS].tolist() == [1 / 3] * 3
    assert all(set(record["sites"]) == {"a", "b", "c"} for record in run.history)
    assert not any("probe/loss" in metrics for record in run.history for metrics in record["sites"].values())


def test_a_site_of_one_probe_batch_sends_its_loss() -> None:
    method = RobustWeights(dro_batch=8)
    client = World(method).client("a")
    assert client.data.num_train == 8
    with torch.no_grad():
        known = method.probe(client, Broadcast(0, "train", {}))
    assert known["loss"] > 0
    assert known.keys() == {"loss"}, "one batch says nothing of the spread"


def test_by_default_all_records_are_read() -> None:
    """Spec Z4; a tenth of 100 records was one batch of 8, whose spread is far above that of all."""
    method = RobustWeights(dro_batch=8)
    client = World(method, {"a": pairs(0, 100)}).client("a")
    with torch.no_grad():
        whole = method.probe(client, Broadcast(0, "train", {}))
        part = replace(method, dro_fraction=0.1).probe(client, Broadcast(0, "train", {}))
    assert 0 < whole["loss_error"] < part["loss_error"]


class Soft(ObjectiveModule):
    """Cross entropy against targets that are soft: its least value is ``least``."""

    def __init__(self, least: float) -> None:
        super().__init__()
        self.least = least

    def forward(self, output: VLOutput, batch: Batch) -> dict[str, Tensor]:
        assert output.image is not None
        return {"contrastive": output.image.square().sum() + self.least, "hard": output.image.sum() * 0 + 2.0}

    def entropy(self, output: VLOutput, batch: Batch) -> dict[str, Tensor]:
        return {"contrastive": torch.tensor(self.least)}


@pytest.mark.parametrize(("method", "hard"), [(FedDRA(dro_batch=4), 0.0), (FedRGB(dro_batch=4), 2.0)])
def test_the_entropy_of_a_sites_targets_makes_it_no_harder(method: RobustWeights, hard: float) -> None:
    """Spec Z4: v_i is CE - H(target). The cross entropy itself is 4 (unit vectors of 4 records) plus the entropy.

    FedRGB counts the contrastive loss twice (L_CL and L_task) and the other terms once.
    """
    found = []
    for least in (0.0, 1.5):
        world = World(method, objective=lambda least=least: Soft(least))  # type: ignore[misc]
        with torch.no_grad():
            found.append(method.probe(world.client("b"), Broadcast(0, "train", {}))["loss"])
    assert found == pytest.approx([4.0 + hard + 4.0 * (hard > 0)] * 2, rel=1e-6)


def test_the_standard_error_is_a_figure_for_people() -> None:
    """It is in the records of the run where v is, and is no input of the method."""
    run = World(RobustWeights(**TOY), rounds=Rounds(rounds=2, evaluate_every=0)).run()
    for record in run.history:
        assert {site for site, metrics in record["sites"].items() if metrics["probe/loss_error"] > 0} == {"a", "b", "c"}
    assert RobustWeights().probes() == ("loss",)


def test_what_else_is_in_memory_stays_and_the_tensors_of_before_are_not_written_to() -> None:
    """Who keeps the memory of before a phase, to go back to it, must find it unchanged."""
    method, one = server()
    one.memory["other"] = torch.ones(2)
    before = dict(one.memory)
    kept = clone(before)
    told(method, one, FIVE)
    assert one.memory.keys() == before.keys()
    same_bytes(before, kept)


def test_the_extreme_values_that_make_sense_are_taken() -> None:
    for right in ({"gamma": 0.0}, {"rho": 0.0}, {"rho": math.inf}, {"dro_fraction": 1.0}, {"dro_batch": 2}):
        RobustWeights(**right)
    assert RobustWeights(loss_cap=0.5).loss_cap == 0.5


@pytest.mark.parametrize(
    "method", [FedDRA(**TOY, align_steps=1), FedRGB(**TOY, aligner_steps=1)], ids=["feddra", "fedrgb"]
)
def test_a_hospital_that_lets_no_metric_leave_changes_no_weight(method: RobustWeights) -> None:
    """v_i is an input of the method, not a metric: with it missing, w would stay uniform and nobody would be told."""
    world = World(method, rounds=Rounds(rounds=3, evaluate_every=0))
    exchange, nothing = SequentialExchange(world.site), AllowMetrics(names=[], drop=True)

    def silenced(messages: Mapping[str, Broadcast]) -> Iterator[tuple[str, Reply]]:
        for site, update in exchange(messages):
            yield site, nothing.filtered(update, FLContext())  # type: ignore[arg-type]

    quiet, open_ = world.run(silenced), World(method, rounds=Rounds(rounds=3, evaluate_every=0)).run()
    assert all(metrics.keys() <= {"probe/loss"} for record in quiet.history for metrics in record["sites"].values())
    assert len(set(quiet.memory[WEIGHTS].tolist())) > 1
    assert quiet.memory[WEIGHTS].tolist() == open_.memory[WEIGHTS].tolist()
    same_bytes(quiet.state, open_.state)


def test_an_update_without_the_loss_is_refused_in_words() -> None:
    """As when a filter took it out: the run does not resume it with weights that never move."""
    world = World(FedDRA(**TOY, align_steps=1), rounds=Rounds(rounds=1, evaluate_every=0))
    exchange = SequentialExchange(world.site)

    def filtered(messages: Mapping[str, Broadcast]) -> Iterator[tuple[str, Reply]]:
        for site, update in exchange(messages):
            yield site, replace(update, scalars={})  # type: ignore[type-var]

    with pytest.raises(QuorumLostError, match="it lacks the scalar 'loss', which the method needs"):
        world.run(filtered)


def test_uniform_weights_need_no_loss() -> None:
    """So rho = 0 runs where no exact figure may leave a site, and spends nothing on it."""
    assert RobustWeights(rho=0.0).probes() == ()
    run = World(RobustWeights(rho=0.0, **TOY), rounds=Rounds(rounds=2, evaluate_every=0)).run()
    assert not any("probe/loss" in metrics for record in run.history for metrics in record["sites"].values())
    assert run.memory[LOSSES].isnan().all()


@pytest.mark.parametrize(
    ("method", "why"),
    [
        (FedAvg(local_steps=1), "the objective has no loss for this site's records: a modality is missing"),
        (FedDRA(align_steps=1, **TOY), "the objective has no contrastive loss for this site's records"),
        (FedRGB(aligner_steps=1, **TOY), "the objective has no contrastive loss for this site's records"),
    ],
)
def test_a_site_of_one_modality_is_left_out_in_words_that_may_leave_it(method: FedAvg, why: str) -> None:
    data = {name: pairs(index, 8) for index, name in enumerate("abc")}
    data["c"].modalities = ("image",)
    world, told = World(method, data, rounds=Rounds(rounds=1, evaluate_every=0)), []
    exchange = SequentialExchange(world.site)

    def noted(messages: Mapping[str, Broadcast]) -> Iterator[tuple[str, Reply]]:
        for site, reply in exchange(messages):
            told.extend([reply.public] if isinstance(reply, Failure) else [])
            yield site, reply

    assert world.run(noted).history[0]["dropped"].keys() == {"c"}
    assert told[0].startswith(f"NoLossError: {why}")


def test_what_the_objective_has_instead_of_a_contrast_is_named() -> None:
    with pytest.raises(NoLossError, match="are: bce, size; FedDRA and FedRGB need a contrastive one"):
        contrastive({"size": torch.ones(()), "bce": torch.ones(())})
