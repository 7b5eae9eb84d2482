"""Real X-rays with other people's reports: the matrix of model by site.

    fedvlp towers fetch lite0 && fedvlp towers fetch minilm
    python studies/programs/real_federation.py [--data ../shared/data] [--repeats 5] [--file studies/results]

THE DESIGN, fixed before its first result.

Sites: NIH's X-rays by view (``nih-pa`` standing, ``nih-ap`` portable), the adult X-rays of three classes (``adult``: no
finding, pneumonia, COVID-19), and the pairs of X-ray and text by source (``eurorad``, ``journals``, ``radiopaedia``,
``sirm``). An X-ray with labels and no report gets the eight Open-i reports whose findings agree best with its own
(``data/report_imputation.py``), drawn anew for each fold. Towers are frozen: EfficientNet-Lite0 at 224 pixels (NIH's
copies have 64), MiniLM's mean. Heads are linear, to 64 dimensions, by ``methods/one_round_cca.py``.

Folds: five, by patient over all sites at once, every X-ray tested once a repeat; five repeats. Adult X-rays name no
patient: each is its own, but for those whose pixels are those of one of NIH's or of the pairs', who are one patient.

Settings: image ridge 10, 30 or 100 for features of variance 1, and sites' means out of the covariances or in; chosen in
every fold on a fifth of the training patients by the mean over sites of zero-shot macro AUC, by each site alone on its
own. Text ridge 1. Where a site has no labels to choose by (the pairs), it takes the middle, 30 and out.

Figure: zero-shot AUC for a finding, mean cosine with sentences of its presence minus that with sentences of its
absence; macro over the findings that at least ten patients of a site have (NIH), and over pneumonia and COVID-19, each
against no finding (adult); mean over the three sites with labels. Pairs are measured by R@1 within sources.

PRIMARY CONTRAST: the federated closed form minus each site's own closed form, mean over the three labelled sites of
zero-shot macro AUC on held-out patients, with the corrected resampled t interval (Nadeau and Bengio, 2003) over the 25
folds. Federating is ahead of every site alone only where all seven intervals are above 0. Whichever way it falls, it is
printed. Secondary, without a claim: at each site, the federated form minus that site's own.

Rows: untouched pair (random linear heads); each site alone; federated; federated without the site that is judged;
federated with the judged site's own moments weighed four times; the same vectors with each site's own mean taken out;
one report in place of eight; random reports, and labels permuted within each site, as controls; ridge heads for the
findings by each labelled site alone, and of the sums of all (which is what pooled records give). Words: with the phrase
of presence alone, and with denials ("no edema") in the place of a normal X-ray's sentences. Membership at image ridges
10, 30 and 100: AUC, by site, of the mean cosine of an X-ray with eight reports, trained against tested: with the eight
that it learned from, and with eight others of the same labels. On the folds of the first repeat also: six rounds of
twelve steps from the closed form, by FedAvg, by FedAvg with AdamW's moments kept (as ``recommended``), by FedDRA and
pooled; soft targets by findings (MedCLIP), one of the eight reports drawn at every step.
"""

from __future__ import annotations

import csv
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from common import command_line, machine, say
from torch import Generator, Tensor
from torch.nn.functional import interpolate, normalize

from fedvlp.core.client import Client, named_state
from fedvlp.core.server_state import Server
from fedvlp.core.types import IMAGE_TOKENS, TEXT_TOKENS, Batch
from fedvlp.data.preprocessing import Preprocessing
from fedvlp.data.report_imputation import match_scores
from fedvlp.data.sources.openi import OpenISource
from fedvlp.evaluation.intervals import area_of, components
from fedvlp.federation.exchange import SequentialExchange
from fedvlp.federation.loop import Federation as Loop
from fedvlp.federation.loop import Rounds
from fedvlp.federation.site import Site
from fedvlp.federation.site_memory import SiteMemory
from fedvlp.methods import Centralized, FedAvg, FedDRA
from fedvlp.methods.one_round_cca import (
    CROSS,
    IMAGE,
    IMAGE_MEAN,
    TEXT,
    TEXT_MEAN,
    Pooled,
    head_of,
    inverse_root,
    moments_of_features,
    moments_of_labels,
    ridge_heads,
    spectrum,
)
from fedvlp.objectives.medclip import MedCLIPConfig
from fedvlp.run import presets
from fedvlp.training.settings import Training
from studies.protocols.vqa import text_features

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "runs" / "real-federation"
SIZE = 224

COMMON = (
    "Atelectasis", "Cardiomegaly", "Consolidation", "Edema", "Lung Lesion", "Lung Opacity", "Pleural Effusion",
    "Pleural Other", "Pneumonia", "Pneumothorax",
)  # fmt: skip
"""The findings that X-rays and reports have in common."""

OF_NIH = {
    "Atelectasis": "Atelectasis", "Cardiomegaly": "Cardiomegaly", "Consolidation": "Consolidation", "Edema": "Edema",
    "Mass": "Lung Lesion", "Nodule": "Lung Lesion", "Infiltration": "Lung Opacity", "Effusion": "Pleural Effusion",
    "Pleural_Thickening": "Pleural Other", "Pneumonia": "Pneumonia", "Pneumothorax": "Pneumothorax",
}  # fmt: skip

