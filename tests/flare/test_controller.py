"""The controller against FLARE in memory: quorum, grace, deadline, late and repeated replies, abort, dead sites, ends.

``support/flare_memory.py`` says what is real. The first task of every site comes back after 0.1 + 1 + 0.1 s = 1.2 s
unless its fate says otherwise.
"""

from __future__ import annotations

import copy
import errno
import gc
import html
import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.widgets.info_collector import GroupInfoCollector, InfoCollector
from safetensors import SafetensorError
from support.flare_memory import (
    DEAD_AFTER,
    Fate,
    MemoryFlare,
    Task,
    ToyModel,
    in_engine,
    site_executor,
    told,
    toy_experiment,
)
from support.toy import same_bytes, small, three_sites

from fedvlp.cli import app
from fedvlp.core.checkpoint import CheckpointError, unwritten
from fedvlp.core.method import Method
from fedvlp.core.server_state import Server
from fedvlp.core.types import Broadcast, Failure, FailureKind, State, Update
from fedvlp.federation.loop import Federation
from fedvlp.federation.site_memory import SiteMemory
from fedvlp.federation.wire import SiteEnd
from fedvlp.flare import controller as controller_module
from fedvlp.flare import messages, task_handler
from fedvlp.flare.controller import ABORTED_BY_HAND, FederatedController
from fedvlp.flare.tracking import RUN_FOLDER
from fedvlp.methods import METHODS
from fedvlp.models import initial
from fedvlp.report import board
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder
from fedvlp.run.lock import only_writer
from fedvlp.run.metrics import Record
from fedvlp.run.rollback import rollback

Make = Callable[..., MemoryFlare]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """A consortium of sites a, b and c with 8, 12 and 16 records; ``fates`` as {(site, round): Fate}."""

    def build(fates: dict[tuple[str, int], Fate] | None = None, experiment: Experiment | None = None) -> MemoryFlare:
        def fate(task: Task) -> Fate:
            chosen = (fates or {}).get((task.site, task.round))
            return chosen if chosen and task.attempt == 0 else Fate()

        return MemoryFlare(tmp_path, monkeypatch, experiment or toy_experiment(), three_sites(), fate)

    return build


def status(flare: MemoryFlare) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((flare.run.path / "run_status.json").read_text())
    return content


def dropped(flare: MemoryFlare) -> list[dict[str, str]]:
    return [record["dropped"] for record in flare.records]


def refuse_all_but(*missing: tuple[str, int]) -> Callable[[str, Broadcast], bool]:
    """Every reply is heard but those of (site, round)."""
    return lambda site, message: (site, message.round) not in missing


def assert_engines_bytes(flare: MemoryFlare, tmp_path: Path, *missing: tuple[str, int]) -> None:
    """Model file and server memory are those of the plain round loop without the replies of (site, round)."""
    server, model = in_engine(flare.experiment, flare.data, tmp_path / "plain", refuse_all_but(*missing))
    assert flare.run.model.read_bytes() == model.read_bytes()
    seen, _ = Server.load(flare.run.checkpoint)
    same_bytes(seen.state, server.state)
    same_bytes(seen.memory, server.memory)
    assert seen.missed == server.missed


def test_a_run_ends_with_the_engines_bytes_and_says_so(make: Make, tmp_path: Path) -> None:
    flare = make()
    job = flare.submit()
    assert_engines_bytes(flare, tmp_path)
    assert (status(flare)["status"], status(flare)["reason"], job.panic) == ("finished", "", "")
    assert [(r["round"], r["phase"], sorted(r["sites"])) for r in flare.records] == [
        (0, "train", ["a", "b", "c"]), (1, "train", ["a", "b", "c"]), (2, "evaluate", ["a", "b", "c"]),
    ]  # fmt: skip
    assert flare.clock.now == pytest.approx(1.2 + 1.7 + 1.7), "a site that asked in vain asks again after 0.5 s"


@pytest.mark.parametrize(
    ("name", "statistics"),
    [("feddra", "averaged"), ("local", "averaged"), ("scaffold", "averaged"), ("feddra", "site")],
)
def test_phases_and_memories_pass_through_flare(make: Make, tmp_path: Path, name: str, statistics: str) -> None:
    """FedDRA has two phases and a server that remembers, Local sites that do, each on its own disk, SCAFFOLD both.

    So do sites that keep their batch normalisation, of which the model that is saved has none.
    """
    experiment = toy_experiment(small(METHODS[name]))
    norm = ToyModel(norm=statistics == "site")
    flare = make(experiment=replace(experiment, model=norm, norm_statistics=statistics))  # type: ignore[arg-type]
    flare.submit()
    assert_engines_bytes(flare, tmp_path)
    memories = list((tmp_path / "plain" / "sites").rglob("*.safetensors"))
    assert bool(memories) == (name in ("local", "scaffold") or statistics == "site")
    for file in memories:
        site = file.parent.name
        theirs = tmp_path / site / "runs" / "toy" / "001" / "sites" / site / file.name
        assert theirs.read_bytes() == file.read_bytes()


def stats(flare: MemoryFlare) -> dict[str, Any]:
    """What ``show_stats`` has of the job."""
    with flare.job.engine.new_context() as context:
        collector = GroupInfoCollector()
        context.set_prop(InfoCollector.CTX_KEY_STATS_COLLECTOR, collector, private=True, sticky=False)
        flare.job.fire_event(InfoCollector.EVENT_TYPE_GET_STATS, context)
    progress: dict[str, Any] = json.loads(json.dumps(collector.info["progress"]))
    return progress


def test_the_status_has_the_figures_of_the_last_phase_in_four_digits(make: Make) -> None:
    """Recalls are the mean and the worst of the three sites'; an evaluation has no loss. 1.2 s, 1.7 s and 1.7 s."""
    flare = make()
    flare.submit()
    recalls = {site: float(f"{flare.records[-1]['sites'][site]['val/mean/r1']:.4g}") for site in "abc"}
    told = status(flare)
    assert told.pop("updated")
    assert told == {
        "schema": 1, "summary": "completed", "status": "finished", "reason": "",
        "round": 2, "num_rounds": 2, "phase": "evaluate", "phases_done": 3, "phases": 3, "answered": 3, "dropped": 0,
        "val_r1_average": pytest.approx(sum(recalls.values()) / 3, rel=1e-3), "val_r1_worst": min(recalls.values()),
        "seconds": pytest.approx(4.6, abs=0.1),
        "sites": {site: {"state": "answered", "dropped": 0, "val_r1": recall} for site, recall in recalls.items()},
    }  # fmt: skip
    assert len(str(told["val_r1_average"])) <= 6, "no digits of rounding errors"


