"""Zero-shot areas under the ROC curve of a finished run, by finding and site, with intervals over the test patients.

The initial model stands beside the trained one. As the recalls (run/recalls.py), these are measured where the records
are, and the file holds figures alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedvlp.core.types import State
from fedvlp.evaluation.classification import roc
from fedvlp.evaluation.intervals import Interval, area_of, bootstrap, macro
from fedvlp.evaluation.output import write_csv
from fedvlp.evaluation.zero_shot import (
    Embeddings,
    ZeroShot,
    absent_texts,
    class_scores,
    class_texts,
    prompts,
    test_images,
)
from fedvlp.run import measurements
from fedvlp.run.compare import INITIAL, FinishedRun
from fedvlp.run.evaluate import load_shared, loader
from fedvlp.run.folder import RunFolder
from fedvlp.run.model_use import told_apart
from fedvlp.run.recalls import TRAINED

COLUMNS = ("model", "site", "finding", "films", "positive", "area", "low", "high", "sensitivities")
RATES = tuple(step / 20 for step in range(21))
"""False-positive rates at which the ROC curve is kept: a bounded size, and no score of a record."""


@dataclass(frozen=True)
class Area:
    """How well a model ranks the test images of a site by a finding that it was told in words alone."""

    model: str  # INITIAL or TRAINED
    site: str
    finding: str
    films: int  # whose label is known to be there or not; a finding that is not mentioned is not there
    positive: int
    area: Interval  # 0..1, mean over the draws of the prompts; chance is 0.5
    sensitivities: tuple[float, ...] = ()  # at ``RATES``, mean over the draws; () in a file of an older fedvlp


def file_of(folder: RunFolder) -> Path:
    """Where the AUCs of a run are."""
    return measurements.folder_of(folder) / measurements.AREAS


def measure(folder: RunFolder, run: FinishedRun | None = None) -> Path | None:
    """Measures the initial and the trained model and writes ``evaluation/zero-shot-findings.csv``.

    None for records with fewer than two classes (``told_apart``). Raises ValueError as ``recalls.measure`` does.
    """
    run = run or FinishedRun(folder, folder.experiment().name)
    classes = told_apart(run.experiment.data, run.assembly.cohort.label_names)
    if len(classes) < 2:
        return None
    protocol = ZeroShot(classes)
    own, state = run.trained()
    areas = [*_areas(run, protocol, INITIAL, {}, run.assembly.initial()), *_areas(run, protocol, TRAINED, own, state)]
    rows = (
        (*list(vars(one).values())[:5], *vars(one.area).values(), " ".join(f"{x:.3f}" for x in one.sensitivities))
        for one in areas
    )
    file = write_csv(file_of(folder), [COLUMNS, *rows])
    measurements.note(folder, file)
    return file


@torch.no_grad()
def _areas(run: FinishedRun, protocol: ZeroShot, name: str, own: Mapping[str, State], state: State) -> Iterator[Area]:
    """The AUCs of a site's ``own`` model, or else of ``state``, at every site."""
    torch.set_num_threads(run.experiment.training.threads)
    load = load_shared if name == INITIAL else loader(run.assembly)
    sentences = [
        {of: prompts(of, protocol.prompts, seed) for of in protocol.classes} for seed in protocol.seeds
    ]  # of each seed, by class
    cohort = run.assembly.cohort
    columns = [cohort.label_names.index(of) for of in protocol.classes]
    one_model = not own and load is load_shared  # the same at every site, and so are the vectors of its prompts
    texts: list[Embeddings] = []
    absent: Tensor | None = None
    for site, data in run.data.items():
        client = run.assembly.client(site, data)
        load(client, own.get(site, state), site)
        client.model.eval()
        rows = cohort.rows("test", site)
        imaged = np.flatnonzero(cohort.has_image()[rows])
        image = test_images(client, data, protocol.batch_size, torch.from_numpy(imaged))
        if not (texts and one_model):
            texts, absent = [class_texts(client, one)[1] for one in sentences], absent_texts(protocol, client)
        scores = [class_scores(image, of_seed, protocol.ensemble, absent).cpu() for of_seed in texts]
        labels = torch.from_numpy(cohort.labels[rows[imaged]][:, columns])
        patients = [cohort.patients[row] for row in rows[imaged]]
        yield from _of_site(name, site, protocol.classes, torch.stack(scores), labels, patients)


def _of_site(
    name: str,
    site: str,
    classes: Sequence[str],
    scores: Tensor,
    labels: Tensor,
    patients: Sequence[str],
) -> Iterator[Area]:
    """The AUCs at one site from scores [seeds, N, C] of images, their labels [N, C] and patients [N].

    A finding without a positive or without a negative image has none; where either are one patient's, no interval.
    """
    for index, finding in enumerate(classes):
        known = labels[:, index] != -1
        truth = (labels[known, index] == 1).double()
        positive = int(truth.sum())
        if not 0 < positive < len(truth):
            continue
        whose = [patient for patient, one in zip(patients, known.tolist(), strict=True) if one]
        area = bootstrap(macro([area_of(of_seed[known, index], truth) for of_seed in scores]), whose)
        if min(len({who for who, one in zip(whose, truth.tolist(), strict=True) if one == of}) for of in (0, 1)) < 2:
            area = Interval(area.value, math.nan, math.nan)  # that one patient is in every resample that has an AUC
        curves = torch.tensor([roc(of_seed[known, index], truth, RATES) for of_seed in scores])
        yield Area(name, site, finding, len(truth), positive, area, tuple(curves.mean(0).tolist()))


def read(folder: RunFolder) -> list[Area]:
    """The AUCs that ``measure`` wrote; none where it did not, or of another model. Raises ValueError for damage."""
    return measurements.lines_of(folder, file_of(folder), _read)


def at_chance(path: Path) -> bool:
    """Whether a run's AUCs were measured, and no more than one in twenty of them lies above chance for certain."""
    areas = [one.area for one in read(RunFolder(path)) if one.model == TRAINED and not math.isnan(one.area.low)]
    return bool(areas) and sum(area.low > 0.5 for area in areas) <= len(areas) / 20


def _read(line: Mapping[str, str]) -> Area:
    model, site, finding = (line[name] for name in COLUMNS[:3])
    area = Interval(*(float(line[name]) for name in ("area", "low", "high")))
    curve = tuple(map(float, (line.get("sensitivities") or "").split()))
    return Area(model, site, finding, int(line["films"]), int(line["positive"]), area, curve)
