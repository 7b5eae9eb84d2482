"""In turn or side by side: the same bytes; and what is left when a process is killed at any moment."""

from __future__ import annotations

import errno
import gc
import itertools
import json
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import cases
from support.laboratory import METHODS
from support.toy import ADAMW, Fuse, Pairs, Toy, World, forked, pairs, same_bytes, small, three_sites

from fedvlp.core.method import Method
from fedvlp.core.metric_keys import TIMES
from fedvlp.core.server_state import Server
from fedvlp.core.types import Broadcast, Failure, FailureKind, Reply, State, Update
from fedvlp.federation import frames
from fedvlp.federation.exchange import SequentialExchange, WorkerPool, answer, headed, joined
from fedvlp.federation.loop import Rounds
from fedvlp.methods import FedAvg, MFedAvg
from fedvlp.training.local_training import Aborted
from fedvlp.training.settings import Training

SMALL = {name: small(kind) for name, kind in METHODS.items() if name != "centralized"}
SMALL |= {name: replace(method, best_by="") for name, method in SMALL.items() if isinstance(method, MFedAvg)}


def world(method: Method, folder: Path | None = None, **options: Any) -> World:
    """Three sites, three rounds, dropout: everything that draws random numbers."""
    options = {"rounds": Rounds(rounds=3, evaluate_every=0), "model": lambda: Toy(norm=True, dropout=0.3), **options}
    return World(method, training=ADAMW, folder=folder, **options)


def facts(server: Server) -> list[dict[str, Any]]:
    """The history without the clock."""
    history = json.loads(json.dumps(server.history))
    for record in history:
        del record["seconds"]
        for metrics in record["sites"].values():
            for name in TIMES:
                metrics.pop(name, None)
    return history


def site_memories(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("sites/*/[0-9]*"))}


def anew(one: World) -> Any:
    """Sites whose every task meets new modules and a new site object: nothing lives in the process between two."""

    def exchange(messages: Mapping[str, Broadcast]) -> Iterator[tuple[str, Reply]]:
        for site, message in messages.items():
            one._modules = None
            yield site, answer(one.site(site), message)

    return exchange


@pytest.mark.parametrize(
    ("name", "statistics"),
    [*cases([(name, "averaged") for name in SMALL], seconds=3), pytest.param("feddra", "site")],
)
def test_every_place_gives_the_same_bytes_and_another_seed_does_not(tmp_path: Path, name: str, statistics: str) -> None:
    """In turn, whatever the global generator holds; anew for each task, as in a simulator with fewer threads than
    sites; and in two forked processes. Killed and resumed: below."""

    def place(kind: str, **options: Any) -> World:
        return world(SMALL[name], tmp_path / kind, norm_statistics=statistics, **options)

    torch.manual_seed(1)
    expected = place("in turn").run()
    torch.manual_seed(2)
    aside, renewed = place("aside"), place("anew")
    with WorkerPool(aside.site, ("a", "b", "c"), 2) as exchange:
        found = {"aside": aside.run(exchange), "anew": renewed.run(anew(renewed))}
    for kind, seen in found.items():
        same_bytes(seen.state, expected.state)
        same_bytes(seen.memory, expected.memory)
        assert facts(seen) == facts(expected), kind
        assert site_memories(tmp_path / kind) == site_memories(tmp_path / "in turn"), kind
    assert facts(place("other", rounds=Rounds(rounds=3, evaluate_every=0, seed=1)).run()) != facts(expected)


def test_a_site_is_built_once_and_belongs_to_one_worker() -> None:
    built: list[tuple[str, int]] = []

    class Counting:
        def __init__(self, name: str) -> None:
            built.append((name, os.getpid()))

        def handle(self, message: Broadcast) -> Update:
            return Update("x", message.round, message.phase, len(built), metrics={"pid": float(os.getpid())})

    with WorkerPool(Counting, ("a", "b", "c"), 2) as exchange:  # type: ignore[arg-type]
        rounds = [dict(exchange({s: Broadcast(r, "train", {}) for s in "abc"})) for r in range(2)]
    assert built == []  # not in this process
    first, second = ({s: u.metrics["pid"] for s, u in replies.items()} for replies in rounds)  # type: ignore
    assert first == second
    assert first["a"] == first["c"] != first["b"]
    assert rounds[1]["c"].num_samples == 2  # type: ignore[union-attr]


