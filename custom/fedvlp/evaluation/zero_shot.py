"""Zero-shot classification by prompt ensembles, with one of several models chosen for each image (spec 7.3, 10.4).

PMS-FM (Wang et al., 2025, https://openreview.net/forum?id=zfLHmnU1fs). Differs: in the released code the true site is
an input of the selection, a model is chosen for each class, and a class's prompts are one long text. Here the model is
chosen once for each image, without its site; the prompts of a class are an ensemble; all is keyed by class name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlp.core.client import Client, embedded_texts
from fedvlp.core.seeds import seed as seed_of
from fedvlp.core.types import State
from fedvlp.evaluation.classification import auc, refuse_nan
from fedvlp.evaluation.downstream import refuse_repeated
from fedvlp.evaluation.output import new_figure, write_csv, write_png
from fedvlp.evaluation.retrieval import embed_images
from fedvlp.methods.prompt_learning import ClassText
from fedvlp.models.selector import Selector

# Sentences that name a class, for zero-shot classification: severity x kind x location, by class (spec 10.4).
#
# The words of COVID-19 are what radiologists saw on the first images of 96 patients: ground-glass opacities and
# consolidations, in most patients multifocal, in both lungs and in the lower zones
# (http://www.smj.org.sg/article/radiographic-features-covid-19-based-initial-cohort-96-patients-singapore). Those of
# No Finding are a normal report's. PMS-FM's released code has none for a normal image beside COVID-19 (spec 10.4).

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
"""Findings of the synthetic cohort and CheXpert's competition classes: classified wherever records have them."""

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
"""Classes that are distinguished only where they are asked for by name: a normal image beside one disease."""


NORMAL = ("the lungs are clear", "normal heart size and mediastinal contours", "no acute cardiopulmonary abnormality")
"""What a report says of an image without any of the findings in ``PROMPTS``: it denies them all."""


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


log = logging.getLogger(__name__)

GLOBAL, SELECTED, MEAN, TEST = "global", "selected", "mean", "test"
ENSEMBLES = ("mean", "max")

Texts = Mapping[str, Sequence[str]]
"""Prompts by class name."""

Embeddings = Mapping[str, Tensor]
"""Embedded prompts [P, d] by class name."""

Load = Callable[[Client, State, str], None]
"""Puts a model into a client as a site has it."""


@dataclass(frozen=True)
class ZeroShot:
    """The protocol. Raises ValueError for fewer than 2 classes, one that is named twice, or an unknown ensemble."""

    classes: tuple[str, ...]  # names of at least 2 labels
    threshold: float = 2.0  # a site's model is used where its probability is above this; above 1: always the global one
    prompts: int = 10  # of each class
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)  # of the choice of prompts; figures are mean and deviation over them
    ensemble: str = "mean"  # of the cosines of a class's prompts: "mean" or "max"
    batch_size: int = 64  # images embedded at once
    absence: bool = True  # of findings, less the cosine with a report that denies them; False: the phrases alone
    new_words: bool = False  # a selector sees the names of classes that it was not trained with; else they are refused

    def __post_init__(self) -> None:
        if len(self.classes) < 2:
            raise ValueError(f"zero-shot: {len(self.classes)} classes, expected at least 2")
        refuse_repeated(self.classes, "zero-shot")
        if self.ensemble not in ENSEMBLES:
            raise ValueError(f"zero-shot: ensemble {self.ensemble!r}, expected one of {', '.join(ENSEMBLES)}")

    @property
    def denied(self) -> bool:
        """Whether scores are of presence against absence: where every class is a finding that a report can deny."""
        return self.absence and PROMPTS.keys() >= set(self.classes)


@dataclass(frozen=True)
class Result:
    """One model on one site's test records; a figure is (mean, population standard deviation) over the prompt seeds."""

    model: str
    site: str
    records: int
    single: int  # records with exactly one of the classes
    accuracy: tuple[float, float] | None  # percent, over the ``single`` records; None where there are none
    auc: tuple[float, float] | None  # macro AUC, 0..1; None where no class has both kinds of records


@dataclass(frozen=True)
class SelectorChoices:
    """Which models were chosen for the images of one site."""

    site: str
    shares: dict[str, float]  # model -> share of the images, 0..1, mean over the prompt seeds


