"""The command `nvflare simulator` as a user types it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

NVFLARE = Path(sys.executable).parent / "nvflare"


def simulator(job: Path, folder: Path, threads: int) -> subprocess.CompletedProcess[str]:
    """Runs a job in ``folder``; results land in ``folder/runs``, FLARE's own files in ``folder/workspace``.

    FLARE picks a port for each site's process before that process opens it. Where another program (a test beside this
    one) took it in between, the site is lost at the start and its share of the model with it: then the run is repeated.
    """
    environment = {key: value for key, value in os.environ.items() if key != "FEDVLP_HOME"}
    for _ in range(3):
        done = subprocess.run(
            [NVFLARE, "simulator", job, "-t", str(threads), "-w", folder / "workspace"],
            cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
        if "Communication error with client" not in done.stdout + done.stderr:
            break
        shutil.rmtree(folder / "runs", ignore_errors=True)
    return done
