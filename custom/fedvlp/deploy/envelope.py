"""Site-side limits on jobs: which experiments, on how many records, with how much of the machine.

The numbers stand under "envelope" in the site's own ``local/fedvlp.json``. The executor keeps to them, and the site's
outgoing filters check once more what the executor counted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Generator, Tensor

from fedvlp.core.site_error import SiteError
from fedvlp.core.types import Batch, Update
from fedvlp.core.validate import BOUNDS, LARGEST, MOST_SITES, require
from fedvlp.deploy.machine import memory_gb
from fedvlp.deploy.named_data import NamedData
from fedvlp.evaluation import metric_names
from fedvlp.run import dry_run, presets
from fedvlp.run.config import fingerprint, refuse_misfit, to_config
from fedvlp.run.experiment import Experiment
from fedvlp.run.fitting import for_sites, undealt

if TYPE_CHECKING:
    from fedvlp.core.client import Client
    from fedvlp.evaluation.intervals import Interval
    from fedvlp.federation.site import Evaluate

FIGURES = ("loss", "probe", "val", "test")
"""What a metric's name begins with where it is computed from records."""


HELD_OUT = ("val", "test")
EVALUATIONS = ("retrieval", "classification")

EVENNESS = 0.85
"""Where records weigh so evenly in an update (``effective``, as a share of them), it counts as resting on all.

Measured on the presets: 0.86 to 0.97. Two records of 80, or 34 of 280, are all that is left of a huge learning rate.
"""


class EnvelopeError(SiteError, ValueError):
    """The job, or what it would send, is outside of what this site lets jobs do. Holds numbers and settings' names."""


@dataclass(frozen=True)
class Behind:
    """How many distinct records an update rests on, and each kind of figure that leaves with it."""

    update: int = 0  # in effect: records of steps whose gradients hardly move the model hardly count
    figures: Mapping[str, int] = field(default_factory=dict)  # by what the metric's name begins with
    classes: Mapping[str, int] = field(default_factory=dict)  # "<split>/<finding>": with it or without it, the fewer
    data: str = ""  # name of the data set


