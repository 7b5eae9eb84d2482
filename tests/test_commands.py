"""Every command that README and docs/ show runs as it stands there. Long ones run on a smaller experiment."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from support import programs
from support.checkout import copied

from fedvlp import cli
from fedvlp.cli import laboratory
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.data.synthetic.files import write
from fedvlp.flare.jobs import write_job
from fedvlp.run import presets
from fedvlp.run.config import override

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
GUIDES = [path for folder in ("provisioning", "poc", "studies", "tests") for path in (ROOT / folder).rglob("*.md")]

ELSEWHERE = {
    "make test": "this test is part of it",
    "make poc": "tests/poc/test_poc.py runs it",
    "make docs": "tests/test_site.py runs it",
}
"""A command that is not run here: why."""

RUN_BY = {
    "extending.md": "tests/test_extending.py",
    "reports-of-others.md": "tests/run/test_finding_heads.py",  # on synthetic X-rays: the page's are two downloads
}
"""A page whose commands need files that are not here: the test that writes such files and runs them."""

PROGRAMS = ("make ", "fedvlp ", "nvflare ", "python ", "pip ", "pytest ", "mkdocs ", "git ", "cd ")
SMALL = {"data.size": "700", "rounds.rounds": "1", "method.local_steps": "2", "training.batch_size": "16"}


def blocks(page: str) -> list[tuple[str, str]]:
    """(language, content) of every fenced block."""
    return re.findall(r"^```(\w*)\n(.*?)^```", page, re.DOTALL | re.MULTILINE)


def commands(page: str) -> list[str]:
    """What follows the prompt in the console blocks of a page; a backslash at the end goes on in the next line."""
    found = []
    for language, content in blocks(page):
        if language == "console":
            found += re.findall(r"^\$ (.*)$", content.replace("\\\n", ""), re.MULTILINE)
    return found


COMMANDS = [
    command for page in PAGES if page.name not in RUN_BY for command in commands(page.read_text(encoding="utf-8"))
]


def run(command: str, folder: Path) -> str:
    """The command as a shell would run it with the environment's programs first on the path."""
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    for name in ("FEDVLP_HOME", "MAKEFLAGS", "MAKELEVEL", "MFLAGS"):  # a make that runs this test must not be seen
        environment.pop(name, None)
    return programs.run(command, folder, environment)


def write_main_job(folder: Path, **settings: str) -> None:
    """The main job of a copy of the project, small, with further ``settings`` ("data__sites")."""
    experiment = presets.get("feddra")
    changed = {name.replace("__", "."): value for name, value in settings.items()}
    for key, value in {**SMALL, "method.align_steps": "2", **changed}.items():
        experiment = override(experiment, key, value)
    write_job(experiment, folder / "jobs" / "feddra")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project whose main job is small, and a table of image-report pairs beside it."""
    folder = copied(tmp_path_factory.mktemp("checkout") / "fedvlp")
    write_main_job(folder)
    table = write(SyntheticCohort(sites=2, size=200, image_size=72), folder / "table")
    for entry in table.parent.iterdir():
        shutil.move(entry, folder)
    (folder / "films").mkdir()
    shutil.copy(folder / "images" / "000000.png", folder / "films" / "0001.png")
    film = write(SyntheticCohort(sites=1, size=4, image_size=72), folder / "dicom", format="dicom").parent
    shutil.copy(film / "images" / "000000.dcm", folder / "films" / "0002.dcm")
    return folder


def test_the_readme_begins_with_its_two_commands() -> None:
    assert COMMANDS[:2] == ["make demo", "make test"]


def test_what_is_run_elsewhere_is_shown() -> None:
    assert ELSEWHERE.keys() <= set(COMMANDS)
    for page, test in RUN_BY.items():
        assert (ROOT / "docs" / page).exists()
        assert (ROOT / test).exists()


def test_commands_stand_in_console_blocks() -> None:
    """A command in another block would be missed by the test that runs them."""
    for page in PAGES:
        for language, content in blocks(page.read_text(encoding="utf-8")):
            if language != "console":
                lines = [line.removeprefix("$ ") for line in content.splitlines()]
                assert [line for line in lines if line.startswith(PROGRAMS)] == [], page.name


@cache
def program() -> Any:
    """`fedvlp` with all its commands, whose making takes longer than a page's reading."""
    laboratory.add_installed()
    return typer.main.get_command(cli.app)


def unknown(command: str) -> list[str]:
    """Words of a ``fedvlp`` command that the program does not know: a command or an option."""
    node = program()
    options: set[str] = set()
    for word in shlex.split(command)[1:]:
        inner = getattr(node, "commands", {})  # those of a group
        if inner and not word.startswith("-"):
            if word not in inner:
                return [word]
            node = inner[word]
            options = {option for parameter in node.params for option in parameter.opts}
        elif word.startswith("--") and word.partition("=")[0] not in options | {"--help"}:
            return [word]
    return []


def test_every_command_that_is_named_exists() -> None:
    """Also in prose, and in the guides whose commands need hospitals."""
    for page in [*PAGES, *GUIDES]:
        text = page.read_text(encoding="utf-8")
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        lines = [
            line for _, block in blocks(re.sub(r"(?m)^ +", "", text)) for line in block.replace("\\\n", "").splitlines()
        ]
        for command in [*(line.removeprefix("$ ") for line in lines), *re.findall(r"`([^`\n]+)`", text)]:
            if re.match(r"fedvlp [a-z]", command):
                assert unknown(command) == [], command
            if re.match(r"make [a-z-]+$", command):
                assert command.removeprefix("make ") in targets, command


