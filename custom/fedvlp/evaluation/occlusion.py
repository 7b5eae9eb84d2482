"""What in a film speaks for a phrase: by how much their cosine falls when a square of the film is covered.

Occlusion sensitivity (Zeiler and Fergus, 2014, https://arxiv.org/abs/1311.2901, section 4.2). It asks the model
as it is, so it serves every image tower. It says what the model looks at, and not whether it is right.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedvlp.core.checkpoint import save_bytes
from fedvlp.models.dual_encoder import DualEncoder

SHARE = 6
"""The side of a film is so many times that of the square, where no other is asked for."""


@dataclass(frozen=True)
class Occlusion:
    """A film and a phrase, and what of the film they owe their cosine to."""

    film: Tensor  # float32 [S, S] in -1..1, as the model sees it
    cosine: float  # of the whole film and the phrase, -1..1
    falls: Tensor  # float32 [S, S]: by how much the cosine falls when squares that hold the pixel are covered, mean
    square: int  # pixels, side of the squares

    @property
    def peak(self) -> tuple[int, int]:
        """Row and column of the pixel where it falls most."""
        row, column = divmod(int(self.falls.argmax()), self.falls.shape[1])
        return row, column


@torch.no_grad()
def occlusion(model: DualEncoder, film: Any, phrase: str, square: int | None = None) -> Occlusion:
    """Covers square after square of a film with its mean grey level. ``square``: pixels, default a sixth of the side.

    ``film`` and ``phrase`` as ``encode_image`` and ``encode_text`` take them. Raises ValueError as these do, and for a
    square that is not 2 pixels to the side of the film, and for a classifier, which compares no films with texts.
    """
    if not model.contrastive:
        raise ValueError(
            f"explain: a {type(model).__name__} compares no films with texts; give a model that was trained by a "
            "contrastive objective, a DualEncoder"
        )
    side = model.config.image_size
    square = max(2, side // SHARE) if square is None else square
    if not 2 <= square <= side:
        raise ValueError(
            f"a square of {square} pixels; expected 2 to {side}, the side of the film as the model sees it"
        )
    prepared = film if isinstance(film, Tensor) else model.preprocess(film)
    text = model.encode_text(phrase).cpu()
    edges = sorted({*range(0, side - square, square // 2), side - square})  # of neighbours, half lies in both
    windows = [(slice(row, row + square), slice(column, column + square)) for row in edges for column in edges]
    covered = prepared.repeat(len(windows), 1, 1, 1)
    for one, (rows, columns) in zip(covered, windows, strict=True):
        one[:, rows, columns] = prepared.mean()
    films = torch.cat([prepared[None], covered]).to(model.device)
    whole, *without = (model.encode_image(films).cpu() @ text).tolist()
    falls, squares = torch.zeros(side, side), torch.zeros(side, side)
    for (rows, columns), cosine in zip(windows, without, strict=True):
        falls[rows, columns] += whole - cosine
        squares[rows, columns] += 1
    return Occlusion(prepared[0].cpu(), whole, falls / squares, square)


def draw(result: Occlusion, path: Path) -> None:
    """Writes ``drawn`` to a file. Raises CheckpointError for a full disk."""
    save_bytes(path, drawn(result))


def drawn(result: Occlusion) -> bytes:
    """The film beside the same film with the map on it, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.2), layout="constrained")
    plain, mapped = figure.subplots(1, 2)
    limit = max(float(result.falls.abs().max()), 1e-6)
    for axes in (plain, mapped):
        axes.imshow(result.film, cmap="gray", vmin=-1, vmax=1)
        axes.set_axis_off()
    colours = mapped.imshow(result.falls, cmap="RdBu_r", vmin=-limit, vmax=limit, alpha=0.5)
    plain.set_title(f"cosine {result.cosine:+.3f}")
    mapped.set_title("red speaks for the phrase, blue against it")
    figure.colorbar(
        colours, ax=mapped, label=f"fall of the cosine when {result.square} x {result.square} pixels are covered"
    )
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()