NIH_SITES, ADULT, PAIRS = ("nih-pa", "nih-ap"), "adult", ("eurorad", "journals", "radiopaedia", "sirm")
LABELLED = (*NIH_SITES, ADULT)
SITES = (*LABELLED, *PAIRS)


@dataclass(frozen=True, eq=False)
class Federation:
    """All X-rays of all sites with their features, and the public reports with theirs.

    ``report`` is a row of ``texts`` for an X-ray that came with its own text, -1 for one with labels alone.
    """

    sites: np.ndarray  # [N] str
    patients: np.ndarray  # [N] str
    labels: np.ndarray  # [N, 10] of COMMON, 1 or 0
    covid: np.ndarray  # [N] bool
    image: Tensor  # [N, W] float32
    report: np.ndarray  # [N] int
    texts: Tensor  # [P, V], of the pairs' own texts
    corpus: Tensor  # [M, V], of the public reports
    corpus_labels: np.ndarray  # [M, 10]


def films(data: Path) -> list[tuple[str, str, str, np.ndarray, bool, Path, str]]:
    """(site, patient, folder, labels, covid, file, text) of every X-ray."""
    found = []
    nih = data / "real-cxr" / "nih64"
    for row in _rows(nih / "labels.csv"):
        labels = np.zeros(len(COMMON))
        for name in row["labels"].split("|"):
            if name in OF_NIH:
                labels[COMMON.index(OF_NIH[name])] = 1
        found.append(
            (f"nih-{row['view'].lower()}", f"nih {row['patient_id']}", "", labels, False, nih / row["image"], "")
        )
    for file in sorted((data / "real-cxr" / "classification").rglob("*.jpg")):
        kind = file.parent.name
        labels = np.zeros(len(COMMON))
        labels[COMMON.index("Pneumonia")] = kind != "no_finding"
        found.append((ADULT, f"adult {file.parts[-3]} {kind} {file.stem}", "", labels, kind == "covid19", file, ""))
    pairs = data / "real-cxr"
    for row in _rows(pairs / "pairs.csv"):
        labels = np.zeros(len(COMMON))  # read by soft targets alone
        labels[COMMON.index("Pneumonia")] = row["finding"] not in ("No Finding", "todo")
        found.append(
            (row["site"], f"pairs {row['patient_id']}", "", labels, False, pairs / row["image"], row["report"])
        )
    return found


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def prepared(data: Path) -> Federation:
    """Reads and embeds everything, once: afterwards from ``runs/``."""
    kept = KEPT / "features.pt"
    if not kept.exists():
        KEPT.mkdir(parents=True, exist_ok=True)
        torch.save(vars(_embedded(data)), kept)
    told = films(data)
    labels, covid = np.stack([one[3] for one in told]), np.array([one[4] for one in told])
    return replace(Federation(**torch.load(kept, weights_only=False)), labels=labels, covid=covid)


def _embedded(data: Path) -> Federation:
    of_films = films(data)
    model = presets.get("one-round-cca-real").model.build(0).eval()
    ready = Preprocessing(SIZE, SIZE)
    pixels = torch.cat([ready.films([str(one[5])]) for one in of_films])  # [N, 1, S, S]
    kept = KEPT / "images.pt"
    if not kept.exists():
        with torch.no_grad():
            image = torch.cat([model.encode({"image": some}).image[:, 0] for some in pixels.split(32)])
        torch.save(image, kept)
    image = torch.load(kept)
    say({"features of X-rays": list(image.shape)})
    own = [one[6] for one in of_films if one[6]]
    public = OpenISource(str(data / "real-tables" / "NLMCXR_reports.tgz")).build()
    named = ~np.isnan(public.labels).all(axis=1)  # a report that was not indexed has no findings to be found by
    columns = [public.label_names.index(name) for name in COMMON]
    corpus = [report for report, kept in zip(public.reports, named, strict=True) if kept]
    texts, reports = by_length(model, own), by_length(model, corpus)
    say({"features of texts": [list(texts.shape), list(reports.shape)]})
    report = np.full(len(of_films), -1)
    report[[bool(one[6]) for one in of_films]] = np.arange(len(own))
    patients = np.array([one[1] for one in of_films])
    return Federation(
        np.array([one[0] for one in of_films]),
        same_pixels(patients, pixels),
        np.stack([one[3] for one in of_films]),
        np.array([one[4] for one in of_films]),
        image,
        report,
        texts,
        reports,
        np.nan_to_num(public.labels[named][:, columns]) == 1,
    )


def by_length(model: Any, texts: Sequence[str]) -> Tensor:
    """Features of texts [n, V]. Texts of about one length go together: a batch costs what its longest does."""
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    found = torch.cat([text_features(model, [texts[i] for i in some]) for some in batched(order, 64)])
    return found[torch.tensor(order).argsort()]


def batched(order: Sequence[int], size: int) -> list[Sequence[int]]:
    """Parts of at most ``size``."""
    return [order[start : start + size] for start in range(0, len(order), size)]


