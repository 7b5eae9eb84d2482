"""`fedvlp ...`, `nvflare ...` and `python ...` in a process of its own that begins with its libraries imported.

Importing is what a short command mostly does. The process is forked from one that has imported them and done nothing
else. What a command imports itself is checked by tests/test_architecture.py, and the program as it is installed runs
wherever a test starts it by its path.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

BIN = Path(sys.executable).parent

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    [
        "fedvlp.cli", "fedvlp.run.simulate", "fedvlp.run.evaluate", "fedvlp.flare.jobs", "fedvlp.report.run_page",
        "scipy", "matplotlib.figure", "matplotlib.backends.backend_svg", "torch.utils.tensorboard", "PIL.Image",
        "pytest",
    ]
)  # fmt: skip

QUOTED = re.compile(r"""'[^']*'|"[^"$`\\]*\"""")
SHELL = re.compile(r"[|<>;&$`*?~\\]")
"""What only a shell understands, outside of quotes."""


LIMIT = 900
"""Seconds for a command."""


def is_plain(command: str) -> bool:
    """Whether this is one `fedvlp` or `python` command, without anything for a shell but quotes."""
    return command.startswith(("fedvlp ", "python ")) and not SHELL.search(QUOTED.sub("", command))


def run(command: str, folder: Path, environment: Mapping[str, str]) -> str:
    """The output of a command in ``folder``, as a shell would run it. Raises AssertionError where it fails."""
    if is_plain(command):
        done = forked(shlex.split(command), folder, environment)
    else:
        done = subprocess.run(
            command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
        )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def forked(words: list[str], folder: Path, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """What ``subprocess.run`` gives for a plain command's words."""
    with TemporaryDirectory() as scratch:
        streams = [Path(scratch, "stdout"), Path(scratch, "stderr")]
        process = _FORKS.Process(target=_main, args=(words, folder, dict(environment), streams))
        process.start()
        process.join(timeout=LIMIT)
        if process.is_alive():
            process.kill()
            process.join()
        code = process.exitcode
        process.close()
        output, errors = (path.read_text(encoding="utf-8", errors="replace") for path in streams)
    assert code is not None
    return subprocess.CompletedProcess(words, code, output, errors)


def kill_after(line: str, command: str, folder: Path, environment: Mapping[str, str]) -> None:
    """Runs a `fedvlp` command as it is installed, and kills it, with all that it started, once it prints ``line``..."""
    process = subprocess.Popen(
        [BIN / "fedvlp", *shlex.split(command)[1:]], cwd=folder, env={**environment, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    while not process.stdout.readline().startswith(line):
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(60)
    process.stdout.close()


def _main(words: list[str], folder: Path, environment: dict[str, str], streams: list[Path]) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, path in enumerate(streams, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    if words[0] == "python":
        _python(words[1:])
        return
    if words[0] == "nvflare":
        from nvflare.cli import main as nvflare

        os.umask(0o022)  # what FLARE writes is judged as it is where nobody changed that
        sys.argv = words
        sys.exit(nvflare())
    sys.argv = ["fedvlp", *words[1:]]
    from fedvlp.cli import main

    main()


def _python(words: list[str]) -> None:
    """`python -c CODE`, `python -m MODULE ...` or `python FILE ...`, in the present folder."""
    sys.path.insert(0, str(Path.cwd()))
    if words[0] == "-c":
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    elif words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(str(Path(words[0]).absolute()), run_name="__main__")
