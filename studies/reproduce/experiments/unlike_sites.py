"""PMS-FM's experiments: four unlike sites, a model for each, and a selector among them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedvlp.data.cohort import Cohort
from fedvlp.data.synthetic.cohort import SyntheticCohort
from fedvlp.evaluation.prompts import PROMPTS, prompts
from fedvlp.methods import Centralized, FedAvg
from fedvlp.models.selector import NO_FINDING, SelectorConfig
from fedvlp.objectives.medclip import MedCLIPConfig
from fedvlp.objectives.mgca import MGCAConfig
from fedvlp.run import presets
from fedvlp.run.experiment import Experiment, Partition, Source
from fedvlp.run.site_sources import SiteSources
from studies.claims.ledger import seeded
from studies.reproduce import measures
from studies.reproduce.experiments.records import MODEL, Cells, baseline, films_of_strangers, on_data, source
from studies.reproduce.table import DEMO, SMALLEST, Size, Study

PIXELS = 224
"""The paper pads and scales to what the model sees, and crops nothing."""

FOUR = ("chexpert", "mimic_cxr", "nih_cxr14", "candid_ptx")
COMPETITION = ("Atelectasis", "Cardiomegaly", "Consolidation", "Edema", "Pleural Effusion")
"""CheXpert's five classes, which the paper tells apart."""


def unlike_sites(size: Size, seed: int) -> Mapping[str, Experiment]:
    """Four unlike sites, MedCLIP's loss, and the methods of the main table; the selector's embeddings and fusions."""
    base = _small_unlike(size, seed) if size.demo else _four_data_sets(size, seed)
    local = base.method.local_steps
    plain = replace(base, extra=None, objective=MedCLIPConfig())
    wide = replace(base.training, batch_size=base.training.batch_size * (4 if size.demo else 1))
    cells: Cells = {
        "pms-fm": base,
        "fedavg": replace(plain, method=FedAvg(local_steps=local)),
        "centralized": replace(plain, method=Centralized(local_steps=local), training=wide),
    }
    for name in ("fedprox", "fedmoon"):
        cells[name] = replace(plain, method=replace(presets.get(name).method, local_steps=local))
    for name in ("fedsm", "fedfed"):
        preset = baseline(size, name)
        few: dict[str, Any] = {"distil_phases": 1, "distil_steps": 2} if name == "fedfed" and size.quick else {}
        cells[name] = replace(base, method=replace(preset.method, local_steps=local, **few), extra=preset.extra)
    mgca = MGCAConfig(prototypes=16 if size.quick else 500)
    cells |= {f"{name}-mgca": replace(cells[name], objective=mgca) for name in ("fedavg", "pms-fm")}
    return cells | _selectors(base)


def _four_data_sets(size: Size, seed: int) -> Experiment:
    """PMS-FM's paper preset with a data set a site, named so that their order is the paper's.

    A tenth of the patients with reports is public, and its reports are retrieved for CheXpert and NIH, which have none.
    """
    paper, findings = presets.get("pms-fm-paper"), tuple(PROMPTS)  # CANDID's only label is among these
    sites = tuple(
        (f"site-{number}-{name}", source(size, name, PIXELS, labels=findings))
        for number, name in enumerate(FOUR, start=1)
    )
    templates = tuple(prompts(name, 3, seed=100) for name in findings)
    selector: Any = paper.extra
    method = replace(paper.method, local_steps=1) if size.quick else paper.method
    base = replace(
        paper,
        data=SiteSources(sites),
        partition=Partition(sites=len(sites), public=0.1, retrieve=True),
        extra=replace(selector, classes=findings, templates=templates),
        method=method,
    )
    return on_data(size, base, seed)


IMAGE, REPORT = ("image",), ("image", "report")
SELECTORS: dict[str, dict[str, Any]] = {
    "image": {"embeddings": IMAGE},
    "report-attention": {"embeddings": REPORT, "fusion": "attention"},
    "report-mlp": {"embeddings": REPORT},
    "triple-attention": {"fusion": "attention"},
    "enhanced-self": {"embeddings": REPORT, "fusion": "self", "enhanced": True},
    "token-self": {"fusion": "self", "enhanced": False},
    "enhanced-mlp": {"embeddings": REPORT, "enhanced": True},
    "token-mlp": {"enhanced": False},
}
"""Of tables 4 and 5: embeddings and fusion of the selector, and whether the enhanced embedding is compared with."""


