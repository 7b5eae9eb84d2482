"""Frozen published towers on real X-rays: FedDRA beside FedAvg, sites alone, and all records together.

    fedvlp towers fetch lite0 && fedvlp towers fetch minilm
    python studies/programs/real_towers.py [--data ../shared/data/real-cxr] [--seeds 0-4] [--quick]

Films with text from four public sources, each a site; every seed draws a fifth of the patients for the test. Percent,
mean of both directions: R@1 and R@5 among the test pairs of all sources, beside the source oracle, who knows only which
source a film and a text are from; within sources (of sites alone, each by its own model); and of a source that was left
out, among all its pairs. Classification: macro AUROC of a linear layer learned from 5 or 20 films of each class
(covid19, pneumonia, no_finding; five draws) or all, on the tower's features and on those of the head that was trained,
and of zero-shot. Films of covid19 overlap with the pairs by patient, so the area of NIH's pneumonia against no_finding
is printed too. Membership: area of the cosine of a pair, trained pairs against test pairs, by site.
Features of the frozen towers are computed once. Stopped and started again, it resumes.
"""

from __future__ import annotations

import csv
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from common import command_line, machine, mean_sd, say, table
from torch import Tensor
from torch.nn import functional as F

from fedvlp.cli.overrides import seeds_of
from fedvlp.core.client import embedded_texts
from fedvlp.core.metric_keys import PROCESSOR_SECONDS
from fedvlp.data.cohort import SPLITS
from fedvlp.data.sources.table import TableSource
from fedvlp.evaluation.audit.membership import matching_weights, membership, standardised
from fedvlp.evaluation.downstream import images, records
from fedvlp.evaluation.intervals import over_seeds
from fedvlp.evaluation.linear_probe import LinearProbe, Sample, areas_of, fit, task_of
from fedvlp.evaluation.retrieval import EVERYTHING, WITHIN, embed, recall_rows
from fedvlp.evaluation.zero_shot import class_scores, prompts
from fedvlp.methods.one_round_cca import before_heads, heads, moments_of_features
from fedvlp.run import presets
from fedvlp.run.assembly import Assembly
from fedvlp.run.compare import FinishedRun
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder
from studies.claims.cell_results import Figures, Table, measured
from studies.claims.ledger import seeded
from studies.claims.scenario import Scenario, cells_of

ROOT = Path(__file__).parents[2]
CCA, STEPS_FROM_CCA = "one-round-cca-real", "one-round-cca-then-steps-real"
ALONE = ", alone by closed form"
TESTED, TRAINED = "pairs tested", "pairs trained on"
METHODS = ("local-real", "fedavg-real", "feddra-real", "central-real", CCA, STEPS_FROM_CCA)
SOURCES = ("eurorad", "journals", "radiopaedia", "sirm")
KS = (1, 5)
SHOTS, DRAWS = (5, 20), 3
CLASSES, NIH = "covid19, pneumonia, no_finding", "pneumonia, no_finding (NIH)"
NAMED = {"covid19": "COVID-19", "pneumonia": "Pneumonia", "no_finding": "No Finding"}
"""The classes of which evaluation/zero_shot.py has sentences, by the folders of the films."""


def experiments(data: Path, quick: bool, seed: int) -> Mapping[str, Experiment]:
    """Method -> its experiment, and for each source the same without it: "fedavg-real-without-sirm"."""
    source = TableSource(
        str(data / "pairs.csv"), image_size=224, label_columns="finding", label_separator="none", split_column="",
        val_fraction=0.1,
        min_report_words=1, burned_in="header", cache=str(ROOT / "runs" / "real-towers" / "cache"),
    )  # fmt: skip
    own = {name: presets.get(name) for name in METHODS if name in presets.PRESETS}
    own[STEPS_FROM_CCA] = replace(
        own["one-round-cca-real"],
        method=replace(own["one-round-cca-real"].method, local_steps=own["fedavg-real"].method.local_steps),
        rounds=replace(own["fedavg-real"].rounds, rounds=own["fedavg-real"].rounds.rounds + 1),
    )
    chosen = {name: seeded(replace(one, data=source), seed) for name, one in own.items()}
    if quick:
        chosen = {
            name: replace(
                one,
                method=replace(one.method, local_steps=min(2, one.method.local_steps)),
                rounds=replace(one.rounds, rounds=1),
            )
            for name, one in chosen.items()
        }
    without = {
        f"{name}-without-{left}": replace(one, partition=replace(one.partition, left_out=left))
        for name, one in chosen.items()
        if name != "local-real"  # has no model for it
        for left in SOURCES
    }
    return chosen | without


