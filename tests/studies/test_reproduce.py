"""The papers' tables: every measured row is listed, no printed value is invented, small tables run and go on."""

from __future__ import annotations

import csv
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import programs, published
from support.laboratory import SOURCES
from support.larger import LARGER, creamfl
from typer.testing import CliRunner

from fedvlp.core.metric_keys import BYTES_DOWN, BYTES_UP
from fedvlp.evaluation import metric_names as names
from fedvlp.report import html
from fedvlp.run.folder import RunFolder
from fedvlp.run.metrics import of_server
from studies.claims import ledger
from studies.claims.cell_results import Table, spent
from studies.claims.ensembles import RSUM
from studies.claims.scenario import HOLDS
from studies.collections.creamfl_collections import FOLDERS
from studies.reproduce import inventory, measures, output, printed, run
from studies.reproduce.command import app
from studies.reproduce.experiments import alignment, missing_modalities, records, representations, unlike_sites
from studies.reproduce.inventory import ENTRIES, get, shown
from studies.reproduce.run import Reproduced, chosen_rows, claims_of, estimate, scenario, traffic
from studies.reproduce.table import DEMO, PAPER, SMALLEST, UNPRINTED, Column, Entry, Row, Size

ROOT = Path(__file__).parents[2]
INVENTORY = (ROOT / "docs" / "methods" / "evaluation.md").read_text(encoding="utf-8").partition("\n## 17.")[2]

PAPERS = {"FedDRA": "feddra", "FedRGB": "fedrgb", "CreamFL": "creamfl", "PMS-FM": "pms-fm", "CAR-MFL": "car-mfl"}


def measured_rows() -> set[str]:
    """ "feddra:2", "feddra:f3a-c", "fedrgb:7" and "fedrgb:8", ...: the column "measured" of section 17."""
    return {
        f"{PAPERS[paper]}:{name.strip().lower().removeprefix('t')}"
        for paper, names in re.findall(r"^\| ([A-Z][\w-]+) \| ([^|]*) \|", INVENTORY, re.MULTILINE)
        for name in names.split(",")
    }


def test_every_measured_row_of_the_inventory_is_listed_once() -> None:
    """Each id leads to one entry, and each entry is some row; a lost table, or one made up, would be seen."""
    rows = measured_rows()
    assert len(rows) > 54
    assert {name for name in rows if name not in inventory.BY_KEY} == set()
    assert {entry.key for entry in ENTRIES} == {inventory.get(name).key for name in rows}
    assert len(inventory.BY_KEY) == sum(len(entry.keys) for entry in ENTRIES), "two entries have the same name"
    assert len(ENTRIES) == 57


def test_an_entry_is_whole() -> None:
    """Its cells exist, and printed values come from studies/tables alone."""
    for entry in ENTRIES:
        assert entry.why_not or entry.shows or (entry.study and entry.rows and entry.columns)
        assert entry.table or not any(row.printed for row in entry.rows)
        for name in entry.shows:
            assert get(f"{entry.paper}:{name}").rows
        if entry.study and not entry.study.drawn and not entry.no_demo:
            for size in (Size(DEMO), Size(SMALLEST)):
                assert set(entry.cells()) <= entry.study.experiments(size, 0).keys()


def test_a_table_has_the_papers_rows_columns_and_printed_numbers() -> None:
    """All of them, in the paper's order; columns that it does not print stand behind its own."""
    for entry in [one for one in ENTRIES if one.table]:
        rows, columns = printed.labels(entry.table)
        assert [row.title for row in entry.rows] == rows
        assert [column.title for column in entry.columns][: len(columns)] == columns
        values = [entry.printed(row, index) for row in entry.rows for index in range(len(entry.columns))]
        lines = csv.DictReader((printed.TABLES / f"{entry.paper}.csv").open(newline="", encoding="utf-8"))
        expected = sorted(line["value"] for line in lines if line["table"] == entry.table)
        assert sorted(value for value in values if value != UNPRINTED) == expected


PRINTED = """
feddra:2 11x10 110, feddra:3 4x8 32, feddra:4 7x6 42, feddra:5 10x6 60, feddra:6 9x10 90, feddra:7 2x10 20,
feddra:8 3x10 30, feddra:9 3x9 27, feddra:10 8x12 96, feddra:11 13x10 130, feddra:12 7x12 84, feddra:13 12x12 144,
fedrgb:2 7x10 70, fedrgb:3 8x10 80, fedrgb:4 3x6 18, fedrgb:5 5x6 30, fedrgb:6 6x5 30, fedrgb:7 32x5 160,
fedrgb:8 5x5 25, fedrgb:10 3x6 18, fedrgb:11 6x5 30, fedrgb:12 8x12 96, fedrgb:13 13x10 130, fedrgb:14 4x10 40,
fedrgb:15 3x9 27, fedrgb:16 2x10 20, fedrgb:17 7x12 84, fedrgb:18 12x12 144, fedrgb:19 3x12 36,
creamfl:1 8x13 104, creamfl:2 8x4 8, creamfl:3 7x2 7, creamfl:4 5x1 5,
pms-fm:1 9x5 45, pms-fm:2 9x3 27, pms-fm:3 6x5 30, pms-fm:4 6x1 6, pms-fm:5 5x2 10,
car-mfl:1 4x10 40, car-mfl:2 1x5 5, car-mfl:3 1x4 4, car-mfl:4 2x10 20, car-mfl:5 1x6 6
"""
"""Table, rows x columns (three and one of creamfl:2 and :3 are ours), numbers: counted in the papers."""


