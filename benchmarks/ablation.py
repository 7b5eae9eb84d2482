"""What each part and setting of FedDRA is worth, on a cohort of the ledger (docs/claims.md), over paired seeds.

    python benchmarks/ablation.py [--vary parts] [--cohort scanner-shift] [--seeds 100-101] [--jobs 2] [--quick]

``--vary parts``: two stages, the constraint and robust weights, each with and without the others, eight rows. ``mu``
and ``rho``: the papers' grids. Every row has the start, the records, the schedule and the encoders' full-rate steps of
FedDRA's in `fedvlp claims`, whose finished cells are read from ``--results`` and not run again; cells that finish here
are written there. Settings are chosen on seeds 100 to 104, before seeds 0 to 4 are reported.
Recall of the test split in percent, the mean of both directions and of all sites, and the worst site; beside it the
difference to FedDRA and its 95 % interval (Student's t over seeds).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from common import machine, say, table

from fedvlp.claims.cells import cells_of, measured
from fedvlp.claims.ledger import AVERAGE, SCENARIOS, WORST, alignment
from fedvlp.claims.scenario import Table
from fedvlp.evaluation.intervals import over_seeds
from fedvlp.run.experiment import Experiment
from fedvlp.run.terms import terms

ROOT = Path(__file__).parents[1]
WHOLE = "feddra"
PARTS = {"one-stage": {"align_steps": 0}, "no-constraint": {"mu": 0.0}, "no-dro": {"rho": 0.0}}
"""A part that is left out: what that sets."""
GRIDS = {"mu": (1.0, 5.0, 10.0), "rho": (0.01, 0.1, 1.0)}


def variants(vary: str) -> dict[str, dict[str, Any]]:
    """Name -> what it changes of FedDRA; the first changes nothing."""
    if vary in GRIDS:
        return {WHOLE: {}} | {f"{WHOLE}-{vary}-{value:g}": {vary: value} for value in GRIDS[vary]}
    found: dict[str, dict[str, Any]] = {}
    for left_out in product((False, True), repeat=len(PARTS)):
        chosen = [name for name, out in zip(PARTS, left_out, strict=True) if out]
        changes = {key: value for name in chosen for key, value in PARTS[name].items()}
        found["-".join([WHOLE, *chosen])] = changes
    return found


def experiments(cohort: str, vary: str, seed: int) -> dict[str, Experiment]:
    """The rows as experiments. Raises SystemExit where one has fewer full-rate steps of the encoders than FedDRA."""
    whole = alignment(cohort, seed)[WHOLE]
    method: Any = whole.method
    rows = {
        name: replace(whole, method=replace(method, **changes))
        for name, changes in variants(vary).items()
        if name == WHOLE or any(getattr(method, key) != value for key, value in changes.items())
    }
    spent = {name: terms(one).axes[0] for name, one in rows.items()}
    if len(set(spent.values())) > 1:
        raise SystemExit(f"full-rate steps of the encoders differ: {spent}")
    return rows


def shortened(experiments: Mapping[str, Experiment]) -> dict[str, Experiment]:
    """One round of few steps on few studies."""
    small = {}
    for name, one in experiments.items():
        data: Any = one.data
        method: Any = one.method
        data = replace(data, size=1000, test_rows=64)
        method = replace(method, local_steps=2, align_steps=min(1, method.align_steps))
        small[name] = replace(one, data=data, method=method, rounds=replace(one.rounds, rounds=1))
    return small


def report(rows: Table, names: list[str]) -> str:
    """The Markdown table."""
    body = []
    for name in names:
        figures = [f"{fmean(rows.values(name, figure)):.2f}" for figure in (AVERAGE, WORST)]
        apart = [
            "" if name == WHOLE else str(over_seeds(rows.difference(name, WHOLE, figure)))
            for figure in (AVERAGE, WORST)
        ]
        body.append([name, *figures, *apart])
    return table(["variant", "R@1 average", "R@1 worst", "average, less FedDRA", "worst, less FedDRA"], body)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vary", choices=["parts", *GRIDS], default="parts")
    parser.add_argument("--cohort", choices=["label-skew", "scanner-shift"], default="scanner-shift")
    parser.add_argument("--seeds", default="100-101", help="FIRST-LAST")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "claims", help="where the runs are kept")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "claims", help="finished cells")
    parser.add_argument("--quick", action="store_true", help="one round, few steps: does everything run?")
    options = parser.parse_args()
    first, _, last = options.seeds.partition("-")
    say({**machine(), **vars(options)})

    def rows(seed: int) -> Mapping[str, Experiment]:
        found = experiments(options.cohort, options.vary, seed)
        return shortened(found) if options.quick else found

    scenario = replace(SCENARIOS[options.cohort], experiments=rows)
    names = list(rows(int(first)))
    cells = cells_of(scenario, names, range(int(first), int(last or first) + 1))
    folder = options.runs / "quick" if options.quick else options.results
    finished = measured(
        scenario,
        cells,
        options.runs,
        folder,
        options.jobs,
        lambda method, seed, what: say({"variant": method, "seed": seed, "cell": what}),
    )
    print(f"\n{options.cohort}, seeds {options.seeds}; test recall, percent.\n\n{report(finished, names)}\n")
    say(machine())


if __name__ == "__main__":
    main()
