"""Macro AUC of mFedAvg, mFedAvgP and CAR-MFL by which sites lack what, and by public-set size, beside its bounds.

    python studies/programs/car_mfl.py [--mixes 4:0:1 0:4:1 2:2:1] [--sizes 0.05 0.3] [--k 1 1000] [--seeds 0-4]

The runs of `fedvlp claims car-mfl`, which judges its claims for the first of these mixes. A mix I:T:M is image-only,
text-only and paired sites; ``--sizes`` are shares of the patients that the public set has, with the first mix. ``--k``:
among how many nearest public records CAR-MFL chooses by findings, with every mix, where the ledger has 10; from 1 it
cannot choose, from 1000 it takes the best of all. Macro AUC of the trained model on all held-out pairs of the cohort,
in percent, and of the same model without the images and without the reports: means over seeds; beside it the difference
to mFedAvgP and its 95 % interval. ``lower`` is the public set alone, ``mfedavg-p-paired`` sites that lack nothing,
``pooled`` all records at once, ``linear`` CAR-MFL that weighs the retrieved halves by records. Then, of the runs that
are kept in ``--runs``, the share of the findings on lent films and reports that their records do not have.
Two to fifteen minutes of one core a run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from common import machine, say, table
from ledger_cells import finished, less, mean, parser_of, row_name

from fedvlp.cli.overrides import seeds_of
from fedvlp.core.types import MODALITIES
from fedvlp.data.cohort import PUBLIC
from fedvlp.federation.site_memory import SiteMemory
from fedvlp.methods.car_mfl import PARTNERS
from fedvlp.run import cells
from fedvlp.run.assembly import Assembly
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder
from studies.claims.cell_results import Table
from studies.claims.ledger import ALL_PAIRED, CAR_MFL, MACRO, POOLED, missing, without

BASELINE = "mfedavg-p"
METHODS, BOUNDS, LINEAR = ("mfedavg", BASELINE, "car-mfl"), ("lower", ALL_PAIRED, POOLED), "car-mfl-linear"
MIX, SHARE = "4:0:1", 0.15
"""The ledger's mix and share of patients in the public set."""

K = 10
"""Nearest public records to choose among, as the ledger has it."""


class Row(NamedTuple):
    """What a row of the table has."""

    mix: str
    public: float
    name: str
    k: int = K


def rows_of(mixes: Sequence[str], sizes: Sequence[float], ks: Sequence[int] = ()) -> dict[str, Row]:
    """Name of the cell -> its row; the ledger's own by the ledger's names."""
    rows = [Row(mix, SHARE, name) for mix in mixes for name in (*METHODS, LINEAR, *(BOUNDS if mix == MIX else ()))]
    rows += [Row(MIX, size, name) for size in sizes for name in (*METHODS[1:], LINEAR)]
    rows += [Row(mix, SHARE, "car-mfl", k) for mix in mixes for k in ks if k != K]
    return {cell(row): row for row in rows}


def cell(row: Row) -> str:
    """The name of its file."""
    lacking = "" if row.mix == MIX else f"-{row.mix.replace(':', '-')}"
    public = "" if row.public == SHARE else f"-public-{row.public:g}"
    return row_name(f"{row.name}{lacking}{public}" + ("" if row.k == K else f"-k-{row.k}"))


def experiment(row: Row, seed: int) -> Experiment:
    """The ledger's with another mix, public set, k or weighing of the retrieved halves."""
    mix, public, name, k = row
    one: Any = missing(seed)["car-mfl" if name == LINEAR else name]
    if name == LINEAR:
        one = replace(one, method=replace(one.method, renorm="linear"))
    if k != K:
        one = replace(one, method=replace(one.method, k=k))
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
    for name, (mix, public, method, k) in rows.items():
        if name in ran:
            called = method if k == K else f"{method}, k = {k}"
            apart = less(figures, name, cell(Row(mix, public, BASELINE)), MACRO)
            body.append([mix, f"{public:g}", called, *(mean(figures, name, figure, 1) for figure in shown), apart])
    return table(["I:T:M", "public share", "method", *shown, f"less {BASELINE}"], body)


def strange(folder: RunFolder) -> dict[str, float]:
    """Modality -> of the findings on what was lent of it in the last round, the share that the records do not have.

    Mean over the sites that lack it.
    """
    assembly = Assembly(folder.experiment())
    cohort = assembly.cohort
    findings = cohort.labels == 1
    public = findings[cohort.rows("train", PUBLIC)]
    shares: dict[str, list[float]] = defaultdict(list)
    for site in assembly.data_sites():
        memory = SiteMemory(folder.path / "sites" / site).newest()
        if PARTNERS in memory:
            lent, own = public[memory[PARTNERS][-1].numpy()], findings[cohort.rows("train", site)]
            (lacking,) = set(MODALITIES) - set(assembly.data(site).modalities)
            shares[lacking].append(float((lent & ~own).sum() / lent.sum()))
    return {modality: fmean(of_sites) for modality, of_sites in shares.items()}


def kept(rows: dict[str, Row], seeds: Sequence[int], runs: Path) -> str:
    """The Markdown table of ``strange``, of the rows and seeds whose run is kept in ``runs``, in percent."""
    body = []
    for name, row in rows.items():
        for seed in seeds if row.name in ("car-mfl", LINEAR) else ():
            folder = cells.finished(runs / CAR_MFL.name / str(seed), replace(experiment(row, seed), name=name))
            if folder:
                share = strange(folder)
                body.append(
                    [name, str(seed), *(f"{100 * share[one]:.0f}" if one in share else "" for one in MODALITIES)]
                )
    return table(["row", "seed", "findings that the record lacks, on imputed images, %", "on imputed reports, %"], body)


def main() -> None:
    parser = parser_of(__doc__, "0-4")
    parser.add_argument("--mixes", nargs="*", default=[MIX, "0:4:1", "2:2:1"])
    parser.add_argument("--sizes", nargs="*", type=float, default=[])
    parser.add_argument("--k", nargs="*", type=int, default=[])
    options = parser.parse_args()
    say({**machine(), **vars(options)})
    rows = rows_of(options.mixes, options.sizes, options.k)
    scenario = replace(CAR_MFL, experiments=lambda seed: {name: experiment(row, seed) for name, row in rows.items()})
    print(f"\n{report(finished(scenario, options), rows)}\n")
    print(f"{kept(rows, seeds_of(options.seeds), options.runs)}\n")
    say(machine())


if __name__ == "__main__":
    main()
