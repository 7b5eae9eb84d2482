"""Spec faults, rows 1-10, 22-26, 30: a bad update or a lost site costs itself and nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import KINDS, cases
from support.laboratory import METHODS
from support.toy import Toy, World, same_bytes, small

from fedvlp.core.aggregation import bounded
from fedvlp.core.method import Method
from fedvlp.core.server_state import Server
from fedvlp.core.types import Broadcast, Failure, FailureKind, Reply, State, Update
from fedvlp.federation.exchange import SequentialExchange
from fedvlp.federation.loop import Federation, QuorumLostError, Rounds

Spoil = Callable[[Update], Any]
BIAS = "text_head.bias"


class Spoiled:
    """The sites of a world; the replies of b in round 1 are spoiled."""

    def __init__(self, world: World, spoil: Spoil) -> None:
        self.inner, self.spoil = SequentialExchange(world.site), spoil

    def __call__(self, messages: Mapping[str, Broadcast]) -> Iterator[tuple[str, Reply]]:
        for site, reply in self.inner(messages):
            yield site, self.spoil(reply) if (site, messages[site].round) == ("b", 1) else reply  # type: ignore


def world(name: str = "fedavg", **options: Any) -> World:
    return World(small(METHODS[name]), rounds=Rounds(**{"rounds": 3, "evaluate_every": 0, "max_missed": 9, **options}))


def tensor(value: Callable[[torch.Tensor], Any]) -> Spoil:
    """One tensor of the update replaced."""
    return lambda update: replace(update, state={**update.state, BIAS: value(update.state[BIAS])})


def poked(value: float) -> Spoil:
    def poke(t: torch.Tensor) -> torch.Tensor:
        copy = t.clone()
        copy[1] = value
        return copy

    return tensor(poke)


def without(update: Update) -> Update:
    return replace(update, state={n: t for n, t in update.state.items() if n != BIAS})


SPOILS: dict[str, tuple[Spoil, str]] = {
    "row 1: NaN": (poked(math.nan), f"{BIAS} has 1 value"),
    "row 2: (1,) that would broadcast": (tensor(lambda t: t[:1]), f"{BIAS} is (1,)"),
    "row 3: missing": (without, f"1 missing tensor(s), e.g. {BIAS}"),
    "row 4: the round before": (lambda u: replace(u, round=0), "for round 0"),
    "row 5: another's name": (lambda u: replace(u, site="a"), "expected b"),
    "row 6: NaN metric": (lambda u: replace(u, metrics={"probe/loss": math.nan}), "probe/loss"),
    "row 7: a fraction": (lambda u: replace(u, num_samples=2.5), "num_samples is 2.5"),
    "row 9: an exception": (lambda u: Failure(FailureKind.LOST, "no answer in 60 s"), "no answer in 60 s"),
}
"""One of each kind that the gate refuses; tests/core/test_gate.py has them all."""


@pytest.fixture(scope="module")
def without_b() -> Server:
    """The run in which b simply failed in round 1."""
    one = world()
    return one.run(Spoiled(one, lambda update: Failure(FailureKind.FAILED, "RuntimeError")))


@pytest.mark.parametrize("fault", SPOILS)
def test_a_bad_update_is_dropped_and_named_and_the_run_goes_on_without_it(fault: str, without_b: Server) -> None:
    """The model is, bit for bit, that of a run in which the site said nothing; it is welcome in the next round."""
    spoil, said = SPOILS[fault]
    one = world()
    seen = one.run(Spoiled(one, spoil))
    assert [list(record["dropped"]) for record in seen.history] == [[], ["b"], []]
    assert said in seen.history[1]["dropped"]["b"]
    assert "b" in seen.history[2]["sites"]
    same_bytes(seen.state, without_b.state)


@pytest.mark.parametrize("name", cases(METHODS, seconds=1))
def test_every_method_drops_it(name: str) -> None:
    """NaN goes where a method shares something; a method that shares nothing is sent a tensor too many."""

    def spoil(update: Update) -> Any:
        key = next(iter(update.state), "uninvited")
        return replace(update, state={**update.state, key: update.state.get(key, torch.ones(4)) * math.nan})

    one, other = world(name), world(name)
    seen = one.run(Spoiled(one, spoil))
    expected = other.run(Spoiled(other, lambda update: Failure(FailureKind.FAILED, "RuntimeError")))
    assert {r["round"] for r in seen.history if r["dropped"]} == {1}
    same_bytes(seen.state, expected.state)
    same_bytes(seen.memory, expected.memory)
    assert all(torch.isfinite(t).all() for t in seen.state.values() if t.is_floating_point())


def test_row_7_a_cap_on_samples() -> None:
    one = world(max_samples=15)  # c says 16
    with pytest.raises(QuorumLostError, match=r"c: num_samples is 16, expected a whole number from 0 to 15"):
        replace(one, rounds=replace(one.rounds, quorum=3)).run()


def claims(samples: int | Mapping[int, int], rounds: tuple[int, ...] = (1,)) -> Callable[[World], Any]:
    """Sites of which b, with 12 samples, claims so many in some rounds, or by round."""
    claimed = samples if isinstance(samples, Mapping) else dict.fromkeys(rounds, samples)

    def build(one: World) -> Any:
        inner = SequentialExchange(one.site)

        def run(messages: Mapping[str, Broadcast]) -> Iterator[tuple[str, Reply]]:
            for site, reply in inner(messages):
                count = claimed.get(messages[site].round) if site == "b" else None
                yield site, reply if count is None else replace(reply, num_samples=count)  # type: ignore[type-var]

        return run

    return build


@pytest.mark.parametrize(("samples", "factor"), [(25, 2.0), (5, 2.0), (10_000_000, 2.0), (13, 1.0)])
def test_row_7_a_count_is_pinned_by_the_first_reply(samples: int, factor: float, without_b: Server) -> None:
    """b enrolled with 12: more than twice or fewer than half of that is refused, and the round continues without it."""
    one = world(samples_factor=factor)
    seen = one.run(claims(samples)(one))
    assert [list(record["dropped"]) for record in seen.history] == [[], ["b"], []]
    said = seen.history[1]["dropped"]["b"]
    assert said.startswith(f"num_samples is {samples}; it was 12 in this site's first reply of the run, and may be up")
    assert seen.enrolled == {"a": 8, "b": 12, "c": 16} == seen.samples
    same_bytes(seen.state, without_b.state)


@pytest.mark.parametrize("samples", [24, 6, 0])
def test_row_7_a_count_may_change_within_the_factor(samples: int) -> None:
    """Twice, half, and none at all, which weighs nothing. What it enrolled with stays."""
    one = world()
    seen = one.run(claims(samples)(one))
    assert all(not record["dropped"] for record in seen.history)
    assert seen.enrolled["b"] == 12


def test_row_7_a_count_may_not_double_again_and_again() -> None:
    """12, then 24, then 48: each is twice the one before, and the third is four times what b enrolled with."""
    one = world(rounds=3)
    seen = one.run(claims({1: 24, 2: 48})(one))
    assert [list(record["dropped"]) for record in seen.history] == [[], [], ["b"]]
    assert seen.enrolled["b"] == 12


def test_row_7_a_site_without_samples_has_not_enrolled() -> None:
    """0, then 12: the second is the count that is pinned, and 30 in the third round is refused."""
    one = world(rounds=2)
    assert one.run(claims(0, (0,))(one)).enrolled == {"a": 8, "b": 12, "c": 16}


def test_row_7_what_a_site_enrolled_with_survives_a_restart(tmp_path: Path) -> None:
    one = replace(world(), folder=tmp_path)
    replace(one, rounds=replace(one.rounds, rounds=1)).run()
    assert Server.load(tmp_path / "server.safetensors")[0].enrolled == {"a": 8, "b": 12, "c": 16}
    assert [list(record["dropped"]) for record in one.run(claims(25)(one)).history] == [[], ["b"], []]


def test_row_7_no_site_has_more_than_its_share(caplog: pytest.LogCaptureFixture) -> None:
    """b claims 10^7 from its first reply on: it counts as the 8 + 16 of the others, and is on record as it said."""
    one, other = world(rounds=1), world(rounds=1)
    seen = one.run(claims(10_000_000, (0,))(one))
    same_bytes(seen.state, other.run(claims(24, (0,))(other)).state)
    assert seen.enrolled["b"] == 10_000_000
    assert "b: its 10000000 samples count as 24: max_share is 0.5" in caplog.messages


class Empty:
    """Sites that all say they have nothing."""

    def __init__(self, world: World) -> None:
        self.inner = SequentialExchange(world.site)

    def __call__(self, messages: Mapping[str, Broadcast]) -> Iterator[tuple[str, Reply]]:
        for site, reply in self.inner(messages):
            yield site, replace(reply, num_samples=0)  # type: ignore[type-var]


@pytest.mark.parametrize("name", [name for name in KINDS if not METHODS[name].uses_public])
def test_row_8_nobody_has_samples_the_model_stays(name: str) -> None:
    """Where the server trains on a public set of its own, its model may move without any site."""
    one = world(name)
    same_bytes(one.run(Empty(one)).state, one.server().state)


def test_row_8_it_is_warned_of_once_and_stops_after_some_phases(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The fourth empty phase in a row ends the run; mended, it goes on from there."""
    rounds = Rounds(rounds=12, evaluate_every=0, max_empty=4)
    one = World(Method(local_steps=1), rounds=rounds, folder=tmp_path)
    with pytest.raises(QuorumLostError, match=r"round 3: no site reported a training sample for 4 phases"):
        one.run(Empty(one))
    assert [record.getMessage() for record in caplog.records if "no site reported" in record.getMessage()] == [
        "round 0: no site reported a training sample; the model stays as it is"
    ]
    assert Server.load(tmp_path / "server.safetensors")[0].round == 3
    assert one.run().round == 12


