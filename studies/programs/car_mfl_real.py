"""CAR-MFL beside mFedAvgP on real records: sites with images only, with reports only, and with pairs.

    python studies/programs/car_mfl_real.py [--data ../shared/data] [--seeds 2] [--quick]

Image-only: NIH films (real-cxr/classification/train: pneumonia, no_finding; two sites). Text-only: Open-I reports, all
that are indexed as pneumonia and five normal ones for each (two sites). Paired: the training rows of
real-cxr/pairs.csv at journals, eurorad and sirm; radiopaedia's are the public set. Labels are mapped by name:
Pneumonia, No Finding, COVID-19 (absent in films and reports from before 2020; a finding "todo" is unknown). AUC on the
held-out pairs (val rows of all four sources), by label and macro, in percent. They hold few normal films, so No Finding
moves by tens of percent.
Six rounds of ten steps of 16 records on 64-pixel films: about five CPU minutes. ``--quick`` takes one step a round.
"""

from __future__ import annotations

import csv
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from common import command_line, machine, rounded, say

from fedvlp.core.metric_keys import loss
from fedvlp.data.cohort import PUBLIC, Cohort
from fedvlp.data.labels import Terms, from_terms
from fedvlp.data.loader import SiteData
from fedvlp.data.sources.openi import OpenISource
from fedvlp.data.sources.table import TableSource
from fedvlp.evaluation.classification import auc, modality_shares, predict
from fedvlp.federation.exchange import SequentialExchange
from fedvlp.federation.loop import Federation, Rounds
from fedvlp.methods import CARMFL, MFedAvg
from fedvlp.models.multimodal import MultimodalConfig
from fedvlp.objectives.bce import BCEConfig
from fedvlp.run.assembly import Assembly
from fedvlp.run.experiment import Experiment
from fedvlp.training.settings import Training

LABELS = ("Pneumonia", "No Finding", "COVID-19")
METHODS = {"mFedAvgP": MFedAvg(public=True), "CAR-MFL softmax": CARMFL(), "CAR-MFL linear": CARMFL(renorm="linear")}
COVID = ("COVID-19", "COVID-19, ARDS")
OTHERS = (
    "SARS",
    "Streptococcus",
    "Pneumonia",
    "Pneumocystis",
    "Klebsiella",
    "ARDS",
    "E.Coli",
    "Legionella",
    "Varicella",
    "Mycoplasma Bacterial Pneumonia",
    "Lipoid",
    "Bacterial",
    "Influenza",
    "pneumonia",
)
FINDING: Terms = {
    "Pneumonia": COVID + OTHERS,
    "No Finding": ("No Finding", "no_finding"),
    "COVID-19": COVID,
}
"""The column "finding" of pairs.csv, and the folders of the classification images."""


def renamed(cohort: Cohort) -> Cohort:
    """A cohort with one-hot words of FINDING as its labels, labelled by the common names."""
    names = np.asarray(cohort.label_names)
    words = [set(names[row == 1].tolist()) for row in cohort.labels]
    labels = from_terms([found - {"todo"} or None for found in words], FINDING, LABELS)
    return replace(cohort, labels=labels, label_names=LABELS)


