"""Both maps of a film are highest where the model looks, and their values are differences of cosines."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from fedvlp.evaluation.attribution import MAPS, attribution, draw
from fedvlp.models import DualEncoder, ModelConfig

SIDE = 24
SIZES = {"embedding_dim": 8, "image_size": SIDE, "max_tokens": 8, "vocabulary": 64, "head_hidden": 16, "text_layers": 1}


class Corner(nn.Module):
    """An image tower for which films whose upper left corner is bright lie near a text, and others do not."""

    def __init__(self, text: Tensor) -> None:
        super().__init__()
        other = torch.linspace(1, 2, len(text))
        self.text, self.other = text, other - (other @ text) * text

    def forward(self, films: Tensor) -> Tensor:
        bright = films[:, :, :8, :8].mean(dim=(1, 2, 3))[:, None]
        return (bright * self.text + self.other)[:, None]  # one token a film, [N, 1, d]


@pytest.fixture
def model() -> DualEncoder:
    """In training mode, as a model is that still learns."""
    return ModelConfig(**SIZES).build(0).train()


@pytest.fixture
def cornered(model: DualEncoder) -> DualEncoder:
    """A model whose cosine with "bright corner" depends on one corner of the image alone."""
    looks = Corner(model.encode_text("bright corner"))
    model.image_encoder, model.image_alignment, model.image_head = looks, nn.Identity(), nn.Identity()
    return model


def film() -> Tensor:
    """Dark, but for its upper left corner: float32 [1, S, S]."""
    pixels = torch.full((1, SIDE, SIDE), -0.5)
    pixels[:, :8, :8] = 1.0
    return pixels


def cosine(model: DualEncoder, pixels: Tensor, phrase: str) -> float:
    return float(model.encode_image(pixels) @ model.encode_text(phrase))


@pytest.mark.parametrize("by", MAPS)
def test_it_is_highest_where_the_model_looks(by: str, cornered: DualEncoder) -> None:
    found = attribution(cornered, film(), "bright corner", by, 8)
    row, column = found.peak
    assert row < 8
    assert column < 8
    assert found.added.shape == found.film.shape == (SIDE, SIDE)
    assert found.added[16:, :].abs().max() < 1e-6, "squares that do not reach the corner change nothing"
    assert found.added[:, 16:].abs().max() < 1e-6
    assert found.cosine == pytest.approx(cosine(cornered, film(), "bright corner"), abs=1e-6)
    assert cornered.training, "the model's mode is as it was"


@pytest.mark.parametrize("by", MAPS)
def test_all_pixels_add_what_the_film_has_and_an_even_one_has_not(by: str, model: DualEncoder) -> None:
    """A square about the middle as large as the film holds all of it. In the shipped model, not a linear one."""
    pixels = torch.rand(1, SIDE, SIDE, generator=torch.Generator().manual_seed(0)) * 2 - 1
    even = torch.full_like(pixels, float(pixels.mean()))
    expected = cosine(model, pixels, "left effusion") - cosine(model, even, "left effusion")
    found = attribution(model, pixels, "left effusion", by, SIDE)
    assert abs(expected) > 1e-3
    assert float(found.added[SIDE // 2, SIDE // 2]) == pytest.approx(expected, rel=0.02)


def test_occlusion_is_the_mean_over_the_squares_that_hold_a_pixel(cornered: DualEncoder) -> None:
    """Squares of 16 pixels at rows and columns 0 and 8: a corner's pixel lies in one, the middle in all four."""
    pixels = film()
    whole = cosine(cornered, pixels, "bright corner")
    falls = {}
    for row in (0, 8):
        for column in (0, 8):
            covered = pixels.clone()
            covered[:, row : row + 16, column : column + 16] = pixels.mean()
            falls[row, column] = whole - cosine(cornered, covered, "bright corner")
    found = attribution(cornered, pixels, "bright corner", "occlusion", 16)
    assert float(found.added[0, 0]) == pytest.approx(falls[0, 0], abs=1e-6)
    assert float(found.added[12, 12]) == pytest.approx(sum(falls.values()) / 4, abs=1e-6)
    assert falls[0, 0] > 0.1


def test_another_square_is_refused(model: DualEncoder) -> None:
    for square in [0, 1, SIDE + 1]:
        with pytest.raises(ValueError, match=f"a square of {square} pixels; expected 2 to {SIDE}"):
            attribution(model, film(), "bright corner", square=square)


def test_a_film_in_colour_is_shown_as_the_mean_of_its_channels() -> None:
    """It was the red channel alone, in which what is green or blue is black."""
    model = ModelConfig(**SIZES, in_channels=3).build(0)
    pixels = torch.rand(3, SIDE, SIDE, generator=torch.Generator().manual_seed(0)) * 2 - 1
    shown = attribution(model, pixels, "left effusion").film
    assert torch.allclose(shown, (pixels[0] + pixels[1] + pixels[2]) / 3, atol=1e-6)
    grey = film()
    assert torch.equal(attribution(ModelConfig(**SIZES).build(0), grey, "left effusion").film, grey[0])


@pytest.mark.parametrize("by", MAPS)
def test_the_picture_shows_the_corner_in_red(by: str, cornered: DualEncoder, tmp_path: Path) -> None:
    draw(attribution(cornered, film(), "bright corner", by, 8), tmp_path / "map.png")
    picture = np.asarray(Image.open(tmp_path / "map.png").convert("RGB")).astype(int)
    red = (picture[..., 0] - picture[..., 2]) > 60
    rows, columns = np.nonzero(red[:, : picture.shape[1] * 4 // 5])  # without the scale of colours
    assert len(rows) > 100
    assert columns.min() > picture.shape[1] * 0.4, "in the second picture alone"
    assert rows.mean() < picture.shape[0] / 2
