"""What is measured of a finished cell: its history, heads on the frozen tower, models at other sites, zero-shot."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from fedvlp.core.metric_keys import BYTES_DOWN, BYTES_UP
from fedvlp.data.cohort import Cohort
from fedvlp.data.loader import SiteData
from fedvlp.evaluation import metric_names as names
from fedvlp.evaluation.retrieval import Retrieval
from fedvlp.models.load import load_encoders
from fedvlp.models.selector import SelectorConfig
from fedvlp.run.assembly import Assembly
from fedvlp.run.evaluate import Choices, choices_of, last_server, models_at_sites, paired_sites, zero_shot
from fedvlp.run.experiment import Source
from fedvlp.run.folder import RunFolder
from fedvlp.run.metrics import by_site, of_server
from studies.claims import ledger, selection
from studies.claims.cell_results import Figures, spent
from studies.claims.ensembles import KS, RSUM
from studies.protocols import EVALUATIONS
from studies.protocols.distortion import MEAN
from studies.protocols.vqa import VQA, vqa

AVERAGE, WORST = ledger.AVERAGE, ledger.WORST
AVERAGE5, WORST5 = (names.over_sites(names.recall("test", 5), kind) for kind in (names.AVERAGE, names.WORST))
DISPARITY = names.over_sites(names.recall("test", 1), names.DISPARITY)
MEGABYTES = "megabytes a round, to and from all sites"


def at_site(site: str, k: int = 1) -> str:
    """Name of the in-batch Recall@k of the run's model on a site's test records."""
    return f"R@{k} at {site}"


def own(site: str) -> str:
    """Begins the names of the figures of the model that a site trained alone."""
    return f"{site}'s own model: "


def cosine_at(site: str) -> str:
    """Begins the names of the paired cosine of a site's validation records by round, that of the starting model."""
    return f"cosine of the pairs at {site}, round "


def cost(folder: RunFolder) -> Figures:
    """Megabytes on the wire in a mean round."""
    used, rounds = spent(folder.history()), folder.experiment().rounds.rounds
    return {MEGABYTES: (used[BYTES_DOWN] + used[BYTES_UP]) / 1e6 / max(1, rounds)}


@dataclass(frozen=True)
class Alignment:
    """Recall over sites, at each site and by round, cost, and downstream heads."""

    downstream: tuple[Callable[[Any], Figures], ...] = field(default=())

    def __call__(self, folder: RunFolder) -> Figures:
        """All figures of a finished run; of sites that trained alone, means over their models."""
        torch.set_num_threads(folder.experiment().training.threads)
        figures = ledger.trained(folder) | self._history(folder) | cost(folder)
        alone, heads = 0, list[Figures]()
        for site, model, recalls in models(folder):
            alone += bool(site)
            figures |= {own(site) + name: value for name, value in recalls.items()}
            heads.append(dict(pair for one in self.downstream for pair in one(model).items()))
        if alone:
            figures |= _of_local_models(figures, folder)
        return figures | {name: fmean(one[name] for one in heads) for name in heads[0]}

    @staticmethod
    def _history(folder: RunFolder) -> Figures:
        figures: Figures = {}
        cosine = names.similarity("val")
        for record in folder.history():
            sites = by_site(record)
            for site, of_site in sites.items():
                if cosine in of_site:
                    figures[f"{cosine_at(site)}{record['round']}"] = of_site[cosine]
                figures |= {
                    at_site(site, k): of_site[name] for k in (1, 5) if (name := names.recall("test", k)) in of_site
                }
        return figures


def models(folder: RunFolder) -> Iterator[tuple[str, Any, Figures]]:
    """The models of a run: ("", model, {}), or of each site that trained alone, with its recalls at every site."""
    assembly = Assembly(folder.experiment(), folder.path)
    method = folder.experiment().method
    state = method.finish(last_server(folder))
    starts = models_at_sites(assembly, state)
    if not starts:
        yield "", load_encoders(folder.path), {}  # as it was exported: a target that stays at the sites is not in it
        return
    data = paired_sites(assembly)
    for site, of_site in starts.items():
        client = assembly.client("figures", None)
        client.load(of_site)
        client.model.eval()
        figures: Figures = {}
        for other, records in data.items():
            measured = Retrieval().measure(client.model, records, "test")
            figures |= {at_site(other, k): measured[names.recall("test", k)] for k in (1, 5)}
        yield site, client.model, figures