def same_pixels(patients: np.ndarray, pixels: Tensor, least: float = 0.98) -> np.ndarray:
    """The patients [N], where X-rays whose 64-pixel copies correlate by at least ``least`` are one patient's."""
    small = interpolate(pixels, size=(64, 64), mode="area").flatten(1)
    small = normalize(small - small.mean(dim=1, keepdim=True), dim=1)
    alike = (small @ small.T >= least).nonzero().tolist()
    owner = {one: one for one in patients.tolist()}

    def root(name: str) -> str:
        while owner[name] != name:
            name = owner[name]
        return name

    for one, other in alike:
        owner[root(patients[max(one, other)])] = root(patients[min(one, other)])
    return np.array([root(name) for name in patients.tolist()])


PRESENT = {
    "Atelectasis": ("atelectasis", "bibasilar atelectasis", "subsegmental atelectasis at the lung base"),
    "Cardiomegaly": ("cardiomegaly", "the heart is enlarged", "enlarged cardiac silhouette"),
    "Consolidation": ("consolidation", "focal airspace consolidation", "lobar consolidation"),
    "Edema": ("pulmonary edema", "interstitial edema", "pulmonary vascular congestion with edema"),
    "Lung Lesion": ("pulmonary nodule", "lung mass", "calcified granuloma"),
    "Lung Opacity": ("patchy opacity", "infiltrate in the lung", "airspace disease"),
    "Pleural Effusion": (
        "pleural effusion",
        "blunting of the costophrenic angle by effusion",
        "small pleural effusions",
    ),
    "Pleural Other": ("pleural thickening", "apical pleural thickening", "thickened pleura"),
    "Pneumonia": ("pneumonia", "airspace opacity concerning for pneumonia", "infiltrate compatible with pneumonia"),
    "Pneumothorax": ("pneumothorax", "apical pneumothorax", "collapsed lung with pneumothorax"),
}
NORMAL = ("the lungs are clear", "normal heart size and mediastinal contours", "no acute cardiopulmonary abnormality")
DENIED = ("no {}", "there is no {}", "no evidence of {}")
WORDS = ("normal", "denied", "phrase")
"""What stands against a finding's presence: sentences of a normal X-ray, denials of the finding, or nothing."""

GRID = tuple((ridge, means) for means in (False, True) for ridge in (10.0, 30.0, 100.0))
MIDDLE = (30.0, False)
REPORTS, DIM, TEXT_RIDGE, FOLDS, LEAST = 8, 64, 1.0, 5, 10
COVID = "COVID-19"


@dataclass(frozen=True, eq=False)
class Sums:
    """Moments of one site's pairs: n, means, second moments about the site's own means."""

    n: float
    x: Tensor
    t: Tensor
    xx: Tensor
    tt: Tensor
    xt: Tensor

    def times(self, factor: float) -> Sums:
        """As of so many times the records."""
        return replace(self, n=self.n * factor)


@dataclass(frozen=True, eq=False)
class Model:
    """Linear heads to d dimensions on features of images and texts."""

    a: Tensor  # [W, d]
    b: Tensor  # [V, d]
    x: Tensor  # [W], taken from an image's features first
    t: Tensor

    def images(self, features: Tensor, centre: Tensor | None = None) -> Tensor:
        """Unit vectors [n, d]; ``centre``: what is taken from the features in the place of the pooled mean."""
        return normalize((features - (self.x if centre is None else centre)) @ self.a, dim=1)

    def texts(self, features: Tensor) -> Tensor:
        """Unit vectors [n, d]."""
        return normalize((features - self.t) @ self.b, dim=1)


def sums_of(image: Tensor, text: Tensor, owner: Tensor) -> Sums:
    """The moments of images [n, W] and of texts [m, V] that belong to them."""
    found = moments_of_features(image, text, owner)  # float32: a ridge of 10 leaves nothing of its rounding
    return Sums(len(image), *(found[name] for name in (IMAGE_MEAN, TEXT_MEAN, IMAGE, TEXT, CROSS)))


def pooled(sites: Sequence[Sums], means: bool) -> Sums:
    """The sites' sums as one; ``means``: with the differences between their means."""
    n = sum(one.n for one in sites)
    x, t = (sum(one.n * getattr(one, name) for one in sites) / n for name in ("x", "t"))
    squares = []
    for name, left, right in (("xx", "x", "x"), ("tt", "t", "t"), ("xt", "x", "t")):
        mean = {"x": x, "t": t}
        total = sum(one.n * getattr(one, name) for one in sites) / n
        if means:
            total = total + sum(
                one.n / n * torch.outer(getattr(one, left) - mean[left], getattr(one, right) - mean[right])
                for one in sites
            )
        squares.append(total)
    return Sums(n, x, t, *squares)


