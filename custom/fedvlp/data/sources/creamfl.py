"""CreamFL's experiment from one folder, with a folder for each of COCO's captions, Flickr30k, CIFAR-100 and AG News."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedvlp.data.cohort import PUBLIC, Cohort
from fedvlp.data.screening import Screened
from fedvlp.data.sources.ag_news import AGNewsSource
from fedvlp.data.sources.cifar100 import Cifar100Source
from fedvlp.data.sources.coco_captions import CocoCaptionsSource, Flickr30kSource
from fedvlp.data.sources.joined import JoinedSource, site_names

if TYPE_CHECKING:
    from typing_extensions import Self

FOLDERS = ("coco_captions", "flickr30k", "cifar100", "ag_news")
"""The public set, then the pairs, images and texts of the sites, each as it was published."""


@dataclass(frozen=True)
class CreamFLSource:
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
