"""A trained model from the folder of its run."""

from __future__ import annotations

import json
from pathlib import Path

from fedvlp.models.dual_encoder import DualEncoder
from fedvlp.models.multimodal import MultimodalClassifier


def load_model(folder: str | Path) -> DualEncoder:
    """The model of a finished run, on the CPU, in evaluation mode: a DualEncoder or a MultimodalClassifier.

    ``folder`` is that of a run, or one that ``DualEncoder.save`` wrote. Raises ValueError where it holds no model.
    """
    folder = Path(folder)
    if (folder / "model").is_dir():
        folder = folder / "model"
    try:
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))["model"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"{folder} holds no trained model; give the folder of a run that has finished") from None
    kind = MultimodalClassifier if "labels" in settings else DualEncoder
    return kind.from_pretrained(folder)