def test_how_many_printed_numbers_stand_beside_ours() -> None:
    """In the tables as they are shown: a value, a row or a column that is lost would be seen, and a changed number."""
    found = []
    for entry in [one for one in ENTRIES if one.table]:
        lines = output.rows(Reproduced(entry, Size(DEMO), Table({}), ()))
        cells = [cell for _, *cells in lines for cell in cells]
        values = sum(not cell.endswith(f"({html.ABSENT})") for cell in cells)
        found.append(f"{entry.table} {len(lines)}x{len(output.head(entry)) - 1} {values}")
    assert found == PRINTED.replace("\n", " ").strip().split(", ")
    assert sum(int(one.split()[-1]) for one in found) == 2220
    numbers = {name: len(table) for name, table in printed.tables().items()}
    assert numbers.keys() - {one.split()[0] for one in found} == {"fedrgb:9", "car-mfl:f2", "car-mfl:f3a", "car-mfl:f4"}
    assert sum(numbers.values()) == 2257, "with what is structural, or stands in a figure's text"
    numbers_as_printed = hashlib.sha256(repr(sorted(printed.tables().items())).encode()).hexdigest()
    assert numbers_as_printed.startswith("a41a27b450f65422")


def test_a_printed_number_that_may_be_a_misprint_is_marked() -> None:
    """FedDRA's table 3 has the headings of RSNA and Covid swapped; a bold number or an arrow is no doubt."""
    entry = get("feddra:3")
    table = Table({("feddra", 0): {ledger.AVERAGE: 1.0}})
    text = output.markdown(Reproduced(entry, Size(SMALLEST), table, ()))
    assert "| \N{EN DASH} (81.0*) | \N{EN DASH} (90.3*) | 1.00 (30.2) |" in text
    assert "- * as printed (" in text
    assert "headings swapped in the paper" in text
    assert "- Not measured: Two-stage no, Global Constraint yes, DRO-Weighing yes; Two-stage yes, Global" in text
    assert "DRO-Weighing no; Covid (cls.), 1%; Covid (cls.), 10%; RSNA (cls.), 1%;" in text
    assert "Not measured" not in output.markdown(Reproduced(entry, Size(SMALLEST), Table({}), ())), "nothing has run"
    assert printed.tables()["creamfl:1"][
        "Model Heterogeneous (w/ larger server model), CreamFL (ours)", "1K Test Images, R@1_sum"
    ].doubt.startswith("sum of"), "bold is no doubt"
    assert not any(one.doubt for one in printed.tables()["car-mfl:5"].values())


def test_a_misprint_of_another_size_is_in_the_table_and_not_in_its_picture() -> None:
    """FedRGB's table 14 prints 2595 for 25.95; drawn, the other bars would have no length."""
    entry = get("fedrgb:14")
    done = Reproduced(entry, Size(SMALLEST), Table({("fedrgb", 0): {ledger.WORST: 1.0}}), ())
    assert "(2595*)" in output.markdown(done)
    assert "2595" not in output.drawings(done)
    assert "26.75" in output.drawings(done)


def test_no_two_rows_of_an_entry_show_one_figure() -> None:
    """PMS-FM's table 3 once had the selected model twice: in its own row, and in that of the global model."""
    for entry in ENTRIES:
        shown = [(row.cell + column.cell, row.about + column.figure) for row in entry.rows for column in entry.columns]
        assert len(set(shown)) == len(shown)


