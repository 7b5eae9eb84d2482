"""Spec faults, row 11: a finite update a thousand times too large, or turned round, and how far it moves the model.

The bounds are measured: how far the honest sites themselves went in the same phase, and between which values they lie.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from support.cases import cases
from support.laboratory import METHODS
from support.toy import World, clone, same_bytes, small

from fedvlp.core.change import update_norm
from fedvlp.core.types import Broadcast, Reply, State, Update
from fedvlp.federation.exchange import SequentialExchange
from fedvlp.federation.loop import Rounds
from fedvlp.methods.ensemble import Distillation, PublicEnsemble
from fedvlp.methods.softpull import SoftPull

FACTORS = (1e3, 1e30, -1.0, -1e3)
"""Larger, so large that its square is infinite, turned round, and both."""
ALONE = ("local", "centralized", "one-round-cca")
AVERAGED = [name for name, kind in METHODS.items() if not issubclass(kind, PublicEnsemble) and name not in ALONE]
"""OneRoundCCA averages moments: methods/test_one_round_cca.py."""


@dataclass
class Phase:
    """What came of one phase: the model before it, what the honest sites sent, model and memory after it."""

    name: str
    before: State = field(default_factory=dict)
    honest: dict[str, State] = field(default_factory=dict)
    after: State = field(default_factory=dict)
    memory: State = field(default_factory=dict)

    def moved(self) -> float:
        return math.sqrt(sum(float((self.after[n] - t).double().square().sum()) for n, t in self.before.items()
                             if t.is_floating_point()))  # fmt: skip


class Poisoned:
    """The sites of a world, of which b sends the model it received plus ``factor`` times what it has learned."""

    def __init__(self, one: World, factor: float) -> None:
        self.inner, self.factor = SequentialExchange(one.site), factor
        self.phases: list[Phase] = []

    def __call__(self, messages: Mapping[str, Broadcast]) -> Iterator[tuple[str, Reply]]:
        phase = Phase(next(iter(messages.values())).phase)
        self.phases.append(phase)
        for site, reply in self.inner(messages):
            assert isinstance(reply, Update), reply
            received = messages[site].state
            if site == "b":
                state = {n: self._turned(n, t, received) for n, t in reply.state.items()}
                yield site, replace(reply, state=state)
                continue
            phase.honest[site] = clone(reply.state)
            yield site, reply

    def _turned(self, name: str, tensor: torch.Tensor, received: Mapping[str, torch.Tensor]) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        base = received.get(name, torch.zeros_like(tensor))
        return base + self.factor * (tensor - base)


def run(name: str, factor: float, **options: Any) -> list[Phase]:
    """The phases of a run with the poison in it; nobody was dropped."""
    one = World(small(METHODS[name]), rounds=Rounds(rounds=1, evaluate_every=0, **options))
    exchange = Poisoned(one, factor)
    federation, _ = one.federation(exchange)
    model = [clone(federation.server.state)]

    def report(record: Mapping[str, Any]) -> None:
        exchange.phases[-1].before = model[-1]
        model.append(clone(federation.server.state))
        exchange.phases[-1].after = model[-1]
        exchange.phases[-1].memory = clone(federation.server.memory)

    federation.report = report
    federation.run()
    assert all(not record["dropped"] for record in federation.server.history)
    return exchange.phases


@pytest.mark.parametrize("name", cases(AVERAGED, seconds=1))
def test_by_default_it_goes_no_further_than_five_of_an_honest_sites_steps(name: str) -> None:
    """Each phase moves the model by at most 5 times the longest honest change, whichever weights the method gives."""
    times = Rounds().clip_to_median
    for factor in FACTORS:
        phases = [phase for phase in run(name, factor) if phase.name != "personal"]  # which leaves the model as it is
        for phase in phases:
            longest = max(update_norm(state, phase.before) for state in phase.honest.values())
            assert phase.moved() <= times * longest * (1 + 1e-5)
        assert phases[0].moved() > 0


@pytest.mark.parametrize(
    ("name", "averaging"),
    cases(zip([n for n in AVERAGED if n != "scaffold"], itertools.cycle(("trimmed", "median"))), seconds=1),
)
def test_a_robust_average_lies_between_honest_values(name: str, averaging: str) -> None:
    """Of every single value, unclipped: one poisoner of three sites chooses between honest ones and no more.

    Where the server trains as one more client, its values are honest as well; then it is shown that the size of the
    poison gains nothing.
    """
    robust = {"averaging": averaging, "clip_to_median": 0.0, "max_share": 1.0}
    if METHODS[name].uses_public:
        for sign in (1, -1):
            same_bytes(run(name, sign * 1e3, **robust)[0].after, run(name, sign * 1e6, **robust)[0].after)
        return
    for factor in FACTORS:
        phases = [phase for phase in run(name, factor, **robust) if phase.name != "personal"]
        assert any(phase.honest["a"].keys() & phase.after.keys() for phase in phases)
        for phase in phases:
            between(phase.after, list(phase.honest.values()))


def between(state: State, honest: list[State]) -> None:
    """Asserts of every value that it lies between those of the honest sites, up to rounding."""
    for name in honest[0].keys() & state.keys():
        if state[name].is_floating_point():
            sent = torch.stack([one[name] for one in honest])
            slack = 1e-6 * (1 + sent.abs().amax(0))
            assert (state[name] >= sent.amin(0) - slack).all(), name
            assert (state[name] <= sent.amax(0) + slack).all(), name


PERSONAL = [name for name, kind in METHODS.items() if issubclass(kind, SoftPull)]


@pytest.mark.parametrize("averaging", ["mean", "trimmed", "median"])
@pytest.mark.parametrize("name", PERSONAL)
def test_no_sites_own_model_is_poisoned_by_another(name: str, averaging: str) -> None:
    """SoftPull pulls the sites' own models together: a's and c's are no further from what they sent than by b's share
    of five honest changes (mean, clipped), or lie between honest values (robust, unclipped)."""
    robust = {} if averaging == "mean" else {"averaging": averaging, "clip_to_median": 0.0, "max_share": 1.0}
    for factor in FACTORS:
        phase = next(phase for phase in run(name, factor, **robust) if phase.name == "personal")
        for site, sent in phase.honest.items():
            own = {n: phase.memory[f"personal/{site}/{n}"] for n in sent if f"personal/{site}/{n}" in phase.memory}
            assert own
            if averaging == "mean":
                longest = max(update_norm(state, phase.before) for state in phase.honest.values())
                assert update_norm(own, sent) <= 2 * Rounds().clip_to_median * longest
            else:
                between(own, list(phase.honest.values()))


ENSEMBLES = [name for name, kind in METHODS.items() if issubclass(kind, PublicEnsemble)]


@pytest.mark.parametrize("name", ENSEMBLES)
def test_what_the_server_distils_is_never_longer_than_one_honest_vector(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sites send unit vectors for public records. One that turns its own round is heard, as one voice among three:
    every combined row stays in the unit ball, and longer vectors are refused and named."""
    combined: list[torch.Tensor] = []
    commit = Distillation.commit

    def watched(self: Distillation) -> None:
        combined.extend(e.mean() for e in self._ensembles.values() if e.suppliers)
        commit(self)

    monkeypatch.setattr(Distillation, "commit", watched)
    run(name, -1.0)
    assert combined
    assert all(torch.linalg.vector_norm(rows.double(), dim=1).max() <= 1 + 1e-5 for rows in combined)
    one = World(small(METHODS[name]), rounds=Rounds(rounds=1, evaluate_every=0))
    (record,) = one.run(Poisoned(one, 1e3)).history
    assert list(record["dropped"]) == ["b"]
    assert "expected unit vectors" in record["dropped"]["b"]