def exchange(**broken: str) -> Callable[[World], Any]:
    """Sites that fail in a round, by name: ``b="1"``."""

    def build(one: World) -> Any:
        inner = SequentialExchange(one.site)

        def run(messages: Mapping[str, Broadcast]) -> Iterator[tuple[str, Reply]]:
            for site, reply in inner(messages):
                yield (
                    site,
                    Failure(FailureKind.LOST, "gone") if str(messages[site].round) in broken.get(site, "") else reply,
                )

        return run

    return build


@pytest.mark.parametrize("name", KINDS)
def test_row_10_below_the_quorum_nothing_is_kept_and_it_resumes(tmp_path: Path, name: str) -> None:
    """Two of three sites fail in round 1; mended, the run ends with the bytes of one that never failed."""
    one = World(small(METHODS[name]), rounds=Rounds(rounds=3, evaluate_every=0), folder=tmp_path)
    federation, _ = one.federation(exchange(a="1", c="1")(one))
    with pytest.raises(QuorumLostError, match=r"round 1 .*1 valid updates, 2 needed.*a: gone.*resume"):
        federation.run()
    after_round_0 = World(small(METHODS[name]), rounds=Rounds(rounds=1, evaluate_every=0)).run()
    same_bytes(federation.server.state, after_round_0.state)
    saved, _ = Server.load(tmp_path / "server.safetensors")
    same_bytes(saved.state, after_round_0.state)
    assert saved.round == federation.server.round == 1
    whole = World(small(METHODS[name]), rounds=Rounds(rounds=3, evaluate_every=0)).run()
    resumed = one.run()
    same_bytes(resumed.state, whole.state)
    same_bytes(resumed.memory, whole.memory)


