"""FedU and FedEMA (spec 9): the target network stays, predictor or weights are the site's own where they say."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.films import BYOL, MODEL, Films, sites, world
from support.toy import ADAMW, Recorder, Toy, World, clone, differs, same_bytes

from fedvlp.core.client import PREDICTOR, TARGET, Client
from fedvlp.core.method import Method
from fedvlp.core.types import Broadcast, State
from fedvlp.federation.exchange import SequentialExchange
from fedvlp.federation.loop import Rounds
from fedvlp.methods import FedAvg, Local
from studies.rivals import BYOLConfig, FedEMA, FedU
from studies.rivals.fedema import OWN, SCALE
from studies.rivals.local_target import DIVERGENCE, divergence

pytestmark = pytest.mark.slow(seconds=5)

METHODS = [FedU(local_steps=1), FedEMA(local_steps=1)]


def named(method: Method) -> str:
    return type(method).__name__


def without(state: State, *prefixes: str) -> State:
    return {name: tensor for name, tensor in state.items() if not name.startswith(prefixes)}


def under(state: State, prefix: str) -> State:
    return {name: tensor for name, tensor in state.items() if name.startswith(prefix)}


def moved(state: State) -> State:
    """Other weights, as of another round."""
    return {name: t + 0.25 if t.is_floating_point() else t for name, t in state.items()}


def second_round(method: Method) -> tuple[Client, State, State, State]:
    """A site that has trained once receives other weights: client, its memory, what it had, what it received."""
    one = world(method, BYOL)
    server = one.server()
    method.start(server)
    site = one.site("a")
    trained = clone(site.handle(Broadcast(0, "train", server.state)).state)
    client = site.client
    client.memory = clone(site.memory.newest())
    received = moved(trained)
    method.receive(client, Broadcast(1, "train", received))
    return client, client.memory, trained, received


# The target network


@pytest.mark.parametrize("method", METHODS, ids=named)
def test_the_target_network_travels_in_neither_direction(method: Method) -> None:
    """And each site's own is there again in the next round, where it goes on following."""
    one = world(method, BYOL)
    spy = Recorder(one)
    server = one.run(spy)
    tensors = [server.state, *(m.state for _, m in spy.sent), *(r.state for _, r in spy.replies)]
    assert len(tensors) == 9, "two rounds and the last evaluation, which sites do not answer with weights"
    assert all(under(state, TARGET) == {} for state in tensors)
    assert all(under(state, PREDICTOR) for state in tensors[:5])


@pytest.mark.parametrize("method", METHODS, ids=named)
def test_a_sites_target_is_its_own_from_round_to_round(method: Method) -> None:
    client, memory, _, received = second_round(method)
    same_bytes(under(clone(client.state()), TARGET), under(memory, TARGET))
    online = {n.removeprefix("image_"): t for n, t in received.items() if n.startswith("image_encoder")}
    assert differs({n: client.state()[TARGET + n] for n in online}, online)


@pytest.mark.parametrize("method", METHODS, ids=named)
def test_a_site_that_has_not_trained_starts_with_a_target_that_is_the_received_model(method: Method) -> None:
    one = world(method, BYOL)
    client, received = one.client("a"), moved(without(one.server().state, TARGET))
    method.receive(client, Broadcast(3, "train", received))
    state = client.state()
    for module in ("encoder", "alignment"):
        for name, tensor in under(state, f"{TARGET}{module}.").items():
            assert torch.equal(tensor, received["image_" + name.removeprefix(TARGET)]), name
    for name, tensor in under(state, TARGET + "projector.").items():
        assert torch.equal(tensor, received["objective." + name.removeprefix(TARGET)]), name


def test_with_a_target_that_never_moves_they_are_fedavg_bit_for_bit() -> None:
    """Decay 1: all target networks are the initial one, whether they travel or not."""
    still = BYOLConfig(hidden=16, dim=8, decay=1.0)
    expected = without(world(FedAvg(local_steps=1), still).run().state, TARGET)
    for method in (FedU(local_steps=1, threshold=float("inf")), FedEMA(local_steps=1, scale=0.0)):
        same_bytes(world(method, still).run().state, expected)
    assert differs(world(FedEMA(local_steps=1), still).run().state, expected)


def test_the_first_round_is_fedavgs() -> None:
    rounds = Rounds(rounds=1, evaluate_every=0)
    expected = without(world(FedAvg(local_steps=2), BYOL, rounds=rounds).run().state, TARGET)
    for method in (FedU(local_steps=2), FedEMA(local_steps=2)):
        same_bytes(world(method, BYOL, rounds=rounds).run().state, expected)


def test_fedu_without_predictor_and_target_is_fedavg_bit_for_bit() -> None:
    worlds: Iterable[World] = (
        World(method, training=ADAMW, model=lambda: Toy(norm=True, dropout=0.2))
        for method in (FedU(local_steps=2, threshold=0.0), FedAvg(local_steps=2), FedEMA(local_steps=2, scale=0.0))
    )
    fedu, fedavg, fedema = (one.run().state for one in worlds)
    same_bytes(fedu, fedavg)
    same_bytes(fedema, fedavg)


# The divergence


def test_the_divergence_by_hand() -> None:
    """All parameters but the predictor's moved by 0.1: a matrix of n values by 0.1 sqrt(n); vectors do not count."""
    client = world(FedU(), BYOL).client("a")
    start = clone(client.state())
    with torch.no_grad():
        for name, parameter in client.parameters():
            parameter += 7.0 if name.startswith(PREDICTOR) else 0.1
    sizes = [p.numel() for n, p in client.parameters() if p.ndim > 1 and not n.startswith(PREDICTOR)]
    assert len(sizes) > 10
    expected = 0.1 * sum(size**0.5 for size in sizes) / len(sizes)
    assert divergence(client, start).item() == pytest.approx(expected, rel=1e-4)
    assert divergence(client, clone(client.state())).item() == 0


