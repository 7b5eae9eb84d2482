"""What batch normalisation's statistics are worth: averaged, each site's own, estimated on all records, or none.

    python studies/programs/norm_statistics.py [--seeds 0-2] [--steps 90] [--studies 2400] [--cohorts scanner-shift]

FedAvg and FedDRA as `fedvlp claims` has them, on its two cohorts, but on fewer studies and for fewer rounds: unlike
scanners and reporting habits, or one scanner and unlike findings. A seed draws cohort, initial weights and batches anew
and is the same for every row. Rows of one training:

- ``averaged``, and of the same weights ``pooled``: statistics estimated on the training records of all sites together,
  and ``own``: on those of the site that is measured;
- ``site``: affine weights, too, are each site's own, and of the same weights ``site, running``: with the running
  statistics of the site's last training in the place of estimated ones, as FedBN has it;
- ``layer``: layer normalisation, which has no statistics.

Recall is of the test split, in batches of 32, mean of both directions, in percent: mean over sites and the worst site;
mean and standard deviation over seeds. A training takes about two minutes of one core.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import command_line, machine, mean_sd, rounded, say, table

from fedvlp.cli.overrides import seeds_of
from fedvlp.core import norm_statistics
from fedvlp.core.client import Client
from fedvlp.core.server_state import Server
from fedvlp.core.types import State
from fedvlp.data.synthetic.drawn_cohort import COHORTS
from fedvlp.evaluation import metric_names
from fedvlp.evaluation.retrieval import Retrieval
from fedvlp.run.assembly import Assembly
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder
from fedvlp.run.simulate import simulate
from studies.claims.ledger import STEPS, alignment

COLUMNS = ("R@1 mean", "R@1 worst", "R@5 mean", "R@5 worst")


def experiment_of(method: str, cohort: str, seed: int, options: argparse.Namespace) -> Experiment:
    """The ledger's, with batch normalisation in the heads, of one seed; measured at the end alone."""
    whole = alignment(cohort, seed)[method]
    data: Any = whole.data
    count = math.ceil(options.steps / (STEPS + whole.training.made_up(STEPS)))
    constraint: dict[str, Any] = {} if options.mu is None or method != "feddra" else {"mu": options.mu}
    return replace(
        whole,
        method=replace(whole.method, **constraint),
        model=replace(whole.model, head_norm="batch"),
        norm_statistics=norm_statistics.AVERAGED,
        data=replace(data, size=options.studies, test_rows=0),
        rounds=replace(whole.rounds, rounds=count, evaluate_every=count),
    )


def recalls(assembly: Assembly, states: dict[str, State]) -> dict[str, float]:
    """Recall of each site's model (site -> whole state) on its own test records."""
    by_site = []
    for site, state in states.items():
        client = assembly.client(site, assembly.data(site))
        client.load(state)
        by_site.append(Retrieval().measure(client.model.eval(), client.data, "test"))
    found: dict[str, float] = {}
    for k in (1, 5):
        values = [figures[metric_names.recall("test", k)] for figures in by_site]
        found |= {f"R@{k} mean": rounded(statistics.fmean(values)), f"R@{k} worst": rounded(min(values))}
    return found


def estimated(client: Client, state: State) -> State:
    """The state with statistics of the client's training records."""
    client.load(state)
    client.site_only = norm_statistics.normalisation(state)
    norm_statistics.estimate(client)
    return {name: tensor.clone() for name, tensor in client.state().items()}


def trained(experiment: Experiment, folder: Path) -> tuple[Assembly, State]:
    """Trains, and returns the global model."""
    run = RunFolder.create(folder, experiment)
    simulate(experiment, run)
    return Assembly(experiment, run.path), Server.load(run.checkpoint)[0].state


def measure(experiment: Experiment, folder: Path) -> Iterator[tuple[str, dict[str, float]]]:
    """(row, recalls), of three trainings."""
    assembly, state = trained(experiment, folder)
    sites = assembly.sites()
    yield "averaged", recalls(assembly, dict.fromkeys(sites, state))
    pooled = estimated(assembly.client("pooled", assembly.data(None)), state)
    yield "pooled", recalls(assembly, dict.fromkeys(sites, pooled))
    own = {site: estimated(assembly.client(site, assembly.data(site)), state) for site in sites}
    yield "own", recalls(assembly, own)
    assembly, state = trained(replace(experiment, norm_statistics=norm_statistics.SITE), folder)
    memories = {site: assembly.site(site).memory.newest() for site in sites}
    for row, model in (("site", norm_statistics.SERVED), ("site, running", "model")):
        yield row, recalls(assembly, {site: state | norm_statistics.own(m, model) for site, m in memories.items()})
    layer = replace(experiment, model=replace(experiment.model, head_norm="layer"))
    assembly, state = trained(layer, folder)
    yield "layer", recalls(assembly, dict.fromkeys(sites, state))


def report(results: dict[tuple[str, str, str], list[dict[str, float]]], options: argparse.Namespace) -> str:
    """The Markdown table."""
    rows = [[*key, *(mean_sd([run[column] for run in runs]) for column in COLUMNS)] for key, runs in results.items()]
    said = f"seeds {options.seeds}, {options.steps} steps, {options.studies} studies at 5 sites"
    said += "" if options.mu is None else f", mu {options.mu:g}"
    return f"Test recall in batches of 32, percent; {said}.\n\n" + table(["cohort", "method", "row", *COLUMNS], rows)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--seeds", default="0-2", help="FIRST-LAST")
    parser.add_argument("--steps", type=int, default=90, help="of the encoders; as many rounds as that takes")
    parser.add_argument("--studies", type=int, default=2400, help="of all sites; a fifth or so is the test split")
    parser.add_argument("--cohorts", nargs="+", choices=COHORTS, default=list(COHORTS))
    parser.add_argument("--methods", nargs="+", default=["fedavg", "feddra"])
    parser.add_argument("--mu", type=float, help="weight of FedDRA's constraint; default: the ledger's, by cohort")
    parser.add_argument("--quick", action="store_true", help="one seed, one round, few studies: does everything run?")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.steps, options.studies = "0", 1, 1500
    say({**machine(), **vars(options)})
    results: dict[tuple[str, str, str], list[dict[str, float]]] = {}
    began: Any = time.process_time()
    for seed in seeds_of(options.seeds):
        for cohort in options.cohorts:
            for method in options.methods:
                with tempfile.TemporaryDirectory(prefix="fedvlp-bench-") as folder:
                    for row, figures in measure(experiment_of(method, cohort, seed, options), Path(folder)):
                        results.setdefault((cohort, method, row), []).append(figures)
                        say({"cohort": cohort, "method": method, "row": row, "seed": seed, **figures})
    print("\n" + report(results, options) + "\n")
    say({**machine(), "processor_seconds": rounded(time.process_time() - began)})


if __name__ == "__main__":
    main()
