"""Every command of the README runs. Long ones run on a smaller experiment: same words, fewer steps."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fedvlp.data.synthetic.cohort import SyntheticCohort
from fedvlp.data.synthetic.files import write
from fedvlp.flare.jobs import write_job
from fedvlp.run import presets
from fedvlp.run.config import override

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
COMMANDS = [
    line.removeprefix("$ ")
    for block in re.findall(r"```console\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    for line in block.splitlines()
    if line.startswith("$ ")
]
SMALL = {"data.size": "700", "rounds.rounds": "1", "method.local_steps": "2", "training.batch_size": "16"}


def run(command: str, folder: Path) -> str:
    """The command as a shell would run it with the environment's programs first on the path."""
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    environment.pop("FEDVLP_HOME", None)
    done = subprocess.run(
        command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project whose main job is small, and a table of image-report pairs beside it."""
    folder = tmp_path_factory.mktemp("checkout") / "fedvlp"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".venv", ".git", "runs", "build", ".*_cache"))
    experiment = presets.get("feddra")
    for key, value in {**SMALL, "method.align_steps": "2"}.items():
        experiment = override(experiment, key, value)
    write_job(experiment, folder / "jobs" / "feddra")
    table = write(SyntheticCohort(sites=3, size=300, image_size=72), folder / "table")
    for entry in table.parent.iterdir():
        shutil.move(entry, folder)
    return folder


def test_the_readme_has_its_two_commands_and_no_unknown_one() -> None:
    assert COMMANDS[:2] == ["make demo", "make test"]
    programs = ("simulate ", "report ", "jobs ", "doctor", "evaluate ", "prepare ")
    known = ("make ", "nvflare simulator ", *(f"fedvlp {program}" for program in programs))
    assert all(command.startswith(known) for command in COMMANDS)


@pytest.mark.slow(seconds=250)
def test_every_command_runs(checkout: Path) -> None:
    """In the README's order, since later ones read what earlier ones wrote. `make test-all` is what runs this.

    The main job ends with the same bytes in FLARE's simulator at five threads (the demo), in the engine, and at one.
    """
    for command in COMMANDS:
        if command in ("make test", "make test-all"):
            continue
        if command == "make demo":
            (checkout / "environment").symlink_to(sys.prefix)
            for name in ("pyproject.toml", "constraints.txt"):  # older than the environment: make must not reinstall
                os.utime(checkout / name, (0, 0))
            out = run("make demo VENV=environment", checkout)
            assert re.search(r"initial .*\d", out)
            assert Path(checkout, re.findall(r"report (\S+)", out)[-1]).exists()
        elif command.startswith("fedvlp simulate"):
            given = {key for key in SMALL if f"{key}=" in command}
            small = {key: value for key, value in SMALL.items() if key not in given}
            if "table:" in command:
                small.pop("data.size")
            if "feddra" in command:
                small["method.align_steps"] = "2"
            run(command + "".join(f" --set {key}={value}" for key, value in small.items()), checkout)
        elif command == "fedvlp jobs build --check":
            run(command, ROOT)
        else:
            run(command, checkout)
    assert (checkout / "my-job" / "meta.json").exists()
    runs = checkout / "runs" / "feddra"
    assert len(list(runs.iterdir())) == 4, "three by simulate, one by nvflare simulator"
    same = [checkout / "build" / "demo" / "runs" / "feddra" / "001", runs / "001", runs / "004"]
    assert len({(run / "model" / "model.safetensors").read_bytes() for run in same}) == 1
