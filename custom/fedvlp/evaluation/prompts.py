"""Sentences that name a finding, for zero-shot classification: severity x kind x location, by class (spec 10.4)."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import torch

from fedvlp.core.seeds import seed as seed_of

SEVERITY = ("mild", "moderate", "severe")
SIZE = ("small", "moderate", "large")
SIDE = ("right", "left", "bilateral")
LUNG = tuple(f"in the {side} {zone} zone" for side in ("right", "left") for zone in ("upper", "mid", "lower"))
BASES = ("at the right base", "at the left base", "at both bases")
SIDES = ("on the right", "on the left", "on both sides")

PROMPTS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "Atelectasis": (SEVERITY, ("linear atelectasis", "platelike atelectasis", "lobar atelectasis"), BASES),
    "Cardiomegaly": (SEVERITY, ("cardiomegaly", "enlargement of the heart", "cardiac enlargement"), ("",)),
    "Consolidation": (SEVERITY, ("consolidation", "airspace consolidation", "focal consolidation"), LUNG),
    "Edema": (SEVERITY, ("pulmonary edema", "interstitial edema", "perihilar edema"), SIDES),
    "Pleural Effusion": (SIZE, ("pleural effusion", "effusion", "layering pleural effusion"), SIDES),
    "Pneumothorax": (SIZE, ("apical pneumothorax", "lateral pneumothorax", "pneumothorax"), SIDES),
    "Pneumonia": (SEVERITY, ("pneumonia", "patchy opacities, pneumonia", "infectious pneumonia"), LUNG),
}
"""Class -> severities, kinds and locations: the findings of the built-in cohort and CheXpert's competition classes."""


def prompts(name: str, count: int, seed: int) -> tuple[str, ...]:
    """``count`` different sentences of the class ``name``, or all it has. Name and ``seed`` alone decide which.

    Raises ValueError for a class without prompts.
    """
    if name not in PROMPTS:
        raise ValueError(f"zero-shot: no prompts for class {name!r}; there are: {', '.join(PROMPTS)}")
    sentences = [" ".join(filter(None, words)) for words in product(*PROMPTS[name])]
    generator = torch.Generator().manual_seed(seed_of(seed, "prompts", name))
    order = torch.randperm(len(sentences), generator=generator)[:count].tolist()
    return tuple(sentences[index] for index in order)
