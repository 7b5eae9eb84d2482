"""Data sets as published, and the registry of those that a site can offer."""

from fedvlp.data.sources.mimic_cxr import MIMICSource
from fedvlp.data.sources.openi import OpenISource
from fedvlp.data.sources.published import Published
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
    "siim": SIIMSource,
}
"""Sources of files by name, as in ``fedvlp prepare chexpert`` and in a site's ``local/fedvlp.json``."""