@torch.no_grad()
def class_texts(client: Client, sentences: Texts, new_words: bool = False) -> tuple[Embeddings, Embeddings, Tensor]:
    """Text embeddings of the loaded model: prompts e_r and fused e_f, [P, d] by class, and the words [W, d].

    The words are the selector's and then, with ``new_words``, the names of classes that it was not trained with.
    Without a selector e_f is e_r, and there are no words. Raises ValueError for such classes without ``new_words``.
    """
    selector: Any = client.extra
    if isinstance(selector, ClassText):  # it has learned what the classes are called
        learned = selector.directions(client.model, list(sentences))
        directions = {name: one[None] for name, one in zip(sentences, learned, strict=True)}
        return directions, directions, torch.empty(0)
    reports = {name: embedded_texts(client, texts) for name, texts in sentences.items()}
    if not isinstance(selector, Selector):
        return reports, reports, torch.empty(0)
    if not new_words:
        _refuse_new(selector, sentences)
    words = embedded_texts(client, _words(selector, sentences))
    fused = {
        name: selector.fused(report, words, _only(selector, name, report, reports)) for name, report in reports.items()
    }
    return reports, fused, words


def absent_texts(protocol: ZeroShot, client: Client) -> Tensor | None:
    """Text embeddings [P, d] of a report without findings by the loaded model; None where they are not asked for.

    A selector that changes what a report says, and what has learned what classes are called, have words of their own.
    """
    extra: Any = client.extra
    fuses = isinstance(extra, Selector) and extra.config.fuses_text and extra.config.enhanced is not False
    own = fuses or isinstance(extra, ClassText)
    return embedded_texts(client, NORMAL) if protocol.denied and not own else None


def _words(selector: Any, classes: Iterable[str]) -> tuple[str, ...]:
    """The selector's words, and then those of ``classes`` that are none of them.

    A class's token is made of the embedding of its name (spec 7.1), so there is one for any name.
    """
    return (*selector.words, *(name for name in classes if name not in selector.words))


def _refuse_new(selector: Any, classes: Iterable[str]) -> None:
    for name in classes if selector.config.fuses_text else ():
        if name not in selector.words:
            raise ValueError(f"zero-shot: the selector was not trained with class {name!r}, only {selector.words}")


def _only(selector: Any, name: str, like: Tensor, classes: Iterable[str]) -> Tensor | None:
    """``present`` [N, W] of the selector for N studies (``like`` [N, d]) that have the finding ``name`` only."""
    if not selector.config.fuses_text:
        return None
    marks = torch.tensor([word == name for word in _words(selector, classes)])
    return marks.to(like.device).expand(len(like), -1)


def class_scores(image: Tensor, texts: Embeddings, ensemble: str = "mean", absent: Tensor | None = None) -> Tensor:
    """Scores [N, C]: the mean (or max) over each class's prompts [P, d] of their cosine with images [N, d].

    Minus the mean cosine with ``absent`` [Q, d], where that is given: the same for every class of an image, so that
    which class is highest does not hang on it, and which image is does. Raises ValueError for a score that is nan, as
    a diverged model gives.
    """
    unit = F.normalize(image.double(), dim=1)
    scores = []
    for prompts_of_class in texts.values():
        cosine = unit @ F.normalize(prompts_of_class.double(), dim=1).T  # [N, P]
        scores.append(cosine.mean(dim=1) if ensemble == "mean" else cosine.amax(dim=1))
    stacked = torch.stack(scores, dim=1)
    if absent is not None:
        stacked = stacked - (unit @ F.normalize(absent.double(), dim=1).T).mean(dim=1, keepdim=True)
    refuse_nan(stacked, "zero-shot")
    return stacked


@torch.no_grad()
def site_probabilities(selector: Any, image: Tensor, reports: Embeddings, words: Tensor) -> Tensor:
    """Probabilities [N, K] of the K sites for images [N, d]: the mean over all prompts [P, d] of all classes.

    ``words`` [W, d] are those of ``class_texts`` for the classes of ``reports``.
    """
    probabilities = []
    for name, texts in reports.items():
        present = _only(selector, name, image, reports)
        for text in texts:
            logits = selector(image, text.expand(len(image), -1), words, present)
            probabilities.append(logits.double().softmax(dim=1))
    return torch.stack(probabilities).mean(dim=0)


def choose(probabilities: Tensor, threshold: float) -> Tensor:
    """The model of each image, [N] int64: the most probable of K sites, from ``probabilities`` [N, K].

    -1, the global model, where no probability is above ``threshold``.
    """
    best, site = probabilities.max(dim=1)
    return torch.where(best > threshold, site, torch.full_like(site, -1))


