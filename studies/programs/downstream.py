"""Few-shot classification and lung segmentation on real radiographs.

    python studies/programs/downstream.py [--data ../shared/data] [--model FOLDER ...] [--seeds 3] [--only TASK]

Every encoder is frozen, and has 64-pixel inputs: "random" has random weights, "tiny-pool" ships with fedvlp (it was
trained on drawn films and has never seen a real one); --model adds runs or model folders.
Classification (spec 10.2): pneumonia against no finding (NIH films, the test folder held out; patients are not named,
so films count as patients), and COVID-19 against the other two. 1, 5 and 20 shots and all; AdamW as in the papers, and
logistic regression. Segmentation (10.3): lungs of 97 films with masks, 50 / 17 / 30 for training, validation and test,
drawn by film; Dice beside that of the training films' mean mask.
Intervals are over resamples of the test films, "std" is over seeds of subset and head. Areas are compared with those of
"random" by DeLong's test, Holm-adjusted over all comparisons of the task and the head; the column shows the least of
the classes. About five CPU minutes.
"""

from __future__ import annotations

import csv
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import command_line, machine, rounded, say, table

from fedvlp.data.cohort import Cohort
from fedvlp.data.sources.table import TableSource
from fedvlp.evaluation.intervals import Interval
from fedvlp.evaluation.linear_probe import LinearProbe, Probed, compare, linear_probe
from fedvlp.evaluation.segmentation import Segmentation, segmentation
from fedvlp.models.dual_encoder import ModelConfig
from fedvlp.models.load import load_encoders

RANDOM, SHIPPED = "random", "tiny-pool"
TASKS = {"pneumonia": ("no_finding", "pneumonia"), "covid19": ("no_finding", "pneumonia", "covid19")}
PROBES = {
    "AdamW": LinearProbe(fractions=(1.0,), shots=(1, 5, 20)),
    "logistic": LinearProbe(fractions=(1.0,), shots=(1, 5, 20), solver="lbfgs"),
}
HELD_OUT = (50, 17)  # films with lung masks for training and for validation; the rest for test
SIZE = 72


def written(folder: Path, header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in a new file."""
    path = Path(tempfile.mkdtemp(dir=folder)) / "table.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
    return str(path)


def films(root: Path, classes: tuple[str, ...], scratch: Path) -> Cohort:
    """The classification films of these classes; a validation split is drawn from the training folder."""
    rows = [
        (f"{split}/{name}/{file.name}", name, split)
        for split in ("train", "test")
        for name in classes
        for file in sorted((root / split / name).iterdir())
    ]
    path = written(scratch, ("image", "class", "split"), rows)
    return TableSource(
        path,
        root=str(root),
        image_size=SIZE,
        report_column="",
        min_report_words=0,
        label_columns="class",
        label_values=classes,
        burned_in="accept",
    ).build()


def lungs(root: Path, scratch: Path) -> Cohort:
    """The films with lung masks, in the order of a fixed permutation."""
    files = sorted(file.stem for file in (root / "masks").iterdir())
    order = np.random.default_rng(0).permutation(len(files))
    train, val = HELD_OUT
    splits = ["train"] * train + ["val"] * val + ["test"] * (len(files) - train - val)
    rows = [(f"images/{files[i]}.jpg", f"masks/{files[i]}.png", split) for i, split in zip(order, splits, strict=True)]
    path = written(scratch, ("image", "lungs", "split"), rows)
    return TableSource(
        path,
        root=str(root),
        image_size=SIZE,
        report_column="",
        min_report_words=0,
        mask_columns="lungs",
        burned_in="accept",
    ).build()


def shown(interval: Interval | None, scale: float = 1.0) -> str:
    """Value and interval with one decimal."""
    if interval is None:
        return "n/a"
    return Interval(scale * interval.value, scale * interval.low, scale * interval.high).unsigned()


def probe_rows(models: dict[str, Any], root: Path, scratch: Path, seeds: tuple[int, ...], quick: bool) -> list[Any]:
    """One row for each task, solver, subset and model."""
    rows = []
    for task, classes in TASKS.items():
        cohort = films(root, classes, scratch)
        for solver, protocol in PROBES.items():
            settings = replace(protocol, seeds=seeds)
            found: dict[str, Probed] = {}
            for name, model in models.items():
                found[name] = linear_probe(settings, model, cohort, 5 if quick else None)
            others = {name: one for name, one in found.items() if name != RANDOM}
            apart = compare(found[RANDOM], others, 2)
            for name, probed in found.items():
                for one in probed.results:
                    p = [row.holm for row in apart if (row.other, row.subset) == (name, one.subset)]
                    note = f"{min(p):.2g}" if p else ""
                    counts = {"train": one.records, "test": len(probed.patients), "left_out": probed.rows.left_out}
                    figures = {"auc": one.auc and one.auc.value, "accuracy": one.accuracy.value}
                    say({"task": task, "solver": solver, "model": name, "on": one.subset, **counts, **figures})
                    rows.append(
                        [
                            task,
                            solver,
                            one.subset,
                            name,
                            shown(one.auc, 100),
                            f"{100 * one.auc_std:.1f}",
                            shown(one.accuracy),
                            f"{one.majority:.1f}",
                            f"{100 * one.calibration:.1f}",
                            note,
                        ]
                    )
    return rows


def lung_rows(models: dict[str, Any], root: Path, scratch: Path, seeds: tuple[int, ...], quick: bool) -> list[Any]:
    """One row for each subset and model."""
    cohort, rows = lungs(root, scratch), []
    settings = Segmentation(fractions=(0.1, 1.0), seeds=seeds)
    for name, model in models.items():
        found = segmentation(settings, model, cohort, 5 if quick else None)
        for one in found.results:
            say({"lungs": name, "on": one.subset, "train": one.records, "dice": rounded(one.dice.value)})
            rows.append(
                [
                    f"{one.subset} ({one.records} films)",
                    name,
                    shown(one.dice),
                    f"{one.dice_std:.1f}",
                    shown(one.mean_mask),
                ]
            )
    return rows


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--data", default=str(Path(__file__).parents[2] / "shared" / "data"))
    parser.add_argument("--model", action="append", default=[], help="a run or a model folder")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", choices=("classification", "segmentation"))
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    say({**machine(), "seeds": options.seeds, "quick": options.quick})
    models: dict[str, Any] = {RANDOM: ModelConfig().build(0)}
    models |= {name: load_encoders(name) for name in (SHIPPED, *options.model)}
    seeds, root = tuple(range(options.seeds)), Path(options.data) / "real-cxr"
    with tempfile.TemporaryDirectory() as scratch:
        if options.only != "segmentation":
            rows = probe_rows(models, root / "classification", Path(scratch), seeds, options.quick)
            header = (
                "task",
                "head",
                "on",
                "model",
                "macro AUC",
                "std",
                "accuracy",
                "majority",
                "ECE",
                "Holm p, least",
            )
            print(table(header, rows))
        if options.only != "classification":
            header = ("on", "model", "Dice", "std", "mean mask")
            print(table(header, lung_rows(models, root / "lungs", Path(scratch), seeds, options.quick)))
    say(machine())


if __name__ == "__main__":
    main()
