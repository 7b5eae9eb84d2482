"""Distortion: what re-training at one site does to a shared model at others (FedRGB, tables 6, 11; spec 10.7, 10.8).

Entry (i, j) of a distortion table is the mean cosine of the paired embeddings of site j's held-out records under the
model before re-training, minus the same after re-training on site i. A positive value is distortion. The papers do not
state the number of steps; here it is one round's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from fedvlp.core.client import Client
from fedvlp.core.method import Method
from fedvlp.core.types import Broadcast, State, group
from fedvlp.evaluation import metric_names
from fedvlp.evaluation.output import new_figure, write_csv, write_png
from fedvlp.evaluation.retrieval import Retrieval
from fedvlp.federation.site import Site
from fedvlp.federation.site_memory import SiteMemory
from fedvlp.run.assembly import Assembly
from fedvlp.run.evaluate import (
    Choices,
    Load,
    last_server,
    load_shared,
    loader,
    models_at_sites,
    paired_sites,
    remembered,
    trained_state,
)
from fedvlp.run.experiment import POOLED
from fedvlp.run.folder import RunFolder
from fedvlp.run.measurements import folder_of
from fedvlp.run.metrics import by_site
from fedvlp.training.settings import Training

MEAN = "mean"  # name of the last row of a table, the means of its columns
_LAYER = re.compile(r"^(\w+)_encoder\.(?:.*?\.)?(?:blocks|layers?|stages)\.?(\d+)\.")


@dataclass(frozen=True)
class Trial:
    """One re-training."""

    trained_on: str  # name of the row
    start: State  # weights before
    client: Client  # whose data train them
    remembered: State = field(default_factory=dict)  # what its site keeps, e.g. its normalisation


@dataclass(frozen=True)
class Entry:
    """One cell of a distortion table."""

    trained_on: str
    measured_on: str
    similarity_before: float  # mean cosine of the pairs, -1..1
    similarity_after: float
    recall_before: float | None = None  # in-batch Recall@1, percent; None below one batch of 32
    recall_after: float | None = None
    recall5_before: float | None = None  # the same of Recall@5
    recall5_after: float | None = None

    @property
    def distortion(self) -> float:
        """Drop of the mean cosine; positive is distortion."""
        return self.similarity_before - self.similarity_after


@dataclass(frozen=True)
class Retraining(Method):
    """Plain local pre-training (FedAvg's), of all parameters or of some tensors."""

    only: frozenset[str] | None = None  # names of the tensors that are trained; None: all

    def trains(self, name: str, phase: str) -> bool:
        """Whether the tensor ``name`` is trained."""
        return self.only is None or name in self.only


def encoder_layers(names: Iterable[str], count: int | None = None, *, deep: bool = False) -> frozenset[str]:
    """Names of the tensors of the first (``deep``: last) ``count`` layers of each encoder; None: a third of its layers.

    The papers re-train the first 4 of 12. Raises ValueError where an encoder has no numbered layers or too few.
    """
    layers: dict[str, dict[int, list[str]]] = {}
    for name in names:
        if group(name) == "encoder":
            tower = layers.setdefault(name.partition("_encoder.")[0], {})
            if match := _LAYER.match(name):
                tower.setdefault(int(match[2]), []).append(name)
    chosen: list[str] = []
    for modality, tower in layers.items():
        wanted = max(1, len(tower) // 3) if count is None else count
        if not 1 <= wanted <= len(tower):
            raise ValueError(f"{modality} encoder: {len(tower)} layers, {wanted} asked for; give 1 to {len(tower)}")
        order = sorted(tower)
        for index in order[-wanted:] if deep else order[:wanted]:
            chosen += tower[index]
    return frozenset(chosen)


def encoder_phase(method: Method, names: Iterable[str], round: int) -> str:
    """The first phase of ``round`` in which the method trains an encoder. Raises ValueError where there is none."""
    encoders = [name for name in names if group(name) == "encoder"]
    for phase in method.phases(round):
        if any(method.trains(name, phase) for name in encoders):
            return phase
    raise ValueError(f"{type(method).__name__} trains no encoder in round {round}; re-train without --set own=true")


def cross_table(
    trials: Sequence[Trial],
    held_out: Mapping[str, Any],
    method: Method,
    training: Training,
    *,
    round: int = 0,
    split: str = "test",
    load: Load = load_shared,
) -> list[Entry]:
    """Re-trains every trial with ``method`` and measures it on the ``split`` of all ``held_out`` (site -> SiteData).

    Clients may share their modules; ``round`` seeds the batches. Sites with fewer than 2 records in the split are left
    out. ``load`` makes of a model what a site measures. Raises ValueError for a method that trains no encoder in this
    round.
    """
    held_out = {site: data for site, data in held_out.items() if data.sizes.get(split, 0) >= 2}
    entries: list[Entry] = []
    before: dict[str, Figures] = {}
    measured: State | None = None
    for trial in trials:
        if measured is not trial.start:
            before, measured = _figures(trial.client, trial.start, held_out, split, load), trial.start
        phase = encoder_phase(method, trial.start, round)
        memory = SiteMemory(None)
        if trial.remembered:
            memory.after((-1, 0), trial.remembered)
        Site(trial.client, method, training, memory).handle(Broadcast(round, phase, trial.start))
        trained = {name: tensor.clone() for name, tensor in trial.client.state().items() if name in trial.start}
        after = _figures(trial.client, trained, held_out, split, load)
        for site in held_out:
            (cosine, first, fifth), (cosine_after, first_after, fifth_after) = before[site], after[site]
            entries.append(Entry(trial.trained_on, site, cosine, cosine_after, first, first_after, fifth, fifth_after))
    return entries


Figures = tuple[float, float | None, float | None]
"""Mean cosine, in-batch Recall@1 and Recall@5."""


def _figures(client: Client, state: State, held_out: Mapping[str, Any], split: str, load: Load) -> dict[str, Figures]:
    """Site -> figures of a model."""
    figures = {}
    for site, data in held_out.items():
        load(client, state, site)
        metrics = Retrieval().measure(client.model, data, split)
        first, fifth = (metrics.get(metric_names.recall(split, k)) for k in (1, 5))
        figures[site] = metrics[metric_names.similarity(split)], first, fifth
    return figures


def column_means(entries: Sequence[Entry]) -> dict[str, float]:
    """Site -> distortion of its records, mean over the re-trainings (the papers' last row)."""
    columns: dict[str, list[float]] = {}
    for entry in entries:
        columns.setdefault(entry.measured_on, []).append(entry.distortion)
    return {site: sum(values) / len(values) for site, values in columns.items()}


def write_table(entries: Sequence[Entry], path: Path, title: str) -> list[Path]:
    """Writes ``<path>.csv``, a row per cell and per column mean, and the heat map ``<path>.png``; returns both."""
    rows: list[list[Any]] = [
        [
            "trained_on",
            "measured_on",
            "distortion",
            "similarity_before",
            "similarity_after",
            "recall1_before",
            "recall1_after",
            "recall5_before",
            "recall5_after",
        ]
    ]
    rows += [
        [
            e.trained_on,
            e.measured_on,
            e.distortion,
            e.similarity_before,
            e.similarity_after,
            e.recall_before,
            e.recall_after,
            e.recall5_before,
            e.recall5_after,
        ]
        for e in entries
    ]
    rows += [[MEAN, site, value] + [None] * 6 for site, value in column_means(entries).items()]
    return [write_csv(path, rows), write_png(path, heat_map(entries, title))]


def write_curves(curves: Mapping[str, Mapping[int, float]], path: Path, title: str) -> list[Path]:
    """Writes ``curves`` (site -> round -> mean cosine; FedDRA, figure 4d-f) as ``<path>.csv`` and ``<path>.png``."""
    rows: list[list[Any]] = [["round", "site", "similarity"]]
    rows += [[round, site, value] for site, curve in curves.items() for round, value in curve.items()]
    figure, axes = new_figure(6.0, 3.6)
    for site, curve in curves.items():
        axes.plot(list(curve), list(curve.values()), marker="o", markersize=3, label=site)
    axes.set(xlabel="communication round", ylabel="mean cosine of image and report", title=title)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize="small")
    return [write_csv(path, rows), write_png(path, figure)]


def heat_map(entries: Sequence[Entry], title: str) -> Any:
    """The table as a matplotlib Figure: a row per re-training, a column per site, the column means in the last row."""
    columns = list(dict.fromkeys(entry.measured_on for entry in entries))
    rows = list(dict.fromkeys(entry.trained_on for entry in entries))
    cell = {(entry.trained_on, entry.measured_on): entry.distortion for entry in entries}
    means = column_means(entries)
    values = [[cell[row, column] for column in columns] for row in rows] + [[means[column] for column in columns]]
    limit = max((abs(value) for row in values for value in row), default=0.0) or 1.0
    figure, axes = new_figure(max(6.4, 2.6 + 0.95 * len(columns)), 1.9 + 0.5 * len(values))
    image = axes.imshow(values, cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto")
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(values)), [*rows, MEAN])
    axes.set(xlabel="measured on the test records of", ylabel="re-trained on", title=title)
    axes.axhline(len(rows) - 0.5, color="black", linewidth=1.5)
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            colour = "white" if abs(value) > 0.6 * limit else "black"
            axes.text(x, y, f"{value:+.3f}", ha="center", va="center", fontsize="small", color=colour)
    figure.colorbar(image, ax=axes, label="drop of the paired cosine")
    return figure


