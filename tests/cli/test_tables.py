"""The tables that `fedvlp simulate` and `fedvlp report` print."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from fedvlp.cli import app, main
from fedvlp.cli.panels import plain_table
from fedvlp.cli.tables import markdown, prepared_tables, progress_line, summary_tables, table_of_file
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.deploy.named_data import NamedData
from fedvlp.evaluation.intervals import Interval
from fedvlp.flare.jobs import write_job
from fedvlp.report.comparison_page import tables, verdict
from fedvlp.run import presets
from fedvlp.run.compare import Comparison, Row

RECALL = {f"test/mean/r{k}/{kind}": 10.0 * k + (kind == "worst") for k in (1, 5) for kind in ("average", "worst")}
AREAS = {"server/val/auc/macro": 0.5, "server/test/auc/macro": 0.625, "server/test/auc/Edema": 0.75}


def shown(figures: dict[str, dict[str, float]]) -> str:
    console = Console(file=StringIO(), width=200)
    console.print(*summary_tables("mine", figures))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_a_run_that_measured_nothing_has_no_table() -> None:
    assert summary_tables("mine", {}) == []


def test_the_loss_of_a_pooled_site_is_its_own() -> None:
    """What it reports about the sites whose records it holds is no loss of theirs."""
    figures = {"loss/contrastive": 9.25, "site-1:val/mean/r1": 5.0, "site-2:val/mean/r1": 7.0}
    record = {"round": 0, "phase": "train", "seconds": 1.0, "dropped": {}, "members": ["pooled"]}
    record["sites"] = {"pooled": figures}
    assert "loss 9.250  val R@1 6.0 (worst 5.0)" in progress_line(record)


def test_brackets_are_no_markup() -> None:
    """What others wrote, the names of findings, sites and folders: "[/Edema]" ended in a traceback, "[x]" was gone."""
    console = Console(file=StringIO(), width=200)
    console.print(plain_table("runs in b[/x]", ("site [a]", "[/Edema]"), [("north [ward 3]", "[/]")]))
    console.print(*prepared_tables(SyntheticCohort(sites=2, size=80).build(), {"skipped: [/x]": 1}, {"[y]": "[z]"}))
    areas = {"server/test/auc/macro": 0.5, "server/test/auc/[/Edema]": 0.75}
    console.print(*summary_tables("mine", {"initial": areas, "trained": areas}))
    assert isinstance(console.file, StringIO)
    text = console.file.getvalue()
    for said in ("b[/x]", "site [a]", "north [ward 3]", "[/]", "skipped: [/x]", "[y]", "[z]"):
        assert said in text
    assert text.count("[/Edema]") == 2


def test_retrieval_of_sites_alone() -> None:
    text = shown({"initial": RECALL, "trained": {**RECALL, "test/mean/r1/average": 33.333}})
    assert "retrieval on the test split, in batches of 32" in " ".join(text.split())
    assert next(line.split("│") for line in text.splitlines() if "│ mine" in line)[2].strip() == "33.33"
    assert "ROC" not in text


def test_before_training_the_initial_model_stands_alone() -> None:
    """Nothing is called by the run's name until there is a trained model."""
    for figures in (RECALL, AREAS):
        text = shown({"initial": figures})
        assert "│ initial" in text
        assert "│ mine" not in text


def test_a_classifier_has_areas_of_the_test_split_and_no_recall() -> None:
    text = shown({"initial": {}, "trained": AREAS})
    assert "area under the ROC curve on the public set's test split" in " ".join(text.split())  # the title is wrapped
    assert "62.5" in text
    assert "75.0" in text
    assert "50.0" not in text
    assert "n/a" in text  # of the initial model, which was not measured
    assert "retrieval" not in text


def test_a_line_of_progress_says_loss_recall_and_who_was_dropped() -> None:
    record = {
        "round": 2, "phase": "train", "seconds": 1.25, "dropped": {"site-9": "no reply"},
        "sites": {"site-1": {"loss/itc": 2.0, "loss/prox": 0.5}, "site-2": {"loss/itc": 1.5}},
        "server": {"val/all/mean/r1": 7.25},
    }  # fmt: skip
    line = progress_line(record)
    assert "round   2 train" in line
    assert "loss 2.000" in line  # (2.5 + 1.5) / 2
    assert "val R@1 7.2" in line
    assert "dropped: site-9: no reply" in line


def compared(average: Interval, worst: Interval) -> Comparison:
    models = (Row("initial", Interval(3.0, 2.0, 4.0), Interval(1.0, 0.0, 2.0)), Row("fedavg", average, worst),
              Row("feddra", Interval(20.0, 18.0, 22.0), Interval(9.0, 7.0, 11.0)))  # fmt: skip
    steps = {"fedavg": "50 / 50", "feddra": "40 / 50"}
    ahead = (Row("local", Interval(9.0, 8.0, 10.0), Interval(9.0, 8.0, 10.0)), Row("fedavg", average, worst))
    return Comparison(1, True, {"site-1": 64, "site-2": 96}, 0, models, ahead, steps)


