"""Unlucky networks by the hundred: whatever is lost, late, repeated, killed or aborted, a run ends as it must.

A schedule is drawn from its seed: the method, the quorum, the grace, and for every task that a site fetches whether it
is lost, slow, answered twice, with an error, with what cannot be read or used, or the site's death; when the server is
killed (while it waits, or between any two steps of writing a file) and when the job is aborted. Then the job is
submitted again, until it ends.

Who must have been heard in a phase follows from the times at which replies arrived, by the rules in ``hearing``; the
bytes are those of the plain round loop with just these replies. The one other end is a refusal: a quorum that was not
there, by the same rules, or an abort that was asked for. A failing schedule names its seed: ``play(seed, ...)`` replays
it alone.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from support.flare_memory import Fate, MemoryFlare, ServerKilled, Task, in_engine, serialised, told, toy_experiment
from support.toy import clone, same_bytes, three_sites

from fedvlp.core.client import Client
from fedvlp.core.method import Method
from fedvlp.core.server_state import Server
from fedvlp.core.types import Broadcast, Failure, FailureKind, Reply, State
from fedvlp.flare import messages
from fedvlp.flare.controller import FederatedController
from fedvlp.methods import FedDRA, Local
from fedvlp.run import config
from fedvlp.training.local_training import train
from fedvlp.training.phase_checkpoint import identity
from fedvlp.training.settings import Training

FAST, MANY = 40, 1000
SUBMISSIONS = 5
PASS = 0.5
"""Seconds between two passes of FLARE's monitor, which ends tasks whose time is up."""
TICK = 0.1
"""Seconds that the controller waits for a reply before it looks at its deadline again."""
HAIR = 1e-6

DATA = three_sites()
type_of = functools.cache(config.type_of)
ONE_STEP: tuple[Method, ...] = (
    Method(local_steps=1), FedDRA(local_steps=1, align_steps=1, dro_batch=4, gamma=2.0), Local(local_steps=1),
)  # fmt: skip


_trained: dict[str, tuple[State, dict[str, float]]] = {}


def trained_once(
    method: Method, client: Client, message: Broadcast, training: Training, should_stop: Callable[[], bool], *_: Any
) -> dict[str, float]:
    """core.method.train, but the same task from the same weights and memory is not trained a second time.

    The plain round loop repeats what the sites did, and a third of all time was that.
    """
    own = {f"own/{name}": tensor for name, tensor in client.state().items()}
    task = identity(replace(message, aux=own), client.memory, (client.name, method, training))
    if task not in _trained or should_stop():
        terms = train(method, client, message, training, should_stop)
        _trained[task] = clone(client.state()), terms
    state, terms = _trained[task]
    client.load(state)
    return dict(terms)


