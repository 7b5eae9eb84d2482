"""Commands of other distributions: a clone has those of studies/; a site's installation says where they are."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from fedvlp.cli import laboratory

STUDIES = Path(__file__).parents[2] / "studies" / "pyproject.toml"


def test_without_the_studies_their_commands_say_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    other = typer.Typer()
    other.command("measure")(lambda: print("measured"))
    monkeypatch.setitem(sys.modules, "lab_command", SimpleNamespace(app=other))
    named = [EntryPoint("measure", "lab_command:app", laboratory.GROUP)]
    monkeypatch.setattr(laboratory, "entry_points", lambda group: named)
    monkeypatch.setattr(laboratory, "app", typer.Typer())
    laboratory.add_installed()
    assert CliRunner().invoke(laboratory.app, ["measure"]).output == "measured\n"
    for words in (["claims", "feddra", "--seeds", "0-4"], ["reproduce", "--help"]):
        error = str(CliRunner().invoke(laboratory.app, words).exception)
        assert error.startswith(f"{words[0]} is a study")
        assert "pip install --no-deps -e studies" in error


def test_the_studies_have_the_commands_that_are_missed() -> None:
    table = STUDIES.read_text(encoding="utf-8").partition(f'[project.entry-points."{laboratory.GROUP}"]\n')[2]
    named = [line.partition(" = ")[0] for line in table.partition("\n\n")[0].splitlines()]
    assert named == list(laboratory.STUDIES)
