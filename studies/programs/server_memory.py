"""Peak memory of the server's process with a large model, over real sockets: FLARE's simulator, sites that echo.

    python studies/programs/server_memory.py [--sites 3 6] [--part 1.0] [--rounds 2] [--quick] [--wire plain slow]

A run takes 3 to 7 minutes. ``slow`` is bfloat16 down and 8 bit up with unchanged tensors skipped.

The model is ViT-B/16 with BERT-base, a block and a head more each, random float32 (``--part 0.125``: an eighth of it).
Every site is a process of its own that sends back what it receives, so only the transfers and the server's work are
measured, with no training. ``peak`` is the largest resident size of the server's process less its size just before the
model is built, in models; ``Pss`` counts what it shares with others in part. ``--quick`` takes an eighth of the model.
A site needs about two models of memory, so six sites of the whole model need 16 GB.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

from common import MIB, command_line, machine, rounded, say, table
from echo import NOTE, EchoModel

from fedvlp.federation.codec import PLAIN, Wire
from fedvlp.federation.loop import Rounds
from fedvlp.flare.jobs import job_files
from fedvlp.methods import FedAvg
from fedvlp.run.experiment import Experiment

NVFLARE = Path(sys.executable).parent / "nvflare"
WIRES = {"plain": PLAIN, "slow": Wire("bfloat16", "int8")}


def job(part: float, sites: list[str], rounds: int, wire: Wire, folder: Path) -> Path:
    """The job folder: fedvlp's own controller, the echo in place of its executor."""
    length = Rounds(rounds, evaluate_every=0)
    experiment = Experiment("echo", FedAvg(), EchoModel(part=part), rounds=length, wire=wire)  # type: ignore[arg-type]
    for path, text in job_files(experiment, sites=sites).items():
        if path.endswith("config_fed_client.json"):
            client = json.loads(text)
            client["executors"][0]["executor"] = {"path": "echo.EchoSite", "args": {}}
            text = json.dumps(client)
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    return folder


def sizes(pid: int) -> dict[str, int]:
    """Resident and proportional size of a process in bytes; empty when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]
    except OSError:
        return {}
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}


def measure(part: float, count: int, rounds: int, wire: str) -> dict[str, Any]:
    """One run: the server's peaks above its base, in models."""
    sites = [f"site-{index + 1}" for index in range(count)]
    with tempfile.TemporaryDirectory() as name:
        folder, note = Path(name), Path(name) / "server.json"
        command = [NVFLARE, "simulator", job(part, sites, rounds, WIRES[wire], folder / "job"), "-t", str(count)]
        paths = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, NOTE: str(note), "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        environment.pop("FEDVLP_HOME", None)
        with open(folder / "log.txt", "w", encoding="utf-8") as log:
            run = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
            began, base, seen = time.perf_counter(), {}, []
            while run.poll() is None:
                if note.exists():
                    pid = json.loads(note.read_text(encoding="utf-8") or "{}").get("pid")
                    now = sizes(pid) if pid else {}
                    base = base or now
                    if now:
                        seen.append((time.perf_counter() - began, now))
                time.sleep(0.05)
        if run.returncode:
            raise RuntimeError((folder / "log.txt").read_text(encoding="utf-8")[-3000:])
        status = json.loads((folder / "runs" / "echo" / "001" / "run_status.json").read_text(encoding="utf-8"))
        assert status["status"] == "finished", status
        history = (folder / "runs" / "echo" / "001" / "metrics.csv").read_text(encoding="utf-8").splitlines()
    model = 4 * sum(_numel(shape) for shape in EchoModel(part=part).named().values())
    seconds = [float(line.split(",")[-1]) for line in history if ",server,seconds," in line]
    peak = {kind: max(now[kind] for _, now in seen) for kind in ("Rss", "Pss")}
    step = max(1, len(seen) // 60)
    say({"timeline": [(round(at, 1), round((now["Rss"] - base["Rss"]) / model, 2)) for at, now in seen[::step]]})
    return {
        "sites": count,
        "wire": wire,
        "rounds": rounds,
        "model_mib": round(model / MIB),
        "base_mib": round(base["Rss"] / MIB),
        "peak Rss, models": rounded((peak["Rss"] - base["Rss"]) / model),
        "peak Pss, models": rounded((peak["Pss"] - base["Pss"]) / model),
        "seconds per round": [round(s, 1) for s in seconds],
    }


def _numel(shape: tuple[int, ...]) -> int:
    total = 1
    for length in shape:
        total *= length
    return total


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--sites", type=int, nargs="+", default=[3, 6])
    parser.add_argument("--part", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--wire", nargs="+", choices=sorted(WIRES), default=["plain", "slow"])
    parser.add_argument("--quick", action="store_true")
    chosen = parser.parse_args()
    say(machine())
    part = 0.125 if chosen.quick else chosen.part
    rows = []
    for wire, count in product(chosen.wire, chosen.sites):
        rows.append(measure(part, count, chosen.rounds, wire))
        say(rows[-1])
    print(table(list(rows[0]), (list(row.values()) for row in rows)))
    say(machine())


if __name__ == "__main__":
    main()
