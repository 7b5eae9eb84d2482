"""How far a run is and which site answered, written while it runs: ``RunStatus``. Its fields are in run/status.py."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from multiprocessing import RawArray
from pathlib import Path
from typing import Any

from fedvlp.core.checkpoint import CheckpointError, save_json
from fedvlp.core.disk import is_full
from fedvlp.core.method import Method
from fedvlp.core.metric_keys import loss_term
from fedvlp.core.server_state import Server
from fedvlp.core.types import EVALUATE, Broadcast, Reply
from fedvlp.evaluation.metric_names import AVERAGE, WORST, over_sites, recall
from fedvlp.federation.loop import QuorumLostError, Rounds
from fedvlp.federation.site import reason
from fedvlp.federation.wire import Exchange
from fedvlp.run.metrics import Record, by_site, overall
from fedvlp.run.status import FAILED, FINISHED, PROCESS_FAILED, RUNNING, SCHEMA, STOPPED, rounded, summary

# How far a run is, between its records: which sites have answered, and the steps of those that train.


def phases_left(method: Method, rounds: Rounds, round: int, next_phase: int) -> int:
    """Phases from ``next_phase`` of ``round`` to the end of the run; measuring the trained model is one."""
    training = sum(len(method.phases(number)) for number in range(round, rounds.rounds))
    return training - next_phase * (round < rounds.rounds) + bool(rounds.evaluate_every)


class Progress:
    """Counts what sites do. Worker processes that are forked after it is made count in the same memory.

    ``total``: phases that the run has left. A phase counts by the share of its sites that have answered, and a site
    that trains by the share of its steps that are done.
    """

    def __init__(self, method: Method, sites: Sequence[str], total: int = 0) -> None:
        self.total = total
        self.round = 0
        self.phase = ""
        self.asked = 0
        self.answered = 0
        self._method = method
        self._over = -1  # phases that are done; the first one begins the count
        self._slot = {site: index for index, site in enumerate(sites)}
        self._steps = RawArray("q", len(sites))  # of the phase under way; each written by the process that has the site
        self._training: set[str] = set()
        self._usual: dict[str, int] = {}  # phase -> steps that a site took in it

    def stepped(self, site: str) -> Callable[[], None]:
        """What ``site`` calls after every optimiser step."""
        slot, steps = self._slot[site], self._steps

        def count() -> None:
            steps[slot] += 1

        return count

    def steps(self) -> int:
        """Optimiser steps of all sites in the phase under way."""
        return sum(self._steps)

    def done(self) -> float:
        """Phases that are done, 0 to ``total``, with the share of the one under way."""
        usual = max(1, self._usual.get(self.phase, 0) or self._method.steps(self.phase) if self.phase else 1)
        shares = (min(0.99, self._steps[self._slot[site]] / usual) for site in list(self._training))
        under_way = (self.answered + sum(shares)) / max(1, self.asked)
        return min(float(self.total), max(0, self._over) + min(1.0, under_way))

    def watched(self, exchange: Exchange) -> Exchange:
        """``exchange``, whose phases are counted."""

        def counted(messages: Mapping[str, Broadcast]) -> Iterator[tuple[str, Reply]]:
            self._begin(messages)
            for site, reply in exchange(messages):
                self._training.discard(site)
                self.answered += 1
                self._usual[self.phase] = max(self._usual.get(self.phase, 0), self._steps[self._slot[site]])
                yield site, reply

        return counted

    def _begin(self, messages: Mapping[str, Broadcast]) -> None:
        self._over += 1
        self._training = set(messages)
        self.asked, self.answered = len(messages), 0
        for message in messages.values():
            self.round, self.phase = message.round, message.phase
        for slot in self._slot.values():
            self._steps[slot] = 0


log = logging.getLogger(__name__)


class RunStatus:
    """The status of one run in this process; it is written to ``file`` at the beginning, after every phase, at the end.

    A status that cannot be written, as on a full disk, is a warning: the run does not end for it.
    ``now``: a clock in seconds.
    """

    def __init__(self, file: Path, now: Callable[[], float] = time.monotonic) -> None:
        self.file = file
        self._now, self._began = now, now()
        self._done = 0  # phases that this process completed
        self._left = 0
        # FLARE's console reads from a thread of its own: these are replaced, and never changed in place.
        self._facts: dict[str, Any] = {}
        self._sites: dict[str, dict[str, Any]] = {}
        self._waits: dict[str, Any] = {}  # the phase under way, and whose answers it waits for
        self._told: dict[str, list[str]] = {}
        self._cause, self._culprit = "", ""  # why FLARE ends the run, and the site that it ends it for

    def begin(self, method: Method, rounds: Rounds, server: Server, next_phase: int) -> None:
        """The run begins, or resumes, at that phase of the server's round."""
        names = method.phases(server.round) if server.round < rounds.rounds else (EVALUATE,)
        measured = bool(server.history) and server.history[-1]["phase"] == EVALUATE  # nothing is left then
        self._left = 0 if measured else phases_left(method, rounds, server.round, next_phase)
        every = phases_left(method, rounds, 0, 0)
        phase = names[min(next_phase, len(names) - 1)]
        facts = {"round": server.round, "num_rounds": rounds.rounds, "phase": phase}
        self._facts = facts | {"phases_done": every - self._left, "phases": every}
        self._sites = {site: {"state": "not asked", "dropped": 0} for site in server.sites}
        for record in server.history:
            self._sites = _after(self._sites, record)
        if server.history:
            self._describe(server.history[-1])
        self.note()

    def attend(self, absent: list[str], strangers: list[str]) -> None:
        """Sites of the job or its run that were not there when it began, and sites that the run began without."""
        self._told = {name: sites for name, sites in (("absent", absent), ("not_in_run", strangers)) if sites}

    def watched(self, exchange: Exchange) -> Exchange:
        """``exchange``, of which the status says whose answers are awaited."""

        def told(messages: Mapping[str, Broadcast]) -> Iterator[tuple[str, Reply]]:
            waiting = sorted(messages)
            if messages:
                first = messages[waiting[0]]
                self._waits = {"round": first.round, "phase": first.phase, "waits_for": waiting}
            for site, reply in exchange(messages):
                waiting = [other for other in waiting if other != site]
                self._waits = {**self._waits, "waits_for": waiting}
                yield site, reply
                del reply  # one is resident at a time

        return told

    def add(self, record: Record) -> None:
        """A phase is complete."""
        self._done += 1
        self._left = max(0, self._left - 1)
        self._waits = {}
        self._sites = _after(self._sites, record)
        self._describe(record)
        self.note()

    def _describe(self, record: Record) -> None:
        """What is told of the phase that was last completed."""
        every = self._facts["phases"]
        told = {"round": record["round"], "num_rounds": self._facts["num_rounds"], "phase": record["phase"]}
        told |= {"phases_done": every - self._left, "phases": every}
        self._facts = told | {"answered": len(record["sites"]), "dropped": len(record["dropped"])} | _overall(record)

    def ends(self, cause: str, site: str = "") -> None:
        """FLARE ends the run, now, because of that, and because of that site where it is one."""
        at = self._waits or self._facts
        where = f" in round {at['round']}, {at['phase']}" if at else ""
        self._cause, self._culprit = f"{cause}{where}", site

    def content(self, status: str = RUNNING, reason: str = "") -> dict[str, Any]:
        """All fields, as the file and FLARE's console have them."""
        seconds = self._now() - self._began
        sites = self._sites
        fields: dict[str, Any] = {"schema": SCHEMA, "status": status, "reason": rounded(reason), **self._facts}
        fields["seconds"] = round(seconds, 1)
        if status == RUNNING and self._done:
            fields["seconds_left"] = round(seconds / self._done * self._left, 1)
        fields["updated"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
        if self._cause and status != FINISHED:
            fields["cause"] = self._cause
            if self._culprit in sites:
                sites = {**sites, self._culprit: {**sites[self._culprit], "state": PROCESS_FAILED}}
        for name, told in (("under_way", self._waits), ("sites", sites)):
            if told:
                fields[name] = told
        fields |= self._told
        return {"summary": summary(fields), **fields}

    def note(self) -> None:
        """Writes that the run continues."""
        self._write(RUNNING, "")

    def end(self, status: str, reason: str = "") -> None:
        """Writes how the run ended. Raises CheckpointError where "finished" cannot be written: a model may need it."""
        if status == FINISHED:
            self._waits = {}
            save_json(self.file, self.content(status, reason))
        else:
            self._write(status, reason)

    def fail(self, error: Exception) -> None:
        """Writes that the run failed: of a disk that took no more all there is to say, of any other error the type.

        The file goes to the lead, and other texts are worded for the log of this machine.
        """
        said = reason(error) if isinstance(error, CheckpointError) or is_full(error) else type(error).__name__
        self.end(FAILED, said)

    def _write(self, status: str, reason: str) -> None:
        try:
            save_json(self.file, self.content(status, reason))
        except CheckpointError as error:
            log.warning("the status of the run is not written: %s", error)

    @contextmanager
    def until_the_end(self) -> Iterator[None]:
        """Around the rounds of a run without FLARE: writes how they ended."""
        try:
            yield
        except QuorumLostError as error:
            self.end(STOPPED, str(error))
            raise
        except Exception as error:
            self.fail(error)
            raise
        except BaseException:
            self.end(STOPPED, "it was interrupted; resume it")
            raise
        self.end(FINISHED)


def write_end(file: Path, status: str, reason: str = "", known: Mapping[str, Any] | None = None) -> None:
    """Writes the end of a run that had no rounds in this process; ``known`` are fields that stay as they were.

    Raises CheckpointError.
    """
    stays = {name: value for name, value in (known or {}).items() if name not in ("under_way", "seconds_left")}
    fields = {**stays, "schema": SCHEMA, "status": status, "reason": reason}
    save_json(file, fields | {"summary": summary(fields)})


def _after(sites: Mapping[str, dict[str, Any]], record: Record) -> dict[str, dict[str, Any]]:
    """What is known of every site once the phase of ``record`` is complete."""
    known = dict(sites)
    for site in record["sites"]:
        known[site] = {"state": "answered", "dropped": known.get(site, {}).get("dropped", 0)}
    for site, why in record["dropped"].items():
        before = known.get(site, {})
        known[site] = {
            "state": "dropped",
            "dropped": before.get("dropped", 0) + 1,
            "reason": rounded(why),
            "absent_since": before.get("absent_since", record["round"]),
        }
    for site, metrics in by_site(record).items():
        known[site] = {**known.get(site, {"state": "answered", "dropped": 0}), **_figures(metrics)}
    return dict(sorted(known.items()))


def _overall(record: Record) -> dict[str, float]:
    """Mean loss of a phase, and recall on the val split, on average and at the worst site."""
    figures = {}
    losses = [m[n] for m in record["sites"].values() for n in m if loss_term(n) is not None]
    if losses and math.isfinite(sum(losses)):
        figures["loss"] = _short(sum(losses) / len(record["sites"]))
    measured = overall(record)
    for kind in (AVERAGE, WORST):
        name = over_sites(recall("val", 1), kind)
        if name in measured:
            figures[f"val_r1_{kind}"] = _short(measured[name])
    return figures


def _figures(metrics: Mapping[str, float]) -> dict[str, float]:
    """A site's loss and recall on its val split, as far as it reported them."""
    losses = [value for name, value in metrics.items() if loss_term(name) is not None]
    own = {"loss": sum(losses)} if losses else {}
    if recall("val", 1) in metrics:
        own["val_r1"] = metrics[recall("val", 1)]
    return {name: _short(value) for name, value in own.items() if math.isfinite(value)}


def _short(value: float) -> float:
    """Four digits: 5.47, where averaging left 5.470000000000001."""
    return float(f"{value:.4g}")