def solved(sums: Sums, ridge: float) -> Model:
    """The closed form of ``methods/one_round_cca.py`` for features of variance 1 (a test says that they are equal).

    With (S_xx + r I)^(-1/2) M = U diag(rho) V^T, A = (S_xx + r I)^(-1/2) U diag(rho) is (S_xx + r I)^(-1) S_xt
    (S_tt + r I)^(-1/2) V: one linear system, and eigenvectors in the width of the text tower alone.
    """
    dx, dt = (matrix.diagonal().clamp(min=1e-12).sqrt() for matrix in (sums.xx, sums.tt))
    xx = sums.xx / torch.outer(dx, dx) + ridge * torch.eye(len(dx), dtype=dx.dtype)
    root = inverse_root(spectrum(sums.tt / torch.outer(dt, dt)), TEXT_RIDGE / len(dt))
    right = (sums.xt / torch.outer(dx, dt)) @ root  # [W, V]
    left = torch.cholesky_solve(right, torch.linalg.cholesky(xx))
    rho, v = torch.linalg.eigh(right.T @ left)
    order = rho.argsort(descending=True)[:DIM]
    return Model(
        left @ v[:, order] / dx[:, None],
        root @ v[:, order] * rho[order].clamp(min=0).sqrt() / dt[:, None],
        sums.x,
        sums.t,
    )


class Texts:
    """Features of the sentences of presence and of what stands against them, read once."""

    def __init__(self, model: Any) -> None:
        self.present = {name: text_features(model, said) for name, said in PRESENT.items()}
        self.normal = text_features(model, NORMAL)
        denied = {name: [one.format(said[0]) for one in DENIED] for name, said in PRESENT.items()}
        self.denied = {name: text_features(model, said) for name, said in denied.items()}

    def scores(self, model: Model, vectors: Tensor, words: str = "normal") -> Tensor:
        """[n, 10]: mean cosine with presence minus that with what stands against it."""
        found = []
        for name in COMMON:
            score = (vectors @ model.texts(self.present[name]).T).mean(dim=1)
            if words != "phrase":
                against = self.normal if words == "normal" else self.denied[name]
                score = score - (vectors @ model.texts(against).T).mean(dim=1)
            found.append(score)
        return torch.stack(found, dim=1)


def judged(federation: Federation) -> dict[str, tuple[str, ...]]:
    """Site -> what is judged there: findings of at least ``LEAST`` patients; adult: pneumonia, COVID-19."""
    found: dict[str, tuple[str, ...]] = {ADULT: ("Pneumonia", COVID)}
    for site in NIH_SITES:
        here = federation.sites == site
        counts = {
            name: len(set(federation.patients[here & (federation.labels[:, column] == 1)]))
            for column, name in enumerate(COMMON)
        }
        found[site] = tuple(name for name in COMMON if counts[name] >= LEAST)
    return found


def truths(federation: Federation, site: str, rows: np.ndarray, finding: str) -> np.ndarray:
    """[n] 1, 0 or nan (not of this question), of rows of a site."""
    if site != ADULT:
        return federation.labels[rows, COMMON.index(finding)].astype(float)
    ill, covid = federation.labels[rows, COMMON.index("Pneumonia")] == 1, federation.covid[rows]
    this = covid if finding == COVID else ill & ~covid
    return np.where(this, 1.0, np.where(ill, np.nan, 0.0))


def area(federation: Federation, site: str, rows: np.ndarray, scores: Tensor, asked: Sequence[str]) -> float:
    """Macro AUC over the findings of a site that have both kinds among ``rows``; scores [n, 10]. nan without one."""
    found = []
    for finding in asked:
        column = COMMON.index("Pneumonia" if finding == COVID else finding)
        truth = torch.from_numpy(truths(federation, site, rows, finding))
        if bool((truth == 1).any()) and bool((truth == 0).any()):
            one = torch.ones(1, len(truth), dtype=torch.float64)
            found.append(float(area_of(scores[:, column], truth)(one)))
    return fmean(found) if found else math.nan


class Draws:
    """Which public reports stand for an X-ray with labels."""

    def __init__(self, federation: Federation) -> None:
        self.federation = federation
        self.fits: dict[bytes, tuple[np.ndarray, np.ndarray]] = {}

    def of(self, labels: np.ndarray, draw: np.random.Generator, count: int) -> np.ndarray:
        """[count] rows of the corpus that agree best with ``labels`` [10]; who agrees equally is drawn."""
        key = labels.tobytes()
        if key not in self.fits:
            score = match_scores(labels, self.federation.corpus_labels.astype(float))
            self.fits[key] = (score, np.flatnonzero(score >= np.sort(score)[-4 * count]))
        score, best = self.fits[key]
        order = draw.permutation(best)
        return order[np.argsort(-score[order], kind="stable")][:count]


