"""`fedvlp presets` and `fedvlp settings`: lists that a person reads before anything runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.plugins import PULLED, fresh, installed, pulled
from typer.testing import CliRunner

from fedvlp.cli import app
from fedvlp.run.presets import GROUPS, PRESETS, of_plugins


def printed(*arguments: str) -> str:
    """What the command prints, in lines that are wide enough for all of it."""
    done = CliRunner(env={"COLUMNS": "300"}).invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    return done.output


def test_every_preset_is_listed_once_with_a_line_of_its_own() -> None:
    listed = [line.split("│")[1].strip() for line in printed("presets").splitlines() if line.startswith("│")]
    assert sorted(listed) == sorted([*PRESETS, *of_plugins()])
    said = [line for presets in GROUPS.values() for line in presets.values()]
    assert len(set(said)) == len(PRESETS)
    row = next(line for line in printed("presets").splitlines() if "│ feddra " in line)
    assert [cell.strip() for cell in row.split("│")[3:6]] == ["ConVIRT", "5", "6"]
    assert "FedDRA (Shuai et al., 2024)" in row


def test_what_the_line_of_a_preset_counts_is_what_its_run_has() -> None:
    """ "35 sites, 30 rounds" """
    rows = [[cell.strip() for cell in line.split("│")[1:6]] for line in printed("presets").splitlines() if "│" in line]
    counted = [
        (name, number, {"site": sites, "round": rounds}[what])
        for name, line, _, sites, rounds in rows
        for number, what in re.findall(r"(\d+) (site|round)s", line)
    ]
    assert len(counted) >= 4
    assert [each for each in counted if each[1] != each[2]] == []


def test_presets_of_an_installed_plugin_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --plugin, as they are run; a plugin's file is named where its preset is not known."""
    with fresh():
        monkeypatch.syspath_prepend(str(installed(tmp_path / "site", "their_methods", PULLED)))
        assert "│ pulled " in printed("presets")
    file = pulled(tmp_path, "my_method", PULLED.replace('"pulled"', '"mine"'))
    with fresh():
        with pytest.raises(ValueError, match=r"unknown preset 'mine'.* A preset of your own file needs --plugin FILE"):
            printed("settings", "mine")
        assert "│ mine " in printed("presets", "--plugin", str(file))


def test_settings_are_shown_as_set_takes_them_and_changes_are_seen() -> None:
    rows = {
        cells[1].strip(): [cell.strip() for cell in cells[2:5]]
        for line in printed("settings", "feddra", "method", "--set", "method.rho=0.7").splitlines()
        if len(cells := line.split("│")) > 4
    }
    assert rows.keys() >= {"method", "method.mu", "method.rho", "method.align_steps"}
    assert all(key.startswith("method") for key in rows)
    assert rows["method.rho"][:2] == ["0.7", "0.1"]
    assert rows["method.local_steps"][:2] == ["40", "50"]
    assert rows["method.mu"][:2] == ["5.0", ""]
    assert "weight of the global constraint" in rows["method.mu"][2]
    assert "│ training.make_up_warmup" in printed("settings", "feddra", "training")
    assert "one of convirt, gloria" in printed("settings", "feddra", "objective")


def test_a_name_that_no_setting_has_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"feddra has no setting whose name holds 'metod'; did you mean 'method'"):
        printed("settings", "feddra", "metod")
    with pytest.raises(ValueError, match=r"unknown preset 'fedra'; did you mean 'feddra'"):
        printed("settings", "fedra")
