"""Macro AUC of mFedAvg, mFedAvgP and CAR-MFL by which sites lack what, and by public-set size, beside both bounds.

    python benchmarks/car_mfl.py [--mixes 4:0:1 0:4:1 2:2:1] [--sizes 0.05 0.3] [--seeds 0-4] [--jobs 2] [--quick]

The runs of `fedvlp claims car-mfl`, which judges its claims for the first of these mixes. A mix I:T:M is image-only,
text-only and paired sites; ``--sizes`` are shares of the patients that the public set has, with the first mix. Macro
AUC of the trained model on all held-out pairs of the cohort, in percent, and of the same model without the images and
without the reports: means over seeds; beside it the difference to mFedAvgP and its 95 % interval. ``lower`` is the
public set alone, ``upper`` sites that lack nothing, ``linear`` CAR-MFL that weighs the retrieved halves by records.
Two to fifteen minutes of one core a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from common import machine, say, table
from ledger_cells import finished, less, mean, parser_of, row_name

from fedvlp.claims.ledger import CAR_MFL, MACRO, missing, without
from fedvlp.claims.scenario import Table
from fedvlp.run.experiment import Experiment

BASELINE = "mfedavg-p"
METHODS, BOUNDS, LINEAR = ("mfedavg", BASELINE, "car-mfl"), ("lower", "upper"), "car-mfl-linear"
MIX, PUBLIC = "4:0:1", 0.15
"""The ledger's mix and share of patients in the public set."""

Row = tuple[str, float, str]
"""Mix, public share and method."""


def rows_of(mixes: Sequence[str], sizes: Sequence[float]) -> dict[str, Row]:
    """Name of the cell -> its row; the ledger's own by the ledger's names."""
    rows = [(mix, PUBLIC, name) for mix in mixes for name in (*METHODS, LINEAR, *(BOUNDS if mix == MIX else ()))]
    rows += [(MIX, size, name) for size in sizes for name in (*METHODS[1:], LINEAR)]
    return {cell(row): row for row in rows}


def cell(row: Row) -> str:
    """The name of its file."""
    mix, public, name = row
    lacking = "" if mix == MIX else f"-{mix.replace(':', '-')}"
    return row_name(f"{name}{lacking}" + ("" if public == PUBLIC else f"-public-{public:g}"))


def experiment(row: Row, seed: int) -> Experiment:
    """The ledger's with another mix, public set or weighing of the retrieved halves."""
    mix, public, name = row
    one: Any = missing(seed)["car-mfl" if name == LINEAR else name]
    if name == LINEAR:
        one = replace(one, method=replace(one.method, renorm="linear"))
    if name in BOUNDS:
        return one  # type: ignore[no-any-return]
    image_only, text_only, paired = (int(count) for count in mix.split(":"))
    data = replace(one.data, sites=image_only + text_only + paired)
    partition = replace(one.partition, image_only=image_only, text_only=text_only, public=public)
    return replace(one, data=data, partition=partition)  # type: ignore[no-any-return]


def report(figures: Table, rows: dict[str, Row]) -> str:
    """The Markdown table, of the rows that have finished."""
    ran = {name for name, _ in figures.cells}
    shown = (MACRO, without("text"), without("image"))
    body = []
    for name, (mix, public, method) in rows.items():
        if name in ran:
            apart = less(figures, name, cell((mix, public, BASELINE)), MACRO)
            body.append([mix, f"{public:g}", method, *(mean(figures, name, figure, 1) for figure in shown), apart])
    return table(["I:T:M", "public share", "method", *shown, f"less {BASELINE}"], body)


def main() -> None:
    parser = parser_of(__doc__, "0-4")
    parser.add_argument("--mixes", nargs="*", default=[MIX, "0:4:1", "2:2:1"])
    parser.add_argument("--sizes", nargs="*", type=float, default=[])
    options = parser.parse_args()
    say({**machine(), **vars(options)})
    rows = rows_of(options.mixes, options.sizes)
    scenario = replace(CAR_MFL, experiments=lambda seed: {name: experiment(row, seed) for name, row in rows.items()})
    print(f"\n{report(finished(scenario, options), rows)}\n")
    say(machine())


if __name__ == "__main__":
    main()