def pairs_of(
    federation: Federation,
    draws: Draws,
    rows: np.ndarray,
    seed: Sequence[int],
    how: str = "labels",
    count: int = REPORTS,
) -> tuple[Tensor, Tensor, Tensor, np.ndarray]:
    """Images [n, W], texts [m, V], the image of each text [m], and the corpus rows [n, count] (-1: its own text)."""
    draw = np.random.default_rng(list(seed))
    labels = federation.labels[rows]
    if how == "permuted":
        labels = labels[draw.permutation(len(rows))]
    chosen = np.full((len(rows), count), -1)
    for place, row in enumerate(rows):
        if federation.report[row] < 0:
            free = how == "random"
            corpus = len(federation.corpus)
            chosen[place] = draw.integers(0, corpus, count) if free else draws.of(labels[place], draw, count)
    own = chosen[:, 0] < 0
    texts = [federation.texts[federation.report[rows[own]]], federation.corpus[chosen[~own].reshape(-1)]]
    owner = np.concatenate([np.flatnonzero(own), np.repeat(np.flatnonzero(~own), count)])
    return federation.image[rows], torch.cat(texts), torch.from_numpy(owner), chosen


@dataclass(frozen=True, eq=False)
class Fold:
    """One fold: rows of each site that are trained on, chosen by (a fifth of the training patients) and tested."""

    repeat: int
    fold: int
    fit: dict[str, np.ndarray]
    val: dict[str, np.ndarray]
    test: dict[str, np.ndarray]

    @property
    def train(self) -> dict[str, np.ndarray]:
        return {site: np.concatenate([self.fit[site], self.val[site]]) for site in self.fit}


def folds(federation: Federation, repeats: int) -> Iterator[Fold]:
    """Five by patient, so many times."""
    people = np.unique(federation.patients)
    for repeat in range(repeats):
        order = np.random.default_rng([repeat, 7]).permutation(len(people))
        part = np.empty(len(people), dtype=int)
        part[order] = np.arange(len(people)) % FOLDS
        inner = np.empty(len(people), dtype=int)
        inner[np.random.default_rng([repeat, 8]).permutation(len(people))] = np.arange(len(people)) % FOLDS
        of_row = np.searchsorted(people, federation.patients)
        for fold in range(FOLDS):
            tested, chosen = part[of_row] == fold, inner[of_row] == fold
            here = {site: federation.sites == site for site in SITES}
            yield Fold(
                repeat,
                fold,
                {site: np.flatnonzero(mine & ~tested & ~chosen) for site, mine in here.items()},
                {site: np.flatnonzero(mine & ~tested & chosen) for site, mine in here.items()},
                {site: np.flatnonzero(mine & tested) for site, mine in here.items()},
            )


