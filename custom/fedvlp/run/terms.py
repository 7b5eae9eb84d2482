"""What an experiment spends: the terms on which methods are compared (spec 4.4, Z6)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from fedvlp.core.method import SiteHooks, overridden
from fedvlp.core.metric_keys import PROCESSOR_SECONDS
from fedvlp.core.types import EVALUATE, GROUPS, group
from fedvlp.core.validate import require
from fedvlp.run.assembly import Assembly
from fedvlp.run.experiment import Experiment
from fedvlp.run.metrics import Record

ENCODER = "encoder"


@dataclass(frozen=True)
class Terms:
    """What one site spends in a mean round, and how it counts in an average.

    A step is of every group of parameters that it trains and whose change is not thrown away after the phase. At the
    full rate a step of a warm-up counts as the share of the learning rate that it has. A method's own factor on a
    site's rate (FedDRA's N w) is not in it: its mean over sites is 1.
    """

    steps: Mapping[str, float]  # optimiser steps, by group: encoder, alignment, head
    full_rate: Mapping[str, float]  # the same, each counted as its share of the full learning rate
    total: float  # steps of all phases
    total_full_rate: float
    batch_size: int
    schedule: tuple[Any, ...]  # optimiser, learning rate, warm-up, whether it is made up, whether moments are kept
    weighting: str  # samples | uniform

    @property
    def axes(self) -> tuple[float, float]:
        """The two axes of a comparison: encoder steps at the full rate, and all steps."""
        return self.full_rate[ENCODER], self.total


def terms(experiment: Experiment) -> Terms:
    """The terms of an experiment, the mean over its rounds.

    Raises ValueError for a method whose steps depend on the records of a site, as those of CreamFL's relatives do.
    """
    method, training = experiment.method, experiment.training
    require(
        not training.local_epochs and "batches" not in overridden(method, SiteHooks),
        f"the steps of {type(method).__name__} depend on a site's records; its runs are compared by processor time",
    )
    names = [name for name, _ in Assembly(experiment).modules()[0].named_parameters()]
    steps, full = dict.fromkeys(GROUPS, 0.0), dict.fromkeys(GROUPS, 0.0)
    total = total_full = 0.0
    warm: set[tuple[str, str]] = set()  # models and their parameters whose moments the site has
    rounds = experiment.rounds.rounds
    require(rounds > 0, f"{experiment.name} has no round, so nothing to count")
    for round in range(rounds):
        phases = method.phases(round)
        shared = {name for name in names if any(method.shares(name, phase) for phase in phases)}
        for phase in phases:
            trained = {name for name in names if method.trains(name, phase)}
            taken = float(method.steps(phase))
            worth = taken
            moments = {(method.moments(name, phase), name) for name in trained}
            if not moments <= warm:
                taken += training.made_up(method.steps(phase))
                worth = training.full_rate(int(taken))
            warm |= {own for own in moments if own[0]} if training.optimizer_state == "keep" else set()
            total, total_full = total + taken, total_full + worth
            lasting = {name for name in trained if name not in shared or method.shares(name, phase)}
            for kind in {group(name) for name in lasting} & set(GROUPS):
                steps[kind] += taken
                full[kind] += worth
    schedule = (
        training.optimizer,
        training.lr,
        training.warmup_steps,
        training.make_up_warmup,
        training.optimizer_state,
    )
    return Terms(
        {kind: count / rounds for kind, count in steps.items()},
        {kind: count / rounds for kind, count in full.items()},
        total / rounds,
        total_full / rounds,
        training.batch_size,
        schedule,
        method.weighting,
    )


def like(experiment: Experiment, other: Experiment) -> Experiment:
    """The method of ``experiment`` on everything else that ``other`` has: records, model, start, training, rounds.

    It weights sites as ``other`` does and takes as many steps in a mean round, those of all phases together, as whole
    steps allow, so it is on equal terms on the second axis of a comparison. Raises ValueError for a method of several
    phases, of which nobody can say how it would share these steps.
    """
    method, wanted = experiment.method, terms(other).total
    require(
        len(method.phases(0)) == 1,
        f"{experiment.name} has the phases {', '.join(method.phases(0))}; set their steps with --set instead",
    )
    warm_ups = 1 / other.rounds.rounds if other.training.optimizer_state == "keep" else 1  # in a round
    own = min(range(math.ceil(wanted) + 1), key=lambda own: abs(own + warm_ups * other.training.made_up(own) - wanted))
    method = replace(method, local_steps=own, weighting=other.method.weighting)
    return replace(other, name=experiment.name, method=method, extra=experiment.extra)


def processor_seconds(history: Sequence[Record]) -> float:
    """Seconds of processor time that a site's training took in a mean round, the mean over sites; nan: not measured.

    The probe of the first phase of a round is part of it; evaluations are not (federation/site.py).
    """
    of_round: dict[tuple[int, str], float] = {}
    for record in history:
        if record["phase"] == EVALUATE:
            continue
        for site, metrics in record["sites"].items():
            if PROCESSOR_SECONDS in metrics:
                key = record["round"], site
                of_round[key] = of_round.get(key, 0.0) + metrics[PROCESSOR_SECONDS]
    return fmean(of_round.values()) if of_round else float("nan")