def test_a_comparison_as_tables() -> None:
    """Figures of models without a sign, differences with one; the counts of pairs, and the steps of a round."""
    models, pairs = tables(compared(Interval(1.5, -0.5, 3.5), Interval(-2.0, -3.0, -1.0)))
    assert "R@1 on the test split, in batches of 32" in models[0]
    assert models[2][0] == ("initial", "3.0 [2.0, 4.0]", "1.0 [0.0, 2.0]", "")
    assert models[2][2] == ("feddra", "20.0 [18.0, 22.0]", "9.0 [7.0, 11.0]", "40 / 50")
    assert "64 to 96 test pairs a site" in pairs[0]
    assert pairs[1][0] == "feddra minus"
    assert pairs[2][1] == ("fedavg", "+1.5 [-0.5, +3.5]", "-2.0 [-3.0, -1.0]")
    shown = markdown(*pairs).splitlines()
    assert shown[2:4] == ["| feddra minus | average | worst site |", "| --- | --- | --- |"]
    assert shown[-1] == "| fedavg | +1.5 [-0.5, +3.5] | -2.0 [-3.0, -1.0] |"


UP, DOWN, BOTH = Interval(2.0, 1.0, 3.0), Interval(-2.0, -3.0, -1.0), Interval(0.5, -1.0, 2.0)


def test_the_last_line_says_whether_the_last_run_is_ahead_of_the_one_before() -> None:
    for average, worst, ahead in ((UP, BOTH, 1), (BOTH, UP, 1), (BOTH, BOTH, 0), (UP, DOWN, 0), (DOWN, UP, 0)):
        line = verdict(compared(average, worst))
        assert line.startswith("feddra is ahead" if ahead else "feddra is not ahead")
        assert "fedavg" in line
        assert "local" not in line
        assert line.endswith("(one seed)")


def test_no_heading_is_cut_at_80_columns(tmp_path: Path) -> None:
    """Nine columns and seven rows, as the probe's subgroups have them: every heading is there whole."""
    heads = [
        "train_on",
        "by",
        "subgroup",
        "test_records",
        "test_patients",
        "accuracy",
        "accuracy_low",
        "accuracy_high",
        "macro_auc",
    ]
    file = tmp_path / "subgroups.csv"
    file.write_text("\n".join([",".join(heads), *["100 %,age,60 to 79,40,31,71.5,60.1,80.2,0.8123"] * 7]))
    table = table_of_file(file)
    assert table is not None
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table)
    shown = console.export_text()
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown
    cells = [line.split("\N{BOX DRAWINGS HEAVY VERTICAL}")[1:-1] for line in shown.splitlines()[2:]]
    columns = zip(*(row for row in cells if len(row) == len(heads)), strict=True)
    assert ["".join(column).replace(" ", "") for column in columns] == [head.replace("_", "") for head in heads]


def test_a_written_table_is_shown_and_a_wide_one_turned(tmp_path: Path) -> None:
    """Numbers have four digits; a picture, a long table and one without rows are named alone."""
    wide = tmp_path / "probe.csv"
    wide.write_text("subset,a,b,c,d,e,f\n100 %,75.873015,2,0.5,nan,,word\n")
    table = table_of_file(wide)
    assert table is not None
    assert [str(column.header) for column in table.columns] == ["subset", "100 %"]
    assert list(map(str, table.columns[1].cells)) == ["75.87", "2", "0.5", "nan", "", "word"]
    narrow = tmp_path / "sites.csv"
    narrow.write_text("site,area\n" + "north,0.123456\n" * 3)
    table = table_of_file(narrow)
    assert table is not None
    assert list(map(str, table.columns[1].cells)) == ["0.1235"] * 3
    narrow.write_text("site,area\n" + "north,0.1\n" * 100)
    assert table_of_file(narrow) is None
    narrow.write_text("site,area\n")
    assert table_of_file(narrow) is None
    assert table_of_file(tmp_path / "figure.png") is None


ESCAPE = "\x1b[2K\x1b[1A\x9b8m\u202ehidden"


def test_no_text_of_a_job_or_run_steers_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An escape sequence could clear the line that says what an engineer is about to accept."""
    job = replace(presets.get("fedavg"), model=replace(presets.get("fedavg").model, text_tower=ESCAPE))
    job = replace(job, data=NamedData("pretrain", job.data.image_size))
    kit = tmp_path / "kit"
    (kit / "local").mkdir(parents=True)
    (kit / "local" / "fedvlp.json").write_text("{}")
    folder = write_job(job, tmp_path / "job", sites=("st-anna",))
    said = CliRunner().invoke(app, ["site", "accept", str(folder), "--kit", str(kit), "--yes"])
    (tmp_path / "run_status.json").write_text(json.dumps({"schema": 1, "status": "finished", "reason": ESCAPE}))
    status = CliRunner().invoke(app, ["jobs", "status", str(tmp_path)])
    record = {"round": 0, "phase": ESCAPE, "seconds": 1.0, "sites": {}, "dropped": {ESCAPE: ESCAPE}}
    Console(width=200).print(plain_table(ESCAPE, (ESCAPE, "x"), [(ESCAPE, 1)]))
    monkeypatch.setattr("sys.argv", ["fedvlp", "report", str(tmp_path / ESCAPE)])
    with pytest.raises(SystemExit):
        main()
    lines = said.output, status.output, progress_line(record), markdown(ESCAPE, (ESCAPE,), [(ESCAPE,)])
    texts = (*lines, *capsys.readouterr())
    for text in texts:
        assert "hidden" in text
        assert all(letter.isprintable() for line in text.split("\n") for letter in line), text
