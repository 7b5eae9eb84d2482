"""The command line as a person meets it: mistakes are one line, Ctrl-C is 130 and loses nothing."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
from support import programs
from support.plugins import fresh, pulled
from support.report_pages import undrawn
from typer.testing import CliRunner

from fedvlp import __version__
from fedvlp.cli import app, stopping
from fedvlp.cli.run_commands import WITH_RESUME, default_workers
from fedvlp.run import presets
from fedvlp.run.config import override

FEDVLP = Path(sys.executable).parent / "fedvlp"
SMALL = [
    "--sites", "2", "--set", "data.size=160", "--set", "method.local_steps=2", "--set", "training.batch_size=16",
    "--set", "rounds.rounds=2",
]  # fmt: skip


def fedvlp(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([FEDVLP, *arguments], cwd=folder, capture_output=True, text=True, timeout=300, check=False)


def test_a_mistake_is_one_line_for_the_installed_program(tmp_path: Path) -> None:
    """tests/cli/test_mistakes.py has many more."""
    done = fedvlp("simulate", "fedra", folder=tmp_path)
    assert done.returncode == 2
    assert "unknown preset 'fedra'; did you mean 'feddra'?" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_help_waits_for_no_heavy_import() -> None:
    """`fedvlp --help` answers before torch could be imported, which alone takes more than a second."""
    code = """
import sys
from fedvlp.cli import main
sys.argv = ["fedvlp", "--help"]
try:
    main()