@torch.no_grad()
def zero_shot(
    protocol: ZeroShot,
    client: Client,
    states: Mapping[str, State],
    data: Mapping[str, Any],
    label_names: Sequence[str],
    load: Load | None = None,
) -> tuple[list[Result], list[SelectorChoices]]:
    """Measures every model of ``states`` on the test split of every site's ``data`` (site -> SiteData).

    ``states`` has the model "global" and may have the sites' own, in the order of the selector's sites. With both a
    selector and sites' models, the model "selected" is the one that it chooses for each image. ``label_names`` are the
    data's. ``load`` makes of a model what a site has, where sites differ in that. Raises ValueError for a class without
    prompts, or that is no label.
    """
    data = {site: records for site, records in data.items() if records.sizes.get(TEST, 0)}
    sentences = [  # of each seed, by class
        {name: prompts(name, protocol.prompts, seed) for name in protocol.classes} for seed in protocol.seeds
    ]
    columns = [list(label_names).index(name) for name in protocol.classes]
    selector: Any = client.extra
    own = [name for name in states if name != GLOBAL]
    scores: dict[str, dict[str, Tensor]] = {site: {} for site in data}  # [seeds, N, C] by site and model
    named: dict[str, float] = {}  # site -> share of its images that the selector takes for its own
    chosen: dict[str, Tensor] = {}  # [seeds, N] by site: index in ``own``, -1 is the global model
    for name, state in states.items():
        texts: list[tuple[Embeddings, Embeddings, Tensor]] = []
        absent: Tensor | None = None
        for site, records in data.items():
            if load is not None:
                load(client, state, site)
            elif not texts:
                client.load(state)
            client.model.eval()
            if load is not None or not texts:
                texts = [class_texts(client, one, protocol.new_words) for one in sentences]
                absent = absent_texts(protocol, client)
            image = test_images(client, records, protocol.batch_size, None)
            by_seed = [class_scores(image, fused, protocol.ensemble, absent) for _, fused, _ in texts]
            scores[site][name] = torch.stack(by_seed).cpu()
            if name == GLOBAL and own and isinstance(selector, Selector):
                probabilities = _told_sites(selector, image, texts)[:, :, : len(own)]
                chosen[site] = torch.stack([choose(of_seed, protocol.threshold) for of_seed in probabilities]).cpu()
                if site in own:
                    named[site] = float((probabilities.argmax(dim=2) == own.index(site)).double().mean())
    _say_near_chance(named)
    names = (*own, GLOBAL)
    for site, choice in chosen.items():
        scores[site][SELECTED] = pick(torch.stack([scores[site][name] for name in names]), choice)
    results = []
    for site, records in data.items():
        labels = test_labels(records, protocol.batch_size)[:, columns]
        results += [_judge(protocol, name, site, by_seed, labels) for name, by_seed in scores[site].items()]
    return results, [SelectorChoices(site, _shares(choice, names)) for site, choice in chosen.items()]


def _told_sites(selector: Selector, image: Tensor, texts: Sequence[tuple[Embeddings, Embeddings, Tensor]]) -> Tensor:
    """[seeds, N, sites]: how likely the selector holds each image to be each site's, with the prompts of each seed."""
    return torch.stack([site_probabilities(selector, image, reports, words) for reports, _, words in texts])


def _say_near_chance(named: Mapping[str, float]) -> None:
    """Warns of sites that the selector names for no more of their images than by chance."""
    if low := [site for site, share in named.items() if share <= 1 / len(named)]:
        log.warning(
            "zero-shot: the selector names %s for at most %.0f %% of their own images, no more than by chance: other "
            "sites' models are used there. Train it longer or faster (rounds, method.selector_lr), or judge the global "
            "model",
            ", ".join(low),
            100 * max(named[site] for site in low),
        )


def _shares(choice: Tensor, names: Sequence[str]) -> dict[str, float]:
    """Model -> share of the entries of ``choice`` [S, N] that name it; -1 is the last model."""
    index = choice % len(names)
    return {name: float((index == number).double().mean()) for number, name in enumerate(names)}


def pick(scores: Tensor, choice: Tensor) -> Tensor:
    """Of the scores [M, S, N, C] of M models, those [S, N, C] of the model ``choice`` [S, N]; -1 is the last one."""
    index = (choice % len(scores))[None, :, :, None].expand(1, *scores.shape[1:])
    return scores.gather(0, index)[0]


def test_images(client: Client, records: Any, batch_size: int, rows: Tensor | None) -> Tensor:
    """Unit vectors [N, d] of the test images, as what stands beside the model changes them; of ``rows`` [N], or all."""
    vectors = torch.cat([*embed_images(client.model, records.batches(TEST, batch_size, drop_last=False, rows=rows))])
    return client.extra.images(vectors) if isinstance(client.extra, ClassText) else vectors


