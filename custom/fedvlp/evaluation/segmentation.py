"""Segmentation on a frozen image tower (spec 10.3, after MGCA, https://arxiv.org/abs/2210.06044): Dice of a decoder.

A tower that gives one grid of tokens (ViT, the tiny tower) gets SETR's progressive upsampling (Zheng et al., 2021,
https://arxiv.org/abs/2012.15840), one that gives maps at several scales (ResNet, Swin) MONAI's U-Net decoder.
Differs: the released code lets the BatchNorm statistics of a frozen ResNet move; here the tower is in eval mode. Its
Dice is a mean over batches, of which the last is smaller; here over images.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedvlp.core.seeds import seed as seed_of
from fedvlp.core.seeds import seeded
from fedvlp.data.cohort import Cohort
from fedvlp.data.loader import eval_batch
from fedvlp.evaluation.downstream import Records, Subset, records, refuse_schedule, subsets, train_head
from fedvlp.evaluation.intervals import Interval, bootstrap, macro, mean_of
from fedvlp.evaluation.output import columns_of, write_table

MODULE = 9  # number of the decoder's random stream (core/seeds.py)
FOCAL = 10.0  # weight of the focal loss
WIDEST, NARROWEST = 512, 16  # channels of the decoders


@dataclass(frozen=True)
class Segmentation:
    """The protocol. Raises ValueError for a share that cannot be, no seed, or a schedule that trains nothing."""

    structure: str = "lungs"  # name of a mask of the data
    fractions: tuple[float, ...] = (0.01, 0.1)  # of the training records
    seeds: tuple[int, ...] = (42,)  # of the subset and the decoder; figures are means over them
    lr: float = 5e-4  # of AdamW
    weight_decay: float = 0.05  # of AdamW
    batch_size: int = 16
    epochs: int = 50  # at most
    patience: int = 10  # training stops after so many epochs without a lower validation loss
    scale: float = 0.1  # augmentation: zoom, at most so much in or out
    rotation: float = 10.0  # augmentation: degrees, at most so many to either side
    augmented: float = 0.5  # share of the images that are augmented
    resamples: int = 1000  # of the test patients, for the intervals; 0: none

    def __post_init__(self) -> None:
        self.subsets()
        if not self.seeds:
            raise ValueError("segmentation: no seeds; expected at least one")
        refuse_schedule(self, self.resamples, "segmentation")

    def subsets(self) -> tuple[Subset, ...]:
        """What the decoders are trained on. Raises ValueError for shares that cannot be."""
        return subsets(self.fractions, (), "segmentation")


class TokenDecoder(nn.Module):
    """SETR-PUP: a linear layer on each token, then conv 3x3, BN, ReLU and bilinear x2 until the image's size.

    Channels halve from 512, as in the paper; on towers narrower than that, from half of their width.
    """

    def __init__(self, width: int, doublings: int) -> None:
        super().__init__()
        first = WIDEST if width >= WIDEST else width // 2
        channels = [max(NARROWEST, first >> index) for index in range(doublings)]
        self.token = nn.Conv2d(width, width, 1)
        stages: list[nn.Module] = []
        for before, after in zip([width, *channels], channels, strict=False):
            stages += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
            stages += [nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)]
        self.stages = nn.Sequential(*stages)
        self.out = nn.Conv2d([width, *channels][-1], 1, 3, padding=1)

    def forward(self, maps: list[Tensor]) -> Tensor:
        """Logits [B, 1, H, W] of one map [B, C, h, w]."""
        return self.out(self.stages(self.token(maps[0])))


class MapDecoder(nn.Module):
    """A U-Net's decoder over maps of falling size, from MONAI."""

    def __init__(self, channels: Sequence[int]) -> None:
        super().__init__()
        from monai.networks.nets.flexible_unet import UNetDecoder

        widths = [max(NARROWEST, 256 >> index) for index in range(len(channels))]
        self.up = UNetDecoder(
            2,
            (1, *channels),
            widths,
            act=("relu", {"inplace": True}),
            norm="batch",
            dropout=0.0,
            bias=False,
            upsample="nontrainable",
            pre_conv="default",
            interp_mode="nearest",
            align_corners=None,
            is_pad=True,
        )
        self.out = nn.Conv2d(widths[-1], 1, 3, padding=1)

    def forward(self, maps: list[Tensor]) -> Tensor:
        """Logits [B, 1, H, W] of maps [B, C, h, w] from fine to coarse."""
        return self.out(self.up(maps, skip_connect=len(maps) - 1))


