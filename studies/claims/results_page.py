"""Every figure behind the claims as one Markdown page, from the tables in results/ alone: nothing is run or loaded.

The site has it (docs/hooks.py); ``python -m studies.claims.results_page`` prints it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean, stdev

from fedvlp.evaluation import metric_names
from fedvlp.evaluation.intervals import over_seeds
from studies.claims.cell_results import HEAD, CellResults, NotRunError, Table
from studies.claims.ensembles import SITE_RSUM, UNTAUGHT
from studies.claims.ledger import AVERAGE, DISPARITY, LOSSES, PAPERS, SCENARIOS, UNTRAINED, WORST
from studies.claims.page import CORRECTED, EXPLANATION, HELD, INVALID, MISSING, Results, claim_rows, corrected, judge

RESULTS = Path(__file__).parents[1] / "results"
SETTLING = 100
"""From this seed on settings are chosen, and nothing is reported."""

CONDITIONS = ("rounds", "long", "steps", "moments", "seldom", "start")
"""Ends of the names of rows of `programs/conditions.py`."""

OWN_NORM = "-own-norm"
"""Ends names of rows of `programs/equal_time.py` with each site's own batch normalisation, in place of layer norm."""

PARTS = {"one-stage": "two stages", "no-constraint": "the constraint", "no-dro": "robust weights"}
"""Ends of the names of rows of `programs/ablation.py` -> the part that such a row lacks."""

SHORT = {AVERAGE: "average", WORST: "worst site", DISPARITY: "disparity"}
"""Headings of figures."""

TIME = "hours that two cores did not have"
ONE_SEED = "`fedvlp reproduce --demo` measures it; over seeds: " + TIME
UNJUDGED = (
    (
        "feddra, fedrgb",
        "heads and segmentation under GLoRIA and MGCA and by setting (Tables 2, 3, 5 to 9, 14 to 16)",
        ONE_SEED,
    ),
    ("feddra", "retina (Table 4), heterogeneity (5), two sites (7), deep and shallow layers (11 to 13)", ONE_SEED),
    (
        "fedrgb",
        "GLoRIA and MGCA (Table 3), parts (4), rounds (14), alpha (15), two sites (16)",
        ONE_SEED,
    ),
    ("creamfl", "answers to questions (Table 2), more public data (4), bytes (Figure 4)", ONE_SEED),
    ("pms-fm", "MGCA, other data (Table 2), fusions (4)", ONE_SEED),
    (
        "car-mfl",
        "other collections at the sites and CreamFL (Table 1), alpha (5), the weight on images (Figure 3b)",
        ONE_SEED,
    ),
    (
        "car-mfl",
        "rare findings (Figure 2), the public set's size at unlike sites (Figure 6)",
        "the paper prints no number",
    ),
)
"""Paper, what it claims, and why there is no verdict."""

