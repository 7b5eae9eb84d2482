"""Flickr30k (Young et al., 2014, https://aclanthology.org/Q14-1006): photographs with five captions each."""

from __future__ import annotations

from dataclasses import dataclass

from fedvlp.data.sources.coco_captions import Captions


@dataclass(frozen=True)
class Flickr30kSource(Captions):
    """Karpathy's ``dataset_flickr30k.json`` as ``path``, ``flickr30k-images/`` as ``root``."""

    source = "flickr30k"
