"""The figures of PMS-FM's claims: zero-shot of global, own and selected models, and how often a site is told."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import Tensor

from fedvlp.data.cohort import PUBLIC
from fedvlp.evaluation.zero_shot import GLOBAL, MEAN, PROMPTS, SELECTED
from fedvlp.models.selector import EMBEDDINGS, SelectorConfig
from fedvlp.run.assembly import Assembly
from fedvlp.run.evaluate import EVALUATIONS, Choices
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder
from studies.claims import site_selection
from studies.claims.cell_results import Figures

OWN = "own"
TOLD = "sites told in the run, %"
TOLD_ELSEWHERE = "the same without the site of retrieved reports"
LARGEST = "always the largest site, %"
STEPS, IMAGES = 100, 128
"""Of a selector trained anew: Adam steps, as many as the paper has rounds, and training images of each site."""


def accuracy(model: str) -> str:
    """Name of the zero-shot accuracy of the model "global", "own" or "selected", mean over sites."""
    return f"zero-shot accuracy, {model}, %"


def area(model: str) -> str:
    """Name of its macro AUC, mean over sites."""
    return f"zero-shot macro AUC, {model}, %"


def anew(embeddings: str) -> str:
    """Name of the share of sites told by a selector of these embeddings that is trained anew on the final encoders."""
    return f"sites told, {embeddings}, %"


IMAGE, TRIPLE = "image alone", "image, template and token"


def of_run(folder: RunFolder) -> Figures:
    """All figures of a finished run; those of a selector only where it has one."""
    table = EVALUATIONS["zero-shot"](folder, Choices())[0]
    figures = of_table(table)
    experiment = folder.experiment()
    if isinstance(experiment.extra, SelectorConfig):
        figures |= of_selector(folder, experiment, experiment.extra, train=bool(experiment.extra.templates))
    return figures


def of_table(path: Path) -> Figures:
    """The figures of the table that `fedvlp evaluate --what zero-shot` writes: means over sites, in percent.

    ``OWN`` is the mean of every site's own model at that site.
    """
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    figures = {}
    for model in (GLOBAL, SELECTED):
        for row in rows:
            if (row["model"], row["site"]) == (model, MEAN):
                figures[accuracy(model)] = float(row["accuracy"])
                figures[area(model)] = 100 * float(row["macro_auc"])
    own = [row for row in rows if row["model"] == row["site"]]
    if own:
        figures[accuracy(OWN)] = fmean(float(row["accuracy"]) for row in own if row["accuracy"])
        figures[area(OWN)] = 100 * fmean(float(row["macro_auc"]) for row in own if row["macro_auc"])
    return figures


def of_selector(folder: RunFolder, experiment: Experiment, config: SelectorConfig, train: bool = True) -> Figures:
    """How often the run's selector names the site of a test image, and with ``train`` others, with and without words.

    Beside it the share of the largest site, which who always names that site is right for.
    """
    assembly, saved = Assembly(experiment, folder.path), folder.server()
    assert saved is not None
    client = assembly.client("figures", None)
    client.load(experiment.method.finish(saved[0]))
    selector: Any = client.objective.extra
    data = {site: assembly.data(site) for site in assembly.data_sites()}
    test = site_selection.images_of(client, data, "test")
    classes = [name for name in assembly.cohort.label_names if name in PROMPTS]
    shares = site_selection.told(selector, client, test, classes)
    figures = {TOLD: weighted(shares, test), LARGEST: largest(test)}
    others = {site: images for site, images in test.items() if site not in retrieving(assembly)}
    figures[TOLD_ELSEWHERE] = weighted(shares, others)
    if not train:
        return figures
    images = site_selection.images_of(client, data, "train", IMAGES)
    rate: float = experiment.method.selector_lr  # type: ignore[attr-defined]
    for name, embeddings in ((IMAGE, ("image",)), (TRIPLE, EMBEDDINGS)):
        fresh = replace(config, embeddings=embeddings).build(assembly.config(), experiment.rounds.seed)
        site_selection.fit(fresh, client, images, STEPS, rate)
        figures[anew(name)] = weighted(site_selection.told(fresh, client, test, classes), test)
    return figures


def weighted(shares: Mapping[str, float], images: Mapping[str, Tensor]) -> float:
    """Percent of all ``images`` of the sites for which ``shares`` (0..1, by site) are right."""
    total = sum(map(len, images.values()))
    return 100 * sum(shares[site] * len(own) for site, own in images.items() if len(own)) / total


def largest(images: Mapping[str, Tensor]) -> float:
    """Percent of the images that the largest site has."""
    counts = [len(own) for own in images.values()]
    return 100 * max(counts) / sum(counts)


def retrieving(assembly: Assembly) -> Sequence[str]:
    """The sites whose training reports are all retrieved ones."""
    cohort = assembly.cohort
    source = cohort.report_from or ((),) * len(cohort)
    sites: dict[str, bool] = {}
    for row in cohort.rows("train"):
        site = (cohort.sites or ())[row]
        sites[site] = sites.get(site, True) and bool(source[row])
    return [site for site, all_retrieved in sites.items() if all_retrieved and site != PUBLIC]