finally:
    print(sorted({"torch", "numpy", "nvflare", "rich.progress"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert "simulate" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_shell_completes_commands(tmp_path: Path) -> None:
    asked = {"_FEDVLP_COMPLETE": "complete_bash", "COMP_WORDS": "fedvlp sim", "COMP_CWORD": "1"}
    done = subprocess.run([FEDVLP], env={**os.environ, **asked}, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["simulate"]


def test_the_version_is_told_as_sites_must_agree_on_it(tmp_path: Path) -> None:
    assert programs.forked(["fedvlp", "--version"], tmp_path, os.environ).stdout == f"fedvlp {__version__}\n"


def test_simulate_leaves_a_complete_run_folder(tmp_path: Path) -> None:
    done = programs.forked(
        ["fedvlp", "simulate", "feddra", *SMALL, "--set", "method.align_steps=1", "--set", "rounds.rounds=1"],
        tmp_path, os.environ,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^round ", done.stdout, re.MULTILINE)) == 3, "a line per phase, and the last evaluation"
    run = tmp_path / "runs" / "feddra" / "001"
    expected = {
        "config.json", "environment.json", "partition.json", "metrics.csv", "summary.json", "report.html",
        "checkpoints", "evaluation", "model", "run_status.json", "tb", "writer.lock",
    }  # fmt: skip
    assert {entry.name for entry in run.iterdir()} == expected
    assert len(set(json.loads((run / "partition.json").read_text())["assignment"])) == 2


def test_as_many_sites_at_a_time_as_there_are_cores_for_their_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    fedavg = presets.get("fedavg")
    assert [default_workers(override(fedavg, "training.threads", n)) for n in ("1", "3", "9")] == [8, 2, 1]


@pytest.mark.slow(seconds=12)
def test_ctrl_c_ends_every_process_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted after the first phase: exit code 130, no orphan, and --resume ends with the uninterrupted bytes."""
    from support.provisioned import processes, until

    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [FEDVLP, "simulate", "fedavg", *SMALL], cwd=tmp_path, env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    while not process.stdout.readline().startswith("round"):
        assert process.poll() is None
    os.kill(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.splitlines()[-1] == "fedvlp: stopped; resume with: fedvlp simulate --resume runs/fedavg/001"
    until(lambda: not processes(str(tmp_path)), "every process of it has ended", 60)
    run = tmp_path / "runs" / "fedavg" / "001"
    assert not (run / "model").exists()
    monkeypatch.chdir(tmp_path)
    other = CliRunner().invoke(app, ["simulate", "feddra", "--resume", str(run)])
    assert "--resume is a run of fedavg, not of feddra" in str(other.exception)
    for arguments in (["--resume", str(run)], ["--config", str(run / "config.json")]):
        assert CliRunner().invoke(app, ["simulate", *arguments]).exit_code == 0
    whole = tmp_path / "runs" / "fedavg" / "002"
    assert (run / "model" / "model.safetensors").read_bytes() == (whole / "model" / "model.safetensors").read_bytes()


def test_a_stopped_command_says_what_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Words with a space are quoted, so that the line can be copied; where nothing goes on, none is named."""
    monkeypatch.setattr(stopping, "_again", [])
    assert stopping.said() == "stopped"
    monkeypatch.setattr(sys, "argv", ["/bin/fedvlp", "sweep", "fedavg", "--data", "table:my films.csv"])
    stopping.goes_on_as_typed()
    assert stopping.said() == "stopped; resume with: fedvlp sweep fedavg --data 'table:my films.csv'"
    stopping.goes_on_with("fedvlp", "simulate", "--resume", "runs/fedavg/001")
    assert stopping.said() == "stopped; resume with: fedvlp simulate --resume runs/fedavg/001"


def test_the_command_that_goes_on_names_the_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the command was refused. The folder has brackets, which are a part of its name and no markup."""
    monkeypatch.chdir(tmp_path)
    pulled(tmp_path)
    words = ["simulate", "pulled", "--plugin", "pulled_method.py", "--runs", "b[/x] [y]", "--workers", "1", *SMALL]
    with fresh(), undrawn():
        done = CliRunner().invoke(app, [*words, "--set", "rounds.rounds=1"], catch_exceptions=False)
        assert done.output.startswith("run b[/x] [y]/pulled/001 (pulled)\n")
        resumed = ["fedvlp", "simulate", "--resume", "b[/x] [y]/pulled/001"]
        expected = [*resumed, "--workers", "1", "--plugin", "pulled_method.py"]
        said = stopping.said()
        assert shlex.split(said.removeprefix("stopped; resume with: ")) == expected
        listed = CliRunner().invoke(app, ["runs", "b[/x] [y]"], catch_exceptions=False)
        assert "runs in b[/x] [y]" in listed.output


def test_the_command_that_goes_on_has_every_option_that_is_read_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --workers it trained as many sites side by side as there are cores, whatever had been asked for."""

    def stop(*_: object, **__: object) -> None:
        raise stopping.Stopped

    monkeypatch.setattr(stopping, "_again", [])
    monkeypatch.setattr("fedvlp.run.simulate.simulate", stop)
    values = {
        "workers": ["--workers", "3"], 
        "accept_phi_risk": ["--accept-phi-risk"], "accept_phi_kind": ["--accept-phi-kind", "date"],
        "plugins": ["--plugin", str(pulled(tmp_path))],
    }  # fmt: skip
    assert values.keys() == WITH_RESUME - {"preset", "resume"}
    with fresh(), pytest.raises(stopping.Stopped):
        CliRunner().invoke(app, ["simulate", "pulled", "--runs", str(tmp_path), *SMALL, *chain(*values.values())])
    resumed = ["fedvlp", "simulate", "--resume", f"{tmp_path}/pulled/001", *chain(*values.values())]
    assert shlex.split(stopping.said().removeprefix("stopped; resume with: ")) == resumed


@pytest.mark.slow(seconds=12)
def test_a_name_that_is_no_text_is_no_traceback(tmp_path: Path) -> None:
    """A terminal in a UTF-8 locale refuses what such a name becomes in Python."""
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    command = [os.fsencode(FEDVLP), b"jobs", b"export", b"feddra", b"k\xfc"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (0, b"k\\udcfc\n"), done.stderr
