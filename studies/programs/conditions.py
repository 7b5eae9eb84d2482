"""FedDRA or FedRGB minus FedAvg under other conditions than the ledger's (docs/claims.md), one changed at a time.

    python studies/programs/conditions.py [--method feddra] [--cohort label-skew] [--seeds 0-4] [--vary rounds moments]

``rounds``: three times as many. ``long``: six times as many, the model evaluated after every eighth. ``steps``: twice
as many of the encoders in a round. ``moments``: AdamW's stay at a site between phases. ``seldom``: FedDRA's align phase
in every fourth round only. ``start``: from the encoders in ``--start``, by default those of
`fedvlp simulate tiny-pool --set rounds.seed=1 --set data.seed=1001`. Under each condition FedAvg has as many full-rate
steps of the encoders, or as many steps in all; the first line is the ledger's own. Recall of the test split in percent,
the mean of both directions and of all sites, and the worst site; the differences with their 95 % interval (Student's t
over seeds). Then the same of the validation split, by round: whether the models still learn, and whether a difference
stays. ``--method feddra-no-dro``, ``feddra-no-constraint`` or ``feddra-no-constraint-no-dro`` is FedDRA without these
parts: which of them makes a difference under a condition.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ablation
from common import machine, say, table
from ledger_cells import by_round, finished, less, mean, parser_of

from fedvlp.evaluation import metric_names
from fedvlp.run.experiment import Experiment
from fedvlp.run.terms import like, terms
from studies.claims.cell_results import Table, origin
from studies.claims.ledger import AVERAGE, SCENARIOS, WORST, alignment, all_steps

LEDGERS = "as it stands"
METHODS = ("feddra", "feddra-no-dro", "feddra-no-constraint", "feddra-no-constraint-no-dro", "fedrgb")
RIVALS = ["minus FedAvg, encoder steps", "minus FedAvg, total steps"]


def of_method(one: Experiment, **changes: Any) -> Experiment:
    return replace(one, method=replace(one.method, **changes))


def doubled(one: Experiment) -> Experiment:
    """Twice the local steps, and twice FedRGB's aligner steps: its paper has as many of both."""
    method: Any = one.method
    names = [name for name in ("local_steps", "aligner_steps") if hasattr(method, name)]
    return of_method(one, **{name: 2 * getattr(method, name) for name in names})


def conditions(start: str) -> dict[str, Callable[[Experiment], Experiment]]:
    """Name -> what it changes of an experiment, FedAvg's or the method's."""
    return {
        "rounds": lambda one: replace(one, rounds=replace(one.rounds, rounds=3 * one.rounds.rounds)),
        "long": lambda one: replace(
            one, rounds=replace(one.rounds, rounds=6 * one.rounds.rounds, evaluate_every=one.rounds.rounds)
        ),
        "steps": doubled,
        "moments": lambda one: replace(one, training=replace(one.training, optimizer_state="keep")),
        "seldom": lambda one: of_method(one, align_every=4) if hasattr(one.method, "align_every") else one,
        "start": lambda one: replace(one, model=replace(one.model, init=start)),
    }


def names(cohort: str, method: str, condition: str) -> tuple[str, str, str]:
    """The rows of a condition: the method, FedAvg with as many encoder steps, and with as many in all.

    FedAvg has no phase that could come more seldom, so under that condition the first is the ledger's own. FedDRA and
    FedRGB may share the last in the ledger, and not with twice as many steps.
    """
    paper = method.partition("-")[0]
    if condition == LEDGERS:
        return method, "fedavg", all_steps(cohort, paper)
    fedavg = "fedavg" if condition == "seldom" else f"fedavg-{condition}"
    in_all = "fedavg-all-steps-of-fedrgb" if paper == "fedrgb" else "fedavg-all-steps"
    return f"{method}-{condition}", fedavg, f"{in_all}-{condition}"