def test_the_global_models_accuracy_is_its_own_where_there_is_a_selector(tmp_path: Path) -> None:
    """By hand: the global model has 50 and 30 %, so 40 % on average, the selected one 60 and 50 %, so 55 %."""
    table = tmp_path / "zero_shot.csv"
    values = {"global": (50, 30, 40), "site-1": (70, 20, 45), "site-2": (10, 80, 45), "selected": (60, 50, 55)}
    lines = [
        f"{model},{site},{value},{'' if site == 'mean' else value / 10}"
        for model, of_model in values.items()
        for site, value in zip(("site-1", "site-2", "mean"), of_model, strict=True)
    ]
    table.write_text("\n".join(["model,site,accuracy,accuracy_std", *lines]) + "\n")
    figures = measures._accuracies(table)
    column = (entry := get("pms-fm:3")).columns[-1]
    ours = {row.title: figures[row.about + column.figure] for row in entry.rows if row.about + column.figure in figures}
    assert ours == {"Global Model": 0.40, "C 1 Local": 0.45, "C 2 Local": 0.45, "PMS-FM(Our)": 0.55}
    assert figures[measures.GLOBAL_MODEL + measures.deployed_at(2)] == 0.30
    assert figures[measures.deployed_at(2)] == 0.50
    assert figures[measures.spread(measures.deployed_at(2))] == 0.05
    done = Reproduced(
        replace(get("pms-fm:1"), rows=get("pms-fm:1").rows[6:7]), Size(DEMO), Table({("pms-fm", 0): figures}), ()
    )
    assert "0.550 \N{PLUS-MINUS SIGN} 0.055 (0.571 \N{PLUS-MINUS SIGN} 0.0" in output.markdown(done)
    unspread = output.markdown(Reproduced(entry, Size(DEMO), Table({("pms-fm", 0): figures}), ()))
    assert output.SPREAD not in unspread, "its paper prints none in this table"