def _of_local_models(figures: Figures, folder: RunFolder) -> Figures:
    """ "Decentralized" as both papers report it: at each site the mean over all models; then mean and worst over sites.

    docs/methods/baselines.md: this gives the 15.51 and 13.62 that FedDRA's paper prints.
    """
    sites = list(paired_sites(Assembly(folder.experiment(), folder.path)))
    over: Figures = {}
    for k, average, worst in ((1, AVERAGE, WORST), (5, AVERAGE5, WORST5)):
        means = {one: fmean(figures[own(other) + at_site(one, k)] for other in sites) for one in sites}
        over |= {at_site(site, k): value for site, value in means.items()}
        over |= {average: fmean(means.values()), worst: min(means.values())}
        for one in sites:
            over[own(one) + names.over_sites(names.recall("test", k), names.AVERAGE)] = fmean(
                figures[own(one) + at_site(other, k)] for other in sites
            )
    return over


def outside(k: int) -> str:
    """Name of the in-batch Recall@k on records of no site of the run."""
    return f"R@{k} outside the sites"


@dataclass(frozen=True)
class Outside:
    """Retrieval outside the training sites: recall of the run's model on other records, beside that at the sites."""

    data: Source

    def __call__(self, folder: RunFolder) -> Figures:
        """All figures of ``Alignment``, and Recall@1 and @5 in batches of 32 of the test pairs of ``data``.

        Pairs of people whom the run was trained on are left out. Raises ValueError where no batch is left.
        """
        figures, cohort, size = Alignment()(folder), self.data.build(), Retrieval().batch_size
        rows = unseen(cohort, Assembly(folder.experiment(), folder.path).cohort)
        if len(rows) < size:
            raise ValueError(
                f"reproduce: {len(rows)} test pairs of people whom the run was not trained on, expected at least "
                f"{size}; choose records of other people"
            )
        by_model = []
        for _, model, _ in models(folder):
            records = SiteData(cohort, {"test": rows}, model.tokenizer, model.config.image_size)
            by_model.append(Retrieval().measure(model, records, "test"))
        return figures | {outside(k): fmean(one[names.recall("test", k)] for one in by_model) for k in (1, 5)}


def unseen(cohort: Cohort, trained: Cohort) -> np.ndarray:
    """The rows [n] of the test pairs of a cohort whose patients have no training record in the cohort ``trained``."""
    people = {trained.patients[row] for row in trained.rows("train")}
    paired = cohort.has_image() & cohort.has_report()
    rows = [row for row in cohort.rows("test").tolist() if paired[row] and cohort.patients[row] not in people]
    return np.array(rows, dtype=np.int64)


@dataclass(frozen=True)
class Retrained:
    """What re-training does to a model at other sites: the tables of ``fedvlp evaluate --what distortion|shallow``.

    Beside it all figures of ``Alignment``, which are those before. A model of pooled records is not re-trained.
    """

    what: str
    steps: int | None = None

    def __call__(self, folder: RunFolder) -> Figures:
        """Distortion and recall after, by the site that was trained on and the one that is measured, and means."""
        figures = Alignment()(folder)
        if folder.experiment().method.pooled:
            return figures
        choices = choices_of(EVALUATIONS[self.what])(steps=self.steps)
        table = EVALUATIONS[self.what](folder, choices)[0]
        with table.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        by_model: dict[str, Figures] = {}
        for row in rows:
            if row["trained_on"] != MEAN:
                after = by_model.setdefault(retrained(row["trained_on"].partition("'")[0]), {})
                after[distorted(row["measured_on"])] = float(row["distortion"])
                after |= {
                    at_site(row["measured_on"], k): float(value) for k in (1, 5) if (value := row[f"recall{k}_after"])
                }
        names_of_each = next(iter(by_model.values()))
        by_model[retrained(MEAN)] = {name: fmean(of[name] for of in by_model.values()) for name in names_of_each}
        for model, after in by_model.items():
            for k, average in ((1, AVERAGE), (5, AVERAGE5)):
                if at_sites := [value for name, value in after.items() if name.startswith(at_site("", k))]:
                    figures[model + average] = fmean(at_sites)
            figures |= {model + name: value for name, value in after.items()}
        return figures


def distorted(site: str) -> str:
    """Name of the mean distortion of a site's records."""
    return f"distortion at {site}"


def retrained(site: str) -> str:
    """Begins the figures of a model that was re-trained on a site, or that a site had trained; ``MEAN``: of a mean."""
    return f"re-trained, {site}: "


# CreamFL

R1_SUM = "R@1 sum"


def ranked(direction: str, k: int) -> str:
    """Name of the server's Recall@k of one direction, on the whole of the public test records."""
    return f"public test records, {direction.replace('i2t', 'image to text').replace('t2i', 'text to image')}, R@{k}"


