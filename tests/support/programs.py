"""`fedvlp ...` in a process of its own that begins with its libraries imported, which a short command mostly waits for.

The process is forked from one that has imported them and done nothing else. What a command imports itself is checked by
tests/test_architecture.py, and the program as it is installed runs wherever a test starts it by its path.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    ["fedvlp.cli", "fedvlp.run.simulate", "fedvlp.run.evaluate", "fedvlp.flare.jobs", "scipy"]
)

SHELL = re.compile(r"[|<>;&$`*?~]")
"""What only a shell understands."""


LIMIT = 900
"""Seconds for a command."""


def is_plain(command: str) -> bool:
    """Whether this is one `fedvlp` command, without anything for a shell but quotes."""
    return command.startswith("fedvlp ") and not SHELL.search(command)


def run(command: str, folder: Path, environment: Mapping[str, str]) -> str:
    """The output of a command in ``folder``, as a shell would run it. Raises AssertionError where it fails."""
    if is_plain(command):
        with TemporaryDirectory() as scratch:
            code, output, errors = _forked(command, folder, environment, Path(scratch))
    else:
        done = subprocess.run(
            command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
        )
        code, output, errors = done.returncode, done.stdout, done.stderr
    assert code == 0, f"{command}\n{output[-3000:]}\n{errors[-3000:]}"
    return output


def _forked(command: str, folder: Path, environment: Mapping[str, str], scratch: Path) -> tuple[int, str, str]:
    """Exit code, output and errors of a plain command."""
    streams = [scratch / "stdout", scratch / "stderr"]
    words = shlex.split(command)[1:]
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
    return code, output, errors


def _main(words: list[str], folder: Path, environment: dict[str, str], streams: list[Path]) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, path in enumerate(streams, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.argv = ["fedvlp", *words]
    from fedvlp.cli import main

    main()