@pytest.mark.parametrize("method", METHODS, ids=named)
def test_what_is_remembered_is_the_divergence_of_the_last_training(method: Method) -> None:
    """From the weights that the site started from, which FedEMA's are not those that it received."""
    one = world(method, BYOL, data={"a": Films(0, 8)})
    starts: list[State] = []

    class Spy(type(method)):  # type: ignore[misc]
        def receive(self, client: Client, message: Broadcast) -> None:
            super().receive(client, message)
            starts.append(clone(client.state()))

    one.method = Spy(local_steps=1)
    site = one.site("a")
    server = one.server()
    one.method.start(server)
    state = site.handle(Broadcast(0, "train", server.state)).state
    received = moved(clone(state))
    site.handle(Broadcast(1, "train", received))
    seen = site.memory.newest()[DIVERGENCE].item()
    assert seen == pytest.approx(divergence(site.client, starts[1]).item(), rel=1e-6)
    from_received = divergence(site.client, received).item()
    assert (seen == pytest.approx(from_received, rel=1e-3)) == isinstance(method, FedU)


# FedU


@pytest.mark.parametrize(("threshold", "own"), [(0.0, True), (float("inf"), False)])
def test_fedu_takes_the_sites_own_predictor_where_it_diverges(threshold: float, own: bool) -> None:
    """Spec 9: threshold 0 -> always the local predictor, inf -> always the global one; the online network is global."""
    client, _, trained, received = second_round(FedU(local_steps=1, threshold=threshold))
    state = clone(client.state())
    same_bytes(under(state, PREDICTOR), under(trained if own else received, PREDICTOR))
    same_bytes(without(state, PREDICTOR, TARGET), without(received, PREDICTOR))


def test_fedu_decides_by_its_own_divergence() -> None:
    """Just above the divergence of the round before: global; at it: the site's own."""
    _, memory, _, _ = second_round(FedU(local_steps=1))
    measured = memory[DIVERGENCE].item()
    for threshold, own in ((measured * 1.0001, False), (measured, True)):
        client, _, trained, received = second_round(FedU(local_steps=1, threshold=threshold))
        same_bytes(under(clone(client.state()), PREDICTOR), under(trained if own else received, PREDICTOR))


# FedEMA


def assert_same(tensor: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    torch.testing.assert_close(tensor, expected, msg=lambda said: f"{name}: {said}")


def test_fedema_merges_by_the_sites_divergence() -> None:
    """lambda = 0.7 / d of the first round, so mu = 0.7 in the second: 0.7 own + 0.3 global, the predictor as well."""
    client, memory, trained, received = second_round(FedEMA(local_steps=1))
    assert memory[SCALE].item() == pytest.approx(0.7 / memory[DIVERGENCE].item())
    state = client.state()
    for name, tensor in received.items():
        assert_same(state[name], 0.7 * trained[name] + 0.3 * tensor, name)
    assert any(name.startswith(OWN + PREDICTOR) for name in memory)


@pytest.mark.parametrize(("scale", "share"), [(0.0, 0.0), (0.5, None), (1e9, 1.0)])
def test_fedema_with_a_lambda_that_is_given(scale: float, share: float | None) -> None:
    """Spec 9: lambda 0 -> the received model, a large one -> the site's own; between them mu = lambda d."""
    client, memory, trained, received = second_round(FedEMA(local_steps=1, scale=scale))
    share = scale * memory[DIVERGENCE].item() if share is None else share
    assert 0 <= share <= 1
    state = client.state()
    for name, tensor in received.items():
        assert_same(state[name], share * trained[name] + (1 - share) * tensor, name)


def test_lambda_stays_that_of_the_first_round() -> None:
    one = world(FedEMA(local_steps=1), BYOL, rounds=Rounds(rounds=3, evaluate_every=0))
    kept = []
    site = one.site("a")
    server = one.server()
    one.method.start(server)
    state = server.state
    for round in range(3):
        state = clone(site.handle(Broadcast(round, "train", state)).state)
        kept.append(site.memory.newest()[SCALE].item())
    assert kept[0] == kept[1] == kept[2]


def test_with_a_large_lambda_a_site_is_alone() -> None:
    """Spec 9: lambda = inf -> local only: the same bytes as Local's, over three rounds, the target network's too."""
    rounds = Rounds(rounds=3, evaluate_every=0)
    memories: list[State] = []
    for method in (FedEMA(local_steps=1, scale=1e12), Local(local_steps=1)):
        one = world(method, BYOL, rounds=rounds)
        made: dict[str, Any] = {}

        def site(name: str, one: World = one, made: dict[str, Any] = made) -> Any:
            return made.setdefault(name, one.site(name))

        one.run(SequentialExchange(site))
        memories.append(made["a"].memory.newest())
    merged, alone = memories
    own = {name.removeprefix(OWN): tensor for name, tensor in merged.items() if name.startswith(OWN)}
    same_bytes(own | under(merged, TARGET), {n: t for n, t in alone.items() if n in own or n.startswith(TARGET)})
    assert len(own) > 20


def test_a_site_that_keeps_its_normalisation_keeps_its_target() -> None:
    """Batch normalisation in the heads stays at the sites, the target network as well: a run of two rounds."""
    batch = replace(MODEL, head_norm="batch")
    for method in METHODS:
        one = World(
            method, sites(), ADAMW, Rounds(rounds=2, evaluate_every=0), model=lambda: batch.build(0),
            objective=lambda: BYOL.build(batch.build(0), 0), norm_statistics="site",
        )  # fmt: skip
        history = one.run().history
        assert all(record["dropped"] == {} for record in history), history


# What is refused
