"""A classifier of one's own on a trained model: a linear probe on a table's labels, kept beside the model, and used.

What a linear probe measures is thrown away with its heads. Here the heads are kept (models/findings.py), with what they
reach on images that they have not seen, so that `fedvlp predict` and `explore` can say what an image shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedvlp.core.validate import require
from fedvlp.data.cohort import Cohort
from fedvlp.evaluation.downstream import images, records
from fedvlp.evaluation.intervals import area_of, bootstrap
from fedvlp.evaluation.linear_probe import Sample, Task, fit, task_of
from fedvlp.methods.one_round_cca import before_heads
from fedvlp.models.findings import FindingHeads
from fedvlp.models.serialization import CHECKSUMS, write_checksums
from fedvlp.models.use import evaluating
from fedvlp.run.beside import LEAST, PROBE, frequent
from fedvlp.run.finding_heads import SENSITIVITY, figures_of

BATCH = 64
"""Images that the tower sees at once."""


@torch.no_grad()
def pooled(model: Any, prepared: Tensor) -> Tensor:
    """Pooled features [N, W] float32, on the CPU, of prepared images [N, C, S, S]: what the image head takes."""
    features = []
    with evaluating(model), before_heads(model) as seen:
        for some in prepared.split(BATCH):
            model({"image": some.to(model.device)})
            features.append(seen["image"].float().cpu())
    return torch.cat(features)


def fit_heads(
    model: Any, cohort: Cohort, sensitivity: float = SENSITIVITY, say: Callable[[str], None] = print
) -> FindingHeads:
    """Fit a head for each label of the training images: logistic regression, as the linear probe's (lbfgs).

    Args:
        model: a DualEncoder, which stays as it is.
        cohort: images with labels. An uncertain label is neither learned from nor judged; a blank one is absent.
        sensitivity: 0 to 1; at least so much of the validation images with a finding are above its threshold.
        say: is told which labels are left out, since too few images show or lack them.

    Returns:
        The heads; figures of validation (threshold, sensitivity, specificity, calibration error) and, as ``test_auc``
        with ``test_low`` and ``test_high``, the AUC on the test images with its 95 % interval over patients.

    Raises:
        ValueError: no label, too few images of each, or a sensitivity that is none.
    """
    require(0 < sensitivity <= 1, f"--sensitivity is {sensitivity}; give a share above 0, at most 1")
    require(model.contrastive, "this model is a classifier, which has logits of its own labels; give an encoder")
    task = task_of(cohort, PROBE)
    chosen = records(cohort, task.labelled)
    task, few = frequent(Task(task.names, task.targets, False), chosen)
    if few:
        named = ", ".join(f"{name} ({count})" for name, count in few.items())
        say(f"left out, with fewer than {LEAST} training images, or no test image, that show or lack it: {named}")
    train, val, test = (
        Sample(features_of(model, cohort, rows), task.targets[rows]) for rows in (chosen.train, chosen.val, chosen.test)
    )
    layer = fit(task, PROBE, train, train, 0, None)
    origin = f"logistic regression on {len(chosen.train)} labelled images"
    heads = FindingHeads(task.names, layer.weight.detach(), layer.bias.detach(), origin)
    stated_val, stated_test = heads.probabilities(val.features), heads.probabilities(test.features)
    patients = np.asarray([cohort.patients[row] for row in chosen.test])
    for index, name in enumerate(task.names):
        known, truth = ~val.targets[:, index].isnan(), val.targets[:, index]
        if min(int((truth == kind).sum()) for kind in (0, 1)) >= 1:
            heads.figures[name] = figures_of(stated_val[known, index], truth[known], sensitivity)
        known = ~test.targets[:, index].isnan()
        area = bootstrap(
            area_of(stated_test[known, index], test.targets[known, index]), patients[known.numpy()].tolist()
        )
        told = {"test_records": int(known.sum()), "test_auc": area.value, "test_low": area.low, "test_high": area.high}
        heads.figures.setdefault(name, {}).update(
            {key: round(value, 4) for key, value in told.items() if math.isfinite(value)}
        )
    return heads


def features_of(model: Any, cohort: Cohort, rows: np.ndarray) -> Tensor:
    """Pooled features [n, W] of the images of some rows."""
    return torch.cat([pooled(model, batch) for batch in images(cohort, rows, model.config.image_size)])


def save_heads(heads: FindingHeads, folder: Path) -> None:
    """Write the heads into the folder of a model, in the place of those that it had, with their checksums."""
    inside = folder / "model" if (folder / "model").is_dir() else folder
    heads.save(inside)
    if (inside / CHECKSUMS).exists():
        write_checksums(inside)


def heads_in(folder: Path) -> FindingHeads | None:
    """The heads beside the model in the folder of a run or of a model; None where it has none."""
    return FindingHeads.read(folder / "model" if (folder / "model").is_dir() else folder)


def at_chance(heads: FindingHeads) -> list[str]:
    """The findings whose AUC on test images is not above 0.5 for certain; those that nobody measured are not named."""
    return [name for name, of in heads.figures.items() if not of.get("test_low", of.get("auc", 1.0)) > 0.5]


def files_in(given: Sequence[Path]) -> list[Path]:
    """The files that are given, and those in folders that are given, whatever they are called but for hidden ones.

    Raises ValueError for what is not there, and for folders without a file.
    """
    files: list[Path] = []
    for path in given:
        require(path.exists(), f"{path}: there is no such file or folder")
        inside = sorted(one for one in path.rglob("*") if one.is_file() and not _hidden(one.relative_to(path)))
        files += inside if path.is_dir() else [path]
    require(bool(files), "there is no file in the folders that were given")
    return files


def _hidden(path: Path) -> bool:
    return any(name.startswith(".") for name in path.parts)


def read_each(model: Any, files: Sequence[Path], refused: Callable[[Path, str], None]) -> Iterator[tuple[Path, Tensor]]:
    """The prepared image [C, S, S] of each file that can be read; ``refused`` is told of the others, and why."""
    for file in files:
        try:
            yield file, model.preprocess(file)
        except ValueError as error:
            refused(file, str(error))
