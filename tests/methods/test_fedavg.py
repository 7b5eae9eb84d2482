"""FedAvg's two means, by hand."""

from __future__ import annotations

import torch
from support.toy import World, aggregate, clone, same_bytes

from fedvlp.core.method import Method
from fedvlp.core.server_state import Server
from fedvlp.core.types import Broadcast, Update
from fedvlp.federation.loop import Rounds
from fedvlp.methods import FedAvg


def aggregated(method: Method, *updates: tuple[int, float]) -> float:
    """The model after updates of (samples, value)."""
    server = Server(tuple("abc"[: len(updates)]), {"image_head.bias": torch.tensor([7.0])})
    stream = [
        Update(site, 0, "train", samples, {"image_head.bias": torch.tensor([value])})
        for site, (samples, value) in zip("abc", updates, strict=False)
    ]
    aggregate(method, server, stream, "train")
    return server.state["image_head.bias"].item()


def test_samples_by_hand() -> None:
    """(10*1 + 30*5) / 40 = 4."""
    assert aggregated(FedAvg(), (10, 1.0), (30, 5.0)) == 4.0


def test_uniform_by_hand() -> None:
    """(1 + 5) / 2 = 3, whatever the samples; a site without samples does not count: (1 + 5)/2 again."""
    assert aggregated(FedAvg(weighting="uniform"), (10, 1.0), (30, 5.0)) == 3.0
    assert aggregated(FedAvg(weighting="uniform"), (10, 1.0), (30, 5.0), (0, 99.0)) == 3.0


def test_a_round_is_the_mean_of_what_the_sites_trained() -> None:
    world = World(FedAvg(local_steps=3), rounds=Rounds(rounds=1, evaluate_every=0))
    start = world.server().state
    trained = {site: clone(world.site(site).handle(Broadcast(0, "train", start)).state) for site in "abc"}
    for name, tensor in world.run().state.items():
        by_hand = sum(n * trained[site][name].double() for site, n in (("a", 8), ("b", 12), ("c", 16))) / 36
        assert torch.allclose(tensor.double(), by_hand, rtol=0, atol=1e-7), name


def test_fedavg_is_the_base_class() -> None:
    same_bytes(World(FedAvg(local_steps=2)).run().state, World(Method(local_steps=2)).run().state)