def test_the_loss_of_a_training_phase_is_the_mean_over_its_sites(make: Make) -> None:
    flare = make(experiment=toy_experiment(evaluate_every=0))
    flare.submit()
    losses = {site: metrics["loss/contrastive"] for site, metrics in flare.records[-1]["sites"].items()}
    told = status(flare)
    assert told["loss"] == pytest.approx(sum(losses.values()) / 3, rel=1e-3)
    for site, value in losses.items():
        assert told["sites"][site]["loss"] == pytest.approx(value, rel=1e-3)


# --- who is missing ----------------------------------------------------------------------------------------------


def test_a_site_that_is_killed_is_named_within_one_phase(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    """c dies in round 2 of 4, never to come back: file, ``show_stats``, ``show_errors`` and the command each name it.

    The quorum is there at 1.2 s of a phase, so c has until 11.2 s. At 8 s of round 2 it is awaited.
    """
    flare = make({("c", 2): Fate(dies=True)}, toy_experiment(rounds=4, quorum=2, evaluate_every=0))
    before: list[dict[str, Any]] = []
    awaited: list[dict[str, Any]] = []
    told: list[tuple[dict[str, Any], ...]] = []

    def look() -> None:
        if flare.records and flare.records[-1]["round"] >= 2:
            told.append((status(flare), stats(flare), copy.deepcopy(flare.job.engine.collector.get_errors())))
        elif flare.records and flare.records[-1]["round"] == 1:
            awaited.append(stats(flare))
        else:
            before.append(status(flare))
        flare.clock.plan(0.5, look)

    flare.clock.plan(0.5, look)
    flare.submit(grace=10.0)
    first = before[0]
    assert (first["status"], first["round"], first["phase"], first["num_rounds"]) == ("running", 0, "train", 4)
    assert (first["phases_done"], first["phases"], "seconds_left" in first) == (0, 4, False)
    assert {entry["state"] for entry in first["sites"].values()} == {"not asked"}
    assert awaited[-1]["under_way"] == {"round": 2, "phase": "train", "waits_for": ["c"]}
    assert awaited[-1]["seconds_left"] > 0
    file, console, errors = told[0]
    gone = {"state": "dropped", "dropped": 1, "reason": "no reply within 10 s of the quorum", "absent_since": 2}
    for seen in (file, console):
        assert (seen["status"], seen["sites"]["c"], seen["dropped"]) == ("running", gone, 1)
        assert seen["summary"].endswith("without c from round 2")
    assert "c dropped in round 2, train: no reply within 10 s of the quorum" in errors["sites"]["c"]
    assert status(flare)["summary"] == "completed without c from round 2"
    assert status(flare)["sites"]["c"]["absent_since"] == 2
    with pytest.raises(SystemExit) as ended:
        app(["jobs", "status", str(flare.run.path)])
    assert ended.value.code == 3
    assert capsys.readouterr().out.startswith("completed without c from round 2\n")


def test_a_site_that_is_back_is_absent_no_more_and_its_lapse_is_counted(make: Make) -> None:
    flare = make(
        {("c", 0): Fate(change=lambda reply: messages.send_failure(Failure(FailureKind.FAILED, "ValueError")))}
    )
    flare.submit()
    assert status(flare)["summary"] == "completed"
    entry = status(flare)["sites"]["c"]
    assert (entry["state"], entry["dropped"], "absent_since" in entry) == ("answered", 1, False)


def test_a_resumed_run_knows_since_when_a_site_is_absent(make: Make) -> None:
    flare = make({("c", 1): Fate(train=1e9)}, toy_experiment(rounds=4, evaluate_every=0))
    flare.clock.plan(14.0, lambda: flare.job.abort_now())
    flare.submit(grace=10.0)
    assert (status(flare)["status"], status(flare)["phases_done"]) == ("aborted", 2)
    flare.fates = lambda task: Fate(train=1e9 if task.site == "c" else 1.0)
    flare.submit(grace=10.0)
    assert status(flare)["summary"] == "completed without c from round 1"
    assert (status(flare)["phases_done"], status(flare)["phases"], status(flare)["sites"]["c"]["dropped"]) == (4, 4, 3)


# --- quorum, grace, deadline -------------------------------------------------------------------------------------


def test_a_site_later_than_the_grace_is_dropped_and_named(make: Make, tmp_path: Path) -> None:
    """a and b reply at 1.2 s, so c has until 11.2 s; its reply at 100.2 s is late, and the run did not wait for it."""
    flare = make({("c", 0): Fate(train=100.0)}, toy_experiment(rounds=1, evaluate_every=0))
    flare.submit(grace=10.0)
    assert dropped(flare) == [{"c": "no reply within 10 s of the quorum"}]
    assert flare.clock.now == pytest.approx(11.2, abs=0.2)
    assert_engines_bytes(flare, tmp_path, ("c", 0))


def test_the_grace_begins_with_the_quorum_and_not_with_the_first_reply(make: Make) -> None:
    """a at 1.2 s, b, the quorum, at 8.2 s, c at 15.2 s: more than 10 s after the first, 7 s after the quorum."""
    flare = make({("b", 0): Fate(train=8.0), ("c", 0): Fate(train=15.0)})
    flare.submit(grace=10.0)
    assert dropped(flare) == [{}, {}, {}]


def test_the_grace_begins_once_and_is_not_prolonged_by_later_replies(make: Make) -> None:
    """Quorum 1: a at 1.2 s, b at 8.2 s; c at 15.2 s is 14 s after the quorum, though 7 s after b."""
    flare = make({("b", 0): Fate(train=8.0), ("c", 0): Fate(train=15.0)}, toy_experiment(quorum=1))
    flare.submit(grace=10.0)
    assert dropped(flare)[0] == {"c": "no reply within 10 s of the quorum"}


def test_an_error_does_not_count_for_the_quorum(make: Make, tmp_path: Path) -> None:
    """a fails at 1.2 s, b replies at 1.2 s, c, which makes the quorum of two, only at 30.2 s: it is waited for."""
    failed = Fate(change=lambda reply: messages.send_failure(Failure(FailureKind.FAILED, "ValueError")))
    flare = make({("a", 0): failed, ("c", 0): Fate(train=30.0)})
    flare.submit(grace=5.0)
    assert dropped(flare) == [{"a": "an error: the log of the site says why"}, {}, {}]
    assert_engines_bytes(flare, tmp_path, ("a", 0))


def test_a_refused_update_does_not_start_the_grace(make: Make, tmp_path: Path) -> None:
    """a's weights are NaN at 1.2 s, b replies at 1.2 s, c, which makes the quorum of two, only at 30.2 s."""
    flare = make({("a", 0): Fate(change=with_nan), ("c", 0): Fate(train=30.0)})
    flare.submit(grace=5.0)
    assert [list(record) for record in dropped(flare)] == [["a"], [], []]
    assert "NaN or infinite" in dropped(flare)[0]["a"]
    assert_engines_bytes(flare, tmp_path, ("a", 0))


@dataclass(frozen=True)
class SlowServer(Method):
    """FedAvg whose server takes 3 s for every update that it looks at."""

    wait: ClassVar[Callable[[float], None]]

    def objection(self, server: Server, update: Update) -> str | None:
        SlowServer.wait(3.0)
        return None


def test_replies_that_came_while_the_server_was_busy_are_in_time(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """All three come at 1.2 s; b makes the quorum, and the server has looked at it after the grace of 2 s."""
    flare = make(experiment=toy_experiment(SlowServer(local_steps=2)))
    monkeypatch.setattr(SlowServer, "wait", flare.clock.wait, raising=False)
    flare.submit(grace=2.0)
    assert dropped(flare) == [{}, {}, {}]


class BehindTheWire(Executor):
    """A site's executor behind its end of the wire."""

    def __init__(self, experiment: Experiment) -> None:
        super().__init__()
        self._inner = site_executor(experiment)
        self._end = SiteEnd(experiment.wire, experiment.method, SiteMemory(None))

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        message, run = messages.receive_broadcast(shareable)
        task = messages.send_broadcast(self._end.decode(message), run)
        reply = self._inner.execute(task_name, task, fl_ctx, abort_signal)
        return messages.send_update(self._end.encode(messages.receive_update(reply, fl_ctx.get_identity_name())))


def test_a_site_that_is_left_out_does_not_lower_the_quorum_that_starts_the_grace(make: Make) -> None:
    """All but one of three sites, two, must reply in round 1 too, in which only a and b are asked: b is waited for.

    c misses round 0 and is left out (max_missed 1). b replies 20 s after a, beyond a grace of 10 s.
    """
    experiment = toy_experiment(quorum=0, max_missed=1, rounds=3)
    flare = make({("c", 0): Fate(dies=True), ("b", 1): Fate(train=20.0)}, experiment)
    job = flare.submit(grace=10.0)
    assert job.panic == ""
    assert dropped(flare)[1] == {"c": "left out after missed phases"}


def test_a_silent_site_has_the_tasks_time_and_no_more(make: Make) -> None:
    """Without a quorum no grace runs: b and c, silent, end after 50 s, and with them the job."""
    flare = make({("b", 0): Fate(train=1e9), ("c", 0): Fate(train=1e9)})
    job = flare.submit(task_timeout=50)
    assert flare.clock.now == pytest.approx(50.0, abs=1.0)
    assert status(flare)["status"] == "stopped"
    for said in (
        "1 valid updates, 2 needed",
        "b: no reply within the task's 50 s",
        "c: no reply within the task's 50 s",
    ):
        assert said in job.panic


def test_a_limit_that_bounds_nothing_is_refused() -> None:
    """FLARE ended the job without a reason, or waited for ever; a grace below 0 dropped a site."""
    for name, value, expected in [
        *(("task_timeout", value, "takes whole seconds, at least 1") for value in (0, -1, 3600.0, "3600", True)),
        *(("grace", value, "takes seconds, 0 or more") for value in (-5.0, "60", float("inf"), float("nan"), True)),
        *(("task_check_period", value, "takes seconds above 0") for value in (0, "1", float("nan"))),
    ]:
        with pytest.raises(ValueError, match=rf"^{name} is {value!r}; it {expected}"):
            FederatedController(**{name: value})


def test_the_least_limits_are_taken() -> None:
    made = FederatedController(task_timeout=1, grace=0, name="toy", method=Method())
    assert (made.task_timeout, made.grace) == (1, 0)


def test_a_time_limit_shorter_than_the_grace_ends_the_waiting(make: Make) -> None:
    flare = make({("c", 0): Fate(train=1e9)})
    flare.submit(task_timeout=20, grace=500.0)
    assert dropped(flare)[0] == {"c": "no reply within the task's 20 s"}
    assert flare.records[0]["sites"].keys() == {"a", "b"}


def test_later_phases_do_not_wait_for_a_site_that_is_down(make: Make) -> None:
    """c dies in round 0 of 3: 1.2 s to the quorum and 60 s of grace; then twice 10 s, after 1.7 s.

    A site that got no task asks again after 0.5 s: from the second round on the quorum takes up to 1.7 s.
    """
    flare = make({("c", 0): Fate(dies=True)}, toy_experiment(rounds=3, evaluate_every=0, max_missed=9))
    flare.submit(grace=60.0)
    assert [record["dropped"] for record in flare.records] == [
        {"c": "no reply within 60 s of the quorum"}, {"c": "no reply within 10 s of the quorum"},
        {"c": "no reply within 10 s of the quorum"},
    ]  # fmt: skip
    assert flare.clock.now == pytest.approx(61.2 + 2 * 11.7, abs=1.0)


def test_a_grace_below_the_short_one_stays(make: Make) -> None:
    flare = make({("c", 0): Fate(dies=True)}, toy_experiment(rounds=2, evaluate_every=0, max_missed=9))
    flare.submit(grace=3.0)
    assert [record["dropped"]["c"] for record in flare.records] == ["no reply within 3 s of the quorum"] * 2


def test_a_site_that_is_back_has_the_whole_grace_as_soon_as_it_fetches_a_task(make: Make) -> None:
    """c dies at 0.6 s and is back at 70.6 s, in round 1, which began at 61.2 s and whose short grace ends at 72.9 s.

    It fetches its task and trains for 30 s. In round 2 it is a site like the others.
    """
    flare = make(
        {("c", 0): Fate(dies=True, back=70.0), ("c", 1): Fate(train=30.0), ("c", 2): Fate(train=30.0)},
        toy_experiment(rounds=3, evaluate_every=0, max_missed=9),
    )
    flare.submit(grace=60.0)
    assert [list(record["dropped"]) for record in flare.records] == [["c"], [], []]
    assert flare.clock.now == pytest.approx(70.6 + 30.2 + 30.7, abs=1.0)


def test_a_slow_site_is_not_taken_for_one_that_is_down(make: Make) -> None:
    """c is late in round 0, and at work on that until 70 s; then it answers, slowly, and is waited for."""
    fates = {("c", round): Fate(train=70.0 if round == 0 else 40.0) for round in range(4)}
    flare = make(fates, toy_experiment(rounds=4, evaluate_every=0, max_missed=9))
    flare.submit(grace=60.0)
    assert [list(record["dropped"]) for record in flare.records] == [["c"], [], [], []]


def test_while_another_site_is_waited_for_the_one_that_was_down_may_come(make: Make) -> None:
    """b, which is up, trains 50 s after the quorum of a; c is back 30 s after it, and answers before b."""
    fates = {("c", 0): Fate(dies=True, back=90.0), ("b", 1): Fate(train=50.0)}
    flare = make(fates, toy_experiment(rounds=2, quorum=1, evaluate_every=0, max_missed=9))
    flare.submit(grace=60.0)
    assert [list(record["dropped"]) for record in flare.records] == [["c"], []]


def test_a_job_that_resumes_waits_for_every_site_as_at_first(make: Make) -> None:
    """c was down when the job before was aborted; its process takes 20 s to start now."""
    flare = make({("c", 0): Fate(dies=True)}, toy_experiment(rounds=3, evaluate_every=0, max_missed=9))
    flare.clock.plan(70.0, lambda: flare.job.abort_now())
    flare.submit(grace=60.0)
    assert [list(record["dropped"]) for record in flare.records] == [["c"]]
    flare.fates = lambda task: Fate(down=20.0) if task.site == "c" else Fate()
    flare.submit(grace=60.0)
    assert [list(record["dropped"]) for record in flare.records] == [["c"], [], []]


# --- late, repeated and stray replies ----------------------------------------------------------------------------


def test_a_late_reply_is_no_reply_to_the_next_phase(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """c's answer to round 0 comes 3 s into round 1, which lasts 10 s more: c is in time for round 1 with a new one."""
    flare = make({("c", 0): Fate(train=14.0), ("b", 1): Fate(train=10.0)})
    with caplog.at_level(logging.INFO, logger=FederatedController.__module__):
        flare.submit(grace=10.0)
    late = next(arrival for arrival in flare.arrivals if arrival.task.key == ("c", 0, "train"))
    assert 11.3 < late.time < 21.0
    assert "late reply of c to train dropped" in caplog.text
    assert dropped(flare) == [{"c": "no reply within 10 s of the quorum"}, {}, {}]
    assert_engines_bytes(flare, tmp_path, ("c", 0))


def submission(flare: MemoryFlare, site: str, of: str, name: str = "train") -> Callable[[Shareable], Shareable]:
    """Sends, beside the reply of a site, the same reply as ``site`` to the task of site ``of``."""

    def stray(reply: Shareable) -> Shareable:
        communicator = flare.job.communicator
        number = next((n for n, t in communicator._client_task_map.items() if t.client.name == of), "no such task")
        with flare.job.engine.new_context() as context:
            communicator.process_submission(flare.sites[site].client, name, number, flare.carry(reply), context)
        return reply

    return stray


def test_an_unknown_task_and_a_strangers_answer_change_nothing(make: Make, tmp_path: Path) -> None:
    """c answers a task that never was; and in round 1, c answers the task of a before a does."""
    flare = make()
    fates = {("c", 0): submission(flare, "c", of="nobody"), ("c", 1): submission(flare, "c", of="a")}
    flare.fates = lambda task: (
        Fate(train=0.5, change=fates[task.site, task.round]) if (task.site, task.round) in fates else Fate()
    )
    flare.submit()
    assert dropped(flare) == [{}, {}, {}]
    assert_engines_bytes(flare, tmp_path)


def bare(reply: Shareable) -> Shareable:
    return Shareable()


def headless(reply: Shareable) -> Shareable:
    return DXO(DataKind.WEIGHTS, data=from_shareable(reply).data).to_shareable()


def with_nan(reply: Shareable) -> Shareable:
    dxo = from_shareable(reply)
    next(iter(dxo.data.values())).reshape(-1)[0] = float("nan")
    return dxo.update_shareable(reply)


def no_tensors(reply: Shareable) -> Shareable:
    dxo = from_shareable(reply)
    dxo.data = dict.fromkeys(dxo.data, "Jane Doe")
    return dxo.update_shareable(reply)


def filtered(reply: Shareable) -> Shareable:
    return make_reply(ReturnCode.TASK_DATA_FILTER_ERROR)


GARBAGE = {
    "nothing": (bare, "unreadable reply"),
    "no header": (headless, "unreadable reply: ValueError"),
    "NaN": (with_nan, "NaN or infinite"),
    "words for tensors": (no_tensors, "is a str, expected a tensor"),
    "another round": (told(round=7), "it is for round 7"),
    "metrics of another kind": (told(metrics=5), "metrics is 5, expected a dictionary"),
    "a filter's refusal": (filtered, "a filter of the site refused the task"),
    "half a record": (told(num_samples=1.5), "num_samples is 1.5"),
}


def test_garbage_is_dropped_and_named_and_the_run_goes_on(make: Make, tmp_path: Path) -> None:
    """One kind a round. The kinds themselves: faults/test_garbage.py."""
    fates = {("b", round): Fate(change=change) for round, (change, _) in enumerate(GARBAGE.values())}
    flare = make(fates, toy_experiment(rounds=len(GARBAGE) + 1, evaluate_every=0, max_missed=99))
    flare.submit()
    for round, (kind, (_, said)) in enumerate(GARBAGE.items()):
        assert list(dropped(flare)[round]) == ["b"], kind
        assert said in dropped(flare)[round]["b"], kind
        assert "Jane" not in dropped(flare)[round]["b"], kind
    assert dropped(flare)[-1] == {}
    assert_engines_bytes(flare, tmp_path, *fates)


# --- sites that die and come back --------------------------------------------------------------------------------


def test_a_site_that_is_reported_dead_costs_its_reply_and_no_more_than_flares_patience(make: Make) -> None:
    """Quorum 3: nobody's grace runs. FLARE believes the report of 2 s after 60 s; the task would have an hour."""
    flare = make({("c", 0): Fate(dies=True)}, toy_experiment(quorum=3))

    def report() -> None:
        with flare.job.engine.new_context() as context:
            flare.job.communicator.process_dead_client_report("c", context)

    flare.clock.plan(2.0, report)
    job = flare.submit()
    assert "c: its FLARE process died, or the server cannot reach it" in job.panic
    assert flare.clock.now == pytest.approx(2.0 + DEAD_AFTER, abs=1.0)
    assert status(flare)["status"] == "stopped"


def test_a_site_that_is_started_again_gets_its_task_again_and_answers(make: Make, tmp_path: Path) -> None:
    """Nothing is lost: not its reply, not what it remembered (Local's model is in its memory on disk)."""
    local = toy_experiment(small(METHODS["local"]), rounds=3)
    flare = make({("a", 1): Fate(dies=True, back=5.0), ("c", 1): Fate(dies=True, back=5.0)}, local)
    job = flare.submit()
    assert flare.fetched["a", 1, "train"] == flare.fetched["c", 1, "train"] == 2
    assert dropped(flare) == [{}] * 4
    assert job.died is None
    in_engine(flare.experiment, flare.data, tmp_path / "plain")
    for site in "abc":
        memory = Path("sites") / site / "00002-0.safetensors"
        theirs = tmp_path / site / "runs" / "toy" / "001" / memory
        assert theirs.read_bytes() == (tmp_path / "plain" / memory).read_bytes()


@pytest.mark.parametrize("site", ["a", "b", "c"])
def test_a_task_that_is_fetched_twice_ends_no_time_limit(make: Make, site: str) -> None:
    """FLARE's monitor, which enforces all time limits, must survive it: a later silence ends in time all the same.

    FLARE notes a resent task twice unless it is the last one that stands, and its monitor dies of the second note.
    """
    slow = {(name, 0): Fate(train=10.0) for name in "abc"}
    silent = {(name, 1): Fate(train=1e9) for name in "abc"}
    flare = make({**slow, (site, 0): Fate(down=None), **silent})
    job = flare.submit(task_timeout=50)
    assert job.died is None
    assert dropped(flare) == [{}]
    assert "round 1 phase train: 0 valid updates, 2 needed" in job.panic
    assert flare.clock.now < 80.0


@dataclass(frozen=True)
class FolderModel(ToyModel):
    """A model whose image tower is a folder of the server's."""

    image_tower: str = "/etc"
    text_tower: str = "tiny"


@pytest.mark.parametrize("provisioned", [True, False])
def test_a_job_gives_a_provisioned_server_no_path_to_a_tower(make: Make, tmp_path: Path, provisioned: bool) -> None:
    flare = make(experiment=replace(toy_experiment(), model=FolderModel()))
    if provisioned:
        (tmp_path / "server" / "startup").mkdir(parents=True)
        (tmp_path / "server" / "startup" / "fed_server.json").write_text("{}")
    job = flare.submit()
    said = "SiteConfigError: image_tower is no name of a model; a job names towers and gives no path"
    assert job.panic == (said if provisioned else "")


def test_a_job_whose_weights_have_no_checksum_is_refused_before_a_file_is_opened(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder that it names is never looked at, so the job learns nothing of what is there."""
    monkeypatch.setattr(initial, "_content", lambda wanted: pytest.fail("a file was opened"))
    flare = make(experiment=replace(toy_experiment(), model=replace(FolderModel(), init="/etc")))
    job = flare.submit()
    assert job.panic == (
        "InitialWeightsError: model.init 'etc' lacks the checksum of the weights; export the job again, with "
        "NAME@SHA256"
    )


def test_a_second_job_of_the_same_run_is_told_who_is_at_it_and_changes_nothing(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Submitted while the first still runs, say after the lead's connection broke."""
    monkeypatch.setattr(controller_module, "LAST_ONE_ENDS", 0.0)
    flare = make({(name, 1): Fate(train=1e9) for name in "abc"})
    flare.submit(task_timeout=50)
    run = flare.run.path
    with only_writer(run):
        before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
        second = flare.submit(task_timeout=50)
        assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert second.panic.startswith(f"FolderInUseError: run toy/001 is in use: process {os.getpid()} on ")
    assert [folder.name for folder in run.parent.iterdir()] == ["001"], "nor does it begin another"


# --- abort and quorum lost ---------------------------------------------------------------------------------------


def test_aborted_at_any_moment_it_is_resumed_to_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FedDRA: 16 s of run, two phases of 3.2 s, two of 4.2 s, each with a straggler, and an evaluation of 1.2 s."""
    experiment = toy_experiment(small(METHODS["feddra"]))
    slow = {("b", 0): Fate(train=3.0), ("c", 1): Fate(train=4.0)}
    _, model = in_engine(experiment, three_sites(), tmp_path / "plain")
    interrupted = []
    for step in range(10):
        moment = 0.05 + 1.7 * step
        flare = MemoryFlare(tmp_path / str(step), monkeypatch, experiment, three_sites(),
                            lambda task: slow.get((task.site, task.round), Fate()))  # fmt: skip
        flare.clock.plan(moment, lambda flare=flare: flare.job.abort_now())
        job = flare.submit(grace=10.0)
        assert flare.clock.now <= moment + 0.2, "an abort is heard at once"
        assert (job.panic, status(flare)["status"]) == ("", "aborted")
        assert status(flare)["reason"] == ABORTED_BY_HAND
        assert not flare.run.model.exists()
        interrupted.append(len(flare.records))
        resumed = flare.submit(grace=10.0)
        assert (status(flare)["status"], resumed.panic) == ("finished", "")
        assert [record["dropped"] for record in flare.records] == [{}] * 5
        assert flare.run.model.read_bytes() == model.read_bytes()
    assert sorted(set(interrupted)) == [0, 1, 2, 3, 4], "in every phase, the evaluation among them"


def test_an_abort_before_the_first_task_leaves_a_run_that_begins_there(make: Make, tmp_path: Path) -> None:
    flare = make()
    flare.sites["a"].start = lambda: flare.job.abort.trigger(True)  # type: ignore[method-assign]
    flare.submit()
    assert status(flare)["reason"] == ABORTED_BY_HAND
    assert status(flare)["summary"] == "aborted in round 0 of 2, train"
    assert not flare.arrivals
    del flare.sites["a"].start  # type: ignore[method-assign]
    flare.submit()
    assert_engines_bytes(flare, tmp_path)


def test_below_the_quorum_nothing_is_kept_and_the_same_job_resumes(make: Make, tmp_path: Path) -> None:
    """Two of three fail in round 1: the checkpoint is, byte for byte, the one after round 0."""
    fails = Fate(
        change=lambda reply: messages.send_failure(
            CheckpointError("cannot write x in /data/y", public="the disk is full; it needs {size:,} bytes", size=1234)
        )
    )
    flare = make({("a", 1): fails, ("b", 1): fails})
    checkpoints: list[bytes] = []
    flare.clock.plan(2.0, lambda: checkpoints.append(flare.run.checkpoint.read_bytes()))
    job = flare.submit()
    said = "CheckpointError: the disk is full; it needs 1,234 bytes"
    assert job.panic.startswith(f"round 1 phase train: 1 valid updates, 2 needed. a: {said}; b: {said}")
    assert job.panic.endswith(f"Submit the same job again to resume {flare.run.path.name}.")
    assert (status(flare)["status"], status(flare)["round"]) == ("stopped", 0)
    assert status(flare)["reason"] in job.panic
    assert [flare.run.checkpoint.read_bytes()] == checkpoints
    assert not flare.run.model.exists()
    flare.submit()
    assert status(flare)["status"] == "finished"
    assert_engines_bytes(flare, tmp_path)


def test_a_run_that_was_put_back_is_gone_on_with_by_the_same_job(make: Make, tmp_path: Path) -> None:
    """It had finished; its sites still have what they remembered of the rounds that are undone."""
    flare = make()
    flare.submit()
    assert status(flare)["status"] == "finished"
    folder = flare.run.path
    rollback(flare.run, 1)
    assert (status(flare)["status"], flare.run.model.exists()) == ("stopped", False)
    flare.submit()
    assert (status(flare)["status"], flare.run.path) == ("finished", folder)
    assert_engines_bytes(flare, tmp_path)


def test_a_finished_run_is_not_resumed_and_the_next_has_a_folder_of_its_own(make: Make) -> None:
    flare = make()
    flare.submit()
    flare.submit()
    runs = sorted((flare.folder / "server" / "runs" / "toy").iterdir())
    assert [run.name for run in runs] == ["001", "002"]
    assert (runs[0] / "model/model.safetensors").read_bytes() == (runs[1] / "model/model.safetensors").read_bytes()


def test_a_finished_run_is_not_trained_again_by_a_clone_of_its_job(make: Make) -> None:
    flare = make()
    flare.submit()
    before = status(flare)
    flare.run.status_file.write_text('{"status": "running", "round": 2}')  # killed before it said so
    trained, flare.meta = dict(flare.fetched), {"cloned_from": "job-1"}
    job = flare.submit()
    assert (job.panic, status(flare)["status"], before["status"]) == ("", "finished", "finished")
    assert status(flare)["round"] == 2
    assert dict(flare.fetched) == trained
    assert flare.run.path.name == "001"
    assert job.engine.new_context().get_prop(RUN_FOLDER) == str(flare.run.path), "its results come along"


def test_a_clone_goes_on_with_a_run_that_has_not_finished(make: Make, tmp_path: Path) -> None:
    flare = make()
    flare.meta = {"cloned_from": "job-0"}
    flare.clock.plan(2.0, lambda: flare.job.abort_now())
    flare.submit()
    flare.submit()
    assert status(flare)["status"] == "finished"
    assert_engines_bytes(flare, tmp_path)


class WithoutModel(FederatedController):
    """As the controller of an encrypted run, which has no model to write."""

    def _finish(self, folder: RunFolder, state: State, history: list[Record]) -> None:
        pass


def test_a_finished_run_without_a_model_is_not_resumed(make: Make) -> None:
    flare = make()
    flare.make_controller = WithoutModel
    flare.submit()
    flare.submit()
    assert flare.run.path.name == "002"
    assert len(flare.records) == 3


def test_a_run_whose_sites_are_not_here_is_stopped_at_once(make: Make, tmp_path: Path, monkeypatch: Any) -> None:
    """The same preset is given to c, d and e, of which only c is in the run that lost its quorum."""
    make({(name, 1): Fate(train=1e9) for name in "bc"}).submit(task_timeout=50)
    others = dict(zip("cde", three_sites().values(), strict=True))
    flare = MemoryFlare(tmp_path, monkeypatch, toy_experiment(), others)
    job = flare.submit()
    said = "continues with the sites that it began with, a, b, c: 1 of them are here, 2 needed. Absent: a, b;"
    assert job.panic.startswith(f"run toy/001 {said} here: c, d, e.")
    assert status(flare)["status"] == "stopped"
    assert (flare.clock.now, flare.fetched) == (0.0, {})


def test_who_is_not_here_and_who_came_after_the_beginning_is_noted(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The run begins with a and b; c is there when it is resumed, the job's d never."""
    two = {name: data for name, data in three_sites().items() if name != "c"}
    flare = MemoryFlare(tmp_path, monkeypatch, toy_experiment(), two)
    flare.meta = {"deploy_map": {"app": ["server", "a", "b", "c", "d"]}}
    flare.clock.plan(2.0, lambda: flare.job.abort_now())
    flare.submit()
    assert (status(flare)["absent"], "not_in_run" in status(flare)) == (["c", "d"], False)
    resumed, resumed_meta = make(), flare.meta
    resumed.meta = resumed_meta
    with caplog.at_level(logging.WARNING, logger=FederatedController.__module__):
        resumed.submit()
    assert (status(resumed)["status"], status(resumed)["absent"], status(resumed)["not_in_run"]) == (
        "finished",
        ["d"],
        ["c"],
    )
    assert status(resumed)["summary"] == "completed without d from the beginning"
    assert "not here, though the job or its run names them: d" in caplog.text
    assert "not asked, as the run began without them: c" in caplog.text


def test_a_job_for_all_misses_nobody(make: Make) -> None:
    flare = make()
    flare.meta = {"deploy_map": {"app": ["@ALL"]}}
    flare.submit()
    assert "absent" not in status(flare)


def test_a_benched_site_is_asked_when_the_job_is_submitted_again(make: Make) -> None:
    """c misses rounds 0 and 1 and is benched in round 2, in which the job is aborted."""
    flare = make({("c", round): Fate(train=1e9) for round in range(2)}, toy_experiment(rounds=3, evaluate_every=0))

    def abort_in_round_2() -> None:
        if ("a", 2, "train") in flare.fetched:
            flare.job.abort_now()
        else:
            flare.clock.plan(0.2, abort_in_round_2)

    flare.clock.plan(0.2, abort_in_round_2)
    flare.submit(grace=2.0)
    assert ("c", 2, "train") not in flare.fetched
    flare.submit(grace=2.0)
    assert dropped(flare)[2] == {}


@pytest.mark.parametrize("known", [True, False])
def test_sites_do_not_go_on_with_what_they_remember_of_another_run(make: Make, tmp_path: Path, known: bool) -> None:
    """The server's runs were removed, so its next one is 001 again. c's first task is lost, and it misses round 0."""
    experiment = replace(toy_experiment(rounds=3), model=ToyModel(norm=True), norm_statistics="site")  # type: ignore[arg-type]
    flare = make(experiment=experiment)
    flare.submit()
    shutil.rmtree(tmp_path / "server" / "runs")
    if not known:  # what a site remembers of a server that gave no id
        for file in tmp_path.rglob("run_id.txt"):
            file.unlink()
    flare.fates = lambda task: Fate(down=None) if (task.site, task.round, task.attempt) == ("c", 0, 0) else Fate()
    flare.fetched.clear()
    flare.submit(grace=2.0)
    assert list(dropped(flare)[0]) == ["c"]
    assert_never_trained(flare, tmp_path, "c", 0)


def assert_never_trained(flare: MemoryFlare, tmp_path: Path, site: str, round: int) -> None:
    """The model file is that of the plain round loop in which the site never saw that round's task."""
    there = refuse_all_but((site, round))
    _, model = in_engine(flare.experiment, flare.data, tmp_path / "plain", there, there)
    assert flare.run.model.read_bytes() == model.read_bytes()
    memory = tmp_path / site / "runs" / "toy" / "001" / "sites" / site
    newest = max(memory.glob("*.safetensors")).name
    assert (memory / newest).read_bytes() == (tmp_path / "plain" / "sites" / site / newest).read_bytes()


def test_a_run_of_an_older_fedvlp_goes_on_without_an_id(make: Make, tmp_path: Path) -> None:
    flare = make(experiment=toy_experiment(small(METHODS["local"])))
    flare.clock.plan(2.0, lambda: flare.job.abort_now())
    flare.submit()
    flare.run.environment.write_text("{}")
    flare.submit()
    assert_engines_bytes(flare, tmp_path)


def test_a_job_that_flare_ends_is_stopped_and_not_aborted(make: Make) -> None:
    """`fedvlp jobs keep` goes on with it: nobody aborted it."""
    flare = make()

    def policy() -> None:
        with flare.job.engine.new_context() as context:
            flare.job.communicator.system_panic("Aborting job due to deployment policy violation", context)

    flare.clock.plan(2.0, policy)
    flare.submit()
    cause = "Aborting job due to deployment policy violation in round 1, train"
    told = status(flare)
    assert (told["status"], told["cause"], told["summary"]) == ("stopped", cause, f"ended by FLARE: {cause}")
    assert told["reason"].startswith("Submit the job again")


@pytest.mark.parametrize(
    ("code", "what"),
    [
        (101, "job process died"),
        (102, "job process refused a component"),
        (103, "job process could not use the job's configuration"),
        (104, "job process could not be started"),
        (9, "job process was aborted at the site"),
    ],
)
def test_a_sites_process_for_which_flare_ends_the_job_is_the_cause_and_an_earlier_loss_is_not(
    make: Make, code: int, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """c was lost in round 1, and answers no more; in round 3, a has answered when its process ends; b trains on.

    The codes are those of FLARE's ``ProcessExitCode`` and ``JobReturnCode``.
    """
    fates = {("c", round): Fate(train=1e9) for round in (1, 2, 3)} | {("b", 3): Fate(train=100.0)}
    flare = make(fates, toy_experiment(rounds=5, evaluate_every=0))
    seen: list[dict[str, Any]] = []

    def fails() -> None:
        waits = stats(flare).get("under_way", {})
        if waits.get("round") != 3 or "a" in waits["waits_for"]:
            flare.clock.plan(0.5, fails)
            return
        flare.job.site_reports("a", code)
        flare.job.site_reports("b", code)  # FLARE ends it there, too: no cause
        seen.append(stats(flare))

    flare.clock.plan(0.5, fails)
    job = flare.submit(grace=10.0)
    told = status(flare)
    cause = f"a's {what} in round 3, train"
    assert (told["status"], told["cause"], told["summary"]) == ("stopped", cause, f"ended by FLARE: {cause}")
    assert told["reason"].startswith("Submit the job again"), "and nothing of c"
    assert [told["sites"][site]["state"] for site in "abc"] == ["job process failed", "answered", "dropped"]
    assert job.panic == "", "FLARE knows"
    assert seen[0]["summary"] == told["summary"], "FLARE's console says so at once"
    with pytest.raises(SystemExit) as ended:
        app(["jobs", "status", str(flare.run.path)])
    assert ended.value.code == 1
    assert capsys.readouterr().out.startswith(f"ended by FLARE: {cause}\nSubmit the job again")
    assert html.escape(f"ended by FLARE: {cause}") in board.page(board.statuses(flare.run.path.parents[1]))


@pytest.mark.parametrize(
    ("site", "code", "expected"),
    [("a", 0, True), ("a", 101, False), ("stranger", 101, True)],
)
def test_an_operators_abort_is_no_sites_fault(make: Make, site: str, code: int, expected: bool) -> None:
    """Not after a report of a process that ended well, nor one that FLARE drops, nor one of no site of the job."""
    flare = make()
    flare.clock.plan(0.5, lambda: flare.job.site_reports(site, code, expected=expected))
    flare.clock.plan(0.6, lambda: flare.job.abort_now())
    flare.submit()
    told = status(flare)
    assert (told["status"], told["summary"], "cause" in told) == ("aborted", "aborted in round 0 of 2, train", False)
    assert told["reason"].startswith("Somebody aborted the job or shut the server down, whom the server's audit.log")
    assert told["sites"]["a"]["state"] == "not asked"


def test_a_process_that_fails_while_the_job_begins_is_named(make: Make) -> None:
    """Before the run has a status."""
    flare = make()

    class Early(FLComponent):
        def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
            if event_type == EventType.START_RUN:
                flare.job.site_reports("a", 104)

    flare.submit([Early()])
    assert status(flare)["summary"] == "ended by FLARE: a's job process could not be started"


def test_sites_that_flare_ended_first_are_no_lost_quorum(make: Make) -> None:
    """FLARE ends the job at the sites before it does at the server: all of them fail."""
    flare = make()
    failed = messages.send_failure(Failure(FailureKind.FAILED, "TASK_ABORTED"))
    flare.fates = lambda task: Fate(change=lambda reply: failed)
    stop = flare.clock.plan

    def fails() -> None:
        job, flare.job.abort_now = flare.job, lambda: None  # type: ignore[method-assign]
        job.site_reports("a", 101)

    stop(0.5, fails)
    job = flare.submit()
    assert status(flare)["summary"] == "ended by FLARE: a's job process died in round 0, train"
    assert job.panic == ""


def test_a_run_that_finishes_all_the_same_is_finished(make: Make) -> None:
    """The process of a site died after its last answer, and FLARE's abort came too late."""
    flare = make()

    def fails() -> None:
        flare.job.abort_now = lambda: None  # type: ignore[method-assign]
        flare.job.site_reports("a", 101)

    flare.clock.plan(4.0, fails)
    flare.submit()
    told = status(flare)
    assert (told["status"], told["summary"], "cause" in told) == ("finished", "completed", False)
    assert told["sites"]["a"]["state"] == "answered"


# --- other ends --------------------------------------------------------------------------------------------------


def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No file can be put into its place."""

    def refuse(source: Any, target: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("fedvlp.core.checkpoint.os.replace", refuse)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (unwritten(Path("/srv/x/model.safetensors"), OSError(errno.ENOSPC, "full"), 10**15),
         r"CheckpointError: cannot write model.safetensors in /srv/x: the disk is full; it needs 1,0.* are missing"),
        (SafetensorError("I/O error: No space left on device"), "SafetensorError: the disk is full: /.* free on /"),
        (ValueError("report of Jane Doe"), "^ValueError$"),
    ],
)  # fmt: skip
def test_the_status_of_a_failed_run_says_which_disk_is_full_and_of_other_errors_their_kind(
    make: Make, monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(RunFolder, "finish", fail)
    flare = make()
    flare.submit()
    assert status(flare)["status"] == "failed"
    assert re.search(said, status(flare)["reason"])


def test_no_room_for_anything_ends_the_job_with_the_reason(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """run_status.json cannot be written either; FLARE must learn why all the same."""
    flare = make()
    with monkeypatch.context() as patched:
        flare.clock.plan(2.0, lambda: full_disk(patched))
        job = flare.submit()
    assert "CheckpointError: cannot write server.safetensors" in job.panic
    assert [record["round"] for record in flare.records] == [0]
    flare.submit()
    assert status(flare)["status"] == "finished"
    assert_engines_bytes(flare, tmp_path)


def test_a_foreign_error_ends_the_job_and_its_text_stays(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text of an exception that is not fedvlp's own may hold a path or a report."""

    def broken(*args: Any) -> None:
        raise KeyError("/data/DOE^JANE")

    flare = make()
    monkeypatch.setattr(Method, "aggregator", broken)
    job = flare.submit()
    assert job.panic == "KeyError"
    assert (status(flare)["status"], status(flare)["reason"]) == ("failed", "KeyError")
    assert "DOE" not in flare.run.status_file.read_text()


def test_sites_of_the_next_release_take_part(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Server and sites are two versions of the package; sites are ahead."""
    monkeypatch.setattr(task_handler, "__version__", "0.1.1")
    monkeypatch.setattr(task_handler, "WIRE_VERSIONS", range(1, 3))  # it writes another one, and reads this
    flare = make()
    flare.submit()
    assert dropped(flare) == [{}, {}, {}]
    assert_engines_bytes(flare, tmp_path)


def test_every_task_names_its_run(make: Make) -> None:
    """Folder, fingerprint and version travel with the task, so that a site refuses another run's
    (flare/task_handler.py).
    """
    flare = make({("a", 0): Fate(), ("b", 0): Fate()})
    headers = []
    carry = flare.carry

    def noting(message: Shareable) -> Shareable:
        headers.append(from_shareable(message).get_meta_prop(messages.KEY).get("run"))
        return carry(message)

    flare.carry = noting
    flare.submit()
    runs = [run for run in headers if run]
    assert {run["folder"] for run in runs} == {"toy/001"}
    assert len({run["fingerprint"] for run in runs}) == len({run["version"] for run in runs}) == 1


# --- what only some runs need ------------------------------------------------------------------------------------


def test_updates_of_a_large_model_wait_on_disk_and_the_bytes_are_the_same(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the limit at 0 bytes every model is large."""
    monkeypatch.setattr(controller_module, "PARK_BYTES", 0)
    monkeypatch.setattr("fedvlp.flare.tensor_stream.return_freed_memory", lambda: None)
    flare = make()
    spool = flare.folder / "server" / "runs" / "toy" / "001" / "spool"
    seen = []
    flare.clock.plan(0.5, lambda: seen.append(spool.is_dir()))
    flare.submit()
    assert seen == [True]
    assert_engines_bytes(flare, tmp_path)


def test_what_transfers_leave_is_freed_after_every_phase(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model of any size: cycles and arenas grew by 340 MB in 60 rounds of a model of 6 MB."""
    freed: list[str] = []
    flare = make()
    monkeypatch.setattr(controller_module, "cleanup_memory", lambda: freed.append("round"))
    monkeypatch.setattr(controller_module, "return_freed_memory", lambda mapped: freed.append("start"))
    flare.submit()
    assert freed == ["start", "round", "round", "round"]


def test_the_server_keeps_nothing_of_past_rounds_but_their_records(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects that are alive at the end of a phase, of 4 rounds and of 24."""
    alive: list[int] = []

    def counted(controller: object, fl_ctx: object, record: Record) -> None:
        gc.collect()
        alive.append(len(gc.get_objects()))

    monkeypatch.setattr(controller_module, "announce_record", counted)
    make(experiment=toy_experiment(Method(local_steps=1), rounds=24, evaluate_every=0)).submit()
    assert alive[-1] - alive[3] < 20 * 20  # a record has 12; the updates of three sites would be more than 30


@dataclass(frozen=True)
class ServerTrains(Method):
    """FedAvg whose server trains its model on the public set before it asks the sites."""

    uses_public: ClassVar[bool] = True

    def prepare(self, server: Server) -> None:
        assert server.trainer is not None
        server.trainer.train(self, server, "public")


def test_an_abort_is_heard_while_the_server_itself_trains(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal comes with the first of five batches: no step is done with it, and no second one is drawn."""
    flare = make(experiment=toy_experiment(ServerTrains(local_steps=5)))
    drawn = []

    def abort() -> None:
        drawn.append(flare.clock.now)
        flare.job.abort_now()

    def watched(method: Method, server: Server, *args: Any, **options: Any) -> Federation:
        assert server.trainer is not None
        server.trainer.client.data.tick = abort  # type: ignore[attr-defined]
        return Federation(method, server, *args, **options)

    monkeypatch.setattr(controller_module, "Federation", watched)
    flare.submit()
    assert status(flare)["status"] == "aborted"
    assert len(drawn) == 1
    assert not flare.arrivals
