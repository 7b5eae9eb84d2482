"""`fedvlp new method`: what it writes runs as it is, and nothing is overwritten."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import programs
from support.plugins import fresh
from typer.testing import CliRunner

from fedvlp.cli import app
from fedvlp.run import plugins, presets

RUFF = Path(sys.executable).parent / "ruff"
PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    with fresh():
        yield


def new(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["new", "method", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


@pytest.mark.slow(seconds=25)
def test_the_method_its_preset_and_its_test_run(tmp_path: Path) -> None:
    """Under another name than the template's, in a folder that is not there yet; linted as fedvlp itself is."""
    output = new("fed-near", "--into", str(tmp_path / "lab"))
    file, test = tmp_path / "lab" / "fed_near.py", tmp_path / "lab" / "test_fed_near.py"
    assert f"fedvlp simulate fed-near --plugin {file}" in output
    assert sorted(entry.name for entry in file.parent.iterdir()) == [file.name, test.name]
    for text in (file.read_text(), test.read_text()):
        assert "my_method" not in text.lower()
        assert "mymethod" not in text.lower()
    lint = [RUFF, "check", "--config", PYPROJECT, "--ignore", "I001", file, test]  # fedvlp is not first party there
    done = subprocess.run(lint, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    # with a folder of its own: else, at its end, it would delete what earlier sessions of pytest left, for minutes
    command = ["python", "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'base'}", test.name]
    done = programs.forked(command, test.parent, os.environ)
    assert "7 passed" in done.stdout, done.stdout
    assert type(plugins.use(file).table("PRESETS")["fed-near"].method).__name__ == "FedNear"
    assert presets.get("fed-near").name == "fed-near"


def test_a_name_that_cannot_be(tmp_path: Path) -> None:
    """What is written must run as a plugin, whose rules for names are the same."""
    for name, said in [
        ("1st", "no name for a method"),
        ("a b", "no name"),
        ("FedX", "lower-case"),
        ("../x", "no name"),
        ("fedprox", "has a preset 'fedprox' already"),
        ("my_method", "the name of a method is 'my_method'; it takes 1 to 64 characters of a-z, 0-9 and '-'"),
        ("random", "'random' is the name of another module"),
        ("torch", "'torch' is the name of another module"),
        ("fedvlp", "'fedvlp' is the name of another module"),
        ("method", "the class would be called Method, which means something else in its file"),
        ("none", "the class would be called None"),
    ]:
        with pytest.raises(ValueError, match=said):
            new(name, "--into", str(tmp_path))
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("there", ["fed_near.py", "test_fed_near.py"])
def test_nothing_is_overwritten(there: str, tmp_path: Path) -> None:
    (tmp_path / there).write_text("thesis")
    with pytest.raises(FileExistsError, match="is there already"):
        new("fed-near", "--into", str(tmp_path))
    assert [(entry.name, entry.read_text()) for entry in tmp_path.iterdir()] == [(there, "thesis")]
