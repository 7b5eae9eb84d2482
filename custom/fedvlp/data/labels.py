"""Findings by name: every label table is mapped to one list of names, never by the position of a column."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

CHEXPERT = (
    "No Finding", "Enlarged Cardiomediastinum", "Cardiomegaly", "Lung Opacity", "Lung Lesion", "Edema",
    "Consolidation", "Pneumonia", "Atelectasis", "Pneumothorax", "Pleural Effusion", "Pleural Other", "Fracture",
    "Support Devices",
)  # fmt: skip
"""The 14 labels of CheXpert and MIMIC-CXR (Irvin et al., 2019, https://arxiv.org/abs/1901.07031)."""

Terms = Mapping[str, tuple[str, ...]]
"""Common name -> the collection's own terms that mean it; a name that is not there is not labelled at all."""

NIH: Terms = {
    "No Finding": ("No Finding",),
    "Cardiomegaly": ("Cardiomegaly",),
    "Lung Lesion": ("Mass", "Nodule"),
    "Edema": ("Edema",),
    "Consolidation": ("Consolidation",),
    "Pneumonia": ("Pneumonia",),
    "Atelectasis": ("Atelectasis",),
    "Pneumothorax": ("Pneumothorax",),
    "Pleural Effusion": ("Effusion",),
    "Pleural Other": ("Pleural_Thickening",),
}
"""The finding labels of NIH ChestX-ray14; Infiltration, Emphysema, Fibrosis and Hernia have no common name."""

OPENI: Terms = {
    "No Finding": ("normal",),
    "Cardiomegaly": ("cardiomegaly",),
    "Lung Opacity": ("opacity", "infiltrate", "airspace disease"),
    "Lung Lesion": ("nodule", "mass", "granuloma", "calcified granuloma"),
    "Edema": ("pulmonary edema", "pulmonary congestion"),
    "Consolidation": ("consolidation",),
    "Pneumonia": ("pneumonia",),
    "Atelectasis": ("pulmonary atelectasis",),
    "Pneumothorax": ("pneumothorax", "hydropneumothorax"),
    "Pleural Effusion": ("pleural effusion",),
    "Fracture": ("fractures, bone",),
    "Support Devices": ("catheters, indwelling", "implanted medical device", "medical device", "tube, inserted"),
}
"""MeSH headings (first part, lower case) that the indexers of Open-I give to the findings."""


def names_of(labels: tuple[str, ...] | str) -> tuple[str, ...]:
    """A tuple as it is; a string split at commas. Raises ValueError for a repeated name."""
    names = tuple(filter(None, map(str.strip, labels.split(",")))) if isinstance(labels, str) else labels
    if len(set(names)) != len(names):
        raise ValueError(f"labels: {len(names) - len(set(names))} of {len(names)} names are repeated")
    return names


def from_terms(rows: Sequence[Collection[str] | None], terms: Terms, names: Sequence[str]) -> np.ndarray:
    """Labels [N, L] float32: 1 where a row has a term of the name, else 0; nan for a row that is None (not labelled).

    A name that ``terms`` does not have is nan throughout: this collection says nothing about it.
    """
    labels = np.full((len(rows), len(names)), np.nan, dtype=np.float32)
    wanted = [(column, set(terms[name])) for column, name in enumerate(names) if name in terms]
    for place, row in enumerate(rows):
        if row is not None:
            for column, meaning in wanted:
                labels[place, column] = float(not meaning.isdisjoint(row))
    return labels


def by_name(labels: np.ndarray, have: Sequence[str], want: Sequence[str]) -> np.ndarray:
    """The columns ``want`` [N, W] of labels [N, H] whose columns are called ``have``; nan where there is none."""
    out = np.full((len(labels), len(want)), np.nan, dtype=np.float32)
    for column, name in enumerate(want):
        if name in have:
            out[:, column] = labels[:, list(have).index(name)]
    return out
