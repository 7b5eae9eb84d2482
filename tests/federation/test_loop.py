"""The round loop: what is sent, who is left out, what a lost quorum leaves behind, and what a checkpoint holds."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from support.toy import World, clone, same_bytes, small

from fedvlp.core.aggregation import Aggregator, in_site_order, payload
from fedvlp.core.method import Method
from fedvlp.core.server_state import Server
from fedvlp.core.types import EVALUATE, Broadcast, Expected, Failure, FailureKind, Reply, State, Update, group
from fedvlp.federation.loop import Federation, QuorumLostError, Rounds
from fedvlp.methods import METHODS

Answer = Callable[[str, Broadcast], Reply | None]
BOOM = Failure(FailureKind.FAILED, "boom")
START = {"w": torch.tensor([1.0, 1.0]), "n": torch.tensor(5)}


def add_one(site: str, message: Broadcast) -> Update:
    """A site that adds 1, 2 or 3 to w (a, b, c) and says it has 10, 20 or 30 records."""
    number = "abc".index(site) + 1
    state = {} if message.phase == EVALUATE else {"w": message.state["w"] + number, "n": message.state["n"] + 1}
    metrics = {"evaluate": float(message.evaluate)}
    return Update(site, message.round, message.phase, 10 * number, state, metrics=metrics)


class Scripted:
    """An exchange whose sites answer as ``answers`` says; others as ``add_one``. None: no reply."""

    def __init__(self, **answers: Answer) -> None:
        self.answers = answers
        self.asked: list[tuple[int, str, str]] = []
        self.messages: list[Broadcast] = []

    def __call__(self, messages: Mapping[str, Broadcast]) -> Iterator[tuple[str, Reply]]:
        for site, message in messages.items():
            self.asked.append((message.round, message.phase, site))
            self.messages.append(message)
            reply = self.answers.get(site, add_one)(site, message)
            if reply is not None:
                yield site, reply


def server(state: State = START) -> Server:
    return Server(("a", "b", "c"), clone(state))


def federation(exchange: Any, method: Method | None = None, one: Server | None = None, **options: Any) -> Federation:
    rounds = {"evaluate_every": 0, "rounds": 2, **{k: v for k, v in options.items() if k in Rounds.__annotations__}}
    rest = {k: v for k, v in options.items() if k not in rounds}
    return Federation(method or Method(weighting="uniform"), one or server(), Rounds(**rounds), exchange, **rest)


def failing(*rounds: int) -> Answer:
    return lambda site, message: BOOM if message.round in rounds else add_one(site, message)


def test_two_rounds_by_hand() -> None:
    """Uniform: each round adds (1 + 2 + 3)/3 = 2, so w = 1 + 2 + 2 = 5; the integer stays the server's."""
    run = federation(Scripted())
    state = run.run()
    assert state["w"].tolist() == [5.0, 5.0]
    assert state["n"].item() == 5
    assert run.server.round == 2
    assert run.server.samples == {"a": 10, "b": 20, "c": 30}


def test_a_sample_weighted_round_by_hand() -> None:
    """(10*1 + 20*2 + 30*3)/60 = 140/60 = 7/3."""
    state = federation(Scripted(), Method(), rounds=1).run()
    assert state["w"].tolist() == pytest.approx([1 + 7 / 3] * 2)


def test_what_the_record_of_a_phase_says() -> None:
    run = federation(Scripted(c=failing(0)), rounds=1)
    run.run()
    (record,) = run.server.history
    assert (record["round"], record["phase"], record["members"]) == (0, "train", ["a", "b", "c"])
    assert set(record["sites"]) == {"a", "b"}
    assert record["dropped"] == {"c": "boom"}
    assert record["bytes"] == {"bytes_down": 3 * 16, "bytes_up": 2 * 16}  # two float32 and one int64
    assert 0 <= record["seconds"] < 60


@dataclass(frozen=True)
class Restless(Method):
    """Changes the server's memory and model wherever it may: before the messages, and while updates come in."""

    weighting: str = "uniform"

    def start(self, server: Server) -> None:
        server.memory["count"] = torch.zeros(1)

    def prepare(self, server: Server) -> None:
        server.memory["count"] = server.memory["count"] + 1
        server.memory[f"prepared in round {server.round}"] = torch.ones(1)
        server.replace({"w": server.state["w"] + 100})

    def aggregator(self, server: Server, phase: str) -> Aggregator:
        mean = super().aggregator(server, phase)

        class Noting:
            def add(self, update: Update) -> None:
                server.memory = server.memory | {f"seen/{update.site}": update.state["w"].clone()}
                mean.add(update)

            def commit(self) -> None:
                mean.commit()

        return Noting()


