"""The ladder from plain averaging to CreamFL, against the same server trained on the public set alone.

    python benchmarks/creamfl.py [--names alone reamfl-mean ... creamfl] [--seeds 0 1 2] [--out FOLDER] [--quick]

The presets: about ten minutes of one core for a seed and row, two for ``alone``. The server's model is measured on
all held-out studies of the cohort (val and test, whole set), which neither the public set nor any site trains on: R@1,
R@5, R@10, mean of both directions, and their sum, in percent; mean and sample standard deviation over the seeds, which
move the cohort, the public set, the weights and the batches, and the same of each seed's difference to ``alone``. That
one is ``kd_weight=0`` without contrast: no site has any influence on it. ``alone-long`` gives the steps of distillation
to the task as well, so that the server takes as many as in the other rows. Results already in ``--out`` are kept.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch
from common import machine, rounded, say, table

from fedvlp.data.cohort import SPLITS
from fedvlp.data.loader import SiteData
from fedvlp.evaluation.metric_names import recall_at
from fedvlp.evaluation.retrieval import retrieval
from fedvlp.evaluation.site_metrics import embed
from fedvlp.federation.exchange import SequentialExchange
from fedvlp.federation.loop import Federation
from fedvlp.methods.ensemble import PublicEnsemble
from fedvlp.run import presets
from fedvlp.run.assembly import Assembly
from fedvlp.run.config import fingerprint
from fedvlp.run.experiment import Experiment

ALONE, ALONE_LONG = "alone", "alone-long"
NAMES = (ALONE, ALONE_LONG, *presets.REAMFL, "creamfl")
KS = (1, 5, 10)


def experiment(name: str, seed: int, quick: bool) -> Experiment:
    """The preset with this seed for everything."""
    alone = name in (ALONE, ALONE_LONG)
    chosen = presets.get("creamfl" if alone else name)
    method = chosen.method
    assert isinstance(method, PublicEnsemble)
    if alone:
        steps = method.server_steps + (method.distil_steps if name == ALONE_LONG else 0)
        method = replace(method, kd_weight=0.0, gamma=0.0, local_steps=1, local_epochs=1, server_steps=steps)  # type: ignore[call-arg]
    if quick:
        method = replace(method, local_steps=1, local_epochs=1, server_steps=2, distil_steps=2)
    rounds = 1 if quick else chosen.rounds.rounds
    return replace(
        chosen, method=method,
        data=replace(chosen.data, seed=seed, size=1600 if quick else chosen.data.size),  # type: ignore[attr-defined, type-var]
        rounds=replace(chosen.rounds, rounds=rounds, seed=seed, evaluate_every=0),
    )  # fmt: skip


def measure(chosen: Experiment) -> dict[str, float]:
    """Recall of the trained server model, and the seconds of the run."""
    began = time.perf_counter()
    torch.set_num_threads(1)
    assembly = Assembly(chosen)
    server = assembly.server(assembly.sites())
    Federation(chosen.method, server, chosen.rounds, SequentialExchange(assembly.site)).run()
    cohort = chosen.data.build()  # with every report and image
    rows, tokenizer = {split: cohort.rows(split) for split in SPLITS}, assembly.modules()[0].tokenizer
    records = SiteData(cohort, rows, tokenizer, chosen.model.image_size)
    assert server.trainer is not None
    with server.trainer.session(server.state) as client:
        batches = (batch for split in ("val", "test") for batch in records.batches(split, 64, drop_last=False))
        figures = retrieval(*embed(client.model, batches), KS)
    recalls = {f"R@{k}": figures[recall_at(k)] for k in KS}
    return {**recalls, "sum": sum(recalls.values()), "seconds": time.perf_counter() - began}


def spread(values: list[float]) -> str:
    """Mean and sample standard deviation."""
    return f"{statistics.fmean(values):.1f} +- {statistics.stdev(values) if len(values) > 1 else 0.0:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", nargs="+", default=list(NAMES), choices=NAMES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("build/creamfl"), help="notes of finished rows; kept")
    parser.add_argument("--quick", action="store_true", help="one round of few steps: does everything run?")
    options = parser.parse_args()
    say({**machine(), **vars(options)})
    found: dict[str, list[dict[str, float]]] = {name: [] for name in options.names}
    options.out.mkdir(parents=True, exist_ok=True)
    for seed in options.seeds:
        for name, runs in found.items():
            chosen = experiment(name, seed, options.quick)
            note = options.out / f"{name}-{seed}-{fingerprint(chosen)}.json"
            if not note.exists():
                note.write_text(json.dumps(measure(chosen)))
            runs.append(json.loads(note.read_text()))
            say({"name": name, "seed": seed, **{key: rounded(value) for key, value in runs[-1].items()}})
    rows = []
    for name, runs in found.items():
        gains = [run["sum"] - alone["sum"] for run, alone in zip(runs, found.get(ALONE, []), strict=False)]
        rows.append([name, *(spread([run[key] for run in runs]) for key in runs[0]), spread(gains) if gains else ""])
    print("\n" + table(["server", *(f"R@{k}" for k in KS), "sum", "seconds", "gain over alone, sum"], rows))


if __name__ == "__main__":
    main()