def test_recall_after_a_round_is_by_the_site_that_trained_and_the_site_that_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FedRGB's table 6 and FedDRA's 11, by hand: re-trained at a 10 and 20 %, at b 30 and 60 %, 20 and 40 on average.

    Over the sites that is 15, 45 and 30 %.
    """
    table = tmp_path / "distortion.csv"
    cells = {("site-1", "site-1"): (0.1, 10), ("site-1", "site-2"): (0.2, 20), ("site-2", "site-1"): (0.3, 30),
             ("site-2", "site-2"): (0.4, 60), ("mean", "site-1"): (0.2, ""), ("mean", "site-2"): (0.3, "")}  # fmt: skip
    lines = [f"{on},{at},{fall},{recall},{recall}" for (on, at), (fall, recall) in cells.items()]
    table.write_text("\n".join(["trained_on,measured_on,distortion,recall1_after,recall5_after", *lines]) + "\n")
    monkeypatch.setattr(measures.Alignment, "__call__", lambda self, folder: {})
    monkeypatch.setitem(measures.EVALUATIONS, "distortion", lambda folder, choices: [table])
    monkeypatch.setattr(RunFolder, "experiment", lambda self: alignment.RECALL.experiments(Size(SMALLEST), 0)["fedavg"])
    figures = measures.Retrained("distortion")(RunFolder(tmp_path))
    entry = get("fedrgb:6")
    falls = [[figures.get(row.about + column.figure) for column in entry.columns[:2]] for row in entry.rows]
    assert [falls[0], falls[1], falls[-1]] == [[0.1, 0.2], [0.3, 0.4], [0.2, pytest.approx(0.3)]]
    averages = [figures[measures.retrained(site) + ledger.AVERAGE] for site in ("site-1", "site-2", "mean")]
    assert averages == [15.0, 45.0, 30.0]


def test_cosines_are_by_round_of_the_size() -> None:
    """Figures 4d to 4f: 25 rounds of the paper, three of the demo, each with the round before the first."""
    entry = get("feddra:f4d")
    for size, rounds in ((Size(DEMO), 3), (Size(SMALLEST), 1), (Size(PAPER, ROOT), 25)):
        titles = [column.title for column in entry.at(size).columns]
        assert titles == [f"round {number}" for number in range(rounds + 1)]


def test_a_site_with_a_label_of_its_own_counts_in_the_mean(tmp_path: Path) -> None:
    """CANDID by hand: the other sites have 60 and 30 %, it has 90 %: 60 % on average; so with the spreads."""
    table = tmp_path / "zero_shot.csv"
    table.write_text("model,site,accuracy,accuracy_std\nglobal,other records,90,3\nglobal,mean,90,\n")
    first, second, mean = (measures.deployed_at(1), measures.deployed_at(2), measures.deployed("mean"))
    known = {first: 0.6, second: 0.3, mean: 0.45, measures.spread(first): 0.01, measures.spread(second): 0.02}
    figures = known | measures.with_site(known, 3, table)
    assert (figures[measures.deployed_at(3)], figures[mean]) == (0.9, pytest.approx(0.6))
    assert figures[measures.spread(mean)] == pytest.approx(0.02)
    assert figures[measures.GLOBAL_MODEL + mean] == 0.9


def test_a_row_with_a_value_too_few_is_refused() -> None:
    entry = Entry("feddra", ("2",), "", None, (Row("a", "a", printed="1.0"),), (Column("x", "x"), Column("y", "y")))
    with pytest.raises(ValueError, match="1 values, 2 columns"):
        entry.printed(entry.rows[0], 0)


def test_seeds_and_cells_differ_where_they_should() -> None:
    """A cell that ignored its setting would be run twice and compared with itself."""
    for study in (
        alignment.RECALL,
        alignment.RETINA,
        representations.RECALL,
        unlike_sites.ZERO_SHOT,
        missing_modalities.MACRO_AUC,
    ):
        cells = study.experiments(Size(DEMO), 0)
        made = [repr(cell).replace(cell.name, "") for cell in cells.values()]
        assert len(set(made)) == len(made), study.name
        other = study.experiments(Size(DEMO), 1)
        assert [name for name in cells if cells[name].data == other[name].data] == []
        assert {cell.rounds.seed for cell in other.values()} == {1}


def test_the_ledgers_claims_are_judged_where_both_methods_are() -> None:
    rivals = ("FedAvg under GLoRIA", "FedAvg under MGCA", "FedEMA", "FedLDAWA under MGCA", "FedMOON", "FedU", "FedX")
    assert {one.text for one in claims_of(get("feddra:2"))} == {
        "average, equal encoder steps",
        "worst site, equal encoder steps",
        *(f"average, ahead of {one}" for one in rivals),
    }
    assert len(claims_of(get("feddra:3"))) == 3
    assert {one.other for one in claims_of(get("feddra:9"))} == {"feddra-mu-1", "feddra-mu-10"}
    assert {one.paper for one in claims_of(get("fedrgb:2"))} == {"fedrgb"}
    assert {one.figure for one in claims_of(get("creamfl:3"))} == {RSUM}


def by_hand() -> Reproduced:
    """Two rows, two columns; three seeds, of which the second column has none in the second row."""
    entry = Entry(
        "feddra", ("2",), "<b>by hand</b>", alignment.RECALL,
        (Row("FedAvg", "fedavg", printed="28.8 66.7"), Row("FedDRA", "feddra", printed="30.2 -")),
        (Column("R@1", ledger.AVERAGE), Column("Wst@5", "other")), note="A note.",
    )  # fmt: skip
    cells: dict[tuple[str, int], dict[str, float]] = {
        ("fedavg", seed): {ledger.AVERAGE: 10.0 + seed, "other": 5.0} for seed in range(3)
    }
    cells |= {("feddra", seed): {ledger.AVERAGE: 20.0 + seed + seed % 2 / 10} for seed in range(3)}
    table = Table(cells)
    judged = run.judge(scenario(entry, Size(SMALLEST)), table, ["feddra"])
    return Reproduced(entry, Size(SMALLEST), table, judged.outcomes)


def test_a_table_shows_ours_with_interval_and_the_papers(tmp_path: Path) -> None:
    """11 is the mean of 10, 11, 12; t(0.975, 2) = 4.30 times 1 / sqrt(3) is 2.48. What is absent is a dash."""
    done = by_hand()
    text = output.markdown(done)
    assert "| FedAvg | 11.00 [8.52, 13.48] (28.8) | 5.00 [5.00, 5.00] (66.7) |" in text
    assert re.search(rf"\| FedDRA \| 21\.03 \[.*\] \(30\.2\) \| {html.ABSENT} \({html.ABSENT}\) \|", text)
    assert "not the paper's data" in text
    assert "A note." in text
    assert "- Seeds 0, 1, 2. Ours" in text
    assert "- Not measured: FedDRA: Wst@5.\n" in text
    assert [(one.claim.method, one.verdict) for one in done.outcomes] == [("feddra", HOLDS)]
    assert "holds" in text
    files = output.write(tmp_path, "feddra-2", [done, done], "two tables")
    with files[1].open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 8
    first = {"row": "FedAvg", "ours": "11.0000", "papers_value": "28.8", "by_seed": "10.0000 11.0000 12.0000"}
    assert {name: rows[0][name] for name in first} == first
    assert (rows[3]["ours"], rows[3]["papers_value"]) == ("", "")
    page = files[2].read_text()
    assert "&lt;b&gt;by hand" in page
    assert page.count("<figure>") == 4


def ask(*words: str) -> Any:
    return CliRunner().invoke(app, words, env={"COLUMNS": "200"}, catch_exceptions=False)


def test_the_list_has_every_row_and_says_why_not() -> None:
    text = ask("--list").output
    for entry in ENTRIES:
        assert re.search(rf"{re.escape(entry.key)} ", text), entry.key
    assert "its five findings are all common" in text
    assert f"57 measured tables and figures, of which {sum(entry.runs for entry in ENTRIES)} run" in text
    assert sum(entry.runs for entry in ENTRIES) >= 50
    assert "structural" in text


COCO_ELSEWHERE = [word for name in FOLDERS for word in ("--data", f"{name}:.")]


def test_what_cannot_be_done_is_said() -> None:
    for words, said in [
        ((), "no table; give PAPER:TABLE"),
        (("feddra:22", "--demo"), "unknown table 'feddra:22'"),
        (("car-mfl:4", "--demo"), "car-mfl:4 has no demo: the counts are of MIMIC's patients; give --root"),
        (("feddra:2",), "give --demo"),
        (("feddra:2", "--demo", "--root", "."), "not both"),
        (("feddra:2", "--root", "no-such"), "--root is no folder"),
        (("feddra:2", "--demo", "--only", "FedX"), "has no row FedX"),
        (("feddra:2", "--demo", "--seeds", "2-1"), "--seeds is '2-1'"),
        (
            ("pms-fm:2", "--root", "."),
            "has no folder chexpert, mimic_cxr, nih_cxr14, candid_ptx, rsna, covid_radiography",
        ),
        (("creamfl:3", "--root", "."), "has no folder coco_captions, flickr30k, cifar100, ag_news"),
        (("feddra:2", "--demo", "--data", "mimic_cxr:."), "--data goes with --root"),
        (("feddra:2", "--root", ".", "--data", "mimic_cxr"), "--data 'mimic_cxr' is not SOURCE:FOLDER"),
        (("feddra:2", "--root", ".", "--data", "mimc_cxr:."), "--data names mimc_cxr, which alignment"),
        (("creamfl:3", "--root", ".", *COCO_ELSEWHERE), "ag_news: read below --root alone"),
    ]:
        with pytest.raises(ValueError, match=re.escape(said)):
            ask(*words)


def test_absent_data_are_named_without_their_path(tmp_path: Path) -> None:
    (tmp_path / "mimic_cxr").mkdir()
    with pytest.raises(ValueError, match="has no folder ehrxqa") as raised:
        ask("fedrgb:5", "--root", str(tmp_path), "--dry-run")
    assert str(tmp_path) not in str(raised.value)


def test_without_the_data_of_heads_a_table_is_one_of_recalls_and_says_so(tmp_path: Path) -> None:
    """Only those: where MIMIC is absent it is refused as it is, and a drawn cohort has all."""
    entry, size = get("feddra:2"), Size(SMALLEST, tmp_path)
    (tmp_path / "rsna").mkdir()
    assert (entry.at(size), entry.at(Size(DEMO))) == (entry, entry)
    (tmp_path / "mimic_cxr").mkdir()
    fewer = entry.at(size)
    assert fewer.study == alignment.RECALL
    assert fewer.note.endswith("Heads are not measured, as --root has no folder covidx.")
    assert fewer.columns == entry.columns
    (tmp_path / "covidx").mkdir()
    assert entry.at(size) == entry


def test_data_may_lie_elsewhere_with_settings_and_a_risk_that_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MIMIC in its two downloads beside the root: read as told, and what was accepted reaches the runs."""
    published.mimic(tmp_path / "films")
    (tmp_path / "root").mkdir()
    (tmp_path / "films" / "files").rename(tmp_path / "files")  # that of the reports, and by a link that of the images
    (tmp_path / "films" / "files").symlink_to(tmp_path / "files")
    given: list[Any] = []

    def noted(scenario: Any, cells: Any, *rest: Any) -> Table:
        given[:] = [cells, rest[-1]]
        return Table({})

    monkeypatch.setattr(run, "measured", noted)
    spec = f"mimic_cxr:{tmp_path}/films,reports={tmp_path},min_report_words=1"
    words = ["--root", str(tmp_path / "root"), "--data", spec, "--runs", str(tmp_path / "runs")]
    ask("feddra:3", *words, "--smallest", "--seeds", "0", "--accept-phi-kind", "date")
    cells, accepted = given
    assert accepted == ("date",)
    assert {(cell.data.reports, cell.data.min_report_words) for cell in cells.values()} == {(str(tmp_path), 1)}
    assert len(next(iter(cells.values())).data.build()) == 4


