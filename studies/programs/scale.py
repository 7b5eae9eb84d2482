"""What grows with sites and rounds: seconds, memory and bytes of a long run, and of many large personalised models.

    python studies/programs/scale.py rounds   [--sites 1000] [--rounds 1000] [--parts 5] [--quick]
    python studies/programs/scale.py personal [--sites 100] [--gigabytes 0.55] [--rounds 1] [--folder DIR] [--quick]
    python studies/programs/scale.py workers  [--sites 4] [--gigabytes 0.55] [--rounds 2] [--folder DIR] [--quick]

``rounds``: FedAvg of a model of eight values whose sites send back what they receive, with every check, checkpoint and
record of a real run. Of each part of the rounds: seconds, resident memory, bytes of the history and of the checkpoint.
What is linear costs as much in the last part as in the first. A full run takes some minutes.

``personal``: FedSM's two phases without its selector, of a model of ``--gigabytes``; every site sends its model back a
little changed, made as it is read. ``anonymous`` is the peak of memory that nothing but the process backs, which is
what a limit of memory limits; pages of files are the system's to drop. Seconds of each phase at half of the sites and
at all of them. A full run writes its models to ``--folder`` twice: 110 GB.

``workers``: a model goes to sites in two forked workers and back, untrained; the server reads every value of it once.
``time in copies`` is the processor time of all processes less that reading, for each site and in copies of the model
into memory that is there already; ``anonymous`` the peak of all processes together above what they begin with.
"""

from __future__ import annotations

import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from aggregation import shapes
from common import MIB, TreeMemory, command_line, fresh_peak, machine, rounded, say, table
from torch import Tensor

from fedvlp.core.server_state import Server
from fedvlp.core.types import Broadcast, LazyState, State, Update, size_of
from fedvlp.federation.loop import Federation, Rounds
from fedvlp.methods import FedAvg
from fedvlp.methods.softpull import SoftPull

METRICS = {"loss/contrastive": 1.25, "gradient_norm": 0.5, "seconds": 12.5, "val/r1": 0.25}
"""Figures of a reply, as many as a small run has."""


class Peak(threading.Thread):
    """The largest anonymous and resident size of this process, in bytes; a context manager."""

    def __init__(self, interval: float = 0.02) -> None:
        super().__init__(daemon=True)
        self.interval = interval
        self.anonymous = self.resident = 0
        self._done = threading.Event()

    def run(self) -> None:
        while not self._done.wait(self.interval):
            self.look()

    def look(self) -> None:
        now = status()
        self.anonymous = max(self.anonymous, now["RssAnon"] + now["RssShmem"])
        self.resident = max(self.resident, now["VmRSS"])

    def __enter__(self) -> Peak:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self.join()
        self.look()


def status() -> dict[str, int]:
    """Sizes of this process in bytes."""
    lines = [line.split() for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines()]
    return {line[0][:-1]: int(line[1]) * 1024 for line in lines if line[-1] == "kB"}


def echo(messages: Mapping[str, Broadcast]) -> Iterator[tuple[str, Update]]:
    """Every site sends back what it receives."""
    for site, message in messages.items():
        yield site, Update(site, message.round, message.phase, 10, message.state, metrics=METRICS)