def among_all(direction: str, k: int) -> str:
    """The same of COCO, among all of its 5,000 test images (5K); ``ranked`` is then the mean over five folds (1K)."""
    return f"{ranked(direction, k)}, all images"


RANKS = tuple((direction, k) for direction in (names.I2T, names.T2I) for k in (1, 5, 10))


def at_the_server(folder: RunFolder) -> Figures:
    """The summary, and the sum of the server's recalls on the public set's test split."""
    figures = ledger.trained(folder)
    recalls = [figures[of_server(names.recall("test", k, names.WHOLE_SET))] for k in KS]
    return {**figures, RSUM: sum(recalls)}


def server(folder: RunFolder) -> Figures:
    """The server's recalls on the public set's test split, both directions, their sums, and the cost."""
    summary = at_the_server(folder)
    figures = {ranked(*rank): _of_public(summary, *rank, names.WHOLE_SET) for rank in RANKS}
    return {RSUM: summary[RSUM], R1_SUM: _sum(figures, ranked)} | figures | cost(folder)


def coco(folder: RunFolder) -> Figures:
    """The same as CreamFL's paper has it of COCO: of 1K and 5K images, and the sum of four Recall@1.

    Raises ValueError where the test images are not five folds.
    """
    summary = at_the_server(folder)
    if of_server(names.recall("test", 1, names.FOLDS, names.I2T)) not in summary:
        raise ValueError(
            "reproduce: the public test images cannot be cut into five folds, expected COCO's 5,000; see in the log "
            "whether all of them were read"
        )
    figures = {ranked(*rank): _of_public(summary, *rank, names.FOLDS) for rank in RANKS}
    figures |= {among_all(*rank): _of_public(summary, *rank, names.WHOLE_SET) for rank in RANKS}
    total = _sum(figures, ranked) + _sum(figures, among_all)
    return {RSUM: summary[RSUM], R1_SUM: total} | figures | cost(folder)


def _of_public(summary: Figures, direction: str, k: int, scope: str) -> float:
    return summary[of_server(names.recall("test", k, scope, direction))]


def _sum(figures: Figures, name: Callable[[str, int], str]) -> float:
    return figures[name(names.I2T, 1)] + figures[name(names.T2I, 1)]


VQA_OFFICIAL, VQA_CLASS = "VQA accuracy, %", "share of questions with the most common answer, %"
VQA_MAJORITY, VQA_BLIND = "VQA accuracy of the majority answer, %", "VQA accuracy of the majority answer by question, %"


@dataclass(frozen=True)
class Answers:
    """Answers of a head on the towers of the server's model to questions about images of other people."""

    data: Source
    steps: int | None = None

    def __call__(self, folder: RunFolder) -> Figures:
        """Both metrics, and the official one of answers that no image is needed for."""
        torch.set_num_threads(folder.experiment().training.threads)
        answered = vqa(VQA(resamples=0), load_encoders(folder.path), self.data.build(), self.steps)
        every = answered.results[0]
        return {
            VQA_OFFICIAL: every.official.value,
            VQA_CLASS: every.accuracy.value,
            VQA_MAJORITY: every.majority_official,
            VQA_BLIND: every.by_question_official,
        }


# PMS-FM


def deployed(site: str) -> str:
    """Name of the zero-shot accuracy, 0..1, at a site ("mean": over sites) of the selected model, or the global one."""
    return f"accuracy of the deployed model, {site}"


def spread(figure: str) -> str:
    """Name of the standard deviation of an accuracy over the seeds of the prompts; of a mean, the mean of those."""
    return f"{figure}, spread over prompts"


@dataclass(frozen=True)
class ZeroShot:
    """Zero-shot accuracy 0..1, as PMS-FM prints it, and what its ledger measures."""

    selectors: bool = True  # also of two selectors that are trained anew
    classes: tuple[str, ...] = ()  # that are told apart; none: all findings with prompts
    # number of a site whose records have one label, those records, and the two classes that are told apart there
    alone: tuple[int, Source, tuple[str, str]] | None = None

    def __call__(self, folder: RunFolder) -> Figures:
        """The figures of a finished run."""
        experiment = folder.experiment()
        torch.set_num_threads(experiment.training.threads)
        table = zero_shot(folder, Choices(classes=self.classes))[0]
        figures = selection.of_table(table) | _accuracies(table)
        if self.alone:
            number, data, classes = self.alone
            figures |= with_site(figures, number, zero_shot(folder, Choices(data=data, classes=classes))[0])
        extra = experiment.extra
        # a selector without templates (FedSM's) was trained with what no held-out image has
        if isinstance(extra, SelectorConfig) and extra.templates:
            figures |= selection.of_selector(folder, experiment, extra, self.selectors)
            figures[NAMED] = figures[selection.TOLD] / 100
        return figures