def test_the_guide_names_the_folders_of_every_table() -> None:
    guide = (ROOT / "docs" / "reproduce.md").read_text(encoding="utf-8")
    table = guide.partition("| tables | folders |")[2].partition("\n\n")[0]
    named = {tuple(re.findall(r"`([^`]+)`", line.split("|")[2])) for line in table.splitlines()[2:]}
    assert named == {entry.sources for entry in ENTRIES if entry.sources}
    assert set().union(*named) <= SOURCES.keys()


def test_the_papers_size_is_the_papers(tmp_path: Path) -> None:
    """Its towers, rounds, steps and batch, and the data of the root; not the demo under another name."""
    folder = tmp_path / "mimic_cxr"
    (folder / "files").mkdir(parents=True)
    for table in ("metadata", "split", "chexpert"):
        (folder / f"mimic-cxr-2.0.0-{table}.csv").touch()
    cells = alignment.RECALL.experiments(Size(PAPER, tmp_path), 3)
    one: Any = cells["feddra"]
    assert (one.rounds.rounds, one.rounds.seed, one.training.batch_size) == (25, 3, 388)
    assert (one.method.align_steps, one.method.local_steps, one.method.mu) == (20, 50, 5.0)
    assert one.model.pretrained
    assert {Path(cell.data.path).parent for cell in cells.values()} == {tmp_path}  # type: ignore[attr-defined]
    assert (cells["feddra-2-sites"].partition.sites, cells["fedavg-beta-5"].partition.beta) == (2, 5.0)