class Schedule:
    """What is drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        draw = Random(seed)
        self.experiment = toy_experiment(
            draw.choice(ONE_STEP), rounds=draw.choice((1, 2, 3)), quorum=draw.choice((0, 1, 2, 2, 3)),
            evaluate_every=draw.choice((0, 1)), max_missed=draw.choice((1, 2)),
        )  # fmt: skip
        self.grace = draw.choice((2.0, 5.0, 10.0))
        self.task_timeout = 30
        self.bad = draw.choice((0.0, 0.2, 0.4, 0.6))
        self.serialises = draw.random() < 0.1
        self.kills = {job: draw.uniform(0.0, 20.0) for job in range(1, SUBMISSIONS) if draw.random() < 0.2}
        self.torn = {job: draw.randrange(60) for job in range(1, SUBMISSIONS) if draw.random() < 0.2}
        self.aborts = {job: draw.uniform(0.0, 20.0) for job in range(1, SUBMISSIONS) if draw.random() < 0.2}

    def fate(self, task: Task) -> Fate:
        """The same for the same task in the same job, whatever else happened."""
        draw = Random(f"{self.seed} {task}")
        train = draw.uniform(0.2, 3.0)
        if draw.random() >= self.bad:
            return Fate(train=train)
        kinds = {
            "no task": Fate(down=None),
            "slow": Fate(train=draw.uniform(3.0, 15.0)),
            "very slow": Fate(train=draw.uniform(15.0, 40.0)),
            "no reply": Fate(train=train, up=None),
            "twice": Fate(train=train, again=draw.uniform(0.0, 20.0)),
            "dies": Fate(train=train, dies=True, back=draw.uniform(0.5, 20.0)),
            "gone": Fate(train=train, dies=True),
            "unreadable": Fate(train=train, change=told(metrics=5)),
            "invalid": Fate(train=train, change=told(num_samples=1.5)),
            "error": Fate(
                train=train, change=lambda reply: messages.send_failure(Failure(FailureKind.FAILED, "ValueError"))
            ),
        }
        return kinds[draw.choice([*kinds, "slow", "slow"])]


@dataclass
class Asking:
    """One time that the sites were asked for a phase."""

    job: int
    round: int
    phase: str
    began: float
    sites: tuple[str, ...]
    ended: float = float("inf")

    @property
    def key(self) -> tuple[int, int, str]:
        return self.job, self.round, self.phase


@dataclass
class Hearing:
    """What must have come of an asking: who counts, who may (a matter of a tick), and when it is over."""

    must: set[str] = field(default_factory=set)
    may: set[str] = field(default_factory=set)
    earliest: float = float("inf")
    latest: float = float("inf")


class Play:
    """Plays a schedule to its end, and keeps what the rules need to know."""

    def __init__(self, seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.schedule = schedule = Schedule(seed)
        self.askings: list[Asking] = []
        self.writes = 0
        self.flare = MemoryFlare(folder, monkeypatch, schedule.experiment, DATA, schedule.fate)
        self.flare.make_controller = self._controller
        if schedule.serialises:
            self.flare.carry = serialised
        monkeypatch.setattr(os, "fsync", self._synced)  # a run has dozens, and nobody pulls the plug here
        monkeypatch.setattr(torch, "manual_seed", torch.default_generator.manual_seed)  # and of no device but the CPU
        monkeypatch.setattr("fedvlp.run.folder.environment", lambda experiment: {})  # versions of all packages
        monkeypatch.setattr("fedvlp.training.local_training.train", trained_once)
        monkeypatch.setattr("fedvlp.run.config.type_of", type_of)  # the same few hundred times a run
        self.ends: list[str] = []

    def _controller(self, **options: Any) -> FederatedController:
        play = self

        class Watched(FederatedController):
            def _exchange(self, messages: Mapping[str, Broadcast]) -> Iterator[tuple[str, Reply]]:
                first = next(iter(messages.values()))
                flare = play.flare
                asking = Asking(flare.job.number, first.round, first.phase, flare.clock.now, tuple(messages))
                play.askings.append(asking)
                yield from super()._exchange(messages)
                asking.ended = flare.clock.now

        return Watched(**options)

    def _synced(self, handle: int) -> None:
        """The server may be killed before and after every rename of a file."""
        if self.flare.at_a_site or self.flare.job.over:
            return
        self.writes += 1
        if self.writes == self.schedule.torn.get(self.flare.job.number):
            raise ServerKilled

    def to_the_end(self) -> None:
        """Submits the job until its run is complete, or for the last time."""
        for number in range(1, SUBMISSIONS + 1):
            self.submit(number)
            if self.ends[-1] == "finished":
                return

    def submit(self, number: int) -> None:
        schedule, flare, began = self.schedule, self.flare, self.flare.clock.now
        self.writes = 0

        def kill() -> None:
            if flare.job.number == number and not flare.job.over:
                raise ServerKilled

        def abort() -> None:
            if flare.job.number == number:
                flare.job.abort_now()

        aborted = began + schedule.aborts.get(number, float("inf"))
        if number in schedule.kills:
            flare.clock.plan(schedule.kills[number], kill)
        if number in schedule.aborts:
            flare.clock.plan(schedule.aborts[number], abort)
        job = flare.submit(grace=schedule.grace, task_timeout=schedule.task_timeout, task_check_period=PASS)
        assert job.died is None, f"FLARE's monitor died of {job.died!r}"
        self.ends.append("killed" if job.killed else self._status(job.panic))
        assert flare.clock.now <= aborted + TICK + HAIR, "an abort was not heard"
        assert self.ends[-1] != "aborted" or flare.clock.now >= aborted, "nobody asked for the abort"

    def _status(self, panic: str) -> str:
        status: str = json.loads((self.flare.run.path / "run_status.json").read_text())["status"]
        assert status in ("finished", "aborted", "stopped"), f"the job ended as {status}: {panic}"
        assert bool(panic) == (status == "stopped")
        assert (status == "finished") == self.flare.run.model.exists()
        return status

    def judge(self) -> None:
        """Compares what was kept with what must have been."""
        rounds, seen = self.schedule.experiment.rounds, {}
        for asking in self.askings:
            rule, ended = self.hearing(asking), asking.ended
            in_time = rule.earliest - HAIR <= ended <= rule.latest + TICK + HAIR
            due = f"over from {rule.earliest:.2f} to {rule.latest:.2f} s, but ended at {ended:.2f} s"
            assert in_time or ended == float("inf"), f"job {asking.job} round {asking.round} {asking.phase}: {due}"
        for number, end in enumerate(self.ends, start=1):
            if end == "stopped":
                last = [asking for asking in self.askings if asking.job == number][-1]
                good = self.hearing(last).must
                assert len(good) < rounds.needed(len(DATA)), (
                    f"round {last.round} {last.phase}: {sorted(good)} were enough"
                )
        for record in self.flare.records:
            key = record["round"], record["phase"]
            asking = [a for a in self.askings if (a.round, a.phase) == key][-1]
            rule = self.hearing(asking)
            heard = set(record["sites"])
            assert rule.must <= heard, f"{key}: {sorted(rule.must - heard)} replied in time: {record['dropped']}"
            assert heard <= rule.must | rule.may, f"{key}: {sorted(heard - rule.must - rule.may)} were late or bad"
            seen[key] = heard
        if self.ends[-1] == "finished":
            self._compare(seen)

    def hearing(self, asking: Asking) -> Hearing:
        """A site's first reply counts if it is valid and came before its task's time was up and the grace was over.

        The grace runs from the valid reply that makes the quorum. A phase is over when everybody has replied or run out
        of time.
        """
        rounds = self.schedule.experiment.rounds
        first: dict[str, tuple[float, bool]] = {}
        up = asking.began + self.schedule.task_timeout
        for arrival in self.flare.arrivals:
            task = arrival.task
            here = arrival.job == asking.job and (task.job, task.round, task.phase) == asking.key
            if here and task.site not in first and arrival.time <= up + PASS + HAIR:
                first[task.site] = arrival.time, arrival.valid
        good = sorted(time for time, valid in first.values() if valid)
        needed = min(rounds.needed(len(DATA)), len(asking.sites))
        deadline = good[needed - 1] + self.schedule.grace if len(good) >= needed else float("inf")
        result = Hearing()
        for site, (came, valid) in first.items():
            if valid and came <= min(deadline, up) - HAIR:
                result.must.add(site)
            elif valid and came <= min(deadline + TICK, up + PASS) + HAIR:
                result.may.add(site)
        silent = [site for site in asking.sites if site not in first]
        last = max((came for came, _ in first.values()), default=0.0)
        result.earliest = min(deadline, up if silent else last)
        result.latest = min(deadline, up + PASS if silent else last)
        return result

    def _compare(self, seen: dict[tuple[int, str], set[str]]) -> None:
        trained = self.flare.trained
        rounds = replace(self.schedule.experiment.rounds, max_missed=10**6)  # a resumed job asks who was benched
        server, model = in_engine(
            replace(self.schedule.experiment, rounds=rounds), DATA, self.flare.folder / "plain",
            lambda site, message: site in seen[message.round, message.phase],
            lambda site, message: (site, message.round, message.phase) in trained,
        )  # fmt: skip
        kept, _ = Server.load(self.flare.run.checkpoint)
        same_bytes(kept.state, server.state)
        same_bytes(kept.memory, server.memory)
        assert kept.missed == server.missed
        assert self.flare.run.model.read_bytes() == model.read_bytes()
        for file in (self.flare.folder / "plain" / "sites").rglob("*.safetensors"):
            site = file.parent.name
            theirs = self.flare.folder / site / "runs" / "toy" / self.flare.run.path.name / "sites" / site / file.name
            assert theirs.read_bytes() == file.read_bytes(), f"what {site} remembers"


def play(seed: int, folder: Path) -> Play:
    """Plays and judges one schedule."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        played = Play(seed, folder / str(seed), monkeypatch)
        try:
            played.to_the_end()
            played.judge()
        except (Exception, pytest.fail.Exception) as error:
            pytest.fail(f"schedule {seed}: {type(error).__name__}: {error}")
    shutil.rmtree(folder / str(seed))
    return played