def test_an_unknown_command_or_option_is_found() -> None:
    assert unknown("fedvlp simulate feddra --set method.mu=0") == []
    assert unknown("fedvlp jobs build --check") == []
    assert unknown("fedvlp simulat feddra") == ["simulat"]
    assert unknown("fedvlp simulate feddra --sead 1") == ["--sead"]


def test_the_demos_runs_lie_beside_it_whatever_the_shell_says(tmp_path: Path) -> None:
    """With FEDVLP_HOME exported, as docs/runs.md has it, they were written there, and the report found no run."""
    for name in ("pyproject.toml", "constraints.txt", "provisioning/requirements.txt", "studies/pyproject.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    installed = tmp_path / "environment" / "bin"
    installed.mkdir(parents=True)
    (tmp_path / "environment" / "ready").touch()
    for name in ("nvflare", "fedvlp"):
        (installed / name).write_text(f'#!/bin/sh\necho "{name} $1 with [$FEDVLP_HOME]"\n')
        (installed / name).chmod(0o755)
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "poc").mkdir()
    shutil.copy(ROOT / "poc" / "demo.sh", tmp_path / "poc")
    make = ["make", "--silent", "demo", "VENV=environment"]
    environment = {**os.environ, "FEDVLP_HOME": str(tmp_path / "runs")}
    for name in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS"):
        environment.pop(name, None)
    subprocess.run(make, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert (tmp_path / "build" / "demo" / "flare.log").read_text() == "nvflare simulator with []\n"


def test_ctrl_c_ends_the_demo_and_says_what_goes_on(tmp_path: Path) -> None:
    """While FLARE works its progress is told."""
    status = "runs/feddra/001/run_status.json"
    flare = f"""mkdir -p runs/feddra/001; echo '  "summary": "round 1",' >{status}; exec sleep 60"""
    for name, does in (("nvflare", flare), ("fedvlp", 'mkdir -p "$3"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    demo = subprocess.Popen(
        [ROOT / "poc" / "demo.sh"], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip
    assert demo.stdout is not None
    assert [demo.stdout.readline() for _ in range(2)][1] == "feddra: round 1\n"
    os.killpg(demo.pid, signal.SIGINT)
    _, errors = demo.communicate(timeout=60)
    assert (demo.returncode, errors) == (130, "stopped; resume with: make demo\n")


def smaller(command: str) -> str:
    """The same ``fedvlp simulate`` with the settings of ``SMALL``, but for those that it sets itself."""
    settings = {key: value for key, value in SMALL.items() if f"{key}=" not in command}
    if "table:" in command:
        settings.pop("data.size")
    elif "--sites" in command:
        settings["data.size"] = "300"
    elif command != "fedvlp simulate feddra":  # that one is the five sites of the job
        settings |= {"data.size": "200", "data.sites": "2"}
    if "feddra" in command:
        settings["method.align_steps"] = "2"
    return command + "".join(f" --set {key}={value}" for key, value in settings.items())


@pytest.mark.slow(seconds=400)
@pytest.mark.timeout(2400)  # it is as many programs as the pages have commands, and slow machines take half an hour
def test_every_command_runs(checkout: Path) -> None:
    """In the order of the pages, since later ones read what earlier ones wrote. `make test-all` is what runs this.

    The main job ends with the same bytes in FLARE's simulator at five threads (the demo) and in the engine. At one
    thread it has one site, since with more a process starts for every task; tests/flare/test_simulator.py does that.
    """
    output: dict[str, str] = {}
    for command in COMMANDS:
        if command in ELSEWHERE:
            continue
        if command.startswith("make "):
            settings = {**SMALL, "method.align_steps": "2"}
            words = " ".join(f"--set {key}={value}" for key, value in settings.items())
            shown = f"{command} VENV=environment SETTINGS='{words}'"
        elif command.startswith("fedvlp simulate") and "--resume" not in command:
            shown = smaller(command)
        else:
            shown = command
        if command == "nvflare simulator jobs/feddra":
            write_main_job(checkout, data__sites="1", data__size="200")
        output[command] = run(shown, ROOT if command == "fedvlp jobs build --check" else checkout)
    demo = output["make demo"]
    for row in ("initial", "local", "fedavg", "feddra"):
        assert re.search(rf"{row} .*\d \[\d+\.\d, \d+\.\d\]", demo), f"the comparison has no {row}"
    assert re.search(r"^feddra is (not )?ahead.*fedavg.*\(one seed\)$", demo, re.MULTILINE)
    assert Path(checkout, re.findall(r"report (\S+)", demo)[-1]).exists()
    assert (checkout / "my-job" / "meta.json").exists()
    assert "torch and torchvision fit: yes" in output["fedvlp doctor"]
    trained = (checkout / "build" / "demo" / "runs" / "feddra" / "001" / "model" / "model.safetensors").read_bytes()
    runs = sorted((checkout / "runs" / "feddra").iterdir())
    same = [folder.name for folder in runs if (folder / "model" / "model.safetensors").read_bytes() == trained]
    assert len(same) == 1, f"the one by fedvlp simulate feddra; the same are {same}"
    loads = [content for language, content in blocks(README) if language == "python" and "load_model(" in content]
    assert len(loads) == 1
    run(f"python -c {shlex.quote(loads[0])}", checkout)