# What `fedvlp evaluate --what` calls.


@dataclass(frozen=True)
class Retrained(Choices):
    """Options of re-training all layers; ``steps``: of the optimiser, None for one round's."""

    reads: ClassVar[frozenset[str] | None] = frozenset({"steps"})

    own: bool = False  # re-train with the run's own method instead of plain pre-training


@dataclass(frozen=True)
class Layered(Choices):
    """Options of re-training some layers of each encoder by plain pre-training; ``steps``: None for 500."""

    reads: ClassVar[frozenset[str] | None] = frozenset({"steps"})

    layers: int | None = None  # of each encoder; None: a third


@dataclass(frozen=True)
class Read(Choices):
    """Options of an evaluation that trains nothing: none."""

    reads: ClassVar[frozenset[str] | None] = frozenset()


def _trials(assembly: Assembly, folder: RunFolder, state: State) -> list[Trial]:
    """The server's model re-trained on each site; for sites that share none, their own models on all records."""
    starts = models_at_sites(assembly, state)
    if starts:
        union = assembly.client(POOLED, assembly.data(None))
        return [Trial(f"{site}'s model on all", start, union) for site, start in starts.items()]
    return [
        Trial(site, state, assembly.client(site, data), remembered(assembly, site))
        for site, data in paired_sites(assembly, 0).items()
    ]


