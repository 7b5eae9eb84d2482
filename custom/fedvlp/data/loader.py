"""One site's images, tokens and labels, served as batches (``core.types.Batch``)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fedvlp.core.device import moved, prefetched, to_device
from fedvlp.core.types import DRAWN_REPORT, MODALITIES, Batch
from fedvlp.data.cohort import Cohort, NoRecordsError, digest
from fedvlp.data.sentences import units

logger = logging.getLogger(__name__)

IN_MEMORY = 2 * 2**30
"""Bytes. A split whose images take at most this many is held in memory; a larger one is read batch by batch."""

BUCKET = 16
"""On a GPU the longest text of a batch is padded to a multiple of so many tokens: kernels for odd lengths are slower,

and a compiled model is compiled anew for each. The towers do not see padding."""

IMAGE, REPORT = 1, 2
"""What a record has, as a sum."""

Tokenize = Callable[[Sequence[str]], tuple[Tensor, Tensor]]
"""Reports to token ids [N, T] int64 and mask [N, T] bool, True at real tokens, padded on the right.

It may have attributes: ``truncated``, the number of reports that it had to cut so far, and ``unknown``, the id of every
word that it does not know."""


@dataclass(frozen=True)
class _Units:
    """The M sentences or reports of a split's n rows; those of row i are ``first[i]`` to ``first[i + 1]``."""

    text: Tensor  # [M, T] int64
    mask: Tensor  # [M, T] bool
    lengths: Tensor  # [M] int64
    labels: Tensor  # [M, L] float32
    first: Tensor  # [n + 1] int64

    def draw(self, rows: Tensor, generator: torch.Generator) -> Tensor:
        """One unit of each of the ``rows`` [b], all of a row equally likely: [b] int64."""
        counts = self.first[rows + 1] - self.first[rows]
        share = torch.rand(len(rows), generator=generator, dtype=torch.float64)
        return self.first[rows] + (share * counts).long()


@dataclass(frozen=True)
class _Split:
    """The tensors of one split; a batch is one ``index_select`` of each."""

    size: int  # n
    kinds: Tensor  # [n] int64: what each record has
    images: Callable[[Tensor], Tensor]  # positions [b] to uint8 [b, S, S] or [b, S, S, 3]
    text: Tensor  # [n, T] int64
    mask: Tensor  # [n, T] bool
    lengths: Tensor  # [n] int64, tokens up to the last real one
    labels: Tensor  # [n, L] float32

    def kind(self, rows: Tensor) -> int:
        """Say what ``rows`` [b], which are of one kind, have."""
        return int(self.kinds[rows[0]])