OPENING = f"""# The figures behind the claims

Written from the tables in `studies/results`; how claims are judged, and what follows, is in
[claims](../../docs/claims.md). {EXPLANATION}

A cell is the mean over seeds (SD), or a paired difference [95 %]. R@1 is in percent, among 32 records of the test split
where nothing else is said. FedAvg has equal encoder steps, or equal total steps (`all-steps`, `all-steps-of-fedrgb`).
A row is named as in the table of its scenario: a method, then what differs from the scenario's. `no-dro`,
`no-constraint`, `one-stage`: without that part. `mu`, `rho`, `align-steps`, `aligner-steps`, `k`: that setting.
`rounds`, `long`: three and six times as many rounds. `steps`: twice as many encoder steps a round. `moments`: AdamW's
are kept. `seldom`: stage 1 in every fourth round. `start`: other initial encoders. `0-4-1`: sites without reports,
without images, with both. `public-0-05`: share of patients in the public set.
"""


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, without the columns that are empty."""
    body = [list(row) for row in rows]
    shown = [index for index in range(len(head)) if any(row[index] for row in body)]
    lines = [[row[index] for index in shown] for row in (head, ["---"] * len(head), *body)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def reported(table: Table, settling: bool = False) -> Table:
    """The cells of the seeds that are reported, or of those on which settings are chosen."""
    return Table({cell: figures for cell, figures in table.cells.items() if (cell[1] >= SETTLING) == settling})


def mean(table: Table, row: str, figure: str) -> str:
    """Mean and SD over seeds; "" where the row does not have the figure."""
    if not table.has(row, figure):
        return ""
    values = table.values(row, figure)
    return f"{fmean(values):.1f}" + (f" ({stdev(values):.1f})" if len(values) > 1 else "")


def minus(table: Table, row: str, other: str, figure: str) -> str:
    """The paired difference; "" where no seed has both rows, or the row is the other."""
    try:
        return "" if row == other else str(over_seeds(table.difference(row, other, figure)))
    except (NotRunError, ValueError):
        return ""


def seeds(table: Table, row: str) -> str:
    """The seeds of a row, those that follow each other as 0-4."""
    found = table.seeds_of(row)
    whole = found == list(range(found[0], found[-1] + 1)) and len(found) > 1
    return f"{found[0]}-{found[-1]}" if whole else ", ".join(map(str, found))


# Which row a row is compared with


def condition(row: str) -> str:
    """ "-rounds" of feddra-rounds; "" of a row under the scenario's own conditions."""
    return next((f"-{one}" for one in CONDITIONS if row.removesuffix(OWN_NORM).endswith(f"-{one}")), "")


def equal_encoder_steps(row: str) -> str:
    """FedAvg under the same condition."""
    return f"fedavg{condition(row).replace('-seldom', '')}"


def equal_steps_in_all(row: str, longer: str) -> str:
    """The same of FedAvg with as many steps in all; ``longer``: of rows whose first stage is as long as FedRGB's."""
    if not row.startswith("fed") or row.startswith("fedavg") or "one-stage" in row:
        return row
    if row in ("fedrgb", "feddra-align-steps-40"):
        return longer
    return row if row == "feddra-align-steps-10" else f"fedavg-all-steps{condition(row)}"


def whole_method(row: str) -> str:
    """The method itself, of a row under the scenario's own conditions that changes a setting or lacks a part."""
    method = row.partition("-")[0]
    return method if method in ("feddra", "fedrgb") and not condition(row) else row


def zeros(row: str) -> str:
    """mFedAvgP with the same mix of sites and public set."""
    other = row.replace("-k-1000", "").replace("car-mfl-linear", "car-mfl").replace("car-mfl", "mfedavg-p")
    return other if other != row else "mfedavg-p"


def of_the_same_loss(row: str) -> str:
    """FedAvg under GLoRIA's, MGCA's or the pair's loss, as the row."""
    loss = row.partition("-")[2]
    return f"fedavg-{loss}" if loss in LOSSES else "fedavg"


Compared = dict[str, Callable[[str], str]]
"""Heading -> the row that a row is compared with."""


def compared(scenario: str, table: Table) -> Compared:
    """What the rows of a scenario are compared with."""
    if scenario in ("label-skew", "scanner-shift"):
        longer = next(one for one in ("fedavg-all-steps-of-fedrgb", "fedavg-all-steps") if table.has(one, AVERAGE))
        return {
            "FedAvg (encoder steps)": equal_encoder_steps,
            "FedAvg (total steps)": lambda row: equal_steps_in_all(row, longer),
            "whole method": whole_method,
            "FedAvg (own normalisation)": lambda row: (
                f"fedavg{condition(row)}{OWN_NORM}" if row.endswith(OWN_NORM) else row
            ),
        }
    if scenario == "named-baselines":
        return {"FedAvg, the same loss": of_the_same_loss}
    if scenario in ("representations", "drawn-vectors"):
        return {"server alone": lambda _: "server-alone", "untrained sites": lambda _: UNTRAINED}
    return {"mFedAvgP": zeros} if scenario == "missing-modalities" else {}


