"""The figures behind the claims: each difference is one of runs that are alike, whatever the tables hold."""

from __future__ import annotations

import csv
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from studies.claims import results_page
from studies.claims.cell_results import CellResults, Table, UnlikeError
from studies.claims.ledger import SCENARIOS
from studies.claims.page import UNLIKE
from studies.claims.results_page import RESULTS, compared, figures

Row = dict[str, str]


def lines(name: str) -> dict[tuple[str, int], tuple[Row, Row]]:
    """Cell -> its line and that before training, as the files have them: no code of the ledger reads them."""
    found: dict[tuple[str, int], tuple[Row, Row]] = {}
    file = RESULTS / f"{name}.csv"
    for row in csv.DictReader(file.read_text(encoding="utf-8").splitlines()) if file.exists() else ():
        cell = row["method"], int(row["seed"])
        if not row["round"]:
            found[cell] = row, {}
        elif row["round"] == "0":
            found[cell] = found[cell][0], row
    return found


SETTINGS = {row["settings"]: row for row in csv.DictReader((RESULTS / "settings.csv").open(encoding="utf-8"))}
BEGINS = ("args.model.args.head_norm", "args.model.args.init", "args.model.path", "args.norm_statistics")
"""Settings by which two rows of one scenario begin otherwise."""


def same_by_hand(one: tuple[Row, Row], other: tuple[Row, Row]) -> bool:
    if any(one[0][name] != other[0][name] for name in ("gpu", "torch")):
        return False
    first, second = (SETTINGS[row["settings"]] for row, _ in (one, other))
    pooled = [
        row["args.method.path"].endswith("Centralized") and row["args.norm_statistics"] == "site"
        for row in (first, second)
    ]
    if pooled[0] != pooled[1] or any(first[name] != second[name] for name in BEGINS):
        return True
    before = [
        (float(one[1][name]), float(other[1][name]))
        for name in one[1]
        if "r1" in name and one[1][name] and other[1].get(name)
    ]
    return all(abs(a - b) <= 1e-3 for a, b in before)


def compared_pairs(name: str, table: Table) -> Iterator[tuple[str, str]]:
    """The rows that the claims of a scenario, or its page, subtract from one another."""
    yield from ((claim.method, claim.other) for claim in SCENARIOS[name].claims)
    for row in {row for row, _ in table.cells}:
        yield from ((row, other(row)) for other in compared(name, table).values())


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_difference_of_the_results_is_of_like_runs(name: str) -> None:
    """Read from the files by hand: one torch, one device, and the same recall before training to a thousandth."""
    table, places = figures(name), [lines(name), lines(name + "-gpu")]
    checked = 0
    for row, other in compared_pairs(name, table):
        try:
            paired = table.paired_seeds(row, other)
        except UnlikeError:
            seeds = table.seeds_of(row, other)
            assert not any(
                same_by_hand(place[row, seed], place[other, seed])
                for place in places
                for seed in seeds
                if (row, seed) in place and (other, seed) in place
            ), (row, other)
            continue
        except ValueError:
            continue
        for seed in paired:
            both = [place for place in places if (row, seed) in place and (other, seed) in place]
            assert any(same_by_hand(place[row, seed], place[other, seed]) for place in both), (row, other, seed)
            checked += 1
    assert checked or not table.cells


def test_a_table_whose_machines_are_mixed_has_words_where_a_figure_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of unlike-sites in a copy: the pooled model's cells as if a GPU, another torch or another start had made them."""
    for file in ("unlike-sites.csv", "settings.csv"):
        shutil.copy(RESULTS / file, tmp_path)
    monkeypatch.setattr(results_page, "RESULTS", tmp_path)
    monkeypatch.setattr(results_page, "loaded", lambda name: CellResults(tmp_path, name))
    shown = SCENARIOS["unlike-sites"].shown[0]
    whole = CellResults(tmp_path, "unlike-sites")
    assert results_page.minus(figures("unlike-sites"), "pms-fm", "pooled", shown).startswith(("+", "-"))
    for column, text in (("gpu", "NVIDIA H200"), ("torch", "2.11.0"), ("start", "")):
        mixed = CellResults(tmp_path, "unlike-sites")
        for cell, row in mixed.cells.items():
            before = {"method": cell[0], "seed": str(cell[1]), "round": "0", "val/mean/r1/average": "4.5"}
            mixed.rounds[cell] = [before]
            if cell[0] == "pooled":
                before["val/mean/r1/average"] = "4.502" if column == "start" else "4.5"
                row |= {column: text} if text else {}
        mixed.write()
        assert results_page.minus(figures("unlike-sites"), "pms-fm", "pooled", shown) == UNLIKE
        whole.write()


def test_this_fedvlp_reads_the_settings_of_every_cell() -> None:
    """Else a cell is another experiment: it would be run again, and where it began would not be known."""
    files = [
        file for file in sorted(RESULTS.glob("*.csv")) if file.read_text(encoding="utf-8").startswith("seed,method,")
    ]
    tables = [CellResults(RESULTS, file.stem) for file in files]
    assert sum(len(table.cells) for table in tables) > 500
    unread = {(table.name, cell[0]) for table in tables for cell, made in table.made().items() if made.begins is None}
    assert unread == set()
