"""Processor time of training: what a round of each method costs, and what short rounds are worth.

    python studies/programs/equal_time.py --measure [--cohort label-skew]      # some minutes of a quiet core
    python studies/programs/equal_time.py [--cohort label-skew] [--rows fedavg fedavg-short] [--seeds 0-4] [--jobs 1]

``--measure``: processor seconds of a round at the first site of the ledger's cohort, methods in turn, with and without
what received encoders make of a record kept (``training.cache_features``), FedDRA's v_i on 512 records; over FedAvg's
with as many encoder steps.

Else ``fedavg-short``: the ledger's FedAvg with as many steps in all, so as much time, in rounds of 12 steps, AdamW's
moments kept at the sites; it is evaluated after its last round alone. It takes 30 exchanges for FedAvg's 8.
``-rounds``: three times as many steps, as FedAvg has in 24 rounds. ``-own-norm``: with each site's own batch
normalisation, where the ledger has layer norm; ``-batch-norm``: with an averaged one. ``fedavgm``, ``fedadam``: FedAvg
with a server optimiser. ``feddra``, ``fedrgb``, ``local``, ``centralized``: the ledger's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from common import interleaved, machine, say, spread, table
from ledger_cells import finished, less, mean, parser_of

from fedvlp.core.types import Broadcast
from fedvlp.federation.site import Site
from fedvlp.federation.site_memory import SiteMemory
from fedvlp.run.assembly import Assembly
from fedvlp.run.experiment import Experiment
from fedvlp.training.frozen_features import FixedFeatures
from studies.claims.cell_results import Table, origin
from studies.claims.ledger import ALIGN, AVERAGE, ROUNDS, SCENARIOS, STEPS, WORST, alignment

SHORT = 12
"""Steps of a short round."""


def experiments(cohort: str, seed: int) -> dict[str, Experiment]:
    """The rows by name."""
    ledger = alignment(cohort, seed)
    fedavg = ledger["fedavg"]
    rounds = ROUNDS * (STEPS + fedavg.training.made_up(STEPS)) // SHORT
    method: Any = fedavg.method
    short = replace(
        fedavg,
        method=replace(method, local_steps=SHORT),
        training=replace(fedavg.training, optimizer_state="keep"),
        rounds=replace(fedavg.rounds, rounds=rounds, evaluate_every=rounds),
    )
    long = replace(fedavg.rounds, rounds=3 * ROUNDS)
    short_long = replace(short.rounds, rounds=3 * rounds, evaluate_every=3 * rounds)
    momentum = replace(fedavg.rounds, server_optimizer="momentum", server_beta1=0.5)
    rows = {
        "fedavg": fedavg,
        "fedavg-short": short,
        "fedavg-rounds": replace(fedavg, rounds=long),
        "fedavg-short-rounds": replace(short, rounds=short_long),
        "fedavgm": replace(fedavg, rounds=momentum),
        "fedadam": replace(fedavg, rounds=replace(momentum, server_optimizer="adam", server_beta1=0.9)),
        **{name: ledger[name] for name in ("feddra", "fedrgb", "local", "centralized")},
    }
    if short.norm_statistics == "averaged":
        for name, one in list(rows.items()):
            model: Any = replace(one.model, head_norm="batch")  # type: ignore[call-arg]
            rows[f"{name}-own-norm"] = replace(one, model=model, norm_statistics="site")
            rows[f"{name}-batch-norm"] = replace(one, model=model)
    return rows


def measure(cohort: str, repetitions: int) -> None:
    """Prints processor seconds of a round at the first site of seed 0."""
    rows = {name: one for name, one in alignment(cohort, 0).items() if name in ("fedavg", "feddra", "fedrgb")}
    visits = {"fedavg": visit(rows.pop("fedavg"), False)}
    method: Any = replace(rows["feddra"].method, dro_records=512)
    rows["feddra, dro_records"] = replace(rows["feddra"], method=method)
    for name, one in rows.items():
        visits |= {name: visit(one, False), f"{name}, kept": visit(one, True)}
    times = interleaved(visits, repetitions, time.process_time)
    for name, seconds in times.items():
        ratios = spread([own / other for own, other in zip(seconds, times["fedavg"], strict=True)])
        say({"cohort": cohort, "variant": name, "s": spread(seconds), "x_FedAvg": ratios})


def visit(one: Experiment, kept: bool) -> Callable[[], None]:
    """All phases of a round at the first site."""
    assembly, method = Assembly(one), one.method
    name = assembly.sites()[0]
    client = assembly.client(name, assembly.data(name))
    client.fixed = FixedFeatures() if kept else None
    site, own = Site(client, method, one.training, SiteMemory(None)), assembly.site_only(name)
    state = {key: tensor for key, tensor in assembly.initial().items() if key not in own}

    def run() -> None:
        model = {key: tensor.clone() for key, tensor in state.items()}
        for phase in method.phases(0):
            answer: Any = site.handle(Broadcast(0, phase, model))
            model = model | {key: tensor.clone() for key, tensor in answer.state.items()}

    return run


def report(rows: Table, baseline: str) -> str:
    """The Markdown table, of the rows that have finished."""
    body = [
        [f"{row}, {what}", mean(rows, row, figure), less(rows, row, baseline, figure)]
        for row in dict.fromkeys(row for row, _ in rows.cells)
        for what, figure in (("average", AVERAGE), ("worst site", WORST))
    ]
    return table(["row", "test R@1", f"minus {baseline}"], body)


def main() -> None:
    parser = parser_of(__doc__, "0-4")
    parser.add_argument("--cohort", choices=list(ALIGN), default="scanner-shift")
    parser.add_argument("--measure", action="store_true", help="what a round costs, and nothing else")
    parser.add_argument("--rows", nargs="+", default=["fedavg", "fedavg-short"], help="the first is the baseline")
    options = parser.parse_args()
    say({**machine(), **vars(options)})
    if options.measure:
        measure(options.cohort, 1 if options.quick else 3)
    else:
        cohort = options.cohort
        scenario = replace(
            SCENARIOS[cohort],
            experiments=lambda seed: {name: experiments(cohort, seed)[name] for name in options.rows},
        )
        rows = finished(scenario, options)
        print(f"\n{cohort}, seeds {options.seeds}; test recall, percent.\n\n{report(rows, options.rows[0])}\n")
        print(origin(rows))
    say(machine())


if __name__ == "__main__":
    main()
