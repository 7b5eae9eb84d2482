"""Writes studies/README.md from the tables in results/: `python -m studies.page`."""

from __future__ import annotations

import ast
import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

STUDIES = Path(__file__).parent
PAGE = STUDIES / "README.md"
SHARED = ("common", "drill_job", "echo", "ledger_cells", "link", "timed", "workload")
"""Modules that programs share, and no programs."""

OPENING = """# Studies, and what fedvlp costs

The laboratory: what the papers claim and print, measured again, and how fast fedvlp is. Sites do not install it; in a
clone `make` does, or `pip install --no-deps -e studies`. `python -m studies.page` writes this page.

- `claims/`: `fedvlp claims`, the papers' claims over paired seeds ([claims](../docs/claims.md)).
- `reproduce/`: `fedvlp reproduce`, the papers' tables ([a table by one command](../docs/reproduce.md)).
- `programs/`: one program a file, `python studies/programs/NAME.py`; `--help` says what it takes, `--quick` runs it
  small, `make bench` runs the full ones.
- `results/`: a table for each scenario of the claims with a line a cell, [as one
  page](../studies/claims/results_page.py), `settings.csv`;
  `goals.csv`, and `programs.csv` with every figure that programs printed.

Variants run in turn in one call: compare ratios of one call, never seconds of two. Where nothing else is said: 2 cores
of an Intel Xeon (AVX-512, AMX), no GPU, one torch thread a process.
"""


def lines_of(name: str) -> list[dict[str, str]]:
    """The lines of a table in results/."""
    with (STUDIES / "results" / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)) + "\n"


def programs() -> list[tuple[str, str, str]]:
    """Name, what it measures, and revision and date of its newest figures, of every program."""
    newest: dict[str, tuple[str, str]] = {}
    for row in lines_of("programs"):
        newest[row["program"]] = max(newest.get(row["program"], ("", "")), (row["date"], row["revision"]))
    rows = []
    for path in sorted((STUDIES / "programs").glob("*.py")):
        if path.stem not in SHARED:
            text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            first = text.splitlines()[0].split(": ")[0].split("; ")[0].split(", on ")[0].rstrip(".")
            date, revision = newest.get(path.stem, ("", ""))
            rows.append((path.stem, first, f"{revision} {date}".strip()))
    return rows


def page() -> str:
    """The page."""
    goals = [(row["goal"], row["peer or limit"], row["figure"], row["met"]) for row in lines_of("goals")]
    measured = {(row["date"], row["revision"]) for row in lines_of("goals")}
    date, revision = max(measured)
    return "\n".join(
        [
            OPENING,
            f"## Goals ({date}, revision {revision} or before: `goals.csv`)\n",
            table(("goal", "peer or limit", "figure", ""), goals),
            "## Programs\n",
            table(("program", "what it measures", "newest figures in `programs.csv`"), programs()),
        ]
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
