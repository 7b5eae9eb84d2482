"""Reading a saved model: its description and its weights, checked against each other."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

C = TypeVar("C", bound="DataclassInstance")


def read_config(folder: Path, format: int, kind: type[C]) -> tuple[dict[str, Any], C]:
    """What config.json says of the towers and the tokenizer, and the model's configuration, an instance of ``kind``.

    Raises ValueError for a file that is missing, is no saved model, or has another ``format``.
    """
    try:
        saved = json.loads((folder / "config.json").read_text())
        seen = saved["format"]
        if seen == format:
            config = kind(**saved["model"])
            return {key: saved[key] for key in ("image_architecture", "text_architecture", "tokenizer")}, config
    except (OSError, ValueError, KeyError, TypeError) as error:
        known = ", ".join(f.name for f in fields(kind))
        raise ValueError(
            f"{folder}/config.json: not a saved DualEncoder ({error}); model fields are {known}"
        ) from error
    raise ValueError(
        f"{folder}/config.json: format {seen!r}, expected {format}; load it with the version that wrote it"
    )


def read_weights(folder: Path, expected: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of model.safetensors. Raises ValueError unless names, shapes and kinds of dtype are as expected."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = folder / "model.safetensors"
    try:
        seen = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: unreadable or damaged weights ({error}); copy the folder again") from error
    shapes = [
        f"{name}: {list(seen[name].shape)} {seen[name].dtype}, expected {list(t.shape)} {t.dtype}"
        for name, t in expected.items()
        if name in seen and (seen[name].shape != t.shape or seen[name].is_floating_point() != t.is_floating_point())
    ]
    faults = {"missing": sorted(set(expected) - set(seen)), "unexpected": sorted(set(seen) - set(expected))}
    problems = [
        f"{len(names)} {fault} ({', '.join(names[:3])}{', ...' * (len(names) > 3)})"
        for fault, names in {**faults, "shape": shapes}.items()
        if names
    ]
    if problems:
        raise ValueError(f"{path}: does not fit config.json: {'; '.join(problems)}")
    return seen
