"""Dice against MONAI and by hand, the losses by formula, a decoder that learns, a tower that does not change."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.probing import SIZE, cohort, model
from torch import Tensor, nn

from fedvlp.data.cohort import Cohort
from fedvlp.evaluation.segmentation import (
    Films,
    MapDecoder,
    Segmentation,
    Segmenter,
    TokenDecoder,
    augment,
    decoder_for,
    dice_scores,
    fit,
    loss_of,
    segmentation,
    write_segmentation,
)

SETTINGS = Segmentation(fractions=(1.0,), lr=5e-3, epochs=15, batch_size=8, resamples=50)


def squares(count: int = 60, absent: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """Films [N, 16, 16] with a bright square at a random place, and its mask; every ``absent``-th film has none."""
    rng = np.random.default_rng(1)
    pixels, masks = rng.integers(0, 80, (count, SIZE, SIZE)), np.zeros((count, SIZE, SIZE), bool)
    for row in range(count):
        if row % absent:
            y, x = rng.integers(0, 9, 2)
            masks[row, y : y + 8, x : x + 8] = True
    pixels[masks] += 150
    return pixels.astype(np.uint8), masks


def data(count: int = 60) -> Cohort:
    pixels, masks = squares(count)
    splits = ("train",) * (count // 2) + ("val",) * (count // 6) + ("test",) * (count - count // 2 - count // 6)
    return cohort(np.zeros((count, 0)), (), splits, pixels, lambda rows: {"square": masks[rows]})


def mask(*rows: str) -> Tensor:
    return torch.tensor([[[cell == "#" for cell in row] for row in rows]])


def test_dice_by_hand() -> None:
    """|P| = 2, |T| = 3, both: 1; perfect, complement, and what an empty truth gives."""
    truth, none = mask("##", "#."), mask("..", "..")
    assert dice_scores(mask(".#", ".#"), truth).tolist() == pytest.approx([100 * 2 / 5])
    assert dice_scores(truth, truth).tolist() == [100]
    assert dice_scores(~truth, truth).tolist() == [0]
    assert dice_scores(none, none).tolist() == [100]
    assert dice_scores(truth, none).tolist() == [0]
    assert dice_scores(none, truth).tolist() == [0]


def test_dice_is_monais_metric() -> None:
    from monai.metrics import DiceMetric

    predicted, truth = (torch.rand(2, 6, 9, 9, generator=torch.Generator().manual_seed(0)) > 0.6).unbind()
    metric = DiceMetric(ignore_empty=False)
    metric(predicted[:, None], truth[:, None])
    assert float(dice_scores(predicted, truth).mean()) == pytest.approx(100 * float(metric.aggregate()), abs=1e-4)


def test_the_loss_is_that_of_the_released_code() -> None:
    """10 mean((1 - p_t)^2 * -log p_t) - log((2 sum p t + 1) / (sum p + sum t + 1)), over the whole batch."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 1, 5, 5, generator=generator)
    truth = (torch.rand(3, 1, 5, 5, generator=generator) > 0.7).float()
    p = logits.sigmoid()
    right = torch.where(truth == 1, p, 1 - p)
    focal = ((1 - right) ** 2 * -right.log()).mean()
    dice = (2 * (p * truth).sum() + 1) / (p.sum() + truth.sum() + 1)
    assert float(loss_of(logits, truth)) == pytest.approx(float(10 * focal - dice.log()), rel=1e-5)


def test_a_decoder_learns_and_the_empty_films_are_counted() -> None:
    settings = replace(SETTINGS, structure="square")
    found = segmentation(settings, model(), data())
    (result,) = found.results
    test = [row % 4 for row in found.rows.test]
    assert result.empty == pytest.approx(100 * test.count(0) / len(test))
    assert result.positives.value > 70 > result.mean_mask.value + 10
    assert result.dice.low <= result.dice.value <= result.dice.high
    assert (result.records, len(found.rows.val)) == (30, 10)