SCHEDULE = {"local_steps", "weighting", "server_rounds", "sites_per_round", "aligner_steps", "dro_fraction", "classes"}
"""What the tables of a paper share, whatever the method (spec 4.4, 6.4, 8.4)."""
TABLES = {
    "FedDRA": {"align_steps", "mu", "rho"},
    "FedRGB": {"alpha", "avg_aligner", "contrastive_guidance", "rho"},
    "CreamFL": {"aggregation", "inter", "intra"},
    "CARMFL": {"alpha"},
    "MFedAvg": {"private", "public"},
    "FedIoT": {"alpha"},
    "SelectorConfig": {"embeddings", "enhanced", "fusion", "templates"},
}
"""What a row of a table is about."""
SECTION_9 = {
    ("FedFed", "share", True), ("FedFed", "distil_steps", 2900), ("NTXentConfig", "temperature", 0.1),
    ("NTXentConfig", "predictor", True), ("BCEConfig", "blank", "zeros"), ("BCEConfig", "uncertain", "zeros"),
    ("CreamFLTaskConfig", "label_spaces", "own"), ("CreamFL", "local_epochs", 1),
}  # fmt: skip
"""The papers' values that are not the defaults, and the passes of CAR-MFL's sites, which ``training`` has."""


def test_no_cell_at_the_papers_size_has_a_demos_setting(papers_data: Path) -> None:
    """Methods, objectives and selectors are those of spec 9; all of a table train alike: steps, rate, schedule.

    Representations excepted: FedIoT averages models, so its epochs are steps of a mean site.
    """
    strange = set()
    for study in (alignment.RECALL, alignment.RETINA, representations.RECALL, unlike_sites.EXTERNAL,
                  missing_modalities.MACRO_AUC_UNLIKE):  # fmt: skip
        cells = study.experiments(Size(PAPER, papers_data), 0)
        assert len({replace(cell.training, batch_size=2) for cell in cells.values()}) == 1, study.name
        steps = {cell.training.local_epochs or cell.method.local_steps for cell in cells.values()}
        assert len(steps) == 1 or study == representations.RECALL, study.name
        for part in (getattr(cell, name) for cell in cells.values() for name in ("method", "objective", "extra")):
            kind = type(part).__name__
            plain = [one for one in fields(part) if "follows" not in one.metadata] if is_dataclass(part) else []
            for one in plain:
                if one.name not in SCHEDULE | TABLES.get(kind, set()) and getattr(part, one.name) != one.default:
                    strange.add((kind, one.name, getattr(part, one.name)))
    assert strange <= SECTION_9
    eyes: Any = alignment.RETINA.experiments(Size(PAPER, papers_data), 0).values()
    assert {cell.model.in_channels for cell in eyes} == {3}, "photographs are in colour"


def test_retrieval_outside_leaves_out_whom_the_run_was_trained_on(tmp_path: Path) -> None:
    """EHRXQA's test question is about a patient of MIMIC's test split; had the run trained on them, none would be left.

    The folders of the root are those that are read. A question without text is no pair.
    """
    published.mimic(tmp_path / "mimic_cxr")
    published.ehrxqa(tmp_path / "ehrxqa")
    size = Size(PAPER, tmp_path)
    alignment.ELSEWHERE.refuse_absent(size)
    outside = alignment.elsewhere(size)
    asked, sites = outside.data.build(), records.source(size, "mimic_cxr").build()
    assert asked.reports[asked.rows("test")[0]].startswith("is this an ap view")
    assert measures.unseen(asked, sites).tolist() == asked.rows("test").tolist() == [3]
    everybody = replace(sites, splits=np.array(["train"] * len(sites)))
    assert measures.unseen(asked, everybody).tolist() == []
    no_text = replace(asked, reports=("",) * len(asked))
    assert measures.unseen(no_text, sites).tolist() == []


def test_cocos_sum_is_of_four_recalls(monkeypatch: pytest.MonkeyPatch) -> None:
    """1K candidates, image to text 1 and text to image 2; 5K candidates 30 and 40: 73. Without folds it is refused."""
    scopes = {names.FOLDS: (1.0, 2.0), names.WHOLE_SET: (30.0, 40.0)}
    summary = {
        of_server(names.recall("test", k, scope, direction)): value * k
        for scope, values in scopes.items()
        for direction, value in zip((names.I2T, names.T2I), values, strict=True)
        for k in (1, 5, 10)
    }
    monkeypatch.setattr(measures, "at_the_server", lambda folder: {**summary, RSUM: 0.0})
    monkeypatch.setattr(measures, "cost", lambda folder: {})
    figures = measures.coco(RunFolder(Path()))
    assert figures[measures.R1_SUM] == 73.0
    assert figures[measures.ranked(names.T2I, 5)] == 10.0
    assert figures[measures.among_all(names.I2T, 10)] == 300.0
    assert measures.server(RunFolder(Path()))[measures.R1_SUM] == 70.0
    summary = {name: value for name, value in summary.items() if names.FOLDS not in name}
    with pytest.raises(ValueError, match="cannot be cut into five folds"):
        measures.coco(RunFolder(Path()))


