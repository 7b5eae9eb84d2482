"""Saliency of an image-text pair: what each pixel adds to the cosine of the two, by captum.

A map says what the model looks at, and not whether it is right.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedvlp.core.checkpoint import save_bytes
from fedvlp.models.dual_encoder import DualEncoder
from fedvlp.models.use import BATCH, evaluating

SHARE = 6
"""The side of an image is so many times that of the square, where no other is asked for."""

STEPS = 128
"""Points between the even image and the image itself at which gradients are taken. A layer norm makes the model change
fast near an even image: on the shipped towers 32 points miss the difference of the cosines by a tenth, 128 by 1 %."""


@dataclass(frozen=True)
class Attribution:
    """An image and a phrase, and what of the image they owe their cosine to."""

    film: Tensor  # float32 [S, S] in -1..1, cropped as the model sees it; in colour: the mean of its channels
    cosine: float  # of the whole image and the phrase, -1..1
    added: Tensor  # float32 [S, S]: what the square about each pixel adds to the cosine, as ``by`` measures it
    square: int  # pixels, side of the squares
    by: str  # a key of ``MAPS``

    @property
    def peak(self) -> tuple[int, int]:
        """Row and column of the pixel about which the image speaks most for the phrase."""
        row, column = divmod(int(self.added.argmax()), self.added.shape[1])
        return row, column

    @property
    def sentence(self) -> str:
        """What the map is highest for, and where."""
        (row, column), side = self.peak, len(self.added)
        return (
            f"cosine {self.cosine:+.3f}; a square of {self.square} pixels adds most, {float(self.added.max()):.3f}, "
            f"{100 * row // side} % from the top and {100 * column // side} % from the left"
        )


def within(result: Attribution, mask: Tensor) -> str:
    """How much of the strongest tenth of the map lies within a bool mask [S, S], beside the mask's share of the image.

    A map that knows nothing of the mask has both alike.
    """
    strongest = result.added >= result.added.flatten().quantile(0.9)
    inside, area = float(mask[strongest].double().mean()), float(mask.double().mean())
    shares = f"{100 * inside:.0f} % lies within the mask, which is {100 * area:.0f} % of the image"
    return f"of the strongest tenth of the map {shares}"


def attribution(
    model: DualEncoder, film: Any, phrase: str, by: str = "occlusion", square: int | None = None
) -> Attribution:
    """The map of an image for a phrase. ``by``: a key of ``MAPS``. ``square``: pixels, default a sixth of the side.

    ``film`` and ``phrase`` as ``encode_image`` and ``encode_text`` take them. Raises ValueError as these do, for
    another ``by``, for a square that is not 2 pixels to the side of the image, and for a classifier, which compares no
    images with texts.
    """
    model.require_comparable("explain")
    if by not in MAPS:
        raise ValueError(f"explain: no map by {by!r}; there are: {', '.join(MAPS)}")
    side = model.config.image_size
    square = max(2, side // SHARE) if square is None else square
    if not 2 <= square <= side:
        raise ValueError(
            f"a square of {square} pixels; expected 2 to {side}, the side of the image as the model sees it"
        )
    prepared = (film if isinstance(film, Tensor) else model.preprocess(film)).to(model.device)  # [C, S, S]
    text = model.encode_text(phrase)

    def cosines(films: Tensor) -> Tensor:
        """[N, C, S, S] -> [N]. Unlike ``encode_image``, it can be differentiated."""
        return model({"image": films}).image @ text

    with evaluating(model):
        whole = float(cosines(prepared[None]).detach())
        added = MAPS[by](cosines, prepared[None], square)
    return Attribution(prepared.mean(0).cpu(), whole, added.detach().cpu(), square, by)


Cosines = Callable[[Tensor], Tensor]


def by_occlusion(cosines: Cosines, film: Tensor, square: int) -> Tensor:
    """[S, S]: by how much the cosine falls when a square that holds the pixel has the image's mean grey level, mean.

    Occlusion sensitivity (Zeiler and Fergus, 2014, https://arxiv.org/abs/1311.2901, section 4.2). Squares overlap by
    half. It asks the model as it is, so it serves every image tower.
    """
    from captum.attr import Occlusion

    window, stride = (film.shape[1], square, square), (film.shape[1], square // 2, square // 2)
    falls = Occlusion(cosines).attribute(film, window, stride, float(film.mean()), perturbations_per_eval=BATCH)
    return falls[0, 0]


def by_gradients(cosines: Cosines, film: Tensor, square: int) -> Tensor:
    """[S, S]: what the square about each pixel adds to the cosine, against an image of its mean grey level.

    Integrated gradients (Sundararajan et al., 2017, https://arxiv.org/abs/1703.01365, eq. 1): those of all pixels sum
    to the difference of the two images' cosines. They are summed over squares, as those of single pixels are speckles.
    """
    from captum.attr import IntegratedGradients

    of_pixels = IntegratedGradients(cosines).attribute(
        film, float(film.mean()), n_steps=STEPS, internal_batch_size=BATCH // 4
    )
    odd = square + 1 - square % 2  # so that a square has a middle
    sums = torch.nn.functional.avg_pool2d(of_pixels.sum(1, keepdim=True), odd, 1, odd // 2, divisor_override=1)
    return sums[0, 0].float()


MAPS: dict[str, Callable[[Cosines, Tensor, int], Tensor]] = {"occlusion": by_occlusion, "gradients": by_gradients}


def draw(result: Attribution, path: Path) -> None:
    """Writes ``drawn`` to a file. Raises CheckpointError for a full disk."""
    save_bytes(path, drawn(result))


def drawn(result: Attribution, masks: Iterable[Tensor] = ()) -> bytes:
    """The image beside the same image with the map and the outlines of ``masks``, bool [S, S], on it, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.3), layout="constrained")
    plain, mapped = figure.subplots(1, 2)
    limit = max(float(result.added.abs().max()), 1e-6)
    for axes in (plain, mapped):
        axes.imshow(result.film, cmap="gray", vmin=-1, vmax=1)
        axes.set_axis_off()
    colours = mapped.imshow(result.added, cmap="RdBu_r", vmin=-limit, vmax=limit, alpha=0.5)
    for mask in masks:
        mapped.contour(mask.float(), levels=[0.5], colors="black", linewidths=1)
    plain.set_title(f"cosine {result.cosine:+.3f}", fontsize=10)
    mapped.set_title("red: for the phrase, blue: against it", fontsize=10)
    figure.colorbar(colours, ax=mapped, label=f"what {result.square} x {result.square} pixels add")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160)
    return buffer.getvalue()
