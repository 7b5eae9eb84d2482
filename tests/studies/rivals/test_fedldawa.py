"""FedLDAWA: a mean by hand, the oddities of the published rule, and what it leaves alone."""

from __future__ import annotations

import math

import pytest
import torch
from support.toy import ADAMW, Toy, World, aggregate, clone, differs, same_bytes
from torch import Tensor

from fedvlp.core.server_state import Server
from fedvlp.core.types import State, Update
from fedvlp.federation.loop import Rounds
from fedvlp.methods import FedAvg
from studies.rivals import FedLDAWA
from studies.rivals.fedldawa import divergence

pytestmark = pytest.mark.slow(seconds=5)

NAME = "image_head.weight"
LAYERWISE = FedLDAWA(plain_rounds=0)


def aggregated(reference: State, *sent: State, samples: tuple[int, ...] = (), round: int = 0) -> State:
    """The model after one update of each site."""
    server = Server(tuple("abc"[: len(sent)]), reference, round=round)
    counts = samples or (1,) * len(sent)
    stream = [Update(s, round, "train", n, state) for s, n, state in zip(server.sites, counts, sent, strict=True)]
    aggregate(LAYERWISE, server, stream, "train")
    return server.state


def single(*values: float) -> State:
    return {NAME: torch.tensor(values, dtype=torch.float32)}


def test_a_mean_by_hand() -> None:
    """The model is (1, 0). a sends (3, 4), cosine 0.6; b (1, 1), cosine 1 / sqrt 2; c (0, 2), which is orthogonal.

    (0.6 * 3 + 0.7071, 0.6 * 4 + 0.7071) / 3 = (0.83570, 1.03570): c adds nothing and counts all the same; samples do
    not count.
    """
    state = aggregated(single(1, 0), single(3, 4), single(1, 1), single(0, 2), samples=(1, 50, 9))
    half = math.sqrt(0.5)
    assert state[NAME].tolist() == pytest.approx([(1.8 + half) / 3, (2.4 + half) / 3])


def test_each_tensor_has_a_cosine_of_its_own() -> None:
    reference = {"a.weight": torch.tensor([1.0, 0.0]), "b.weight": torch.tensor([0.0, 1.0])}
    state = aggregated(reference, {name: torch.tensor([3.0, 4.0]) for name in reference})
    assert [t.tolist() for t in state.values()] == [pytest.approx([1.8, 2.4]), pytest.approx([2.4, 3.2])]


def test_sites_that_all_sent_the_model_back_leave_it_as_it_is() -> None:
    reference = clone(Toy(3).state_dict())
    same_bytes(aggregated(clone(reference), *(clone(reference) for _ in range(3))), reference)


def test_a_site_that_points_the_other_way_is_added_with_its_sign_turned() -> None:
    """-1 times -w is w: the published rule knows no opposition."""
    reference = single(1, 2, -2)
    same_bytes(aggregated(reference, single(-1, -2, 2), single(1, 2, -2)), reference)


def test_statistics_single_numbers_and_zeros_are_plain_means() -> None:
    """A scaled variance would be too small for its model; a zero has no direction. The counter stays."""
    names = "n.running_mean", "n.running_var", "objective.log_scale", "zero.bias", "n.num_batches_tracked"
    reference = dict(zip(names, (torch.tensor([1.0, 0.0]), torch.ones(2), torch.tensor(1.0), torch.zeros(2),
                                 torch.tensor(5)), strict=True))  # fmt: skip

    def sent(value: float) -> State:
        return {n: torch.full_like(t, value) for n, t in reference.items()}

    state = aggregated(reference, sent(-1.0), sent(4.0), samples=(9, 1))
    assert [state[name].flatten().tolist() for name in names] == [[1.5, 1.5], [1.5, 1.5], [1.5], [1.5, 1.5], [5]]


def test_a_site_without_samples_does_not_count() -> None:
    state = aggregated(single(1, 0), single(3, 4), single(9, 9), samples=(5, 0))
    assert state[NAME].tolist() == pytest.approx([1.8, 2.4])
    assert aggregated(single(1, 0), single(3, 4), samples=(0,))[NAME].tolist() == [1, 0]


def test_the_cosine_is_exact_over_blocks_and_at_most_1() -> None:
    """70,000 values are three blocks; ones and twos point the same way."""
    ones = torch.ones(70_000)
    assert divergence(ones, 2 * ones) == 1
    assert divergence(ones, -ones) == -1
    half = torch.cat([torch.ones(35_000), torch.zeros(35_000)])
    assert divergence(half, ones) == pytest.approx(math.sqrt(0.5))
    third = torch.full((7,), 1 / 3)
    assert divergence(third, third) <= 1
    tiny: Tensor = torch.full((4,), 1e-30)  # squares below float32
    assert divergence(tiny, ones[:4]) == pytest.approx(1)


def test_the_first_rounds_are_fedavg_s_bit_for_bit() -> None:
    def ended(method: FedAvg | FedLDAWA, rounds: int) -> State:
        limits = Rounds(rounds=rounds, evaluate_every=0)
        return World(method, training=ADAMW, rounds=limits, model=lambda: Toy(norm=True)).run().state

    settings = {"local_steps": 2, "plain_rounds": 2}
    same_bytes(ended(FedLDAWA(**settings), 2), ended(FedAvg(local_steps=2), 2))  # type: ignore[arg-type]
    assert differs(ended(FedLDAWA(**settings), 3), ended(FedAvg(local_steps=2), 3))  # type: ignore[arg-type]
    assert FedLDAWA().plain_rounds == 3, "as released: round index <= 2"
    with pytest.raises(ValueError, match="plain_rounds is -1"):
        FedLDAWA(plain_rounds=-1)


def test_the_cosine_does_not_depend_on_the_number_of_threads() -> None:
    """The process of a FLARE server sets none."""
    generator, before = torch.Generator().manual_seed(0), torch.get_num_threads()
    own, reference = torch.randn(2, 100_000, generator=generator)
    found = set()
    try:
        for threads in (1, 2, 3, 4, 8):
            torch.set_num_threads(threads)
            found.add(divergence(own, reference))
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1
