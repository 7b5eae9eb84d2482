"""CreamFL's set-up of several collections: a public set, and sites with pairs, with images and with texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from fedvlp.data.cohort import PUBLIC, Cohort
from fedvlp.data.partition import dirichlet_partition


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
        return Cohort.concat(parts).with_sites(names)

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
