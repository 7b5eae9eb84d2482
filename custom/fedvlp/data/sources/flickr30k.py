"""Flickr30k (Young et al., 2014, https://aclanthology.org/Q14-1006): photographs with five captions each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from fedvlp.data.sources.coco_captions import Captions
from fedvlp.data.sources.published import first_of, require_items

FOLDERS = ("flickr30k-images", "flickr30k_images")


@dataclass(frozen=True)
class Flickr30kSource(Captions):
    """Karpathy's ``dataset_flickr30k.json`` as ``path``, ``flickr30k-images/`` as ``root``."""

    table: ClassVar[str] = "dataset_flickr30k.json"
    source = "flickr30k"

    @classmethod
    def layout(cls, root: Path) -> dict[str, str]:
        """Karpathy's JSON beside the folder of the images."""
        require_items(cls.source, root, [cls.table, " or ".join(FOLDERS)])
        return {"path": str(root / cls.table), "root": str(first_of(root, FOLDERS))}
