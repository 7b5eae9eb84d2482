"""A table of hospitals that lack a modality: one has pairs, one images, one reports, one all; and a public set."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

from fedvlp.data.sources.table import TableSource
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.data.synthetic.files import write
from fedvlp.run import presets
from fedvlp.run.config import override
from fedvlp.run.experiment import Experiment
from fedvlp.run.fitting import fitted

SITES = ("public", "paired", "images", "texts", "mixed")
FINDINGS = ("Edema", "Pleural Effusion", "Consolidation", "Pneumothorax", "Pneumonia")
SETTINGS = {
    "rounds.rounds": 1, "method.local_steps": 2, "method.local_epochs": 1, "method.server_steps": 1,
    "method.distil_steps": 1, "training.batch_size": 8, "partition.image_only": 0, "partition.text_only": 0,
    "model.image_size": 32, "model.init": "random",
}  # fmt: skip


def table(folder: Path, size: int = 200, form: str = "csv") -> TableSource:
    """The table in ``folder``, with labels. At the mixed hospital every third record lacks its report or its image."""
    path = write(SyntheticCohort(sites=len(SITES), size=size, image_size=36), folder)
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    names = dict(zip(sorted({row["site"] for row in rows}), SITES, strict=True))
    for index, row in enumerate(rows):
        row["site"] = names[row["site"]]
        kind = {"images": 0, "texts": 1, "mixed": index % 3}.get(row["site"], 2)
        row |= {("report", "image")[kind]: ""} if kind < 2 else {}
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    if form == "jsonl":
        path = path.with_suffix(".jsonl")
        path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    if form == "parquet":
        from pyarrow import Table, parquet

        path = path.with_suffix(".parquet")
        parquet.write_table(Table.from_pylist(rows), path)
    return TableSource(str(path), image_size=36, label_columns=FINDINGS, burned_in="accept")


def experiment(name: str, source: TableSource, **settings: object) -> Experiment:
    """The preset ``name`` on the table, with as little to do as it allows."""
    chosen = fitted(override_all(presets.get(name), {}, source))
    return override_all(chosen, {**SETTINGS, **settings}, source)


def override_all(chosen: Experiment, settings: dict[str, object], source: TableSource) -> Experiment:
    """The experiment on ``source``, with those of the settings that it has."""
    chosen = replace(chosen, data=source)
    for key, value in settings.items():
        group, _, field = key.partition(".")
        if hasattr(getattr(chosen, group), field):
            chosen = override(chosen, key, str(value))
    return chosen
