"""The methods side by side on the built-in cohort: pooled data, federated, alone.

    python benchmarks/baselines.py [--methods centralized fedavg feddra local] [--seeds 1] [--workers 2] [--quick]

Presets as they are, but that all count sites alike (1/N), as the means do. Recall of the test split, in batches of 32,
the mean of both directions, in percent: mean over sites and worst site. Steps are a site's in a round: of the encoders
at the full rate, and all (spec 4.4); processor seconds are a site's in a round. ``centralized`` takes as many steps as
a site, each on as many records as all together. ``local`` is, as in the papers, the mean over the sites' own models of
their recall at every site; its worst site is the smallest of these means.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from common import machine, rounded, say, table

from fedvlp.evaluation import metric_names
from fedvlp.evaluation.retrieval import across_sites
from fedvlp.evaluation.site_metrics import Retrieval
from fedvlp.run import presets
from fedvlp.run.assembly import Assembly
from fedvlp.run.config import override
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder
from fedvlp.run.metrics import summary
from fedvlp.run.simulate import simulate
from fedvlp.run.terms import processor_seconds, terms

COLUMNS = [
    metric_names.over_sites(metric_names.recall("test", k), kind)
    for k in (1, 5)
    for kind in (metric_names.AVERAGE, metric_names.WORST)
]
ENCODER, STEPS, PROCESSOR = "encoder steps", "steps", "processor seconds"
METHODS = ("centralized", "fedavg", "fedprox", "feddra", "fedrgb", "local")


def everywhere(folder: RunFolder) -> dict[str, float]:
    """The sites' own models, each measured at every site; per site the mean over the models."""
    experiment = folder.experiment()
    torch.set_num_threads(experiment.training.threads)
    assembly = Assembly(experiment, folder.path)
    data = {site: assembly.data(site) for site in assembly.data_sites()}
    found: dict[str, list[dict[str, float]]] = {site: [] for site in data}
    for owner in data:
        client = assembly.site(owner).client
        client.load(assembly.site(owner).memory.newest())
        for site, records in data.items():
            found[site].append(Retrieval().measure(client.model, records, "test"))
    means = {site: {key: statistics.fmean(run[key] for run in runs) for key in runs[0]} for site, runs in found.items()}
    return across_sites(means)


def measure(experiment: Experiment, workers: int) -> dict[str, float]:
    """Test recall of the trained model or models, and the seconds of the run."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="fedvlp-bench-") as root:
        folder = RunFolder.create(Path(root), experiment)
        history = simulate(experiment, folder, workers=workers)
        seconds = time.perf_counter() - began
        trained = everywhere(folder) if experiment.name == "local" else summary(history)["trained"]
        initial = summary(history)["initial"]
    figures = {name: rounded(trained[name]) for name in COLUMNS}
    encoder, total = terms(experiment).axes
    spent = {ENCODER: rounded(encoder), STEPS: rounded(total), PROCESSOR: rounded(processor_seconds(history))}
    return {**figures, **spent, "initial r1": rounded(initial[COLUMNS[0]]), "seconds": rounded(seconds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2, help="sites trained side by side")
    parser.add_argument("--quick", action="store_true", help="one round of few steps: does everything run?")
    options = parser.parse_args()
    say({**machine(), **vars(options)})
    results: dict[str, list[dict[str, float]]] = {}
    for seed in range(options.seeds):
        for name in options.methods:
            experiment = override(presets.get(name), "method.weighting", "uniform")
            rounds = replace(experiment.rounds, seed=seed, evaluate_every=experiment.rounds.rounds)
            experiment = replace(experiment, rounds=rounds, data=replace(experiment.data, seed=seed))  # type: ignore
            if options.quick:
                method, rounds = replace(experiment.method, local_steps=2), replace(rounds, rounds=1)
                experiment = replace(experiment, method=method, rounds=rounds)
            figures = measure(experiment, options.workers)
            results.setdefault(name, []).append(figures)
            say({"method": name, "seed": seed, **figures})
    shown = (*COLUMNS, ENCODER, STEPS, PROCESSOR, "seconds")
    header = ["method", "R@1 mean", "R@1 worst site", "R@5 mean", "R@5 worst site", *shown[len(COLUMNS) :]]
    rows = [
        [name, *(f"{statistics.fmean(run[column] for run in runs):.1f}" for column in shown)]
        for name, runs in results.items()
    ]
    print("\n" + table(header, rows) + "\n")
    say(machine())


if __name__ == "__main__":
    main()
