"""The scripts of the POC, without FLARE: which folder they empty, which processes they stop, what the shell may say."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.provisioned import BIN, free_port, until

POC = Path(__file__).parents[2] / "poc"
STOPS = 'echo "$@" >>"$CALLS"\n[ "$2" != stop ] || [ ! -e "$ON_STOP" ] || kill $(cat "$ON_STOP")\n'
"""In the place of `nvflare`: notes what it was called with; `nvflare poc stop` ends the processes of a list."""
LASTING = "import time\ntime.sleep(60)\n"


class Shell:
    """Calls scripts of the POC in a folder of their own, with an `nvflare` that starts nothing."""

    def __init__(self, folder: Path, poc: Path) -> None:
        self.folder, self.poc = folder, poc
        self.workspace = poc / "workspace"
        self.calls, self.on_stop = folder / "calls", folder / "on_stop"
        (folder / "bin").mkdir()
        (folder / "bin" / "nvflare").write_text(f"#!/usr/bin/env bash\n{STOPS}")
        (folder / "bin" / "nvflare").chmod(0o755)

    def __call__(self, script: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        own = {
            "PATH": f"{self.folder / 'bin'}:{BIN}:{os.environ['PATH']}", "HOME": str(self.folder / "home"),
            "POC_FOLDER": str(self.poc), "CALLS": str(self.calls), "ON_STOP": str(self.on_stop),
            "POC_PORT": str(free_port()), **variables,
        }  # fmt: skip
        return subprocess.run(
            [POC / script, *words], cwd=self.folder, env={**os.environ, **own}, capture_output=True, text=True,
            timeout=100, check=False,
        )  # fmt: skip


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path, tmp_path / "c++.1" / "poc")


Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a program; all of them end with the test."""
    started = []

    def run(*words: str | Path, folder: Path) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(words, cwd=folder))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()


def watchdog(shell: Shell, start: Start) -> subprocess.Popen[bytes]:
    """A site's script as FLARE starts it, which lasts."""
    script = shell.workspace / "fedvlp" / "prod_00" / "site-1" / "startup" / "sub_start.sh"
    script.parent.mkdir(parents=True)
    script.write_text("while :; do sleep 0.1; done\n")
    return start("bash", script, folder=shell.folder)


def module(shell: Shell, start: Start, name: str, *words: str | Path, folder: Path) -> subprocess.Popen[bytes]:
    """`python -m NAME` of a module that lasts, in the place of FLARE's or fedvlp's."""
    file = folder / f"{name.replace('.', '/')}.py"
    file.parent.mkdir(parents=True)
    for package in file.relative_to(folder).parents[:-1]:
        (folder / package / "__init__.py").touch()
    file.write_text(LASTING)
    return start(sys.executable, "-u", "-m", name, *words, folder=folder)


@pytest.mark.parametrize("script", ["start.sh", "run.sh"])
def test_a_folder_that_no_poc_made_is_refused_and_stays(script: str, shell: Shell) -> None:
    """POC_FOLDER=. removed the checkout."""
    shell.poc.mkdir(parents=True)
    (shell.poc / "thesis.tex").write_text("years of work")
    done = shell(script)
    assert done.returncode == 2, done
    assert "Set POC_FOLDER to a new folder, or remove this one yourself" in done.stderr
    assert [file.name for file in shell.poc.iterdir()] == ["thesis.tex"]
    assert not shell.calls.exists(), "nothing was started"


@pytest.mark.parametrize("there", [False, True])
def test_a_new_or_empty_folder_is_taken_and_emptied_at_the_next_start(there: bool, shell: Shell) -> None:
    if there:
        shell.poc.mkdir(parents=True)
    assert shell("start.sh").returncode == 0
    (shell.poc / "result").mkdir()
    (shell.poc / ".hidden").touch()
    assert shell("start.sh").returncode == 0
    assert {file.name for file in shell.poc.iterdir()} == {".fedvlp-poc", "home", "project.yml"}
    assert [line.split()[:2] for line in shell.calls.read_text().splitlines()] == [
        ["poc", "prepare"],
        ["poc", "start"],
    ] * 2


@pytest.mark.parametrize("script", ["start.sh", "run.sh"])
def test_a_poc_that_runs_is_neither_emptied_nor_stopped(script: str, shell: Shell, start: Start) -> None:
    assert shell("start.sh").returncode == 0
    running = watchdog(shell, start)
    done = shell(script)
    assert done.returncode == 2, done
    assert "a POC runs in " in done.stderr
    assert len(shell.calls.read_text().splitlines()) == 2, "of the first start alone"
    assert shell.workspace.exists()
    assert running.poll() is None


