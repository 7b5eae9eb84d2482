"""Weighted mean by hand, in any order of arrival."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.toy import same_bytes
from torch import Tensor

import fedvlp.core.aggregation as aggregation
from fedvlp.core import tensor_file as spool_module
from fedvlp.core.aggregation import StreamingMean, bounded, capped_counts, in_site_order
from fedvlp.core.types import Failure, FailureKind, Reply, State, Update

GOOD = Update("a", 3, "train", 10, {"w": torch.ones(2, 3)})


def mean(updates: list[tuple[State, float]], reference: State, **options) -> State:
    folded = StreamingMean(reference, **options)
    for state, weight in updates:
        folded.add(state, weight)
    return folded.result()


def single(value: float | list[float]) -> State:
    return {"w": torch.tensor(value)}


@pytest.fixture(params=["float64", "float32"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to accumulate: of small models, and of those beyond EXACT_NUMEL."""
    if request.param == "float32":
        monkeypatch.setattr(aggregation, "EXACT_NUMEL", 0)
    return request.param


def test_weighted_mean_by_hand(path: str) -> None:
    """(1*[2, 4] + 3*[6, -4]) / (1 + 3) = [20/4, -8/4] = [5, -2], whatever total was expected."""
    for expected in (1.0, 4.0, 8.0, 0.0):
        updates = [(single([2.0, 4.0]), 1.0), (single([6.0, -4.0]), 3.0)]
        result = mean(updates, single([0.0, 0.0]), expected_total=expected)
        assert result["w"].tolist() == [5.0, -2.0]
        assert result["w"].dtype == torch.float32


def test_the_limit_of_the_exact_path_counts_the_values_of_all_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """1e8 + 1 - 1e8 = 1, so the mean of three is 1/3 in float64; float32 loses the 1 and gives 0."""
    updates = [({"w": torch.tensor([x]), "v": torch.zeros(2)}, 1.0) for x in (1e8, 1.0, -1e8)]
    reference = {"w": torch.zeros(1), "v": torch.zeros(2), "whole": torch.zeros(99, dtype=torch.int64)}
    for limit, expected in ((3, 1 / 3), (2, 0.0)):
        monkeypatch.setattr(aggregation, "EXACT_NUMEL", limit)
        assert mean(updates, reference)["w"].item() == pytest.approx(expected)


@given(st.lists(st.tuples(st.floats(-100, 100, width=32), st.integers(0, 1000)), min_size=1, max_size=6))
@settings(max_examples=60, deadline=None)
def test_both_paths_agree_and_stay_within_the_updates(rows: list[tuple[float, int]]) -> None:
    updates = [({"w": torch.full((3,), value)}, float(weight)) for value, weight in rows]
    exact = mean(updates, {"w": torch.zeros(3)}, expected_total=1000.0)
    before, aggregation.EXACT_NUMEL = aggregation.EXACT_NUMEL, 0
    try:
        large = mean(updates, {"w": torch.zeros(3)}, expected_total=1000.0)
    finally:
        aggregation.EXACT_NUMEL = before
    counted = [(value, weight) for value, weight in rows if weight]
    assert bool(exact) == bool(large) == bool(counted)
    if counted:
        by_hand = sum(v * n for v, n in counted) / sum(n for _, n in counted)
        assert exact["w"][0].item() == pytest.approx(by_hand, rel=1e-6, abs=1e-5)
        assert torch.allclose(exact["w"], large["w"], rtol=1e-5, atol=1e-4)
        low, high = min(v for v, _ in counted), max(v for v, _ in counted)
        assert low - 1e-5 <= exact["w"][0].item() <= high + 1e-5