def test_labels(records: Any, batch_size: int) -> Tensor:
    """Labels [N, L] of the test records, on the CPU."""
    return torch.cat([batch["labels"] for batch in records.batches(TEST, batch_size, drop_last=False)]).cpu()


def _judge(protocol: ZeroShot, model: str, site: str, scores: Tensor, labels: Tensor) -> Result:
    """Figures of one model from scores [seeds, N, C] and labels [N, C]; uncertain ones count in no AUC, blank as 0."""
    single = (labels == 1).sum(dim=1) == 1
    truth = (labels == 1).int().argmax(dim=1)
    targets = torch.where(labels == -1, torch.nan, (labels == 1).float())
    accuracies: list[float] = []
    areas: list[float] = []
    for by_seed in scores:
        if single.any():
            right = by_seed[single].argmax(dim=1) == truth[single]
            accuracies.append(100 * float(right.double().mean()))
        area = auc(by_seed, targets, protocol.classes).macro()
        if area is not None:
            areas.append(area)
    return Result(model, site, len(labels), int(single.sum()), _spread(accuracies), _spread(areas))


def _spread(values: Sequence[float]) -> tuple[float, float] | None:
    """Mean and population standard deviation; None without a value."""
    return (fmean(values), pstdev(values)) if values else None


def over_sites(results: Sequence[Result]) -> dict[str, tuple[float, float]]:
    """Model -> (accuracy in percent, macro AUC), unweighted means over sites; nan where no site has the figure."""
    means = {}
    for name in dict.fromkeys(result.model for result in results):
        of_model = [result for result in results if result.model == name]
        accuracies = [result.accuracy[0] for result in of_model if result.accuracy]
        areas = [result.auc[0] for result in of_model if result.auc]
        means[name] = (_mean(accuracies), _mean(areas))
    return means


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else float("nan")


def write_results(results: Sequence[Result], choices: Sequence[SelectorChoices], path: Path, title: str) -> list[Path]:
    """Writes ``<path>.csv``, the heat map of accuracy ``<path>.png`` and, with a selector, ``<path>-choices.csv``."""
    header: list[Any] = ["model", "site", "records", "single", "accuracy", "accuracy_std", "macro_auc", "macro_auc_std"]
    rows = [
        [r.model, r.site, r.records, r.single, *(r.accuracy or (None, None)), *(r.auc or (None, None))] for r in results
    ]
    rows += [
        [name, MEAN, None, None, accuracy, None, area, None] for name, (accuracy, area) in over_sites(results).items()
    ]
    files = [write_csv(path, [header, *rows]), write_png(path, _heat_map(results, title))]
    if choices:
        shares: list[list[Any]] = [
            ["site", "model", "share"],
            *([c.site, name, s] for c in choices for name, s in c.shares.items()),
        ]
        files.append(write_csv(path.with_name(f"{path.name}-choices"), shares))
    return files


def write_subgroups(results: Sequence[Result], path: Path) -> Path:
    """Writes ``<path>-subgroups.csv``, of results whose "site" is a subgroup of people ("sex: F")."""
    header: list[Any] = ["model", "subgroup", "records", "single", "accuracy", "macro_auc"]
    rows = [[r.model, r.site, r.records, r.single, (r.accuracy or (None,))[0], (r.auc or (None,))[0]] for r in results]
    return write_csv(path.with_name(f"{path.name}-subgroups"), [header, *rows])


def _heat_map(results: Sequence[Result], title: str) -> Any:
    models = list(dict.fromkeys(result.model for result in results))
    sites = list(dict.fromkeys(result.site for result in results))
    cell = {(r.model, r.site): r.accuracy[0] for r in results if r.accuracy}
    means = over_sites(results)
    nan = float("nan")
    values = [[*(cell.get((model, site), nan) for site in sites), means[model][0]] for model in models]
    figure, axes = new_figure(max(6.0, 2.6 + 0.95 * len(sites)), 1.9 + 0.5 * len(models))
    image = axes.imshow(values, cmap="Blues", vmin=0, vmax=100, aspect="auto")
    axes.set_xticks(range(len(sites) + 1), [*sites, MEAN])
    axes.set_yticks(range(len(models)), models)
    axes.set(xlabel="measured on the test records of", ylabel="model", title=title)
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            colour = "white" if value > 60 else "black"
            axes.text(x, y, f"{value:.1f}", ha="center", va="center", fontsize="small", color=colour)
    figure.colorbar(image, ax=axes, label="zero-shot accuracy, %")
    return figure
