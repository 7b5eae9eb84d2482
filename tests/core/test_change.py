"""How long a change is: float64's norm whichever way it is computed, in one read that also finds what is not finite."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from fedvlp.core import change
from fedvlp.core.aggregation import bounded
from fedvlp.core.change import BESIDE, STATISTICS, WEIGHTS, Change, change_norms, update_norm
from fedvlp.core.gate import check_tensors
from fedvlp.core.types import LazyState, State, Update, size_of
from fedvlp.federation.loop import Rounds
from fedvlp.methods import FedAvg


class Counting(LazyState):
    """A view that counts how often each tensor is read."""

    def __init__(self, state: State) -> None:
        super().__init__(state, size=lambda name: size_of(state[name]))
        self._state = state
        self.reads = dict.fromkeys(state, 0)

    def __getitem__(self, name: str) -> Tensor:
        self.reads[name] += 1
        return self._state[name]


@pytest.fixture(params=["float64", "float32"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways: of small models, and of those beyond EXACT_NUMEL."""
    if request.param == "float32":
        monkeypatch.setattr(change, "EXACT_NUMEL", 0)
    return request.param


def test_the_norms_by_hand(path: str) -> None:
    """Weights (3, 4) from (0, 0) and (12) from (0): 13. Statistics 7 from 5: 2. Beside the model (6, 8), (24): 26."""
    reference = {"w": torch.zeros(2), "v": torch.zeros(1), "bn.running_mean": torch.tensor([5.0]), "n": torch.tensor(3)}
    state = {
        "w": torch.tensor([3.0, 4.0]), "v": torch.tensor([12.0]), "bn.running_mean": torch.tensor([7.0]),
        "n": torch.tensor(9), "change/w": torch.tensor([6.0, 8.0]), "gradient/x": torch.tensor([24.0]),
        "other/w": torch.tensor([1e3, 1e3]),
    }  # fmt: skip
    assert change_norms(state, reference) == {WEIGHTS: 13.0, STATISTICS: 2.0, BESIDE: 26.0}
    assert update_norm(state, reference) == 13.0
    assert change_norms({"other/w": torch.ones(2)}, reference) == {}


def test_a_large_norm_is_float64s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, a rest that fills none, a transposed tensor; changes of 1e-3 of weights of 1: equal to 1e-7."""
    monkeypatch.setattr(change, "EXACT_NUMEL", 0)
    generator = torch.Generator().manual_seed(0)
    reference = {"a": torch.randn(1000, 1025, generator=generator), "b": torch.randn(7, generator=generator),
                 "c": torch.randn(300, 41, generator=generator).T}  # fmt: skip
    state = {name: t + 1e-3 * torch.rand(t.shape, generator=generator) for name, t in reference.items()}
    state["change/a"] = torch.rand(1000, 1025, generator=generator)
    wide = math.sqrt(sum(float((state[n].double() - t.double()).square().sum()) for n, t in reference.items()))
    norms = change_norms(state, reference)
    assert norms[WEIGHTS] == pytest.approx(wide, rel=1e-7)
    assert norms[BESIDE] == pytest.approx(float(state["change/a"].double().norm()), rel=1e-7)


def test_the_bits_do_not_depend_on_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change that is shortened is shortened by its norm, so the model's bytes would."""
    monkeypatch.setattr(change, "EXACT_NUMEL", 0)
    generator = torch.Generator().manual_seed(1)
    reference, state = ({"w": torch.randn(701, 1003, generator=generator)} for _ in range(2))
    before, seen = torch.get_num_threads(), set()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            seen.add(update_norm(state, reference))
    finally:
        torch.set_num_threads(before)
    assert len(seen) == 1


def test_finite_values_whose_squares_overflow_are_measured(path: str) -> None:
    """3e30 and 4e30 are 5e30 away; their squares, 9e60, are more than float32 holds."""
    state, reference = {"w": torch.tensor([3e30, 4e30])}, {"w": torch.zeros(2)}
    measured = Change(reference)
    assert check_tensors(state, reference, measured.finite) is None
    assert measured.norms()[WEIGHTS] == pytest.approx(5e30)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_value_that_is_not_finite_is_found_and_counted(path: str, value: float) -> None:
    reference = {"w": torch.zeros(5000), "change/w": torch.zeros(5000)}
    for name in reference:
        state = {key: torch.rand(5000) for key in reference}
        state[name][4321] = value
        said = f"{name} has 1 value(s) that are NaN or infinite"
        assert check_tensors(state, reference, Change({"w": reference["w"]}).finite) == said


def test_the_gate_reads_every_tensor_once_and_nothing_reads_them_again_to_measure(path: str) -> None:
    """In a phase with clipping, the default: one read by the gate, one by the mean, none to copy or to park."""
    from fedvlp.core.server_state import Server
    from fedvlp.federation.loop import Federation

    model = {"w": torch.zeros(6), "v": torch.zeros(2, 2)}
    views = {site: Counting({n: t + index for n, t in model.items()}) for index, site in enumerate("abc", 1)}

    def exchange(messages: object) -> Iterator[tuple[str, Update]]:
        for site, view in views.items():
            yield site, Update(site, 0, "train", 1, view)  # type: ignore[arg-type]

    server = Server(("a", "b", "c"), model)
    Federation(FedAvg(), server, Rounds(rounds=1, evaluate_every=0), exchange).run()
    assert {site: view.reads for site, view in views.items()} == {site: {"w": 2, "v": 2} for site in "abc"}
    assert server.history[0]["server"]["update_norm/b"] == pytest.approx(2 * math.sqrt(10))
    assert server.state["w"].tolist() == [2.0] * 6


def test_a_view_is_shortened_as_a_dict_is_and_stays_a_view() -> None:
    """Of 1, 2 and 9 the median is 2, so c's weights go to 2 and its change beside the model, of one kind, stays."""
    reference = {"w": torch.zeros(1), "n": torch.tensor(4)}
    states: dict[str, State] = {
        site: {"w": torch.tensor([size]), "n": torch.tensor(7), "change/w": torch.tensor([1.0])}
        for site, size in (("a", 1.0), ("b", 2.0), ("c", 9.0))
    }
    plain = [Update(site, 0, "train", 1, state) for site, state in states.items()]
    views = [Update(site, 0, "train", 1, Counting(state)) for site, state in states.items()]  # type: ignore[arg-type]
    for expected, seen in zip(
        bounded(plain, lambda site: reference, times=1), bounded(views, lambda site: reference, times=1), strict=True
    ):
        assert isinstance(expected.state, dict)
        assert not isinstance(seen.state, dict)
        assert {n: t.tolist() for n, t in seen.state.items()} == {n: t.tolist() for n, t in expected.state.items()}
    assert expected.state["w"].tolist() == [2.0]
    assert expected.state["n"].item() == 7


def test_what_a_site_in_this_process_sent_waits_as_a_copy(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The next site trains in the same tensors; in a file of the spool it is a copy already."""
    live, spool = torch.zeros(1), tmp_path_factory.mktemp("spool")
    for park in (10**9, 0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("fedvlp.core.tensor_file.PARK_BYTES", park)

            def updates() -> Iterator[Update]:
                for number, site in enumerate("ab", 1):
                    live.fill_(number)
                    yield Update(site, 0, "train", 1, {"w": live})

            seen = [
                update.state["w"].item()
                for update in bounded(updates(), lambda site: {"w": torch.zeros(1)}, times=5, spool=spool)
            ]
        assert seen == [1.0, 2.0]
    assert not list(spool.iterdir())
