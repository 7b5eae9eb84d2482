"""docs/extending.md: its files are complete, compute what they say, and its commands run."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import programs
from support.plugins import fresh
from support.simulator import assert_same_metrics
from typer.testing import CliRunner

from fedvlp.cli import app, new_command
from fedvlp.core.types import VLOutput
from fedvlp.data.report_text import clean_report
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.data.synthetic.files import write
from fedvlp.run import plugins, presets
from fedvlp.run.config import choose, override
from fedvlp.run.folder import RunFolder

BIN = Path(sys.executable).parent
ROOT = Path(__file__).parents[1]
KILLED = "fedvlp simulate my-method --plugin my_method.py"
SMALL = {"method.local_steps": "2", "training.batch_size": "16"}
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
FILE = re.compile(r"^\*\*`(\w+\.py)`\*\*\n\n```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
FILES: dict[str, str] = dict(FILE.findall(PAGE))
COMMANDS = [
    line.removeprefix("$ ")
    for block in re.findall(r"^```console\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    for line in block.splitlines()
]


def prepare(folder: Path, studies: int = 300) -> None:
    """What the page's commands find in ``folder``: its files (but those that a command writes), and some films."""
    for name, text in FILES.items():
        if name != "my_method.py":
            (folder / name).write_text(text, encoding="utf-8")
    cohort = SyntheticCohort(sites=2, size=studies, image_size=72).build()
    films = folder / "films"
    for image in (write(cohort, films).parent / "images").iterdir():
        image.rename(films / image.name)
    with (films / "records.jsonl").open("w", encoding="utf-8") as lines:
        for row, (report, patient) in enumerate(zip(cohort.reports, cohort.patients, strict=True)):
            lines.write(json.dumps({"image": f"{row:06d}.png", "report": report, "patient": patient}) + "\n")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    with fresh():
        yield


def module(name: str, folder: Path) -> Any:
    """A file of the page, as the command line imports it."""
    (folder / name).write_text(FILES[name], encoding="utf-8")
    return plugins.use(folder / name).module


def test_the_page_has_a_file_of_every_kind(tmp_path: Path) -> None:
    assert len(FILES) == PAGE.count("```python") == 6
    shown = set(plugins.TABLES) - {"GROUPS", "FEDERATIONS"}  # where presets are listed, and sources that are sites
    tables = {table for name in FILES for table in plugins.TABLES if hasattr(module(name, tmp_path), table)}
    assert tables == shown
    assert all(f"`{table}`" in PAGE for table in plugins.TABLES)


