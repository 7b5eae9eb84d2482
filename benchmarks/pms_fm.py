"""PMS-FM's tables on the built-in cohort: which model suits whom (Table 3), and what the selector tells sites by (5).

    python benchmarks/pms_fm.py [--seeds 3] [--workers 2] [--quick]

The run of `fedvlp claims pms-fm`, whose claims it judges there; here by site, and by embedding. Zero-shot: accuracy of
the five findings (percent, chance 20, on records with one finding) and macro AUC (on all), of the global model, each
site's own and the one that is selected for each image; mean over 5 prompt seeds, then mean (deviation) over the run's
seeds. Selector: share of test images whose site is told with class templates in place of reports (chance 25), beside
always naming the largest site: the run's own, which has taken one step a round, and others trained anew on the final
global encoders, with embeddings left out and with both fusions. About 20 minutes of one core a seed; ``--quick`` takes
one step in one round.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import machine, rounded, say, table

from fedvlp.core.client import Client
from fedvlp.core.server_state import Server
from fedvlp.data.synthetic.cases import FINDINGS
from fedvlp.evaluation import site_selection
from fedvlp.evaluation.zero_shot import GLOBAL, Result, ZeroShot, over_sites, zero_shot
from fedvlp.run.assembly import Assembly
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder
from fedvlp.run.simulate import simulate
from studies.claims.ledger import unlike_sites
from studies.claims.selection import IMAGES, STEPS, largest, weighted

ABLATION = {
    "image": (("image",), "mlp"),
    "report": (("report",), "mlp"),
    "token": (("token",), "mlp"),
    "image + report": (("image", "report"), "mlp"),
    "image + token": (("image", "token"), "mlp"),
    "report + token": (("report", "token"), "mlp"),
    "all, MLP": (("image", "report", "token"), "mlp"),
    "all, cross attention": (("image", "report", "token"), "attention"),
}


def configured(seed: int, quick: bool) -> Experiment:
    """The ledger's; ``quick`` only shows that the program works."""
    experiment: Any = unlike_sites(seed)["pms-fm"]
    if not quick:
        return experiment
    return replace(
        experiment,
        rounds=replace(experiment.rounds, rounds=1),
        method=replace(experiment.method, local_steps=1),
        data=replace(experiment.data, size=800, test_rows=0),
    )


def measure(seed: int, workers: int, quick: bool) -> tuple[list[Result], dict[str, float]]:
    """Zero-shot results and selector accuracies of one run."""
    experiment = configured(seed, quick)
    with tempfile.TemporaryDirectory(prefix="fedvlp-bench-") as root:
        folder = RunFolder.create(Path(root), experiment)
        simulate(experiment, folder, workers=workers)
        server = Server.load(folder.checkpoint)[0]
    assembly, method = Assembly(experiment), experiment.method
    data = {site: assembly.data(site) for site in assembly.data_sites()}
    client = Client("bench", seed, *assembly.modules(), data["site-1"])
    own = {site: {**server.state, **method.personal(server, site)} for site in server.sites}  # type: ignore[attr-defined]
    protocol = ZeroShot(FINDINGS, method.threshold)  # type: ignore[attr-defined]
    results, choices = zero_shot(protocol, client, {GLOBAL: server.state, **own}, data, FINDINGS)
    client.load(server.state)
    config: Any = experiment.extra
    test = site_selection.images_of(client, data, "test")
    train = site_selection.images_of(client, data, "train", IMAGES)

    def told(selector: Any) -> float:
        return weighted(site_selection.told(selector, client, test, FINDINGS), test)

    accuracy = {"always the largest site": largest(test), "in the run": told(client.objective.extra)}
    for name, (embeddings, fusion) in ABLATION.items():
        fresh = replace(config, embeddings=embeddings, fusion=fusion).build(assembly.config(), seed)
        site_selection.fit(fresh, client, train, 2 if quick else STEPS, method.selector_lr)  # type: ignore[attr-defined]
        accuracy[name] = told(fresh)
    accuracy["global model used"] = 100 * statistics.fmean(choice.shares[GLOBAL] for choice in choices)
    return results, accuracy


def spread(values: list[float]) -> str:
    """Mean (population deviation)."""
    return f"{statistics.fmean(values):.1f} ({statistics.pstdev(values):.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2, help="sites trained side by side")
    parser.add_argument("--quick", action="store_true", help="one round of one step: does everything run?")
    options = parser.parse_args()
    torch.set_num_threads(1)
    say({**machine(), **vars(options)})
    runs = []
    for seed in range(options.seeds):
        results, accuracy = measure(seed, options.workers, options.quick)
        runs.append((results, accuracy))
        means = {model: tuple(rounded(v) for v in figures) for model, figures in over_sites(results).items()}
        say({"seed": seed, "zero_shot": means, "selector": {name: rounded(v) for name, v in accuracy.items()}})
    for title, figure, scale in (("accuracy, %", "accuracy", 1), ("macro AUC, %", "auc", 100)):
        cells: dict[str, dict[str, list[float]]] = {}
        for results, _ in runs:
            for result in results:
                value = getattr(result, figure)
                row = cells.setdefault(result.model, {}).setdefault(result.site, [])
                row.extend([scale * value[0]] if value else [])
            for model, means_of in over_sites(results).items():
                cells[model].setdefault("mean", []).append(scale * means_of[figure == "auc"])
        sites = list(next(iter(cells.values())))
        rows = [[model, *(spread(row[site]) for site in sites)] for model, row in cells.items()]
        print("\n" + table([f"zero-shot {title}", *sites], rows))
    rows = [[name, spread([accuracy[name] for _, accuracy in runs])] for name in runs[0][1]]
    print("\n" + table(["selector, % of sites told (chance 25)", "mean (deviation)"], rows) + "\n")
    say(machine())


if __name__ == "__main__":
    main()