def experiments(method: str, cohort: str, vary: Sequence[str], start: str, seed: int) -> dict[str, Experiment]:
    """The rows as experiments, by name. Raises SystemExit where FedAvg is not on equal terms with the method."""
    ledger = {**ablation.experiments("feddra", cohort, "parts", seed), **alignment(cohort, seed)}
    rows = {name: ledger[name] for name in names(cohort, method, LEDGERS)}
    for condition in vary:
        change = conditions(start)[condition]
        whole, fedavg = change(ledger[method]), change(ledger["fedavg"])
        if whole == ledger[method]:
            raise SystemExit(f"{method} has no phase that could come more seldom")
        if terms(whole).axes[0] != terms(fedavg).axes[0]:
            raise SystemExit(f"{condition}: full-rate steps of the encoders differ")
        rows |= dict(zip(names(cohort, method, condition), (whole, fedavg, like(fedavg, whole)), strict=True))
    return rows


def against(cohort: str, method: str, condition: str, rows: Table, figure: str) -> list[str]:
    """The method's mean, and its difference to FedAvg with as many encoder steps and with as many in all."""
    whole, *rivals = names(cohort, method, condition)
    return [mean(rows, whole, figure), *(less(rows, whole, other, figure) for other in rivals)]


def report(cohort: str, method: str, vary: Sequence[str], rows: Table) -> str:
    """The Markdown table, of the rows that have finished."""
    body = [
        [f"{condition}, {figure}", *against(cohort, method, condition, rows, name)]
        for condition in (LEDGERS, *vary)
        for figure, name in (("average", AVERAGE), ("worst site", WORST))
        if rows.has(names(cohort, method, condition)[0], name)
    ]
    return table(["condition", method, *RIVALS], body)


def course(cohort: str, method: str, vary: Sequence[str], rounds: Mapping[int, Table]) -> str:
    """The Markdown table of the validation split after 1, 2, 4, 8, ... rounds, and after the last."""
    kinds = (metric_names.AVERAGE, metric_names.WORST)
    shown = [metric_names.over_sites(metric_names.recall("val", 1), kind) for kind in kinds]
    body = []
    for condition in (LEDGERS, *vary):
        run = [number for number, rows in rounds.items() if rows.has(names(cohort, method, condition)[0], shown[0])]
        for number in run:
            if number.bit_count() == 1 or number == run[-1]:
                cells = [against(cohort, method, condition, rounds[number], figure) for figure in shown]
                body.append([condition, str(number), *cells[0], *cells[1]])
    return table(["condition", "round", f"{method}, average", *RIVALS, f"{method}, worst site", *RIVALS], body)


def main() -> None:
    parser = parser_of(__doc__, "0-4")
    parser.add_argument("--method", choices=METHODS, default="feddra")
    parser.add_argument("--cohort", choices=["label-skew", "scanner-shift"], default="label-skew")
    parser.add_argument("--vary", nargs="+", choices=list(conditions("")), default=["rounds", "moments"])
    parser.add_argument("--start", default="runs/tiny-pool/001", help="folder of the other encoders")
    options = parser.parse_args()
    if "start" in options.vary and not Path(options.start).is_dir():
        parser.error(f"there are no encoders in {options.start}; --help says how to make them")
    say({**machine(), **vars(options)})
    scenario = replace(
        SCENARIOS[options.cohort],
        experiments=lambda seed: experiments(options.method, options.cohort, options.vary, options.start, seed),
    )
    rows = finished(scenario, options)
    print(f"\n{options.cohort}, seeds {options.seeds}; test recall, percent.\n")
    print(f"{report(options.cohort, options.method, options.vary, rows)}\n\nValidation recall by round.\n")
    rounds = by_round(options.cohort, rows, options)
    print(f"{course(options.cohort, options.method, options.vary, rounds)}\n\n{origin(rows)}")
    say(machine())


if __name__ == "__main__":
    main()
