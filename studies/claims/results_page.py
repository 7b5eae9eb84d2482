"""Every figure behind the claims as one Markdown page, from the tables in results/ alone: nothing is run or loaded.

The site has it (docs/hooks.py); ``python -m studies.claims.results_page`` prints it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from statistics import fmean, stdev

from fedvlp.evaluation import metric_names
from fedvlp.evaluation.intervals import over_seeds
from studies.claims.cell_results import GPU_TABLE, HEAD, CellResults, Table, UnlikeError
from studies.claims.ensembles import SITE_RSUM, UNTAUGHT
from studies.claims.ledger import AVERAGE, CLAIMS, DISPARITY, LOSSES, PAPERS, SCENARIOS, UNTRAINED, WORST
from studies.claims.page import (
    CORRECTED,
    EXPLANATION,
    HELD,
    INVALID,
    MISSING,
    UNLIKE,
    Outcome,
    Results,
    claim_rows,
    corrected,
    judge,
)
from studies.claims.scenario import Claim

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
    return table.of_seeds(lambda seed: (seed >= SETTLING) == settling)


def mean(table: Table, row: str, figure: str) -> str:
    """Mean and SD over seeds; "" where the row does not have the figure."""
    if not table.has(row, figure):
        return ""
    values = table.values(row, figure)
    return f"{fmean(values):.1f}" + (f" ({stdev(values):.1f})" if len(values) > 1 else "")


def minus(table: Table, row: str, other: str, figure: str) -> str:
    """The paired difference, with its seeds where some of the row's are left out.

    "" where no seed has both rows, or the row is the other.
    """
    if row == other:
        return ""
    try:
        said = str(over_seeds(table.difference(row, other, figure)))
    except UnlikeError:
        return UNLIKE
    except ValueError:
        return ""
    paired = table.paired_seeds(row, other)
    return said if paired == table.seeds_of(row) else f"{said} ({listed(paired)})"


def seeds(table: Table, row: str) -> str:
    """The seeds of a row."""
    return listed(table.seeds_of(row))


def listed(found: Sequence[int]) -> str:
    """Seeds, those that follow each other as 0-4."""
    whole = list(found) == list(range(found[0], found[-1] + 1)) and len(found) > 1
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

    def row(left_out: Sequence[str]) -> str:
        if len(left_out) == len(PARTS):
            return "fedavg"  # without all three it is FedAvg, bit for bit on a CPU
        return "-".join(["feddra", *(part for part in PARTS if part in left_out)])

    lines = []
    for part, text in PARTS.items():
        pairs = [(row(out), row((*out, part))) for out in subsets([name for name in PARTS if name != part])]
        try:
            both = set.intersection(*(set(table.paired_seeds(*pair)) for pair in pairs))
        except UnlikeError:
            both = set()
        if not both:
            lines.append([text, UNLIKE, UNLIKE])
            continue
        shared = table.of_seeds(both.__contains__)
        added = [[shared.difference(*pair, figure) for pair in pairs] for figure in (AVERAGE, WORST)]
        lines.append([text, *(str(over_seeds(list(map(fmean, zip(*one, strict=True))))) for one in added)])
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
            by_cell = {cell: results.by_round(cell)[number] for cell in cells if number in results.by_round(cell)}
            table = Table(by_cell, made=results.made())
            if not table.has(rows[0], shown[0]):
                continue
            line = [rows[0], str(number), seeds(table, rows[0])]
            for figure in shown:
                line += [mean(table, rows[0], figure), *(minus(table, rows[0], other, figure) for other in rows[1:])]
            lines.append(line)
    return markdown(head, lines)


def machines(name: str) -> str:
    """On what the cells of a scenario ran."""
    rows = [row for table in (name, name + GPU_TABLE) for row in loaded(table).cells.values()]
    by = sorted({", ".join(row[one] for one in ("processor", "gpu") if one in row) for row in rows})
    return f"{len(rows)} cells, run on: {'; '.join(by)}."


def section(judged: Results) -> str:
    """All tables of a scenario."""
    scenario = judged.scenario
    results = loaded(scenario.name)
    table, settling = judged.table, reported(figures(scenario.name), settling=True)
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
    return f"# {scenario.name}\n\n{scenario.text} {machines(scenario.name)}\n\n" + "\n".join(tables)


def teachers() -> str:
    """What CreamFL's sites together could teach its server (`programs/creamfl_teachers.py`)."""
    results = loaded("representations-teachers")
    table = figures(results.name)
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
    return f"## representations-teachers\n\n{text} {machines(results.name)}\n\n" + markdown(head, lines)