def test_below_the_quorum_the_methods_memory_is_as_it_was() -> None:
    """Round 1 loses its quorum after ``prepare`` and two updates; the same server then goes on as if nothing was."""
    before: list[tuple[State, State]] = []

    def report(record: dict[str, Any]) -> None:
        before.append((clone(broken.server.state), clone(broken.server.memory)))

    broken = federation(Scripted(c=failing(1)), Restless(), rounds=3, quorum=3, report=report)
    with pytest.raises(QuorumLostError):
        broken.run()
    state, memory = before[-1]
    assert memory.keys() == {"count", "prepared in round 0", "seen/a", "seen/b", "seen/c"}
    same_bytes(broken.server.state, state)
    same_bytes(broken.server.memory, memory)
    resumed = federation(Scripted(), Restless(), broken.server, rounds=3, quorum=3)
    whole = federation(Scripted(), Restless(), rounds=3, quorum=3)
    same_bytes(resumed.run(), whole.run())
    same_bytes(resumed.server.memory, whole.server.memory)


def test_below_the_quorum_the_counts_of_records_and_of_missed_phases_are_as_they_were() -> None:
    """In the first round, before which there are none."""
    run = federation(Scripted(c=failing(0)), quorum=3)
    with pytest.raises(QuorumLostError):
        run.run()
    assert (run.server.samples, run.server.missed) == ({}, {})


def test_quorum() -> None:
    by_hand = [(0, 1, 1), (0, 2, 1), (0, 5, 4), (2, 5, 2), (5, 5, 5), (9, 5, 5), (1, 1, 1)]
    assert [(quorum, sites, Rounds(quorum=quorum).needed(sites)) for quorum, sites, _ in by_hand] == by_hand


def test_a_silent_site_is_named() -> None:
    run = federation(Scripted(b=lambda site, message: None), rounds=1)
    run.run()
    assert run.server.history[0]["dropped"] == {"b": "no reply"}


def test_a_site_that_missed_too_often_is_benched_probed_and_taken_back() -> None:
    """c fails in rounds 0-3. After 2 misses it is left out (2), probed in round 3 (fails), 4, 5 left out, 6 is good."""
    exchange = Scripted(c=failing(0, 1, 2, 3))
    run = federation(exchange, rounds=9, max_missed=2, probe_every=3, quorum=2)
    run.run()
    assert [round for round, _, site in exchange.asked if site == "c"] == [0, 1, 3, 6, 7, 8]
    assert [record["dropped"].get("c") for record in run.server.history] == [
        "boom", "boom", "left out after missed phases", "boom",
        "left out after missed phases", "left out after missed phases", None, None, None,
    ]  # fmt: skip
    assert run.server.missed == {"a": 0, "b": 0, "c": 0}


def test_who_is_left_out_leaves_nobody_else_out() -> None:
    """a, the first to be asked, is benched in round 2."""
    exchange = Scripted(a=failing(0, 1))
    federation(exchange, rounds=3, max_missed=2, quorum=2).run()
    assert [site for round, _, site in exchange.asked if round == 2] == ["b", "c"]


@dataclass(frozen=True)
class Choosy(Method):
    """Trains with b and c alone."""

    weighting: str = "uniform"

    def asks(self, server: Server) -> tuple[str, ...]:
        return ("b", "c")


def test_a_method_chooses_who_trains_and_everybody_evaluates() -> None:
    """(2 + 3)/2 = 2.5; the evaluation's quorum is that of all three sites."""
    exchange = Scripted()
    run = federation(exchange, Choosy(), rounds=1, evaluate_every=1)
    assert run.run()["w"].tolist() == [3.5, 3.5]
    assert exchange.asked == [(0, "train", "b"), (0, "train", "c"), *((1, EVALUATE, site) for site in "abc")]