def long_run(sites: int, rounds: int, parts: int) -> list[dict[str, Any]]:
    """One row for each part of the rounds."""
    names = tuple(f"site-{index:05d}" for index in range(sites))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="fedvlp-bench-") as folder:
        checkpoint = Path(folder) / "server.safetensors"
        server = Server(names, {"image_head.weight": torch.ones(8)})
        began, processor = time.perf_counter(), time.process_time()

        def report(record: Mapping[str, Any]) -> None:
            nonlocal began, processor
            done = record["round"] + 1
            if done % (rounds // parts):
                return
            now, used = time.perf_counter(), time.process_time()
            rows.append(
                {
                    "rounds": done,
                    "seconds": rounded(now - began),
                    "processor seconds": rounded(used - processor),
                    "resident, MiB": round(status()["VmRSS"] / MIB),
                    "history, bytes a site-round": rounded(
                        (checkpoint.with_name("history.jsonl")).stat().st_size / done / sites
                    ),
                    "checkpoint, bytes": checkpoint.stat().st_size,
                }
            )
            say(rows[-1])
            began, processor = time.perf_counter(), time.process_time()

        limits = Rounds(rounds=rounds, evaluate_every=0)
        Federation(FedAvg(), server, limits, echo, checkpoint=checkpoint, report=report).run()
    return rows


class Trained(LazyState):
    """A model as a site sends it: what it received, a little changed; each tensor is made when it is read."""

    def __init__(self, received: Mapping[str, Tensor], factor: float) -> None:
        super().__init__(received)
        self._received, self._factor = received, factor

    def __getitem__(self, name: str) -> Tensor:
        return self._received[name] * self._factor

    def size(self, name: str) -> int:
        return size_of(self._received[name])


def trained(messages: Mapping[str, Broadcast]) -> Iterator[tuple[str, Update]]:
    """Every site sends what it received, each changed by a factor of its own."""
    for index, (site, message) in enumerate(messages.items()):
        state: Any = Trained(message.state, 1 + 1e-4 * (index + 1))
        yield site, Update(site, message.round, message.phase, 10, state)


def model(gigabytes: float) -> State:
    """Random float32 of about that size, in tensors of a transformer's shapes."""
    layers = max(1, round(gigabytes * 1e9 / 4 / 14.2e6) - 1)
    generator = torch.Generator().manual_seed(0)
    named = shapes(layers, 768, 1000)
    return {name: torch.empty(shape).uniform_(-0.1, 0.1, generator=generator) for name, shape in named.items()}


def personal_models(sites: int, gigabytes: float, rounds: int, parent: str | None) -> dict[str, Any]:
    """One run of SoftPull."""
    names = tuple(f"site-{index:05d}" for index in range(sites))
    state = model(gigabytes)
    size = 4 * sum(tensor.numel() for tensor in state.values())
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="fedvlp-bench-", dir=parent) as folder, Peak() as peak:
        server, written = Server(names, state), written_bytes()
        federation = Federation(
            SoftPull(),
            server,
            Rounds(rounds=rounds, evaluate_every=0),
            trained,
            checkpoint=Path(folder) / "server.safetensors",
            report=lambda record: seconds.setdefault(record["phase"], []).append(round(record["seconds"], 1)),
        )
        federation.run()
        on_disk = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
        written = written_bytes() - written
    return {
        "sites": sites,
        "model, MB": round(size / 1e6),
        "anonymous, models": rounded(peak.anonymous / size),
        "anonymous, GB": rounded(peak.anonymous / 1e9),
        "resident, GB": rounded(peak.resident / 1e9),
        "seconds": seconds,
        "seconds a site": rounded(sum(map(sum, seconds.values())) / sites / rounds),
        "written, models a site": rounded(written / size / sites),
        "left on disk, models a site": rounded(on_disk / size / sites),
    }


class Returns:
    """A site that sends back what it receives."""

    def __init__(self, name: str) -> None:
        self.name = name

    def handle(self, message: Broadcast) -> Update:
        return Update(self.name, message.round, message.phase, 10, message.state)


