"""The ladder from plain averaging to CreamFL on paired seeds, against the same server on the public set alone.

    python benchmarks/creamfl.py [--names alone reamfl-mean ... creamfl] [--seeds 0 1 ... 7] [--out FOLDER] [--quick]

The presets, so: sites with models, class weights and label spaces of their own, a public set as large as any site's
records, a pass a phase, and the largest model at the server. A seed moves the cohort, the public set, the weights and
the batches, and all rows of one seed share it, so rows are compared seed by seed: mean and 95 % interval of the
differences (Student's t), and "holds", "fails" or "undecided" by whether that leaves 0 out. The figure is the sum of
R@1, R@5 and R@10 (mean of both directions, percent) of the server's model on all held-out studies of the cohort (val
and test, whole set), which neither the public set nor any site trains on.

First the preconditions, without which nothing is ranked: the server alone is better than the models of the paired sites
in the run of ``reamfl-mean``, which no teacher reaches; and before the first round an image-only site's images find
the text-only site's reports of the public set no better than by chance (R@10, by at most 2 standard errors).

``alone`` is ``kd_weight=0`` without contrast: no site has any influence. ``alone-long`` gives the steps of distillation
to the task as well. Results already in ``--out`` are kept, so a run goes on row by row.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from common import machine, paired, rounded, say, table

from fedvlp.data.cohort import SPLITS
from fedvlp.data.loader import SiteData
from fedvlp.evaluation.metric_names import recall_at
from fedvlp.evaluation.retrieval import retrieval
from fedvlp.evaluation.site_metrics import embed
from fedvlp.federation.exchange import SequentialExchange
from fedvlp.federation.loop import Federation
from fedvlp.federation.site import Site
from fedvlp.methods.ensemble import MODEL, PublicEnsemble
from fedvlp.methods.math.contrast import representations
from fedvlp.run import presets
from fedvlp.run.assembly import Assembly
from fedvlp.run.config import fingerprint
from fedvlp.run.experiment import Experiment

ALONE, ALONE_LONG, UNTAUGHT = "alone", "alone-long", "reamfl-mean"
NAMES = (ALONE, ALONE_LONG, *presets.REAMFL, "creamfl")
CLAIMS = (
    ("reamfl-avg", "reamfl-mean"),
    ("reamfl-iot", "reamfl-mean"),
    ("reamfl-gca", "reamfl-avg"),
    ("reamfl-gca", "reamfl-mean"),
    ("reamfl-inter", "reamfl-gca"),
    ("reamfl-intra", "reamfl-gca"),
    ("creamfl", "reamfl-inter"),
    ("creamfl", "reamfl-gca"),
    ("creamfl", ALONE),
)
"""Who is said to be better than whom (the paper's Table 3)."""
KS = (1, 5, 10)
Figures = dict[str, float]


def experiment(name: str, seed: int, quick: bool) -> Experiment:
    """The preset with this seed for everything."""
    alone = name in (ALONE, ALONE_LONG)
    chosen = presets.get("creamfl" if alone else name)
    method = chosen.method
    assert isinstance(method, PublicEnsemble)
    if alone:
        method = replace(method, kd_weight=0.0, gamma=0.0, local_steps=1, local_epochs=1)  # type: ignore[call-arg]
    if name == ALONE_LONG:
        method = replace(method, server_steps=method.server_steps + method.distil_steps)
    if quick:
        method = replace(method, local_steps=1, local_epochs=1, server_steps=2, distil_steps=2)
    rounds = 1 if quick else chosen.rounds.rounds
    return replace(
        chosen,
        method=method,
        data=replace(chosen.data, seed=seed, size=1600 if quick else chosen.data.size),  # type: ignore[attr-defined, type-var]
        rounds=replace(chosen.rounds, rounds=rounds, seed=seed, evaluate_every=0),
    )


def measure(chosen: Experiment) -> Figures:
    """Recall of the trained server and of the paired sites, the gap before round 0, and the seconds of the run."""
    began = time.perf_counter()
    torch.set_num_threads(1)
    assembly, sites = Assembly(chosen), {}
    server = assembly.server(assembly.sites())
    figures = gap(assembly)

    def kept(name: str) -> Site:
        return sites.setdefault(name, assembly.site(name))

    Federation(chosen.method, server, chosen.rounds, SequentialExchange(kept)).run()
    assert server.trainer is not None
    with server.trainer.session(server.state) as client:
        figures |= recalls(client.model, held_out(assembly, None))
    figures["sum"] = sum(figures[f"R@{k}"] for k in KS)
    for name, site in sites.items():
        if len(site.client.data.modalities) == 2:
            memory = site.memory.newest()
            site.client.load({n.removeprefix(MODEL): t for n, t in memory.items() if n.startswith(MODEL)})
            figures[f"sum of {name}"] = sum(recalls(site.client.model, held_out(assembly, name)).values())
    return {**figures, "seconds": time.perf_counter() - began}


def held_out(assembly: Assembly, site: str | None) -> SiteData:
    """All studies of the cohort, with their images and reports, as the model of a site (None: the server's) reads."""
    cohort = assembly.experiment.data.build()
    rows = {split: cohort.rows(split) for split in SPLITS}
    return SiteData(cohort, rows, assembly.modules(site)[0].tokenizer, assembly.config(site).image_size)


def recalls(model: torch.nn.Module, records: SiteData) -> Figures:
    """R@1, R@5, R@10 on the records that nobody trains on, percent."""
    batches = (batch for split in ("val", "test") for batch in records.batches(split, 64, drop_last=False))
    found = retrieval(*embed(model, batches), KS)
    return {f"R@{k}": found[recall_at(k)] for k in KS}


def gap(assembly: Assembly) -> Figures:
    """R@10 of an image-only site's images among a text-only site's reports of the public set, untrained, and chance."""
    kinds = {assembly.data(site).modalities: site for site in assembly.data_sites()}
    reps = {}
    for modality in ("image", "text"):
        client = assembly.site(kinds[(modality,)]).client
        assert client.initial is not None
        client.load(client.initial())
        reps |= representations(client, (modality,))
    found = retrieval(reps["image"], reps["text"], KS)[recall_at(10)]
    return {"gap R@10": found, "public": float(len(reps["image"])), "chance R@10": 1000 / len(reps["image"])}


def preconditions(found: dict[str, list[Figures]]) -> dict[str, bool]:
    """What must hold before anything is ranked, and whether it does; what cannot be told is left out."""
    told = {}
    untaught, alone = found.get(UNTAUGHT, []), found.get(ALONE, [])
    if untaught and alone:
        best = statistics.fmean(max(v for n, v in run.items() if n.startswith("sum of ")) for run in untaught)
        server = statistics.fmean(run["sum"] for run in alone)
        told[f"the server alone ({server:.1f}) is better than the best paired site ({best:.1f})"] = server > best
    runs = next(iter(found.values()))
    seen, chance = (statistics.fmean(run[name] for run in runs) for name in ("gap R@10", "chance R@10"))
    queries = 2 * sum(run["public"] for run in runs)
    error = math.sqrt(chance * (100 - chance) / queries)
    told[f"images and reports of lone sites start apart: R@10 {seen:.1f}, chance {chance:.1f}"] = (
        seen <= chance + 2 * error
    )
    return told


def compared(found: dict[str, list[Figures]], valid: bool) -> list[list[str]]:
    """A line for each claim whose two rows are there: the mean difference, its interval, by seed, and the verdict."""
    lines = []
    for better, than in CLAIMS:
        if better not in found or than not in found:
            continue
        gains = [a["sum"] - b["sum"] for a, b in zip(found[better], found[than], strict=True)]
        mean, half = paired(gains)
        verdict = "holds" if mean - half > 0 else "fails" if mean + half < 0 else "undecided"
        by_seed = " ".join(f"{gain:+.1f}" for gain in gains)
        interval = f"{mean:+.1f} ({mean - half:+.1f} to {mean + half:+.1f})"
        lines.append([f"{better} > {than}", interval, by_seed, verdict if valid else "not ranked"])
    return lines


def spread(values: Sequence[float]) -> str:
    """Mean and sample standard deviation."""
    return f"{statistics.fmean(values):.1f} +- {statistics.stdev(values) if len(values) > 1 else 0.0:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", nargs="+", default=list(NAMES), choices=NAMES)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(8)))
    parser.add_argument("--out", type=Path, default=Path("build/creamfl"), help="notes of finished rows; kept")
    parser.add_argument("--quick", action="store_true", help="one round of few steps: does everything run?")
    options = parser.parse_args()
    say({**machine(), **vars(options)})
    found: dict[str, list[Figures]] = {name: [] for name in options.names}
    options.out.mkdir(parents=True, exist_ok=True)
    for seed in options.seeds:
        for name, runs in found.items():
            chosen = experiment(name, seed, options.quick)
            note = options.out / f"{name}-{seed}-{fingerprint(chosen)}.json"
            if not note.exists():
                note.write_text(json.dumps(measure(chosen)))
            runs.append(json.loads(note.read_text()))
            say({"name": name, "seed": seed, **{key: rounded(value) for key, value in runs[-1].items()}})
    told = preconditions(found)
    for what, holds in told.items():
        print(f"\nprecondition {'holds' if holds else 'FAILS'}: {what}")
    shown = [*(f"R@{k}" for k in KS), "sum", "seconds"]
    rows = [[name, *(spread([run[key] for run in runs]) for key in shown)] for name, runs in found.items()]
    print("\n" + table(["server", *shown], rows))
    lines = compared(found, all(told.values()))
    print("\n" + table(["claim", "difference of the sums, 95 % interval", "by seed", "verdict"], lines))


if __name__ == "__main__":
    main()
