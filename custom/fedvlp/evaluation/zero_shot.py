"""Zero-shot classification by prompt ensembles, with one of several models chosen for each image (spec 7.3, 10.4).

PMS-FM (Wang et al., 2025, https://openreview.net/forum?id=zfLHmnU1fs). Differs from the released code: the true site is
no input of the selection, the model is chosen once per image and not per class, a class's prompts are an ensemble and
not one long text, and everything is keyed by class name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlp.core.client import Client
from fedvlp.core.types import State
from fedvlp.evaluation.classification import auc
from fedvlp.evaluation.output import new_figure, write_csv, write_png
from fedvlp.evaluation.prompts import prompts

GLOBAL, SELECTED, MEAN, TEST = "global", "selected", "mean", "test"
ENSEMBLES = ("mean", "max")

Texts = Mapping[str, Sequence[str]]
"""Prompts by class name."""

Embeddings = Mapping[str, Tensor]
"""Embedded prompts [P, d] by class name."""


@dataclass(frozen=True)
class ZeroShot:
    """The protocol. ``threshold`` above 1 always uses the global model."""

    classes: tuple[str, ...]
    threshold: float = 2.0  # a site's model is used where its probability is above this
    prompts: int = 10  # of each class
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)  # of the choice of prompts; figures are mean and deviation over them
    ensemble: str = "mean"  # of the cosines of a class's prompts: mean | max
    batch_size: int = 64

    def __post_init__(self) -> None:
        if len(self.classes) < 2:
            raise ValueError(f"zero-shot: {len(self.classes)} classes, expected at least 2")
        if self.ensemble not in ENSEMBLES:
            raise ValueError(f"zero-shot: ensemble {self.ensemble!r}, expected one of {', '.join(ENSEMBLES)}")


@dataclass(frozen=True)
class Result:
    """One model on one site's records: accuracy (percent) and macro AUC (0 to 1), mean and population deviation.

    Accuracy is over the ``single`` records that have exactly one of the classes; None where there is none.
    """

    model: str
    site: str
    records: int
    single: int
    accuracy: tuple[float, float] | None
    auc: tuple[float, float] | None


@dataclass(frozen=True)
class Choices:
    """Which model was chosen for the images of one site, as a share of them; mean over the prompt seeds."""

    site: str
    shares: dict[str, float]


@torch.no_grad()
def class_texts(client: Client, sentences: Texts) -> tuple[Embeddings, Embeddings, Tensor]:
    """Embeddings of the loaded model, by class: prompts e_r [P, d], fused e_f [P, d]; and the selector's words [W, d].

    Without a selector, e_f is e_r and there are no words.
    """
    selector: Any = getattr(client.objective, "extra", None)
    reports = {name: _text(client, texts) for name, texts in sentences.items()}
    if not hasattr(selector, "fused"):
        return reports, reports, torch.empty(0)
    words = _text(client, selector.words)
    fused = {name: selector.fused(one, words, _one(selector, name, one)) for name, one in reports.items()}
    return reports, fused, words


def _text(client: Client, texts: Sequence[str]) -> Tensor:
    ids, mask = client.model.tokenizer(texts)
    return client.model(client.here({"text": ids, "text_mask": mask})).text


def _one(selector: Any, name: str, like: Tensor) -> Tensor | None:
    """As many studies as ``like`` [N, d], with the one finding ``name``, as the selector reads labels: [N, W] bool."""
    if not selector.uses("token"):
        return None
    if name not in selector.words:
        raise ValueError(f"zero-shot: the selector was not trained with class {name!r}, only {selector.words}")
    return torch.tensor([word == name for word in selector.words]).to(like.device).expand(len(like), -1)


def class_scores(image: Tensor, texts: Embeddings, ensemble: str = "mean") -> Tensor:
    """[N, C]: the ensemble over each class's prompts [P, d] of their cosine with images [N, d]."""
    unit = F.normalize(image.double(), dim=1)
    cosines = [unit @ F.normalize(one.double(), dim=1).T for one in texts.values()]  # [N, P] each
    return torch.stack([c.mean(dim=1) if ensemble == "mean" else c.amax(dim=1) for c in cosines], dim=1)


@torch.no_grad()
def site_probabilities(selector: Any, image: Tensor, reports: Embeddings, words: Tensor) -> Tensor:
    """[N, K]: the selector's probabilities for images [N, d], mean over all prompts [P, d] of all classes."""
    found = []
    for name, texts in reports.items():
        present = _one(selector, name, image)
        for text in texts:
            logits = selector(image, text.expand(len(image), -1), words, present)
            found.append(logits.double().softmax(dim=1))
    return torch.stack(found).mean(dim=0)


def choose(probabilities: Tensor, threshold: float) -> Tensor:
    """[N] int64: the most probable site where its probability is above ``threshold``, else -1, the global model."""
    best, site = probabilities.max(dim=1)
    return torch.where(best > threshold, site, torch.full_like(site, -1))