def test_of_benched_sites_those_that_are_known_to_be_there_are_asked_when_a_run_goes_on(tmp_path: Path) -> None:
    """b and c were benched in round 2, of which c is there: it is asked, and when it fails, benched again."""
    path = tmp_path / "s"
    federation(Scripted(b=failing(0, 1), c=failing(0, 1)), rounds=2, quorum=1, checkpoint=path).run()
    saved, phase = Server.load(path)
    exchange = Scripted(c=failing(2))
    federation(exchange, one=saved, rounds=5, quorum=1, probe_every=10, present="ac").run(phase)
    assert [(round, site) for round, _, site in exchange.asked] == [(2, "a"), (2, "c"), (3, "a"), (4, "a")]
    assert saved.missed == {"a": 0, "b": 5, "c": 5}


NO_ROUNDS: dict[str, tuple[Any, ...]] = {
    "rounds": (-1,), "quorum": (-1,), "evaluate_every": (-1,), "max_samples": (-1,), "max_missed": (0,),
    "probe_every": (0,), "max_empty": (0,), "clip_to_median": (-1.0, 0.5, 0.999, math.inf, math.nan),
    "samples_factor": (0.9, math.inf), "max_share": (0.0, 1.1, math.nan), "averaging": ("mode",), "trim": (0.5,),
    "server_optimizer": ("sgd",), "server_lr": (-1.0, math.inf), "server_beta1": (1.0,), "server_beta2": (-0.1,),
    "server_tau": (0.0,),
}  # fmt: skip


@pytest.mark.parametrize("field", NO_ROUNDS)
def test_rounds_refuses_what_cannot_work(field: str) -> None:
    for value in NO_ROUNDS[field]:
        with pytest.raises(ValueError, match=field):
            Rounds(**{field: value})


def test_the_least_values_of_rounds_are_taken() -> None:
    for clip in (0.0, 1.0, 1.5):
        assert Rounds(clip_to_median=clip).clip_to_median == clip
    Rounds(rounds=0, quorum=0, evaluate_every=0, max_samples=0, max_missed=1, probe_every=1, max_empty=1)
    Rounds(samples_factor=1, max_share=1, trim=0)


@pytest.mark.parametrize("sites", [("b", "a"), ("a", "a"), ()])
def test_the_sites_of_a_run_are_sorted_and_distinct(sites: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="site"):
        federation(Scripted(), one=Server(sites, clone(START)))


@pytest.mark.parametrize(("every", "wanted"), [(0, [0, 0, 0, 0]), (1, [2, 1, 1, 1, 2]), (2, [2, 0, 1, 0, 2])])
def test_when_sites_evaluate(every: int, wanted: list[int]) -> None:
    """2 = with the test split: of the initial model and, in a phase of its own, of the trained one."""
    exchange = Scripted()
    run = federation(exchange, rounds=4, evaluate_every=every)
    run.run()
    assert [m.evaluate for m in exchange.messages[::3]] == wanted
    assert [record["phase"] for record in run.server.history] == ["train"] * 4 + ["evaluate"] * bool(every)
    assert exchange.messages[-1].round == (4 if every else 3)
    assert run.server.state["w"].tolist() == [9.0, 9.0]  # the evaluation changed nothing


def test_a_finished_run_is_not_run_again(tmp_path: Path) -> None:
    path = tmp_path / "s"
    federation(Scripted(), evaluate_every=1, checkpoint=path).run()
    saved, phase = Server.load(path)
    assert phase == 0
    exchange = Scripted()
    state = federation(exchange, one=saved, evaluate_every=1, checkpoint=path).run(phase)
    assert exchange.asked == []
    assert state["w"].tolist() == [5.0, 5.0]


@dataclass(frozen=True)
class Halves(Method):
    """Two phases: ``one`` shares w alone, ``two`` everything; counts its phases in memory."""

    weighting: str = "uniform"

    def phases(self, round: int) -> tuple[str, ...]:
        return ("one", "two") if round % 2 == 0 else ("two",)

    def shares(self, name: str, phase: str) -> bool:
        return phase == "two" or group(name) == "w"

    def start(self, server: Server) -> None:
        server.memory["count"] = torch.zeros(1)

    def aggregator(self, server: Server, phase: str) -> Aggregator:
        mean = super().aggregator(server, phase)

        class Counting:
            add = staticmethod(mean.add)

            def commit(self) -> None:
                mean.commit()
                server.memory = {"count": server.memory["count"] + 1}

        return Counting()


