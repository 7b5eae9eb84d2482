"""Prints the processes of the POC in a workspace, one a line: id and command.

Those are its start scripts and the programs of FLARE and fedvlp. Their words are compared, and no pattern is made of
the workspace: a path may hold any character. An editor, `tail` or a console that names it is none of them.

python poc/running.py WORKSPACE
"""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import psutil

MODULES = ("nvflare.private.", "fedvlp.flare.", "torch.distributed.")
"""How the modules begin that the kits' scripts and FLARE start. A worker has the workspace as its folder alone."""


def is_ours(words: list[str], folder: str, workspace: str) -> bool:
    """Whether a process with this command line and working folder is one of the POC in ``workspace``."""
    program, inside = Path(words[0]).name, f"{workspace}/"
    if program in ("bash", "sh"):
        return any(word.startswith(inside) and word.endswith("start.sh") for word in words[1:])
    if not re.fullmatch(r"python[0-9.]*", program) or "-m" not in words[:-1]:
        return False
    module = words[words.index("-m") + 1]
    return module.startswith(MODULES) and any(f"{word}/".startswith(inside) for word in (*words, folder))


def main(workspace: str) -> None:
    for process in psutil.process_iter(["pid", "cmdline", "cwd"]):
        words = process.info["cmdline"] or []  # none where it has ended
        if words and is_ours(words, process.info["cwd"] or "", workspace):
            print(process.info["pid"], shlex.join(words))


if __name__ == "__main__":
    main(sys.argv[1])
