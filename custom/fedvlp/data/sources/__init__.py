"""Data sets as published, and the registry of those that a site can offer."""

from fedvlp.data.sources.captions_and_classes import AGNewsSource, Cifar100Source, CocoCaptionsSource, Flickr30kSource
from fedvlp.data.sources.chest_imagenome import ChestImaGenomeSource
from fedvlp.data.sources.creamfl_collections import CreamFLSource
from fedvlp.data.sources.mimic_cxr import MIMICSource
from fedvlp.data.sources.openi import OpenISource
from fedvlp.data.sources.published import Published
from fedvlp.data.sources.questions_of_people import EHRXQASource, VQAv2Source
from fedvlp.data.sources.retina import BRSETSource, MBRSETSource, MessidorSource
from fedvlp.data.sources.table import TableSource
from fedvlp.data.sources.tabular import (
    CandidPTXSource,
    CheXpertPlusSource,
    CheXpertSource,
    COVIDRadiographySource,
    COVIDxSource,
    NIHSource,
    PadChestSource,
    RSNASource,
    SIIMSource,
    VinDrSource,
)

FileSource = TableSource | Published

SOURCES: dict[str, type[FileSource]] = {
    "table": TableSource,
    "candid_ptx": CandidPTXSource,
    "chexpert": CheXpertSource,
    "mimic_cxr": MIMICSource,
    "nih_cxr14": NIHSource,
    "openi": OpenISource,
    "padchest": PadChestSource,
    "chexpert_plus": CheXpertPlusSource,
    "vindr_cxr": VinDrSource,
    "rsna": RSNASource,
    "covidx": COVIDxSource,
    "covid_radiography": COVIDRadiographySource,
    "messidor": MessidorSource,
    "brset": BRSETSource,
    "mbrset": MBRSETSource,
    "siim": SIIMSource,
    "chest_imagenome": ChestImaGenomeSource,
    "ehrxqa": EHRXQASource,
    "vqa_v2": VQAv2Source,
    "coco_captions": CocoCaptionsSource,
    "flickr30k": Flickr30kSource,
    "cifar100": Cifar100Source,
    "ag_news": AGNewsSource,
}
"""Sources of files by name, as in ``fedvlp prepare chexpert`` and in a site's ``local/fedvlp.json``."""

FEDERATIONS: dict[str, type[CreamFLSource]] = {"creamfl": CreamFLSource}
"""Several collections with their sites, by name, as in ``--data creamfl:FOLDER``: for simulations alone."""
