"""Reading a saved model: its checksums, its description and its weights, checked against each other."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from threading import get_ident
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from fedvlp.core.json_file import read_bounded, read_json, refuse_special
from fedvlp.core.tensor_file import DTYPES
from fedvlp.core.validate import BOUNDS, LARGEST

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

C = TypeVar("C", bound="DataclassInstance")

WEIGHTS = "model.safetensors"

CHECKSUMS = "SHA256SUMS"
"""File with a line ``<SHA-256>  <file>`` for each file of the folder, as ``sha256sum -c`` reads it."""

USE = ("preprocessing", "prompts", "frozen_statistics", "start")
"""What config.json may say of a model's use: how images are prepared, sentences by class for zero-shot, the modules
whose batch normalisation was frozen in its run, so that its statistics are no site's, and the library that it is of."""

LARGEST_SUMS = 1 << 20
"""Bytes of the largest file of checksums."""

LARGEST_HEADER = 4 << 20
"""Bytes of the longest description of tensors that is read: a hundred times that of the largest towers of the field."""

LARGEST_TOKENIZER = 64 << 20
"""Bytes of the largest file of a tokenizer; one of 250,000 words has 17 million."""

SPARE = 1000
"""Parameters that a tower may make, beside two for each of its tensors, and not keep."""

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
            _refuse_large({key: saved[key] for key in ("model", *required)})
            return {key: saved[key] for key in required} | {key: saved.get(key) for key in USE}, config
    except (OSError, ValueError, KeyError, TypeError) as error:
        known = ", ".join(f.name for f in fields(kind))
        raise ValueError(
            f"{folder}/config.json: not a saved DualEncoder ({error}); model fields are {known}"
        ) from error
    raise ValueError(
        f"{folder}/config.json: format {seen!r}, expected {format}; load it with the version that wrote it"
    )


def _refuse_large(value: Any, name: str = "") -> None:
    """Raises ValueError for a whole number, anywhere in it, that no model has under that name."""
    named = value.items() if isinstance(value, dict) else ((name, item) for item in value)
    for key, item in named:
        if isinstance(item, (dict, list)):
            _refuse_large(item, str(key))
        elif isinstance(item, int) and abs(item) > BOUNDS.get(key, LARGEST):
            raise ValueError(f"{key} is {item:,}; a model has at most {BOUNDS.get(key, LARGEST):,}")


def refuse_long_header(begin: bytes) -> None:
    """Raises ValueError for a safetensors file that begins so, with the length of its description of the tensors."""
    size = int.from_bytes(begin[:8], "little")
    if size > LARGEST_HEADER:
        raise ValueError(f"it describes its tensors in {size:,} bytes, at most {LARGEST_HEADER:,} are read")


def checked_shapes(path: Path) -> dict[str, tuple[list[int], torch.dtype | None]]:
    """The shape and the dtype (None: one of no model) of each tensor of a safetensors file, read from its header alone.

    Raises ValueError for a header of more than ``LARGEST_HEADER`` bytes, OSError or SafetensorError for a file that is
    damaged or of another kind.
    """
    refuse_special(path)
    with path.open("rb") as file:
        refuse_long_header(file.read(8))
    with safe_open(path, framework="pt") as tensors:
        described = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118  # it is no dictionary
        return {name: (tensor.get_shape(), DTYPES.get(tensor.get_dtype())) for name, tensor in described.items()}


def refuse_large_tokenizer(folder: Path) -> None:
    """Raises ValueError for a file of words, in a folder of a tokenizer, that is larger than any."""
    for file in sorted(folder.iterdir()):
        if file.suffix in (".json", ".txt", ".model") and file.stat().st_size > LARGEST_TOKENIZER:
            raise ValueError(f"{file.name} of the tokenizer has more than {LARGEST_TOKENIZER:,} bytes")


@contextmanager
def outlined(most: int) -> Iterator[None]:
    """Within it, modules have shapes and no memory. Raises ValueError as soon as they have ``most`` parameters."""
    made, here = itertools.count(1), get_ident()

    def count(*_: object) -> None:
        if get_ident() == here and next(made) > most:
            raise ValueError(f"it describes a model of more than {most} tensors, and the file of its weights has fewer")

    hook = register_module_parameter_registration_hook(count)
    try:
        with torch.device("meta"):
            yield
    finally:
        hook.remove()


def check_weights(folder: Path, build: Callable[[], nn.Module]) -> None:
    """Raises ValueError unless the tensors of model.safetensors fit the model that ``build`` makes.

    Names, shapes and kinds of dtype are compared; nothing of the model's size is made or read.
    """
    path = folder / WEIGHTS
    try:
        seen = checked_shapes(path)
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"{path}: unreadable or damaged weights ({error}); copy the folder again") from error
    try:
        with outlined(2 * len(seen) + SPARE):
            expected = build().state_dict()
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"{folder}/config.json: no model can be built of it ({error}); copy the folder again"
        ) from error
    shapes = []
    for name in [name for name in seen if name in expected]:
        (shape, dtype), wanted = seen[name], expected[name]
        same_kind = dtype is not None and dtype.is_floating_point == wanted.is_floating_point()
        if shape != list(wanted.shape) or not same_kind:
            shapes.append(f"{name}: {shape} {dtype}, expected {list(wanted.shape)} {wanted.dtype}")
    faults = {"missing": sorted(set(expected) - set(seen)), "unexpected": sorted(set(seen) - set(expected))}
    problems = [
        f"{len(names)} {fault} ({', '.join(names[:3])}{', ...' * (len(names) > 3)})"
        for fault, names in {**faults, "shape": shapes}.items()
        if names
    ]
    if problems:
        raise ValueError(f"{path}: does not fit config.json: {'; '.join(problems)}")