def test_tensors_of_any_shape_and_size_by_hand(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """0-d, empty, of several blocks, and not contiguous: (1*x + 3*(x + 4))/4 = x + 3."""
    monkeypatch.setattr(aggregation, "BLOCK", 4)
    one = {"zero": torch.tensor(1.0), "none": torch.zeros(0, 3), "long": torch.arange(11.0),
           "turned": torch.arange(6.0).reshape(2, 3).T}  # fmt: skip
    other = {name: tensor + 4 for name, tensor in one.items()}
    result = mean([(one, 1.0), (other, 3.0)], {name: torch.empty(t.shape) for name, t in one.items()})
    for name, tensor in one.items():
        assert result[name].shape == tensor.shape
        assert torch.equal(result[name], tensor + 3), name


def test_finite_updates_of_a_large_model_have_a_finite_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """300 samples of 2e36 are 6e38, more than float32 holds; their mean is 2e36."""
    monkeypatch.setattr(aggregation, "EXACT_NUMEL", 0)
    assert mean([(single(2e36), 300)], single(0.0), expected_total=0.0)["w"].item() == pytest.approx(2e36)


def test_integer_buffers_are_left_out(path: str) -> None:
    """num_batches_tracked is never averaged: (3 + 4)/2 is no count (spec 1.2)."""
    reference = {"w": torch.zeros(1), "n": torch.tensor(3), "mask": torch.tensor([True])}
    states = [{"w": torch.ones(1), "n": torch.tensor(n), "mask": torch.tensor([False])} for n in (3, 4)]
    assert list(mean([(state, 1.0) for state in states], reference)) == ["w"]


def test_no_samples_no_weight(path: str) -> None:
    """0 * 1000 + 2 * 5 over 0 + 2 = 5; FLARE's own aggregator would count the 0 as 1.

    The large path scales by the first weight when it expects no total: that must not be the 0.
    """
    for options in ({}, {"expected_total": 0.0}):
        assert mean([(single(1000.0), 0), (single(5.0), 2)], single(0.0), **options)["w"].item() == 5.0


def test_the_mean_of_tensors_that_learn_carries_no_gradient(path: str) -> None:
    updates = [({"w": torch.tensor([x], requires_grad=True)}, 1.0) for x in (2.0, 4.0)]
    result = mean(updates, single([0.0]))["w"]
    assert result.tolist() == [3.0]
    assert not result.requires_grad


def test_all_zero_keeps_the_model(path: str) -> None:
    assert mean([(single(1000.0), 0), (single(5.0), 0)], single(3.0)) == {}
    assert mean([], single(3.0)) == {}


def test_updates_and_reference_are_not_written_to(path: str) -> None:
    reference, states = single([1.0]), [single([2.0]), single([4.0])]
    mean([(state, 1.0) for state in states], reference, expected_total=7.0)
    assert [reference["w"].item(), *(s["w"].item() for s in states)] == [1.0, 2.0, 4.0]


def test_a_large_mean_is_made_in_the_spare_buffers_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aggregation, "EXACT_NUMEL", 0)
    spare = single([8.0, 8.0])
    address = spare["w"].data_ptr()
    folded = StreamingMean(single([0.0, 0.0]), 5.0, spare)
    folded.add(single([1.0, 2.0]), 1.0)
    folded.add(single([3.0, 4.0]), 1.0)
    result = folded.result()
    assert result["w"].data_ptr() == address
    assert result["w"].tolist() == [2.0, 3.0]


@pytest.mark.parametrize("spare", [torch.zeros(3), torch.zeros(2, dtype=torch.float64)])
def test_a_spare_buffer_that_does_not_fit_is_not_used(monkeypatch: pytest.MonkeyPatch, spare: Tensor) -> None:
    monkeypatch.setattr(aggregation, "EXACT_NUMEL", 0)
    result = mean([(single([1.0, 2.0]), 1.0)], single([0.0, 0.0]), spare={"w": spare})
    assert result["w"].tolist() == [1.0, 2.0]
    assert result["w"].data_ptr() != spare.data_ptr()
    assert not spare.any()


def test_the_order_of_arrival_does_not_matter(path: str) -> None:
    """Values whose sum depends on the order of addition, in all 24 orders: the same bits."""
    states = {"a": single([1e7, 0.1]), "b": single([0.3, 0.2]), "c": single([-1e7, 0.3]), "d": single([0.7, 1e-8])}
    results = set()
    for order in itertools.permutations(states):
        stream = in_site_order(((site, states[site]) for site in order), sorted(states))
        results.add(tuple(mean([(state, 1.0) for _, state in stream], states["a"])["w"].tolist()))
    assert len(results) == 1


