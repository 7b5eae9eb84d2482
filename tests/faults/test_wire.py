"""Spec faults, rows 4 and 7, on the wire: FLARE's controller, bookkeeping and serialiser, and every codec of fedvlp.

A stale reply is a real one of an earlier task, kept and sent again; a strange count travels as bytes before it is read.
"""

from __future__ import annotations

import itertools
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from nvflare.apis.shareable import Shareable
from support.cases import KINDS, cases
from support.flare_memory import Fate, MemoryFlare, Task, in_engine, serialised, told, toy_experiment
from support.laboratory import METHODS
from support.toy import Wired, clone, same_bytes, small, three_sites

from fedvlp.core.aggregation import in_site_order
from fedvlp.core.server_state import Server
from fedvlp.core.types import Broadcast, Failure, FailureKind, Reply, Update
from fedvlp.federation.codec import PLAIN, Wire
from fedvlp.federation.exchange import SequentialExchange
from fedvlp.federation.loop import Rounds
from fedvlp.flare import messages
from fedvlp.methods import FedDRA

WIRES = {"plain": PLAIN, "half": Wire("bfloat16", "float16"), "8 bit": Wire("bfloat16", "int8")}
LAST = (1, "joint")
"""Where b answers with something else; the run has three rounds of ("align", "joint")."""

Instead = Callable[[dict[tuple[int, str], Update], Update], Reply]


class Answering:
    """The sites of a world, at the server's end of the wire: what b answers in ``LAST`` is ``instead``."""

    def __init__(self, one: Wired, instead: Instead) -> None:
        self.inner, self.instead = SequentialExchange(one.site), instead
        self.said: dict[tuple[int, str], Update] = {}

    def __call__(self, messages: Mapping[str, Broadcast]) -> Iterator[tuple[str, Reply]]:
        for site, reply in self.inner(messages):
            if site == "b" and isinstance(reply, Update):
                if (reply.round, reply.phase) == LAST:
                    yield site, self.instead(self.said, reply)
                    continue
                self.said[reply.round, reply.phase] = replace(reply, state=clone(reply.state), aux=clone(reply.aux))
            yield site, reply


STALE: dict[str, tuple[Instead, str]] = {
    "the round before": (lambda said, now: said[0, "joint"], "it is for round 0 phase a str of 5, expected 1 'joint'"),
    "the phase before": (lambda said, now: said[1, "align"], "it is for round 1 phase a str of 5, expected 1 'joint'"),
    "a round that never was": (lambda said, now: replace(now, round=10**6), "it is for round 1000000"),
    "the round as a float": (lambda said, now: replace(now, round=1.0), "it is for round 1.0"),  # type: ignore[arg-type]
    "the round as True": (lambda said, now: replace(now, round=True), "it is for round True"),
}


@pytest.mark.parametrize("wire", WIRES)
def test_row_4_a_stale_reply_changes_nothing_then_or_later_with_any_codec(wire: str) -> None:
    """Its codes are of another base. The run ends as if the reply had been lost, and b's next replies are read well."""

    def run(instead: Instead) -> Server:
        one = Wired(small(FedDRA), rounds=Rounds(rounds=3, evaluate_every=0), wire=WIRES[wire])
        return one.run(Answering(one, instead))

    without = run(lambda said, now: Failure(FailureKind.LOST, "no reply"))
    for instead, why in list(STALE.values())[: None if wire == "plain" else 2]:
        seen = run(instead)
        assert [list(record["dropped"]) for record in seen.history] == [[], [], [], ["b"], [], []]
        assert why in seen.history[3]["dropped"]["b"]
        same_bytes(seen.state, without.state)
        same_bytes(seen.memory, without.memory)


