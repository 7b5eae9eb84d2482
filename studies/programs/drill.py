"""A large model over slow links that drop, and a server that is killed: does the job end right by itself?

    python studies/programs/drill.py [--megabytes 834] [--megabit 20] [--sites 3] [--drops 90] [--seed 0] [--quick]

A provisioned system on loopback (tests/support/provisioned.py; TLS over FLARE's http, as provisioning/project.yml has
it). Each site reaches the server through a link of its own (link.py): ``--megabit`` in each direction, and all its
connections are broken every ``--drops`` seconds on average, each time for up to 8 s, from the job's beginning on (0 =
never). The model is that of
`server_memory.py`. There is one round, in which every site moves the model by a step of its own, and the evaluation at
the end. When half of the model has gone out for that, all processes of the server are killed; FLARE's watchdog starts
it again, and `fedvlp jobs keep` submits the job again. Nothing else is done.

Right: the final model has the bytes of the same round in this process, without FLARE, links and kill. The server may
take 2.5 models of memory: the largest resident size of its job's process (VmHWM) less its size before the model is
built, and the same of its parent, through which everything passes. It is measured and not enforced by a limit: a limit
of the address space would count the stacks of FLARE's threads. Models below 400 MB are not judged by it.

One table, by stage: seconds, seconds that the link's speed alone would take, models down and up a site, breaks. Exit
code 1 unless the bytes are right and the memory is within the limit. The whole drill takes about 25 minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
from common import command_line, machine, rounded, say, table
from drill_job import NOTES, SERVER, DrillModel, answer, digest
from link import Link, Links

from fedvlp.core.types import EVALUATE, Broadcast, Reply
from fedvlp.federation.loop import Federation, Rounds
from fedvlp.flare.job_status import STATUS_FILE, session
from fedvlp.flare.jobs import job_files
from fedvlp.flare.timeouts import Timeouts
from fedvlp.methods import FedAvg
from fedvlp.run.assembly import Assembly
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder

sys.path.append(str(Path(__file__).parents[2] / "tests"))
from support.provisioned import BIN, PROJECT, Consortium, connected, free_port, until

MOST = 2.5  # models of memory at the server
JUDGED = 400e6  # bytes of a model from which on it is judged
WHOLE = 834e6  # bytes of the whole model (DrillModel(1.0))
CLASSES = ["drill_job.DrillModel", "drill_job.DrillSite"]


def experiment(part: float, sites: int) -> Experiment:
    """One round and an evaluation; a phase needs every site."""
    return Experiment("drill", FedAvg(), DrillModel(part=part), rounds=Rounds(1, quorum=sites))  # type: ignore[arg-type]


def expected(part: float, sites: tuple[str, ...]) -> str:
    """The digest that the final model must have."""

    def exchange(messages: Mapping[str, Broadcast]) -> Iterator[tuple[str, Reply]]:
        for site, message in messages.items():
            own = {name: tensor.clone() for name, tensor in message.state.items()}
            yield site, answer(replace(message, state=own), site)

    chosen = experiment(part, len(sites))
    server = Assembly(chosen).server(sites)
    return digest(Federation(chosen.method, server, chosen.rounds, exchange).run())


def write_job(chosen: Experiment, sites: tuple[str, ...], timeouts: Timeouts, folder: Path) -> Path:
    """The job as hospitals get it (no custom code), the drill's site in the place of fedvlp's executor."""
    for path, text in job_files(chosen, sites=sites, timeouts=timeouts).items():
        if path.startswith("app/custom/"):
            continue
        if path.endswith("config_fed_client.json"):
            client = json.loads(text)
            client["executors"][0]["executor"] = {"path": CLASSES[1], "args": {}}
            text = json.dumps(client)
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    return folder


class Behind(Consortium):
    """A consortium whose sites reach the server through links; its lists of classes have the drill's."""

    def __init__(self, folder: Path, links: Mapping[str, Link]) -> None:
        target = next(iter(links.values())).target
        sites = "\n".join(
            f"  - {{{{name: {site}, type: client, org: hospital, "
            f"connect_to: {{{{host: localhost, port: {link.port}}}}}}}}}"
            for site, link in links.items()
        )
        project = PROJECT.replace("{port}", str(target)).replace("{sites}", sites)
        project = project.replace("config_folder: config", "config_folder: config, scheme: http")
        super().__init__(folder, tuple(links), project)

    def _configure(self) -> None:
        super()._configure()
        for name in ("localhost", *self.sites):
            file = self.kits / name / "local" / "resources.json"
            resources = json.loads(file.read_text())
            resources["class_allow_list"] += CLASSES
            file.write_text(json.dumps(resources))


