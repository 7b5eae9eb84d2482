"""The trimmed mean and the median by hand, what they are equal to, and that a minority of sites cannot spoil them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.toy import same_bytes

import fedvlp.core.aggregation as aggregation
from fedvlp.core import tensor_file as spool_module
from fedvlp.core.aggregation import Averaging, Mean, StreamingMean, left_out
from fedvlp.core.types import State

FIVE = [([1.0, 50.0], 1.0), ([2.0, 40.0], 2.0), ([3.0, 30.0], 3.0), ([4.0, 20.0], 4.0), ([1000.0, -9.0], 5.0)]
"""Of five sites, the two values and the weight. The last one is poisoned, and weighs most."""

MODEL = {"w": torch.zeros(2)}


def filled(mean: Mean, rows: list[tuple[list[float], float]]) -> State:
    for values, weight in rows:
        mean.add({"w": torch.tensor(values)}, weight)
    return mean.result()


def average(kind: str, rows: list[tuple[list[float], float]] = FIVE, trim: float = 0.2) -> list[float]:
    values: list[float] = filled(Averaging(kind, trim).begin(MODEL), rows)["w"].tolist()
    return values


def test_the_trimmed_mean_by_hand() -> None:
    """0.2 of 5 is one at each end: (2*2 + 3*3 + 4*4)/9 = 29/9, and without 50 and -9 (2*40 + 3*30 + 4*20)/9 = 250/9."""
    assert average("trimmed") == pytest.approx([29 / 9, 250 / 9])


def test_two_at_each_end_leave_the_middle() -> None:
    assert average("trimmed", trim=0.4) == [3.0, 30.0] == average("median")


def test_the_median_of_four_is_half_way_between_the_two_in_the_middle_whatever_they_weigh() -> None:
    """1, 2, 3, 4 give 2.5, and 50, 40, 30, 20 give 35."""
    assert average("median", FIVE[:4]) == [2.5, 35.0]


def test_of_equal_values_the_sites_order_decides_which_are_left_out() -> None:
    """Whose weight counts must not depend on the processor, or the bytes would. Forty sites send 0, 1 or 2."""
    rows = [([float(site * 7 % 3), 0.0], site + 1.0) for site in range(40)]
    kept = sorted(rows, key=lambda row: row[0][0])[8:-8]  # Python's sort is stable
    expected = sum(values[0] * weight for values, weight in kept) / sum(weight for _, weight in kept)
    assert average("trimmed", rows)[0] == pytest.approx(expected)


def test_a_site_without_samples_has_no_place_in_the_list() -> None:
    """Without the 0s, 4 and 20 are in the middle of 3, 4, 1000 and of -9, 20, 30."""
    rows = [(values, weight if weight > 2 else 0.0) for values, weight in FIVE]
    assert average("median", rows) == [4.0, 20.0]


def test_nobody_has_samples_the_model_stays() -> None:
    for kind in ("trimmed", "median"):
        assert filled(Averaging(kind).begin(MODEL), [(values, 0.0) for values, _ in FIVE]) == {}
        assert Averaging(kind).begin(MODEL).result() == {}


@pytest.mark.parametrize("exact", [True, False])
def test_trimming_nothing_is_the_mean_bit_for_bit(exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not exact:
        monkeypatch.setattr(aggregation, "EXACT_NUMEL", 0)
    rows = [(torch.randn(2, generator=torch.Generator().manual_seed(seed)).tolist(), seed + 1.5) for seed in range(7)]
    plain = filled(StreamingMean(MODEL, 11.0), rows)
    same_bytes(filled(Averaging("trimmed", 0.0).begin(MODEL, 11.0), rows), plain)
    same_bytes(filled(Averaging("mean").begin(MODEL, 11.0), rows), plain)
    assert filled(Averaging("trimmed", 0.2).begin(MODEL, 11.0), rows)["w"].tolist() != plain["w"].tolist()


@pytest.mark.parametrize("kind", ["mean", "trimmed", "median"])
def test_equal_updates_give_what_they_are_bit_for_bit(kind: str) -> None:
    one = {"w": torch.randn(99, generator=torch.Generator().manual_seed(1)), "v": torch.tensor(0.1)}
    mean = Averaging(kind).begin(one)
    for weight in (3.0, 5.0, 7.0):
        mean.add(one, weight)
    same_bytes(mean.result(), one)


OUT = [
    (1, 0.2, 0), (2, 0.2, 0), (2, 0.5, 0), (3, 0.2, 1), (3, 0.01, 1), (4, 0.2, 1), (5, 0.2, 1), (9, 0.2, 1),
    (10, 0.2, 2), (100, 0.29, 29), (4, 0.5, 1), (5, 0.5, 2), (6, 0.5, 2),
]  # fmt: skip


def test_how_many_are_left_out_at_each_end() -> None:
    """At least one of three, so that a run of few sites is not silently without protection; one or two are left."""
    assert [(sites, trim, left_out(sites, trim)) for sites, trim, _ in OUT] == OUT


@given(
    honest=st.lists(st.floats(-100, 100, width=32), min_size=3, max_size=6),
    poison=st.floats(-(2.0**127), 2.0**127, width=32),
    weight=st.floats(1, 1e7),
)
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("kind", ["trimmed", "median"])
def test_one_site_of_four_cannot_leave_the_range_of_the_others(
    kind: str, honest: list[float], poison: float, weight: float
) -> None:
    """Whatever it sends, and whatever it claims to weigh."""
    rows = [([value, 0.0], 1.0) for value in honest] + [([poison, 0.0], weight)]
    found = average(kind, rows)[0]
    assert min(honest) - 1e-4 <= found <= max(honest) + 1e-4


def test_whole_numbers_are_left_out_and_dtypes_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces of two values: the third tensor has three."""
    monkeypatch.setattr(aggregation, "VALUES", 2)
    reference = {"n": torch.tensor(3), "h": torch.zeros((), dtype=torch.float16), "m": torch.zeros(3, 1)}
    mean = Averaging("median").begin(reference)
    for value in (9.0, 1.0, 2.0):
        column = torch.tensor([[value], [value + 10], [value + 20]])
        mean.add({"n": torch.tensor(7), "h": torch.tensor(value).half(), "m": column}, 1.0)
    found = mean.result()
    assert {name: (tensor.dtype, tensor.tolist()) for name, tensor in found.items()} == {
        "h": (torch.float16, 2.0),
        "m": (torch.float32, [[2.0], [12.0], [22.0]]),
    }


