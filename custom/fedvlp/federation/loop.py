"""The round loop that every way of running shares: broadcast, collect, check, aggregate, record.

How messages reach the sites is an ``Exchange``: in this process, through forked workers
(federation/exchange.py), or FLARE (flare/controller.py). Everything else (checks, quorum, checkpoints,
metrics) is here, once.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from fedvlp.core import metric_keys
from fedvlp.core.aggregation import MEAN, Averaging, bounded, in_site_order
from fedvlp.core.change import WEIGHTS, Change, Norms
from fedvlp.core.gate import check
from fedvlp.core.method import Method
from fedvlp.core.optimizers import NONE, ServerOptimizer
from fedvlp.core.server_state import Server
from fedvlp.core.snapshots import Snapshots
from fedvlp.core.types import EVALUATE, MODALITIES, Broadcast, Expected, Failure, FailureKind, Reply, State, Update
from fedvlp.core.validate import require
from fedvlp.federation.codec import PLAIN, Wire
from fedvlp.federation.wire import Exchange, ServerEnd

logger = logging.getLogger(__name__)


class QuorumLostError(RuntimeError):
    """Fewer valid updates than the quorum; nothing of the phase was kept and the run can be resumed."""


@dataclass(frozen=True)
class Rounds:
    """How long a run is and what it tolerates."""

    rounds: int = 10  # at least 0; 0 measures the untrained model
    quorum: int = 0  # valid updates that a phase needs; 0 = all sites but one (at least 1)
    evaluate_every: int = 1  # rounds between evaluations of the global model; 0 = never
    seed: int = 0  # of everything
    max_samples: int = 10_000_000  # a site that claims more training samples is refused
    samples_factor: float = 2.0  # so many times more or fewer than in its first reply of the run, and it is refused
    max_share: float = 0.5  # of the samples that count; a site with more counts as that; 1 = as it is
    max_missed: int = 2  # a site silent for so many consecutive rounds is benched: left out for now
    probe_every: int = 3  # a benched site is asked again every so many rounds
    clip_to_median: float = 5.0  # a change longer than so many times the sites' median is shortened to it; 0 = never
    averaging: str = MEAN  # of updates: mean | trimmed | median (core/aggregation.py)
    trim: float = 0.2  # trimmed: share of the sites that is left out at each end
    max_empty: int = 10  # the run stops after so many consecutive phases in which no site had a training sample
    server_optimizer: str = NONE  # none | momentum (FedAvgM) | adam (FedAdam) | yogi (core/optimizers.py)
    server_lr: float = 0.0  # its learning rate; 0 = 1 of momentum, 0.01 of adam and yogi
    server_beta1: float = 0.9  # decay of the mean of changes
    server_beta2: float = 0.99  # decay of the mean of squared changes, adam and yogi only
    server_tau: float = 1e-3  # smallest scale of a step, adam and yogi only

    def __post_init__(self) -> None:
        require(self.rounds >= 0, f"rounds is {self.rounds}; it must not be negative")
        require(self.quorum >= 0, f"quorum is {self.quorum}; it must not be negative")
        require(self.evaluate_every >= 0, f"evaluate_every is {self.evaluate_every}; 0 = never")
        require(
            self.clip_to_median == 0 or 1 <= self.clip_to_median < math.inf,
            f"clip_to_median is {self.clip_to_median}; it is 0 (never) or from 1 on",
        )
        require(
            1 <= self.samples_factor < math.inf,
            f"samples_factor is {self.samples_factor}; it is a finite factor from 1 on",
        )
        require(0 < self.max_share <= 1, f"max_share is {self.max_share}; it must be above 0, and 1 = no limit")
        Averaging(self.averaging, self.trim)
        self.optimizer()
        require(self.max_samples >= 0, f"max_samples is {self.max_samples}; it must not be negative")
        for name in ("max_missed", "probe_every", "max_empty"):
            require(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}; at least 1")

    def of_encrypted(self) -> Rounds:
        """The same without the limits that need readable updates: no norm is seen, and n_k is inside of the sum."""
        return replace(self, clip_to_median=0.0, max_share=1.0)

    def optimizer(self) -> ServerOptimizer:
        """How the server moves the model by an average. Raises ValueError."""
        return ServerOptimizer(
            self.server_optimizer, self.server_lr, self.server_beta1, self.server_beta2, self.server_tau
        )

    def needed(self, sites: int) -> int:
        """The quorum among ``sites`` sites."""
        return min(self.quorum, sites) if self.quorum else max(1, sites - 1)


class Federation:
    """The round loop. ``report`` is called with each phase's record after it is checkpointed.

    Sites of which it is known that they are ``present`` are all asked once, those too that were benched when the run
    was stopped: who resumes a run to take a site back does not wait for its next probe.
    """

    def __init__(
        self,
        method: Method,
        server: Server,
        rounds: Rounds,
        exchange: Exchange,
        *,
        wire: Wire = PLAIN,
        checkpoint: Path | None = None,
        report: Callable[[dict[str, Any]], None] = lambda record: None,
        present: Collection[str] = (),
    ) -> None:
        require(list(server.sites) == sorted(set(server.sites)), "the sites of a run must be sorted and distinct")
        require(bool(server.sites), "a run needs at least one site")
        require(
            rounds.quorum <= len(server.sites),
            f"rounds.quorum is {rounds.quorum}, but the run has {len(server.sites)} sites; ask for as many valid "
            "updates at most",
        )
        self.method = method
        self.server = server
        self.rounds = rounds
        folder = checkpoint.parent if checkpoint else None
        self.exchange = ServerEnd(wire, exchange)
        self.spool = folder / "spool" if folder else None
        server.averaging = Averaging(rounds.averaging, rounds.trim, self.spool)
        for setting, default in (("averaging", MEAN), ("server_optimizer", NONE)):
            asked = getattr(rounds, setting)
            require(
                asked == default or self._averages(),
                f"{type(method).__name__} averages no tensors of the model; rounds.{setting}={asked} would do nothing. "
                f"Leave it at {default}",
            )
        self.checkpoint = checkpoint
        self.snapshots = Snapshots(checkpoint) if checkpoint else None
        server.folder = folder or server.folder
        if self.snapshots:
            server.make_room = self.snapshots.save
        self.report = report
        self._to_ask = set(present)
        self._empty = 0
        self._norms: dict[str, Norms] = {}  # of the updates of this phase that were checked, by site
        self._passed: set[str] = set()  # sites whose replies in this phase passed the gate

    def run(self, next_phase: int = 0) -> State:
        """Runs to the end from the server's round and ``next_phase``; returns the trained model.

        Raises QuorumLostError. The server is then as it was before the phase that failed.
        """
        # 1. The run begins, or resumes from its newest checkpoint.
        server, first = self.server, next_phase
        if self.snapshots:
            self.snapshots.tidy()  # of what a phase left that was stopped
        if server.round == 0 and next_phase == 0:
            self.method.start(server)
        elif next_phase == 0 and self.snapshots and server.round not in self.snapshots.rounds():
            self.snapshots.store(server.round)  # the run was stopped between writing the checkpoint and storing it

        # 2. Every round has its phases; each is on disk before anybody hears of it.
        while server.round < self.rounds.rounds:
            phases = self.method.phases(server.round)
            for index in range(first, len(phases)):
                server.phase = phases[index]
                self._phase(index)
                last = index == len(phases) - 1
                server.round += last
                self._save(0 if last else index + 1)
                self.report(server.history[-1])
            first = 0

        # 3. The sites evaluate the trained model.
        if self.rounds.evaluate_every and not (server.history and server.history[-1]["phase"] == EVALUATE):
            self.method.conclude(server)
            server.phase = EVALUATE
            self._phase(0)
            self._save(0)
            self.report(server.history[-1])

        # 4. What the method makes of it in the end.
        state = self.method.finish(server)
        return server.trainer.served(state) if server.trainer else state

    def _phase(self, index: int) -> None:
        """One phase: broadcast, collect, aggregate, record. If it ends early, state and memory are as before."""
        # 1. What the server has before, for a phase that ends early.
        server, began = self.server, time.perf_counter()
        replies: dict[str, Update] = {}
        dropped: dict[str, str] = {}
        state, memory, samples, apart = server.state, dict(server.memory), dict(server.samples), server.apart

        # 2. The sites are asked, and their updates aggregated one by one as they come.
        wanted = self._wanted(index)
        server.metrics = server.trainer.measure(server.state, wanted) if server.trainer else {}
        try:
            if server.phase == EVALUATE:
                for _ in self._collect(self._messages(wanted), replies, dropped):
                    pass
            else:
                self._aggregate(wanted, replies, dropped)
        except BaseException:
            server.state, server.memory, server.samples, server.apart = state, memory, samples, apart
            raise

        # 3. The record of the phase.
        counts = {site: update.num_samples for site, update in replies.items()}
        server.enrolled = {site: count for site, count in counts.items() if count} | server.enrolled
        record = {
            "round": server.round,
            "phase": server.phase,
            "seconds": time.perf_counter() - began,
            "dropped": dropped,
            "sites": {site: update.measured for site, update in replies.items()},
            "members": list(server.sites),
            "bytes": self.exchange.bytes,
            "server": server.metrics,
            "memory": {n: t.tolist() for n, t in sorted(server.memory.items()) if _by_site(n, t, len(server.sites))},
        }
        server.history.append(record)

    def _aggregate(self, wanted: int, replies: dict[str, Update], dropped: dict[str, str]) -> None:
        """Hands the method one checked update at a time; commits when all have come and the quorum holds."""
        self.method.prepare(self.server)
        messages = self._messages(wanted)
        average = self.method.aggregator(self.server, self.server.phase)
        aggregator = self.rounds.optimizer().around(average, self.server)
        for update in self._collect(messages, replies, dropped):
            aggregator.add(update)
            del update  # one is resident at a time
        aggregator.commit()

    def _wanted(self, index: int) -> int:
        """How many held-out splits the model that this phase starts from is measured on: none, val, or test too."""
        server, every = self.server, self.rounds.evaluate_every
        if not every or index:
            return 0
        # The test split is for the first and the last model alone.
        if server.round == 0 or server.phase == EVALUATE:
            return 2
        return int(server.round % every == 0)

    def _asked(self) -> tuple[str, ...]:
        server = self.server
        return server.sites if server.phase == EVALUATE else self.method.asks(server)

    def missing(self) -> int:
        """Valid replies that the phase under way still lacks to its quorum, 0 or less when it holds.

        Sites that are left out of the phase for now count as asked.
        """
        return self.rounds.needed(len(self._asked())) - len(self._passed)

    def _messages(self, wanted: int) -> dict[str, Broadcast]:
        """One message per site that is asked this time."""
        server = self.server
        public_id = server.trainer.client.public_id if server.trainer else None
        messages = {}
        for site in self._asked():
            if self._absent(site) and server.round % self.rounds.probe_every:
                continue
            message = self.method.broadcast(server, site)
            messages[site] = replace(message, public_id=public_id, evaluate=wanted)
        return messages

    def _absent(self, site: str) -> bool:
        """Whether a site has been silent for as many phases as the last ``max_missed`` rounds had."""
        if site in self._to_ask:
            return False
        now, most = self.server.round, self.rounds.max_missed
        silent = self.server.missed.get(site, 0)
        return now >= most and silent >= sum(len(self.method.phases(round)) for round in range(now - most, now))

    def _collect(
        self, messages: Mapping[str, Broadcast], replies: dict[str, Update], dropped: dict[str, str]
    ) -> Iterator[Update]:
        """Streams the valid updates in site order; ends in QuorumLostError when too few came."""
        server, asked = self.server, self._asked()
        self._passed = set()
        times, share = self.rounds.clip_to_median, self.rounds.max_share

        # 1. The updates that passed the checks, shortened or counted less where the settings limit them.
        updates = self._valid(messages, replies, dropped)
        if server.phase != EVALUATE and (times or share < 1):
            updates = bounded(
                updates,
                lambda site: self.method.sent(server, site),
                times=times,
                share=share,
                spool=self.spool,
                norms=lambda one: self._norms.get(one.site, {}),
            )
        for update in updates:
            yield update
            del update  # one is resident at a time
        for site in asked:
            if site not in replies:
                # Whoever was left out on purpose is no site that failed.
                dropped.setdefault(site, "no reply" if site in messages else "left out after missed phases")

        # 2. The quorum. Below it the phase is undone, and nothing of it is in the state.
        needed = self.rounds.needed(len(asked))
        if len(replies) < needed:
            raise QuorumLostError(
                f"round {server.round} phase {server.phase}: {len(replies)} valid updates, {needed} needed. "
                + "; ".join(f"{site}: {why}" for site, why in sorted(dropped.items()))
                + ". The model is as it was before this phase; resume the run once these are solved."
            )

        # 3. Who was silent: such a site is left out after ``max_missed`` rounds, and asked again now and then.
        for site in asked:
            server.missed[site] = 0 if site in replies else server.missed.get(site, 0) + 1
        self._to_ask -= messages.keys()
        self._refuse_emptiness(replies)

    def _valid(
        self, messages: Mapping[str, Broadcast], replies: dict[str, Update], dropped: dict[str, str]
    ) -> Iterator[Update]:
        """The updates that may be used, in site order; how far each goes from the model is a metric of the server."""
        server = self.server
        for site, reply in in_site_order(self._checked(messages), list(messages), self.spool):
            if isinstance(reply, Failure):
                dropped[site] = reply.text
                continue
            if any(name in server.state for name in reply.state):
                server.metrics[metric_keys.update_norm(site)] = self._norms.get(site, {}).get(WEIGHTS, 0.0)
            replies[site] = replace(reply, state={}, aux={})
            server.samples[site] = reply.num_samples  # as it says: a mean may count fewer (max_share)
            yield reply
            del reply

    def _checked(self, messages: Mapping[str, Broadcast]) -> Iterator[tuple[str, Reply]]:
        """The replies as they come, with a Failure in the place of an update that the gate refuses.

        The gate must judge a reply before the next one is waited for, not in its turn by site: how long the exchange
        still waits depends on how many valid ones there are (:meth:`missing`).
        """
        seen: set[str] = set()
        for site, reply in self.exchange(messages):
            if site in messages and site not in seen and not isinstance(reply, Failure):
                problem = self._problem(site, reply)
                if problem:
                    reply = Failure(FailureKind.FAILED, problem)
                else:
                    self._passed.add(site)
            seen.add(site)
            yield site, reply
            del reply  # one is resident at a time

    def _refuse_emptiness(self, replies: Mapping[str, Update]) -> None:
        """Warns of a phase in which no site had a training sample; too many in a row end the run."""
        self._empty = 0 if any(update.num_samples for update in replies.values()) else self._empty + 1
        if self._empty == 1:
            logger.warning("round %d: no site reported a training sample; the model stays as it is", self.server.round)
        if self._empty >= self.rounds.max_empty:
            raise QuorumLostError(
                f"round {self.server.round}: no site reported a training sample for {self._empty} phases. "
                "Look at the sites' data (num_samples in metrics.csv), then resume."
            )

    def _problem(self, site: str, update: Update) -> str:
        """Why the update must be dropped, or ""."""
        modalities = dict(self.server.modalities)
        try:
            problem = self._refusal(site, update) or ""
        except Exception as error:  # garbage may be wrong in any way; it costs its site this phase, not the run
            logger.warning("%s: its update could not be checked: %s", site, type(error).__name__)
            problem = f"its update could not be checked: {type(error).__name__}"
        if problem:
            self.server.modalities = modalities  # a refused reply says nothing about its site
        return problem

    def _refusal(self, site: str, update: Update) -> str | None:
        """The rules that an update must pass, in order; its norms are measured in the same read. Raises anything."""
        server, method = self.server, self.method
        if server.trainer and update.public_id != server.trainer.client.public_id:
            return "it is about another list of public records: the hash of their ids is not the server's"
        if server.trainer:
            server.modalities[site] = tuple(name for name in MODALITIES if name in update.modalities)
        phases = method.phases(server.round)
        # Numbers for the method come with the first phase of a round alone; they are of the model that it starts from.
        probed = server.phase in (EVALUATE, phases[0])
        # Values are read once: whether they are finite, and how far they are from what the site was sent.
        change = Change(server.state if server.phase == EVALUATE else method.sent(server, site))
        problem = check(
            update,
            site=site,
            round=server.round,
            phase=server.phase,
            expected=Expected() if server.phase == EVALUATE else method.expects(server, site),
            max_samples=self.rounds.max_samples,
            probes=method.probes() if probed else (),
            finite=change.finite,
        )
        self._norms[site] = change.norms()
        return problem or self._other_count(site, update.num_samples) or method.objection(server, update)

    def _other_count(self, site: str, samples: int) -> str | None:
        """Why a count of samples is not that of the site which enrolled, or None; 0 counts nothing and is taken."""
        enrolled, factor = self.server.enrolled.get(site, 0), self.rounds.samples_factor
        if not enrolled or not samples or enrolled / factor <= samples <= enrolled * factor:
            return None
        return (
            f"num_samples is {samples}; it was {enrolled} in this site's first reply of the run, and may be up to "
            f"{factor:g} times more or fewer (rounds.samples_factor). See which records the site trains on now"
        )

    def _averages(self) -> bool:
        """Whether the method shares any tensor of the model, which then is averaged."""
        phases = self.method.phases(self.server.round)
        return any(self.method.shares(name, phase) for name in self.server.state for phase in phases)

    def _save(self, next_phase: int) -> None:
        server, path = self.server, self.checkpoint
        if path and self.snapshots:
            self.snapshots.save(lambda: server.save(path, next_phase))
            if next_phase == 0 and server.phase != EVALUATE:
                self.snapshots.store(server.round)
            self.snapshots.tidy()


def _by_site(name: str, tensor: Tensor, sites: int) -> bool:
    """Whether a tensor of the memory holds one number per site; those of a model ("personal/<site>/...") do not."""
    return "/" not in name and tensor.shape == (sites,)