class ServerMemory(threading.Thread):
    """The largest resident size of the server's processes; a context manager."""

    def __init__(self, drill: Drill) -> None:
        super().__init__(daemon=True)
        self._drill, self._done = drill, threading.Event()
        self._parents = [drill.here.parent("localhost")]
        self._base_of_parent = self._parents[0].memory_info().rss
        self._most: dict[str, int] = {"job": 0, "parent": 0}

    def restarted(self) -> None:
        """The server has another parent now."""
        self._parents.append(self._drill.here.parent("localhost"))

    def run(self) -> None:
        while not self._done.wait(0.5):
            with suppress(psutil.NoSuchProcess):
                parent = self._parents[-1]
                self._note("parent", parent.pid)
                for process in parent.children():
                    self._note("job", process.pid)

    def _note(self, kind: str, pid: int) -> None:
        self._most[kind] = max(self._most[kind], high_water(pid))

    def peaks(self) -> dict[str, int]:
        """Bytes of the job's process and of its parent, each the larger one of before and after the kill."""
        base = self._drill.noted(SERVER)[0]["resident"]
        return {"job": self._most["job"] - base, "parent": self._most["parent"] - self._base_of_parent}

    def __enter__(self) -> ServerMemory:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self.join()


def high_water(pid: int) -> int:
    """The largest resident size of a process so far, in bytes; 0 when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


@dataclass
class Drill:
    """One run of it, and what has been measured so far."""

    here: Behind
    links: Links
    notes: Path
    size: int  # bytes of the model
    patience: float  # seconds that a stage may take
    rows: list[list[Any]] = field(default_factory=list)
    _last: tuple[float, dict[str, int]] = (0.0, {})

    def noted(self, what: str, since: float = 0.0) -> list[dict[str, Any]]:
        """The notes of this event after the time ``since``, the oldest first."""
        found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(self.notes.glob("*.json"))]
        return [one for one in found if one["what"] == what and one["time"] > since]

    def begin(self) -> None:
        """From here the first stage is measured."""
        self._last = time.monotonic(), self.links.passed()

    def stage(self, name: str, models: float) -> None:
        """A row: the stage has just ended; so many models had to go through each link in it."""
        (began, before), now = self._last, (time.monotonic(), self.links.passed())
        self._last = now
        moved = {way: now[1][way] - before[way] for way in before}
        sites = len(self.here.sites)
        ideal = models * self.size / self.links.links[0].rate
        a_site = [rounded(moved[way] / self.size / sites) for way in ("down", "up")]
        self.rows.append([name, round(now[0] - began, 1), round(ideal, 1), *a_site, moved["breaks"]])
        say(dict(zip(HEADER, self.rows[-1], strict=True)))

    def wait(self, condition: Any, what: str) -> None:
        """Until it is true."""
        until(condition, what, self.patience)


HEADER = ("stage", "seconds", "at the link's speed", "models down a site", "models up a site", "breaks")


def run(drill: Drill, job: Path) -> tuple[str, float]:
    """The stages, one after another; returns the digest of the final model, and the server's peak in models."""
    here, folder = drill.here, RunFolder(drill.here.runs() / "drill" / "001")
    sites = len(here.sites)
    with ServerMemory(drill) as memory:
        drill.begin()
        with session(here.lead) as opened:
            job_id = opened.submit_job(str(job))
        keep = [BIN / "fedvlp", "jobs", "keep", job_id, "--kit", here.lead, "--every", "2", "--patience", "10"]
        with (
            open(here.folder / "keep.log", "wb") as log,
            subprocess.Popen([*keep, "--attempts", "20"], stdout=log, stderr=log) as keeper,
        ):
            drill.wait(lambda: drill.noted(SERVER), "the job begins")
            drill.links.breaking(True)
            drill.stage("start", 0)
            drill.wait(lambda: len(drill.noted("train")) >= sites, "all sites have the model")
            drill.stage("broadcast", 1)
            drill.wait(folder.checkpoint.exists, "the round is complete")
            drill.stage("upload and mean", 1)
            before = drill.links.passed()["down"]
            half = 0.5 * drill.size * sites
            drill.wait(lambda: drill.links.passed()["down"] - before >= half, "half of the model is out")
            drill.stage("evaluation, until the kill", 0.5)
            parent, killed = here.parent("localhost"), time.time()
            for process in (parent, *parent.children(recursive=True)):
                process.kill()
            drill.wait(lambda: here.parent("localhost").pid != parent.pid, "the server is back")
            memory.restarted()
            status = folder.path / STATUS_FILE
            drill.wait(lambda: status.stat().st_mtime > killed, "the job goes on")
            drill.stage("restart", 0)
            drill.wait(lambda: len(drill.noted(EVALUATE, killed)) >= sites, "all sites have the trained model")
            drill.stage("evaluation", 1)
            drill.wait(folder.model.exists, "the run is complete")
            drill.stage("the rest of the run", 0)
            drill.links.breaking(False)
            drill.wait(lambda: keeper.poll() is not None, "FLARE says that the job has ended")
            drill.stage("FLARE's end of the job", 0)
        said = (here.folder / "keep.log").read_text(errors="replace")
        peaks = {name: rounded(value / drill.size) for name, value in memory.peaks().items()}
    say({"jobs keep": said.splitlines(), "server's peak by process, models": peaks})
    found = folder.model.read_text(encoding="utf-8") if folder.model.exists() else "no model"
    return found, rounded(sum(peaks.values()))