@given(st.permutations(list("abcde")), st.sets(st.sampled_from("abcde")))
@settings(max_examples=50, deadline=None)
def test_site_order_with_sites_that_never_answer(order: list[str], silent: set[str]) -> None:
    replies = [(site, ord(site)) for site in order if site not in silent]
    assert list(in_site_order(replies, list("abcde"))) == sorted(replies)


def test_site_order_does_not_hold_back_what_is_due() -> None:
    """b waits for a; once a has come both are handed on, before c is even asked for."""
    seen = []

    def replies():
        for site in "bac":
            seen.append(site)
            yield site, site.upper()

    stream = in_site_order(replies(), list("abc"))
    assert (next(stream), next(stream)) == (("a", "A"), ("b", "B"))
    assert seen == ["b", "a"]


def test_site_order_hands_a_duplicate_on_once() -> None:
    """The first reply counts, whether its site is due or waiting; a stranger's never does."""
    for order in ("aabx", "xbbaa", "baab", "abab"):
        replies = [(site, index) for index, site in enumerate(order)]
        expected = [("a", order.index("a")), ("b", order.index("b"))]
        assert list(in_site_order(replies, ["a", "b"])) == expected


def waiting(spool: Path | None) -> list[tuple[str, Reply]]:
    """c, b and a arrive in this order; no file has a name when one is asked for."""

    def replies() -> Iterator[tuple[str, Reply]]:
        for site in "cba":
            assert spool is None or not list(spool.glob("*"))
            state = {"w": torch.full((4,), float(ord(site))), "n": torch.tensor(7)}
            yield site, Update(site, 3, "train", 10, state, {"x": torch.ones(1)}, {"loss/x": 0.5})

    return list(in_site_order(replies(), list("abc"), spool))


def test_large_updates_wait_on_disk_and_come_back_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, write, written, spool = waiting(None), spool_module.save_file, [], tmp_path / "runs" / "spool"
    open_files = len(os.listdir("/dev/fd"))
    monkeypatch.setattr(spool_module, "save_file", lambda *a: (written.append(1), write(*a)))
    for limit in (10**9, 0):
        monkeypatch.setattr(spool_module, "PARK_BYTES", limit)
        seen = waiting(spool)
        for (site, update), (name, other) in zip(seen, expected, strict=True):
            assert site == name
            assert isinstance(update, Update)
            assert isinstance(other, Update)
            assert replace(update, state={}, aux={}) == replace(other, state={}, aux={})
            same_bytes(update.state, other.state)
            same_bytes(update.aux, other.aux)
    assert len(written) == 2  # a, whose turn it was, did not touch the disk
    assert list(spool.glob("*")) == []  # nothing is left behind
    assert len(os.listdir("/dev/fd")) == open_files