def test_workers_share_the_visible_gpus_in_turn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ten sites on eight pretended GPUs; a worker that is replaced has the GPU of the one before it."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    sites = tuple(f"site-{number}" for number in range(10))

    class Where:
        def __init__(self, name: str) -> None:
            self.name = name

        def handle(self, message: Broadcast) -> Update:
            with (tmp_path / self.name).open("a") as file:
                file.write(f"{Training(device='cuda').torch_device()}\n")
            if self.name == "site-3" and message.round == 0:
                os._exit(1)
            return Update(self.name, message.round, message.phase, 1)

    with WorkerPool(Where, sites, 10) as exchange:  # type: ignore[arg-type]
        for number in range(2):
            dict(exchange(dict.fromkeys(sites, Broadcast(number, "train", {}))))
    used = {site: (tmp_path / site).read_text().split() for site in sites}
    assert used == {site: 2 * [f"cuda:{number % 8}"] for number, site in enumerate(sites)}
    assert "LOCAL_RANK" not in os.environ, "this process is none of the workers"


def test_workers_answer_in_site_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """a is released only when the reply of b has been read."""
    read, write = os.pipe()

    class Waits:
        def __init__(self, name: str) -> None:
            self.name = name

        def handle(self, message: Broadcast) -> Update:
            if self.name == "a":
                os.read(read, 1)
            return Update(self.name, 0, "train", 1)

    with WorkerPool(Waits, ("a", "b"), 2) as exchange:  # type: ignore[arg-type]
        receive, arrived = exchange._receive, []

        def noting(index: int) -> Reply:
            reply = receive(index)
            arrived.append("ab"[index])
            os.write(write, b"x")
            return reply

        monkeypatch.setattr(exchange, "_receive", noting)
        replies = list(exchange({s: Broadcast(0, "train", {}) for s in "ab"}))
    assert arrived == ["b", "a"]
    assert [site for site, _ in replies] == ["a", "b"]


def test_close_ends_the_workers() -> None:
    exchange = WorkerPool(world(SMALL["fedavg"]).site, ("a", "b"), 2)
    processes = [process for process, _ in exchange._workers.values()]
    assert all(process.is_alive() for process in processes)
    exchange.close()
    assert not any(process.is_alive() for process in processes)


class Broken(Pairs):
    """Fails in the way it is told, at its training batch number ``at``, once."""

    def __init__(self, at: int, how: str, flag: Path) -> None:
        super().__init__(*pairs(1).content["train"])
        self.at, self.how, self.flag, self.count = at, how, flag, 0
        self.tick = self._break

    def _break(self) -> None:
        self.count += 1
        if self.count != self.at or self.flag.exists():
            return
        self.flag.touch()
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "exit":
            os._exit(3)
        if self.how == "abort":
            raise Aborted("stop")
        raise RuntimeError("no such luck")


@pytest.mark.parametrize(
    ("how", "said"), [("kill", "exit code -9"), ("exit", "exit code 3"), ("raise", "RuntimeError")]
)
def test_a_worker_that_dies_in_a_task_costs_its_site_that_phase_only(tmp_path: Path, how: str, said: str) -> None:
    """b dies at its 4th batch, in round 1: that round is the mean of a and c, and b is back in round 2."""
    method = FedAvg(local_steps=2)
    data = {**three_sites(), "b": Broken(4, how, tmp_path / "broken")}
    one = world(method, tmp_path, data=data)
    with WorkerPool(one.site, ("a", "b", "c"), 3) as exchange:
        seen = one.run(exchange)
    dropped = [record["dropped"] for record in seen.history]
    assert [list(d) for d in dropped] == [[], ["b"], []]
    assert said in dropped[1]["b"]
    assert "no such luck" not in dropped[1]["b"]  # the text of a foreign exception may name a patient

    class Without:
        """The same run in one process, in which b does not answer in round 1."""

        def __init__(self, inner: SequentialExchange) -> None:
            self.inner = inner

        def __call__(self, messages: Mapping[str, Broadcast]) -> Any:
            for site, reply in self.inner(messages):
                silent = site == "b" and messages[site].round == 1
                yield site, RuntimeError() if silent else reply

    other = world(method)
    same_bytes(seen.state, other.run(Without(SequentialExchange(other.site))).state)


def test_a_worker_with_two_sites_that_dies_costs_only_the_site_it_was_at(tmp_path: Path) -> None:
    data = {**three_sites(), "a": Broken(1, "kill", tmp_path / "broken")}
    one = world(FedAvg(local_steps=1), data=data, rounds=Rounds(rounds=1, evaluate_every=0, quorum=1))
    with WorkerPool(one.site, ("a", "b", "c"), 1) as exchange:
        assert list(one.run(exchange).history[0]["dropped"]) == ["a"]


