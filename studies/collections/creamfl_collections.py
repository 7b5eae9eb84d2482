"""CreamFL's experiment from one folder, with a folder for each of COCO's captions, Flickr30k, CIFAR-100 and AG News."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedvlp.data.cohort import PUBLIC, Cohort
from fedvlp.data.partition import dirichlet_partition
from fedvlp.data.screening import DataSource, Screened, Source, screen_all
from studies.collections.captions_and_classes import AGNewsSource, Cifar100Source, CocoCaptionsSource, Flickr30kSource

if TYPE_CHECKING:
    from typing_extensions import Self


# CreamFL's experiment on several collections: a public set, and sites with pairs, with images and with texts.


@dataclass(frozen=True)
class JoinedSource:
    """CreamFL (spec 6.1): public COCO, 15 sites of Flickr30k, 10 of CIFAR-100, 10 of AG News; Dirichlet 0.1 by class.

    Pairs have no class: each split of them is cut into ``shards`` contiguous runs of studies, which are assigned to the
    sites at random, equally many to each. Images and texts are assigned by class; a draw is repeated until every site
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


FOLDERS = ("coco_captions", "flickr30k", "cifar100", "ag_news")
"""The public set, then the pairs, images and texts of the sites, each as it was published."""


@dataclass(frozen=True)
class CreamFLSource(DataSource):
    """What a ``JoinedSource`` makes of the data sets in the folders of ``root``, all of them with one image size.

    Raises ValueError, when it is built, that names the folders, or the files in them, that are missing.
    """

    root: str  # folder of the folders coco_captions, flickr30k, cifar100 and ag_news
    image_size: int = 256  # side of the decoded square, pixels
    colour: bool = False  # photographs in three channels, as in the paper; the models' in_channels is then 3
    captions: int = 50_000  # training captions of COCO in the public set, |P|, drawn; 0: all
    pairs: int = 15  # sites with pairs of Flickr30k
    images: int = 10  # sites with images of CIFAR-100
    texts: int = 10  # sites with texts of AG News
    beta: float = 0.1  # Dirichlet concentration of images and texts over their sites, above 0; smaller is more skewed
    shards: int = 150  # runs that each split of the pairs is cut into; a multiple of their sites deals equally many
    seed: int = 0  # of the draws
    cache: str | None = None  # folder for decoded images; None: decoded in memory by every process

    @classmethod
    def at(cls, root: Path, **settings: Any) -> Self:
        """The experiment on what lies in ``root``. Raises ValueError that names what it lacks."""
        made = cls(str(root), **settings)
        made.joined()
        return made

    @property
    def in_colour(self) -> bool:
        return self.colour

    @property
    def sites(self) -> int:
        """Number of sites."""
        return self.pairs + self.images + self.texts

    def joined(self) -> JoinedSource:
        """The four data sets. Raises ValueError as ``at`` does."""
        absent = [name for name in FOLDERS if not (Path(self.root) / name).is_dir()]
        if absent:
            raise ValueError(
                f"creamfl source: the root has no folder {', '.join(absent)}; expected {', '.join(FOLDERS)}, each with "
                "the data set as it was published. Put or link them there"
            )
        coco, flickr, cifar, news = (Path(self.root) / name for name in FOLDERS)
        given: dict[str, Any] = {"image_size": self.image_size, "seed": self.seed}
        pictures = {**given, "colour": self.colour, "cache": self.cache}
        return JoinedSource(
            CocoCaptionsSource.at(coco, limit=self.captions, **pictures),
            Flickr30kSource.at(flickr, **pictures),
            Cifar100Source.at(cifar, **pictures),
            AGNewsSource.at(news, **given),
            sites=(self.pairs, self.images, self.texts),
            beta=self.beta,
            shards=self.shards,
            seed=self.seed,
        )

    def by_site(self) -> dict[str, Any]:
        """Site -> the data set that its records are of; "public" is the public set."""
        joined = self.joined()
        sources = [joined.pairs] * self.pairs + [joined.images] * self.images + [joined.texts] * self.texts
        return {PUBLIC: joined.public, **dict(zip(site_names(joined.sites), sources, strict=True))}

    def build(self) -> Cohort:
        """The records, each with its site or "public". Raises ValueError as ``at`` and ``JoinedSource.build`` do."""
        return self.joined().build()

    def screen(self) -> Screened:
        """As of a ``JoinedSource``."""
        return self.joined().screen()
