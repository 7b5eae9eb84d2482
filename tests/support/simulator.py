"""The command `nvflare simulator` as a user types it, and what its run must have in common with the engine's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from fedvlp.core.metric_keys import TIMES
from fedvlp.run.folder import RunFolder

NVFLARE = Path(sys.executable).parent / "nvflare"
PORT_TAKEN = "Communication error with client"

REPEATED: list[str] = []
"""Starts of this process that were repeated; conftest.py takes them out and reports them at the end."""


def simulator(job: Path, folder: Path, threads: int, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a job in ``folder``; results land in ``folder/runs``, FLARE's own files in ``folder/workspace``.

    FLARE picks a port for each site's process before that process opens it. Where another program (a test beside this
    one) took it in between, the site is lost at the start and its share of the model with it. Such a run is repeated
    once, and counted; a second time is a failure.
    """
    done = _run(job, folder, threads, environment)
    if PORT_TAKEN in done.stdout + done.stderr:
        REPEATED.append(f"nvflare simulator {job.name} -t {threads}")
        shutil.rmtree(folder / "runs", ignore_errors=True)
        done = _run(job, folder, threads, environment)
        assert PORT_TAKEN not in done.stdout + done.stderr, "FLARE lost a site at the start twice"
    return done


def _run(job: Path, folder: Path, threads: int, extra: dict[str, str]) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "FEDVLP_HOME"}
    return subprocess.run(
        [NVFLARE, "simulator", job, "-t", str(threads), "-w", folder / "workspace"],
        cwd=folder, env={**environment, **extra}, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip


def assert_same_metrics(flare: RunFolder, engine: RunFolder) -> None:
    """Every metric of every site agrees, seconds aside (a site that lacks a modality may have none of retrieval)."""
    compared = 0
    for theirs, ours in zip(flare.history(), engine.history(), strict=True):
        assert (theirs["round"], theirs["phase"], theirs["dropped"]) == (ours["round"], ours["phase"], {})
        assert theirs["server"] == ours["server"]
        for site, metrics in ours["sites"].items():
            expected = {name: value for name, value in metrics.items() if name not in TIMES}
            assert {name: value for name, value in theirs["sites"][site].items() if name not in TIMES} == expected
            compared += len(expected)
    assert compared