def drilled(chosen: argparse.Namespace, sites: tuple[str, ...], part: float) -> tuple[str, float, Drill]:
    """The digest of the final model, the server's peak in models, and the drill."""
    size = 4 * sum(math.prod(shape) for shape in DrillModel(part=part).named().values())
    timeouts = Timeouts.of(size, chosen.megabit, training=120.0)
    say({"megabytes": rounded(size / 1e6), **asdict(timeouts)})
    target = free_port()
    links = {
        site: Link(free_port(), target, chosen.megabit, chosen.drops, chosen.seed + index)
        for index, site in enumerate(sites)
    }
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        notes = place / "notes"
        notes.mkdir()
        os.environ[NOTES] = str(notes)  # for the processes of the system, with the folder of the classes
        paths = (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        job = write_job(experiment(part, len(sites)), sites, timeouts, place / "job")
        with Links(list(links.values())) as running, Behind(place / "system", links) as here:
            until(lambda: connected(here), "all sites are connected")
            drill = Drill(here, running, notes, size, 600 + 20 * size / links[sites[0]].rate)
            found, peak = run(drill, job)
    return found, peak, drill


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--megabytes", type=float, default=834)
    parser.add_argument("--megabit", type=float, default=20)
    parser.add_argument("--sites", type=int, default=3)
    parser.add_argument("--drops", type=float, default=90)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="8 MB over 8 Mbit/s, links that break every 30 s")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.megabytes, chosen.megabit, chosen.drops = 8, 8, 30
    say({**machine(), **vars(chosen)})
    sites = tuple(f"site-{index + 1}" for index in range(chosen.sites))
    part = min(1.0, chosen.megabytes * 1e6 / WHOLE)
    with multiprocessing.get_context("spawn").Pool(1) as apart:  # so that its memory is given back
        wanted = apart.apply(expected, (part, sites))
    found, peak, drill = drilled(chosen, sites, part)
    print(table(HEADER, drill.rows) + "\n")
    judged = drill.size >= JUDGED
    within = peak <= MOST or not judged
    say({"right": found == wanted, "server's peak, models": peak if judged else "not judged", "within": within})
    say(machine())
    sys.exit(not (found == wanted and within))


if __name__ == "__main__":
    main()
