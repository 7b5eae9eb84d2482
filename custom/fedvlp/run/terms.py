"""What an experiment spends: the terms on which methods are compared (spec 4.4, Z6)."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from fedvlp.core.method import Method, SiteHooks, overridden
from fedvlp.core.metric_keys import PROCESSOR_SECONDS
from fedvlp.core.types import EVALUATE, GROUPS, group
from fedvlp.core.validate import require
from fedvlp.run import presets
from fedvlp.run.assembly import Assembly
from fedvlp.run.experiment import Experiment
from fedvlp.run.fitting import fitted
from fedvlp.run.folder import seen_from_here
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


def like(experiment: Experiment, other: Experiment, folder: Path = Path("RUN")) -> Experiment:
    """The method of ``experiment`` on everything else that ``other`` has: records, model, start, training, rounds.

    It weights sites as ``other`` does and takes as many steps in a mean round, those of all phases together, as whole
    steps allow, so it is on equal terms on the second axis of a comparison. ``folder``: that of ``other``, for what to
    type. Raises ValueError where ``other`` takes no steps, and for a method of several phases, of which nobody can say
    how it would share the steps.
    """
    method, instead = experiment.method, on_records_of(experiment.name, other, folder)
    require(
        other.takes_steps,
        f"--like: {other.name} takes no optimiser step, and on its terms {experiment.name} would take none and learn "
        f"nothing; give it steps of its own: {instead}",
    )
    wanted = terms(other).total
    phases, rounds = ", ".join(method.phases(0)), other.rounds.rounds
    require(
        len(method.phases(0)) == 1,
        f"--like: nobody can say how {experiment.name} would share {wanted:g} step{'s' * (wanted != 1)} a round "
        f"between its phases {phases}; set them: {instead} --set rounds.rounds={rounds}{_shared_steps(method, wanted)}",
    )
    warm_ups = 1 / other.rounds.rounds if other.training.optimizer_state == "keep" else 1  # in a round
    own = min(range(math.ceil(wanted) + 1), key=lambda own: abs(own + warm_ups * other.training.made_up(own) - wanted))
    method = replace(method, local_steps=own, weighting=other.method.weighting)
    return replace(other, name=experiment.name, method=method, extra=experiment.extra)


def _shared_steps(method: Method, wanted: float) -> str:
    """The settings by which a method shares so many steps as its preset does, at least one for each of its phases."""
    own = {field.name: getattr(method, field.name) for field in fields(method) if field.name.endswith("_steps")}
    share = wanted / max(1, sum(method.steps(phase) for phase in method.phases(0)))
    return "".join(f" --set method.{name}={max(1, round(share * count))}" for name, count in own.items() if count)


def on_records_of(preset: str, other: Experiment, folder: Path) -> str:
    """The command of a preset on the records of the run in ``folder``, partitioned as there, with its model and seed.

    What ``other`` has as its own preset has it is left out; of a preset that is not known here, the seed alone is not.
    """
    words = ["fedvlp", "simulate", preset, "--data", f"run:{seen_from_here(folder)}"]
    try:
        own = fitted(replace(presets.get(other.name), data=other.data)).pinned()
    except ValueError:
        return shlex.join([*words, "--seed", str(other.rounds.seed)])
    if other.rounds.seed != own.rounds.seed:
        words += ["--set", f"rounds.seed={other.rounds.seed}"]
    if type(own.model) is type(other.model):
        for field in fields(own.model):
            value = getattr(other.model, field.name)
            if value != getattr(own.model, field.name):
                words += ["--set", f"model.{field.name}={value if isinstance(value, str) else json.dumps(value)}"]
    return shlex.join(words)


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
