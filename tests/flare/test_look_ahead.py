"""What a trainer does before it is asked: the same answers, sooner, and nothing where that would not be so.

Whole runs of the simulator with it, bytes compared with the engine's, are in tests/flare/test_simulator.py.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import pytest

from fedvlp.flare import trainer as trainer_module
from fedvlp.flare.look_ahead import TOLD, LookAhead, Task, told
from fedvlp.flare.raw_tensors import RawTensor
from fedvlp.flare.trainer import Service
from fedvlp.flare.trainer_link import CROWDED, SOCKET, TrainerLink, TrainerLostError, started_at

ONE, TWO = (RawTensor("F32", (1,), bytes([value]) * 4) for value in (1, 2))


def asked(site: str, round: int) -> dict[str, Any]:
    return {"settings": {"name": "toy"}, "paths": {"site": site}, "message": {"round": round}, "most_samples": None}


def of_all(round: int, tensor: RawTensor = ONE) -> dict[str, tuple[dict[str, Any], dict[str, RawTensor]]]:
    return {site: ({"round": round}, {"w": tensor}) for site in ("a", "b", "c")}


def heard(ahead: LookAhead, round: int) -> None:
    """``ahead`` is told, by way of the socket's JSON."""
    content, tensors = told(of_all(round))
    ahead.tell(json.loads(json.dumps(content)), tensors)


def told_of_a_second_phase() -> LookAhead:
    """All sites were visited in the first one, in the order of their names."""
    ahead = LookAhead()
    for site in "abc":
        ahead.visited(Task(asked(site, 0), {"w": ONE}))
    heard(ahead, 1)
    return ahead


def all_tasks(ahead: LookAhead) -> list[Task]:
    return list(iter(ahead.next, None))


DONE: tuple[dict[str, Any], dict[str, RawTensor]] = ({"update": {"round": 1}, "aborted": False}, {"w": TWO})


def test_tasks_are_begun_in_the_order_of_the_visits_and_are_those_that_the_visits_bring() -> None:
    ahead = LookAhead()
    heard(ahead, 0)
    assert all_tasks(ahead) == [], "nobody has asked: settings and folders are not known"
    for site in "bca":
        assert ahead.visited(Task(asked(site, 0), {"w": ONE})) is None
    heard(ahead, 1)
    begun = all_tasks(ahead)
    assert [task.site for task in begun] == ["b", "c", "a"]
    for task in begun:
        ahead.store(task, DONE)
    for site in "bca":
        task = Task(json.loads(json.dumps(asked(site, 1))), {"w": RawTensor("F32", (1,), bytes(ONE.data))})
        assert ahead.visited(task) == DONE
        assert ahead.visited(task) is None, "an answer is given once"


@pytest.mark.parametrize("other", ["a tensor", "its name", "a number of the message", "the settings", "the folders"])
def test_a_visit_that_brings_anything_else_gets_no_answer_of_before(other: str) -> None:
    ahead = LookAhead()
    ahead.visited(Task(asked("a", 0), {"w": ONE}))
    heard(ahead, 1)
    (begun,) = all_tasks(ahead)
    ahead.store(begun, DONE)
    content, tensors = asked("a", 1), {"w": ONE}
    if other == "a tensor":
        tensors = {"w": TWO}
    elif other == "its name":
        tensors = {"v": ONE}
    elif other == "a number of the message":
        content["message"]["lr_scale"] = 2.0
    elif other == "the settings":
        content["settings"] = {"name": "another"}
    else:
        content["paths"] = {"site": "a", "runs": "elsewhere"}
    assert ahead.visited(Task(content, tensors)) is None


@pytest.mark.parametrize("said", [{"failure": ["failed", "OSError"], "aborted": False}, {"aborted": True}])
def test_a_task_that_failed_or_was_left_is_done_again(said: dict[str, Any]) -> None:
    ahead, task = LookAhead(), Task(asked("a", 1), {"w": ONE})
    ahead.store(task, (said, {}))
    assert ahead.visited(task) is None


def test_a_new_phase_drops_what_is_left_of_the_one_before() -> None:
    ahead = told_of_a_second_phase()
    first = ahead.next()
    assert first is not None
    ahead.store(first, DONE)
    ahead.visited(Task(asked("b", 1), {"w": ONE}))
    heard(ahead, 2)
    assert [task.asked["message"]["round"] for task in all_tasks(ahead)] == [2, 2, 2]
    assert ahead.visited(first) is None


def test_a_site_that_was_visited_before_its_turn_is_not_begun() -> None:
    ahead = told_of_a_second_phase()
    ahead.visited(Task(asked("b", 1), {"w": ONE}))
    assert [task.site for task in all_tasks(ahead)] == ["a", "c"]


def test_a_tensor_that_goes_to_all_sites_is_told_once() -> None:
    content, tensors = told(of_all(1) | {"d": ({"round": 1}, {"w": TWO, "v": ONE})})
    assert len(tensors) == 2
    sent = content[TOLD]
    assert sent["a"]["tensors"]["w"] == sent["c"]["tensors"]["w"] == sent["d"]["tensors"]["v"]
    assert tensors[sent["d"]["tensors"]["w"]] is TWO