def through_workers(sites: int, gigabytes: float, rounds: int, folder: str) -> dict[str, Any]:
    """In this process and two workers; prints and waits where the caller is to look at the memory."""
    from fedvlp.federation.exchange import WorkerPool

    torch.set_num_threads(1)
    names = tuple(f"site-{index:05d}" for index in range(sites))
    with WorkerPool(Returns, names, 2, Path(folder)) as pool:  # type: ignore[arg-type]
        state = model(gigabytes)
        other = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        copied = processor(lambda: [other[name].copy_(tensor) for name, tensor in state.items()])
        read = processor(lambda: [tensor.sum() for tensor in state.values()])
        other.clear()
        fresh_peak()
        print("begin", flush=True)
        sys.stdin.readline()  # until the caller has looked at the memory
        began = time.perf_counter()

        def visits() -> None:
            for round in range(rounds):
                message = Broadcast(round, "train", state)
                for _, update in pool(dict.fromkeys(names, message)):
                    for name in update.state:  # type: ignore[union-attr]
                        update.state[name].sum()  # type: ignore[union-attr]

        used = processor(visits)
        seconds = time.perf_counter() - began
    total = (
        used
        + resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        + resource.getrusage(resource.RUSAGE_CHILDREN).ru_stime
    )
    return {
        "sites": sites,
        "model, MB": round(4e-6 * sum(tensor.numel() for tensor in state.values())),
        "seconds a site": rounded(seconds / sites / rounds),
        "time in copies, a site": rounded((total / sites / rounds - read) / copied),
    }


def processor(work: Any) -> float:
    """Processor seconds of this process."""
    began = time.process_time()
    work()
    return time.process_time() - began


def workers(sites: int, gigabytes: float, rounds: int, folder: str) -> dict[str, Any]:
    """Measures :func:`through_workers` in a process of its own, whose memory is watched."""
    tag = f"FEDVLP_SCALE={os.getpid()}"
    environment = {**os.environ, "FEDVLP_SCALE": str(os.getpid()), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "child", "--sites", str(sites), "--gigabytes", str(gigabytes)]
    command += ["--rounds", str(rounds), "--folder", folder]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "begin\n"
        with TreeMemory(tag, 0.02) as memory:
            while not memory.anonymous:
                time.sleep(0.1)
            before = memory.anonymous
            child.stdin.write("go\n")
            child.stdin.flush()
            row: dict[str, Any] = json.loads(child.stdout.readline())
    row["anonymous, models"] = rounded((memory.anonymous - before) / 1e6 / row["model, MB"])
    return row


def written_bytes() -> int:
    """What this process has handed to the system to be written."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar"))


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("what", choices=["rounds", "personal", "workers", "child"], nargs="?", default="rounds")
    parser.add_argument("--sites", type=int, default=0, help="1000 of rounds, 100 of personal")
    parser.add_argument("--rounds", type=int, default=0, help="1000 of rounds, 1 of personal")
    parser.add_argument("--parts", type=int, default=5)
    parser.add_argument("--gigabytes", type=float, default=0.55)
    parser.add_argument("--folder", help="where the models are written")
    parser.add_argument("--quick", action="store_true", help="20 sites x 10 rounds; 4 models of 0.08 GB")
    chosen = parser.parse_args()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))
    if chosen.what == "child":
        say(through_workers(chosen.sites, chosen.gigabytes, chosen.rounds, chosen.folder))
        return
    say(machine())
    if chosen.what == "workers":
        size = 0.08 if chosen.quick else chosen.gigabytes
        with tempfile.TemporaryDirectory(prefix="fedvlp-bench-", dir=chosen.folder) as folder:
            rows = [workers(chosen.sites or 4, size, chosen.rounds or 2, folder)]
    elif chosen.what == "rounds":
        sites, rounds = (20, 10) if chosen.quick else (chosen.sites or 1000, chosen.rounds or 1000)
        rows = long_run(sites, rounds, chosen.parts)
        say(
            {
                "processor seconds, last part / first": rounded(
                    rows[-1]["processor seconds"] / rows[0]["processor seconds"]
                )
            }
        )
    else:
        sites, size = (4, 0.08) if chosen.quick else (chosen.sites or 100, chosen.gigabytes)
        rows = []
        for count in (math.ceil(sites / 2), sites):
            rows.append(personal_models(count, size, chosen.rounds or 1, chosen.folder))
            say(rows[-1])
    print(table(list(rows[0]), (list(row.values()) for row in rows)))
    say(machine())


if __name__ == "__main__":
    main()
