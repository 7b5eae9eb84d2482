"""What a run on own records is held against: chance, its start, the source oracle, the untouched tower, other runs.

A recall of 9 % says nothing by itself. Beside what costs no training it says whether the run was worth its afternoon.
As the recalls (run/recalls.py), all this is measured where the records are, and the files hold figures alone.
"""

from __future__ import annotations

import csv
import logging
import math
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedvlp.core.checkpoint import CheckpointError, save_text
from fedvlp.core.json_file import UNREADABLE, read_json
from fedvlp.core.names import name_of
from fedvlp.core.types import IMAGE_TOKENS, Batch, State
from fedvlp.core.validate import require
from fedvlp.data.cohort import SPLITS
from fedvlp.data.deid import PHIError
from fedvlp.evaluation import metric_names as names
from fedvlp.evaluation.downstream import Records, Subset, records
from fedvlp.evaluation.intervals import Figure, Interval, bootstrap, difference, macro
from fedvlp.evaluation.linear_probe import LBFGS, LinearProbe, Sample, Task, areas_of, fit, task_of
from fedvlp.evaluation.output import write_csv
from fedvlp.evaluation.zero_shot import ZeroShot
from fedvlp.methods import Centralized, Local
from fedvlp.models.multimodal import MultimodalConfig
from fedvlp.run import measurements, presets, recalls, zero_shot_areas
from fedvlp.run.assembly import Assembly
from fedvlp.run.compare import BATCH, INITIAL, FinishedRun
from fedvlp.run.evaluate import paired_sites
from fedvlp.run.folder import RunFolder, seen_from_here
from fedvlp.run.model_card import RESULTS_END, with_block
from fedvlp.run.model_use import told_apart
from fedvlp.run.recalls import GAIN, SITE, TOGETHER, TRAINED, Recall, is_built_in
from fedvlp.run.simulate import PARTITION, noted_partition
from fedvlp.run.terms import on_records_of
from fedvlp.training.settings import DeviceError

log = logging.getLogger(__name__)

AT_ONCE = 5.0  # seconds that a person waits without a word
LEAST = 5  # training images of a class, and as many without it, from which a head is fitted
OWN = 5_000  # records of one's own: images of more take long to decode again
PROBE = LinearProbe(fractions=(1.0,), solver=LBFGS, seeds=(0,))
STEPS = 100  # of the probe's solver: thousands of dimensions and many classes take minutes to the last digit
FEW = Subset(shots=20)
DRAWS = 5  # of the images that heads of few are learned from
TOWER, R1 = "tower", "R@1"
COLUMNS = ("vectors", "films", "area", "low", "high")
START = "what it started from"
TOWER_ALONE, ORACLE, CHANCE = "the untouched image tower", "knowing the site alone (source oracle)", "chance"
ALONE, POOLED = "each site alone", "all records in one place"
BASELINES = {name_of(Local): ALONE, name_of(Centralized): POOLED}
"""What other runs on the same records are held against, by the path of their method in config.json."""


@dataclass(frozen=True)
class Beside:
    """A figure of the trained model, and the same of something else."""

    what: str  # the figure
    trained: Interval
    other: str  # whose the other figure is
    value: float
    side: int  # 1 or -1: the trained model's is above or below by more than other test patients would explain
    digits: int = 1

    @property
    def of_run(self) -> str:
        """The trained model's figure with its interval."""
        return self.trained.unsigned(self.digits)

    @property
    def of_other(self) -> str:
        """The other figure."""
        return f"{self.value:.{self.digits}f}"

    def __str__(self) -> str:
        return f"{self.what} {self.of_run} against {self.of_other}"


Say = Callable[[str], None]
"""Tells a person what is done now, and that it is done."""


