"""The map of a film's occlusions is highest where the model looks, and its values are differences of cosines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from fedvlp.evaluation.occlusion import draw, occlusion
from fedvlp.models import DualEncoder, ModelConfig

SIDE = 24
SIZES = {"embedding_dim": 8, "image_size": SIDE, "max_tokens": 8, "vocabulary": 64, "head_hidden": 16, "text_layers": 1}


class Corner(nn.Module):
    """In the place of an image tower: films whose upper left corner is bright lie near ``text``, others do not."""

    def __init__(self, text: Tensor) -> None:
        super().__init__()
        other = torch.linspace(1, 2, len(text))
        self.text, self.other = text, other - (other @ text) * text

    def forward(self, films: Tensor) -> Tensor:
        bright = films[:, :, :8, :8].mean(dim=(1, 2, 3))[:, None]
        return nn.functional.normalize(bright * self.text + self.other, dim=1)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> DualEncoder:
    """In training mode; its cosine with "bright corner" depends on one corner of the film alone."""
    built = ModelConfig(**SIZES).build(0).train()
    looks = Corner(built.encode_text("bright corner"))
    monkeypatch.setattr(DualEncoder, "encode_image", lambda self, films: looks(films))
    monkeypatch.setattr(DualEncoder, "preprocess", lambda self, film: film)
    return built


def film() -> Tensor:
    """Dark, but for its upper left corner: float32 [1, S, S]."""
    pixels = torch.full((1, SIDE, SIDE), -0.5)
    pixels[:, :8, :8] = 1.0
    return pixels


def test_it_is_highest_where_the_model_looks(model: DualEncoder) -> None:
    found = occlusion(model, film(), "bright corner", 8)
    row, column = found.peak
    assert row < 8
    assert column < 8
    assert found.falls.shape == found.film.shape == (SIDE, SIDE)
    assert found.falls[12:, :].abs().max() < 1e-6, "squares that do not reach the corner change nothing"
    assert model.training, "the model's mode is as it was"


def test_a_pixel_of_one_square_has_the_difference_of_the_two_cosines(model: DualEncoder) -> None:
    """A square as large as the film: one occlusion, which leaves the mean grey level everywhere."""
    pixels = film()
    looks: Any = model.encode_image
    text = model.encode_text("bright corner")
    covered = torch.full_like(pixels, float(pixels.mean()))
    expected = float(((looks(pixels[None]) - looks(covered[None])) @ text)[0])
    found = occlusion(model, pixels, "bright corner", SIDE)
    torch.testing.assert_close(found.falls, torch.full((SIDE, SIDE), expected))
    assert found.cosine == pytest.approx(float((looks(pixels[None]) @ text)[0]))


@pytest.mark.parametrize("square", [0, 1, SIDE + 1])
def test_another_square_is_refused(square: int, model: DualEncoder) -> None:
    with pytest.raises(ValueError, match=f"a square of {square} pixels; expected 2 to {SIDE}"):
        occlusion(model, film(), "bright corner", square)


def test_the_picture_shows_the_corner_in_red(model: DualEncoder, tmp_path: Path) -> None:
    draw(occlusion(model, film(), "bright corner", 8), tmp_path / "map.png")
    picture = np.asarray(Image.open(tmp_path / "map.png").convert("RGB")).astype(int)
    red = (picture[..., 0] - picture[..., 2]) > 60
    rows, columns = np.nonzero(red[:, : picture.shape[1] * 4 // 5])  # without the scale of colours
    assert len(rows) > 100
    assert columns.min() > picture.shape[1] * 0.4, "in the second picture alone"
    assert rows.mean() < picture.shape[0] / 2
