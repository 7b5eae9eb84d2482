"""What a site lets jobs do, whatever they say: which experiments, on how many records, with how much of the machine.

The numbers stand under "envelope" in the site's own ``local/fedvlp.json``. The executor keeps to them, and the site's
outgoing filters check once more what the executor counted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

from torch import Generator

from fedvlp.core.types import Batch, Update
from fedvlp.core.validate import require
from fedvlp.run import presets
from fedvlp.run.config import fingerprint, refuse_misfit, to_config
from fedvlp.run.experiment import Experiment, Source

FIGURES = ("loss", "probe", "val", "test")
"""What a metric's name begins with where it is computed from records."""


LARGEST = 10**9
"""No setting of an honest job is a larger number, but for a seed: a size beyond it would fill the machine."""


MOST_SEED = 2**63


class EnvelopeError(ValueError):
    """The job, or what it would send, is outside of what this site lets jobs do. Holds numbers and settings' names."""


@dataclass(frozen=True)
class Behind:
    """How many distinct records an update rests on, and each kind of figure that leaves with it."""

    update: int = 0
    figures: Mapping[str, int] = field(default_factory=dict)  # by what the metric's name begins with


@dataclass(frozen=True)
class Envelope:
    """The site's limits. Any experiment may run where neither ``presets`` nor ``accepted`` names one."""

    presets: tuple[str, ...] = ()  # whose settings may run, on their own data or on a data set of the site
    accepted: tuple[str, ...] = ()  # fingerprints of experiments, as `fedvlp site accept` writes them
    least_records: int = 64  # distinct training records behind an update
    least_per_figure: int = 20  # distinct records behind a loss, a recall or another figure
    processes: int = 8  # that train together
    threads: int = 16  # of each of them
    hours: float = 24.0  # that one task may take

    def __post_init__(self) -> None:
        for name in ("presets", "accepted"):
            texts = getattr(self, name)
            good = isinstance(texts, tuple) and all(isinstance(text, str) for text in texts)
            require(good, f"envelope.{name} is no list of texts")
        unknown = sorted(set(self.presets) - set(presets.PRESETS))
        require(not unknown, f"envelope.presets names {', '.join(unknown)}; there are: {', '.join(presets.PRESETS)}")
        for name in ("least_records", "least_per_figure"):
            value = getattr(self, name)
            require(value >= 2, f"envelope.{name} is {value}; a figure of one record is that record's")
        for name in ("processes", "threads", "hours"):
            require(getattr(self, name) > 0, f"envelope.{name} is {getattr(self, name)}; it must be positive")

    def admit(self, experiment: Experiment) -> None:
        """Raises EnvelopeError unless a job with this experiment may run here."""
        _refuse_extremes(experiment)
        if self.presets or self.accepted:
            named = (
                any(_is_preset(experiment, name) for name in self.presets) or fingerprint(experiment) in self.accepted
            )
            if not named:
                raise EnvelopeError(
                    f"the experiment {fingerprint(experiment)} is none that this site accepted; its engineer reads the "
                    "job and runs `fedvlp site accept`"
                )
        for training in (experiment.training, experiment.server_training):
            if training is not None and training.threads > self.threads:
                raise EnvelopeError(
                    f"training.threads is {training.threads}; this site lets a job have at most {self.threads}"
                )

    def in_time(self, should_stop: Callable[[], bool]) -> Callable[[], bool]:
        """``should_stop`` for a task that begins now; raises EnvelopeError when it has taken too long."""
        until = time.monotonic() + self.hours * 3600

        def stop() -> bool:
            if time.monotonic() > until:
                raise EnvelopeError(f"the task took longer than the {self.hours:g} hours that this site gives one")
            return should_stop()

        return stop

    def passed(self, update: Update, behind: Behind) -> Update:
        """The update without the figures that rest on too few records. Raises EnvelopeError where the update does.

        The method's scalars are figures of the probe: they become nan, as where a site cannot know them.
        """
        if (update.state or update.aux) and behind.update < self.least_records:
            raise EnvelopeError(
                f"the update rests on {behind.update} distinct records; this site sends none of fewer than "
                f"{self.least_records}: more local steps, larger batches, or more data"
            )
        few = {kind for kind in FIGURES if behind.figures.get(kind, 0) < self.least_per_figure}
        metrics = {name: value for name, value in update.metrics.items() if name.partition("/")[0] not in few}
        scalars = dict.fromkeys(update.scalars, math.nan) if "probe" in few else update.scalars  # nan: unknown here
        return replace(update, metrics=metrics, scalars=scalars)

    def in_words(self) -> str:
        """For the engineer who looks at the site's rules."""
        named = [f"preset {name}" for name in self.presets] + [f"experiment {mark}" for mark in self.accepted]
        return (
            f"jobs may run {', '.join(named) or 'any experiment'}; an update rests on at least {self.least_records} "
            f"distinct records, a figure on {self.least_per_figure}; at most {self.processes} processes of "
            f"{self.threads} threads, {self.hours:g} hours a task"
        )


