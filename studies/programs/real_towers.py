"""Frozen published towers on real films: FedDRA beside FedAvg, sites alone, and all records together.

    fedvlp towers fetch lite0 && fedvlp towers fetch minilm
    python studies/programs/real_towers.py [--data ../shared/data/real-cxr] [--seeds 0-4] [--quick]

Films with text from four public sources, each a site; every seed draws a fifth of the patients for the test. Percent,
mean of both directions: R@1 and R@5 among the test pairs of all sources, beside the source oracle, who knows only which
source a film and a text are from; within sources (of sites alone, each by its own model); and of a source that was left
out, among all its pairs. Few-shot: macro AUROC of a linear layer learned from 20 films of each class (covid19,
pneumonia, no_finding), on the tower's features and on those of the head that was trained, five draws.
Films of covid19 overlap with the pairs by patient, so the area of NIH's pneumonia against no_finding is printed too.
What the frozen towers make of a film or text is computed once. Stopped and started again, it goes on.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from common import machine, say, table
from torch import Tensor

from fedvlp.data.cohort import SPLITS
from fedvlp.data.sources.table import TableSource
from fedvlp.evaluation.downstream import images, records
from fedvlp.evaluation.intervals import over_seeds
from fedvlp.evaluation.linear_probe import LinearProbe, Sample, areas_of, fit, task_of
from fedvlp.evaluation.site_metrics import embed
from fedvlp.evaluation.source_retrieval import EVERYTHING, WITHIN, recall_rows
from fedvlp.run import presets
from fedvlp.run.assembly import Assembly
from fedvlp.run.cell_results import Figures, Table
from fedvlp.run.cells import measured
from fedvlp.run.compare import FinishedRun
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder
from studies.claims.ledger import seeded
from studies.claims.scenario import Scenario, cells_of

ROOT = Path(__file__).parents[2]
METHODS = ("local-real", "fedavg-real", "feddra-real", "central-real", "fedcca-real")
SOURCES = ("eurorad", "journals", "radiopaedia", "sirm")
KS = (1, 5)
SHOTS, DRAWS = 20, 5
CLASSES, NIH = "covid19, pneumonia, no_finding", "pneumonia, no_finding (NIH)"


def experiments(data: Path, quick: bool, seed: int) -> Mapping[str, Experiment]:
    """Method -> its experiment, and for each source the same without it: "fedavg-real-without-sirm"."""
    source = TableSource(
        str(data / "pairs.csv"), image_size=224, label_columns="finding", label_separator="none", split_column="",
        val_fraction=0.1,
        min_report_words=1, burned_in="header", cache=str(ROOT / "runs" / "real-towers" / "cache"),
    )  # fmt: skip
    chosen = {name: seeded(replace(presets.get(name), data=source), seed) for name in METHODS}
    if quick:
        chosen = {
            name: replace(
                one,
                method=replace(one.method, local_steps=2),
                rounds=replace(one.rounds, rounds=1),  # type: ignore[type-var]
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
    return _of_left_out(folder, left) if left else {**_recalls(folder), **_areas(folder)}


def _recalls(folder: RunFolder) -> Figures:
    run = FinishedRun(folder, folder.experiment().name)
    own, state = run.trained()
    vectors = run.embedded(own, state)
    image, text = (torch.cat(halves) for halves in zip(*vectors.values(), strict=True))
    sources = [site for site, (of_site, _) in vectors.items() for _ in range(len(of_site))]
    patients = [patient for site in vectors for patient in run.patients[site]]
    rows = [
        row for row in recall_rows(image, text, sources, patients, KS, resamples=2) if row.scope in (EVERYTHING, WITHIN)
    ]
    shown = {}
    for row in rows:
        if row.scope == WITHIN or not own:  # sites alone: a film of one model and a text of another do not compare
            shown[f"{row.scope}, R@{row.k}"] = row.recall.value
        shown[f"{row.scope}, R@{row.k}, chance"] = row.chance
        shown[f"{row.scope}, R@{row.k}, oracle"] = row.oracle
    return {**shown, "test pairs": float(len(image))}


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
    """The films for few-shot classification, and what the image tower makes of them, [N, M, W]."""
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


def _areas(folder: RunFolder) -> Figures:
    """Few-shot areas on the tower's features, and on those of the head of each model of the run (their mean)."""
    run = FinishedRun(folder, folder.experiment().name)
    own, state = run.trained()
    data = Path(folder.experiment().data.path).parent  # type: ignore[attr-defined]
    cohort, tokens = _films(data)
    client = run.assembly.client("figures", None)
    found: list[Figures] = []
    for weights in own.values() or [state]:
        client.load({name: weights[name] for name in client.state()})
        with torch.no_grad():
            projected = client.model.eval().image_head(tokens[:, 0])
        found.append(few_shot(cohort, projected))
    return {f"{name}, head": fmean(one[name] for one in found) for name in found[0]} | {
        f"{name}, tower": area for name, area in _of_tower(data).items()
    }


