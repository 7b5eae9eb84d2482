"""Findings by name: label tables are mapped to one list of names, never by the position of a column."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

import numpy as np

CHEXPERT = (
    "No Finding", "Enlarged Cardiomediastinum", "Cardiomegaly", "Lung Opacity", "Lung Lesion", "Edema",
    "Consolidation", "Pneumonia", "Atelectasis", "Pneumothorax", "Pleural Effusion", "Pleural Other", "Fracture",
    "Support Devices",
)  # fmt: skip
"""The 14 labels of CheXpert and MIMIC-CXR (Irvin et al., 2019, https://arxiv.org/abs/1901.07031)."""

Terms = Mapping[str, tuple[str, ...]]
"""CheXpert's name -> the collection's own terms for it. A name that is missing is not labelled in the collection."""

NIH: Terms = {
    "No Finding": ("No Finding",),
    "Cardiomegaly": ("Cardiomegaly",),
    "Lung Lesion": ("Mass", "Nodule"),
    "Lung Opacity": ("Infiltration",),
    "Edema": ("Edema",),
    "Consolidation": ("Consolidation",),
    "Pneumonia": ("Pneumonia",),
    "Atelectasis": ("Atelectasis",),
    "Pneumothorax": ("Pneumothorax",),
    "Pleural Effusion": ("Effusion",),
    "Pleural Other": ("Pleural_Thickening",),
}
"""The finding labels of NIH ChestX-ray14; Emphysema, Fibrosis and Hernia have no common name."""

OPENI: Terms = {
    "No Finding": ("normal",),
    "Cardiomegaly": ("cardiomegaly", "cardiac shadow/enlarged"),
    "Lung Opacity": ("opacity", "infiltrate", "airspace disease"),
    "Lung Lesion": ("nodule", "mass", "granuloma", "calcified granuloma"),
    "Edema": ("pulmonary edema", "pulmonary congestion"),
    "Consolidation": ("consolidation",),
    "Pneumonia": ("pneumonia",),
    "Atelectasis": ("pulmonary atelectasis",),
    "Pneumothorax": ("pneumothorax", "hydropneumothorax", "hemopneumothorax"),
    "Pleural Effusion": ("pleural effusion", "hydropneumothorax", "hemopneumothorax", "hemothorax"),
    "Pleural Other": ("thickening/pleura",),
    "Fracture": ("fractures, bone",),
    "Support Devices": ("catheters, indwelling", "implanted medical device", "medical device", "tube, inserted"),
}
"""MeSH headings that the indexers of Open-I give to the findings: the first part, or the first two, in lower case."""


PADCHEST: Terms = {
    "No Finding": ("normal",),
    "Enlarged Cardiomediastinum": ("mediastinal enlargement", "superior mediastinal enlargement"),
    "Cardiomegaly": ("cardiomegaly",),
    "Lung Opacity": (
        "increased density", "infiltrates", "interstitial pattern", "reticular interstitial pattern",
        "reticulonodular interstitial pattern", "ground glass pattern", "alveolar pattern", "consolidation",
        "air bronchogram", "miliary opacities",
    ),
    "Lung Lesion": ("nodule", "multiple nodules", "mass", "pulmonary mass"),
    "Edema": ("pulmonary edema",),
    "Consolidation": ("consolidation", "air bronchogram"),
    "Pneumonia": ("pneumonia", "atypical pneumonia"),
    "Atelectasis": (
        "atelectasis", "atelectasis basal", "laminar atelectasis", "lobar atelectasis", "segmental atelectasis",
        "round atelectasis", "total atelectasis",
    ),
    "Pneumothorax": ("pneumothorax", "hydropneumothorax"),
    "Pleural Effusion": (
        "pleural effusion", "loculated pleural effusion", "loculated fissural effusion", "hydropneumothorax",
    ),
    "Pleural Other": (
        "pleural thickening", "apical pleural thickening", "calcified pleural thickening", "pleural plaques",
        "calcified pleural plaques",
    ),
    "Fracture": (
        "fracture", "rib fracture", "callus rib fracture", "clavicle fracture", "humeral fracture",
        "vertebral fracture",
    ),
    "Support Devices": (
        "pacemaker", "single chamber device", "dual chamber device", "dai", "electrical device", "catheter",
        "central venous catheter", "central venous catheter via jugular vein",
        "central venous catheter via subclavian vein", "central venous catheter via umbilical vein",
        "reservoir central venous catheter", "endotracheal tube", "tracheostomy tube", "nsg tube", "chest drain tube",
        "ventriculoperitoneal drain tube",
    ),
}  # fmt: skip
"""PadChest's radiographic findings, in small letters."""

VINDR: Terms = {
    "No Finding": ("No finding",),
    "Cardiomegaly": ("Cardiomegaly",),
    "Lung Opacity": ("Lung Opacity", "Infiltration", "Consolidation"),
    "Lung Lesion": ("Nodule/Mass",),
    "Edema": ("Edema",),
    "Consolidation": ("Consolidation",),
    "Pneumonia": ("Pneumonia",),
    "Atelectasis": ("Atelectasis",),
    "Pneumothorax": ("Pneumothorax",),
    "Pleural Effusion": ("Pleural effusion",),
    "Pleural Other": ("Pleural thickening",),
    "Fracture": ("Rib fracture", "Clavicle fracture"),
}
"""VinDr-CXR's classes, as its tables and its boxes have them."""

SPOKEN: Terms = {  # what people and labellers of reports write, beside the names themselves
    "No Finding": ("normal", "no findings", "no abnormality", "healthy", "unremarkable", "no acute findings"),
    "Cardiomegaly": ("enlarged heart", "cardiac enlargement"),
    "Lung Opacity": ("opacity", "airspace opacity", "lung opacities"),
    "Lung Lesion": ("nodule", "mass", "lung nodule", "lung mass", "pulmonary nodule"),
    "Edema": ("oedema", "pulmonary oedema", "lung edema", "chf"),
    "Consolidation": ("consolidations",),
    "Pneumonia": ("pneumonias",),
    "Atelectasis": ("atelectases", "collapse"),
    "Pneumothorax": ("ptx",),
    "Pleural Effusion": ("effusion", "pleural effusions", "pleural fluid"),
    "Fracture": ("rib fractures", "fractures"),
    "Support Devices": ("support device", "devices", "lines and tubes", "lines/tubes"),
}

COLLECTIONS: dict[str, Terms] = {
    "chexpert": {name: (name,) for name in CHEXPERT},
    "nih_cxr14": NIH,
    "openi": OPENI,
    "padchest": PADCHEST,
    "vindr_cxr": VINDR,
    "tables": SPOKEN,
}
"""The table of common findings: collection -> CheXpert's name -> the collection's words for it."""


def folded(word: str) -> str:
    """A word for a finding in small letters, with one blank for every other sign between its parts."""
    return " ".join(re.split(r"[^\w/]+|_", word.casefold())).strip()


def common_findings(own: Mapping[str, str] = MappingProxyType({})) -> dict[str, tuple[str, ...]]:
    """Each known word, ``folded`` -> its common findings, by all collections; ``own`` words outrank them.

    A word with several is under each of them ("hydropneumothorax"). Raises ValueError for an own word's finding that is
    no common one.
    """
    if strange := sorted({name for name in own.values() if name and name not in CHEXPERT}):
        raise ValueError(
            f"label_words: {', '.join(map(repr, strange))} is no common finding; they are {', '.join(CHEXPERT)}"
        )
    words: dict[str, list[str]] = {}
    for terms in COLLECTIONS.values():
        for name, of_name in terms.items():
            for word in of_name:
                known = words.setdefault(folded(word), [])
                known += [name] if name not in known else []
    meanings = {word: tuple(names) for word, names in words.items()}
    meanings.update({folded(word): (name,) if name else () for word, name in own.items()})
    return meanings


ONE_CLASS = "none"
"""A separator that parts nothing: a cell is one class, whatever is in it."""

_BETWEEN = re.compile(r"[^\w .()\[\]{}'\"-]")  # what may stand between two findings: "|", ";", ",", a line break, ...
_AROUND = " \t\r\n[]{}'\""  # what is written around a list, and around each of its parts


def listed_in(cell: str) -> list[str] | None:
    """The findings in a cell that is a list of Python's or JSON's, as "['Edema', 'Effusion']"; None for any other."""
    if not (cell.startswith("[") and cell.endswith("]")):
        return None
    try:
        items = ast.literal_eval(cell)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    return [name for item in items if (name := item.strip())] if all(isinstance(item, str) for item in items) else None


def findings_in(cell: str, separator: str) -> list[str]:
    """The findings in a cell, without the marks of a list as in "[Edema, Effusion]".

    Without a separator these are one, unless the cell is a list; for ``ONE_CLASS`` they are one whatever it is.
    """
    listed = None if separator == ONE_CLASS else listed_in(cell)
    if listed is not None or separator in ("", ONE_CLASS):
        return [cell] if listed is None else listed
    return [name for piece in cell.split(separator) if (name := piece.strip(_AROUND))]


def separator_of(cells: Collection[str], classes: Collection[str] = ()) -> str:
    """What seems to stand between several findings in a cell, or "": most of what it makes of such cells recurs.

    That is: another cell has it too, alone or among others, or it is one of the ``classes``.
    """
    distinct = {cell.casefold() for cell in cells if len(listed_in(cell) or ()) < 2}
    known = {name.casefold() for name in classes}
    more = Counter[str]()  # mark -> twice the findings that recur less all, of the cells that it splits
    for mark in set(_BETWEEN.findall("".join(distinct - known))):
        cases = [set(findings_in(cell, mark)) for cell in distinct - known]
        times = Counter(name for names in cases for name in names)
        split = [name for names in cases if len(names) > 1 for name in names]
        more[mark] = 2 * sum(times[name] > 1 or name in known for name in split) - len(split)
    return max((mark for mark in more if more[mark] > 0), key=lambda mark: (more[mark], mark), default="")


def names_of(labels: tuple[str, ...] | str) -> tuple[str, ...]:
    """Label names from a tuple, or from a string with commas ("Edema,Pneumonia"). Raises ValueError if one repeats."""
    names = tuple(filter(None, map(str.strip, labels.split(",")))) if isinstance(labels, str) else labels
    if len(set(names)) != len(names):
        raise ValueError(f"labels: {len(names) - len(set(names))} of {len(names)} names are repeated")
    return names


def from_terms(rows: Sequence[Collection[str] | None], terms: Terms, names: Sequence[str]) -> np.ndarray:
    """Labels [N, L] float32 of N rows, each a collection of terms, for the L ``names``.

    1 where the row has one of the terms of the name, else 0. A row that is None is not labelled: nan. A name that
    ``terms`` does not have is nan in all rows, because the collection says nothing about it.
    """
    labels = np.full((len(rows), len(names)), np.nan, dtype=np.float32)
    wanted = [(column, set(terms[name])) for column, name in enumerate(names) if name in terms]
    for index, row in enumerate(rows):
        if row is None:
            continue
        for column, meaning in wanted:
            labels[index, column] = float(not meaning.isdisjoint(row))
    return labels


def by_name(labels: np.ndarray, have: Sequence[str], want: Sequence[str]) -> np.ndarray:
    """The columns ``want`` of labels [N, H] whose columns are named ``have``: [N, W] float32, nan where missing."""
    out = np.full((len(labels), len(want)), np.nan, dtype=np.float32)
    for column, name in enumerate(want):
        if name in have:
            out[:, column] = labels[:, list(have).index(name)]
    return out