class Study:
    """All rows of one fold, and their figures."""

    def __init__(self, federation: Federation, texts: Texts, fold: Fold) -> None:
        self.federation, self.texts, self.fold = federation, texts, fold
        self.draws, self.asked = Draws(federation), judged(federation)
        self.lines: list[tuple[str, str, str, float]] = []  # model, site, measure, value
        self.placed: dict[tuple[str, int], float] = {}

    def note(self, model: str, site: str, measure: str, value: float) -> None:
        self.lines.append((model, site, measure, value))

    def sums(self, rows: dict[str, np.ndarray], how: str = "labels", count: int = REPORTS) -> dict[str, Sums]:
        """The moments of every site."""
        key = [self.fold.repeat, self.fold.fold, sum(map(len, rows.values()))]
        found = {}
        for number, (site, of_site) in enumerate(rows.items()):
            image, text, owner, _ = pairs_of(self.federation, self.draws, of_site, [*key, number], how, count)
            found[site] = sums_of(image, text, owner)
        return found

    def area(self, model: Model, site: str, rows: np.ndarray, words: str = "normal", own: bool = False) -> float:
        """Zero-shot macro AUC of a model at a site; ``own``: vectors about the site's own training mean."""
        image = self.federation.image
        centre = image[self.fold.train[site]].mean(dim=0) if own else None
        scores = self.texts.scores(model, model.images(image[rows], centre), words)
        return area(self.federation, site, rows, scores, self.asked[site])

    def chosen(self) -> dict[str, tuple[float, bool]]:
        """The setting of each site alone and of the federation, chosen on the inner fold."""
        inner = self.sums(self.fold.fit)
        settings = dict.fromkeys((*SITES, FEDERATED), MIDDLE)
        for site in LABELLED:
            found = {
                ridge: self.area(solved(inner[site], ridge), site, self.fold.val[site])
                for ridge, means in GRID
                if not means
            }
            settings[site] = (max(found, key=lambda ridge: _or_chance(found[ridge])), False)
        both = {}
        for ridge, means in GRID:
            model = solved(pooled(list(inner.values()), means), ridge)
            both[ridge, means] = fmean(_or_chance(self.area(model, site, self.fold.val[site])) for site in LABELLED)
            self.note(
                f"inner, ridge {ridge:g}, means {'in' if means else 'out'}", MEAN, "zero-shot", both[ridge, means]
            )
        settings[FEDERATED] = max(both, key=lambda one: both[one])
        return settings

    def judge(self, name: str, models: Mapping[str, Model] | Model, words: str = "normal", own: bool = False) -> None:
        """Zero-shot at every labelled site (of a model for each site, if there are several), and R@1 of the pairs."""
        of = (lambda site: models) if isinstance(models, Model) else models.__getitem__
        areas = {}
        for site in LABELLED:
            areas[site] = self.area(of(site), site, self.fold.test[site], words, own)
            self.note(name, site, "zero-shot", areas[site])
        self.note(name, MEAN, "zero-shot", float(np.nanmean(list(areas.values()))))
        if isinstance(models, Model) and words == "normal" and not own:
            self.note(name, "pairs", "R@1 within sources", self.recall(models))

    def recall(self, model: Model) -> float:
        """R@1 within sources, percent, over the test pairs, mean of both directions."""
        right = total = 0.0
        for site in PAIRS:
            rows = self.fold.test[site]
            if len(rows):
                similar = (
                    model.images(self.federation.image[rows])
                    @ model.texts(self.federation.texts[self.federation.report[rows]]).T
                )
                here = torch.arange(len(rows))
                right += float((similar.argmax(1) == here).sum() + (similar.argmax(0) == here).sum()) / 2
                total += len(rows)
        return 100 * right / total if total else math.nan

    def closed_forms(self) -> tuple[dict[str, tuple[float, bool]], dict[str, Sums]]:
        """The rows without a step."""
        settings = self.chosen()
        for name, (ridge, means) in settings.items():
            self.note(name, MEAN, "ridge chosen", ridge)
            self.note(name, MEAN, "means in", float(means))
        sums = self.sums(self.fold.train)
        ridge, means = settings[FEDERATED]

        def federated(of: Mapping[str, Sums], ridge: float = ridge) -> Model:
            return solved(pooled(list(of.values()), means), ridge)

        whole = federated(sums)
        alone = {site: solved(sums[site], settings[site][0]) for site in SITES}
        draw = torch.Generator().manual_seed(100 * self.fold.repeat + self.fold.fold)
        random = [torch.randn(of.shape, generator=draw) for of in (whole.a, whole.b)]
        self.judge("untouched", Model(*random, whole.x, whole.t))
        for site in SITES:
            self.judge(f"{site} alone", alone[site])
        self.judge(FEDERATED, whole)
        self.place(FEDERATED, whole)
        for site in SITES:
            self.place(f"{site} alone", alone[site])
        self.judge(f"{FEDERATED}, denials", whole, "denied")
        self.judge(f"{FEDERATED}, phrase alone", whole, "phrase")
        self.judge(f"{FEDERATED}, site means out of the vectors", whole, own=True)
        self.judge(
            "without the judged site",
            {site: federated({name: one for name, one in sums.items() if name != site}) for site in LABELLED},
        )
        self.judge(
            "the judged site four times", {site: federated(sums | {site: sums[site].times(4)}) for site in LABELLED}
        )
        self.judge(f"{FEDERATED}, one report", federated(self.sums(self.fold.train, count=1)))
        self.judge("random reports", federated(self.sums(self.fold.train, "random")))
        self.judge("permuted labels", federated(self.sums(self.fold.train, "permuted")))
        self.judge(f"{FEDERATED}, labelled sites only", federated({site: sums[site] for site in LABELLED}))
        for one in (10.0, 30.0, 100.0):
            model = solved(pooled(list(sums.values()), False), one)
            self.judge(f"{FEDERATED}, ridge {one:g}, means out", model)
            self.judge(f"{FEDERATED}, ridge {one:g}, means in", solved(pooled(list(sums.values()), True), one))
            self.membership(f"ridge {one:g}", model)
        self.probes()
        return settings, sums

    def place(self, name: str, model: Model) -> None:
        """The share of the other kind that each test X-ray outranks rightly, mean over findings, by patient."""
        for site in LABELLED:
            rows = self.fold.test[site]
            scores = self.texts.scores(model, model.images(self.federation.image[rows]))
            found: dict[int, list[float]] = {}
            for finding in self.asked[site]:
                truth = torch.from_numpy(truths(self.federation, site, rows, finding))
                known = ~truth.isnan()
                if bool((truth == 1).any()) and bool((truth == 0).any()):
                    column = COMMON.index("Pneumonia" if finding == COVID else finding)
                    v10, v01 = components(scores[known, column], truth[known])
                    kept = rows[known.numpy()]
                    for row, value in zip(kept[truth[known].numpy() == 1], v10.tolist(), strict=True):
                        found.setdefault(int(row), []).append(value)
                    for row, value in zip(kept[truth[known].numpy() == 0], v01.tolist(), strict=True):
                        found.setdefault(int(row), []).append(value)
            for row, values in found.items():
                self.placed[name, row] = fmean(values)

    def membership(self, name: str, model: Model) -> None:
        """AUC of the mean cosine with eight reports, trained against tested X-rays, mean over the labelled sites."""
        learned, fresh = [], []
        key = [self.fold.repeat, self.fold.fold, sum(map(len, self.fold.train.values()))]
        for number, site in enumerate(SITES):
            if site not in LABELLED:
                continue
            members, others = self.fold.train[site], self.fold.test[site]
            cosines = []
            for rows, seed in ((members, [*key, number]), (members, [*key, number, 1]), (others, [*key, number, 2])):
                image, text, owner, _ = pairs_of(self.federation, self.draws, rows, seed)
                both = (model.images(image)[owner] * model.texts(text)).sum(dim=1)
                cosines.append(torch.zeros(len(rows)).index_add(0, owner, both) / REPORTS)
            for found, mine in ((learned, cosines[0]), (fresh, cosines[1])):
                truth = torch.cat([torch.ones(len(mine)), torch.zeros(len(others))])
                one = torch.ones(1, len(truth), dtype=torch.float64)
                found.append(100 * float(area_of(torch.cat([mine, cosines[2]]), truth)(one)))
        self.note(name, MEAN, "membership, the reports it learned from", fmean(learned))
        self.note(name, MEAN, "membership, others of the same labels", fmean(fresh))

    def probes(self) -> None:
        """Ridge heads for the findings from each labelled site's sums, and from the sums of all."""
        every = {site: Pooled() for site in LABELLED}
        for site in LABELLED:
            rows = self.fold.train[site]
            image = self.federation.image[rows].double()
            found = moments_of_features(image, image[:, :1]) | moments_of_labels(image, self.answers(site, rows))
            every[site].add(found, len(rows))
        nih = every["nih-pa"] + every["nih-ap"]
        together = {"ridge heads, federated": {site: (every[ADULT] if site == ADULT else nih) for site in LABELLED}}
        alone = {f"ridge heads, {site} alone": dict.fromkeys(LABELLED, every[site]) for site in LABELLED}
        for name, of_site in (together | alone).items():
            areas = []
            for site in LABELLED:
                weight, bias = ridge_heads(of_site[site].moments(), list(range(len(COMMON))), HEAD_RIDGE)
                rows = self.fold.test[site]
                scores = self.federation.image[rows].double() @ weight.T + bias
                areas.append(area(self.federation, site, rows, scores, self.asked[site]))
                self.note(name, site, "supervised", areas[-1])
            self.note(name, MEAN, "supervised", float(np.nanmean(areas)))

    def answers(self, site: str, rows: np.ndarray) -> Tensor:
        """Labels [n, 10] of a site's rows; nan where the site knows nothing of a finding."""
        labels = torch.from_numpy(self.federation.labels[rows].astype(float))
        if site == ADULT:
            labels[:, [column for column, name in enumerate(COMMON) if name != "Pneumonia"]] = math.nan
        return labels


