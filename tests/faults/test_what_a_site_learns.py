"""What a site is sent of the others' work: means over sites, and with two sites therefore the other's update."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.cases import cases
from support.laboratory import METHODS
from support.toy import Recorder, World, clone, raw, small, three_sites

from fedvlp.core.types import Broadcast, Reply, Update
from fedvlp.federation.loop import Rounds
from fedvlp.methods import FedAvg

ROUNDS = Rounds(rounds=3, evaluate_every=1)


@pytest.mark.parametrize("name", cases([name for name in METHODS if not METHODS[name].pooled], seconds=1))
def test_no_site_is_sent_what_another_site_sent(name: str) -> None:
    """No tensor that goes to a site has the bytes of one that another site sent before."""
    world = World(small(METHODS[name]), rounds=ROUNDS)
    answers: list[tuple[str, Update]] = []

    def noted(site: str, message: Broadcast, reply: Reply) -> Reply:
        if isinstance(reply, Update):
            answers.append((site, replace(reply, state=clone(reply.state), aux=clone(reply.aux))))
        return reply

    recorder = Recorder(world, noted)
    world.run(recorder)
    known = {raw(tensor) for tensor in world.server().state.values()}  # what all had before the run
    sent_by = {
        site: {raw(t) for who, update in answers if who == site for t in (*update.state.values(), *update.aux.values())}
        for site in "abc"
    }
    assert any(sent_by.values()) or name == "local"
    for site, message in recorder.sent:
        of_others = set().union(*(sent for other, sent in sent_by.items() if other != site)) - sent_by[site] - known
        for tensor_name, tensor in {**message.state, **message.aux}.items():
            assert tensor.numel() < 2 or raw(tensor) not in of_others, (site, tensor_name)


def test_of_two_sites_each_can_tell_the_others_update() -> None:
    """The mean of two less one's own half is the other's: so it is said in PRIVACY.md."""
    data = {name: pairs for name, pairs in three_sites().items() if name != "c"}
    world = World(FedAvg(local_steps=2), data, rounds=replace(ROUNDS, rounds=1, clip_to_median=0.0, max_share=1.0))
    recorder = Recorder(world)
    mean = world.run(recorder).state
    own, other = (next(update for site, update in recorder.replies if site == name and update.state) for name in "ab")
    total = own.num_samples + other.num_samples
    for name, tensor in other.state.items():
        told = (mean[name] * total - own.state[name] * own.num_samples) / other.num_samples
        torch.testing.assert_close(told, tensor, rtol=0, atol=1e-5)