def test_a_predictor_of_nothing_scores_the_share_of_empty_films(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Segmenter, "predict", lambda self, films: torch.zeros_like(films.mask))
    (result,) = segmentation(replace(SETTINGS, structure="square", epochs=1), model(), data()).results
    assert result.dice.value == pytest.approx(result.empty)
    assert result.positives.value == 0.0


def test_intervals_are_over_patients_and_not_their_films(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten test films each of two patients: of the one all are right, of the other none.

    A quarter of the resamples has the one patient twice, a quarter the other, so the interval of the mean mask is as
    wide as the two are apart, with the mean of both in its middle.
    """
    half = torch.arange(20)[:, None, None] < 10
    monkeypatch.setattr(Segmenter, "predict", lambda self, films: films.mask ^ ~half)
    films = data()
    films = replace(films, patients=(*films.patients[:40], *["one"] * 10, *["other"] * 10))
    (result,) = segmentation(replace(SETTINGS, structure="square", epochs=1), model(), films, 1).results
    for found in (result.dice, result.positives):
        assert (found.low, found.high) == (0, 100)
    mean = result.mean_mask
    assert mean.low < mean.value == pytest.approx((mean.low + mean.high) / 2, abs=1e-9)


def test_the_tower_is_frozen_in_eval_mode() -> None:
    """Also one with BatchNorm: the released code lets its statistics move."""
    probed = model().train()
    image = probed.image_encoder
    image.stem = nn.Sequential(image.stem, nn.BatchNorm2d(128))  # type: ignore[arg-type]
    before = {name: tensor.clone() for name, tensor in probed.state_dict().items()}
    segmentation(replace(SETTINGS, structure="square", epochs=2), probed, data())
    assert any("running_mean" in name for name in before)
    assert all(torch.equal(tensor, before[name]) for name, tensor in probed.state_dict().items())
    assert all(parameter.grad is None for parameter in probed.parameters())


def test_a_mask_is_cropped_like_its_film() -> None:
    """20 pixels of an image that is its own mask, for a model of 16: rows and columns 2 to 17."""
    image = torch.zeros(1, 20, 20, dtype=torch.uint8)
    image[0, 2, 17] = image[0, 10, 5] = 255
    seen, masks = Films(image, image > 0).batch(torch.tensor([0]), 16)
    assert torch.equal(seen > 0, masks == 1)
    assert masks[0, 0].nonzero().tolist() == [[0, 15], [8, 3]]


def test_augmentation_moves_film_and_mask_alike() -> None:
    films = Films(*(torch.from_numpy(one) for one in squares(40, 40)))
    images, masks = films.batch(torch.arange(1, 40), SIZE)
    image, moved = augment(images, masks, Segmentation(rotation=30, scale=0.2), torch.Generator().manual_seed(0))
    changed = (image - images).abs().flatten(1).amax(dim=1) > 1e-4
    assert 10 < int(changed.sum()) < 30
    assert torch.equal(moved[~changed], masks[~changed])
    inside = (image > 0.2).float()
    assert float((inside * moved).sum() / moved.sum()) > 0.85
    assert float(image.min()) >= -1.001
    still, _ = augment(images, masks, Segmentation(augmented=0.0), torch.Generator())
    assert torch.allclose(still, images, atol=1e-5)


def test_a_zoom_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything drawn as 1: zoomed in by 1 + 1, so a square of 2 x 2 in the middle becomes one of 4 x 4."""
    monkeypatch.setattr(torch, "rand", lambda *shape, generator: torch.ones(shape))
    masks = torch.zeros(1, 1, 8, 8)
    masks[..., 3:5, 3:5] = 1
    settings = Segmentation(augmented=1.1, rotation=0.0, scale=1.0)
    image, moved = augment(masks - 1, masks, settings, torch.Generator())
    assert int(moved.sum()) == int(moved[..., 2:6, 2:6].sum()) == 16
    assert float(image[..., :1].max()) == -1.0


@pytest.mark.parametrize(("width", "grid", "size"), [(768, 14, 224), (128, 8, 64), (128, 2, 16), (384, 16, 224)])
def test_decoders_of_tokens_double_until_the_image(width: int, grid: int, size: int) -> None:
    decoder = decoder_for([torch.zeros(1, width, grid, grid)], size)
    assert isinstance(decoder, TokenDecoder)
    convolutions = [layer.out_channels for layer in decoder.stages if isinstance(layer, nn.Conv2d)]
    assert len(convolutions) == math.ceil(math.log2(size / grid))
    if width == 768:
        assert convolutions == [512, 256, 128, 64]
    out = decoder.eval()([torch.zeros(1, width, grid, grid)])
    assert out.shape[-1] == grid * 2 ** len(convolutions) >= size


def test_decoders_of_maps_are_u_nets() -> None:
    maps = [torch.zeros(1, channels, side, side) for channels, side in ((8, 16), (16, 8), (32, 4))]
    decoder = decoder_for(maps, 32)
    assert isinstance(decoder, MapDecoder)
    assert decoder.eval()(maps).shape == (1, 1, 32, 32)


@pytest.mark.parametrize(("name", "maps"), [("resnet18", [64, 64, 128, 256, 512]), ("vit_tiny_patch16_224", [192])])
def test_towers_of_timm_give_their_maps(name: str, maps: list[int]) -> None:
    from fedvlp.models.image import timm_tower

    tower = timm_tower(name, 64, False).eval()
    with torch.no_grad():
        found = tower.maps(torch.zeros(2, 1, 64, 64))
    assert [one.shape[1] for one in found] == maps
    assert found[-1].shape[2] == 64 // (32 if len(maps) > 1 else 16)
    assert decoder_for(found, 64)(found).shape == (2, 1, 64, 64)


def test_the_best_epoch_is_taken_and_training_stops_after_patience() -> None:
    """Validation masks are the opposite of the training's: no later epoch is better, so the first is taken."""
    pixels, masks = squares(16)
    train = Films(torch.from_numpy(pixels), torch.from_numpy(masks))
    opposite = Films(train.image, ~train.mask)
    settings = replace(SETTINGS, patience=2, lr=1e-2)
    stopped, first = (fit(settings, model(), train, opposite, 0, steps) for steps in (None, 2))
    mine, theirs = stopped.decoder.state_dict(), first.decoder.state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())