def test_a_value_that_is_no_tensor_costs_its_site_alone() -> None:
    one = Wired(small(METHODS["fedavg"]), rounds=Rounds(rounds=3, evaluate_every=0), wire=Wire(up="bfloat16"))
    inner = SequentialExchange(one.site)

    def exchange(messages: Mapping[str, Broadcast]) -> Iterator[tuple[str, Reply]]:
        for site, reply in inner(messages):
            if messages[site].round == 1 and site == "b" and isinstance(reply, Update):
                yield site, replace(reply, state={**reply.state, "x": 5})
            else:
                yield site, reply

    dropped = [record["dropped"] for record in one.run(exchange).history]
    assert [list(sites) for sites in dropped] == [[], ["b"], []]
    assert dropped[1]["b"] == "1 unexpected tensor(s), e.g. x"


Make = Callable[..., MemoryFlare]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """A consortium whose every message crosses FLARE's own serialiser; b's replies in ``LAST`` may be changed."""

    def build(change: Callable[[Shareable], Shareable], **fate: Any) -> MemoryFlare:
        def chosen(task: Task) -> Fate:
            if (task.site, task.round, task.phase) == ("b", *LAST):
                return Fate(change=lambda reply: serialised(change(reply)), **fate)
            return Fate()

        flare = MemoryFlare(tmp_path, monkeypatch, toy_experiment(small(FedDRA), rounds=3, evaluate_every=0),
                            three_sites(), chosen)  # fmt: skip
        flare.carry = serialised
        return flare

    return build


def as_without_b(flare: MemoryFlare, folder: Path) -> None:
    """The bytes of the plain round loop in which b's reply in ``LAST`` was not heard."""
    server, model = in_engine(flare.experiment, flare.data, folder / "plain",
                              lambda site, message: (site, message.round, message.phase) != ("b", *LAST))  # fmt: skip
    assert flare.run.model.read_bytes() == model.read_bytes()
    same_bytes(Server.load(flare.run.checkpoint)[0].memory, server.memory)


def dropped(flare: MemoryFlare) -> dict[tuple[int, str], dict[str, str]]:
    return {(r["round"], r["phase"]): r["dropped"] for r in flare.records if r["dropped"]}


@pytest.mark.parametrize("of", [(0, "joint"), (1, "align"), (0, "align")])
def test_row_4_flare_hands_on_a_reply_of_another_task_and_it_is_refused(
    make: Make, tmp_path: Path, of: tuple[int, str]
) -> None:
    """b answers the task that it has now, so FLARE takes it, with the very bytes of its answer to an earlier one."""
    old: list[Shareable] = []
    flare = make(lambda reply: old[0])
    fates = flare.fates
    keep = Fate(change=lambda reply: (old.append(serialised(reply)), reply)[1])
    flare.fates = lambda task: keep if (task.site, task.round, task.phase) == ("b", *of) else fates(task)
    flare.submit()
    assert list(dropped(flare)) == [LAST]
    assert dropped(flare)[LAST]["b"] == f"it is for round {of[0]} phase a str of 5, expected 1 'joint'"
    as_without_b(flare, tmp_path)


def poisoned(reply: Shareable) -> Shareable:
    """The same reply with every value a thousand times larger, the other way."""
    update = messages.receive_update(reply, "b")
    return messages.send_update(replace(update, state={name: -1e3 * t for name, t in update.state.items()}))