# Measuring
def measure(folder: RunFolder, say: Say = log.info) -> None:
    """Recalls, zero-shot AUCs and the untouched tower of a finished run. Raises ValueError as ``recalls.measure``."""
    with timed(say, "reading the records again"):
        run = FinishedRun(folder, folder.experiment().name)
    with timed(say, "measuring recall on the test records"):
        recalls.measure(folder, run)
    with timed(say, "measuring zero-shot AUC of the labels"):
        zero_shot_areas.measure(folder, run)
    with timed(say, "fitting linear probes of the labels"):
        measure_tower(folder, run, say)
    _write_to_card(folder)


@contextmanager
def timed(say: Say, what: str) -> Iterator[None]:
    """Tell what begins and, unless it was over at once, when it has ended."""
    say(f"{what} ...")
    began = time.monotonic()
    yield
    if (spent := time.monotonic() - began) >= AT_ONCE:
        say(f"{what}: done in {spent:.0f} s")


@torch.no_grad()
def seconds(assembly: Assembly) -> float:
    """Estimate how long ``measure`` takes after a run, by one batch and one head that are timed; 0 where nobody asks.

    Raises ValueError where no site has test pairs.
    """
    experiment, cohort = assembly.experiment, assembly.cohort
    most = recalls.UNASKED if is_built_in(experiment) else OWN
    if isinstance(experiment.model, MultimodalConfig) or len(cohort) > most:
        return 0.0
    data = paired_sites(assembly)
    site, of_site = next(iter(data.items()))
    client = assembly.client(site, of_site)
    batch = next(iter(of_site.batches("test", BATCH, drop_last=False)))
    began = time.perf_counter()
    vectors = client.model.eval()(batch).image
    each = (time.perf_counter() - began) / len(vectors)
    models, tests = 1 + experiment.takes_steps, sum(len(cohort.rows("test", site)) for site in data)
    sentences = len(told_apart(experiment.data, cohort.label_names)) * ZeroShot.prompts * len(ZeroShot.seeds)
    spent = each * (2 * models * tests + 2 * sentences)  # recall and zero-shot; the initial model is embedded there
    try:
        task = task_of(cohort, PROBE)
        chosen = records(cohort, task.labelled)
        task, _ = frequent(task, chosen)
    except ValueError:  # no labels, or too few of them
        return spent
    train = Sample(torch.randn(len(chosen.train), vectors.shape[1]), task.targets[chosen.train])
    began = time.perf_counter()
    with torch.enable_grad():
        fit(task, PROBE, train, train, 0, STEPS)
    return spent + 2 * each * len(cohort) + 2 * (1 + DRAWS) * (time.perf_counter() - began)


def _write_to_card(folder: RunFolder) -> None:
    """Puts what was measured of the run, and what it is held against, into its model card, as the report has it now."""
    card = folder.model.parent / "README.md"
    if card.exists() and (said := _for_card(folder)):
        before = card.read_text(encoding="utf-8")
        after = with_block(before, said, "beside", RESULTS_END)
        if after != before:
            save_text(card, after)


def measure_unasked(folder: RunFolder, say: Say = log.info) -> None:
    """``measure`` for a finished run of this machine that was not yet; nothing for large ones and classifiers.

    Of a run that was measured the card is written again: sites alone, or pooled records, may have been run since.
    """
    if not _is_measured_unasked(folder):
        return
    try:
        if measurements.is_current(folder, recalls.file_of(folder)):
            _write_to_card(folder)
        else:
            measure(folder, say)
    except (ValueError, OSError, PHIError, DeviceError) as error:  # as of models that stayed at sites elsewhere
        log.warning("%s: no intervals: %s", folder.path, error)


def _is_measured_unasked(folder: RunFolder) -> bool:
    """Whether nobody need ask: a synthetic cohort of few studies, or few records with which the run began here."""
    if not folder.model.exists():
        return False
    experiment = folder.experiment()
    if isinstance(experiment.model, MultimodalConfig):
        return False
    if is_built_in(experiment):
        return int(getattr(experiment.data, "size", 0)) <= recalls.UNASKED
    return 0 < len(noted_partition(folder).get("ids", ())) <= OWN