def halves(site: str, message: Broadcast) -> Update:
    names = ("w",) if message.phase == "one" else ("w", "v")
    return Update(site, message.round, message.phase, 1, {name: message.state[name] + 1 for name in names})


def halves_run(path: Path | None, one: Server | None = None, stop: int = 99) -> Federation:
    def report(record: dict[str, Any]) -> None:
        if len(run.server.history) == stop:
            raise InterruptedError

    exchange = Scripted(a=halves, b=halves, c=halves)
    one = one or server({"w": torch.zeros(1), "v": torch.zeros(1)})
    run = federation(exchange, Halves(), one, rounds=3, checkpoint=path, report=report)
    return run


def test_phases_and_what_each_shares() -> None:
    """Rounds of two, one and two phases: w is moved in all five, v in the three "two" ones."""
    run = halves_run(None)
    state = run.run()
    assert (state["w"].item(), state["v"].item(), run.server.memory["count"].item()) == (5, 3, 5)
    assert [(r["round"], r["phase"]) for r in run.server.history] == [
        (0, "one"), (0, "two"), (1, "two"), (2, "one"), (2, "two"),
    ]  # fmt: skip


def test_a_round_is_missed_with_all_its_phases() -> None:
    """Two rounds of two phases are four misses: c, silent in one phase of round 2, is asked in the next."""

    def silent_once(site: str, message: Broadcast) -> Reply:
        return BOOM if (message.round, message.phase) == (2, "one") else halves(site, message)

    exchange = Scripted(a=halves, b=halves, c=silent_once)
    one = server({"w": torch.zeros(1), "v": torch.zeros(1)})
    federation(exchange, Halves(), one, rounds=3, max_missed=2).run()
    assert (2, "two", "c") in exchange.asked


def test_rounds_of_unlike_length_are_missed_by_their_own_phases() -> None:
    """Round 0 has two phases, later ones one: c, silent in round 1 alone, or in round 0 alone, is asked in round 2."""

    class Shorter(Halves):
        def phases(self, round: int) -> tuple[str, ...]:
            return ("one", "two") if round == 0 else ("one",)

    def silent_in(number: int) -> Scripted:
        return Scripted(a=halves, b=halves, c=lambda s, m: BOOM if m.round == number else halves(s, m))

    for number in (0, 1):
        exchange = silent_in(number)
        one = server({"w": torch.zeros(1), "v": torch.zeros(1)})
        federation(exchange, Shorter(), one, rounds=3, max_missed=2).run()
        assert (2, "one", "c") in exchange.asked


def test_a_quorum_of_more_sites_than_there_are_is_refused() -> None:
    """It would be lowered to the sites that are there, and a site's least quorum with it."""
    with pytest.raises(ValueError, match=r"rounds\.quorum is 4, but the run has 3 sites"):
        federation(Scripted(), quorum=4)


@pytest.mark.parametrize("stop", [1, 2, 3, 4, 5])
def test_a_run_stopped_after_any_phase_goes_on_with_the_next(tmp_path: Path, stop: int) -> None:
    path = tmp_path / "s"
    run = halves_run(path, stop=stop)
    with pytest.raises(InterruptedError):
        run.run()
    saved, phase = Server.load(path)
    assert (saved.round, phase) == [(0, 1), (1, 0), (2, 0), (2, 1), (3, 0)][stop - 1]
    resumed = halves_run(path, saved)
    state = resumed.run(phase)
    whole = halves_run(None)
    same_bytes(state, whole.run())
    same_bytes(resumed.server.memory, whole.server.memory)
    strip = [{k: v for k, v in r.items() if k != "seconds"} for r in resumed.server.history]
    assert strip == [{k: v for k, v in r.items() if k != "seconds"} for r in whole.server.history]


def test_a_tensor_that_this_phase_does_not_share_is_refused() -> None:
    def all_of_it(site: str, message: Broadcast) -> Update:
        return Update(site, message.round, message.phase, 1, {n: t + 1 for n, t in message.state.items()})

    one = server({"w": torch.zeros(1), "v": torch.zeros(1)})
    run = federation(Scripted(a=all_of_it, b=halves, c=halves), Halves(), one, rounds=1)
    run.run()
    assert run.server.history[0]["dropped"]["a"] == "1 unexpected tensor(s), e.g. v"
    assert set(run.server.state) == {"w", "v"}


