"""Runs killed with SIGKILL at random times and resumed: does each end with the bytes of a run that nobody disturbed?

    python benchmarks/kills.py [--runs 20] [--simulator 2] [--seed 0] [--quick]

A run is killed up to three times, each time after a random part of the time that an undisturbed run takes, then left
to finish. Engine runs (two forked workers) of three methods in turn: one with two phases, one with memory at the
server, one with memory at the sites. ``--simulator`` runs are `nvflare simulator` as it is, its whole process group
killed once. After every kill the checkpoint must be absent or whole. One Markdown table; exit code 1 unless all bytes
agree. Meant to take about 4 processor minutes, half of them the simulator's.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from common import machine, say, table

from fedvlp.flare.jobs import write_job
from fedvlp.run import presets
from fedvlp.run.config import override
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder
from fedvlp.run.simulate import simulate

METHODS = ("feddra", "fedrgb", "local")
SMALL = {
    "data.size": 300, "data.sites": 2, "rounds.rounds": 3, "rounds.evaluate_every": 0, "training.batch_size": 16,
    "method.local_steps": 3, "method.align_steps": 2, "method.aligner_steps": 2,
}  # fmt: skip
KILLS = 3


def small(name: str) -> Experiment:
    """The preset with two sites and a few steps."""
    experiment = presets.get(name)
    for key, value in SMALL.items():
        if not key.startswith("method.") or hasattr(experiment.method, key.removeprefix("method.")):
            experiment = override(experiment, key, str(value))
    return experiment


def engine(experiment: Experiment, folder: RunFolder) -> Callable[[float | None], bool]:
    """Starts the engine in a process of its own; killed after so many seconds. Returns whether it finished."""

    def start(seconds: float | None) -> bool:
        process = multiprocessing.get_context("fork").Process(
            target=simulate, args=(experiment, folder), kwargs={"workers": 2}
        )
        process.start()
        process.join(seconds)
        if process.exitcode is None:
            process.kill()
            process.join()
        return process.exitcode == 0

    return start


def simulator(folder: Path) -> Callable[[float | None], bool]:
    """Starts `nvflare simulator` in ``folder``; its whole process group is killed after so many seconds."""
    command = [str(Path(sys.executable).parent / "nvflare"), "simulator", "job", "-t", "2", "-w", "workspace"]
    environment = {key: value for key, value in os.environ.items() if key != "FEDVLP_HOME"}

    def start(seconds: float | None) -> bool:
        with open(folder / "log.txt", "wb") as log:
            process = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True
            )
            try:
                return process.wait(seconds) == 0
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return False

    return start


def disturbed(
    start: Callable[[float | None], bool], folder: RunFolder, draw: random.Random, whole: float, kills: int
) -> list[str]:
    """Kills and resumes until it has finished; of each kill, when it came and how many phases were complete."""
    noted: list[str] = []
    for _ in range(kills):
        seconds = draw.uniform(0.0, whole)
        if start(seconds):
            return noted
        noted.append(f"{seconds:.1f} s: {len(folder.history())}")  # reading it proves that the checkpoint is whole
    start(None)
    return noted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--simulator", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="three runs of the engine")
    options = parser.parse_args()
    if options.quick:
        options.runs, options.simulator = 3, 0
    say({**machine(), **vars(options)})
    draw, rows = random.Random(options.seed), []
    with tempfile.TemporaryDirectory() as place:
        whole = {name: reference(small(name), Path(place) / "whole") for name in METHODS}
        for index in range(options.runs):
            name = METHODS[index % len(METHODS)]
            folder = RunFolder.create(Path(place) / f"engine-{index}", small(name))
            noted = disturbed(engine(small(name), folder), folder, draw, whole[name][1], KILLS)
            rows.append(row(f"engine, {name}", folder, whole[name][0], noted))
        for index in range(options.simulator):
            home = Path(place) / f"simulator-{index}"
            write_job(small("feddra"), home / "job")
            folder = RunFolder(home / "runs" / "feddra" / "001")
            noted = disturbed(simulator(home), folder, draw, 30.0, 1)
            rows.append(row("simulator, feddra", folder, whole["feddra"][0], noted))
    print(table(["run", "killed after: phases complete", "model", "site memories"], rows) + "\n")
    say(machine())
    sys.exit(any("differ" in cell for cells in rows for cell in cells))


def reference(experiment: Experiment, root: Path) -> tuple[RunFolder, float]:
    """The undisturbed run and its seconds."""
    folder, began = RunFolder.create(root, experiment), time.perf_counter()
    engine(experiment, folder)(None)
    return folder, time.perf_counter() - began


def row(what: str, seen: RunFolder, expected: RunFolder, noted: list[str]) -> list[str]:
    """One line of the table."""
    same = seen.model.exists() and seen.model.read_bytes() == expected.model.read_bytes()
    ours, theirs = memories(seen), memories(expected)
    kept = "same bytes" if ours == theirs else "differ"
    return [what, "; ".join(noted) or "-", "same bytes" if same else "differs", kept if theirs else "none"]


def memories(folder: RunFolder) -> dict[str, bytes]:
    """What the sites remember at the end."""
    files = (folder.path / "sites").rglob("*.safetensors")
    return {str(file.relative_to(folder.path)): file.read_bytes() for file in files}


if __name__ == "__main__":
    main()