@dataclass(frozen=True)
class RealRecords:
    """The four kinds of records as one cohort."""

    folder: str
    seed: int = 0

    def build(self) -> Cohort:
        return Cohort.concat([self.pairs(), self.films(), self.reports()])

    def pairs(self) -> Cohort:
        table = str(Path(self.folder) / "real-cxr" / "pairs.csv")
        source = TableSource(
            table, label_columns="finding", label_separator="none", min_report_words=1, burned_in="header"
        )
        cohort = renamed(source.build())
        sites = [PUBLIC if site == "radiopaedia" else f"paired-{site}" for site in cohort.sites or ()]
        return cohort.with_sites(sites)

    def films(self) -> Cohort:
        root = Path(self.folder) / "real-cxr" / "classification" / "train"
        rows = [
            (f"{name}/{file.name}", name) for name in ("no_finding", "pneumonia") for file in (root / name).iterdir()
        ]
        with tempfile.TemporaryDirectory() as folder:
            table = Path(folder) / "films.csv"
            with table.open("w", newline="") as file:
                csv.writer(file).writerows([("image", "finding"), *sorted(rows)])
            source = TableSource(
                str(table),
                root=str(root),
                report_column="",
                burned_in="header",
                label_columns="finding",
                min_report_words=0,
                val_fraction=0.0,
                test_fraction=0.0,
            )
            cohort = renamed(source.build())
            cohort.images(np.arange(len(cohort)))  # decoded while the table is there
        return cohort.with_sites([f"images-{row % 2 + 1}" for row in range(len(cohort))])

    def reports(self) -> Cohort:
        archive = str(Path(self.folder) / "real-tables" / "NLMCXR_reports.tgz")
        source = OpenISource(archive, labels=LABELS, image_size=72, val_fraction=0.0, test_fraction=0.0)
        cohort = source.build()
        sick, normal = (np.flatnonzero(cohort.labels[:, LABELS.index(name)] == 1) for name in LABELS[:2])
        drawn = np.random.default_rng(self.seed).permutation(normal)[: 5 * len(sick)]
        cohort = cohort.take(np.sort(np.concatenate([sick, drawn])))
        labels = cohort.labels.copy()
        labels[:, LABELS.index("COVID-19")] = 0  # Open-I is from 2013
        return replace(cohort, labels=labels).with_sites([f"reports-{row % 2 + 1}" for row in range(len(cohort))])


def measure(experiment: Experiment) -> dict[str, object]:
    """AUC in percent on the held-out pairs, and the loss terms of the first and the last round."""
    assembly = Assembly(experiment)
    server = assembly.server(assembly.sites())
    state = Federation(experiment.method, server, experiment.rounds, SequentialExchange(assembly.site)).run()
    model, objective = assembly.modules()
    model.load_state_dict(state)
    data = SiteData(assembly.cohort, {"val": assembly.cohort.rows("val")}, model.tokenizer, experiment.model.image_size)
    found = auc(*predict(model, objective, data.batches("val", 96, drop_last=False)), LABELS)
    losses = [np.mean([m[loss("bce")] for m in record["sites"].values()]) for record in server.history]
    macro = found.macro()
    return {
        "macro": None if macro is None else rounded(100 * macro),
        **{name: rounded(100 * area) for name, area in found.by_label.items()},
        "skipped": list(found.skipped),
        "dropped": [r["dropped"] for r in server.history if r["dropped"]],
        "loss": [rounded(float(losses[0])), rounded(float(losses[-1]))],
        "image": rounded(modality_shares(model.classifier.weight)["image"]),
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--data", default=str(Path(__file__).parents[2] / "shared" / "data"))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    say({**machine(), "seeds": options.seeds, "quick": options.quick})
    for seed in range(options.seeds):
        for name, method in METHODS.items():
            experiment = Experiment(
                "real",
                replace(method, local_steps=1 if options.quick else 10),
                MultimodalConfig(labels=LABELS),
                BCEConfig(),
                RealRecords(options.data, seed),
                training=Training(batch_size=16, lr=5e-4, weight_decay=0.0, warmup_steps=5),
                rounds=Rounds(rounds=6, evaluate_every=0, seed=seed),
            )
            if seed == 0 and name == "mFedAvgP":
                say({"records": describe(experiment)})
            say({"seed": seed, "method": name, **measure(experiment)})
    say(machine())


def describe(experiment: Experiment) -> dict[str, object]:
    """By site and split: records, and positives of each label."""
    cohort = experiment.data.build()
    sites, splits = np.asarray(cohort.sites), np.asarray(cohort.splits)
    found = {}
    for site in sorted(set(sites)):
        for split in ("train", "val"):
            labels = cohort.labels[(sites == site) & (splits == split)]
            found[f"{site} {split}"] = [len(labels), *(labels == 1).sum(axis=0).tolist()]
    return found


if __name__ == "__main__":
    main()