def _selectors(base: Experiment) -> Cells:
    """PMS-FM with other selectors; "pms-fm" itself has all embeddings, the MLP and the enhanced embedding."""
    preset: Any = base.extra
    assert isinstance(preset, SelectorConfig)
    return {f"selector-{name}": replace(base, extra=replace(preset, **of)) for name, of in SELECTORS.items()}


def _small_unlike(size: Size, seed: int) -> Experiment:
    preset = seeded(presets.get("pms-fm"), seed)
    model, data, training, method = replace(preset.model, init="tiny-pool"), preset.data, preset.training, preset.method
    if size.name == SMALLEST:
        model, data = MODEL, SyntheticCohort(sites=4, size=200, image_size=36, seed=seed, hard_site="site-2")
        training, method = replace(training, batch_size=8), replace(method, local_steps=1)
    else:
        method = replace(method, local_steps=20)
    rounds = replace(preset.rounds, rounds=4 if size.name == DEMO else 1, evaluate_every=0)
    return replace(preset, model=model, data=data, training=training, method=method, rounds=rounds)


@dataclass(frozen=True)
class OrNone:
    """Records of two labels: a film without the first, a finding, counts as one without any."""

    source: Source

    def build(self) -> Cohort:
        """The records, with the label "No Finding"."""
        cohort = self.source.build()
        found = cohort.labels[:, 0]
        return replace(cohort, labels=np.stack([found, 1 - found], axis=1))


def _told(size: Size) -> measures.ZeroShot:
    if size.demo:
        return measures.ZeroShot(selectors=not size.quick)
    classes = ("Pneumothorax", NO_FINDING)
    candid = OrNone(source(size, "candid_ptx", PIXELS, labels=classes))
    return measures.ZeroShot(not size.quick, COMPETITION, (len(FOUR), candid, classes))


LABELS = (
    "CANDID is labelled with Pneumothorax alone: its two classes are that and, by the prompts of No Finding, its "
    "absence. The other three have CheXpert's five."
)
ZERO_SHOT = Study(
    "unlike-sites",
    "unlike-sites",
    unlike_sites,
    _told,
    sources=FOUR,
    stands_in="Four unlike sites of the built-in cohort stand in for CheXpert, MIMIC, NIH and CANDID, in this order.",
    differs=LABELS,
)


def external(size: Size) -> measures.ElsewhereTold:
    """Two collections of no site, two classes each; the demo's are films of other people."""
    if not size.demo:
        rsna, covid = source(size, "rsna", PIXELS), source(size, "covid_radiography", PIXELS)
        return measures.ElsewhereTold(
            (("RSNA", rsna, ("Pneumonia", "No Finding")), ("COVID", covid, ("COVID-19", "No Finding")))
        )
    return measures.ElsewhereTold(
        (
            ("RSNA", films_of_strangers(size, 2000), ("Pneumonia", "Pneumothorax")),
            ("COVID", films_of_strangers(size, 2001), ("Edema", "Consolidation")),
        )
    )


EXTERNAL = Study(
    "unlike-sites-external",
    "unlike-sites",
    unlike_sites,
    external,
    sources=(*FOUR, "rsna", "covid_radiography"),
    stands_in="Four unlike sites of the built-in cohort stand in for CheXpert, MIMIC, NIH and CANDID. Drawn films of "
    "other people stand in for RSNA and COVID, and two findings for a disease and its absence: Pneumonia or "
    "Pneumothorax for Pneumonia or normal, Edema or Consolidation for COVID-19 or normal.",
    differs="RSNA: Pneumonia or normal, without films that are neither; the drawn 15 % test split. COVID: COVID-19 or "
    "normal of the COVID-19 Radiography Database, which the paper cites; the drawn 20 % test split.",
)
"""The same runs, and zero-shot on records of no site."""