def figures_of(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


TWO_CELLS = ["feddra:3", "--demo", "--smallest", "--only", "feddra", "--only", "feddra-no-dro"]
"""Of FedDRA's ablation."""


def test_a_dry_run_counts_cells_and_writes_nothing(tmp_path: Path) -> None:
    before = ask(*TWO_CELLS, "--runs", str(tmp_path), "--dry-run", "--seeds", "0-1").output
    assert "cells: 4, of which 0 have finished" in before
    assert not list(tmp_path.iterdir())


@dataclass(frozen=True)
class Ran:
    """A folder in which a table ran, what that printed, and its figures."""

    folder: Path
    output: str
    figures: str


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """``TWO_CELLS`` with one seed, undisturbed."""
    folder = tmp_path_factory.mktemp("ran")
    output = ask(*TWO_CELLS, "--runs", str(folder), "--seeds", "0", "--jobs", "1").output
    return Ran(folder, output, (folder / "feddra-3-smallest.csv").read_text())


def test_a_table_runs_goes_on_and_is_estimated(ran: Ran) -> None:
    """The same CSV when the cells are read again, or measured again of their runs.

    An estimate counts them as done, and its bytes are those that a run has sent.
    """
    words = [*TWO_CELLS, "--runs", str(ran.folder)]
    table = ran.folder / "feddra-3-smallest.csv"
    assert "feddra, seed 0: done" in ran.output
    assert "undecided" not in ran.output, "no claim is judged of a step or two"
    assert output.NO_SIZE in ran.output
    assert "Not measured" not in ran.output
    assert all(row["ours"] for row in figures_of(table)), ran.figures
    assert ask(*words, "--seeds", "0", "--jobs", "1").output.count("in the results") == 2
    assert table.read_text() == ran.figures
    shutil.rmtree(ran.folder / "results")
    assert ask(*words, "--seeds", "0", "--jobs", "1").output.count("there already") == 2
    assert table.read_text() == ran.figures
    entry = chosen_rows(get("feddra:3"), ["feddra", "feddra-no-dro"])
    left = estimate(entry, Size(SMALLEST), range(2), ran.folder / "results")
    assert (left.cells, left.done, left.bytes_of) == (4, 2, 2)
    assert "2 finished cells" in left.from_what
    finished = RunFolder(ran.folder / "alignment-smallest" / "0" / "feddra" / "001")
    used = spent(finished.history())
    sent = traffic(finished.experiment())
    assert sent is not None
    assert sent == pytest.approx(used[BYTES_DOWN] + used[BYTES_UP], rel=0.05)


@pytest.mark.slow(seconds=60)
@pytest.mark.parametrize(
    ("key", "rows"),
    [
        ("fedrgb:4", ("fedrgb-contrastive",)),
        ("fedrgb:5", ("FedAvg",)),
        ("feddra:2", ("ConVIRT, FedEMA", "ConVIRT, FedMOON")),
        ("creamfl:2", ("fedavg", "creamfl")),
        ("creamfl:3", ("reamfl-mean", "creamfl")),
        ("pms-fm:2", ("fedavg", "pms-fm")),
        ("pms-fm:3", ()),
        ("car-mfl:1", ("Methods, CreamFL", "Methods, CAR-MFL", "Homogeneous, 8:0:2", "Homogeneous, 0:8:2")),
        ("car-mfl:2", ()),
    ],
)
def test_a_table_of_each_other_paper_runs(key: str, rows: tuple[str, ...], tmp_path: Path) -> None:
    """Every value of it is measured: a figure with another name than its measure's would be an empty cell."""
    only = [word for row in rows for word in ("--only", row)]
    ask(key, "--demo", "--smallest", "--seeds", "0", "--jobs", "1", "--runs", str(tmp_path), *only)
    values = figures_of(tmp_path / f"{key.replace(':', '-')}-smallest.csv")
    assert len(values) >= max(1, len(rows))
    assert [row for row in values if not row["ours"]] == []


@pytest.fixture(scope="module")
def papers_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with small collections in their published layout."""
    root = tmp_path_factory.mktemp("papers")
    for name, write in LARGER.items():
        (root / name).mkdir()
        write(root / name)
    creamfl(root)
    published.vqa_v2(root / "vqa_v2")
    return root


@pytest.mark.slow(seconds=60)
@pytest.mark.parametrize(
    ("key", "rows"),
    [
        ("feddra:2", ("ConVIRT, FedAvg", "MGCA, FedLDAWA")),
        ("feddra:4", ("FedAvg",)),
        ("fedrgb:7", ()),
        ("fedrgb:8", ()),
        ("pms-fm:1", ("MedClip, FedAvg", "MedClip, PMS-FM (Our)")),
        ("pms-fm:2", ("pms-fm",)),
        ("car-mfl:1", ("Methods, CreamFL", "Methods, CAR-MFL", "Homogeneous, 8:0:2", "Homogeneous, 0:8:2")),
        ("car-mfl:2", ("CAR-MFL",)),
        ("car-mfl:4", ()),
        ("car-mfl:3", ()),
        ("car-mfl:f5", ()),
        ("creamfl:1", ("creamfl",)),
        ("creamfl:2", ("fediot", "creamfl")),
        ("creamfl:f4", ("CreamFL, a quarter as wide", "FedIoT, ResNet-34")),
    ],
)
def test_a_table_runs_on_the_papers_data(key: str, rows: tuple[str, ...], papers_data: Path, tmp_path: Path) -> None:
    """In its published layout, two steps a cell: every value is measured, and no drawn film stands in."""
    only = [word for row in rows for word in ("--only", row)]
    words = [key, "--root", str(papers_data), "--smallest", "--seeds", "0", "--jobs", "1", "--runs", str(tmp_path)]
    said = ask(*words, *only).output
    assert "not the paper's data" not in said
    assert any((tmp_path / "images").rglob("*.npy")) == bool(rows), "decoded images; counts need none"
    values = figures_of(tmp_path / f"{key.replace(':', '-')}-paper-smallest.csv")
    assert len(values) >= max(1, len(rows))
    assert [row for row in values if not row["ours"]] == []


@pytest.mark.slow(seconds=60)
@pytest.mark.parametrize(
    ("key", "rows"),
    [
        ("feddra:3", ()),
        ("fedrgb:3", ("GLoRIA, FedAvg", "MGCA, FedRGB (Ours)")),
        ("pms-fm:1", ("MedClip, FedAvg", "MedClip, PMS-FM (Our)")),
        ("car-mfl:1", ("Methods, CAR-MFL", "Homogeneous, 0:8:2", "Hetero, 8:0:2")),
    ],
)
def test_mimic_in_its_two_downloads_with_a_report_that_the_search_dislikes_runs_by_one_command(
    key: str, rows: tuple[str, ...], papers_data: Path, tmp_path: Path
) -> None:
    """Films and tables in mimic-cxr-jpg/2.0.0, reports in mimic-cxr/2.0.0; a date in one is refused unless accepted."""
    root = tmp_path / "root"
    root.mkdir()
    for name in set(get(key).sources) - {"mimic_cxr"}:
        (root / name).symlink_to(papers_data / name)
    films, reports = (root / "mimic_cxr" / name for name in ("mimic-cxr-jpg/2.0.0", "mimic-cxr/2.0.0"))
    shutil.copytree(papers_data / "mimic_cxr", films)
    texts = sorted(films.rglob("*.txt"))
    for text in texts:
        moved = reports / text.relative_to(films)
        moved.parent.mkdir(parents=True, exist_ok=True)
        text.rename(moved)
        moved.write_text(moved.read_text() + "Compared with the film of 3/14/2012.\n")
    only = [word for row in rows for word in ("--only", row)]
    words = ["fedvlp", "reproduce", key, "--root", str(root), "--smallest", "--seeds", "0", "--jobs", "1", *only]
    words += ["--runs", str(tmp_path / "runs")]
    refused = programs.forked(words, tmp_path, os.environ)
    assert refused.returncode == 2
    assert re.search(r"records: .*date in \d", " ".join(refused.stderr.split())), refused.stderr
    ran = programs.forked([*words, "--accept-phi-kind", "date"], tmp_path, os.environ)
    assert ran.returncode == 0, ran.stderr
    values = figures_of(tmp_path / "runs" / f"{key.replace(':', '-')}-paper-smallest.csv")
    assert len(values) >= max(1, len(rows) - 1)
    assert [row for row in values if not row["ours"]] == []


@pytest.mark.slow(seconds=60)
def test_a_killed_table_goes_on_with_the_same_figures(ran: Ran, tmp_path: Path) -> None:
    """SIGKILL after the first cell, with one under way; what it then shows is what an undisturbed one shows."""
    from support.provisioned import processes, until

    words = [*TWO_CELLS, "--seeds", "0", "--runs", str(tmp_path)]
    program = [sys.executable, "-c", "from studies.reproduce.command import app; app()", *words, "--jobs", "2"]
    killed = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
    assert killed.stdout is not None
    for line in killed.stdout:
        if "done" in line:
            break
    killed.send_signal(signal.SIGKILL)
    killed.wait(30)
    until(lambda: not processes(str(tmp_path)), "the workers end with their parent", 60)
    ask(*words, "--jobs", "1")
    assert (tmp_path / "feddra-3-smallest.csv").read_text() == ran.figures


def test_a_figure_runs_the_tables_that_it_draws() -> None:
    assert [entry.key for entry in shown(get("feddra:f3b"))] == ["feddra:10", "feddra:11", "feddra:13"]
    assert shown(get("feddra:3")) == [get("feddra:3")]
