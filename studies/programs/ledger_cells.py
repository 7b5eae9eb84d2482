"""What the programs of the ledger (docs/claims.md) share, `conditions.py` and `ablation.py` among them.

A cell (a row with one seed) whose results are filed, or whose run is there, is not run again; one that finishes here is
filed for `fedvlp claims`. Stopped and started again, they go on.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from common import command_line, say

from fedvlp.cli.overrides import seeds_of
from fedvlp.evaluation.intervals import over_seeds
from fedvlp.run.experiment import Experiment
from studies.claims.cell_results import CellResults, Figures, NotRunError, Table, UnlikeError, measured
from studies.claims.page import UNLIKE
from studies.claims.scenario import Scenario, cells_of

ROOT = Path(__file__).parents[2]


def parser_of(text: str | None, seeds: str) -> argparse.ArgumentParser:
    """A parser with the options of :func:`finished`."""
    parser = command_line(text)
    parser.add_argument("--seeds", default=seeds, help="FIRST-LAST")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time; 0: only shows what has finished")
    parser.add_argument("--device", default="", help="cpu, cuda or auto; default: as the ledger")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "claims", help="where the runs are kept")
    parser.add_argument("--results", type=Path, default=ROOT / "studies" / "results", help="finished cells")
    parser.add_argument("--quick", action="store_true", help="one seed, one round, few steps: does everything run?")
    return parser


def finished(scenario: Scenario, options: argparse.Namespace) -> Table:
    """The figures of every row of a scenario with every seed asked for."""
    seeds = seeds_of(options.seeds)
    if options.quick:
        whole, seeds = scenario.experiments, seeds[:1]
        scenario = replace(scenario, experiments=lambda seed: shortened(whole(seed)))
    rows = list(scenario.experiments(seeds[0]))
    return measured(
        scenario,
        cells_of(scenario, rows, seeds, options.device),
        _quick(options) if options.quick else options.runs,
        _filed_in(options),
        options.jobs,
        lambda row, seed, what: say({"row": row, "seed": seed, "cell": what}),
    )


def _quick(options: argparse.Namespace) -> Path:
    return options.runs / "quick"


def _filed_in(options: argparse.Namespace) -> Path:
    """The folder in which :func:`finished` files the cells."""
    return _quick(options) if options.quick else options.results


def by_round(scenario: str, table: Table, options: argparse.Namespace) -> dict[int, Table]:
    """Round -> average and worst R@1 after it, of every cell of ``table``, which :func:`finished` returned."""
    found: dict[int, dict[tuple[str, int], Figures]] = {}
    results = CellResults(_filed_in(options), scenario)
    for cell in table.cells:
        for number, figures in results.by_round(cell).items():
            found.setdefault(number, {})[cell] = figures
    return {number: Table(cells, made=results.made()) for number, cells in sorted(found.items())}


def row_name(text: str) -> str:
    """``text`` as the name of an experiment, which has no dots and no underscores."""
    return text.replace(".", "-").replace("_", "-")


def shortened(experiments: Mapping[str, Experiment]) -> dict[str, Experiment]:
    """One round of few steps on few studies."""
    small = {}
    for name, one in experiments.items():
        data: Any = one.data
        method: Any = one.method
        steps = {"local_steps": 2} | {
            phase: min(1, getattr(method, phase))
            for phase in ("align_steps", "aligner_steps")
            if hasattr(method, phase)
        }
        small[name] = replace(
            one,
            data=replace(data, size=1200, test_rows=0),
            method=replace(method, **steps),
            rounds=replace(one.rounds, rounds=1),
        )
    return small


def mean(table: Table, row: str, figure: str, digits: int = 2) -> str:
    """The mean over seeds, nothing where the row does not have the figure."""
    return f"{fmean(table.values(row, figure)):.{digits}f}" if table.has(row, figure) else ""


def less(table: Table, row: str, other: str, figure: str) -> str:
    """The paired difference of two rows with its 95 % interval; nothing where no seed has both."""
    if row == other:
        return ""
    try:
        return str(over_seeds(table.difference(row, other, figure)))
    except UnlikeError:
        return UNLIKE
    except NotRunError:
        return ""
