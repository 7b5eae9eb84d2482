"""What prepares films and phrases for an exported model, in files beside it: JSON, and Python without fedvlp."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from fedvlp.models.dual_encoder import DualEncoder
from fedvlp.models.tiny import HashTokenizer

NEEDS = "numpy pillow opencv-python-headless"
"""Packages that ``prepare.py`` imports for films, as pip calls them."""

CHANNELS = {1: ("grey",), 3: ("red", "green", "blue")}
"""Number of a film's channels -> their names."""


def channels_of(model: DualEncoder) -> int:
    """Of the films that are prepared for a model: 3 in colour, else 1, which the image tower repeats."""
    return 3 if model.preprocessing.get("colour") is True else 1


def statistics_of(tower: Any) -> dict[str, Any]:
    """The mean and std of each channel that an image tower normalises by itself; empty for those of every film."""
    said = tower.architecture()
    return {key: said[key] for key in ("mean", "std") if key in said}


def write_preparation(model: DualEncoder, folder: Path, texts: bool = True, normalise: bool = False) -> None:
    """Writes preprocessing.json, prepare.py and radiograph.py, and with ``texts`` tokenization.json and tokenizer/.

    With ``normalise``, for an image tower as its own library has it, prepare.py gives films the mean and std that the
    tower was made for; otherwise what is exported does that itself. radiograph.py is this package's own, so that a film
    is decoded as it is here.
    """
    said = statistics_of(model.image_encoder) if normalise else {}
    _write(folder / "preprocessing.json", model.preprocessing and model.preprocessing | said)
    for name, source in (("prepare.py", "models/export/prepare.py.txt"), ("radiograph.py", "data/radiograph.py")):
        code = files("fedvlp").joinpath(source).read_text(encoding="utf-8")
        (folder / name).write_text(code, encoding="utf-8")
    if not texts:
        return
    tokenizer: Any = model.tokenizer
    if isinstance(tokenizer, HashTokenizer):
        _write(folder / "tokenization.json", tokenizer.described())
        return
    _write(folder / "tokenization.json", {"kind": "transformers", "max_tokens": tokenizer.max_tokens})
    tokenizer.tokenizer.save_pretrained(folder / "tokenizer")


def _write(file: Path, said: dict[str, Any]) -> None:
    file.write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")