def test_stop_finds_the_pocs_own_processes_in_any_path_and_no_others(shell: Shell, start: Start) -> None:
    """It took the path for a pattern: in this one nothing was running, and in others it killed whoever read a log."""
    workspace = shell.workspace
    site = workspace / "fedvlp" / "prod_00" / "site-1"
    log = site / "log.txt"
    own = [
        watchdog(shell, start),
        module(shell, start, "nvflare.private.fed.app.client.client_train", "-m", site, folder=shell.folder / "a"),
        module(shell, start, "fedvlp.flare.worker", folder=site),
    ]
    log.touch()
    others = [
        start("tail", "-f", log, folder=shell.folder),
        start(sys.executable, "-c", LASTING, log, folder=shell.folder),
        module(shell, start, "nvflare.fuel.hci.tools.admin", "-m", site, folder=shell.folder / "b"),
        module(
            shell,
            start,
            "nvflare.private.fed.app.client.client_train",
            "-m",
            f"{workspace}2/site-1",
            folder=shell.folder / "c",
        ),
    ]
    until(lambda: len(listed(workspace)) == 3, "all have begun", 30)
    assert listed(workspace) == {process.pid for process in own}
    shell.on_stop.write_text(" ".join(str(process.pid) for process in own))
    done = shell("stop.sh")
    assert (done.returncode, done.stdout) == (0, "stopped, no process left\n"), done
    assert [process.poll() is None for process in others] == [True] * 4
    assert shell("stop.sh").stdout == "nothing of the POC is running\n"


def listed(workspace: Path) -> set[int]:
    """The ids that poc/running.py prints."""
    command = [sys.executable, POC / "running.py", workspace]
    said = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout
    return {int(line.split()[0]) for line in said.splitlines()}


@pytest.mark.slow(seconds=25)
def test_what_does_not_stop_is_killed(shell: Shell, start: Start) -> None:
    process = watchdog(shell, start)
    done = shell("stop.sh")
    assert process.wait(10) == -9
    assert done.stderr.startswith(f"these did not stop and are killed:\n{process.pid} bash "), done


def test_where_nothing_can_be_listed_nothing_is_said_to_have_stopped(shell: Shell) -> None:
    (shell.folder / "bin" / "python3").symlink_to("/bin/false")
    done = shell("stop.sh")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == "the POC's processes cannot be listed; put .venv/bin on the path\n"


@pytest.mark.parametrize("given", ["", "/srv/towers"])
def test_the_poc_reads_the_users_towers_and_keeps_its_runs(given: str, shell: Shell) -> None:
    """Its HOME is a folder of its own, where no tower was fetched, and FEDVLP_HOME would mix its runs with others."""
    (shell.folder / "bin" / "nvflare").write_text("#!/usr/bin/env bash\nenv | grep -E '^(FEDVLP_|HOME=)'\n")
    done = shell("start.sh", FEDVLP_HOME=str(shell.folder / "runs"), FEDVLP_TOWERS=given)
    assert done.returncode == 0, done
    towers = given or f"{shell.folder}/home/.cache/fedvlp/towers"
    seen = {f"FEDVLP_TOWERS={towers}", f"HOME={shell.poc}/home"}
    assert set(done.stdout.splitlines()) == seen


def test_what_flare_would_fail_with_later_is_refused_at_once(shell: Shell) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = str(other.getsockname()[1])
        for variables, said in (
            ({"POC_PORT": taken}, f"port {taken} cannot be opened (Address already in use)"),
            ({"POC_PORT": "70000"}, "expected a number from 1024 to 65535"),
            ({"POC_PORT": "abc"}, "expected a number from 1024 to 65535"),
            *(({"POC_FOLDER": str(shell.folder / name)}, "to a folder of such a name") for name in ODD_NAMES),
        ):
            done = shell("run.sh", **variables)
            assert (done.returncode, said in done.stderr) == (2, True), (variables, done.stderr)
            assert not shell.calls.exists(), "nothing was started"


ODD_NAMES = ("my poc", "O'Brien", "poc#2", "lead@site", "poc(1)", "p$c", "K\u00f6ln", "a;b")


def test_a_job_of_sites_that_are_not_there_is_not_submitted(shell: Shell) -> None:
    kits = shell.workspace / "fedvlp" / "prod_00"
    for kit in ("localhost", "lead@localhost.org", "site-1", "site-2", "site-3"):
        (kits / kit).mkdir(parents=True)
    deploy_map = json.dumps({"deploy_map": {"app": ["server", *(f"site-{number}" for number in range(1, 6))]}})
    (shell.folder / "bin" / "fedvlp").write_text(
        f'#!/usr/bin/env bash\nmkdir -p "$4"\necho \'{deploy_map}\' >"$4/meta.json"\n'
    )
    (shell.folder / "bin" / "fedvlp").chmod(0o755)
    done = shell("submit.sh", "fedavg", "--sites", "5")
    assert done.returncode == 2
    assert "sites that this POC lacks (site-4, site-5)" in done.stderr
    assert not shell.calls.exists()