def test_a_worker_that_dies_between_tasks_costs_one_phase(tmp_path: Path) -> None:
    one = world(FedAvg(local_steps=1))

    def kill_once(record: dict[str, Any]) -> None:
        if record["round"] == 0:
            process = exchange._workers[1][0]
            os.kill(process.pid, signal.SIGKILL)
            process.join()

    with WorkerPool(one.site, ("a", "b", "c"), 3) as exchange:
        history = one.run(exchange, report=kill_once).history
    assert [list(record["dropped"]) for record in history] == [[], ["b"], []]


def test_a_worker_that_dies_while_it_is_sent_a_large_model_costs_one_phase() -> None:
    """The worker is stopped, so the sender is in the middle of 8 MB when the worker is killed with bytes unread."""

    class Echo:
        def __init__(self, name: str) -> None:
            self.name = name

        def handle(self, message: Broadcast) -> Update:
            return Update(self.name, message.round, message.phase, 1)

    message = Broadcast(0, "train", {"w": torch.zeros(2_000_000)})
    with WorkerPool(Echo, ("a", "b"), 2) as exchange:  # type: ignore[arg-type]
        pid = exchange._workers[0][0].pid
        os.kill(pid, signal.SIGSTOP)
        timer = threading.Timer(0.3, os.kill, (pid, signal.SIGKILL))
        timer.start()
        replies = dict(exchange({"a": message, "b": message}))
        timer.join()
    assert isinstance(replies["a"], Failure)
    assert replies["a"].kind is FailureKind.LOST
    assert isinstance(replies["b"], Update)


def test_an_exception_in_a_worker_keeps_the_worker() -> None:
    class Moody:
        def __init__(self, name: str) -> None:
            self.calls = 0

        def handle(self, message: Broadcast) -> Update:
            self.calls += 1
            if self.calls == 1:
                raise ValueError("not today")
            return Update("a", 0, "train", self.calls)

    with WorkerPool(Moody, ("a",), 1) as exchange:  # type: ignore[arg-type]
        first, second = (dict(exchange({"a": Broadcast(0, "train", {})}))["a"] for _ in range(2))
    assert first == Failure(FailureKind.FAILED, "ValueError")  # its text may name a patient
    assert second.num_samples == 2  # type: ignore[union-attr]


def test_in_this_process_an_exception_is_an_answer_and_an_abort_is_not(tmp_path: Path) -> None:
    failing, aborting = (world(FedAvg(local_steps=1), data={"b": Broken(1, how, tmp_path / how)}).site("b")
                         for how in ("raise", "abort"))  # fmt: skip
    message = Broadcast(0, "train", world(FedAvg()).server().state)
    assert answer(failing, message) == Failure(FailureKind.FAILED, "RuntimeError")
    with pytest.raises(Aborted):
        answer(aborting, message)


def test_the_header_of_a_message_is_json_and_comes_back() -> None:
    state, aux = {"w": torch.rand(2)}, {"x": torch.ones(1)}
    update = Update("a", 3, "train", 12, state, aux, {"loss": 0.1, "whole": 1}, modalities=("image", "text"))
    assert json.loads(headed(update))["num_samples"] == 12
    assert joined(Update, headed(update), state, aux) == update
    sent = Broadcast(1, "joint", {}, lr_scale=0.1 + 0.2, public_id=2**47 + 1, scalars={"site": 0.1 + 0.2})
    assert joined(Broadcast, headed(sent), {}, {}) == sent


def test_tensors_that_several_sites_are_sent_are_framed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import fedvlp.federation.exchange as engine

    framed: list[str] = []
    real = engine.frame

    def counting(state: State, spool: Path | None) -> Any:
        framed.extend(state)
        return real(state, spool)

    with WorkerPool(world(FedAvg(local_steps=1)).site, ("a", "b", "c"), 1) as exchange:
        monkeypatch.setattr(engine, "frame", counting)
        shared = world(FedAvg()).server().state
        list(exchange({site: Broadcast(0, "train", shared) for site in "abc"}))
    assert framed.count("text_head.bias") == 1


@pytest.mark.parametrize("place", ["memory", "disk", "nowhere"])
def test_large_messages_give_the_same_bytes_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """In memory, in the spool folder, and where neither can be had through the pipe."""
    monkeypatch.setattr(frames, "PIPE_BYTES", 1)
    monkeypatch.setattr(frames, "MEMORY_BYTES", 10**9 if place == "memory" else 0)
    if place == "nowhere":
        monkeypatch.setattr(frames, "_unnamed", refuse)
    expected, one, spool = world(SMALL["scaffold"]).run(), world(SMALL["scaffold"]), tmp_path / "spool"
    files = len(os.listdir("/dev/fd"))
    with WorkerPool(one.site, ("a", "b", "c"), 2, spool) as exchange:
        seen = one.run(exchange)
    same_bytes(seen.state, expected.state)
    same_bytes(seen.memory, expected.memory)
    assert facts(seen) == facts(expected)
    assert not spool.exists() or not list(spool.iterdir())
    del exchange
    gc.collect()
    assert len(os.listdir("/dev/fd")) == files