def test_row_4_a_second_reply_in_one_phase_is_refused_whatever_it_holds(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first one counts and the other is named in the log; c is still at work, so the phase is open."""
    flare = make(lambda reply: reply)
    fates = flare.fates

    def twice(reply: Shareable) -> Shareable:
        communicator, site = flare.job.communicator, flare.sites["b"]
        number = next(n for n, t in communicator._client_task_map.items() if t.client.name == "b")

        def again() -> None:
            with flare.job.engine.new_context() as context:
                communicator.process_submission(site.client, "joint", number, serialised(poisoned(reply)), context)

        flare.clock.plan(0.4, again)
        return reply

    def chosen(task: Task) -> Fate:
        if (task.round, task.phase) != LAST:
            return fates(task)
        return {"b": Fate(change=twice), "c": Fate(train=9.0)}.get(task.site, Fate())

    flare.fates = chosen
    with caplog.at_level(logging.INFO):
        flare.submit()
    assert dropped(flare) == {}
    assert re.search("result is already received - submission dropped|late reply of b to joint dropped", caplog.text)
    server, model = in_engine(flare.experiment, flare.data, tmp_path / "plain")
    assert flare.run.model.read_bytes() == model.read_bytes()
    same_bytes(Server.load(flare.run.checkpoint)[0].state, server.state)


def test_row_4_a_second_reply_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """Where an exchange of this process yields it. Neither it nor a stranger's is used."""
    first, second = Update("b", 0, "train", 1), Update("b", 0, "train", 2)
    replies = [("b", first), ("b", second), ("x", second), ("a", first), ("a", second)]
    assert list(in_site_order(replies, ["a", "b"])) == [("a", first), ("b", first)]
    assert caplog.messages == [
        "b: a second reply in one phase is dropped",
        "x: a reply of a site that was not asked is dropped",
        "a: a second reply in one phase is dropped",
    ]


COUNTS: tuple[Any, ...] = (
    -1, 2.5, 12.0, 1e30, 2**63 - 1, math.nan, math.inf, True, False, None, "12", b"12", [12], {"b": 12},
    torch.tensor(12), torch.tensor([12.0]),
)  # fmt: skip
"""What is no number of samples, though FLARE serialises all of it; one a round."""


def test_row_7_a_count_that_is_none_is_refused_after_the_wire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each costs b that round alone, in words, and the model is that of the rounds in which b was not heard."""

    def lie(task: Task) -> Fate:
        if task.site != "b" or task.round >= len(COUNTS):
            return Fate()
        return Fate(change=lambda reply: serialised(told(num_samples=COUNTS[task.round])(reply)))

    settings = {"rounds": len(COUNTS) + 1, "max_missed": 99, "evaluate_every": 0}
    flare = MemoryFlare(tmp_path, monkeypatch, toy_experiment(**settings), three_sites(), lie)
    flare.carry = serialised
    job = flare.submit()
    assert (job.panic, job.died) == ("", None)
    found = dropped(flare)
    assert list(found) == [(round, "train") for round in range(len(COUNTS))]
    assert all(list(why) == ["b"] and why["b"].startswith("num_samples is ") for why in found.values())
    heard = {("b", round) for round in range(len(COUNTS))}
    _, model = in_engine(flare.experiment, flare.data, tmp_path / "plain",
                              lambda site, message: (site, message.round) not in heard)  # fmt: skip
    assert flare.run.model.read_bytes() == model.read_bytes()


AVERAGED = [name for name, kind in METHODS.items() if not kind.uses_public and name not in ("local", "centralized")]


@pytest.mark.parametrize(
    ("name", "averaging"),
    cases(zip(AVERAGED, itertools.cycle(("mean", "trimmed", "median"))), often=("fedavg", *KINDS), seconds=1),
)
def test_row_7_0_samples_weigh_nothing_whatever_they_come_with(name: str, averaging: str) -> None:
    """0 is no fault, and no vote: in no average does it matter what such a site sends."""

    def run(factor: float) -> Server:
        one = Wired(small(METHODS[name]), rounds=Rounds(rounds=2, evaluate_every=0, averaging=averaging))
        inner = SequentialExchange(one.site)

        def idle(messages: Mapping[str, Broadcast]) -> Iterator[tuple[str, Reply]]:
            for site, reply in inner(messages):
                if site == "b" and isinstance(reply, Update):
                    state = {n: factor * t if t.is_floating_point() else t for n, t in reply.state.items()}
                    reply = replace(reply, num_samples=0, state=state)
                yield site, reply

        return one.run(idle)

    seen = run(-1e3)
    assert all(not record["dropped"] for record in seen.history)
    honest = run(1.0)
    same_bytes(seen.state, honest.state)