def test_an_evaluation_may_not_carry_tensors() -> None:
    def sneaks(site: str, message: Broadcast) -> Update:
        return replace(add_one(site, message), state={"w": torch.zeros(2)})

    run = federation(Scripted(a=sneaks), rounds=0, evaluate_every=1)
    same_bytes(run.run(), START)
    assert "unexpected" in run.server.history[0]["dropped"]["a"]


def test_a_duplicate_or_a_reply_of_a_stranger_does_not_count() -> None:
    """An exchange may hand replies on through ``in_site_order`` itself, as workers do."""

    def noisy(messages: Mapping[str, Broadcast]) -> Iterator[tuple[str, Reply]]:
        for site, message in messages.items():
            reply = add_one(site, message)
            yield from [(site, reply), (site, replace(reply, state={"w": torch.full((2,), 99.0)}))]
            yield "x", replace(reply, site="x")

    state = federation(lambda messages: in_site_order(noisy(messages), list(messages)), rounds=1).run()
    assert state["w"].tolist() == [3.0, 3.0]  # as without them


def test_a_checkpoint_holds_everything(tmp_path: Path) -> None:
    one = server()
    one.memory = {"weights": torch.tensor([0.2, 0.8], dtype=torch.float64)}
    one.round, one.samples, one.missed = 7, {"a": 3}, {"b": 2}
    one.history = [{"round": 6, "phase": "train", "sites": {"a": {"loss": 0.1}}, "dropped": {}}]
    one.save(tmp_path / "s", 1)
    back, phase = Server.load(tmp_path / "s")
    assert phase == 1
    assert (back.sites, back.round, back.samples, back.missed, back.history) == (
        one.sites, one.round, one.samples, one.missed, one.history)  # fmt: skip
    same_bytes(back.state, one.state)
    same_bytes(back.memory, one.memory)


def test_records_are_reported_in_their_order_after_they_are_safe(tmp_path: Path) -> None:
    path, seen = tmp_path / "s", []

    def report(record: dict[str, Any]) -> None:
        seen.append((record["round"], record["phase"], len(Server.load(path)[0].history)))

    federation(Scripted(), rounds=2, evaluate_every=1, checkpoint=path, report=report).run()
    assert seen == [(0, "train", 1), (1, "train", 2), (2, EVALUATE, 3)]


def test_how_far_each_update_goes_is_the_servers_figure() -> None:
    """w moves by 1, 2 and 3 in both of its numbers; an evaluation moves nothing, so nothing is said of it."""
    run = federation(Scripted(), rounds=1, evaluate_every=1)
    run.run()
    expected = {f"update_norm/{site}": number * math.sqrt(2) for number, site in enumerate("abc", 1)}
    assert run.server.history[0]["server"] == pytest.approx(expected)
    assert run.server.history[1]["server"] == {}


class Ignores:
    """An aggregator that takes nothing over."""

    def add(self, update: Update) -> None:
        pass

    def commit(self) -> None:
        pass


@dataclass(frozen=True)
class Extra(Method):
    """Expects one tensor more than the model has."""

    def expects(self, server: Server, site: str) -> Expected:
        return Expected({**super().expects(server, site).state, "extra": torch.zeros(1)})

    def aggregator(self, server: Server, phase: str) -> Aggregator:
        return Ignores()


def test_tensors_that_are_not_the_models_do_not_hide_how_far_it_moved() -> None:
    def more(site: str, message: Broadcast) -> Update:
        update = add_one(site, message)
        return replace(update, state={**update.state, "extra": torch.ones(1)})

    run = federation(Scripted(a=more, b=more, c=more), Extra(), rounds=1)
    run.run()
    assert run.server.history[0]["dropped"] == {}
    assert run.server.history[0]["server"]["update_norm/a"] == pytest.approx(math.sqrt(2))


def test_the_record_has_the_memory_with_one_number_a_site_and_no_model() -> None:
    @dataclass(frozen=True)
    class Remembers(Method):
        def start(self, server: Server) -> None:
            server.memory |= {"by site": torch.arange(3.0), "personal/a": torch.zeros(3), "two": torch.zeros(2)}

    run = federation(Scripted(), Remembers(), rounds=1)
    run.run()
    assert run.server.history[0]["memory"] == {"by site": [0, 1, 2]}