def measure_tower(folder: RunFolder, run: FinishedRun, say: Say = log.info) -> Path | None:
    """Macro AUC of a linear probe on the model's image vectors and on its image tower as it was before the run.

    Learned from all labelled training images, and where there are more from 20 of each class, the mean of 5 draws.
    Labels that too few records have are left out and named. Written to ``evaluation/tower.csv``. None where there are
    no labels, and where sites have own models.
    """
    own, state = run.trained()
    if own or run.assembly.site_only():
        return None
    cohort = run.assembly.cohort
    try:
        task = task_of(cohort, PROBE)
        mine = torch.tensor([site in run.data for site in cohort.sites or ()])
        chosen = records(cohort, task.labelled & mine.numpy())
        task, few = frequent(task, chosen)
        if few:
            said = ", ".join(f"{name} ({count})" for name, count in few.items())
            say(f"left out, with fewer than {LEAST} training images, or no test image, that show or lack it: {said}")
        vectors = {TOWER: _tower(run, run.assembly.initial()), TRAINED: _vectors(run, state)}
        positives = task.targets[chosen.train] == 1
        draws = [chosen.train[FEW.draw(positives, seed).numpy()] for seed in range(DRAWS)]
        learned_from = {"": [chosen.train]} | ({f" {FEW}": draws} if len(draws[0]) < len(chosen.train) else {})
        areas = {
            name + how: [area for train in rows for area in _areas(task, of, train, chosen.test)]
            for name, of in vectors.items()
            for how, rows in learned_from.items()
        }
    except ValueError as error:  # no labels, or too few of them
        log.info("%s: no linear probe: %s", folder.path, error)
        return None
    if not areas[TOWER]:
        return None
    figures = {name: macro(of) for name, of in areas.items()}
    figures |= {GAIN + how: difference(figures[TRAINED + how], figures[TOWER + how]) for how in learned_from}
    patients = [cohort.patients[row] for row in chosen.test]
    intervals = {name: bootstrap(figure, patients) for name, figure in figures.items()}
    lines = [(name, len(patients), *vars(interval).values()) for name, interval in intervals.items()]
    file = write_csv(_tower_file(folder), [COLUMNS, *lines])
    measurements.note(folder, file)
    return file


def frequent(task: Task, chosen: Records, least: int = LEAST) -> tuple[Task, dict[str, int]]:
    """Leave out classes that fewer than ``least`` training records have or lack, or no test record has or lacks.

    Returns the task and, of the classes that are left out, the number of training records that have each. Raises
    ValueError where none is left.
    """
    train, test = task.targets[chosen.train], task.targets[chosen.test]
    enough = [(of == kind).sum(dim=0) >= few for of, few in ((train, least), (test, 1)) for kind in (0, 1)]
    usable = torch.stack(enough).all(dim=0)
    counts = (train == 1).sum(dim=0).tolist()
    few = {name: count for name, count, one in zip(task.names, counts, usable.tolist(), strict=True) if not one}
    if not few:
        return task, {}
    require(bool(usable.any()), f"no label has {least} training images and a test image that show it, and as many not")
    names = tuple(name for name in task.names if name not in few)
    # A record of a class that is left out has none of the others: classes become findings.
    return Task(names, task.targets[:, usable], False), few


def _areas(task: Task, vectors: Tensor, train: np.ndarray, test: np.ndarray) -> list[Figure]:
    """The AUC of each class that test rows have, by a head that was fitted to the training rows."""
    of = {split: Sample(vectors[rows], task.targets[rows]) for split, rows in (("train", train), ("test", test))}
    head = fit(task, PROBE, of["train"], of["train"], 0, STEPS)
    with torch.no_grad():
        return areas_of(task.probabilities(head(of["test"].features)), of["test"].targets)


