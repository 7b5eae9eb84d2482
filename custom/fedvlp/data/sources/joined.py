"""CreamFL's experiment on several collections: a public set, and sites with pairs, with images and with texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedvlp.data.cohort import PUBLIC, Cohort
from fedvlp.data.partition import dirichlet_partition
from fedvlp.data.screening import Screened, Source, screen_all


@dataclass(frozen=True)
class JoinedSource:
    """CreamFL (spec 6.1): public COCO, 15 sites of Flickr30k, 10 of CIFAR-100, 10 of AG News; Dirichlet 0.1 by class.

    Pairs have no class: each split of them is cut into ``shards`` contiguous runs of studies, which are dealt to the
    sites at random, equally many to each. Images and texts are dealt by class, and a draw is repeated until every site
    has at least 10 records (``dirichlet_partition``). Sites are named site-01, ...: first those with pairs, then with
    images, then with texts. Labels are those of all collections; a record's label of another collection is nan.
    Differs: CreamFL repeats its draw until a site has 10 images (CIFAR-100) or 3,000 texts (AG News); here the least
    is 10 for both (spec 12.1).
    """

    public: Source
    pairs: Source
    images: Source
    texts: Source
    sites: tuple[int, int, int] = (15, 10, 10)  # with pairs, images, texts
    beta: float = 0.1  # Dirichlet concentration of images and texts over their sites, above 0; smaller is more skewed
    shards: int = 150  # runs that each split of the pairs is cut into; a multiple of their sites deals equally many
    seed: int = 0  # of the draws

    def build(self) -> Cohort:
        """The rows of the four collections in the order of the fields, each with its site or "public".

        Raises ValueError where a collection has too few records for its sites, and what the sources raise.
        """
        return self.screen().build()

    def screen(self) -> Screened:
        """The reports of all four, searched, before any image is decoded."""
        return screen_all((self.public, self.pairs, self.images, self.texts), self._joined)

    def _joined(self, cohorts: Sequence[Cohort]) -> Cohort:
        public, pairs, images, texts = cohorts
        owners = [
            self._by_shard(pairs, self.sites[0]),
            self._by_class(images, self.sites[1]),
            self._by_class(texts, self.sites[2]),
        ]
        names, known = [PUBLIC] * len(public), site_names(self.sites)
        first = 0  # index of the collection's first site
        for owner, count in zip(owners, self.sites, strict=True):
            names += [known[first + index] for index in owner.tolist()]
            first += count
        return Cohort.concat((public, pairs, images, texts)).with_sites(names)

    def _by_class(self, cohort: Cohort, count: int) -> np.ndarray:
        """Site [N] in 0..count-1 of each row, Dirichlet over the classes."""
        studies = np.asarray(cohort.studies)
        return dirichlet_partition(cohort.labels, studies, count, self.beta, self.seed, label_code="positive")

    def _by_shard(self, cohort: Cohort, count: int) -> np.ndarray:
        """Site [N] in 0..count-1 of each row; a shard is a run of whole studies of one split."""
        owner = np.empty(len(cohort), dtype=np.int64)
        rng = np.random.default_rng(self.seed)
        for split in np.unique(cohort.splits):
            rows = cohort.rows(str(split))
            _, study = np.unique(np.asarray(cohort.studies)[rows], return_inverse=True)
            first = np.unique(study, return_index=True)[1]
            position = np.argsort(np.argsort(first))[study]  # of each row's study, in order of first appearance
            shard = position * self.shards // (position.max() + 1)
            owner[rows] = (rng.permutation(self.shards) % count)[shard]
        return owner


def site_names(counts: tuple[int, int, int]) -> list[str]:
    """ "site-01", ...: of the sites with pairs, then those with images, then those with texts."""
    return [f"site-{number:02d}" for number in range(1, sum(counts) + 1)]