@cache
def _of_tower(data: Path) -> Figures:
    """The areas on the tower's own features, which no run changes."""
    cohort, tokens = _films(data)
    return few_shot(cohort, tokens[:, 0])


def few_shot(cohort: Any, features: Tensor) -> Figures:
    """Macro AUROC in percent on the test films, mean over the draws, from features [N, W] of all films."""
    shown = {}
    for name in (CLASSES, NIH):
        classes = tuple(name.partition(" (")[0].split(", "))
        settings = LinearProbe(classes=classes, fractions=(), shots=(SHOTS,), solver="lbfgs", seeds=tuple(range(DRAWS)))
        among = torch.from_numpy(cohort.labels[:, [cohort.label_names.index(one) for one in classes]] == 1).any(dim=1)
        task = task_of(cohort, settings)
        targets = torch.where(among[:, None], task.targets, torch.nan)
        rows = records(cohort, among.numpy())
        train, val, test = (Sample(features[one], targets[one]) for one in (rows.train, rows.val, rows.test))
        areas = []
        for seed in settings.seeds:
            (subset,) = settings.subsets()
            head = fit(task, settings, train.take(subset.draw(train.targets == 1, seed)), val, seed, None)
            with torch.no_grad():
                scores = task.probabilities(head(test.features))
            every = torch.ones(1, len(scores), dtype=torch.float64)
            areas.append(fmean(float(area(every)) for area in areas_of(scores, test.targets)))
        shown[f"{SHOTS} shots of {name}"] = 100 * fmean(areas)
    return shown


def shown(rows: Table, method: str, figure: str) -> str:
    """Mean and deviation over seeds; nothing where the method has no such figure."""
    if not rows.has(method, figure):
        return ""
    values = rows.values(method, figure)
    return f"{fmean(values):.1f} ({stdev(values) if len(values) > 1 else 0:.1f})"


def apart(rows: Table, method: str, figure: str) -> str:
    """FedDRA's figure less another method's, with its interval."""
    if method == "feddra-real" or not rows.has(method, figure):
        return ""
    return str(over_seeds(rows.difference("feddra-real", method, figure)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data" / "real-cxr")
    parser.add_argument("--seeds", default="0-4", help="FIRST-LAST")
    parser.add_argument("--no-left-out", action="store_true", help="do not leave sources out")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "real-towers", help="where the runs are kept")
    parser.add_argument("--quick", action="store_true", help="one round, few steps: does everything run?")
    options = parser.parse_args()
    first, _, last = options.seeds.partition("-")
    seeds = range(int(first), int(last or first) + 1)
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
    pairs = shown(rows, METHODS[0], "test pairs")
    lines = [table(["method", *columns], body), f"\nTest pairs: {pairs}. FedDRA less another, 95 %:\n"]
    others = [[method, *(apart(rows, method, one) for one in columns)] for method in METHODS if method != "feddra-real"]
    return "\n".join([*lines, table(["method", *columns], others)])


def classification(rows: Table) -> str:
    """Few-shot areas."""
    columns = [f"{SHOTS} shots of {name}, {where}" for where in ("tower", "head") for name in (CLASSES, NIH)]
    return table(["method", *columns], [[method, *(shown(rows, method, one) for one in columns)] for method in METHODS])


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