@dataclass(frozen=True)
class Envelope:
    """The site's limits. Any experiment may run where neither ``presets`` nor ``accepted`` names one."""

    presets: tuple[str, ...] = ()  # whose settings may run, on their own data or on a data set of the site
    accepted: tuple[str, ...] = ()  # fingerprints of experiments, as `fedvlp site accept` writes them
    least_records: int = 64  # distinct training records behind an update
    least_per_figure: int = 20  # distinct records behind a loss, a recall or another figure
    least_per_class: int = 10  # records with a finding, and without it, behind a figure of that finding
    evaluate: tuple[str, ...] = ("*/val/*", "*/test/*")  # "<data set>/<split>/<evaluation>" that may be measured
    processes: int = 8  # that train together
    threads: int = 16  # of each of them
    hours: float = 24.0  # that one task may take
    most_membership: float = 100.0  # AUC in percent, 50 to 100 (evaluation/audit/one_update.py); 100: not measured
    least_quorum: int = 0  # sites whose updates a round of a job must need; 0: any number
    memory_gb: float = 0.0  # that training may need, as estimated (run/dry_run.py); 0: what the machine has
    image_size: int = 1024  # side of the largest images that a job may have decoded, pixels
    cache_gb: float = 500.0  # of decoded images, in all; beyond it those that were used least recently go

    def __post_init__(self) -> None:
        for name in ("presets", "accepted", "evaluate"):
            texts = getattr(self, name)
            good = isinstance(texts, tuple) and all(isinstance(text, str) for text in texts)
            require(good, f"envelope.{name} is no list of texts")
        unknown = sorted(set(self.presets) - set(presets.PRESETS))
        require(not unknown, f"envelope.presets names {', '.join(unknown)}; there are: {', '.join(presets.PRESETS)}")
        for pattern in self.evaluate:
            _, split, evaluation = _parts(pattern)
            require(
                split in ("*", *HELD_OUT) and evaluation in ("*", *EVALUATIONS),
                f'envelope.evaluate has {pattern!r}; write "<data set>/<split>/<evaluation>" with a split of '
                f"{', '.join(HELD_OUT)} and an evaluation of {', '.join(EVALUATIONS)}, or * for any",
            )
        for name in ("least_records", "least_per_figure", "least_per_class"):
            value = getattr(self, name)
            require(value >= 2, f"envelope.{name} is {value}; a figure of one record is that record's")
        for name in ("processes", "threads", "hours"):
            require(getattr(self, name) > 0, f"envelope.{name} is {getattr(self, name)}; it must be positive")
        most = self.most_membership
        require(50 <= most <= 100, f"envelope.most_membership is {most}; it is an AUC in percent, 50 (chance) to 100")
        require(self.memory_gb >= 0, f"envelope.memory_gb is {self.memory_gb}; 0 = what the machine has")
        require(self.image_size >= 1, f"envelope.image_size is {self.image_size}; at least 1")
        require(self.cache_gb > 0, f"envelope.cache_gb is {self.cache_gb}; it must be positive")
        require(self.least_quorum >= 0, f"envelope.least_quorum is {self.least_quorum}; 0 = any number of sites")

    def admit(self, experiment: Experiment) -> None:
        """Raises EnvelopeError unless a job with this experiment may run here.

        A method that sends something of single records (``Method.discloses``) runs only where this very experiment was
        accepted: ``least_records`` counts rows, and such an update has as many as the job wants, each of one record.
        """
        _refuse_extremes(experiment, BOUNDS | {"image_size": self.image_size})
        mark = fingerprint(experiment)
        self._refuse_unlisted(experiment, mark)
        self._refuse_disclosing(experiment, mark)
        self._refuse_few_sites(experiment)
        self._refuse_threads(experiment)

    def _refuse_unlisted(self, experiment: Experiment, mark: str) -> None:
        if self.presets or self.accepted:
            usual = (
                replace(experiment, rounds=replace(experiment.rounds, quorum=0)) if self.least_quorum else experiment
            )
            named = any(_is_preset(usual, name) for name in self.presets) or mark in self.accepted
            if not named:
                raise EnvelopeError(
                    public=(
                        "experiment {mark} is not on this site's accept list; its engineer reads the job and runs "
                        "`fedvlp site accept`"
                    ),
                    mark=mark,
                )

    def _refuse_disclosing(self, experiment: Experiment, mark: str) -> None:
        shown = experiment.method.discloses()
        if shown and mark not in self.accepted:
            raise EnvelopeError(
                f"the method of experiment {mark} sends something of single records beside weights, and this site's "
                f"engineer has not accepted it with `fedvlp site accept`: {shown}",
                public=(
                    "the method of experiment {mark} sends something of single records beside weights, and this "
                    "site's engineer has not accepted it with `fedvlp site accept`; choose settings that send "
                    "none"
                ),
                mark=mark,
            )

    def _refuse_few_sites(self, experiment: Experiment) -> None:
        quorum = experiment.rounds.quorum
        if quorum < self.least_quorum:
            raise EnvelopeError(
                public=(
                    "rounds.quorum is {quorum}; this site takes part only where a round needs the updates of at "
                    "least {least_quorum} sites, by number"
                ),
                quorum=quorum,
                least_quorum=self.least_quorum,
            )

    def _refuse_threads(self, experiment: Experiment) -> None:
        for training in (experiment.training, experiment.server_training):
            if training is not None and training.threads > self.threads:
                raise EnvelopeError(
                    public="training.threads is {threads}; this site lets a job have at most {most}",
                    threads=training.threads,
                    most=self.threads,
                )

    def refuse_large(self, experiment: Experiment, site: str, processes: int = 1) -> None:
        """Raises EnvelopeError for a job whose training would need more memory than this site gives one.

        Nothing of the job is built before. Its towers are those of the site (``with_own_towers``).
        """
        device = experiment.training.torch_device()
        most, needed = self.memory_gb or memory_gb(device), dry_run.bytes_needed(experiment, site, processes) / 1e9
        if needed > most:
            raise EnvelopeError(
                f"training needs an estimated {needed:.1f} GB of memory in each process; this site has, or gives a "
                f"job, {most:.1f} GB: a smaller model, batch_size or image_size, or micro_batch",
                public=(
                    "training needs more memory than this site has, or gives a job: a smaller model, batch_size "
                    "or image_size, or micro_batch"
                ),
            )

    def in_time(self, should_stop: Callable[[], bool]) -> Callable[[], bool]:
        """``should_stop`` for a task that begins now; raises EnvelopeError when it has taken too long."""
        until = time.monotonic() + self.hours * 3600

        def stop() -> bool:
            if time.monotonic() > until:
                raise EnvelopeError(
                    public="the task took longer than the {hours:g} hours that this site gives one", hours=self.hours
                )
            return should_stop()

        return stop

    def passed(self, update: Update, behind: Behind) -> Update:
        """The update without the figures that rest on too few records. Raises EnvelopeError where the update does.

        The method's scalars are figures of the probe: they become nan, as where a site cannot know them.
        """
        if (update.state or update.aux) and behind.update < self.least_records:
            raise EnvelopeError(
                public=(
                    "the effective sample size of the update is {update} records; this site sends none of fewer than "
                    "{least_records}: more local steps, larger batches, a smaller learning rate, or more data"
                ),
                update=behind.update,
                least_records=self.least_records,
            )
        few = {kind for kind in FIGURES if behind.figures.get(kind, 0) < self.least_per_figure}
        metrics = {name: value for name, value in update.metrics.items() if name.partition("/")[0] not in few}
        metrics = {name: value for name, value in metrics.items() if self.allows(behind.data, name)}
        metrics = self._without_small_classes(metrics, behind.classes)
        scalars = dict.fromkeys(update.scalars, math.nan) if "probe" in few else update.scalars  # nan: unknown here
        return replace(update, metrics=metrics, scalars=scalars)

    def refuse_telling(self, area: Interval) -> None:
        """Raises EnvelopeError where even the low end of an update's membership-inference AUC is above the limit."""
        if not area.low <= self.most_membership:  # nor where it is nan
            raise EnvelopeError(
                f"the membership-inference AUC of this update is {area.value:.1f} % ({area.low:.1f} % at least); the "
                f"limit of this site is {self.most_membership:g} %: fewer local steps, larger batches, or "
                "training.dp_noise",
                public=(
                    "the membership-inference AUC of this update is above this site's limit of {most_membership:g} %: "
                    "fewer local steps, larger batches, or training.dp_noise"
                ),
                most_membership=self.most_membership,
            )

    def allows(self, data: str, name: str) -> bool:
        """Whether the figure ``name`` of held-out records of a data set may be measured; any figure of no such ones."""
        split = name.partition("/")[0]
        return split not in HELD_OUT or self._may_measure(data, split, metric_names.evaluation_of(name))

    def _may_measure(self, data: str, split: str, evaluation: str = "") -> bool:
        """``evaluation`` "": any."""
        return any(
            known_data in ("*", data) and known_split in ("*", split) and (not evaluation or known in ("*", evaluation))
            for known_data, known_split, known in map(_parts, self.evaluate)
        )

    def only_allowed(self, evaluate: Evaluate | None, data: str) -> Evaluate | None:
        """``evaluate`` of a site, which measures only what may be measured of a data set."""
        if evaluate is None:
            return None

        def measured(client: Client, splits: tuple[str, ...]) -> dict[str, float]:
            allowed = tuple(split for split in splits if self._may_measure(data, split))
            return {name: value for name, value in evaluate(client, allowed).items() if self.allows(data, name)}

        return measured

    def _without_small_classes(self, metrics: dict[str, float], classes: Mapping[str, int]) -> dict[str, float]:
        """The figures without those of a finding that few records have, or lack.

        A mean over findings goes with the first of them: from it and the others the one that is missing would follow.
        """
        areas = {name: parsed for name in metrics if (parsed := metric_names.parse_auc(name))}
        small = {
            (split, finding)
            for split, finding in areas.values()
            if not metric_names.is_mean(finding) and classes.get(f"{split}/{finding}", 0) < self.least_per_class
        }
        splits = {split for split, _ in small}
        held = {
            name
            for name, (split, finding) in areas.items()
            if (split, finding) in small or (metric_names.is_mean(finding) and split in splits)
        }
        return {name: value for name, value in metrics.items() if name not in held}

    def in_words(self) -> str:
        """For the engineer who looks at the site's rules."""
        named = [f"preset {name}" for name in self.presets] + [f"experiment {mark}" for mark in self.accepted]
        return (
            f"jobs may run {', '.join(named) or 'any experiment'}; an update rests on at least {self.least_records} "
            f"distinct records, a figure on {self.least_per_figure}, one of a finding on {self.least_per_class} with "
            f"it and as many without; measured may be {', and '.join(map(_measured, self.evaluate)) or 'nothing'}; "
            f"at most {self.processes} processes of {self.threads} threads, {self.hours:g} hours a task"
            + (f"; membership of an update up to {self.most_membership:g} %" if self.most_membership < 100 else "")
            + (f"; a round needs the updates of {self.least_quorum} sites" if self.least_quorum else "")
            + f"; {f'{self.memory_gb:g} GB of memory' if self.memory_gb else 'the memory of this machine'}, images of "
            f"{self.image_size} pixels, {self.cache_gb:g} GB of them decoded"
        )