# Tables


def row_table(table: Table, shown: Sequence[str], others: Compared) -> str:
    """One line a row: mean and SD of every figure, and its difference to the rows it is compared with."""
    compared_in = [figure for figure in shown if figure not in (SITE_RSUM, UNTAUGHT, DISPARITY)]
    names = {figure: SHORT.get(figure, figure) for figure in shown}
    differences = [f"{names[figure]}: minus {other}" for other in others for figure in compared_in]
    head = ["row", "seeds", *names.values(), *differences]
    rows = sorted({row for row, _ in table.cells})
    lines = [
        [
            row,
            seeds(table, row),
            *(mean(table, row, figure) for figure in shown),
            *(minus(table, row, other(row), figure) for other in others.values() for figure in compared_in),
        ]
        for row in rows
    ]
    if len(shown) > 2 * len(rows):
        return markdown(*upright([head, *lines]))
    return markdown(head, lines)


def upright(lines: Sequence[Sequence[str]]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Head and rows of the table turned on its side."""
    turned = list(zip(*lines, strict=True))
    return turned[0], turned[1:]


def parts_table(table: Table) -> str:
    """What each part of FedDRA adds, the mean over the four pairs of rows that differ in it alone, by paired seeds."""

    def value(left_out: Sequence[str], seed: int, figure: str) -> float:
        row = "-".join(["feddra", *left_out])
        cell = (row, seed) if (row, seed) in table.cells else ("fedavg", seed)  # without all three it is FedAvg
        return table.cells[cell][figure]

    both = table.seeds_of("feddra", "feddra-one-stage-no-constraint")
    lines = []
    for part, text in PARTS.items():
        added: dict[str, list[float]] = {AVERAGE: [], WORST: []}
        for figure, seed in product(added, both):
            pairs = [
                value([name for name in PARTS if name in out], seed, figure)
                - value([name for name in PARTS if name in (*out, part)], seed, figure)
                for out in subsets([name for name in PARTS if name != part])
            ]
            added[figure].append(fmean(pairs))
        lines.append([text, *(str(over_seeds(values)) for values in added.values())])
    return markdown(["what a part adds, whatever else is left out", "R@1, average", "R@1, worst site"], lines)


def subsets(names: Sequence[str]) -> list[tuple[str, ...]]:
    """All subsets, in the order of ``names``."""
    chosen = product((False, True), repeat=len(names))
    return [tuple(name for name, out in zip(names, one, strict=True) if out) for one in chosen]


def round_table(results: CellResults) -> str:
    """Validation R@1 of FedDRA by round, and its difference to both FedAvgs."""
    kinds = (metric_names.AVERAGE, metric_names.WORST)
    shown = [metric_names.over_sites(metric_names.recall("val", 1), kind) for kind in kinds]
    rivals = ("fedavg", "fedavg-all-steps")
    head = ["row", "after round", "seeds"]
    for name in ("average", "worst site"):
        head += [f"validation, {name}", *(f"{name}: minus {other}" for other in rivals)]
    lines = []
    for end, after in (("", (1, 2, 4, 8)), ("-rounds", (8, 16, 24)), ("-long", (8, 16, 24, 32, 40, 48))):
        rows = [f"{row}{end}" for row in ("feddra", *rivals)]
        cells = [cell for cell in results.cells if cell[0] in rows and cell[1] < SETTLING]
        for number in after:
            table = Table({cell: results.by_round(cell)[number] for cell in cells if number in results.by_round(cell)})
            if not table.has(rows[0], shown[0]):
                continue
            line = [rows[0], str(number), seeds(table, rows[0])]
            for figure in shown:
                line += [mean(table, rows[0], figure), *(minus(table, rows[0], other, figure) for other in rows[1:])]
            lines.append(line)
    return markdown(head, lines)


def machines(results: CellResults) -> str:
    """On what the cells ran."""
    by = sorted({", ".join(row[one] for one in ("processor", "gpu") if one in row) for row in results.cells.values()})
    return f"{len(results.cells)} cells, run on: {'; '.join(by)}."


def section(judged: Results) -> str:
    """All tables of a scenario."""
    scenario = judged.scenario
    results = loaded(scenario.name)
    table, settling = judged.table, reported(figures(results), settling=True)
    others = compared(scenario.name, table)
    tables = [
        markdown(("precondition", ""), [(one.text, HELD[held]) for one, held in judged.preconditions]),
        markdown(CORRECTED, claim_rows(judged)),
        row_table(table, scenario.shown, others),
    ]
    if scenario.name in ("label-skew", "scanner-shift"):
        tables += [parts_table(table), round_table(results)]
    if settling.cells:
        tables.append("Seeds on which settings were chosen:\n\n" + row_table(settling, scenario.shown, others))
    return f"# {scenario.name}\n\n{scenario.text} {machines(results)}\n\n" + "\n".join(tables)


def teachers() -> str:
    """What CreamFL's sites together could teach its server (`programs/creamfl_teachers.py`)."""
    results = loaded("representations-teachers")
    table = figures(results)
    shown = sorted({name for cell in table.cells.values() for name in cell})
    rows = sorted({row for row, _ in table.cells})
    decimals = {name: 2 if "cosine" in name or "weight" in name else 1 for name in shown}
    lines = []
    for row in rows:
        means = [
            f"{fmean(table.values(row, name)):.{decimals[name]}f}" if table.has(row, name) else "" for name in shown
        ]
        together = [
            str(over_seeds(table.difference(row, row, one, other))) if table.has(row, one) else ""
            for one, other in (("sites together", "server"), ("distilled on the public set", "sites together"))
        ]
        lines.append([row, seeds(table, row), *means, *together])
    head = ["row", "seeds", *shown, "sites together minus server", "distilled on the public set minus sites together"]
    text = "What all sites together make of a pair, and a server that is only distilled from it; sums of R@1, 5, 10."
    return f"## representations-teachers\n\n{text} {machines(results)}\n\n" + markdown(head, lines)


def loaded(name: str) -> CellResults:
    """The table of a scenario."""
    return CellResults(RESULTS, name)


def figures(results: CellResults) -> Table:
    """Its figures, whatever code and settings they are of: ``fedvlp claims`` checks these."""
    return Table(
        {
            cell: {name: float(value) for name, value in row.items() if name not in HEAD}
            for cell, row in results.cells.items()
        }
    )


def pages() -> dict[str, str]:
    """Name of a page -> its text: "claims", which leads to the others, and one for each scenario."""
    judged = corrected([judge(one, reported(figures(loaded(one.name))), PAPERS) for one in SCENARIOS.values()])
    named = {one.scenario.name: one for one in judged}
    listed = "".join(f"- [{name}]({name}.md): {one.scenario.text}\n" for name, one in named.items())
    return {"claims": f"{OPENING}\n{listed}\n{teachers()}\n{unjudged(judged)}"} | {
        name: section(one) for name, one in named.items()
    }


def unjudged(every: Sequence[Results]) -> str:
    """The claims without a verdict anywhere: those of scenarios, then those of none."""
    why = {MISSING: TIME, INVALID: "a precondition does not hold"}
    outcomes = [(results.scenario.name, one) for results in every for one in results.outcomes]
    known = {(one.claim.paper, one.claim.text) for _, one in outcomes if one.verdict not in why}
    rows = [
        (one.claim.paper, f"{one.claim.text} ({scenario})", why[one.verdict])
        for scenario, one in outcomes
        if (one.claim.paper, one.claim.text) not in known
    ]
    return "## Claims without a verdict\n\n" + markdown(("paper", "claim", "why"), [*rows, *UNJUDGED])


if __name__ == "__main__":
    print("\n".join(pages().values()))
