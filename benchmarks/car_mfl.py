"""Macro AUC of mFedAvg, mFedAvgP and CAR-MFL by which sites lack what, and by public-set size, beside both bounds.

    python benchmarks/car_mfl.py [--mixes 4:0:1 0:4:1 2:2:1] [--bounds] [--sizes 0.05 0.3] [--seeds 0 1 2] [--quick]

The runs of `fedvlp claims car-mfl`, which judges its claims for the first of these mixes. A mix I:T:M is image-only,
text-only and paired sites. Macro AUC of the trained model on all held-out pairs of the cohort, in percent, and of the
same model without the images and without the reports: mean and, in brackets, least and largest over the seeds.
``share`` is the image's part of the classifier's absolute weight (0.5: no modality bias). ``lower`` is the public set
alone, ``upper`` sites that lack nothing. Two to twenty minutes of one core a run; ``--quick`` takes one step a round.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import machine, rounded, say, table

from fedvlp.claims.ledger import MACRO, classified, missing, trained_client, without
from fedvlp.evaluation.classification import modality_shares
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder
from fedvlp.run.simulate import simulate

METHODS, BOUNDS, LINEAR = ("mfedavg", "mfedavg-p", "car-mfl"), ("lower", "upper"), "car-mfl linear"
MIX, PUBLIC = "4:0:1", 0.15
"""The ledger's mix and share of patients in the public set."""
SHARE = "share"


def experiment(name: str, mix: str, public: float, seed: int, quick: bool) -> Experiment:
    """The ledger's with another mix, public set or weighing of the retrieved."""
    one: Any = missing(seed)[name.split()[0]]
    counts = [int(count) for count in mix.split(":")]
    image_only, text_only = (0, 0) if name == "upper" else counts[:2]
    if name == LINEAR:
        one = replace(one, method=replace(one.method, renorm="linear"))
    if quick:
        one = replace(one, method=replace(one.method, local_steps=1), rounds=replace(one.rounds, rounds=1))
        one = replace(one, data=replace(one.data, size=1200))
    return replace(
        one,
        data=replace(one.data, sites=sum(counts)),
        partition=replace(one.partition, image_only=image_only, text_only=text_only, public=public),
    )


def measure(chosen: Experiment) -> dict[str, float]:
    """Macro AUC of the trained model, whole and with a modality left out, and the image's share of the classifier."""
    with tempfile.TemporaryDirectory(prefix="fedvlp-bench-") as root:
        folder = RunFolder.create(Path(root), chosen)
        simulate(chosen, folder)
        model: Any = trained_client(folder).model
        return {**classified(folder), SHARE: modality_shares(model.classifier.weight)["image"]}


def rows(mixes: Sequence[str], bounds: bool, sizes: Sequence[float]) -> list[tuple[str, float, str]]:
    """(mix, public share, name) of every line of the table."""
    lines = [(mix, PUBLIC, name) for mix in mixes for name in (*METHODS, LINEAR)]
    lines += [(MIX, PUBLIC, name) for name in BOUNDS if bounds]
    return lines + [(MIX, size, name) for size in sizes for name in (*METHODS[1:], LINEAR)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixes", nargs="*", default=[MIX, "0:4:1", "2:2:1"])
    parser.add_argument("--bounds", action="store_true")
    parser.add_argument("--sizes", nargs="*", type=float, default=[])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    say({**machine(), **vars(options)})
    shown = (MACRO, without("text"), without("image"))
    printed = []
    for mix, public, name in rows(options.mixes, options.bounds, options.sizes):
        found = [measure(experiment(name, mix, public, seed, options.quick)) for seed in options.seeds]
        say({"mix": mix, "public": public, "method": name, MACRO: [rounded(figures[MACRO]) for figures in found]})
        areas = [
            f"{statistics.fmean(seen):.1f} ({min(seen):.1f}-{max(seen):.1f})"
            for seen in ([figures[figure] for figures in found] for figure in shown)
        ]
        share = statistics.fmean(figures[SHARE] for figures in found)
        printed.append([mix, f"{public:g}", name, *areas, f"{share:.3f}"])
    print("\n" + table(["I:T:M", "public share", "method", *shown, SHARE], printed) + "\n")
    say(machine())


if __name__ == "__main__":
    main()
