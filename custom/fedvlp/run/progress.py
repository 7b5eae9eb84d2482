"""How far a run is, between its records: which sites have answered, and the steps of those that train."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import RawArray

from fedvlp.core.method import Method
from fedvlp.core.types import Broadcast, Reply
from fedvlp.federation.loop import Rounds
from fedvlp.federation.wire import Exchange


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