def every(seeds: range, folder: Path) -> Counter[str]:
    """Plays them all; counts what happened, so that a generator that has become harmless is noticed."""
    counts: Counter[str] = Counter()
    for seed in seeds:
        played = play(seed, folder)
        counts[f"last: {played.ends[-1]}"] += 1
        counts.update(set(played.ends[:-1]))
        counts["late"] += any(a.task.job == a.job and a.time > asking.ended for asking in played.askings
                              for a in played.flare.arrivals if (a.job, a.task.round, a.task.phase)
                              == (asking.job, asking.round, asking.phase))  # fmt: skip
        counts["from an earlier job"] += any(a.task.job != a.job for a in played.flare.arrivals)
        counts["fetched again"] += any(count > 1 for count in played.flare.fetched.values())
    return counts


HAPPENS = ("last: finished", "last: stopped", "killed", "aborted", "stopped", "late", "fetched again")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """In memory where the system offers that: a schedule makes dozens of small files and folders, and removes them."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as name:
        yield Path(name)


@pytest.fixture
def _silent() -> Iterator[None]:
    """Hundreds of runs would fill the log that is kept for a failed test."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("_silent")
def test_every_schedule_ends_with_the_engines_bytes_or_a_named_refusal(folder: Path) -> None:
    counts = every(range(FAST), folder)
    assert all(counts[what] for what in HAPPENS), counts


@pytest.mark.nightly
@pytest.mark.slow(seconds=70)
@pytest.mark.usefixtures("_silent")
def test_a_thousand_more_schedules(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    began = time.process_time()
    counts = every(range(FAST, FAST + MANY), folder)
    seconds = time.process_time() - began
    with capsys.disabled():
        print(f"\n{MANY} schedules in {seconds:.1f} s of one core ({MANY / seconds:.0f} a second): {dict(counts)}")
    assert all(counts[what] >= 30 for what in HAPPENS), counts