def figures(folder: RunFolder) -> Figures:
    """Recall on the test pairs and few-shot areas of a finished run; of one without a source, recall on that source."""
    experiment = folder.experiment()
    left = experiment.partition.left_out
    if left:
        return _of_left_out(folder, left)
    trained = Trained(folder)
    splits = list(trained.run.assembly.cohort.splits)
    found = {**_of_models(trained), "processor s": _seconds(folder)}
    found |= {TESTED: float(splits.count("test")), TRAINED: float(splits.count("train"))}
    if trained.run.experiment.name == CCA:  # what each site would have by its own moments
        trained.solve_alone()
        found |= {f"{name}{ALONE}": value for name, value in _of_models(trained).items()}
    return found


def _of_models(trained: Trained) -> Figures:
    return {**_recalls(trained), **_areas(trained), "membership": _membership(trained)}


class Trained:
    """A finished run's models on features of the frozen towers, which are computed once for all runs."""

    def __init__(self, folder: RunFolder) -> None:
        self.run = FinishedRun(folder, folder.experiment().name)
        self.own, self.state = self.run.trained()
        self.features = _features(folder)
        self.client = self.run.assembly.client("figures", None)

    def model_of(self, site: str = "") -> Any:
        """The model, with the weights that this site has."""
        weights = self.own.get(site, self.state)
        self.client.load({name: weights[name] for name in self.client.state()})
        return self.client.model.eval()

    def pairs(self, split: str, site: str) -> tuple[Tensor, Tensor]:
        """Features of a site's pairs of a split: images [n, W], reports [n, V]."""
        cohort = self.run.assembly.cohort
        halves = zip(*(self.features[cohort.ids[row]] for row in cohort.rows(split, site)), strict=True)
        image, text = (torch.stack(half) for half in halves)
        return image, text

    def solve_alone(self) -> None:
        """Gives every site the heads of OneRoundCCA's closed form from its own training pairs."""
        for site in self.run.data:
            image, text = (half.double() for half in self.pairs("train", site))
            solved = heads(self.run.experiment.method, moments_of_features(image, text), self.state)  # type: ignore[arg-type]
            self.own = {**self.own, site: {**self.state, **solved}}

    @torch.no_grad()
    def vectors(self, split: str) -> dict[str, tuple[Tensor, Tensor]]:
        """Site -> unit vectors of its pairs of a split."""
        found = {}
        for site in self.run.data:
            model = self.model_of(site)
            image, text = self.pairs(split, site)
            found[site] = F.normalize(model.image_head(image), dim=1), F.normalize(model.text_head(text), dim=1)
        return found


_kept: dict[str, dict[str, tuple[Tensor, Tensor]]] = {}


def _features(folder: RunFolder) -> dict[str, tuple[Tensor, Tensor]]:
    """Id of a pair -> pooled features of its image [W] and report [V] from the frozen towers."""
    experiment = folder.experiment()
    data = experiment.data.path  # type: ignore[attr-defined]
    if data not in _kept:
        assembly = Assembly(experiment, folder.path)
        rows = torch.arange(len(assembly.cohort)).numpy()
        served = assembly.serve(assembly.cohort, {"train": rows[:0], "test": rows})
        client = assembly.client("figures", None)
        halves: list[tuple[Tensor, Tensor]] = []
        client.model.eval()
        with torch.no_grad(), before_heads(client.model) as seen:
            for batch in served.batches("test", 32, drop_last=False):
                client.model(batch)
                halves += zip(seen["image"], seen["text"], strict=True)
        _kept[data] = dict(zip(assembly.cohort.ids, halves, strict=True))
    return _kept[data]