@cache
def loaded(name: str) -> CellResults:
    """The table of a scenario."""
    return CellResults(RESULTS, name)


def figures(name: str) -> Table:
    """Its figures, whatever code and settings they are of: ``fedvlp claims`` checks these. A GPU's are elsewhere."""
    elsewhere = None if name.endswith(GPU_TABLE) else figures(name + GPU_TABLE)
    results = loaded(name)
    cells = {
        cell: {figure: float(value) for figure, value in row.items() if figure not in HEAD}
        for cell, row in results.cells.items()
    }
    return Table(cells, made=results.made(), elsewhere=elsewhere)


def judgements() -> list[Results]:
    """Every scenario, judged."""
    return corrected([judge(one, reported(figures(one.name)), PAPERS) for one in SCENARIOS.values()], CLAIMS)


def pages() -> dict[str, str]:
    """Name of a page -> its text: "claims", which leads to the others, and one for each scenario."""
    judged = judgements()
    named = {one.scenario.name: one for one in judged}
    listed = "".join(f"- [{name}]({name}.md): {one.scenario.text}\n" for name, one in named.items())
    return {"claims": f"{OPENING}\n{listed}\n{teachers()}\n{unjudged(judged)}"} | {
        name: section(one) for name, one in named.items()
    }


COHORTS = {name: (name, f"{name}-distortion") for name in ("label-skew", "scanner-shift")}
"""Heading -> the scenarios whose claims stand beside the other cohort's."""


def verdicts(every: Sequence[Results]) -> str:
    """Two tables of verdicts, as docs/claims.md has them: of the claims on both cohorts, and of all others.

    A star: undecided after Holm's correction. A scenario that ranks none of its claims has one line.
    """
    named = {results.scenario.name: results for results in every}
    sides = [[one for name in names if name in named for one in named[name].outcomes] for names in COHORTS.values()]
    both = [(_said(one.claim), *map(starred, (one, other))) for one, other in zip(*sides, strict=True)]
    rows = []
    for name, results in named.items():
        if any(name in names for names in COHORTS.values()):
            continue
        for one in results.outcomes:
            rows.append((f"`{name}`", _said(one.claim), starred(one)))
        if not any(one.ranked for one in results.outcomes):
            last = rows[-1][-1]
            rows = [*rows[: len(rows) - len(results.outcomes)], (f"`{name}`", "all its claims", last)]
    return markdown(("claim", *map("`{}`".format, COHORTS)), both) + "\n" + markdown(("scenario", "claim", ""), rows)


def _said(claim: Claim) -> str:
    paper = {"feddra": "FedDRA", "fedrgb": "FedRGB", "creamfl": "CreamFL", "car-mfl": "CAR-MFL", "pms-fm": "PMS-FM"}
    value = "" if claim.papers_value == "not given" else f" ({claim.papers_value.partition(' (')[0]})"
    return f"{paper[claim.paper]}: {claim.text}{value}"


def starred(one: Outcome) -> str:
    """The verdict, with a star where it is undecided after Holm's correction."""
    return one.verdict + r"\*" * (one.ranked and one.corrected != one.verdict)


def unjudged(every: Sequence[Results]) -> str:
    """The claims without a verdict anywhere: those of scenarios, then those of none."""
    why = {MISSING: TIME, INVALID: "a precondition does not hold", UNLIKE: "run on unlike machines"}
    outcomes = [(results.scenario.name, one) for results in every for one in results.outcomes]
    known = {(one.claim.paper, one.claim.text) for _, one in outcomes if one.verdict not in why}
    rows = [
        (one.claim.paper, f"{one.claim.text} ({scenario})", why[one.verdict])
        for scenario, one in outcomes
        if (one.claim.paper, one.claim.text) not in known
    ]
    return "## Claims without a verdict\n\n" + markdown(("paper", "claim", "why"), [*rows, *UNJUDGED])


if __name__ == "__main__":
    print("\n".join([*pages().values(), verdicts(judgements())]))
