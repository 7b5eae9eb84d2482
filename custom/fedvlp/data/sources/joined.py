"""CreamFL's set-up of several collections: a public set, and sites with pairs, with images and with texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from fedvlp.data.partition import dirichlet_partition
from fedvlp.data.record import PUBLIC, Cohort, digest


class Source(Protocol):
    """A configured data set."""

    def build(self) -> Cohort: ...


@dataclass(frozen=True)
class JoinedSource:
    """CreamFL (spec 6.1): public COCO, 15 sites of Flickr30k, 10 of CIFAR-100, 10 of AG News; Dirichlet 0.1 by class.

    Pairs have no class: their rows are cut into ``shards`` contiguous pieces, dealt at random, as many to every site.
    Sites are named site-01, ...: first those with pairs, then with images, then with texts. Labels are those of all
    collections; a record's label of another collection is blank.
    """

    public: Source
    pairs: Source
    images: Source
    texts: Source
    sites: tuple[int, int, int] = (15, 10, 10)  # with pairs, images, texts
    beta: float = 0.1  # Dirichlet concentration of images and texts over their sites
    shards: int = 150
    seed: int = 0

    def build(self) -> Cohort:
        parts = [source.build() for source in (self.public, self.pairs, self.images, self.texts)]
        owners = [np.zeros(len(parts[0]), dtype=np.int64), self._sharded(parts[1], self.sites[0])]
        for part, count in zip(parts[2:], self.sites[1:], strict=True):
            owners.append(
                dirichlet_partition(
                    part.labels, np.asarray(part.studies), count, self.beta, self.seed, label_code="positive"
                )
            )
        names = [PUBLIC] * len(parts[0])
        first = 1
        for owner, count in zip(owners[1:], self.sites, strict=True):
            names += [f"site-{first + index:02d}" for index in owner.tolist()]
            first += count
        return join(parts, names)

    def _sharded(self, cohort: Cohort, count: int) -> np.ndarray:
        """Site [N] of each row of the pairs; a shard is a run of whole studies, split by split."""
        owner = np.empty(len(cohort), dtype=np.int64)
        rng = np.random.default_rng(self.seed)
        for split in np.unique(cohort.splits):
            rows = cohort.rows(str(split))
            _, study = np.unique(np.asarray(cohort.studies)[rows], return_inverse=True)
            first = np.unique(study, return_index=True)[1]
            place = np.argsort(np.argsort(first))[study]  # studies in order of first appearance
            shard = place * self.shards // (place.max() + 1)
            owner[rows] = (rng.permutation(self.shards) % count)[shard]
        return owner


def join(parts: Sequence[Cohort], sites: Sequence[str]) -> Cohort:
    """The rows of all cohorts, one after the other, at ``sites``; images must have one size."""
    names = tuple(dict.fromkeys(name for part in parts for name in part.label_names))
    labels = np.full((sum(map(len, parts)), len(names)), np.nan, dtype=np.float32)
    start = 0
    for part in parts:
        columns = [names.index(name) for name in part.label_names]
        labels[start : start + len(part), columns] = part.labels
        start += len(part)

    def column(name: str) -> tuple[str, ...]:
        return tuple(value for part in parts for value in getattr(part, name))

    return Cohort(
        ids=column("ids"), patients=column("patients"), studies=column("studies"), reports=column("reports"),
        labels=labels, label_names=names, splits=np.concatenate([np.asarray(part.splits) for part in parts]),
        sites=tuple(sites), images=_Readers(tuple(parts)),
        fingerprint=digest(*(part.fingerprint for part in parts), *sites),
        imaged=np.concatenate([part.has_image() for part in parts]),
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Readers:
    """Reads every row from the cohort that it came from."""

    parts: tuple[Cohort, ...]

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        rows = np.asarray(rows, dtype=np.int64)
        bounds = np.cumsum([0, *map(len, self.parts)])
        which = np.searchsorted(bounds, rows, side="right") - 1
        found: dict[int, np.ndarray] = {}
        for part in np.unique(which).tolist():
            found[part] = self.parts[part].images(rows[which == part] - bounds[part])
        if len({image.shape[1:] for image in found.values()}) > 1:
            raise ValueError("joined source: the collections' images differ in size; give all one image_size")
        size = next(iter(found.values())).shape[1:] if found else (0, 0)
        out = np.empty((len(rows), *size), dtype=np.uint8)
        for part, image in found.items():
            out[which == part] = image
        return out
