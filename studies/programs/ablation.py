"""What each part and setting of FedDRA or FedRGB is worth, on a cohort of the ledger (docs/claims.md), by paired seeds.

    python studies/programs/ablation.py [--method feddra] [--vary parts mu rho] [--cohort scanner-shift] [--seeds 0-4]

``--vary parts``: FedDRA's two stages, constraint and robust weights, each with and without the others, eight rows;
FedRGB's guidance, robust weights and aligner phase, six. ``mu`` (FedDRA's) and ``rho``: the papers' grids; the largest
rho also unclipped, since it can make honest changes so long that the server shortens them (``rounds.clip_to_median``).
``align_steps`` and ``aligner_steps``: the length of FedDRA's align phase and of FedRGB's aligner phase beside 40 steps
of the encoders; in the papers' algorithms as many, in FedDRA's released code 20 beside 50. Every row has the start, the
records, the schedule and the encoders' full-rate steps of that method in `fedvlp claims`. Settings are chosen on seeds
100 to 104, before seeds 0 to 4 are reported.
Recall of the test split in percent, the mean of both directions and of all sites, and the worst site; beside it the
difference to the whole method and its 95 % interval (Student's t over seeds). Of parts also what each is worth, the
mean over all pairs of rows that it alone tells apart.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from statistics import fmean
from typing import Any

from common import machine, say, table
from ledger_cells import finished, less, mean, parser_of, row_name

from fedvlp.evaluation.intervals import Interval, over_seeds
from fedvlp.run.experiment import Experiment
from fedvlp.run.terms import terms
from studies.claims.cell_results import Table, origin
from studies.claims.ledger import AVERAGE, SCENARIOS, WORST, alignment

PARTS: dict[str, dict[str, dict[str, Any]]] = {
    "feddra": {"one-stage": {"align_steps": 0}, "no-constraint": {"mu": 0.0}, "no-dro": {"rho": 0.0}},
    "fedrgb": {"no-guidance": {"alpha": 0.0}, "no-dro": {"rho": 0.0}, "mean-aligner": {"avg_aligner": True}},
}
"""Of each method, a part that is left out: what that sets."""
REDUNDANT = {"no-dro", "mean-aligner"}
"""Not both: where the teacher is the mean of the sites' aligners, FedRGB's robust weights act on nothing."""
GRIDS = {
    "mu": (1.0, 5.0, 10.0),
    "rho": (0.01, 0.1, 1.0),
    "align_steps": (10, 20, 40),
    "aligner_steps": (10, 20, 40),
}


def variants(method: str, vary: str) -> dict[str, dict[str, Any]]:
    """Name -> what it changes of the method; the first changes nothing."""
    if vary in GRIDS:
        return {method: {}} | {row_name(f"{method}-{vary}-{value:g}"): {vary: value} for value in GRIDS[vary]}
    found: dict[str, dict[str, Any]] = {}
    parts = PARTS[method]
    for left_out in product((False, True), repeat=len(parts)):
        chosen = [name for name, out in zip(parts, left_out, strict=True) if out]
        if set(chosen) >= REDUNDANT:
            continue
        changes = {key: value for name in chosen for key, value in parts[name].items()}
        found["-".join([method, *chosen])] = changes
    return found


def experiments(name: str, cohort: str, vary: str, seed: int) -> dict[str, Experiment]:
    """The rows as experiments, by name.

    Raises SystemExit where one has other full-rate steps of the encoders than the method, and for a setting that the
    method does not have.
    """
    whole = alignment(cohort, seed)[name]
    method: Any = whole.method
    if vary in GRIDS and not hasattr(method, vary):
        raise SystemExit(f"{name} has no {vary}; vary another setting, or take a method that has it")
    rows = {
        row: replace(whole, method=replace(method, **changes))
        for row, changes in variants(name, vary).items()
        if row == name or any(getattr(method, key) != value for key, value in changes.items())
    }
    if vary == "rho":
        largest = row_name(f"{name}-rho-{max(GRIDS['rho']):g}")
        clipped = rows[largest]
        rows[f"{largest}-unclipped"] = replace(clipped, rounds=replace(clipped.rounds, clip_to_median=0.0))
    spent = {row: terms(one).axes[0] for row, one in rows.items()}
    if len(set(spent.values())) > 1:
        raise SystemExit(f"full-rate steps of the encoders differ: {spent}")
    return rows


def report(method: str, rows: Table) -> str:
    """The Markdown table, of the rows that have finished."""
    both = (AVERAGE, WORST)
    body = []
    for name in dict.fromkeys(name for name, _ in rows.cells):
        figures = [mean(rows, name, figure) for figure in both]
        body.append([name, *figures, *(less(rows, name, method, figure) for figure in both)])
    return table(["variant", "R@1 average", "R@1 worst", f"average, less {method}", f"worst, less {method}"], body)


def effects(method: str, rows: Table) -> str:
    """The Markdown table of what each part is worth: the mean over all pairs of rows that it alone tells apart."""
    known = variants(method, "parts")
    body = []
    for part, left_out in PARTS[method].items():
        pairs = [
            (row, other)
            for row, changes in known.items()
            for other, changed in known.items()
            if changes != changed == {**changes, **left_out}
        ]
        names = {name for pair in pairs for name in pair}
        seeds = [seed for seed in rows.seeds if all((name, seed) in rows.cells for name in names)]
        if seeds:
            shared = rows.of_seeds(seeds.__contains__)
            body.append([part, *(str(_mean_of(pairs, shared, figure)) for figure in (AVERAGE, WORST))])
    return table(["left out", "costs the average", "costs the worst"], body)


def _mean_of(pairs: list[tuple[str, str]], rows: Table, figure: str) -> Interval:
    by_pair = [rows.difference(row, other, figure) for row, other in pairs]
    return over_seeds([fmean(of_seed) for of_seed in zip(*by_pair, strict=True)])


def main() -> None:
    parser = parser_of(__doc__, "100-101")
    parser.add_argument("--method", choices=list(PARTS), default="feddra")
    parser.add_argument("--vary", nargs="+", choices=["parts", *GRIDS], default=["parts"])
    parser.add_argument("--cohort", choices=["label-skew", "scanner-shift"], default="scanner-shift")
    options = parser.parse_args()
    say({**machine(), **vars(options)})
    scenario = replace(
        SCENARIOS[options.cohort],
        experiments=lambda seed: {
            name: row
            for vary in options.vary
            for name, row in experiments(options.method, options.cohort, vary, seed).items()
        },
    )
    rows = finished(scenario, options)
    print(f"\n{options.cohort}, seeds {options.seeds}; test recall, percent.\n\n{report(options.method, rows)}\n")
    if "parts" in options.vary:
        print(f"{effects(options.method, rows)}\n")
    print(origin(rows))
    say(machine())


if __name__ == "__main__":
    main()