def test_a_site_that_is_asked_for_the_first_time_has_missed_nothing() -> None:
    """a is not asked in round 0, and the first miss already benches."""

    @dataclass(frozen=True)
    class Late(Method):
        weighting: str = "uniform"

        def asks(self, server: Server) -> tuple[str, ...]:
            return server.sites[1:] if server.round == 0 else server.sites

    exchange = Scripted()
    federation(exchange, Late(), max_missed=1).run()
    assert [site for round, _, site in exchange.asked if round == 1] == ["a", "b", "c"]


@dataclass(frozen=True)
class Probing(Halves):
    """Needs a scalar of every site in the first phase of a round."""

    def probes(self) -> tuple[str, ...]:
        return ("hardness",)


@pytest.mark.parametrize(
    ("phases", "dropped"), [(("one", EVALUATE), []), (("two", EVALUATE), ["c"]), (("one",), ["c"])]
)
def test_probes_are_needed_in_a_rounds_first_phase_and_in_the_evaluation(
    phases: tuple[str, ...], dropped: list[str]
) -> None:
    """c sends the scalar in ``phases`` alone; a and b where it is needed."""

    def sending(*where: str) -> Answer:
        def answer(site: str, message: Broadcast) -> Update:
            scalars = {"hardness": 1.0} if message.phase in where else {}
            if message.phase == EVALUATE:
                return Update(site, message.round, message.phase, 1, scalars=scalars)
            return replace(halves(site, message), scalars=scalars)

        return answer

    needed = sending("one", EVALUATE)
    run = federation(
        Scripted(a=needed, b=needed, c=sending(*phases)), Probing(),
        server({"w": torch.zeros(1), "v": torch.zeros(1)}), rounds=1, evaluate_every=1,
    )  # fmt: skip
    run.run()
    assert [record["phase"] for record in run.server.history] == ["one", "two", EVALUATE]
    assert sorted({site for record in run.server.history for site in record["dropped"]}) == dropped


class PublicSet:
    """A server that holds public records with the id 7."""

    client = SimpleNamespace(public_id=7)

    def measure(self, state: State, splits: int) -> dict[str, float]:
        return {"splits": float(splits)}

    def served(self, state: State) -> State:
        return state


def test_a_site_with_other_public_records_is_dropped_and_the_others_say_what_they_hold() -> None:
    def holding(public_id: int, *modalities: str) -> Answer:
        return lambda site, message: replace(add_one(site, message), public_id=public_id, modalities=modalities)

    exchange = Scripted(a=holding(7, "text", "image"), b=holding(7, "text"), c=holding(8, "image"))
    run = federation(exchange, rounds=1)
    run.server.trainer = cast("Any", PublicSet())
    run.run()
    assert [message.public_id for message in exchange.messages] == [7, 7, 7]
    (record,) = run.server.history
    assert list(record["dropped"]) == ["c"]
    assert "another list of public records" in record["dropped"]["c"]
    assert run.server.modalities == {"a": ("image", "text"), "b": ("text",)}
    assert record["server"]["splits"] == 0


def test_without_public_records_modalities_are_not_noted() -> None:
    run = federation(Scripted(), rounds=1)
    run.run()
    assert run.server.modalities == {}


def test_a_large_model_alternates_between_two_sets_of_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond EXACT_NUMEL, the mean of one round is made in the tensors of the model before the last."""
    import fedvlp.core.aggregation as aggregation
    import fedvlp.core.server_state as server_module

    for module in (aggregation, server_module):
        monkeypatch.setattr(module, "EXACT_NUMEL", 0)
    addresses = []
    run = federation(Scripted(), rounds=6, report=lambda record: addresses.append(run.server.state["w"].data_ptr()))
    assert run.run()["w"].tolist() == pytest.approx([13.0, 13.0])
    assert len(set(addresses)) == 2


def test_payload_counts_bytes() -> None:
    assert payload(Broadcast(0, "x", START, aux={"y": torch.zeros(3, dtype=torch.float64)})) == 8 + 8 + 24


class OneAtATime(Mapping[str, torch.Tensor]):
    """Tensors made when they are asked for, as if from disk; ``most`` of them were alive at one time."""

    def __init__(self) -> None:
        self.alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
        self.most = 0

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = torch.zeros(3)
        self.alive.add(tensor)
        self.most = max(self.most, len(self.alive))
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter("abcdef")

    def __len__(self) -> int:
        return 6


def test_counting_bytes_holds_no_more_of_an_update_on_disk_than_reading_it() -> None:
    """It held all of it once: 0.7 models of the server's peak."""
    read, counted = OneAtATime(), OneAtATime()
    for tensor in read.values():
        assert len(tensor) == 3
    assert payload(Broadcast(0, "x", cast("State", counted))) == 6 * 12
    assert counted.most <= read.most