def _is_preset(experiment: Experiment, name: str) -> bool:
    """Whether it is the preset, on its own data or on a data set of the site.

    Also as an encrypted job has it, without limits of the server's.
    """
    usual = presets.get(name)
    if not _are_data_of(experiment, usual.data):
        return False
    preset = replace(usual, data=experiment.data)
    return experiment in (preset, replace(preset, rounds=preset.rounds.of_encrypted()))


def _are_data_of(experiment: Experiment, usual: Source) -> bool:
    """Whether the data are a preset's, or of fewer studies, or a data set of the site with films as large as theirs."""
    from fedvlp.deploy.site_config import NamedData

    data: Any = experiment.data
    most = getattr(usual, "image_size", 0)
    if isinstance(data, NamedData):
        return experiment.model.image_size <= data.image_size <= most
    if type(data) is not type(usual) or not hasattr(usual, "size"):
        return data == usual
    return replace(data, size=usual.size) == usual and data.size <= usual.size


def _refuse_extremes(settings: Any, name: str = "") -> None:
    """Raises EnvelopeError for a setting of another type than its field's, or for a number that no honest job has.

    FLARE builds a job's classes from whatever values the job gives.
    """
    for field_ in fields(settings):
        value, called = getattr(settings, field_.name), f"{name}{field_.name}"
        try:
            refuse_misfit(type(settings), field_.name, value)
        except ValueError:
            raise EnvelopeError(f"{called} is a {type(value).__name__}, which the setting does not take") from None
        _refuse_extreme(value, called)


def _refuse_extreme(value: Any, called: str) -> None:
    if is_dataclass(value):
        _refuse_extremes(value, f"{called}.")
    elif isinstance(value, tuple):
        for part in value:
            _refuse_extreme(part, called)
    elif isinstance(value, (int, float)):
        most = MOST_SEED if called.endswith("seed") else LARGEST
        if not abs(value) <= most:
            raise EnvelopeError(f"{called} is beyond {most}; this site runs no job with such a number")


def differences(experiment: Experiment) -> list[str]:
    """What an engineer looks at before accepting it: each setting in which it is not the preset of its name.

    Every setting where no preset has that name.
    """
    usual = presets.PRESETS.get(experiment.name)
    known = _settings(to_config(usual)) if usual else {}
    said = []
    for name, value in _settings(to_config(experiment)).items():
        if name not in known:
            said.append(f"{name} = {value}")
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
    it trains on that alone (a selector's gradient, say).
    """

    def __init__(self, data: Any) -> None:
        self.unwatched = data
        self._trained: set[int] = set()
        self._readings: list[tuple[str, set[int]]] = []  # split and records, of every time that it was read

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unwatched, name)

    def train_batches(self, steps: int, batch_size: int, generator: Generator) -> Iterator[Batch]:
        return _noting(self.unwatched.train_batches(steps, batch_size, generator), self._trained)

    def batches(self, split: str, batch_size: int, **options: Any) -> Iterator[Batch]:
        reading: set[int] = set()
        self._readings.append((split, reading))
        return _noting(self.unwatched.batches(split, batch_size, **options), reading)

    def behind(self) -> Behind:
        """What has been served; for a kind of figure, the fewest of one reading."""

        def fewest(split: str, otherwise: int) -> int:
            return min((len(rows) for name, rows in self._readings if name == split and rows), default=otherwise)

        read = set().union(*(rows for split, rows in self._readings if split == "train"))
        trained = len(self._trained or read)
        num_train = int(self.unwatched.num_train)  # a figure without a reading is of what the site remembers of all
        probe = fewest("train", num_train)
        return Behind(trained, {"loss": trained, "probe": probe, "val": fewest("val", 0), "test": fewest("test", 0)})


def _noting(batches: Iterator[Batch], into: set[int]) -> Iterator[Batch]:
    for batch in batches:
        into.update(batch["row"].tolist())
        yield batch