class SiteData:
    """The records of one site. A split is read and tokenised when it is first asked for, and stays in memory.

    Images that take more than ``IN_MEMORY`` are not held: each batch is then read from the cache's files.
    All records of a batch have the same of image and report, and a batch lacks the keys of what they lack.
    Batches are on ``device``, by default the CPU. To a GPU images travel as the bytes that they are, a quarter of what
    the model reads, and are cropped and normalised there, by what is drawn here.
    ``modalities`` says which of "image" and "text" any of the site's records has; both at a site without records. A
    split may have less: ``modalities_in``.
    """

    def __init__(
        self,
        cohort: Cohort,
        rows: dict[str, np.ndarray],
        tokenize: Tokenize,
        input_size: int,
        sentences: bool = False,
        device: torch.device | None = None,
    ) -> None:
        """``rows``: split -> rows [n] of the cohort. ``input_size``: pixels, side of the square that the model sees.

        ``sentences``: each training step draws a sentence of each report, with its labels (data/sentences.py).
        """
        self._cohort = cohort
        self._rows = {split: np.asarray(chosen, dtype=np.int64) for split, chosen in rows.items()}
        self._tokenize = tokenize
        self._input_size = input_size
        self._device = device or torch.device("cpu")
        self._share: Callable[[int], slice] | None = None
        self._splits: dict[str, _Split] = {}
        self._of_sentences = sentences
        self._several = (
            any(cohort.more_reports[row] for row in self._rows.get("train", ())) if cohort.more_reports else False
        )
        self._units: _Units | None = None
        self.modalities = self._present(np.concatenate([np.empty(0, dtype=np.int64), *self._rows.values()]))

    def modalities_in(self, split: str) -> tuple[str, ...]:
        """Which of "image" and "text" the records of a split have; retrieved reports are in training records alone."""
        return tuple(
            name
            for name in self._present(self._rows.get(split, np.empty(0, dtype=np.int64)))
            if name in self.modalities
        )

    def _present(self, rows: np.ndarray) -> tuple[str, ...]:
        present = {"image": self._cohort.has_image()[rows].any(), "text": any(self._cohort.reports[r] for r in rows)}
        return tuple(name for name, has in present.items() if has or not len(rows))

    @property
    def sizes(self) -> dict[str, int]:
        """Split -> number of records."""
        return {split: len(rows) for split, rows in self._rows.items()}

    @property
    def num_train(self) -> int:
        """Number of training records."""
        return self.sizes.get("train", 0)

    @property
    def label_names(self) -> tuple[str, ...]:
        """The L findings of the columns of ``labels``."""
        return self._cohort.label_names

    def share_images(self, share: Callable[[int], slice] | None) -> None:
        """Of B records that a training batch has, only the images ``share(B)`` are read and served; None: all.

        What is drawn, and everything else of a batch, which is small beside its images, stays the same.
        """
        self._share = share

    def train_batches(self, steps: int, batch_size: int, generator: torch.Generator) -> Iterator[Batch]:
        """``steps`` batches of the training split. Order and crops come from ``generator`` alone.

        An epoch draws without replacement and drops its last, smaller batch. A split smaller than ``batch_size`` is one
        batch, which the log says. Raises, before the first batch, ValueError for a ``batch_size`` below 2 or negative
        ``steps``, and NoRecordsError for a site with fewer than 2 training records.
        """
        if batch_size < 2 or steps < 0:
            raise ValueError(f"site data: expected batch_size >= 2 and steps >= 0, got {batch_size} and {steps}")
        if self.num_train < 2:
            raise NoRecordsError(
                public="site data: training needs at least 2 records, this site has {num_train}",
                num_train=self.num_train,
            )
        return self._train_batches(steps, self._batch_of(batch_size), generator)

    def _batch_of(self, asked: int) -> int:
        """The batch size that the training split allows."""
        if asked > self.num_train:
            logger.info("train: a batch of %d is asked for, each takes all %d records", asked, self.num_train)
        return min(asked, self.num_train)

    def _train_batches(self, steps: int, size: int, generator: torch.Generator) -> Iterator[Batch]:
        split = self._split("train")
        epoch: list[Tensor] = []
        for _ in range(steps):
            epoch = epoch or self._epoch(split.kinds, size, generator)
            rows = epoch.pop(0)
            images = corners = None
            if split.kind(rows) & IMAGE:
                mine = slice(None) if self._share is None else self._share(len(rows))
                images = split.images(rows[mine])
                corners = random_corners(images, len(rows), self._input_size, generator)
                corners = None if corners is None else to_device(corners[:, mine].contiguous(), self._device)
            batch = self._batch(split, rows, images)
            batch |= self._drawn(rows, generator) if "text" in batch else {}
            yield self._served(batch, partial(cropped, size=self._input_size, corners=corners))

    @staticmethod
    def _epoch(kinds: Tensor, size: int, generator: torch.Generator) -> list[Tensor]:
        """Draw the rows [b] of the batches of an epoch, each of one of the ``kinds`` [n], and the order of the batches.

        A kind of which there are fewer than ``size`` is one batch, and one of a single record none.
        """
        members = [torch.nonzero(kinds == kind)[:, 0] for kind in kinds.unique()]
        if len(members) > 1:
            members = [rows for rows in members if len(rows) > 1]
        batches: list[Tensor] = []
        for rows in members:
            each = min(size, len(rows))
            order = rows[torch.randperm(len(rows), generator=generator)]
            batches += order[: len(rows) // each * each].split(each)
        if len(members) == 1:
            return batches
        return [batches[index] for index in torch.randperm(len(batches), generator=generator)]

    def _drawn(self, rows: Tensor, generator: torch.Generator) -> Batch:
        """What takes the place of the training records' reports: a sentence of each, or one of several reports."""
        if not (self._of_sentences or self._several):
            return {}
        units = self._read_units()
        chosen = units.draw(rows, generator)
        drawn = self._texts(units, chosen)
        return drawn | ({"text_labels": units.labels.index_select(0, chosen)} if self._of_sentences else {})

    def _texts(self, units: _Units, chosen: Tensor) -> Batch:
        """Text and mask of the units ``chosen`` [b], and which they are."""
        longest = self._padded(units.lengths[chosen], units.text)
        return {
            "text": units.text[:, :longest].index_select(0, chosen),
            "text_mask": units.mask[:, :longest].index_select(0, chosen),
            **({} if self._of_sentences else {DRAWN_REPORT: chosen}),
        }

    def report_batches(self, batch_size: int) -> Iterator[Batch] | None:
        """All reports of the training records that have several, each with the ``row`` that it belongs to, in order.

        ``report`` [b] is the number of each. None where each record has one report at most, or sentences are drawn.
        """
        if not self._several or self._of_sentences:
            return None
        units = self._read_units()
        owner = torch.repeat_interleave(torch.arange(self.num_train), units.first.diff())
        numbers = torch.arange(len(owner)).split(batch_size)
        return (
            self._served({"row": owner[some], **self._texts(units, some)}, lambda images: images) for some in numbers
        )

    def _read_units(self) -> _Units:
        """The training records' sentences or reports. Raises ValueError for a cohort whose sentences have no labels."""
        if self._units is None:
            of_rows = [list(self._units_of(row)) for row in self._rows["train"].tolist()]
            text, mask, lengths = self._tokens([unit for of_row in of_rows for unit, _ in of_row])
            labels = np.stack([labels for of_row in of_rows for _, labels in of_row])
            first = np.cumsum([0, *map(len, of_rows)])
            self._units = _Units(text, mask, lengths, torch.from_numpy(labels), torch.from_numpy(first))
        return self._units

    def _units_of(self, row: int) -> Iterator[tuple[str, np.ndarray]]:
        """The sentences of all of a record's reports, or the reports, each with its labels."""
        more = self._cohort.more_reports
        for report in (self._cohort.reports[row], *(more[row] if more else ())):
            yield from units(self._cohort, row, report) if self._of_sentences else [(report, self._cohort.labels[row])]

    def batches(self, split: str, batch_size: int, *, drop_last: bool, rows: Tensor | None = None) -> Iterator[Batch]:
        """Batches of the split in its order, or of its positions ``rows`` [n] int64 in the order given.

        Images are cropped at the centre. An empty or unknown split gives no batch. ``drop_last`` leaves out a smaller
        last batch. Where neighbours differ in what they have of image and report, a batch ends between them.
        """
        return prefetched(self._batches(split, batch_size, drop_last, rows), self._device)

    def _batches(self, split: str, batch_size: int, drop_last: bool, rows: Tensor | None) -> Iterator[Batch]:
        if batch_size < 1:
            raise ValueError(f"site data: expected batch_size >= 1, got {batch_size}")
        if not self.sizes.get(split) or (rows is not None and not len(rows)):
            return
        content = self._split(split)
        order = torch.arange(content.size) if rows is None else rows.to("cpu", torch.int64)
        for chosen in order.split(batch_size):
            if drop_last and len(chosen) < batch_size:
                return
            # A batch is of one kind: what some of its records lack would be black or empty to the towers.
            for alike in chosen.tensor_split(content.kinds[chosen].diff().nonzero()[:, 0] + 1):
                images = content.images(alike) if content.kind(alike) & IMAGE else None
                yield self._served(self._batch(content, alike, images), partial(eval_batch, size=self._input_size))

    def having(self, split: str, modalities: Sequence[str] = MODALITIES) -> Tensor:
        """List the positions [n] int64 of the records of a split that have these of image and text, and no other."""
        rows = self._rows.get(split, np.empty(0, dtype=np.int64))
        wanted = IMAGE * ("image" in modalities) + REPORT * ("text" in modalities)
        return (self._kinds(rows) == wanted).nonzero()[:, 0]

    def _kinds(self, rows: np.ndarray) -> Tensor:
        """What each of the cohort's ``rows`` [n] has: ``IMAGE``, ``REPORT``, their sum, or 0 for neither."""
        reported = np.array([self._cohort.reports[row] != "" for row in rows], dtype=np.int64)
        return torch.from_numpy(IMAGE * self._cohort.has_image()[rows] + REPORT * reported)

    def study_groups(self, split: str) -> Tensor:
        """[n] int64: a number for each row, equal for rows of one study or with the same report (union-find).

        In retrieval, every row of the query's group may count as a right answer.
        """
        rows = self._rows.get(split, np.empty(0, dtype=np.int64))
        parent = list(range(len(rows)))

        def root(index: int) -> int:
            while parent[index] != index:
                parent[index] = parent[parent[index]]
                index = parent[index]
            return index

        first: dict[tuple[str, str], int] = {}
        for index, row in enumerate(rows):
            keys = [("study", self._cohort.studies[row])]
            if report := self._cohort.reports[row]:
                keys.append(("report", report))
            for key in keys:
                parent[root(index)] = root(first.setdefault(key, index))
        _, group = np.unique([root(index) for index in range(len(rows))], return_inverse=True)
        return torch.from_numpy(group.astype(np.int64))

    def shared_images(self, split: str) -> tuple[Tensor, Tensor]:
        """The different images of n pairs of a split: the first pair [I] of each, and the image [n] of each; int64.

        Images are the same when their pixels are.
        """
        content = self._split(split)
        number_of: dict[str, int] = {}  # hash of the pixels -> number of the image
        owner: list[int] = []
        for rows in self.having(split).split(256):
            for image in content.images(rows):
                pixels = digest(image.numpy().tobytes())
                owner.append(number_of.setdefault(pixels, len(number_of)))
        return torch.from_numpy(np.unique(owner, return_index=True)[1]), torch.tensor(owner)

    def _batch(self, split: _Split, rows: Tensor, images: Tensor | None) -> Batch:
        """The batch on the CPU, its images [b, S, S] or [b, S, S, 3] as they are."""
        batch = {"row": rows}
        if images is not None:
            batch["image"] = images
        if split.kind(rows) & REPORT:
            longest = self._padded(split.lengths[rows], split.text)
            batch["text"] = split.text[:, :longest].index_select(0, rows)
            batch["text_mask"] = split.mask[:, :longest].index_select(0, rows)
        if self._cohort.label_names:
            batch["labels"] = split.labels.index_select(0, rows)
        return batch

    def _served(self, batch: Batch, prepare: Callable[[Tensor], Tensor]) -> Batch:
        """The batch on the device, its images as the model sees them."""
        batch = moved(batch, self._device)
        return {**batch, "image": prepare(batch["image"])} if "image" in batch else batch

    def _padded(self, lengths: Tensor, text: Tensor) -> int:
        """Tokens of a batch's texts, of which ``lengths`` [b] are real; at most as many as ``text`` [n, T] has."""
        longest, step = int(lengths.max()), 1 if self._device.type == "cpu" else BUCKET
        return min(-(-longest // step) * step, text.shape[1])

    def _split(self, name: str) -> _Split:
        if name not in self._splits:
            self._splits[name] = self._read(name)
        return self._splits[name]

    def _read(self, name: str) -> _Split:
        rows, before = self._rows[name], self._truncated
        text, mask, lengths = self._tokens([self._cohort.reports[row] for row in rows])
        if cut := self._truncated - before:
            logger.info("%s: %d of %d reports are cut at %d tokens", name, cut, len(rows), text.shape[1])
        unknown = getattr(self._tokenize, "unknown", None)
        # above a quarter: marks of the words' beginnings and of the report's ends are tokens, too
        if strange := 0 if unknown is None else int((4 * (text == unknown).sum(1) > mask.sum(1)).sum()):
            logger.warning(
                "%s: the text tower's vocabulary lacks most words of %d of %d reports; take one of their language and "
                "script (model.text_tower)",
                name,
                strange,
                len(rows),
            )
        return _Split(
            size=len(rows),
            kinds=(kinds := self._kinds(rows)),
            images=self._reader(rows, (kinds & IMAGE) > 0),
            text=text,
            mask=mask,
            lengths=lengths,
            labels=torch.from_numpy(self._cohort.labels[rows]),
        )

    def _tokens(self, texts: Sequence[str]) -> tuple[Tensor, Tensor, Tensor]:
        """ids [N, T], mask [N, T] and lengths [N] up to the last real token, of N texts."""
        text, mask = self._tokenize(texts)
        if text.shape != mask.shape or text.ndim != 2 or text.shape[0] != len(texts) or not text.shape[1]:
            raise ValueError(
                f"site data: the tokenizer gave ids {list(text.shape)} and mask {list(mask.shape)}, "
                f"expected two of [{len(texts)}, T]"
            )
        mask = mask.to(torch.bool).clone()
        mask[:, 0] = True  # position 0 is [CLS]: a record without a report still has one token
        position = torch.arange(1, mask.shape[1] + 1)
        return text.to(torch.int64).contiguous(), mask, (mask * position).amax(dim=1)

    @property
    def _truncated(self) -> int:
        return getattr(self._tokenize, "truncated", 0)

    def _reader(self, rows: np.ndarray, imaged: Tensor) -> Callable[[Tensor], Tensor]:
        """Positions [b] within ``rows`` [n] to uint8 [b, S, S] or [b, S, S, 3]; only of those ``imaged`` [n] bool."""
        held = rows[imaged.numpy()]
        needed = len(held) * self._input_size**2 * self._cohort.channels  # decoded images are hardly larger
        if not len(held) or needed > IN_MEMORY:
            return lambda chosen: self._pixels(rows[chosen.numpy()])
        pixels, index = self._pixels(held), imaged.cumsum(0) - 1
        return lambda chosen: pixels[index[chosen]]

    def _pixels(self, rows: np.ndarray) -> Tensor:
        """[n, S, S] or [n, S, S, 3] uint8."""
        return torch.from_numpy(np.ascontiguousarray(self._cohort.images(rows)))


# Crops and grey levels of a batch


def train_batch(images: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """uint8 [B, S, S] to float32 [B, 1, size, size] in -1..1, each image cropped at random by ``generator``.

    Images in colour, [B, S, S, 3], become [B, 3, size, size]. None is flipped: a chest X-ray has a side. Nothing is
    drawn from the generator where S equals ``size``. Raises ValueError for other images, or where S is below ``size``.
    """
    return cropped(images, size, random_corners(images, len(images), size, generator))


def random_corners(images: Tensor, count: int, size: int, generator: torch.Generator) -> Tensor | None:
    """Rows and columns [2, count] int64 of the first pixels of crops; None where the images' S equals ``size``.

    ``images`` [B, S, S] or [B, S, S, 3] are those of a batch of ``count`` records, or some of them.
    """
    spare = _spare(images, size)
    return torch.randint(spare + 1, (2, count), generator=generator, device="cpu") if spare else None


def cropped(images: Tensor, size: int, corners: Tensor | None) -> Tensor:
    """What ``train_batch`` makes of images [B, S, S] or [B, S, S, 3] on any device, with ``corners`` [2, B] there.

    The CPU copies each crop's rows; a GPU gathers the pixels of all crops at once. Both give the same numbers.
    """
    if corners is None:
        return _normalise(images)
    return _normalise((_sliced if images.device.type == "cpu" else _gathered)(images, size, corners))


def _sliced(images: Tensor, size: int, corners: Tensor) -> Tensor:
    starts = zip(images, *corners.tolist(), strict=True)
    return torch.stack([image[y : y + size, x : x + size] for image, y, x in starts])


def _gathered(images: Tensor, size: int, corners: Tensor) -> Tensor:
    span = torch.arange(size, device=images.device)
    rows, columns = (start[:, None] + span for start in corners)  # [B, size] each
    film = torch.arange(len(images), device=images.device)[:, None, None]  # [B, 1, 1]
    return images[film, rows[:, :, None], columns[:, None, :]]


def eval_batch(images: Tensor, size: int) -> Tensor:
    """uint8 [B, S, S] to float32 [B, 1, size, size] in -1..1, cropped at the centre.

    Images in colour are taken, and other images refused, as by ``train_batch``.
    """
    start = _spare(images, size) // 2
    return _normalise(images[:, start : start + size, start : start + size])


def _spare(images: Tensor, size: int) -> int:
    """How many pixels the images [B, S, S] or [B, S, S, 3] are wider than ``size``, checked."""
    shaped = images.ndim == 3 or (images.ndim == 4 and images.shape[3] == 3)
    if not shaped or images.shape[1] != images.shape[2] or images.dtype != torch.uint8:
        raise ValueError(
            f"batch: expected uint8 [B, S, S] images, or [B, S, S, 3], got {images.dtype} {list(images.shape)}"
        )
    if not 0 < size <= images.shape[1]:
        raise ValueError(f"batch: cannot crop {size} pixels from images of {images.shape[1]}; decode them larger")
    return images.shape[1] - size


def _normalise(images: Tensor) -> Tensor:
    """(x / 255 - 0.5) / 0.5 of uint8 [B, H, W] as float32 [B, 1, H, W], of [B, H, W, 3] as [B, 3, H, W]."""
    scaled = images.to(torch.float32).mul_(2 / 255).sub_(1)
    return scaled.unsqueeze(1) if images.ndim == 3 else scaled.permute(0, 3, 1, 2).contiguous()