def _parts(pattern: str) -> tuple[str, str, str]:
    """Data set, split and evaluation of an entry of ``evaluate``; what is missing is empty."""
    data, _, rest = pattern.partition("/")
    split, _, evaluation = rest.partition("/")
    return data, split, evaluation


def _measured(pattern: str) -> str:
    """An entry of ``evaluate`` in words."""
    data, split, evaluation = _parts(pattern)
    what = "anything" if evaluation == "*" else evaluation
    records = "held-out" if split == "*" else split
    return f"{what} on the {records} records of {'any data set' if data == '*' else data}"


def _is_preset(experiment: Experiment, name: str) -> bool:
    """Whether it is the preset, on its own data or on a data set of the site.

    Also as an encrypted job has it, without limits of the server's.
    """
    usual = presets.get(name)
    if not _are_data_of(experiment, usual.data):
        return False
    if isinstance(experiment.data, NamedData):
        told_apart = min(getattr(experiment.extra, "sites", 0), MOST_SITES)  # a larger selector is not the preset's
        sites = [site for site, _ in experiment.site_models] or [""] * told_apart
        usual = for_sites(replace(usual, partition=undealt(usual.partition)), sites)
    preset = replace(usual, data=experiment.data)
    return experiment in (preset, replace(preset, rounds=preset.rounds.of_encrypted()))


