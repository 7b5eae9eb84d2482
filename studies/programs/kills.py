"""Runs killed with SIGKILL at random times and resumed: does each end with the bytes of a run that nobody disturbed?

    python studies/programs/kills.py [--runs 20] [--simulator 2] [--provisioned 6] [--seed 0] [--quick]

A run is killed up to three times, each time after a random part of the time that an undisturbed run takes, then left
to finish. Three methods in turn: one with two phases, one with memory at the server, one with memory at the sites.

- Engine runs have two forked workers; their parent is killed.
- ``--simulator`` runs are `nvflare simulator` as it is; its whole process group is killed, once.
- ``--provisioned`` runs are jobs of one provisioned system with two sites (tests/support/provisioned.py), each task in
  a training child. Killed are, in turn, all processes of the server, all of a site, and a site's training child.
  FLARE's watchdog starts the server and the sites again, and `fedvlp jobs keep` submits the job again. A phase needs
  the replies of both sites, so that one without the killed site is repeated.

After every kill the checkpoint must be absent or whole. One Markdown table, and how many were killed; exit code 1
unless all bytes agree. Meant to take about 10 processor minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import psutil
from common import command_line, machine, say, table

from fedvlp.flare.job_status import session
from fedvlp.flare.jobs import write_job
from fedvlp.flare.timeouts import Timeouts
from fedvlp.run import presets
from fedvlp.run.config import override
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder
from fedvlp.run.simulate import simulate

sys.path.append(str(Path(__file__).parents[2] / "tests"))
from support.provisioned import BIN, Consortium, connected, processes, until

QUICK = replace(Timeouts.of(10**7, 1000.0, training=120.0), grace=3.0)

METHODS = ("feddra", "fedrgb", "local")
SMALL = {
    "data.size": 300,
    "data.sites": 2,
    "rounds.rounds": 3,
    "rounds.evaluate_every": 0,
    "training.batch_size": 16,
    "method.local_steps": 3,
    "method.align_steps": 2,
    "method.aligner_steps": 2,
    "rounds.quorum": 2,
}
KILLS = 3
HEADER = ("run", "killed after: phases complete", "model", "site memories")
VICTIMS = ("server", "site", "child")
CHILD = "fedvlp.flare.child"
PATIENCE = 600.0  # seconds that a provisioned run may take, kills included


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


class Provisioned:
    """A provisioned system in which jobs run one after another."""

    def __init__(self, here: Any, draw: random.Random) -> None:
        self.here, self.draw, self.victims = here, draw, cycle(VICTIMS)

    def run(self, name: str, kills: int, whole: float) -> tuple[RunFolder, list[str]]:
        """A job, killed so many times; its run, and of each kill whom it met, when, and how many phases were complete.

        A kill that comes after the end is none.
        """
        here = self.here
        made = [entry for entry in (here.runs() / name).glob("*") if entry.is_dir()]
        folder = RunFolder(here.runs() / name / f"{len(made) + 1:03d}")
        job = write_job(small(name), here.folder / "job", custom=False, child=True, timeouts=QUICK)
        with session(here.lead) as opened:
            job_id = opened.submit_job(str(job))
        keep = [BIN / "fedvlp", "jobs", "keep", job_id, "--kit", here.lead, "--every", "1", "--patience", "3"]
        with (
            open(here.folder / "keep.log", "ab") as log,
            subprocess.Popen([*keep, "--attempts", "20"], stdout=log, stderr=log) as keeper,
        ):
            noted = list(self._killed(folder, keeper, kills, whole))
            if keeper.wait(PATIENCE) != 0:
                noted.append("did not end")
                print((here.folder / "keep.log").read_text(errors="replace")[-3000:], file=sys.stderr)
        return folder, noted

    def _killed(self, folder: RunFolder, keeper: subprocess.Popen[bytes], kills: int, whole: float) -> Iterator[str]:
        for _ in range(kills):
            seconds = self.draw.uniform(0.0, whole)
            try:
                keeper.wait(seconds)
                return  # the run has ended
            except subprocess.TimeoutExpired:
                victim = next(self.victims)
            if not self._kill(victim, keeper):
                return
            yield f"{victim}, {seconds:.1f} s: {len(folder.history())}"  # the checkpoint can be read, so it is whole

    def _kill(self, victim: str, keeper: subprocess.Popen[bytes]) -> bool:
        """Kills all processes of the server or of a site, or the child of a site as soon as there is one."""
        name = "localhost" if victim == "server" else self.draw.choice(self.here.sites)
        while keeper.poll() is None:
            if victim == "child":
                killed = processes(CHILD, str(self.here.kits / name))
            else:
                parent = self.here.parent(name)
                killed = [parent, *parent.children(recursive=True)]
            for process in killed:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            if killed:
                return True
            time.sleep(0.1)
        return False


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--simulator", type=int, default=2)
    parser.add_argument("--provisioned", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="three runs of the engine")
    options = parser.parse_args()
    if options.quick:
        options.runs, options.simulator, options.provisioned = 3, 0, 0
    say({**machine(), **vars(options)})
    rows = []
    with tempfile.TemporaryDirectory() as place:
        for cells in lines(Path(place), options):
            say(dict(zip(HEADER, cells, strict=True)))  # now, as all of it takes long
            rows.append(cells)
    print(table(HEADER, rows) + "\n")
    say(machine())
    say({"killed": Counter(kind(cells[0], kill) for cells in rows for kill in cells[1].split("; ") if ":" in kill)})
    sys.exit(any("differ" in cell or "did not end" in cell for cells in rows for cell in cells))


def lines(place: Path, options: argparse.Namespace) -> Iterator[list[str]]:
    """The lines of the table, each as soon as its run has ended."""
    draw = random.Random(options.seed)
    whole = {name: reference(small(name), place / "whole") for name in METHODS}
    for index in range(options.runs):
        name = METHODS[index % len(METHODS)]
        folder = RunFolder.create(place / f"engine-{index}", small(name))
        noted = disturbed(engine(small(name), folder), folder, draw, whole[name][1], KILLS)
        yield row(f"engine, {name}", folder, whole[name][0], noted)
    for index in range(options.simulator):
        home = place / f"simulator-{index}"
        write_job(small("feddra"), home / "job")
        folder = RunFolder(home / "runs" / "feddra" / "001")
        noted = disturbed(simulator(home), folder, draw, 30.0, 1)
        yield row("simulator, feddra", folder, whole["feddra"][0], noted)
    if options.provisioned:
        yield from in_a_provisioned_system(place / "system", options.provisioned, draw, whole)


def in_a_provisioned_system(
    place: Path, runs: int, draw: random.Random, whole: dict[str, tuple[RunFolder, float]]
) -> Iterator[list[str]]:
    """Jobs one after another; the first one is not disturbed and says how long that takes."""
    with Consortium(place) as here:
        until(lambda: connected(here), "both sites are connected")
        system, seconds = Provisioned(here, draw), 0.0
        for index in range(runs + 1):
            name, began = METHODS[index % len(METHODS)], time.perf_counter()
            folder, noted = system.run(name, KILLS if index else 0, seconds / 2)  # so that most kills meet the run
            seconds = seconds or time.perf_counter() - began
            yield row(f"provisioned, {name}", folder, whole[name][0], noted, here)
            until(lambda: connected(here), "all are back")


def kind(run: str, kill: str) -> str:
    """What was killed: the engine, the simulator, or whom the note names."""
    where, victim = run.partition(",")[0], kill.partition(",")[0]
    return victim if where == "provisioned" else where


def reference(experiment: Experiment, root: Path) -> tuple[RunFolder, float]:
    """The undisturbed run and its seconds."""
    folder, began = RunFolder.create(root, experiment), time.perf_counter()
    engine(experiment, folder)(None)
    return folder, time.perf_counter() - began


def row(what: str, seen: RunFolder, expected: RunFolder, noted: list[str], here: Any = None) -> list[str]:
    """One line of the table. In a provisioned system (``here``) the memories are in the sites' own kits."""
    same = seen.model.exists() and seen.model.read_bytes() == expected.model.read_bytes()
    name = Path(seen.path.parent.name) / seen.path.name
    places = [RunFolder(here.runs(site) / name) for site in here.sites] if here else [seen]
    ours = {file: content for place in places for file, content in memories(place).items()}
    theirs = memories(expected)
    kept = "same bytes" if ours == theirs else "differ"
    return [what, "; ".join(noted) or "-", "same bytes" if same else "differs", kept if theirs else "none"]


def memories(folder: RunFolder) -> dict[str, bytes]:
    """What the sites remember at the end."""
    files = (folder.path / "sites").rglob("*.safetensors")
    return {str(file.relative_to(folder.path)): file.read_bytes() for file in files}


if __name__ == "__main__":
    main()