# --- a trainer's process, in a thread ----------------------------------------------------------------------------


class Slow:
    """In a trainer's place: notes what it begins; a task of the sites in ``held`` goes on until it is asked to stop."""

    begun: list[tuple[str, int]]
    held: set[str]
    looks: int  # how often a held task asked whether to stop
    service: Service

    def answer(self, task: Task, should_stop: Callable[[], bool]) -> tuple[dict[str, Any], Mapping[str, RawTensor]]:
        self.begun.append((task.site, task.asked["message"]["round"]))
        while task.site in self.held:
            if should_stop():
                return {"aborted": True}, {}
            Slow.looks += 1
            time.sleep(0.01)
        return {"update": {"site": task.site}, "aborted": False}, {"w": task.tensors["w"]}


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Iterator[TrainerLink]:
    """The way to a trainer that is :class:`Slow`."""
    monkeypatch.setattr(trainer_module, "Trainer", Slow)
    Slow.begun, Slow.held, Slow.looks = [], set(), 0
    with tempfile.TemporaryDirectory(prefix="t") as made, socket.socket(socket.AF_UNIX) as listener:
        folder = Path(made)
        listener.bind(str(folder / SOCKET))
        listener.listen()
        Slow.service = Service(listener, "", lambda: not (folder / CROWDED).exists())
        serving = threading.Thread(target=Slow.service.run, args=(0,))
        serving.start()
        yield TrainerLink(folder, os.getpid(), started_at(os.getpid()) or "")
        Slow.held.clear()
        with Client(str(folder / SOCKET), "AF_UNIX") as connection:
            connection.send_bytes(b"made of something else")  # then it ends
        serving.join(30)
        assert not serving.is_alive()


def ask(link: TrainerLink, site: str, round: int, tensor: RawTensor = ONE) -> bool:
    """Whether the answer was there."""
    said = link.ask(asked(site, round), {"w": tensor}, lambda: False)
    assert said.update == {"site": site}
    assert bytes(said.tensors["w"].data) == tensor.data
    return said.ahead


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_trainer_answers_ahead_what_it_is_told(link: TrainerLink) -> None:
    assert [ask(link, site, 0) for site in "abc"] == [False, False, False]
    link.tell(of_all(1))
    until(lambda: len(Slow.begun) == 6)
    assert [ask(link, site, 1) for site in "abc"] == [True, True, True]
    link.tell(of_all(2))
    until(lambda: len(Slow.begun) == 9)
    assert [ask(link, site, 2, TWO) for site in "abc"] == [False, False, False], "a filter changed the tensor"
    assert Slow.begun == [(site, round) for round in (0, 1, 2, 2) for site in "abc"]


def test_a_visit_waits_for_its_own_task_and_stops_any_other(link: TrainerLink) -> None:
    for site in "abc":
        ask(link, site, 0)
    Slow.held.add("a")
    link.tell(of_all(1))
    until(lambda: Slow.begun[-1] == ("a", 1))
    answers: list[bool] = []
    own = threading.Thread(target=lambda: answers.append(ask(link, "a", 1)))
    own.start()
    until(lambda: Slow.service._early is not None)  # its visit is there
    Slow.held.clear()
    own.join(30)
    assert answers == [True]
    assert Slow.begun.count(("a", 1)) == 1, "it is not begun anew"
    until(lambda: len(Slow.begun) == 6)
    Slow.held.add("b")
    link.tell(of_all(2))  # in the order b, c, a
    until(lambda: Slow.begun[-1] == ("b", 2))
    assert not ask(link, "c", 2)
    until(lambda: len(Slow.begun) == 9)
    assert Slow.begun[6:] == [("b", 2), ("c", 2), ("a", 2)], "what was left waits for its own visit"


def test_a_visit_whose_answer_is_there_does_not_stop_the_next_sites_task(link: TrainerLink) -> None:
    for site in "abc":
        ask(link, site, 0)
    Slow.held.add("b")
    link.tell(of_all(1))
    until(lambda: Slow.begun[-1] == ("b", 1))
    assert ask(link, "a", 1)
    looked = Slow.looks
    until(lambda: Slow.looks > looked)
    assert Slow.begun[-1] == ("b", 1)
    link.tell(of_all(2))  # in the order b, c, a: the phase of b's task is over
    until(lambda: Slow.begun[-1] == ("b", 2))


def test_a_trainer_that_two_processes_want_at_a_time_begins_nothing(link: TrainerLink) -> None:
    for site in "abc":
        ask(link, site, 0)
    with link._alone(), pytest.raises(TrainerLostError, match="works for another site"):
        ask(link, "b", 0)
    link.tell(of_all(1))
    assert not ask(link, "a", 1)
    assert Slow.begun == [("a", 0), ("b", 0), ("c", 0), ("a", 1)]


def test_a_trainer_that_is_not_there_is_not_told(tmp_path: Path) -> None:
    TrainerLink(tmp_path / "nowhere", os.getpid(), "").tell(of_all(1))
    assert not (tmp_path / "nowhere").exists()