def _tower(run: FinishedRun, state: State) -> Tensor:
    """The image tower's summary token of every row of the cohort, [N, W]; nan for rows without an image."""
    return _by_row(run, state, lambda model, films: model.encode(films).image[:, 0])


def _vectors(run: FinishedRun, state: State) -> Tensor:
    """The model's image vector of every row of the cohort, [N, D]."""
    return _by_row(run, state, lambda model, films: model(films).image)


@torch.no_grad()
def _by_row(run: FinishedRun, state: State, vectors_of: Callable[[Any, Batch], Tensor]) -> Tensor:
    """What a model makes of the image of each row of the cohort, by the data that the sites trained on."""
    cohort, by_row = run.assembly.cohort, None
    for site, data in run.data.items():
        client = run.assembly.client(site, data)
        client.load({name: state[name] for name in client.state()})
        model = client.model.eval()
        for split in SPLITS:
            rows = torch.from_numpy(cohort.rows(split, site))
            for batch in data.batches(split, BATCH, drop_last=False):
                films = {name: batch[name] for name in ("image", IMAGE_TOKENS) if name in batch}
                if not films:
                    continue
                vectors = vectors_of(model, films).float().cpu()
                if by_row is None:
                    by_row = torch.full((len(cohort), vectors.shape[1]), math.nan)
                by_row[rows[batch["row"].cpu()]] = vectors
    assert by_row is not None  # these sites have pairs
    return by_row


# Reading
def _tower_file(folder: RunFolder) -> Path:
    return measurements.folder_of(folder) / measurements.TOWER


def rows(folder: RunFolder) -> list[Beside]:
    """What the run is held against, as far as it was measured; nothing on the synthetic cohort, which is nobody's."""
    measured = recalls.read(folder) if folder.config.exists() else []
    if not measured or is_built_in(experiment := folder.experiment()):
        return []
    scope = names.IN_BATCH if any(row.scope == names.IN_BATCH for row in measured) else names.WHOLE_SET
    of = {row.figure: row for row in measured if (row.over, row.k, row.scope) == (names.AVERAGE, 1, scope)}
    trained, r1 = of[TRAINED].recall, R1
    shown = [_against(r1, trained, CHANCE, of[TRAINED].chance)]
    if experiment.takes_steps:  # else random heads, of which a closed form takes nothing: it starts from the tower
        shown.insert(0, Beside(r1, trained, START, of[INITIAL].recall.value, of[GAIN].recall.side))
    for row in measured:
        if (row.figure, row.over, row.k) == (TRAINED, TOGETHER, 1):
            shown.append(_against("R@1 among the studies of all sites", row.recall, ORACLE, row.oracle))
    shown += _beside_tower(folder)
    for name, other in sorted(siblings(folder).recalls.items()):
        alike = [row for row in other if _kind(row) == _kind(of[TRAINED])]
        shown += [_against(r1, trained, name, row.recall.value) for row in alike]
    return shown


def _kind(row: Recall) -> tuple[str, str, int, str]:
    return row.figure, row.over, row.k, row.scope


def _against(what: str, trained: Interval, other: str, value: float) -> Beside:
    side = int(trained.low > value) - int(trained.high < value)
    return Beside(what, trained, other, value, side)


def _beside_tower(folder: RunFolder) -> Iterator[Beside]:
    """The linear probe of the model's vectors beside that of the tower."""
    file = _tower_file(folder)
    if not file.exists() or measurements.is_of_another_model(folder, file):
        return
    with file.open(encoding="utf-8", newline="") as lines:
        of = {row["vectors"]: Interval(*(float(row[name]) for name in COLUMNS[2:])) for row in csv.DictReader(lines)}
    for how, what in (("", "linear probe"), (f" {FEW}", f"few-shot probe ({FEW.shots} images of each class)")):
        if TOWER + how in of:  # where there are no more images, few are all
            said = f"{what} of the labels on image vectors, macro AUC"
            yield Beside(said, of[TRAINED + how], TOWER_ALONE, of[TOWER + how].value, of[GAIN + how].side, digits=3)