def test_the_method_is_the_one_that_the_command_writes(tmp_path: Path) -> None:
    CliRunner().invoke(app, ["new", "method", "my-method", "--into", str(tmp_path)], catch_exceptions=False)
    assert (tmp_path / "my_method.py").read_text() == FILES["my_method.py"] == (
        new_command.TEMPLATES / "my_method.py.txt"
    ).read_text()  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_linted_as_fedvlp_is(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(FILES[name], encoding="utf-8")
    for command in (["check", "--ignore", "I001"], ["format", "--check"]):
        program = [BIN / "ruff", *command, "--config", ROOT / "pyproject.toml", tmp_path / name]
        done = subprocess.run(program, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_the_objective_by_hand(tmp_path: Path) -> None:
    """Two orthogonal pairs, t = 2, b = -1: logits 1 on the diagonal and -1 off it, so every term is log sigmoid 1.

    The sum over the four is divided by the two images: 2 log(1 + 1/e).
    """
    objective = module("siglip.py", tmp_path).SigLIPConfig(scale=2.0, bias=-1.0).build()
    unit = torch.eye(2)
    (term,) = objective(VLOutput(unit, unit), {}).values()
    assert term.item() == pytest.approx(2 * math.log(1 + math.exp(-1)), rel=1e-6)
    assert objective(VLOutput(unit, None), {}) == {}
    chosen = override(presets.get("fedavg"), "objective", "siglip")
    assert override(chosen, "objective.bias", "-5").objective.bias == -5.0  # type: ignore[attr-defined]


def test_the_evaluation_by_hand(tmp_path: Path) -> None:
    """Pairs at distance 0 and sqrt 2: alignment 1. Vectors at distances sqrt 2, 2 and sqrt 2: log of a mean."""
    measures = module("uniformity.py", tmp_path)
    image = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    text = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    assert measures.alignment(image, text) == pytest.approx(1.0)
    around = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    expected = math.log((2 * math.exp(-4) + math.exp(-8)) / 3)
    assert measures.uniformity(around) == pytest.approx(expected, rel=1e-5)


def test_a_dataset_of_arrays_is_a_cohort(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (12, 20, 20)).astype(np.uint8)
    patients = [str(row) for row in range(12)]
    np.savez(tmp_path / "pairs.npz", image=pixels, report=["no acute finding"] * 12, patient=patients)
    cohort = module("my_dataset.py", tmp_path).PairsSource(path=str(tmp_path / "pairs.npz"), image_size=36).build()
    assert (len(cohort), set(cohort.reports)) == (12, {"no acute finding"})
    assert cohort.images(np.arange(12)).std() > 30


def test_the_source_reads_what_was_written(tmp_path: Path) -> None:
    """Every record once, hashed; a short report is left out and counted; a broken line is named without its content."""
    prepare(tmp_path, studies=12)
    lines = tmp_path / "films" / "records.jsonl"
    written = lines.read_text().splitlines()
    lines.write_text("\n".join([*written, '{"image": "x.png", "report": "Clear.", "patient": "DOE"}']))
    plugins.use(tmp_path / "lines_source.py")
    kind = choose("source", "lines", "SOURCES", {})
    cohort, summary = kind(path=str(lines), image_size=36).prepare()
    assert (summary["used"], summary["skipped: report empty or too short"]) == (len(written), 1)
    assert set(cohort.reports) == {clean_report(json.loads(line)["report"], 3) for line in written}
    assert cohort.images(cohort.rows("train")[:1]).shape == (1, 36, 36)
    lines.write_text("DOE, JANE\n")
    with pytest.raises(ValueError, match="a line is no object") as refused:
        kind(path=str(lines)).build()
    assert "DOE" not in str(refused.value)


@pytest.mark.slow(seconds=5)
def test_the_package_for_hospitals_builds_and_is_found(tmp_path: Path) -> None:
    """The page's pyproject.toml with the page's method: a wheel whose entry point is the group that fedvlp looks in."""
    (described,) = re.findall(r"^ *```toml\n( *\[build-system\].*?)^ *```", PAGE, re.DOTALL | re.MULTILINE)
    (tmp_path / "pyproject.toml").write_text(textwrap.dedent(described), encoding="utf-8")
    (tmp_path / "lab_methods").mkdir()
    (tmp_path / "lab_methods" / "__init__.py").write_text(FILES["my_method.py"], encoding="utf-8")
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", tmp_path]
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", *options, tmp_path], cwd=tmp_path, check=True, timeout=120
    )
    with zipfile.ZipFile(tmp_path / "lab_methods-1.0-py3-none-any.whl") as wheel:
        assert "lab_methods/__init__.py" in wheel.namelist()
        named = wheel.read("lab_methods-1.0.dist-info/entry_points.txt").decode()
    assert named.split() == [f"[{plugins.GROUP}]", "lab", "=", "lab_methods"]


def smaller(command: str) -> str:
    """The same ``fedvlp`` command with fewer steps, where it trains or writes a job.

    The page's method keeps five sites, as many as its job has threads, and two rounds, between which it is killed.
    """
    if not command.startswith(("fedvlp simulate", "fedvlp jobs export")) or "--resume" in command:
        return command
    settings = {**SMALL, "rounds.rounds": "2" if "my-method" in command else "1"}
    if "--data" not in command:
        settings |= {"data.size": "700"} if "my-method" in command else {"data.size": "200", "data.sites": "2"}
    return command + "".join(f" --set {key}={value}" for key, value in settings.items())


@pytest.mark.slow(seconds=150)
def test_every_command_runs(tmp_path: Path) -> None:
    """In the page's order. The method's run is killed after its first round, and goes on by the page's own command.

    It then has the bytes, the metrics and the settings of the undisturbed run of its job in FLARE's simulator. Each
    command is a process of its own, so nothing is known but what is said and what is on disk.
    """
    prepare(tmp_path)
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    # else pytest would at its end delete what earlier sessions left, for minutes
    environment["PYTEST_DEBUG_TEMPROOT"] = str(tmp_path)
    runs = tmp_path / "runs" / "my-method"
    mine, flare = RunFolder(runs / "001"), RunFolder(runs / "002")
    output = {}
    for command in COMMANDS:
        if command == KILLED:
            programs.kill_after("round", smaller(command), tmp_path, environment)
            assert not mine.model.exists()
        else:
            output[command] = programs.run(smaller(command), tmp_path, environment)
    assert output.keys() == set(COMMANDS) - {KILLED}
    assert (tmp_path / "my_method.py").read_text() == FILES["my_method.py"]
    assert mine.model.read_bytes() == flare.model.read_bytes()
    assert json.loads(flare.config.read_text()) == json.loads(mine.config.read_text())
    assert_same_metrics(flare, mine)
    for copy in (flare.plugin("my_method"), tmp_path / "my-method-job" / "app" / "custom" / "my_method.py"):
        assert copy.read_text() == FILES["my_method.py"]
    (test,) = [said for command, said in output.items() if "pytest" in command]
    assert "7 passed" in test
    told = "".join(said for command, said in output.items() if "runs/my-method/001" in command)
    assert "retrieval" in told
    assert "report.html" in told
    table = (tmp_path / "my-runs" / "fedavg" / "001" / "evaluation" / "uniformity.csv").read_text().splitlines()
    assert re.fullmatch(r"site-1(,-?\d\.\d{4}){3}", table[1])
    assert "Paired cosine" in (tmp_path / "my-runs" / "fedavg" / "001" / "report.html").read_text()