def _are_data_of(experiment: Experiment, usual: Any) -> bool:
    """Whether the data are a preset's, or of fewer studies, or a site's data set with images as large as theirs."""
    data: Any = experiment.data
    most = getattr(usual, "image_size", 0)
    if isinstance(data, NamedData):
        return experiment.model.image_size <= data.image_size <= most
    if type(data) is not type(usual) or not hasattr(usual, "size"):
        return data == usual
    return replace(data, size=usual.size) == usual and data.size <= usual.size


def _refuse_extremes(settings: Any, bounds: Mapping[str, int], name: str = "") -> None:
    """Raises EnvelopeError for a setting of another type than its field's, or for a number that no honest job has.

    FLARE builds a job's classes from whatever values the job gives.
    """
    for field_ in fields(settings):
        value, called = getattr(settings, field_.name), f"{name}{field_.name}"
        try:
            refuse_misfit(type(settings), field_.name, value)
        except ValueError:
            raise EnvelopeError(
                f"{called} is a {type(value).__name__}, which the setting does not take",
                public="a setting of the job has a value of a type that it does not take",
            ) from None
        _refuse_extreme(value, bounds, called)


def _refuse_extreme(value: Any, bounds: Mapping[str, int], called: str) -> None:
    if is_dataclass(value):
        _refuse_extremes(value, bounds, f"{called}.")
    elif isinstance(value, tuple):
        for item in value:
            _refuse_extreme(item, bounds, called)
    elif isinstance(value, (int, float)):
        most = bounds.get(called.rpartition(".")[2], LARGEST)
        if not abs(value) <= most:
            raise EnvelopeError(
                f"{called} is beyond {most}; this site runs no job with such a number",
                public="a setting of the job is beyond {most}; this site runs no job with such a number",
                most=most,
            )


def differences(experiment: Experiment) -> list[str]:
    """What an engineer looks at before accepting it: each setting in which it is not the preset of its name.

    Every setting where no preset has that name.
    """
    usual = presets.PRESETS.get(experiment.name)
    known = _settings(to_config(usual)) if usual else {}
    said = []
    for name, value in _settings(to_config(experiment)).items():
        if name not in known:
            said += [f"{name} = {value}"] if value != "" or not usual else []
        elif known[name] != value:
            said.append(f"{name} = {value} (preset {experiment.name}: {known[name]})")
    return said


def _settings(config: Any, name: str = "") -> dict[str, Any]:
    """Every value of a configuration by its dotted name, classes included."""
    if not (isinstance(config, dict) and "path" in config):
        return {name: config}
    settings = {name: config["path"]} if name else {}
    for key, value in config["args"].items():
        settings |= _settings(value, f"{name}.{key}" if name else key)
    return settings