def with_site(figures: Figures, number: int, table: Path) -> Figures:
    """The accuracies at the site of a ``number``, from a table of its records alone, and the means with them."""
    more = {
        name.replace(deployed_at(1), deployed_at(number)): value
        for name, value in _accuracies(table).items()
        if deployed_at(1) in name
    }
    known, means = figures | more, Figures()
    for name in more:
        sites = (name.replace(deployed_at(number), deployed_at(site)) for site in range(1, number + 1))
        means[name.replace(deployed_at(number), deployed("mean"))] = fmean(known[one] for one in sites if one in known)
    return more | means


@dataclass(frozen=True)
class ElsewhereTold:
    """Zero-shot of a run's models on records of no site: accuracy 0..1 of the model that serves there."""

    sets: tuple[tuple[str, Source, tuple[str, ...]], ...]  # (name, records, classes that are told apart)

    def __call__(self, folder: RunFolder) -> Figures:
        """The selected model's accuracy where there is a selector, else the global one's, on each and their mean."""
        torch.set_num_threads(folder.experiment().training.threads)
        figures: Figures = {}
        for name, data, classes in self.sets:
            table = zero_shot(folder, Choices(data=data, classes=classes))[0]
            measured = _accuracies(table)
            figures[deployed(name)] = measured[deployed("mean")]
            figures[spread(deployed(name))] = measured[spread(deployed("mean"))]
        named = [deployed(name) for name, *_ in self.sets]
        figures[deployed("mean")] = fmean(figures[name] for name in named)
        figures[spread(deployed("mean"))] = fmean(figures[spread(name)] for name in named)
        return figures


def _accuracies(table: Path) -> Figures:
    """Accuracies of the deployed model and of the global one by client, and of each client's own model."""
    with table.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    figures: Figures = {}
    held = {(row["model"], row["site"]): float(row["accuracy"]) / 100 for row in rows if row["accuracy"]}
    one = "selected" if any(model == "selected" for model, _ in held) else "global"
    spreads = {
        row["site"]: float(row["accuracy_std"]) / 100 for row in rows if row["model"] == one and row["accuracy_std"]
    }
    sites = [site for site in dict.fromkeys(row["site"] for row in rows) if site != "mean"]  # also without an accuracy
    personal = [name for name in dict.fromkeys(model for model, _ in held) if name not in ("selected", "global")]
    for (model, site), value in held.items():
        name = deployed(site) if site == "mean" else deployed_at(1 + sites.index(site))
        if model == one:
            figures[name] = value
            figures[spread(name)] = spreads[site] if site in spreads else fmean(spreads.values())
        if model == "global":
            figures[GLOBAL_MODEL + name] = value
        if model in personal:
            figures[client(1 + personal.index(model)) + name] = value
    return figures


NAMED = "share of images whose site the selector names"
GLOBAL_MODEL = "global model: "
"""Begins the names of the figures of the model that all sites share, also where there is a selector."""


def deployed_at(number: int) -> str:
    """The same at a site, numbered from 1."""
    return deployed(f"client {number}")


def client(number: int) -> str:
    """Begins the names of the figures of a site's own model, numbered from 1 in the order of the sites."""
    return f"client {number}: "


# CAR-MFL

VAL_MACRO, RARE, BIAS = "validation macro AUC, %", "macro AUC of rare findings, %", "share of weight on the image"


def area(finding: str) -> str:
    """Name of the AUC of one finding on the public set's test records."""
    return f"AUC of {finding}, %"


def classified(folder: RunFolder) -> Figures:
    """Macro AUC of all test pairs, with either modality kept from the model; of rare findings; the modality bias.

    Beside it the AUC of each finding on the public set's test records, where both of its classes are there.
    """
    torch.set_num_threads(folder.experiment().training.threads)
    figures = ledger.classified(folder)
    last: dict[str, float] = {}
    for record in folder.history():
        last |= record.get("server", {})
    model: Any = folder.experiment().model
    one = ((area(finding), names.auc("test", finding)) for finding in model.labels)
    for name, figure in ((VAL_MACRO, names.auc("val", names.MACRO)), (RARE, names.auc("test", names.RARE)), *one):
        if figure in last:
            figures[name] = 100 * last[figure]
    if names.IMAGE_WEIGHT in last:
        figures[BIAS] = last[names.IMAGE_WEIGHT]
    return figures