def test_the_test_split_chooses_nothing_and_the_validation_split_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the opposite test masks every prediction is the same; with the opposite validation masks another epoch's."""
    pixels, masks = squares(48)
    splits = np.repeat(["train", "val", "test"], 16)
    predict, found = Segmenter.predict, list[Tensor]()
    monkeypatch.setattr(Segmenter, "predict", lambda self, films: (found.append(predict(self, films)), found[-1])[1])
    settings = replace(SETTINGS, structure="square", lr=1e-2, epochs=8, patience=8, seeds=(0,))
    for opposite in ("", "test", "val"):
        said = masks ^ (splits == opposite)[:, None, None]
        films = cohort(np.zeros((48, 0)), (), splits.tolist(), pixels, lambda rows, said=said: {"square": said[rows]})
        segmentation(settings, model(), films)
    plain, of_test, of_val = found
    assert torch.equal(plain, of_test)
    assert not torch.equal(plain, of_val)


def test_refuses_a_structure_without_masks() -> None:
    with pytest.raises(ValueError, match="no masks of 'lungs'; the data have square"):
        segmentation(SETTINGS, model(), data())
    with pytest.raises(ValueError, match="the data have none"):
        segmentation(SETTINGS, model(), replace(data(), masks=None))
    with pytest.raises(ValueError, match="no seeds"):
        replace(SETTINGS, seeds=())
    with pytest.raises(ValueError, match="segmentation: batch_size is 0; expected at least 1"):
        replace(SETTINGS, batch_size=0)


def test_files(tmp_path: Path) -> None:
    found = segmentation(replace(SETTINGS, structure="square", epochs=1), model(), data())
    (row,) = csv.DictReader(write_segmentation(found, tmp_path / "s")[0].open())
    assert float(row["dice"]) == found.results[0].dice.value
    assert (row["train_on"], row["train_records"], row["test_records"]) == ("100 %", "30", "20")