def test_a_run_that_is_stopped_leaves_no_update_behind_and_removes_those_of_a_killed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """b waits for a, and the run is stopped; a writer before it was killed in the middle of a file."""
    monkeypatch.setattr(spool_module, "PARK_BYTES", 0)
    (tmp_path / "tmpx.safetensors").write_bytes(b"half")

    def stopped() -> Iterator[tuple[str, Reply]]:
        yield "b", replace(GOOD, site="b")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(in_site_order(stopped(), ["a", "b"], tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [5, "x", None, torch.eye(3).to_sparse(), torch.zeros(3, device="meta")])
def test_what_no_file_holds_waits_in_memory_for_the_gate(
    value: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One hostile value in a large early reply costs its site the phase, and not the run."""
    monkeypatch.setattr(spool_module, "PARK_BYTES", 0)
    early = replace(GOOD, site="b", state={**GOOD.state, "x": value})
    assert list(in_site_order([("b", early), ("a", GOOD)], list("ab"), tmp_path)) == [("a", GOOD), ("b", early)]


def test_a_failure_waits_for_its_turn_like_an_update(tmp_path: Path) -> None:
    failure = Failure(FailureKind.FAILED, "boom")
    assert list(in_site_order([("b", failure), ("a", GOOD)], list("ab"), tmp_path)) == [("a", GOOD), ("b", failure)]


def test_shortened_updates_come_in_the_order_of_the_sites() -> None:
    """Sums depend on the order, and the bytes of a run must not."""
    updates = (
        Update(site, 0, "train", 1, single([float(size)])) for site, size in zip("abcd", (1, 9, 2, 3), strict=True)
    )
    found = [
        (update.site, update.state["w"].item()) for update in bounded(updates, lambda site: single([0.0]), times=1.0)
    ]
    assert found == [("a", 1.0), ("b", 2.0), ("c", 2.0), ("d", 2.0)]


def test_changes_beside_the_model_have_a_median_of_their_own() -> None:
    """Of 3, 4 and 300 the median is 4, so c's is shortened to 8 and says so; the weights, of which a's is long, are not
    counted with them."""
    updates = (
        Update(site, 0, "train", 1, {**single([moved]), "change/w": torch.tensor([0.0, change])})
        for site, moved, change in (("a", 1e3, 3.0), ("b", 1.0, 4.0), ("c", 1.0, 300.0))
    )
    found = [
        (u.state["w"].item(), u.state["change/w"].tolist(), u.scalars)
        for u in bounded(updates, lambda site: single([0.0]), times=2)
    ]
    assert found == [(2, [0, 3], {}), (1, [0, 4], {}), (1, [0, 8], {"kept": pytest.approx(8 / 300)})]


SHARES: list[tuple[list[int], float, list[int]]] = [
    ([300, 10_000_000, 300, 300, 300], 0.5, [300, 1200, 300, 300, 300]),  # as much as the others together
    ([1, 2, 97], 0.5, [1, 2, 3]),
    ([60, 20, 20], 0.4, [26, 20, 20]),  # c / (c + 40) = 0.4, c = 26.7
    ([50, 40, 5, 5], 0.3, [7, 7, 5, 5]),  # two at the limit: c / (2c + 10) = 0.3, c = 7.5
    ([10, 20, 30], 0.5, [10, 20, 30]),  # exactly the half is not above it
    ([5, 7, 9], 1.0, [5, 7, 9]),
    ([1, 10**7], 0.5, [1, 10**7]),  # of two, one always has half or more
    ([0, 1, 10**7, 0], 0.5, [0, 1, 10**7, 0]),
    ([0, 1, 2, 97], 0.5, [0, 1, 2, 3]),
    ([5, 7, 9], 0.2, [5, 5, 5]),  # one of three has a third or more
    ([5, 7, 9, 11], 0.25, [5, 5, 5, 5]),
    ([], 0.5, []),
]


def test_counts_above_a_share_by_hand() -> None:
    for counts, share, expected in SHARES:
        assert capped_counts(counts, share) == expected, (counts, share)


@given(st.lists(st.integers(1, 10**7), min_size=3, max_size=8), st.floats(0.35, 0.99))
@settings(max_examples=100, deadline=None)
def test_no_count_is_above_its_share_and_none_is_lowered_without_need(counts: list[int], share: float) -> None:
    capped = capped_counts(counts, share)
    limit = max(capped)
    assert limit <= share * sum(capped) + 1
    assert all(after == min(before, limit) for before, after in zip(counts, capped, strict=True))
    lowered = sum(after < before for before, after in zip(counts, capped, strict=True))
    if lowered:  # with one sample more each they would be above
        assert (limit + 1) * (1 + 1e-9) > share * (sum(capped) + lowered)


def test_shares_and_lengths_are_bounded_together() -> None:
    """a is as long as the median, 2, and counts as the 3 + 4 of the others."""
    updates = [Update(site, 0, "train", samples, single([size])) for site, samples, size in
               (("a", 93, 9.0), ("b", 3, 1.0), ("c", 4, 2.0))]  # fmt: skip
    found = [
        (u.num_samples, u.state["w"].item()) for u in bounded(updates, lambda site: single([0.0]), times=1.0, share=0.5)
    ]
    assert found == [(7, 2.0), (3, 1.0), (4, 2.0)]
    alone = [(u.num_samples, u.state["w"].item()) for u in bounded(updates, lambda site: single([0.0]), share=0.5)]
    assert alone == [(7, 9.0), (3, 1.0), (4, 2.0)]
