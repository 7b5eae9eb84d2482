"""Data sets as published, each read by one file, and the registry of those that a site can offer."""

from fedvlp.data.sources.candid_ptx import CandidPTXSource
from fedvlp.data.sources.chexpert import CheXpertSource
from fedvlp.data.sources.mimic_cxr import MIMICSource
from fedvlp.data.sources.nih_cxr14 import NIHSource
from fedvlp.data.sources.openi import OpenISource
from fedvlp.data.sources.published import Published
from fedvlp.data.sources.rsna import RSNASource
from fedvlp.data.sources.table import TableSource

FileSource = TableSource | Published

SOURCES: dict[str, type[FileSource]] = {
    "table": TableSource,
    "candid_ptx": CandidPTXSource,
    "chexpert": CheXpertSource,
    "mimic_cxr": MIMICSource,
    "nih_cxr14": NIHSource,
    "openi": OpenISource,
    "rsna": RSNASource,
}
"""Sources of files by name, as in ``fedvlp prepare chexpert`` and in a site's ``local/fedvlp.json``."""