@dataclass(frozen=True)
class Siblings:
    """The runs beside a run, on the same records, that it is held against."""

    recalls: Mapping[str, list[Recall]]  # ALONE and POOLED, where there is such a run: those of the newest
    unread: tuple[str, ...] = ()  # runs of which nobody can say whether they are one of these

    @property
    def said(self) -> str:
        """Which runs are left out, in a sentence; "" for none."""
        if not self.unread:
            return ""
        named = ", ".join(self.unread)
        return f"left out, since their files cannot be read: {named}; restore or remove them, or compare without them"


def siblings(folder: RunFolder) -> Siblings:
    """Find the newest finished runs beside this one, of sites alone and of pooled records, that took steps.

    Their configurations are read as text: what plugin or version another run needs is nothing to this one. A run whose
    files cannot be read is left out and named.
    """
    partition = noted_partition(folder).get("sha256")
    newest: dict[str, list[Recall]] = {}
    unread = []
    for path in sorted(folder.path.resolve().parents[1].glob(f"*/*/{PARTITION}"), key=_age):
        other = RunFolder(path.parent)
        if path.parent == folder.path.resolve() or not other.model.exists():
            continue
        try:
            if read_json(path).get("sha256") == partition and (name := _baseline(other)) not in ("", *newest):
                newest[name] = recalls.read(other)
        except (*UNREADABLE, CheckpointError):
            unread.append(f"{path.parts[-3]}/{path.parts[-2]}")
    return Siblings(newest, tuple(sorted(unread)))


def _age(path: Path) -> float:
    """Order by when a run began, the newest first."""
    try:
        return -path.stat().st_mtime
    except OSError:  # it was removed since it was found
        return 0.0


def _baseline(other: RunFolder) -> str:
    """Name what another run may be held against as; "" for a run of another method, and of 0 steps."""
    experiment = read_json(other.config)["args"]
    method, training, rounds = (experiment[name]["args"] for name in ("method", "training", "rounds"))
    steps = method["local_steps"] or training.get("local_epochs", 0)
    return BASELINES.get(experiment["method"]["path"], "") if steps and rounds["rounds"] else ""


def lacking(folder: RunFolder) -> list[str]:
    """The commands of the runs that are not there to be held against: sites alone, and all records in one place."""
    experiment, there = folder.experiment(), siblings(folder).recalls
    real = experiment.name in presets.OF_REAL_FILMS
    commands = []
    for kind, preset in ((Local, "local"), (Centralized, "central" if real else "centralized")):
        name = BASELINES[name_of(kind)]
        if name in there or isinstance(experiment.method, kind):
            continue
        own = f"{preset}{'-real' * real}"
        like = f"fedvlp simulate {own} --like {shlex.quote(seen_from_here(folder.path))}"
        commands.append(f"{name}: {like if experiment.takes_steps else on_records_of(own, experiment, folder.path)}")
    return commands


def verdict(shown: Sequence[Beside]) -> str:
    """Whether the run was worth it, in a sentence; "" where that was not measured, or of one patient alone."""
    if not shown or math.isnan(shown[0].trained.low):
        return ""
    judged = [row for row in shown if row.other != POOLED]  # what a federation is to come near to, not to exceed
    below = [row for row in judged if row.side < 0]
    level = [row for row in judged if not row.side]
    above = [row for row in judged if row.side > 0]
    if below:
        return f"This run is worth less than {_listed(below)}."
    if any(row.other in (START, CHANCE) for row in level):
        return f"This run shows no more than {_listed(level)}."
    said = f"This run is worth more than {_listed(above)}"
    return f"{said}; it does not differ significantly from {_listed(level)}." if level else f"{said}."


