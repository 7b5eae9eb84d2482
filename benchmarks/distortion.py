"""Distortion of FedAvg and FedRGB side by side on a cohort of the ledger (spec 10.7), and what each phase sends.

    python benchmarks/distortion.py [--cohort scanner-shift] [--seeds 3] [--rounds 8] [--workers 2] [--set KEY=VALUE]

The runs of `fedvlp claims fedrgb`: every seed draws another cohort, other initial weights and other batches, and both
methods see the same, with as many full-rate steps of the encoders. About ten minutes of one core a run. The model of
the last round is re-trained on each site in turn for one round's local steps and measured on every site's test records:
``plain`` re-trains without guidance, as the published table does for FedAvg; ``own`` with the method's own local phase.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import machine, table

from fedvlp.claims.ledger import ROUNDS, alignment
from fedvlp.core.client import Client
from fedvlp.core.metric_names import BYTES_UP
from fedvlp.core.server_state import Server
from fedvlp.core.types import group
from fedvlp.data.synthetic.cohort import COHORTS
from fedvlp.evaluation import metric_names
from fedvlp.evaluation.distortion import Entry, Retraining, Trial, column_means, cross_table
from fedvlp.run.assembly import Assembly
from fedvlp.run.config import override
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder
from fedvlp.run.metrics import summary
from fedvlp.run.simulate import simulate

AVERAGE_RECALL = metric_names.over_sites(metric_names.recall("test", 1), metric_names.AVERAGE)

METHODS = ("fedavg", "fedrgb")


def experiment(cohort: str, name: str, seed: int, rounds: int, quick: bool, settings: Sequence[str]) -> Experiment:
    """The ledger's with ``settings``; ``quick`` only shows that the program works."""
    chosen: dict[str, Any] = {"rounds.rounds": rounds}
    if quick:
        chosen |= {"data.test_rows": 0, "data.size": 1200, "rounds.rounds": 1, "method.local_steps": 3}
        chosen |= {"method.aligner_steps": 3} if name == "fedrgb" else {}
    chosen |= dict(setting.split("=", 1) for setting in settings)
    result = replace(alignment(cohort, seed)[name], name=name)
    for key, value in chosen.items():
        result = override(result, key, str(value))
    return result


def tables(chosen: Experiment, server: Server) -> dict[str, list[Entry]]:
    """Distortion by how the model is re-trained."""
    assembly = Assembly(chosen)
    state = chosen.method.finish(server)
    judges = {site: assembly.data(site) for site in assembly.data_sites()}
    trials = [
        Trial(site, state, Client(site, chosen.rounds.seed, *assembly.modules(), data)) for site, data in judges.items()
    ]
    plain = Retraining(local_steps=chosen.method.local_steps)
    ways = {"plain": plain} | ({"own": chosen.method} if chosen.name == "fedrgb" else {})
    return {
        way: cross_table(trials, judges, method, chosen.training, round=server.round) for way, method in ways.items()
    }


def traffic(chosen: Experiment, server: Server) -> list[list[object]]:
    """Bytes sent to the server in each phase of the first round, and of the parameters that are meant to travel."""
    rows = []
    for phase in chosen.method.phases(0):
        record = next(r for r in server.history if (r["round"], r["phase"]) == (0, phase))
        travels = {name: t for name, t in server.state.items() if chosen.method.shares(name, phase)}
        size = sum(t.numel() * t.element_size() for t in travels.values()) * len(server.sites)
        what = "+".join(dict.fromkeys(group(name) for name in travels))
        count = sum(t.numel() for t in travels.values())
        rows.append([chosen.name, phase, what, f"{count:,}", f"{size:,}", f"{record['bytes'][BYTES_UP]:,}"])
    return rows


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Mean and sample standard deviation over seeds."""
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{deviation}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cohort", default="label-skew", choices=sorted(COHORTS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], help="a setting of both, e.g. model.image_size=32")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    columns: dict[str, list[dict[str, float]]] = {}
    quality: dict[str, list[dict[str, float]]] = {}
    sent: list[list[object]] = []
    for seed in range(1 if options.quick else options.seeds):
        for name in METHODS:
            chosen = experiment(options.cohort, name, seed, options.rounds, options.quick, options.set)
            with tempfile.TemporaryDirectory() as scratch:
                folder = RunFolder.create(Path(scratch), chosen)
                history = simulate(chosen, folder, workers=options.workers)
                server, _ = Server.load(folder.checkpoint)
            trained = summary(history)["trained"]
            for way, entries in tables(chosen, server).items():
                label = f"{name}, {way}"
                columns.setdefault(label, []).append(column_means(entries))
                foreign = [entry.distortion for entry in entries if entry.trained_on != entry.measured_on]
                before = statistics.fmean({e.measured_on: e.similarity_before for e in entries}.values())
                quality.setdefault(label, []).append(
                    {
                        "all": statistics.fmean(column_means(entries).values()),
                        "foreign": statistics.fmean(foreign),
                        "similarity": before,
                        "recall": trained[AVERAGE_RECALL],
                    }
                )
            sent += traffic(chosen, server) if seed == 0 else []
    show(columns, quality, sent)


def show(columns: dict[str, Any], quality: dict[str, Any], sent: list[list[object]]) -> None:
    """Prints the tables as Markdown."""
    sites = list(next(iter(columns.values()))[0])
    rows = []
    for label, seeds in columns.items():
        own = quality[label]
        means = [f"{statistics.fmean(seed[site] for seed in seeds):+.3f}" for site in sites]
        cells = [spread([seed[key] for seed in own]) for key in ("all", "foreign", "similarity")]
        rows.append([label, *means, *cells, spread([seed["recall"] for seed in own], 1)])
    print(f"Distortion: drop of the paired cosine, column means; {len(next(iter(columns.values())))} seed(s)\n")
    header = ["re-trained", *sites, "all sites", "other sites only", "paired cosine before", "test R@1 before, %"]
    print(table(header, rows) + "\n\nSent to the server in a round, all sites\n")
    print(table(["method", "phase", "groups", "values per site", "their bytes x sites", "bytes counted"], sent))
    print("\n" + ", ".join(f"{key} {value}" for key, value in machine().items()))


if __name__ == "__main__":
    main()