class Watched:
    """The data of a site during one task, which remember the records that they have served.

    A method trains on ``train_batches``; what it reads of the training split otherwise is measured (its probe), unless
    it trains on that alone (a selector's gradient, say). ``targets`` makes an objective's targets [B, L] in
    {1, 0, nan} of the labels [B, L] of a batch; None: the labels as they are.
    """

    def __init__(self, data: Any, targets: Callable[[Tensor], Tensor] | None = None) -> None:
        self.unwatched = data
        self._targets = targets or (lambda labels: labels)
        self._trained: list[Tensor] = []  # rows of every batch, wherever they are: to look at them, a GPU is waited for
        self._lengths: list[Tensor] = []  # of the gradient of every step
        self._groups: list[Tensor] | None = None  # rows behind each of these lengths, where the training tells them
        self._readings: list[tuple[str, list[Tensor]]] = []  # split and rows, of every time that it was read
        self._classes: list[tuple[str, list[Tensor]]] = []  # split and targets [B, L], of every time

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unwatched, name)

    def train_batches(self, steps: int, batch_size: int, generator: Generator) -> Iterator[Batch]:
        return _noting(self.unwatched.train_batches(steps, batch_size, generator), self._trained)

    def weigh(self, lengths: list[Tensor], rows: list[Tensor] | None = None) -> None:
        """Notes how long the gradient of every step of the task's training was, in their order.

        With ``rows``: how long that of every group of records was, and which records. So it is under record-level
        noise, where batches are read and not drawn for training, and a step's whole gradient is mostly noise.
        """
        self._lengths += lengths
        if rows is not None:
            self._groups = [*(self._groups or []), *rows]

    def batches(self, split: str, batch_size: int, **options: Any) -> Iterator[Batch]:
        reading: list[Tensor] = []
        self._readings.append((split, reading))
        targets: list[Tensor] = []
        self._classes.append((split, targets))
        return self._with_targets(_noting(self.unwatched.batches(split, batch_size, **options), reading), targets)

    def _with_targets(self, batches: Iterator[Batch], into: list[Tensor]) -> Iterator[Batch]:
        for batch in batches:
            if "labels" in batch:
                into.append(self._targets(batch["labels"]))
            yield batch

    @property
    def trained(self) -> frozenset[int]:
        """Positions, in the training split, of the records that were trained on; all that were read, as ``behind``."""
        read = [batch for split, rows in self._readings if split == "train" for batch in rows]
        return frozenset(_distinct(self._trained) or _distinct(read))

    def behind(self, data: str = "") -> Behind:
        """What has been served; for a kind of figure, the fewest of one reading. ``data``: name of the data set."""

        def fewest(split: str, otherwise: int) -> int:
            read = (len(_distinct(rows)) for name, rows in self._readings if name == split)
            return min((count for count in read if count), default=otherwise)

        trained = len(self.trained)
        rows = self._trained if self._groups is None else self._groups
        # In steps with other records too (a public set's), all count.
        told_apart = self._groups is not None or (rows and len(rows) == len(self._lengths))
        in_effect = round(effective(rows, self._lengths) / EVENNESS) if told_apart else trained
        num_train = int(self.unwatched.num_train)  # a figure without a reading is of what the site remembers of all
        probe = fewest("train", num_train)
        figures = {"loss": trained, "probe": probe, "val": fewest("val", 0), "test": fewest("test", 0)}
        return Behind(min(trained, in_effect), figures, self._fewer_class(), data)

    def _fewer_class(self) -> dict[str, int]:
        """ "<split>/<finding>" -> records of a reading that have the finding or that lack it, whichever are fewer."""
        fewest: dict[str, int] = {}
        for split, batches in self._classes:
            if split not in HELD_OUT or not batches:
                continue
            targets = torch.cat(batches).cpu()  # [n, L]
            counts = torch.minimum((targets == 1).sum(0), (targets == 0).sum(0)).tolist()
            for finding, count in zip(self.unwatched.label_names, counts, strict=True):
                name = f"{split}/{finding}"
                fewest[name] = min(count, fewest.get(name, count))
        return fewest


def effective(rows: list[Tensor], lengths: list[Tensor]) -> float:
    """The effective sample size of an update, of the ``rows`` of every batch and the ``lengths`` of its gradient.

    A record weighs the sum of its shares in the gradients; the number is (sum w)^2 / sum w^2 (Kish, 1965, Survey
    Sampling, section 11.7). With even steps these are all records that were drawn. Where a huge learning rate has left
    nothing to learn after the first batch, it is the size of that batch.
    """
    weights: dict[int, float] = {}
    for batch, length in zip(rows, [float(one) for one in lengths], strict=True):
        for row in batch.tolist():
            weights[row] = weights.get(row, 0.0) + length / len(batch)
    squares = sum(weight * weight for weight in weights.values())
    return sum(weights.values()) ** 2 / squares if squares else len(weights)


def _noting(batches: Iterator[Batch], into: list[Tensor]) -> Iterator[Batch]:
    for batch in batches:
        into.append(batch["row"])
        yield batch


def _distinct(rows: list[Tensor]) -> set[int]:
    return {row for batch in rows for row in batch.tolist()}
