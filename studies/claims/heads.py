"""The figures of FedDRA's and FedRGB's claims beside recall at the sites: heads with few labels, and other records."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch

from fedvlp.data.loader import SiteData
from fedvlp.data.synthetic.drawn_cohort import COHORTS, SyntheticCohort
from fedvlp.evaluation import metric_names
from fedvlp.evaluation.linear_probe import ADAMW, LBFGS, LinearProbe, linear_probe
from fedvlp.evaluation.retrieval import Retrieval
from fedvlp.evaluation.segmentation import Segmentation, segmentation
from fedvlp.models.load import load_encoders
from fedvlp.run.experiment import Source
from fedvlp.run.folder import RunFolder
from studies.claims.cell_results import Figures


def head(data: str, share: str) -> str:
    """Name of the accuracy (or Dice) of a head that was trained on a ``share`` such as "1 %"."""
    return f"{data}, {share}"


@dataclass(frozen=True)
class Downstream:
    """One downstream data set: a probe's accuracy or, with a ``structure``, a decoder's Dice."""

    name: str
    data: Source
    fractions: tuple[float, ...]
    classes: tuple[str, ...] = ()
    structure: str = ""
    seeds: tuple[int, ...] = (42,)
    steps: int | None = None
    solver: str = ADAMW  # of a probe; the papers' AdamW hardly moves a head whose epoch is one step

    def __call__(self, model: Any) -> Figures:
        """The figures of the image tower of ``model``."""
        cohort = self.data.build()
        if self.structure:
            decoder = Segmentation(self.structure, self.fractions, self.seeds, resamples=0)
            drawn = segmentation(decoder, model, cohort, self.steps)
            return {head(self.name, one.subset): one.dice.value for one in drawn.results}
        probe = LinearProbe(self.classes, self.fractions, seeds=self.seeds, solver=self.solver, resamples=0)
        probed = linear_probe(probe, model, cohort, self.steps)
        return {head(self.name, one.subset): one.accuracy.value for one in probed.results}


CLASSIFIED, SEGMENTED, OUTSIDE = "accuracy of heads", "Dice", "R@1 at other sites"
SHARES = ("1 %", "10 %")
TASKS = {"RSNA": ("Pneumonia",), "Covid": ("Edema", "Consolidation", "Pneumothorax")}
"""Findings of synthetic images that stand in for the labels of the two collections of both papers."""

STRANGERS = 2000
"""Added to a run's seed: that of patients whom no run knows."""


def classified(folder: RunFolder) -> Figures:
    """Mean over the two tasks of the accuracy of linear heads with few labels, solved exactly, over five draws each."""
    model, images = _opened(folder)
    figures: Figures = {}
    for name, findings in TASKS.items():
        figures |= Downstream(name, images, (0.01, 0.1), findings, seeds=(42, 43, 44, 45, 46), solver=LBFGS)(model)
    means = {head(CLASSIFIED, share): fmean(figures[head(name, share)] for name in TASKS) for share in SHARES}
    return figures | means


def segmented(folder: RunFolder) -> Figures:
    """Dice of a decoder with few masks, trained for 60 steps on the frozen tower."""
    model, images = _opened(folder)
    return Downstream(SEGMENTED, images, (0.01, 0.1), structure="Pneumonia", steps=60)(model)


def outside(folder: RunFolder) -> Figures:
    """Recall at sites with scanners and habits that no site of the run has, and with other shares of findings."""
    model, images = _opened(folder)
    cohort = replace(
        COHORTS["scanner-shift"], size=1200, test_rows=96, image_size=images.image_size, seed=images.seed
    ).build()
    records = SiteData(cohort, {"test": cohort.rows("test")}, model.tokenizer, model.config.image_size)
    return {OUTSIDE: Retrieval().measure(model, records, "test")[metric_names.recall("test", 1)]}


def _opened(folder: RunFolder) -> tuple[Any, SyntheticCohort]:
    """The trained model of a run, and synthetic images of patients whom it does not know, other ones for every seed."""
    experiment = folder.experiment()
    torch.set_num_threads(experiment.training.threads)
    data: Any = experiment.data
    images = SyntheticCohort(1, 2000, data.image_size, beta=1000.0, seed=STRANGERS + experiment.rounds.seed)
    return load_encoders(folder.path), images
