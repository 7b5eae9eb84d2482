"""Reading a saved model: its checksums, its description and its weights, checked against each other."""

from __future__ import annotations

import hashlib
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from fedvlp.core.json_file import read_bounded, read_json, refuse_special

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

C = TypeVar("C", bound="DataclassInstance")

CHECKSUMS = "SHA256SUMS"
"""File with a line ``<SHA-256>  <file>`` for each file of the folder, as ``sha256sum -c`` reads it."""

USE = ("preprocessing", "prompts", "frozen_statistics", "start")
"""What config.json may say of a model's use: how images are prepared, sentences by class for zero-shot, the modules
whose batch normalisation was frozen in its run, so that its statistics are no site's, and the library that it is of."""

LARGEST_SUMS = 1 << 20
"""Bytes of the largest file of checksums."""

CARD = "README.md"
"""The model card. It has no checksum: people may write in it."""


def write_checksums(folder: Path) -> None:
    """Writes the checksums of all files in ``folder`` but the model card."""
    names = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    lines = [f"{_sha256(folder / name)}  {name}\n" for name in names if name not in (CARD, CHECKSUMS)]
    (folder / CHECKSUMS).write_text("".join(lines), encoding="utf-8")


def verify_checksums(folder: Path) -> None:
    """Raises ValueError unless every file that has a checksum is as it was saved; older folders have none."""
    file = folder / CHECKSUMS
    if not file.exists():
        return
    try:
        lines = read_bounded(file, LARGEST_SUMS).decode(errors="replace").splitlines()
    except ValueError as error:
        raise ValueError(f"{folder}: {error}; copy the folder again") from None
    for line in lines:
        digest, _, name = line.partition("  ")
        try:
            seen = _sha256(_inside(folder, name))
        except (OSError, ValueError):
            raise ValueError(f"{folder}: {name} is missing or cannot be read; copy the folder again") from None
        if seen != digest:
            raise ValueError(
                f"{folder}: {name} is not as it was saved: its SHA-256 is {seen[:16]}..., {CHECKSUMS} says "
                f"{digest[:16]}...; copy the folder again, or, if the change is meant, remove {CHECKSUMS}"
            )


def _inside(folder: Path, name: str) -> Path:
    """The regular file ``name`` of the folder. Raises ValueError or OSError for a way out, a pipe or a device."""
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise ValueError("it leads out of the folder")
    refuse_special(path)
    return path


def _sha256(file: Path) -> str:
    sha = hashlib.sha256()
    with file.open("rb") as content:
        while chunk := content.read(1 << 20):
            sha.update(chunk)
    return sha.hexdigest()


def read_config(folder: Path, format: int, kind: type[C]) -> tuple[dict[str, Any], C]:
    """What config.json says of towers, tokenizer and use, and the model's configuration, an instance of ``kind``.

    Raises ValueError for a file that is missing, is no saved model, or has another ``format``.
    """
    try:
        saved = read_json(folder / "config.json")
        seen = saved["format"]
        if seen == format:
            config = kind(**saved["model"])
            required = ("image_architecture", "text_architecture", "tokenizer")
            return {key: saved[key] for key in required} | {key: saved.get(key) for key in USE}, config
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
        refuse_special(path)
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