CHEST_MODEL = "rad-dino", "microsoft/rad-dino: an image tower of 87 million numbers, 350 MB, MIT"
"""A model of chest X-rays to start from, by its name here; docs/runs.md lists others."""


def ways_on(folder: RunFolder, shown: Sequence[Beside]) -> list[str]:
    """Say what may help where the verdict is not favourable: more test pairs, and another model to start from."""
    judged = [row for row in shown if row.other != POOLED and row.side <= 0]
    if not judged or verdict(shown) == "":
        return []
    ways = []
    pairs = max(row.queries for row in recalls.read(folder) if (row.figure, row.over) == (TRAINED, names.AVERAGE))
    for row in judged:
        gap, half = abs(row.trained.value - row.value), (row.trained.high - row.trained.low) / 2
        if row.side == 0 and row.what == R1 and gap > 0:
            needed = math.ceil(pairs * (half / gap) ** 2)
            ways.append(
                f"{pairs} test pairs give an interval of +-{half:.1f}: a difference of {gap:.1f} from {row.other} "
                f"would be significant with about {needed:,}"
            )
    name, said = CHEST_MODEL
    records = shlex.quote(f"run:{seen_from_here(folder.path)}")
    again = f"fedvlp simulate {folder.experiment().name} --data {records} --start {name}"
    return [*ways, f"start from a chest model ({said}): fedvlp towers import FOLDER --as {name}, then {again}"]


def _listed(shown: Sequence[Beside]) -> str:
    return "; ".join(f"{row.other}: {row}" for row in shown)


def _for_card(folder: RunFolder) -> str:
    """What the model card says of all that: the verdict, then by site, finding and subgroup, in Markdown."""
    shown = rows(folder)
    held = [(row.what, row.of_run, row.other, row.of_other) for row in shown]
    blocks = [
        verdict(shown),
        _table("", ("metric on the test split", "these weights", "held against", "its metric"), held),
        _by_site(recalls.read(folder)),
        _by_finding([one for one in zero_shot_areas.read(folder) if one.model == TRAINED]),
        _table(
            "By subgroup of patients:",
            ("subgroup", "evaluation", "test records", "macro AUC", "accuracy, %"),
            measurements.subgroups(folder),
        ),
    ]
    return "\n\n".join(filter(None, blocks))


def _by_site(measured: Sequence[Recall]) -> str:
    """R@1 of each site, with what it gained, as Markdown."""
    scope = names.IN_BATCH if any(row.scope == names.IN_BATCH for row in measured) else names.WHOLE_SET
    chosen = [row for row in measured if (row.over, row.k, row.scope) == (SITE, 1, scope)]
    gains = {row.site: row.recall for row in chosen if row.figure == GAIN}
    lines = [
        (row.site, row.queries, row.recall.unsigned(), gains.get(row.site, ""), f"{row.chance:.1f}")
        for row in chosen
        if row.figure == TRAINED
    ]
    title = "R@1 by site, %, with 95 % intervals over test patients:"
    return _table(title, ("site", "test pairs", "trained", "gained", "chance"), lines)


def _by_finding(areas: Sequence[zero_shot_areas.Area]) -> str:
    """Zero-shot AUC of each finding at each site, as Markdown."""
    of = {(one.finding, one.site): f"{one.area.unsigned(2)}, {one.positive} / {one.films}" for one in areas}
    findings, sites = (list(dict.fromkeys(of_key)) for of_key in zip(*of, strict=True)) if of else ([], [])
    lines = [(finding, *(of.get((finding, site), "") for site in sites)) for finding in findings]
    title = "Zero-shot AUC, 0 to 1, chance 0.5, with 95 % intervals; positives / total:"
    return _table(title, ("finding", *sites), lines)


def _table(title: str, head: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    """A table in Markdown, below its title; "" without lines."""
    if not lines:
        return ""
    drawn = "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in (head, ["---"] * len(head), *lines))
    return f"{title}\n\n{drawn}" if title else drawn
