"""A sweep has the cells that were asked for, pairs them by seed, goes on where it stopped, and refuses mistakes."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedvlp.cli import app
from fedvlp.evaluation import metric_names as names
from fedvlp.run import presets
from fedvlp.run.cells import OTHER_CODE
from fedvlp.run.config import override
from fedvlp.run.sweep import Table, as_rows, grid_of, name_for_folder, seeded, shown, swept, variants, write

AVERAGE = names.over_sites(names.recall("test", 1), names.AVERAGE)
TINY = {
    "data.size": "260",
    "data.image_size": "36",
    "model.image_size": "32",
    "model.init": "random",
    "model.head_hidden": "16",
    "training.batch_size": "8",
    "rounds.rounds": "1",
    "method.local_steps": "1",
}


def test_a_grid_is_read_and_a_list_is_one_value() -> None:
    assert grid_of(["method.rho=0,0.1", "probe.fractions=[0.1,1],[1]"]) == {
        "method.rho": ["0", "0.1"],
        "probe.fractions": ["[0.1,1]", "[1]"],
    }
    for mistake in ("method.rho", "method.rho=", "=1"):
        with pytest.raises(ValueError, match="is not SETTING=VALUE,VALUE"):
            grid_of([mistake])
    with pytest.raises(ValueError, match=r"method\.rho twice"):
        grid_of(["method.rho=0", "method.rho=1"])


def test_a_preset_takes_the_settings_that_it_has() -> None:
    """FedDRA with every rho and rate, FedAvg once for all rho, and both with every rate."""
    both = {name: presets.get(name) for name in ("feddra", "fedavg")}
    made = variants(both, grid_of(["method.rho=0,0.5", "training.lr=0.1,0.2"]))
    assert list(made) == [
        "feddra method.rho=0 training.lr=0.1",
        "feddra method.rho=0 training.lr=0.2",
        "feddra method.rho=0.5 training.lr=0.1",
        "feddra method.rho=0.5 training.lr=0.2",
        "fedavg training.lr=0.1",
        "fedavg training.lr=0.2",
    ]
    one = made["feddra method.rho=0.5 training.lr=0.2"]
    assert (one.method.rho, one.training.lr) == (0.5, 0.2)  # type: ignore[attr-defined]
    assert one == replace(both["feddra"], method=one.method, training=one.training)
    with pytest.raises(ValueError, match="unknown setting 'rh'; did you mean 'rho'"):
        variants(both, {"method.rh": ["0"]})
    with pytest.raises(ValueError, match="rho"):
        variants(both, {"method.rho": ["0", "often"]})


def test_a_value_out_of_range_is_no_absent_setting() -> None:
    """FedRGB refuses to take no local step, FedAvg does not. In one order FedRGB ran once, with neither value."""
    for values in [["0", "5"], ["5", "0"]]:
        both = {name: presets.get(name) for name in ("fedavg", "fedrgb")}
        with pytest.raises(ValueError, match="local_steps is 0; the encoders would never train"):
            variants(both, {"method.local_steps": values})


def test_a_seed_is_that_of_run_and_data() -> None:
    one = seeded(presets.get("fedavg"), "name", 3)
    assert (one.name, one.rounds.seed, one.data.seed) == ("name", 3, 3)  # type: ignore[attr-defined]


def test_a_dry_run_lists_the_runs_and_makes_none(tmp_path: Path) -> None:
    words = ["--seeds", "0-1", "--grid", "training.lr=0.1,0.2", "--set", "rounds.rounds=1", "--runs", str(tmp_path)]
    done = CliRunner().invoke(app, ["sweep", "fedavg", *words, "--dry-run"], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[:3] == [
        "4 cells, 2 at a time",
        "fedavg training.lr=0.1: 1 round, seeds 0-1",
        "fedavg training.lr=0.2: 1 round, seeds 0-1",
    ]
    assert not list(tmp_path.iterdir())


def test_what_a_sweep_sets_itself_is_refused(tmp_path: Path) -> None:
    """It was overridden in silence: two columns of a table had the names of two seeds, and the figures of one."""
    for words, said in [
        (["--grid", "rounds.seed=1,2"], "sweep: rounds.seed is set; the seeds are those of --seeds"),
        (["--set", "data.seed=3"], "sweep: data.seed is set; the seeds are those of --seeds"),
        (["--data", f"table:{__file__},seed=3"], "sweep: data.seed is set; the seeds are those of --seeds"),
        (["--set", "name=mine"], "sweep: name is set; a variant has the name of its preset"),
        (["--jobs", "-1"], "--jobs is -1; give how many runs at a time"),
    ]:
        done = CliRunner().invoke(app, ["sweep", "fedavg", "--runs", str(tmp_path), *words])
        assert said in str(done.exception)
        assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_ctrl_c_ends_it_in_one_sentence(tmp_path: Path) -> None:
    """A terminal sends Ctrl-C to the workers as well, which told of it at length, and those that begin are stopped too.

    Nothing stays behind that would train on.
    """
    from support.provisioned import processes, until

    settings = [
        text for key, value in (TINY | {"rounds.rounds": "1000"}).items() for text in ("--set", f"{key}={value}")
    ]
    command = [sys.executable, "-c", "from fedvlp.cli import main; main()", "sweep", "fedavg", "local", *settings]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while len(list(tmp_path.rglob("config.json"))) < 2:
        assert process.poll() is None
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    (line,) = errors.splitlines()
    assert line.startswith("fedvlp: stopped; resume with: fedvlp sweep fedavg local")
    until(lambda: not processes(str(tmp_path)), "every process of it has ended", 60)


def test_no_two_variants_share_a_folder() -> None:
    """A preset keeps its name; what letters and digits do not tell apart, a digest does."""
    assert name_for_folder("car-mfl") == "car-mfl"
    titles = ["fedavg x=-1", "fedavg x=.1", "fedavg x=/1", "fedavg X=-1", "f" * 80, "f" * 81]
    named = [name_for_folder(title) for title in titles]
    assert len(set(named)) == len(titles)
    assert all(re.fullmatch("[a-z0-9-]{1,64}", name) for name in named)


def test_the_table_by_hand(tmp_path: Path) -> None:
    """Differences 2 and 4: mean 3, deviation sqrt 2, so 3 +- 12.706 * 1. What a cell has not measured stays empty."""
    whole = names.over_sites(names.recall("test", 1, names.WHOLE_SET), names.AVERAGE)
    table = Table(
        {
            ("fedavg", 0): {AVERAGE: 10.0, whole: 1.0},
            ("fedavg", 1): {AVERAGE: 20.0, whole: 1.0},
            ("feddra", 0): {AVERAGE: 12.0},
            ("feddra", 1): {AVERAGE: 24.0},
            ("local", 2): {AVERAGE: 5.0},
        }
    )
    assert [column.figure for column in shown(table)] == [AVERAGE], "whole sets stand where there are no batches"
    heading, rows = as_rows(table)
    assert heading == ["variant", "seeds", "R@1 average (batches of 32)", "minus fedavg"]
    assert rows == [
        ["fedavg", "2", "15.00 (7.07)", ""],
        ["feddra", "2", "18.00 (8.49)", "+3.0 [-9.7, +15.7]"],
        ["local", "1", "5.00", ""],
    ]
    page, cells = write(table, tmp_path)
    assert page.read_text().splitlines()[3] == "| feddra | 2 | 18.00 (8.49) | +3.0 [-9.7, +15.7] |"
    with cells.open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [(line["variant"], line["seed"], line[AVERAGE], line[whole]) for line in lines[:3]] == [
        ("fedavg", "0", "10.0", "1.0"),
        ("fedavg", "1", "20.0", "1.0"),
        ("feddra", "0", "12.0", ""),
    ]


def test_areas_are_shown_in_percent_and_validation_where_nothing_was_tested() -> None:
    area = f"server/{names.auc('test', names.MACRO)}"
    heading, rows = as_rows(Table({("car-mfl", 0): {area: 0.75}}))
    assert (heading[2], rows[0][2]) == ("server macro AUC", "75.00")
    (column,) = shown(Table({("fedavg", 0): {AVERAGE.replace("test", "val"): 1.0}}))
    assert column.figure == AVERAGE.replace("test", "val")


def test_cells_of_other_code_are_told(tmp_path: Path) -> None:
    """A finished run that another fedvlp began is taken, and the table and its file say so."""
    one = presets.get("fedavg")
    for key, value in TINY.items():
        one = override(one, key, value)

    def table() -> Table:
        return swept({"fedavg": override(one, "data.sites", "2")}, [0], tmp_path, 1, lambda *said: None)

    assert table().before == {}
    assert table().origin() == "1 cells; 1 of them had finished before."
    (file,) = tmp_path.rglob("environment.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"code": "0123456789abcdef"}))
    again = table()
    assert again.before == {("fedavg", 0): OTHER_CODE}
    page, _ = write(again, tmp_path)
    last = page.read_text().splitlines()[-1]
    assert last == "1 cells; 1 of them had finished before; 1 were run by a fedvlp with other code."


@pytest.mark.slow
def test_by_command_and_again(tmp_path: Path) -> None:
    """Two presets, two seeds; the second call runs nothing and shows the same; --jobs 0 before it has nothing."""
    settings = [text for key, value in TINY.items() for text in ("--set", f"{key}={value}")]
    command = ["sweep", "fedavg", "local", "--seeds", "0-1", "--sites", "2", "--runs", str(tmp_path), *settings]
    nothing = CliRunner().invoke(app, [*command, "--jobs", "0"])
    assert "no cell has finished" in str(nothing.exception)
    first, again = (CliRunner().invoke(app, [*command, "--jobs", "1"], catch_exceptions=False) for _ in range(2))
    assert first.output.count(": done") == again.output.count(": there already") == 4
    assert first.output.partition("mean (SD)")[2] == again.output.partition("mean (SD)")[2] != ""
    assert "4 of them had finished before" in again.output
    assert (tmp_path / "sweep.md").read_text().partition("\n\n")[0].count("\n") == 3
    assert len((tmp_path / "cells.csv").read_text().splitlines()) == 5
