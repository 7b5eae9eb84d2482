"""Local: nothing travels, every site goes its own way from its own memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.toy import ADAMW, Toy, World, clone, same_bytes, three_sites

from fedvlp.core.client import Client
from fedvlp.core.server_state import Server
from fedvlp.core.types import EVALUATE, Broadcast
from fedvlp.federation.exchange import SequentialExchange
from fedvlp.federation.loop import Rounds
from fedvlp.methods import Centralized, FedAvg, Local

LONG = Rounds(rounds=4, evaluate_every=0)


def test_nothing_travels_and_the_global_model_stays(tmp_path: Path) -> None:
    world = World(Local(local_steps=2), folder=tmp_path)
    server = world.run()
    same_bytes(server.state, world.server().state)
    assert all(record["bytes"]["bytes_up"] == 0 for record in server.history)
    update = world.site("a").handle(Broadcast(0, "train", server.state))
    assert (update.state, update.aux) == ({}, {})


@pytest.mark.parametrize("other", [FedAvg, Centralized])
def test_with_one_site_local_fedavg_and_centralized_are_one(tmp_path: Path, other: type[FedAvg]) -> None:
    """Each site of Local is FedAvg (and Centralized) with that site alone; integers stay the server's in FedAvg."""
    options = {"training": ADAMW, "rounds": LONG, "model": lambda: Toy(norm=True, dropout=0.2)}
    local = World(Local(local_steps=3), folder=tmp_path, **options)
    local.run()
    for site, data in three_sites().items():
        alone = World(other(local_steps=3), {site: data}, **options).run().state
        kept = local.site(site).memory.newest()
        floats = {name for name, tensor in alone.items() if tensor.is_floating_point()}
        same_bytes({n: kept[n] for n in floats}, {n: alone[n] for n in floats})
        assert kept.keys() == alone.keys()


def test_a_site_is_measured_with_its_own_model() -> None:
    def evaluate(client: Client, splits: tuple[str, ...]) -> dict[str, float]:
        return {"bias": float(client.model.text_head.bias.double().sum())}

    world = World(Local(local_steps=2), rounds=Rounds(rounds=2, evaluate_every=1), evaluate=evaluate)
    sites: dict = {}

    def make(name: str):
        return sites.setdefault(name, world.site(name))

    server = world.run(SequentialExchange(make))
    first, *_, last = server.history
    initial = float(world.server().state["text_head.bias"].double().sum())
    assert [m["bias"] for m in first["sites"].values()] == pytest.approx([initial] * 3)
    assert last["phase"] == EVALUATE
    for name, site in sites.items():
        trained = site.memory.newest()["text_head.bias"].double().sum().item()
        assert last["sites"][name]["bias"] == pytest.approx(trained)
    assert len({round(m["bias"], 9) for m in last["sites"].values()}) == 3


def test_a_site_that_was_away_goes_on_from_where_it_was(tmp_path: Path) -> None:
    """b trains in rounds 0 and 2: the same as two rounds in which it was always there, but for their seeds."""
    world = World(Local(local_steps=2), folder=tmp_path)
    site, server = world.site("b"), world.server()
    site.handle(Broadcast(0, "train", server.state))
    after_0 = clone(site.memory.newest())
    stranger = {name: torch.full_like(t, 9.0) for name, t in server.state.items()}
    site.handle(Broadcast(2, "train", stranger))  # whatever the server sends does not matter
    other = World(FedAvg(local_steps=2), {"b": world.data["b"]}).site("b")
    trained = other.handle(Broadcast(2, "train", after_0)).state
    same_bytes(site.memory.newest(), clone(trained))


def test_server_needs_no_memory() -> None:
    server = Server(("a",), {})
    Local().start(server)
    assert server.memory == {}