FEDERATED, MEAN = "federated", "mean of the labelled sites"
HEAD_RIDGE = 0.02


def _or_chance(value: float) -> float:
    return 0.5 if math.isnan(value) else value


Lines = list[tuple[int, int, str, str, str, float]]


def of(lines: Lines, model: str, site: str, measure: str) -> list[float]:
    """The figures of a row at a site, in the order of the folds."""
    return [one[5] for one in lines if one[2:5] == (model, site, measure)]


def write(folder: Path, name: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([head, *rows])


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1, help="repeats on whose folds the rows with steps are run")
    parser.add_argument("--file", type=Path, default=ROOT / "studies" / "results", help="folder of the tables")
    options = parser.parse_args()
    say({**machine(), **vars(options)})
    torch.set_num_threads(1)
    federation = prepared(options.data)
    for site in SITES:
        here = federation.sites == site
        say({"site": site, "X-rays": int(here.sum()), "patients": len(set(federation.patients[here]))})
    say({"judged": judged(federation)})
    texts = Texts(presets.get("one-round-cca-real").model.build(0).eval())
    lines: Lines = []
    placed: dict[tuple[str, int], list[float]] = {}
    for fold in folds(federation, options.repeats):
        began = time.process_time()
        study = Study(federation, texts, fold)
        settings, sums = study.closed_forms()
        if fold.repeat < options.steps:
            with_steps(study, *settings[FEDERATED], sums)
        lines += [(fold.repeat, fold.fold, *line) for line in study.lines]
        for key, value in study.placed.items():
            placed.setdefault(key, []).append(value)
        spent = time.process_time() - began
        say(
            {
                "fold": (fold.repeat, fold.fold),
                "processor s": spent,
                FEDERATED: of(lines, FEDERATED, MEAN, "zero-shot")[-1],
            }
        )
        write(options.file, "real-federation", HEAD, ([*one[:5], f"{one[5]:.4f}"] for one in lines))
        write(options.file, "real-federation-patients", HEAD_OF_PATIENTS, patients(federation, placed))
    say(machine())


HEAD = ("repeat", "fold", "model", "site", "measure", "value")
HEAD_OF_PATIENTS = ("patient", "site", "model", "placement")


def patients(federation: Federation, placed: Mapping[tuple[str, int], Sequence[float]]) -> Iterator[Sequence[object]]:
    """A line for each test patient, by number, and model: the mean placement of his X-rays over repeats."""
    number = {name: index for index, name in enumerate(np.unique(federation.patients).tolist())}
    found: dict[tuple[int, str, str], list[float]] = {}
    for (model, row), values in placed.items():
        key = (number[federation.patients[row]], str(federation.sites[row]), model)
        found.setdefault(key, []).append(fmean(values))
    for (patient, site, model), values in sorted(found.items()):
        yield patient, site, model, f"{fmean(values):.4f}"


STEPS, ROUNDS = 12, 6


