"""Sentences that name a class, for zero-shot classification: severity x kind x location, by class (spec 10.4).

The words of COVID-19 are what radiologists saw on the first films of 96 patients: ground-glass opacities and
consolidations, in most patients multifocal, in both lungs and in the lower zones
(http://www.smj.org.sg/article/radiographic-features-covid-19-based-initial-cohort-96-patients-singapore). Those of
No Finding are a normal report's. PMS-FM's released code has none for a normal film beside COVID-19 (spec 10.4).
"""

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

Words = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]
"""Of a class: severities, kinds and locations."""

PROMPTS: Mapping[str, Words] = {
    "Atelectasis": (SEVERITY, ("linear atelectasis", "platelike atelectasis", "lobar atelectasis"), BASES),
    "Cardiomegaly": (SEVERITY, ("cardiomegaly", "enlargement of the heart", "cardiac enlargement"), ("",)),
    "Consolidation": (SEVERITY, ("consolidation", "airspace consolidation", "focal consolidation"), LUNG),
    "Edema": (SEVERITY, ("pulmonary edema", "interstitial edema", "perihilar edema"), SIDES),
    "Pleural Effusion": (SIZE, ("pleural effusion", "effusion", "layering pleural effusion"), SIDES),
    "Pneumothorax": (SIZE, ("apical pneumothorax", "lateral pneumothorax", "pneumothorax"), SIDES),
    "Pneumonia": (SEVERITY, ("pneumonia", "patchy opacities, pneumonia", "infectious pneumonia"), LUNG),
}
"""Findings of the built-in cohort and CheXpert's competition classes: told apart wherever records have them."""

NAMED: Mapping[str, Words] = {
    "No Finding": (
        ("clear lungs,", "both lungs are clear,", "well expanded clear lungs,"),
        ("normal heart size,", "normal cardiomediastinal silhouette,"),
        ("normal chest radiograph", "no acute cardiopulmonary abnormality", "no focal airspace opacity"),
    ),
    "COVID-19": (
        ("patchy", "multifocal", "confluent"),
        ("ground-glass opacities", "airspace opacities", "consolidations"),
        ("in both lungs, covid-19", "in both lower zones, covid-19", "in the periphery of both lungs, covid-19"),
    ),
}
"""Classes that are told apart only where they are asked for by name: a normal film beside one disease."""


def prompts(name: str, count: int, seed: int) -> tuple[str, ...]:
    """``count`` different sentences of the class ``name``, or all it has. Name and ``seed`` alone decide which.

    A class that fedvlp has no sentences for, as one of a table of one's own, is its own prompt.
    """
    known = {**PROMPTS, **NAMED}
    if name not in known:
        return (name,)
    sentences = [" ".join(filter(None, words)) for words in product(*known[name])]
    generator = torch.Generator().manual_seed(seed_of(seed, "prompts", name))
    order = torch.randperm(len(sentences), generator=generator)[:count].tolist()
    return tuple(sentences[index] for index in order)
