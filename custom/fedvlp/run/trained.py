"""A trained model that takes films and phrases as they are."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

import torch

from fedvlp.core.types import Batch
from fedvlp.data.preprocessing import Preprocessing
from fedvlp.models import load
from fedvlp.models.dual_encoder import DualEncoder

log = logging.getLogger(__name__)


def load_model(
    folder: str | Path,
    statistics: str | Path | Iterable[Batch] | None = None,
    device: str | torch.device = "cpu",
) -> DualEncoder:
    """The model of a finished run, in evaluation mode: a DualEncoder or a MultimodalClassifier.

    Its methods ``encode_image``, ``encode_text``, ``zero_shot`` and ``preprocess`` take films and phrases as they are
    (models/use.py), and prepare them as the run's own records were. ``folder`` is that of a run, or its ``model``, or
    one that ``DualEncoder.save`` wrote. ``statistics`` are those of its batch normalisation, where each site keeps its
    own (``norm_statistics=site``): what a site keeps (its name in a simulated run, or the folder ``sites/<site>`` of
    the run at that site), or batches of records to estimate them on, at least 2 records each. Raises ValueError where
    the folder holds no model or a file is not as it was saved, and where it has no statistics and none are given. Warns
    where its films were decoded otherwise than here: those are then refused.
    """
    model = load.load_model(folder, statistics)
    if model.preprocessing:
        model.prepare = Preprocessing.read(model.preprocessing)
        if model.prepare.outdated:
            log.warning("%s", model.prepare.outdated)
    return model.to(device)


def decoded_size(folder: Path) -> int:
    """Pixels that films are to be decoded to for the model in a folder: as many as those of its run were.

    Where the model does not say so, what it sees and a margin, as presets have it. Raises ValueError where there is no
    model.
    """
    described = load.preprocessing(folder)
    return Preprocessing.read(described).longest_side if described else load.input_size(folder) * 9 // 8