def decoder_for(maps: Sequence[Tensor], size: int) -> nn.Module:
    """The decoder of a tower that gives such ``maps`` of images of ``size`` pixels."""
    if len(maps) > 1:
        return MapDecoder([one.shape[1] for one in maps])
    return TokenDecoder(maps[0].shape[1], max(1, math.ceil(math.log2(size / maps[0].shape[2]))))


def loss_of(logits: Tensor, masks: Tensor) -> Tensor:
    """10 focal (gamma 2) - log of the soft Dice of the batch (smoothing 1), of logits and masks [B, 1, S, S]."""
    from monai.losses import DiceLoss, FocalLoss

    focal = FocalLoss(gamma=2.0)(logits, masks)
    dice = 1 - DiceLoss(sigmoid=True, batch=True, smooth_nr=1.0, smooth_dr=1.0)(logits, masks)
    return FOCAL * focal - dice.log()


def dice_scores(predicted: Tensor, truth: Tensor) -> Tensor:
    """Dice [N] in percent of bool [N, S, S]; 100 where both are empty, 0 where only the truth is."""
    from monai.metrics import compute_dice

    pair = (mask[:, None].double() for mask in (predicted, truth))
    return 100 * compute_dice(*pair, ignore_empty=False)[:, 0]


def augment(images: Tensor, masks: Tensor, settings: Segmentation, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images [B, 1, S, S] in -1..1 and masks [B, 1, S, S], a share of them turned and zoomed about the centre.

    What comes in from outside is black and in no mask.
    """
    count = len(images)
    chance, turn, zoom = torch.rand(3, count, generator=generator).unbind()
    moved = chance < settings.augmented
    angle = torch.where(moved, math.radians(settings.rotation) * (2 * turn - 1), 0.0)
    factor = torch.where(moved, 1 + settings.scale * (2 * zoom - 1), 1.0)
    cosine, sine, nothing = angle.cos() / factor, angle.sin() / factor, torch.zeros(count)
    rows = torch.stack([cosine, -sine, nothing, sine, cosine, nothing], dim=1).view(count, 2, 3)
    grid = F.affine_grid(rows, list(images.shape), align_corners=False).to(images.device)
    both = torch.cat([images + 1, masks], dim=1)  # black is 0
    image, mask = F.grid_sample(both, grid, align_corners=False).split(1, dim=1)
    return image - 1, (mask >= 0.5).to(masks.dtype)


@dataclass(frozen=True, eq=False)
class Films:
    """Images and masks of some rows, as they are read."""

    image: Tensor  # uint8 [n, S, S]
    mask: Tensor  # bool [n, S, S]

    @classmethod
    def read(cls, cohort: Cohort, rows: np.ndarray, structure: str) -> Films:
        """Raises ValueError where the data have no masks of the structure."""
        masks = {} if cohort.masks is None else cohort.masks(rows)
        if structure not in masks:
            raise ValueError(
                f"segmentation: no masks of {structure!r}; the data have {', '.join(masks) or 'none'}. Choose one with "
                "segmentation.structure, or name a table's columns with data.mask_columns"
            )
        image = np.ascontiguousarray(cohort.images(rows))
        return cls(torch.from_numpy(image), torch.from_numpy(np.ascontiguousarray(masks[structure])))

    def batch(self, rows: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Images and masks [b, 1, size, size] float32, cropped at the centre."""
        start = (self.mask.shape[1] - size) // 2
        crop = self.mask[rows, start : start + size, start : start + size]
        return eval_batch(self.image[rows], size), crop[:, None].float()

    def batches(self, count: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All, ``count`` at a time."""
        for rows in torch.arange(len(self.image)).split(count):
            yield self.batch(rows, size)


class Segmenter:
    """A frozen image tower with a decoder on its device."""

    def __init__(self, model: Any, seed: int) -> None:
        """``model``: a DualEncoder, which is set to eval mode and never changed."""
        self.tower, self.size = model.eval().image_encoder, int(model.config.image_size)
        self.device = next(model.parameters()).device
        maps = self.maps(torch.zeros(1, 1, self.size, self.size))
        self.decoder: nn.Module = seeded(seed, MODULE, lambda: decoder_for(maps, self.size)).to(self.device)

    @torch.no_grad()
    def maps(self, images: Tensor) -> list[Tensor]:
        """The tower's feature maps."""
        maps: list[Tensor] = self.tower.maps(images.to(self.device))
        return maps

    def __call__(self, images: Tensor) -> Tensor:
        """Logits [B, 1, S, S] of images [B, 1, S, S]."""
        logits = self.decoder(self.maps(images))
        if logits.shape[-1] != self.size:
            logits = F.interpolate(logits, (self.size, self.size), mode="bilinear", align_corners=False)
        return logits

    @torch.no_grad()
    def loss(self, films: Films, batch_size: int) -> float:
        """Mean loss over batches, in eval mode."""
        self.decoder.eval()
        return fmean(
            float(loss_of(self(images), masks.to(self.device)))
            for images, masks in films.batches(batch_size, self.size)
        )

    @torch.no_grad()
    def predict(self, films: Films, batch_size: int = 64) -> Tensor:
        """Bool [n, S, S] where the probability is at least 0.5."""
        self.decoder.eval()
        return torch.cat([(self(images) >= 0).cpu()[:, 0] for images, _ in films.batches(batch_size, self.size)])


def fit(settings: Segmentation, model: Any, train: Films, val: Films, seed: int, steps: int | None = None) -> Segmenter:
    """A decoder of the epoch with the least validation loss. ``steps``: of the optimiser at most."""
    segmenter = Segmenter(model, seed)
    generator = torch.Generator().manual_seed(seed_of(seed, "segmentation"))

    def loss(rows: Tensor) -> Tensor:
        images, masks = augment(*train.batch(rows, segmenter.size), settings, generator)
        return loss_of(segmenter(images), masks.to(segmenter.device))

    def held_out() -> float:
        return segmenter.loss(val, settings.batch_size)

    train_head(segmenter.decoder, settings, len(train.image), loss, held_out, generator, steps)
    return segmenter


@dataclass(frozen=True)
class DiceResult:
    """The decoders of one subset size on the test images; figures in percent, means over the seeds."""

    subset: str
    records: int  # that a decoder was trained on
    dice: Interval  # over all images
    dice_std: float  # population standard deviation over the seeds
    positives: Interval  # over images with the structure; nan where none has it
    empty: float  # share of test images without it, which is the Dice of a predictor that finds nothing
    mean_mask: Interval  # Dice of the training split's mean mask at 0.5, whatever the image


@dataclass(frozen=True, eq=False)
class Segmented:
    """All that a segmentation found."""

    rows: Records
    patients: tuple[str, ...]  # of the test records
    results: list[DiceResult]


def segmentation(settings: Segmentation, model: Any, cohort: Cohort, steps: int | None = None) -> Segmented:
    """Trains decoders on the frozen image tower of ``model``, a DualEncoder, and judges them on the test images.

    Raises ValueError where the data have no masks of the structure, or a split no images.
    """
    rows = records(cohort)
    train, val, test = (Films.read(cohort, chosen, settings.structure) for chosen in (rows.train, rows.val, rows.test))
    size = int(model.config.image_size)
    truth, everywhere = (
        torch.cat([masks[:, 0] for _, masks in films.batches(64, size)]).bool() for films in (test, train)
    )
    patients = tuple(cohort.patients[row] for row in rows.test)
    positive = truth.flatten(1).any(dim=1)  # [N]
    mean = (everywhere.double().mean(dim=0) >= 0.5).expand(len(truth), -1, -1)
    mean_mask = bootstrap(mean_of(dice_scores(mean, truth)), patients, settings.resamples)
    results = []
    for subset in settings.subsets():
        scores, counts = [], []
        for seed in settings.seeds:
            chosen = subset.draw(train.mask.flatten(1).any(dim=1)[:, None], seed)
            drawn = Films(train.image[chosen], train.mask[chosen])
            scores.append(dice_scores(fit(settings, model, drawn, val, seed, steps).predict(test), truth))
            counts.append(len(chosen))
        every, positives = (macro([mean_of(one, weight) for one in scores]) for weight in (None, positive))
        results.append(
            DiceResult(
                str(subset),
                round(fmean(counts)),
                bootstrap(every, patients, settings.resamples),
                pstdev(float(one.mean()) for one in scores),
                bootstrap(positives, patients, settings.resamples),
                100 * float((~positive).double().mean()),
                mean_mask,
            )
        )
    return Segmented(rows, patients, results)


def write_segmentation(segmented: Segmented, path: Path) -> list[Path]:
    """Writes ``<path>.csv``."""
    lines = [
        {
            "train_on": one.subset,
            "train_records": one.records,
            **columns_of(one.dice, "dice", "dice_"),
            "dice_std": one.dice_std,
            **columns_of(one.positives, "dice_positives", "dice_positives_"),
            "empty_share": one.empty,
            **columns_of(one.mean_mask, "mean_mask_dice", "mean_mask_"),
            **segmented.rows.counts(segmented.patients),
        }
        for one in segmented.results
    ]
    return [write_table(path, lines)]