def test_row_9_a_site_may_come_and_go() -> None:
    one = world(quorum=2)
    seen = one.run(exchange(a="0", b="1", c="2")(one))
    assert [list(record["dropped"]) for record in seen.history] == [["a"], ["b"], ["c"]]
    assert seen.samples == {"a": 8, "b": 12, "c": 16}


def test_row_24_a_corrupt_memory_costs_its_site_and_is_named(tmp_path: Path) -> None:
    one = World(small(METHODS["local"]), rounds=Rounds(rounds=2, evaluate_every=0), folder=tmp_path)

    def corrupt(record: dict[str, Any]) -> None:
        if record["round"] == 0:
            file = tmp_path / "sites" / "b" / "00000-0.safetensors"
            file.write_bytes(b"\x80\x04" + file.read_bytes()[2:])

    history = one.run(report=corrupt).history
    assert list(history[1]["dropped"]) == ["b"]
    assert "00000-0.safetensors" in history[1]["dropped"]["b"]


class Moving:
    """Sites that each move every weight by a value of their own; a site's tensors are reused in its next task."""

    def __init__(self, by: Mapping[str, float]) -> None:
        self.by = by
        self.own: dict[str, State] = {}

    def __call__(self, messages: Mapping[str, Broadcast]) -> Iterator[tuple[str, Reply]]:
        shared: State = {}
        for site, message in messages.items():
            shared.setdefault("w", torch.empty(4)).copy_(message.state["w"] + self.by[site])
            yield site, Update(site, message.round, message.phase, 1, shared)


def moved(by: Mapping[str, float], rounds: int = 1, folder: Path | None = None, **options: Any) -> Server:
    """The server after four weights of zero were moved."""
    server = Server(tuple(sorted(by)), {"w": torch.zeros(4)})
    settings = Rounds(rounds=rounds, evaluate_every=0, **options)
    checkpoint = folder / "checkpoint.safetensors" if folder else None
    Federation(Method(), server, settings, Moving(by), checkpoint=checkpoint).run()
    return server