def with_steps(study: Study, ridge: float, means: bool, sums: Mapping[str, Sums]) -> None:
    """The rows with steps, each from the heads of the federated closed form."""
    kept = replace(TRAINING, optimizer_state="keep")
    ways = {
        "FedAvg": (FedAvg(local_steps=STEPS), TRAINING),
        "recommended": (FedAvg(local_steps=STEPS, weighting="uniform"), kept),
        "FedDRA": (FedDRA(align_steps=2, local_steps=STEPS - 2, mu=5.0, rho=0.1, dro_batch=16), TRAINING),
        "all records pooled": (Centralized(local_steps=STEPS), replace(TRAINING, batch_size=32 * len(SITES))),
    }
    start = solved(pooled(list(sums.values()), means), ridge)
    for name, (method, training) in ways.items():
        began = time.process_time()
        study.judge(f"steps, {name}", stepped(study, start, method, training))
        study.note(f"steps, {name}", MEAN, "processor s", time.process_time() - began)


TRAINING = Training(batch_size=32, lr=5e-4, weight_decay=0.05, warmup_steps=10)


class Drawn:
    """Features of a site's training X-rays, each with one of its reports, drawn at every step."""

    modalities = ("image", "text")

    def __init__(self, image: Tensor, text: Tensor, owner: Tensor, labels: Tensor) -> None:
        order = owner.argsort(stable=True)
        self.image, self.text, self.labels = image, text[order], labels
        self.counts = torch.bincount(owner, minlength=len(image))
        self.first = self.counts.cumsum(0) - self.counts

    @property
    def num_train(self) -> int:
        return len(self.image)

    def modalities_in(self, split: str) -> tuple[str, ...]:
        return self.modalities

    def share_images(self, share: Any) -> None:
        """They are whole."""

    def train_batches(self, steps: int, batch_size: int, generator: Generator) -> Iterator[Batch]:
        for _ in range(steps):
            rows = torch.randperm(self.num_train, generator=generator)[:batch_size]
            which = torch.rand(len(rows), generator=generator) * self.counts[rows]
            yield self._batch(rows, self.first[rows] + which.long())

    def batches(self, split: str, batch_size: int, *, drop_last: bool, rows: Any = None) -> Iterator[Batch]:
        for some in torch.arange(self.num_train if split == "train" else 0).split(batch_size):
            yield self._batch(some, self.first[some])

    def _batch(self, rows: Tensor, texts: Tensor) -> Batch:
        mask = torch.ones(len(rows), 1, dtype=torch.bool)
        return {
            "row": rows, IMAGE_TOKENS: self.image[rows][:, None], TEXT_TOKENS: self.text[texts][:, None],
            "text": torch.ones(len(rows), 1, dtype=torch.int64), "text_mask": mask, "labels": self.labels[rows],
        }  # fmt: skip


def stepped(study: Study, start: Model, method: Any, training: Training) -> Model:
    """The heads after six rounds of a method."""
    data, federation = {}, study.federation
    key = [study.fold.repeat, study.fold.fold, sum(map(len, study.fold.train.values()))]
    for number, (site, rows) in enumerate(study.fold.train.items()):
        labels = torch.from_numpy(federation.labels[rows].astype(np.float32))
        image, text, owner, _ = pairs_of(federation, study.draws, rows, [*key, number])
        data[site] = Drawn(image, text, owner, labels)
    if method.pooled:
        parts = list(data.values())
        counts = torch.cat([one.counts for one in parts])
        owner = torch.repeat_interleave(torch.arange(len(counts)), counts)
        joined = (torch.cat([getattr(one, name) for one in parts]) for name in ("image", "text", "labels"))
        image, text, labels = joined
        data = {"pooled": Drawn(image, text, owner, labels)}
    preset = presets.get("one-round-cca-real").model
    model, objective = replace(preset, embedding_dim=DIM).build(0), MedCLIPConfig().build()
    state = named_state(model, objective)
    with torch.no_grad():
        for modality, weight, mean in (("image", start.a, start.x), ("text", start.b, start.t)):
            of_weight, of_bias = head_of(modality, state)
            spread = (
                weight.square().sum() / weight.shape[1]
            ).sqrt()  # rows of about unit length, as an untrained head's
            state[of_weight].copy_((weight / spread).T)
            state[of_bias].copy_(-(mean @ weight) / spread)
    names = tuple(sorted(data))
    server = Server(names, {name: tensor.clone() for name, tensor in state.items()})

    @cache
    def site(name: str) -> Site:
        return Site(Client(name, 0, model, objective, data[name]), method, training, SiteMemory(None), None)

    loop = Rounds(rounds=ROUNDS, evaluate_every=0, seed=study.fold.repeat)
    run = Loop(method, server, loop, SequentialExchange(site))
    run.run(0)
    found = []
    for modality in ("image", "text"):
        of_weight, of_bias = head_of(modality, run.server.state)
        weight, bias = run.server.state[of_weight], run.server.state[of_bias]
        found.append((weight.T, -torch.linalg.lstsq(weight, bias[:, None]).solution[:, 0]))  # the mean that it takes
    (a, x), (b, t) = found
    return Model(a, b, x, t)


if __name__ == "__main__":
    main()