def test_what_waits_on_disk_gives_the_same_bytes_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a view of another tensor, and while they wait: a killed server leaves no file behind."""
    rows = [(torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)).T, seed + 1.0) for seed in range(5)]
    like = {"w": torch.zeros(6, 4)}
    found, before = [], len(os.listdir("/dev/fd"))
    for size, spool in ((spool_module.PARK_BYTES, None), (96, tmp_path / "run" / "spool"), (97, tmp_path / "memory")):
        monkeypatch.setattr(spool_module, "PARK_BYTES", size)
        mean = Averaging("trimmed", 0.2, spool).begin(like)
        for tensor, weight in rows:
            sent = {"w": tensor.clone()}
            mean.add(sent, weight)
            sent["w"].zero_()  # a site in this process trains on in what it sent
        if spool:
            assert spool.exists() == (size == 96)
            assert not spool.exists() or list(spool.iterdir()) == []
        found.append(mean.result())
    del mean
    same_bytes(found[0], found[1])
    same_bytes(found[0], found[2])
    assert len(os.listdir("/dev/fd")) == before


@pytest.mark.parametrize(("kind", "trim"), [("mode", 0.2), ("trimmed", 0.5), ("trimmed", -0.1), ("mean", float("nan"))])
def test_what_is_no_average_is_refused(kind: str, trim: float) -> None:
    with pytest.raises(ValueError, match=r"averaging is 'mode'|trim is"):
        Averaging(kind, trim)
