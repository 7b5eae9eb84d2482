"""What evaluations that train a head on an encoder share: splits without leaks, features, subsets, training."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from fedvlp.core.seeds import seed as seed_of
from fedvlp.data.cohort import SPLITS, Cohort, digest
from fedvlp.data.loader import eval_batch

TRAIN, VAL, TEST = SPLITS
VAL_SHARE = 0.2
"""Of the training patients, who become the validation split of data that have none (COVIDx's protocol)."""


@dataclass(frozen=True, eq=False)
class Records:
    """Rows of a cohort by split, none of a test image among those that are trained on."""

    train: np.ndarray  # [n] int64
    val: np.ndarray  # rows that choose when training stops
    test: np.ndarray
    left_out: int  # training and validation rows with the very pixels of a test row

    def counts(self, patients: Sequence[str]) -> dict[str, int]:
        """A result table's columns on how many records it stands; ``patients``: of the test records."""
        return {
            "test_records": len(self.test),
            "test_patients": len(set(patients)),
            "val_records": len(self.val),
            "left_out_as_test_pixels": self.left_out,
        }


def records(cohort: Cohort, usable: np.ndarray | None = None, seed: int = 0) -> Records:
    """The rows with an image (and ``usable`` [N] bool) of each split.

    Data without a validation split get one: a fifth of the training patients. The cohort has no patient in two splits;
    the same image under two names is found by its pixels, and left out of training. Raises ValueError where a split
    has no row then.
    """
    allowed = cohort.has_image() if usable is None else cohort.has_image() & usable
    rows = {split: chosen[allowed[chosen]] for split in SPLITS for chosen in [cohort.rows(split)]}
    if not len(rows[VAL]):
        rows[TRAIN], rows[VAL] = _parted(cohort, rows[TRAIN], seed)
    tested = set(_pixels(cohort, rows[TEST]))
    seen = {split: np.array([name in tested for name in _pixels(cohort, rows[split])], bool) for split in (TRAIN, VAL)}
    train, val = (rows[split][~seen[split]] for split in (TRAIN, VAL))
    counts = {TRAIN: len(train), VAL: len(val), TEST: len(rows[TEST])}
    if not all(counts.values()):
        raise ValueError(
            f"downstream: {', '.join(f'{name} {count}' for name, count in counts.items())} labelled images; expected "
            "some in each split. Let a table's splits be drawn by patient (data.split_column=), or choose other data"
        )
    return Records(train, val, rows[TEST], int(seen[TRAIN].sum() + seen[VAL].sum()))


def _parted(cohort: Cohort, rows: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The training rows and those of ``VAL_SHARE`` of their patients, at least one."""
    patients = np.asarray(cohort.patients)[rows]
    people = sorted(set(patients.tolist()))
    order = np.random.default_rng([seed, 2]).permutation(people)
    chosen = np.isin(patients, order[: max(1, round(VAL_SHARE * len(people)))])
    return rows[~chosen], rows[chosen]


def _pixels(cohort: Cohort, rows: np.ndarray) -> Iterator[str]:
    """A hash of each row's pixels."""
    for chunk in _chunks(rows, 256):
        for image in cohort.images(chunk):
            yield digest(np.ascontiguousarray(image).tobytes())


def _chunks(rows: np.ndarray, size: int) -> Iterator[np.ndarray]:
    yield from (rows[start : start + size] for start in range(0, len(rows), size))


def never_said(cohort: Cohort) -> np.ndarray:
    """[N, L] bool: labels that no record of the row's site has, as those of another data set that was joined.

    A blank label is one that a report does not mention, which may count as absent. Where nobody was asked for it, it
    would make every image of that site a negative one: a score that knows only the site would seem to know the finding.
    """
    blank, sites = np.isnan(cohort.labels), np.asarray(cohort.sites or [""] * len(cohort))
    never = np.zeros_like(blank)
    for site in np.unique(sites):
        rows = np.flatnonzero(sites == site)
        never[rows] = blank[rows].all(axis=0)
    return never


def images(cohort: Cohort, rows: np.ndarray, size: int, batch_size: int = 64) -> Iterator[Tensor]:
    """Batches [b, C, size, size] of the images of ``rows`` in order, cropped at the centre."""
    for chunk in _chunks(rows, batch_size):
        yield eval_batch(torch.from_numpy(np.ascontiguousarray(cohort.images(chunk))), size)


@torch.no_grad()
def features(model: Any, cohort: Cohort, rows: np.ndarray, aligned: bool = False) -> Tensor:
    """The frozen image tower's summary token of each row, [N, W] float32 on the CPU. Sets the model to eval mode.

    ``aligned`` takes it after the alignment block. Neither way is it projected.
    """
    model.eval()
    batches = images(cohort, rows, model.config.image_size)
    return torch.cat([image_feature(model, batch, aligned) for batch in batches]).float().cpu()


def image_feature(model: Any, images: Tensor, aligned: bool = False) -> Tensor:
    """The image tower's summary token of prepared ``images`` [B, C, S, S], [B, W], in the model's mode."""
    encoded = model.encode({"image": images})
    feature: Tensor = model.align(encoded).image if aligned else encoded.image[:, 0]
    return feature


class HeadSchedule(Protocol):
    """The settings of a protocol that trains heads."""

    @property
    def lr(self) -> float:
        """Of AdamW."""

    @property
    def weight_decay(self) -> float:
        """Of AdamW."""

    @property
    def batch_size(self) -> int:
        """Rows a step."""

    @property
    def epochs(self) -> int:
        """At most."""

    @property
    def patience(self) -> int:
        """Training stops after so many epochs without a lower validation loss."""


def refuse_schedule(settings: HeadSchedule, resamples: int, who: str) -> None:
    """Raises ValueError for settings by which no head is trained, or ``resamples`` that make no interval."""
    for name in ("batch_size", "epochs", "patience"):
        if getattr(settings, name) < 1:
            raise ValueError(f"{who}: {name} is {getattr(settings, name)}; expected at least 1")
    if not 0 < settings.lr < math.inf:
        raise ValueError(f"{who}: lr is {settings.lr}; expected more than 0, and finite")
    if resamples < 0 or resamples == 1:
        raise ValueError(f"{who}: resamples is {resamples}; expected at least 2, or 0 for no intervals")


def refuse_repeated(names: Sequence[str], who: str) -> None:
    """Raises ValueError for a class that is named twice: no score can tell it from itself."""
    repeated = dict.fromkeys(name for name in names if list(names).count(name) > 1)
    if repeated:
        raise ValueError(f"{who}: classes {', '.join(repeated)} named twice; name each once")


def train_head(
    head: nn.Module,
    settings: HeadSchedule,
    count: int,
    loss: Callable[[Tensor], Tensor],
    held_out: Callable[[], float],
    generator: torch.Generator,
    steps: int | None,
    groups: Iterable[dict[str, Any]] | None = None,
) -> None:
    """Trains ``head`` by AdamW; it is then as after the epoch with the least ``held_out``, the validation loss.

    ``loss`` is that of some of the ``count`` training rows, positions [b] int64; their order comes from ``generator``.
    ``steps``: of the optimiser at most; None: as many as the protocol takes. ``groups`` of parameters, as AdamW takes
    them, where not all of ``head`` trains at one rate.
    """
    trained = head.parameters() if groups is None else groups
    optimizer = torch.optim.AdamW(trained, lr=settings.lr, weight_decay=settings.weight_decay)
    best: dict[str, Tensor] = {}
    least, waited, taken = math.inf, 0, 0
    for _ in range(settings.epochs):
        head.train()
        for rows in torch.randperm(count, generator=generator).split(settings.batch_size):
            if taken == steps:
                break
            optimizer.zero_grad()
            loss(rows).backward()
            optimizer.step()
            taken += 1
        validation = held_out()
        waited = 0 if validation < least else waited + 1
        if not best or validation < least:
            best, least = copy.deepcopy(head.state_dict()), validation
        if waited == settings.patience or taken == steps:
            break
    head.load_state_dict(best)


@dataclass(frozen=True)
class Subset:
    """A share of the training rows, or so many of each class."""

    fraction: float = 1.0
    shots: int = 0  # 0: by ``fraction``

    def __str__(self) -> str:
        return f"{self.shots}-shot" if self.shots else f"{100 * self.fraction:g} %"

    def draw(self, positives: Tensor, seed: int) -> Tensor:
        """Positions [n] of the N training rows, ascending; ``positives`` [N, L] bool says which have each class.

        A share is at least one row. Shots are the first so many of each class, and of those with none, in a random
        order; a row that counts for two classes is drawn once.
        """
        generator = torch.Generator().manual_seed(seed_of(seed, "subset"))
        order = torch.randperm(len(positives), generator=generator)
        if not self.shots:
            return order[: max(1, round(self.fraction * len(order)))].sort().values
        chosen = torch.zeros(len(order), dtype=torch.bool)
        for has in (*positives.T, ~positives.any(dim=1)):
            mine = order[has[order]]
            chosen[mine[: self.shots]] = True
        return chosen.nonzero()[:, 0]


def subsets(fractions: Sequence[float], shots: Sequence[int], who: str) -> tuple[Subset, ...]:
    """The subsets of a protocol. Raises ValueError for a share outside of (0, 1], or fewer shots than 1."""
    if not fractions and not shots:
        raise ValueError(f"{who}: no fractions and no shots; expected at least one")
    if any(not 0 < fraction <= 1 for fraction in fractions) or any(count < 1 for count in shots):
        raise ValueError(f"{who}: fractions {tuple(fractions)}, shots {tuple(shots)}; expected (0, 1] and at least 1")
    return (*(Subset(fraction=fraction) for fraction in fractions), *(Subset(shots=count) for count in shots))
