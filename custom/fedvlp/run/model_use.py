"""What an experiment decides about the use of its model: how films are prepared, and which findings it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from fedvlp.data.preprocessing import Preprocessing
from fedvlp.data.report_text import AS_WRITTEN, CLEANED
from fedvlp.data.sources.table import TableSource
from fedvlp.data.synthetic.cases import LABEL_SETS
from fedvlp.data.synthetic.cohort import SyntheticCohort
from fedvlp.evaluation.prompts import PROMPTS, prompts
from fedvlp.models.multimodal import MultimodalConfig
from fedvlp.run.experiment import Experiment
from fedvlp.run.fitting import sources_of

SENTENCES = 10
"""Prompts of each class, those of the first seed of the zero-shot protocol (``evaluation.zero_shot.ZeroShot``)."""


def preprocessing(experiment: Experiment) -> Preprocessing | None:
    """How the films and reports of the experiment's records are prepared for its model.

    None where the data set does not say at what size it decodes films, or its data sets differ in that.
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