def _recalls(trained: Trained) -> Figures:
    vectors = trained.vectors("test")
    image, text = (torch.cat(halves) for halves in zip(*vectors.values(), strict=True))
    sources = [site for site, (of_site, _) in vectors.items() for _ in range(len(of_site))]
    patients = [patient for site in vectors for patient in trained.run.patients[site]]
    rows = [
        row for row in recall_rows(image, text, sources, patients, KS, resamples=2) if row.scope in (EVERYTHING, WITHIN)
    ]
    shown = {}
    for row in rows:
        if row.scope == WITHIN or not trained.own:  # sites alone: images and texts of two models do not compare
            shown[f"{row.scope}, R@{row.k}"] = row.recall.value
        shown[f"{row.scope}, R@{row.k}, chance"] = row.chance
        shown[f"{row.scope}, R@{row.k}, oracle"] = row.oracle
    for site, (image, text) in vectors.items():
        of_site = recall_rows(image, text, [site] * len(image), [""] * len(image), (1,), resamples=2)
        shown[f"{site}, R@1"] = next(row.recall.value for row in of_site if row.scope == EVERYTHING)
    return {**shown, "test pairs": float(len(sources))}


def _membership(trained: Trained) -> float:
    """Area in percent, by site standardised, of the cosine of a pair: pairs that were trained on against test pairs."""
    cosines, member, sites = [], [], []
    for split in ("train", "test"):
        for site, (image, text) in trained.vectors(split).items():
            cosines.append((image * text).sum(dim=1).double())
            member += [split == "train"] * len(image)
            sites += [site] * len(image)
    truth = torch.tensor(member)
    weight = matching_weights(sites, truth)
    scores = standardised(torch.cat(cosines), truth, weight, sites)
    area = membership("", "", "", scores, truth, weight, range(len(truth)), resamples=2).area
    return area.value


def _seconds(folder: RunFolder) -> float:
    """Processor seconds that the sites trained, without making the features of the towers for the first time."""
    return sum(
        metrics.get(PROCESSOR_SECONDS, 0.0) for record in folder.history() for metrics in record["sites"].values()
    )


def _of_left_out(folder: RunFolder, left: str) -> Figures:
    """Recall among all pairs of the source that took no part."""
    assembly = Assembly(folder.experiment(), folder.path)
    rows = {"train": assembly.cohort.rows("train", left)[:0]}
    everything = sorted(row for split in SPLITS for row in assembly.cohort.rows(split, left).tolist())
    data = assembly.serve(assembly.cohort, {**rows, "test": torch.tensor(everything).numpy()})
    model = _trained(folder, assembly)
    image, text = embed(model, data.batches("test", 32, drop_last=False))
    recalls = recall_rows(image, text, [left] * len(image), [""] * len(image), KS, resamples=2)
    return {
        name: value
        for row in recalls
        if row.scope == EVERYTHING
        for name, value in ((f"R@{row.k}", row.recall.value), (f"R@{row.k}, chance", row.chance))
    }


def _trained(folder: RunFolder, assembly: Assembly) -> Any:
    _, state = FinishedRun(folder, folder.experiment().name).trained()
    client = assembly.client("figures", None)
    client.load({name: state[name] for name in client.state()})
    return client.model.eval()


@cache
def _films(data: Path) -> tuple[Any, Tensor]:
    """The images for few-shot classification and their features, [N, M, W]."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "films.csv"
        root = data / "classification"
        lines = [
            (str(file.relative_to(root)), file.parts[-2], split)
            for split in ("train", "test")
            for file in sorted((root / split).rglob("*.*"))
        ]
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([("image", "finding", "split"), *lines])
        cohort = TableSource(
            str(path), root=str(root), image_size=224, report_column="", label_columns="finding", min_report_words=0,
            burned_in="header",
        ).build()  # fmt: skip
        model = presets.REAL.build().eval()
        rows = torch.arange(len(cohort)).numpy()
        with torch.no_grad():
            tokens = torch.cat([model.image_encoder(batch) for batch in images(cohort, rows, 224)])
    return cohort, tokens


def _areas(trained: Trained) -> Figures:
    """Areas on the tower's features, on those of the head of each model of the run, and of zero-shot (their means)."""
    data = Path(trained.run.experiment.data.path).parent  # type: ignore[attr-defined]
    cohort, tokens = _films(data)
    found: list[Figures] = []
    for site in trained.own or ("",):
        model = trained.model_of(site)
        with torch.no_grad():
            projected = model.image_head(tokens[:, 0])
        found.append({**probed(cohort, projected), **zero_shot(cohort, projected, trained.client)})
    return {f"{name}, head": fmean(one[name] for one in found) for name in found[0]} | {
        f"{name}, tower": area for name, area in _of_tower(data).items()
    }


