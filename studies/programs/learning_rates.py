"""Recall by learning rate: whether the one rate of the ledger (docs/claims.md) favours a method over another.

    python studies/programs/learning_rates.py [--cohort label-skew] [--rows fedavg feddra] [--rates 2.5e-4 5e-4 1e-3]

Rows as `equal_time.py` has them, and the ledger's other ones, each at every rate. On seed 100 by default, one of those
that are for choosing settings: the rate is chosen there, by validation recall, and figures of other seeds are then of
that rate. Recall of both splits in percent, the mean of both directions and of all sites, and the worst site.
"""

from __future__ import annotations

from dataclasses import replace

from common import machine, say, table
from equal_time import experiments as timed
from ledger_cells import finished, mean, parser_of, row_name

from fedvlp.evaluation import metric_names
from fedvlp.run.experiment import Experiment
from studies.claims.cell_results import Table, origin
from studies.claims.ledger import ALIGN, AVERAGE, SCENARIOS, WORST, alignment

VAL = metric_names.over_sites(metric_names.recall("val", 1), metric_names.AVERAGE)


def at_rate(row: str, one: Experiment, rate: float) -> tuple[str, Experiment]:
    """The row's name and experiment at a rate; at the rate that it has, the row itself."""
    if rate == one.training.lr:
        return row, one
    return row_name(f"{row}-lr-{rate:g}"), replace(one, training=replace(one.training, lr=rate))


def experiments(cohort: str, rows: list[str], rates: list[float], seed: int) -> dict[str, Experiment]:
    """Every row at every rate."""
    known = {**alignment(cohort, seed), **timed(cohort, seed)}
    return dict(at_rate(row, known[row], rate) for row in rows for rate in rates)


def report(cells: Table) -> str:
    """The Markdown table."""
    figures = (VAL, AVERAGE, WORST)
    body = [
        [row, *(mean(cells, row, figure) for figure in figures)] for row in dict.fromkeys(r for r, _ in cells.cells)
    ]
    return table(["row", "validation R@1", "test R@1", "worst site"], body)


def main() -> None:
    parser = parser_of(__doc__, "100-100")
    parser.add_argument("--cohort", choices=list(ALIGN), default="label-skew")
    parser.add_argument("--rows", nargs="+", default=["fedavg", "fedavg-short-own-norm", "feddra"])
    parser.add_argument("--rates", nargs="+", type=float, default=[2.5e-4, 5e-4, 1e-3, 2e-3])
    options = parser.parse_args()
    say({**machine(), **vars(options)})
    scenario = replace(
        SCENARIOS[options.cohort],
        experiments=lambda seed: experiments(options.cohort, options.rows, options.rates, seed),
    )
    cells = finished(scenario, options)
    print(f"\n{options.cohort}, seeds {options.seeds}; recall in percent.\n\n{report(cells)}\n")
    print(origin(cells))
    say(machine())


if __name__ == "__main__":
    main()