def _retrain(
    folder: RunFolder,
    name: str,
    steps: int | None,
    own: bool = False,
    only: Callable[[State], frozenset[str]] | None = None,
) -> list[Path]:
    """Write a distortion table of the run's model after so many steps, None for one round's; return the files.

    ``own``: by the run's own method. ``only``: the tensors of the model that train by plain pre-training; None: all.
    """
    import torch

    experiment = folder.experiment()
    torch.set_num_threads(experiment.training.threads)
    assembly, server = Assembly(experiment, folder.path), last_server(folder)
    state = trained_state(assembly, server)
    taken = experiment.method.local_steps if steps is None else steps
    plain = Retraining(local_steps=taken, only=only(state) if only else None)
    method = replace(experiment.method, local_steps=taken) if own else plain
    trials = _trials(assembly, folder, state)
    training = experiment.training
    if steps is not None:
        training = replace(training, local_epochs=0)  # so many steps, and not the passes of a round
    entries = cross_table(trials, paired_sites(assembly), method, training, round=server.round, load=loader(assembly))
    how = "its own local training" if own else "plain pre-training"
    title = f"{experiment.name}, round {server.round}: {name} after {taken} steps of {how}"
    return write_table(entries, folder_of(folder) / (name + ("-own" if own else "")), title)


def distort(folder: RunFolder, choices: Retrained) -> list[Path]:
    """Re-train everything for one round's steps (spec 10.7); return the files written."""
    return _retrain(folder, "distortion", choices.steps, choices.own)


def shallow(folder: RunFolder, choices: Layered) -> list[Path]:
    """Re-train the first encoder layers for 500 steps (spec 10.8); return the files written."""
    return _of_layers(folder, choices, "shallow")


def deep(folder: RunFolder, choices: Layered) -> list[Path]:
    """Re-train the last encoder layers for 500 steps; return the files written."""
    return _of_layers(folder, choices, "deep")


def _of_layers(folder: RunFolder, choices: Layered, name: str) -> list[Path]:
    steps = 500 if choices.steps is None else choices.steps
    return _retrain(folder, name, steps, only=lambda state: encoder_layers(state, choices.layers, deep=name == "deep"))


def similarity(folder: RunFolder, choices: Read) -> list[Path]:
    """Mean cosine of the pairs of each site's validation records by round (spec 10.8). Returns the files written.

    Raises ValueError where the run never measured it.
    """
    name = metric_names.similarity("val")
    curves: dict[str, dict[int, float]] = {}
    for record in folder.history():
        for site, metrics in by_site(record).items():
            if name in metrics:
                curves.setdefault(site, {})[record["round"]] = metrics[name]
    if not curves:
        raise ValueError(
            f"{folder.path} has no evaluations with a paired cosine: it ran with evaluate_every=0, or its model is a "
            "classifier"
        )
    title = f"{folder.experiment().name}: paired cosine of the model a round starts from"
    return write_curves(curves, folder_of(folder) / "similarity", title)