@cache
def _of_tower(data: Path) -> Figures:
    """The areas on the tower's own features, which no run changes."""
    cohort, tokens = _films(data)
    return probed(cohort, tokens[:, 0])


def probed(cohort: Any, features: Tensor) -> Figures:
    """Macro AUROC in percent on the test films, mean over the draws, from features [N, W] of all films."""
    shown = {}
    for name in (CLASSES, NIH):
        settings = LinearProbe(
            classes=_classes(name), fractions=(1.0,), shots=SHOTS, solver="lbfgs", seeds=tuple(range(DRAWS))
        )
        task, rows = _told(cohort, settings)
        train, val, test = (Sample(features[one], task.targets[one]) for one in (rows.train, rows.val, rows.test))
        for subset in settings.subsets():
            areas = []
            for seed in settings.seeds if subset.shots else settings.seeds[:1]:  # all records are drawn in one way
                head = fit(task, settings, train.take(subset.draw(train.targets == 1, seed)), val, seed, None)
                with torch.no_grad():
                    areas.append(_area(task.probabilities(head(test.features)), test.targets))
            shown[f"{subset} of {name}"] = fmean(areas)
    return shown


@torch.no_grad()
def zero_shot(cohort: Any, projected: Tensor, client: Any) -> Figures:
    """Macro AUROC in percent on the test films by the cosine with ten prompts a class, mean over the draws."""
    shown = {}
    for name in (CLASSES, NIH):
        task, rows = _told(cohort, LinearProbe(classes=_classes(name)))
        areas = []
        for seed in range(DRAWS):
            sentences = {one: prompts(NAMED[one], 10, seed) for one in task.names}
            texts = {one: _embedded(client, of_class) for one, of_class in sentences.items()}
            areas.append(_area(class_scores(projected[rows.test], texts), task.targets[rows.test]))
        shown[f"zero-shot of {name}"] = fmean(areas)
    return shown


_read: dict[tuple[str, ...], Tensor] = {}


def _embedded(client: Any, texts: tuple[str, ...]) -> Tensor:
    """Unit vectors of sentences, which the frozen text tower reads once for all runs."""
    if texts not in _read:
        with before_heads(client.model) as seen:
            embedded_texts(client, texts)
        _read[texts] = seen["text"]
    return F.normalize(client.model.text_head(_read[texts]), dim=1)


def _classes(name: str) -> tuple[str, ...]:
    return tuple(name.partition(" (")[0].split(", "))


def _told(cohort: Any, settings: LinearProbe) -> tuple[Any, Any]:
    """The task of the settings' classes, without other records, and its records by split."""
    columns = [cohort.label_names.index(one) for one in settings.classes]
    among = torch.from_numpy(cohort.labels[:, columns] == 1).any(dim=1)
    task = task_of(cohort, settings)
    task = replace(task, targets=torch.where(among[:, None], task.targets, torch.nan))
    return task, records(cohort, among.numpy())


def _area(scores: Tensor, targets: Tensor) -> float:
    every = torch.ones(1, len(scores), dtype=torch.float64)
    return 100 * fmean(float(area(every)) for area in areas_of(scores, targets))


def shown(rows: Table, method: str, figure: str) -> str:
    """Mean and deviation over seeds; nothing where the method has no such figure."""
    if not rows.has(method, figure):
        return ""
    values = rows.values(method, figure)
    return mean_sd(values)


def overlap(rows: Table) -> float:
    """Tested pairs over trained ones: every seed splits the same pairs anew, so splits overlap (``over_seeds``)."""
    return fmean(rows.values(CCA, TESTED)) / fmean(rows.values(CCA, TRAINED))


def apart(rows: Table, method: str, figure: str) -> str:
    """The closed form's figure minus another method's, with its interval."""
    return str(over_seeds(rows.difference(CCA, method, figure), overlap(rows))) if rows.has(method, figure) else ""


