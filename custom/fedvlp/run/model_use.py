"""What an experiment decides about the use of its model: how images are prepared, which findings it is asked for."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch

from fedvlp.core.types import Batch
from fedvlp.data.preprocessing import Preprocessing
from fedvlp.data.report_text import AS_WRITTEN, CLEANED
from fedvlp.data.sources.table import TableSource
from fedvlp.data.synthetic.cases import LABEL_SETS
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.evaluation.zero_shot import PROMPTS, prompts
from fedvlp.models import load
from fedvlp.models.dual_encoder import DualEncoder
from fedvlp.models.multimodal import MultimodalConfig
from fedvlp.run.experiment import Experiment
from fedvlp.run.fitting import sources_of

SENTENCES = 10
"""Prompts of each class, those of the first seed of the zero-shot protocol (``evaluation.zero_shot.ZeroShot``)."""


def preprocessing(experiment: Experiment) -> Preprocessing | None:
    """How the images and reports of the experiment's records are prepared for its model.

    None where the data set does not say at what size it decodes images, or its data sets differ in that.
    """
    sizes = set(_each(experiment.data, "image_size"))
    size = experiment.model.image_size
    if len(sizes) != 1 or not 8 <= size <= min(sizes):
        return None
    cleaned = any(_each(experiment.data, "cleans_reports"))
    colour = any(_each(experiment.data, "colour"))
    return Preprocessing(sizes.pop(), size, CLEANED if cleaned else AS_WRITTEN, colour=colour)


def _each(source: Any, name: str) -> Iterator[Any]:
    """The attribute ``name`` of a data set, or of the data sets that it consists of."""
    if hasattr(source, name):
        yield getattr(source, name)
    elif isinstance(source, (list, tuple)):
        for inner in source:
            yield from _each(inner, name)
    elif is_dataclass(source):
        for field in fields(source):
            yield from _each(getattr(source, field.name), name)


def class_prompts(experiment: Experiment, labels: Sequence[str] | None) -> dict[str, tuple[str, ...]]:
    """Sentences of each of the ``labels`` of the records that are ``told_apart``; None: labels are not known here.

    A federation's server does not see its sites' labels. Unless the cohort is drawn, the classes are then all that
    fedvlp has sentences for, and so they are of records without labels.
    """
    if isinstance(experiment.model, MultimodalConfig):
        return {}  # a classifier has logits of its labels
    if labels is None and isinstance(experiment.data, SyntheticCohort):
        labels = LABEL_SETS[experiment.data.labels]
    return {name: prompts(name, SENTENCES, 0) for name in told_apart(experiment.data, labels or tuple(PROMPTS))}


def told_apart(source: Any, labels: Sequence[str]) -> tuple[str, ...]:
    """The classes of zero-shot where nobody names any: of a person's own table all labels, as they are its classes.

    Of any other data set those that are findings with sentences: one with a "No Finding" beside them is no class.
    """
    own = any(isinstance(one, TableSource) for one in sources_of(source).values())
    return tuple(name for name in labels if own or name in PROMPTS)


# A trained model that takes images and phrases as they are.

log = logging.getLogger(__name__)


def load_model(
    folder: str | Path,
    statistics: str | Path | Iterable[Batch] | None = None,
    device: str | torch.device = "cpu",
) -> DualEncoder:
    """The model of a finished run, in evaluation mode: a DualEncoder or a MultimodalClassifier.

    Its methods ``encode_image``, ``encode_text``, ``zero_shot`` and ``preprocess`` take images and phrases as they are
    (models/use.py), and prepare them as the run's own records were. ``folder`` is that of a run, or its ``model``, or
    one that ``DualEncoder.save`` wrote. ``statistics`` are those of its batch normalisation, where each site keeps its
    own (``norm_statistics=site``): what a site keeps (its name in a simulated run, or the folder ``sites/<site>`` of
    the run at that site), or batches of records to estimate them on, at least 2 records each. Raises ValueError where
    the folder holds no model or a file is not as it was saved, and where it has no statistics and none are given. Warns
    where its images were decoded otherwise than here: those are then refused.
    """
    model = load.load_model(folder, statistics)
    if model.preprocessing:
        model.prepare = Preprocessing.read(model.preprocessing)
        if model.prepare.outdated:
            log.warning("%s", model.prepare.outdated)
    return model.to(device)


def decoded_size(folder: Path) -> int:
    """Pixels that images are to be decoded to for the model in a folder: as many as those of its run were.

    Where the model does not say so, what it sees and a margin, as presets have it. Raises ValueError where there is no
    model.
    """
    described = load.preprocessing(folder)
    return Preprocessing.read(described).longest_side if described else load.input_size(folder) * 9 // 8