POISONED = {"a": 1e6, "b": 1.0, "c": 2.0, "d": -1.0}


def test_row_11_what_one_finite_site_can_do_is_its_share() -> None:
    """A finite update of size 1e6 moves the model by its share of the samples, and its norm is on record."""
    server = moved(POISONED, clip_to_median=0)
    assert server.state["w"].tolist() == [250_000.5] * 4
    norms = {name: value for name, value in server.history[0]["server"].items() if name.startswith("update_norm/")}
    assert norms == {"update_norm/a": 2e6, "update_norm/b": 2.0, "update_norm/c": 4.0, "update_norm/d": 2.0}


@pytest.mark.parametrize("large", [False, True])
def test_row_11_a_long_change_is_shortened(large: bool, tmp_path: Path, caplog: Any, monkeypatch: Any) -> None:
    """Norms 2e6, 2, 4, 2: the lower median is 2, so that 3 times it leaves 6 of a's, and the others as they are."""
    if large:
        monkeypatch.setattr("fedvlp.core.tensor_file.PARK_BYTES", 0)
    server = moved(POISONED, clip_to_median=3, folder=tmp_path)
    assert server.state["w"].tolist() == pytest.approx([(3 + 1 + 2 - 1) / 4] * 4)
    assert [record.getMessage() for record in caplog.records] == [
        "a: its change of weights, 2e+06 long, is shortened to 6"
    ]
    assert server.history[0]["server"]["update_norm/a"] == 2e6
    assert not list((tmp_path / "spool").glob("*"))


def test_row_11_by_default_it_can_do_no_more_than_five_honest_sites() -> None:
    assert moved(POISONED).state["w"].tolist() == moved(POISONED, clip_to_median=5).state["w"].tolist()


@pytest.mark.parametrize("averaging", ["trimmed", "median"])
def test_row_11_a_robust_average_leaves_it_out(averaging: str) -> None:
    """1e6, 2, 1, -1: without the largest and the smallest 2 and 1 are left; so it is whatever the site claims."""
    by = {"a": 3e38, "b": 1.0, "c": 2.0, "d": -1.0}
    assert moved(by, averaging=averaging, clip_to_median=0).state["w"].tolist() == [1.5] * 4


def test_row_11_running_statistics_have_a_median_of_their_own() -> None:
    """They are far larger than weights: under one norm they would hide them. A variance never turns negative."""
    reference: State = {"w": torch.zeros(1), "n.running_mean": torch.zeros(1), "n.running_var": torch.ones(1)}
    sent = {"a": (9.0, 100.0, 1.0), "b": (1.0, 10.0, 1.0), "c": (1.0, 10.0, 1.0), "d": (1.0, 900.0, 0.0)}
    updates = [
        Update(site, 0, "train", 1, {name: torch.tensor([v]) for name, v in zip(reference, values, strict=True)})
        for site, values in sent.items()
    ]
    found = {
        u.site: [round(t.item(), 3) for t in u.state.values()]
        for u in bounded(updates, lambda site: reference, times=2.0)
    }
    assert found["a"] == [2.0, 20.0, 1.0]
    assert found["b"] == found["c"] == [1.0, 10.0, 1.0]
    assert found["d"] == [1.0, 20.0, 0.978]


def test_row_11_a_negative_variance_is_refused() -> None:
    """It is finite, and turns every output of the model it is averaged into to NaN."""
    name = "image_encoder.1.running_var"

    def spoil(update: Update) -> Update:
        return replace(update, state={**update.state, name: -update.state[name]})

    one = replace(world(), model=lambda: Toy(norm=True))
    assert one.run(Spoiled(one, spoil)).history[1]["dropped"] == {"b": f"{name} has a negative variance"}


def test_row_11_honest_sites_are_not_touched_by_clipping() -> None:
    by = {"a": 1.5, "b": 1.0, "c": 2.0, "d": -1.0, "e": 0.0}
    same_bytes(moved(by, rounds=3, clip_to_median=2).state, moved(by, rounds=3).state)


def test_row_11_the_sites_that_did_not_train_do_not_shorten_the_others() -> None:
    assert moved({"a": 0.0, "b": 0.0, "c": 0.0, "d": 2.0}, clip_to_median=1).state["w"].tolist() == [0.5] * 4
    assert moved({"a": 0.0, "b": 0.0}, clip_to_median=1).state["w"].tolist() == [0.0] * 4