def over_alone(rows: Table, figure: str) -> str:
    """The closed form of all sites minus each site's own."""
    if not rows.has(CCA, f"{figure}{ALONE}"):
        return ""
    pairs = zip(rows.values(CCA, figure), rows.values(CCA, f"{figure}{ALONE}"), strict=True)
    return str(over_seeds([ours - own for ours, own in pairs], overlap(rows)))


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data" / "real-cxr")
    parser.add_argument("--seeds", default="0-4", help="FIRST-LAST")
    parser.add_argument("--no-left-out", action="store_true", help="do not leave sources out")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "real-towers", help="where the runs are kept")
    parser.add_argument("--quick", action="store_true", help="one round, few steps: does everything run?")
    options = parser.parse_args()
    seeds = seeds_of(options.seeds)
    say({**machine(), **vars(options)})
    name = "quick" if options.quick else "real-towers"
    scenario = Scenario(name, "", lambda seed: experiments(options.data, options.quick, seed), figures, (), (), ())
    names = [name for name in scenario.experiments(0) if not options.no_left_out or "-without-" not in name]
    cells = cells_of(scenario, names, seeds)
    rows = measured(
        scenario, cells, options.runs, options.runs / "results", 1,
        lambda method, seed, what: say({"method": method, "seed": seed, "cell": what}), accept_phi_risk=True,
    )  # fmt: skip
    print("\n" + retrieval(rows) + "\n\n" + classification(rows))
    if not options.no_left_out:
        print("\n" + left_out(rows))
    say(machine())


def retrieval(rows: Table) -> str:
    """Recall among all test pairs and within their sources."""
    columns = [f"{scope}, R@{k}" for scope in (EVERYTHING, WITHIN) for k in KS]
    body = [[method, *(shown(rows, method, one) for one in columns)] for method in METHODS]
    for what in ("chance", "oracle"):
        body.append([what, *(shown(rows, METHODS[0], f"{one}, {what}") for one in columns)])
    body.append([f"local{ALONE[1:]}", *(shown(rows, CCA, f"{one}{ALONE}") for one in columns)])
    pairs = shown(rows, METHODS[0], "test pairs")
    others = [method for method in METHODS if method != CCA]
    by_site = [f"{site}, R@1" for site in SOURCES]
    return "\n".join([
        table(["method", *columns], body),
        f"\nTest pairs: {pairs}. {CCA} minus another, 95 %:\n",
        table(
            ["method", *columns],
            [
                *([one, *(apart(rows, one, column) for column in columns)] for one in others),
                [f"local{ALONE[1:]}", *(over_alone(rows, column) for column in columns)],
            ],
        ),
        "\nWithin each source:\n",
        table(
            ["method", *by_site],
            [
                *([one, *(shown(rows, one, column) for column in by_site)] for one in METHODS),
                [f"local{ALONE[1:]}", *(shown(rows, CCA, f"{column}{ALONE}") for column in by_site)],
            ],
        ),
    ])  # fmt: skip


def classification(rows: Table) -> str:
    """Areas of the probes and of zero-shot; the first line is the untouched tower's."""
    kinds = [*(f"{count}-shot" for count in SHOTS), "100 %", "zero-shot"]
    columns = [f"{kind} of {name}" for name in (CLASSES, NIH) for kind in kinds]
    body = [["untouched tower", *(shown(rows, METHODS[0], f"{one}, tower") for one in columns), "", ""]]
    for method in METHODS:
        figures = [*(f"{one}, head" for one in columns), "membership", "processor s"]
        body.append([method, *(shown(rows, method, one) for one in figures)])
    body.append([f"local{ALONE[1:]}", *(shown(rows, CCA, f"{one}{ALONE}") for one in figures)])
    return table(["AUROC", *columns, "membership", "processor s"], body)


def left_out(rows: Table) -> str:
    """Recall of a source that was left out, among its own pairs."""
    body = []
    for method in METHODS[1:]:
        cells = [shown(rows, f"{method}-without-{left}", f"R@{k}") for left in SOURCES for k in KS]
        body.append([method, *cells])
    chance = [shown(rows, f"{METHODS[1]}-without-{left}", f"R@{k}, chance") for left in SOURCES for k in KS]
    return table(["without", *(f"{left}, R@{k}" for left in SOURCES for k in KS)], [*body, ["chance", *chance]])


if __name__ == "__main__":
    main()