@torch.no_grad()
def zero_shot(
    protocol: ZeroShot, client: Client, states: Mapping[str, State], data: Mapping[str, Any], label_names: Sequence[str]
) -> tuple[list[Result], list[Choices]]:
    """Judges every model of ``states`` on every site's test data: "global", and the sites' own in the selector's order.

    Where there is a selector and sites have models, "selected" is the model that it chooses for each image.
    """
    data = {site: records for site, records in data.items() if records.sizes.get(TEST, 0)}
    sentences = [{c: prompts(c, protocol.prompts, seed) for c in protocol.classes} for seed in protocol.seeds]
    columns = [list(label_names).index(name) for name in protocol.classes]
    selector: Any = getattr(client.objective, "extra", None)
    own = [name for name in states if name != GLOBAL]
    scores: dict[str, dict[str, Tensor]] = {site: {} for site in data}  # [seeds, N, C] by site and model
    chosen: dict[str, Tensor] = {}  # [seeds, N] by site: place in ``own``, -1 = global
    for name, state in states.items():
        client.load(state)
        client.model.eval()
        texts = [class_texts(client, one) for one in sentences]
        for site, records in data.items():
            image = _images(client, records, protocol.batch_size)
            found = [class_scores(image, fused, protocol.ensemble) for _, fused, _ in texts]
            scores[site][name] = torch.stack(found).cpu()
            if name == GLOBAL and own and hasattr(selector, "fused"):
                found = [site_probabilities(selector, image, reports, words) for reports, _, words in texts]
                chosen[site] = torch.stack([choose(one[:, : len(own)], protocol.threshold) for one in found]).cpu()
    names = (*own, GLOBAL)
    for site, choice in chosen.items():
        scores[site][SELECTED] = pick(torch.stack([scores[site][name] for name in names]), choice)
    results = []
    for site, records in data.items():
        labels = _labels(records, protocol.batch_size)[:, columns]
        results += [_judge(protocol, name, site, found, labels) for name, found in scores[site].items()]
    shares = {site: [float((choice % len(names) == i).double().mean()) for i in range(len(names))]
              for site, choice in chosen.items()}  # fmt: skip
    return results, [Choices(site, dict(zip(names, values, strict=True))) for site, values in shares.items()]


def pick(scores: Tensor, choice: Tensor) -> Tensor:
    """[S, N, C]: of scores [M, S, N, C] those of model ``choice`` [S, N], -1 being the last one."""
    index = (choice % len(scores))[None, :, :, None].expand(1, *scores.shape[1:])
    return scores.gather(0, index)[0]


def _images(client: Client, records: Any, batch_size: int) -> Tensor:
    batches = records.batches(TEST, batch_size, drop_last=False)
    return torch.cat([client.model({"image": batch["image"]}).image for batch in batches])


def _labels(records: Any, batch_size: int) -> Tensor:
    return torch.cat([batch["labels"] for batch in records.batches(TEST, batch_size, drop_last=False)]).cpu()


def _judge(protocol: ZeroShot, model: str, site: str, scores: Tensor, labels: Tensor) -> Result:
    """Figures of one model from scores [seeds, N, C] and labels [N, C]; uncertain labels count in no AUC."""
    single = (labels == 1).sum(dim=1) == 1
    truth = (labels == 1).int().argmax(dim=1)
    right = [100 * float((one[single].argmax(dim=1) == truth[single]).double().mean()) for one in scores]
    targets = torch.where(labels == -1, torch.nan, (labels == 1).float())
    areas = [area for one in scores if (area := auc(one, targets, protocol.classes).macro()) is not None]
    spread = [(fmean(values), pstdev(values)) if values else None for values in (right if single.any() else [], areas)]
    return Result(model, site, len(labels), int(single.sum()), *spread)


def over_sites(results: Sequence[Result]) -> dict[str, tuple[float, float]]:
    """(accuracy, AUC) of every model: the unweighted mean over sites, nan where no site has the figure."""
    means = {}
    for name in dict.fromkeys(result.model for result in results):
        mine = [result for result in results if result.model == name]
        figures = ([r.accuracy[0] for r in mine if r.accuracy], [r.auc[0] for r in mine if r.auc])
        means[name] = tuple(fmean(values) if values else float("nan") for values in figures)
    return means  # type: ignore[return-value]


def write_results(results: Sequence[Result], choices: Sequence[Choices], path: Path, title: str) -> list[Path]:
    """Writes ``<path>.csv``, the heat map of accuracy ``<path>.png`` and, with a selector, ``<path>-choices.csv``."""
    header: list[Any] = ["model", "site", "records", "single", "accuracy", "accuracy_std", "macro_auc", "macro_auc_std"]
    rows = [
        [r.model, r.site, r.records, r.single, *(r.accuracy or (None, None)), *(r.auc or (None, None))] for r in results
    ]
    rows += [[name, MEAN, None, None, mine[0], None, mine[1], None] for name, mine in over_sites(results).items()]
    files = [write_csv(path, [header, *rows]), write_png(path, _heat_map(results, title))]
    if choices:
        shares: list[list[Any]] = [
            ["site", "model", "share"],
            *([c.site, name, s] for c in choices for name, s in c.shares.items()),
        ]
        files.append(write_csv(path.with_name(f"{path.name}-choices"), shares))
    return files


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