def refuse(size: int, spool: Path | None) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_worker_that_dies_with_large_messages_is_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(frames, "PIPE_BYTES", 1)
    monkeypatch.setattr(frames, "MEMORY_BYTES", 0)

    class Dying:
        def __init__(self, name: str) -> None:
            self.name = name

        def handle(self, message: Broadcast) -> Update:
            if self.name == "a" and message.round == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return Update(self.name, message.round, message.phase, 1, {"w": message.state["w"] + 1})

    state = {"w": torch.arange(1000.0)}
    with WorkerPool(Dying, ("a", "b"), 2, tmp_path) as exchange:  # type: ignore[arg-type]
        first, second = (dict(exchange({s: Broadcast(r, "train", state) for s in "ab"})) for r in range(2))
    assert first["a"] == Failure(FailureKind.LOST, "its worker process ended with exit code -9 and was replaced")
    assert isinstance(second["a"], Update)
    assert torch.equal(second["a"].state["w"], state["w"] + 1)
    assert not list(tmp_path.iterdir())


# --- the whole engine is killed ------------------------------------------------------------------------------------


def events(one: World, monkeypatch: pytest.MonkeyPatch, fuse: Callable[[], None]) -> None:
    """Burns ``fuse`` before every training batch and around every step of writing a file."""
    for data in one.data.values():
        data.tick = fuse
    for name in ("fsync", "replace"):
        real = getattr(os, name)

        def burning(*arguments: Any, real: Callable[..., Any] = real) -> Any:
            fuse()
            return real(*arguments)

        monkeypatch.setattr(os, name, burning)


def pieces(name: str, count: int, some: int = 4) -> list[int]:
    """At which event to kill each start of a run of ``count`` events: at its first, and then at some at random.

    They are so few together that no start arrives. The same in every run of the tests.
    """
    ends = [0, 1, *sorted(random.Random(name).sample(range(2, count), some))]
    return [after - before for before, after in itertools.pairwise(ends)]


@pytest.mark.parametrize(
    ("name", "statistics"),
    [
        *cases([(name, "averaged") for name in SMALL], seconds=4),
        *cases([(name, "site") for name in ("feddra", "fedrgb", "car-mfl", "pms-fm")], often=("feddra",), seconds=4),
    ],
)
def test_killed_at_any_moment_and_resumed_is_uninterrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, statistics: str
) -> None:
    """SIGKILL before a batch, before a file is synced, before it is renamed: the same bytes, also of site memories.

    One run is killed again and again, and another one at its very last event.
    """
    kind = {"norm_statistics": statistics}
    count = Fuse()
    with monkeypatch.context() as patch:
        whole = world(SMALL[name], tmp_path / "whole", **kind)
        events(whole, patch, count)
        expected = whole.run()
    for folder, deaths in ((tmp_path / "often", pieces(name, count.count)), (tmp_path / "late", [count.count])):
        for moment in deaths:

            def killed(folder: Path = folder, moment: int = moment) -> None:
                one = world(SMALL[name], folder, **kind)
                events(one, monkeypatch, Fuse(moment))
                one.run()

            assert forked(killed) == -signal.SIGKILL
        resumed = world(SMALL[name], folder, **kind).run()
        same_bytes(resumed.state, expected.state)
        same_bytes(resumed.memory, expected.memory)
        assert facts(resumed) == facts(expected), deaths
        assert site_memories(folder) == site_memories(tmp_path / "whole"), deaths


def test_workers_end_when_the_engine_is_killed(tmp_path: Path) -> None:
    """No orphans (faults, row 35): the workers see the pipe close. The pipe of this test closes when all have ended."""
    read, write = os.pipe()

    class Engine:
        def __call__(self) -> None:
            os.close(read)
            one = world(FedAvg(local_steps=1))
            exchange = WorkerPool(one.site, ("a", "b", "c"), 3)
            list(exchange({s: Broadcast(0, "train", one.server().state) for s in "abc"}))
            os.kill(os.getpid(), signal.SIGKILL)

    assert forked(Engine()) == -signal.SIGKILL
    os.close(write)
    signal.alarm(20)
    assert os.read(read, 1) == b""
    signal.alarm(0)
    os.close(read)
