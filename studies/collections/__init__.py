"""Collections that the papers' tables alone read, as a plugin of a clone: by name, as in ``--data vqa_v2:FOLDER``."""

from __future__ import annotations

from fedvlp.data.sources.published import Published
from studies.collections.captions_and_classes import AGNewsSource, Cifar100Source, CocoCaptionsSource, Flickr30kSource
from studies.collections.chest_imagenome import ChestImaGenomeSource
from studies.collections.creamfl_collections import CreamFLSource
from studies.collections.questions_of_people import EHRXQASource, VQAv2Source
from studies.collections.retina import BRSETSource, MBRSETSource, MessidorSource

SOURCES: dict[str, type[Published]] = {
    "messidor": MessidorSource,
    "brset": BRSETSource,
    "mbrset": MBRSETSource,
    "chest_imagenome": ChestImaGenomeSource,
    "ehrxqa": EHRXQASource,
    "vqa_v2": VQAv2Source,
    "coco_captions": CocoCaptionsSource,
    "flickr30k": Flickr30kSource,
    "cifar100": Cifar100Source,
    "ag_news": AGNewsSource,
}

FEDERATIONS: dict[str, type[CreamFLSource]] = {"creamfl": CreamFLSource}
"""Several collections with their sites, by name, as in ``--data creamfl:FOLDER``: for simulations alone."""