def empty_in(*rounds: int) -> Answer:
    return lambda site, message: replace(add_one(site, message), num_samples=int(message.round not in rounds))


def test_a_phase_with_samples_starts_the_count_of_empty_ones_anew() -> None:
    """Empty in rounds 0, 2 and 3, where the second in a row ends the run."""
    answer = empty_in(0, 2, 3)
    run = federation(Scripted(a=answer, b=answer, c=answer), rounds=5, max_empty=2)
    with pytest.raises(QuorumLostError, match=r"round 3: no site reported a training sample for 2 phases"):
        run.run()


def test_one_site_without_samples_makes_no_phase_empty() -> None:
    run = federation(Scripted(c=empty_in(0, 1)), max_empty=1)
    run.run()
    assert run.server.round == 2


class Hostile(dict[str, torch.Tensor]):
    """Tensors that raise when they are looked at."""

    def keys(self) -> Any:
        raise ZeroDivisionError("Jane Doe")


@pytest.mark.parametrize(
    "broken",
    [{"state": Hostile()}, {"state": 7}, {"modalities": 7}, {"metrics": None}, {"num_samples": "x"}, {"aux": [1]}],
    ids=lambda broken: next(iter(broken)),
)
def test_a_reply_that_breaks_its_own_check_costs_its_site_this_phase(broken: dict[str, Any]) -> None:
    """Without c the mean of 1 and 2 is added: 2.5. Nothing that the site sent is told."""

    def hostile(site: str, message: Broadcast) -> Update:
        return replace(add_one(site, message), **broken)

    for clip in (0.0, 2.0):
        run = federation(Scripted(c=hostile), rounds=1, clip_to_median=clip)
        assert run.run()["w"].tolist() == [2.5, 2.5]
        (record,) = run.server.history
        assert list(record["dropped"]) == ["c"]
        assert "Jane" not in record["dropped"]["c"]


def test_an_error_while_updates_are_folded_leaves_the_server_as_it_was() -> None:
    @dataclass(frozen=True)
    class Breaks(Method):
        def aggregator(self, server: Server, phase: str) -> Aggregator:
            mean = super().aggregator(server, phase)

            class Half:
                add = staticmethod(mean.add)

                def commit(self) -> None:
                    mean.commit()
                    server.memory["half"] = torch.ones(1)
                    raise RuntimeError("half way")

            return Half()

    run = federation(Scripted(), method=Breaks(), rounds=1)
    with pytest.raises(RuntimeError, match="half way"):
        run.run()
    same_bytes(run.server.state, START)
    assert run.server.memory == {}


@pytest.mark.parametrize("averaging", ["trimmed", "median"])
def test_a_robust_average_is_refused_where_nothing_is_averaged(averaging: str) -> None:
    @dataclass(frozen=True)
    class Alone(Method):
        def shares(self, name: str, phase: str) -> bool:
            return False

    with pytest.raises(ValueError, match=f"Alone averages no tensors of the model; rounds.averaging={averaging}"):
        federation(Scripted(), Alone(), averaging=averaging)
    federation(Scripted(), Alone())


def test_a_refused_reply_says_nothing_about_what_its_site_has() -> None:
    """Which sites supply which modality decides about weights: only an update that is used may change it."""
    world = World(small(METHODS["creamfl"]), rounds=Rounds(rounds=1, evaluate_every=0))
    federation, _ = world.federation()
    federation.server.phase = "train"
    before = dict(federation.server.modalities)
    public_id = world.client("server").public_id
    lie = Update("b", 0, "train", -1, modalities=("text",), public_id=public_id)
    assert federation._problem("b", lie)
    assert federation.server.modalities == before
    assert before["b"] == ("image", "text")
