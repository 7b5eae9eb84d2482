"""What running a federation costs beside its training: fedvlp's engine and FLARE's simulator against a bare loop.

    python studies/programs/orchestration.py [--steps 20 2] [--repetitions 3] [--flare-repetitions 1] [--quick]
                                       [--flower PYTHON]  # of a virtual environment that has flwr[simulation], too
                                       [--pfl PYTHON]     # of one that has pfl[pytorch]

One workload (a 4.9-million-parameter dual encoder, FedAvg, 5 sites, 5 rounds, batch 32, the built-in cohort, no
evaluation, the same seeds, one torch thread) in fresh processes, variants interleaved:

    bare       a hand-written FedAvg loop over the same model, data and loss; writes the final weights and nothing else
    engine     runs.simulate, sites in turn, with everything it writes: checkpoints, metrics.csv, TensorBoard, model
    workers    the same with two forked workers
    flare-tN   ``nvflare simulator -t N`` on the exported job
    recipe-tN  the same on a job of FLARE's own recipe and Client API, with FLARE's defaults (flare_peer.py)
    flower     Flower's simulation, two clients at a time (flower_peer.py)
    pfl        Apple's pfl, users in turn in one process (pfl_peer.py)

Overhead is start-up (launch to first step) + idle (time in between in which no site trains) + shutdown (last step to
exit), from notes that the workload itself writes; ``cpu`` is processor time, which a busy machine moves less, with that
of processes that outlive the ones that started them, as fedvlp's trainer does in ``flare-t1``. ``anon`` is memory
without the pages of libraries. Weights must be equal bit for bit, but for those of FLARE's recipe, Flower and pfl,
which average otherwise and are compared by their norm. A second part grows the number of sites over the same records,
for the peak memory.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from common import MIB, TreeMemory, command_line, machine, rounded, say, table
from timed import EVENTS, TimedFedAvg
from workload import BATCH, LR, Size, built, save, visit

HERE = Path(__file__).resolve().parent
RECIPE, FLOWER, PFL = "recipe", "flower", "pfl"
PEERS = (RECIPE, FLOWER, PFL)
SLOW = ("flare", RECIPE, FLOWER)
"""Begin the names of the variants of which --flare-repetitions says how often they run."""
WEIGHTS = ("model.safetensors", "FL_global_model.pt")


def experiment(size: Size) -> Any:
    """The workload as fedvlp describes it."""
    from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
    from fedvlp.federation.loop import Rounds
    from fedvlp.models.dual_encoder import ModelConfig
    from fedvlp.run.experiment import Experiment
    from fedvlp.training.settings import Training

    model = ModelConfig(vocabulary=size.vocabulary, head_norm="layer", head_hidden=256)
    data = SyntheticCohort(sites=size.sites, size=size.studies, image_size=72, beta=1000.0)
    rounds = Rounds(rounds=size.rounds, evaluate_every=0)
    method = TimedFedAvg(local_steps=size.steps)
    return Experiment(
        "bench", method, model, data=data, training=Training(lr=LR, batch_size=BATCH, threads=1), rounds=rounds
    )


def bare(size: Size, folder: Path) -> None:
    """FedAvg as one would write it: nothing of fedvlp but the model, the loss, the records and how seeds are named."""
    import torch

    torch.set_num_threads(1)
    model, data = built(size)
    total = sum(of_site.num_train for of_site in data.values())
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for number in range(size.rounds):
        mean = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in state.items()}
        for site, of_site in data.items():
            for name, tensor in visit(size, site, number, state).items():
                mean[name].add_(tensor, alpha=of_site.num_train)
        state = {name: (tensor / total).float() for name, tensor in mean.items()}
    save(state, folder)


def engine(size: Size, folder: Path, workers: int) -> None:
    """The product's own way of running on one machine."""
    from fedvlp.run.folder import RunFolder
    from fedvlp.run.simulate import simulate

    task = experiment(size)
    simulate(task, RunFolder.create(folder, task), workers=workers)


def flare_job(size: Size, folder: Path) -> Path:
    """The exported job, with the workload's class beside it (the job brings its own code)."""
    from fedvlp.flare.jobs import write_job

    job = write_job(experiment(size), folder / "job")
    shutil.copy(HERE / "timed.py", job / "app" / "custom" / "timed.py")
    return job


def command_of(variant: str, size: Size, folder: Path, pythons: Mapping[str, str]) -> list[str]:
    """What starts a variant. ``pythons``: the ones that have Flower and pfl."""
    threads, settings = variant.partition("-t")[2], json.dumps(vars(size))
    simulator = [str(Path(sys.executable).with_name("nvflare")), "simulator", "-t", threads]
    simulator += ["-w", str(folder / "workspace")]
    if variant in pythons:
        return [pythons[variant], str(HERE / f"{variant}_peer.py"), settings, str(folder)]
    if not threads:
        return [sys.executable, __file__, "--inside", variant, settings, str(folder)]
    if variant.startswith(RECIPE):
        subprocess.run([sys.executable, str(HERE / "flare_peer.py"), settings, str(folder)], check=True, timeout=300)
        return [*simulator, "-n", str(size.sites), str(folder / "job" / "fedavg")]
    return [*simulator, str(flare_job(size, folder))]


def run(variant: str, size: Size, pythons: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
    """One variant in its own process, timed and weighed from outside."""
    with tempfile.TemporaryDirectory(prefix="fedvlp-bench-") as name:
        folder = Path(name)
        events, tag = folder / "events", f"FEDVLP_BENCH_TAG={folder.name}"
        environment = {
            **os.environ,
            EVENTS: str(events),
            "OMP_NUM_THREADS": "1",
            "FEDVLP_HOME": str(folder),
            "FEDVLP_BENCH_TAG": folder.name,
            "CUDA_VISIBLE_DEVICES": "",
            "FLWR_TELEMETRY_ENABLED": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE.parent / "custom"), os.environ.get("PYTHONPATH")])),
        }
        command = command_of(variant, size, folder, pythons)
        with TreeMemory(tag) as memory, open(folder / "log", "w", encoding="utf-8") as log:
            launched = time.monotonic()
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            _, status, usage = os.wait4(process.pid, 0)
            ended = time.monotonic()
            process.returncode = status
        weights = next((file for name in WEIGHTS for file in folder.rglob(name)), None)
        if status or weights is None or not events.exists():
            raise SystemExit(f"{variant} failed (exit {status}):\n" + (folder / "log").read_text()[-3000:])
        visits = [line.split() for line in events.read_text().splitlines()]
        spans = sorted((float(began), float(stop)) for _, began, stop in visits)
        row = {"variant": variant, **vars(size), "visits": len(spans), **phases(spans, launched, ended)}
        return row | {
            "cpu": rounded(usage.ru_utime + usage.ru_stime + memory.detached),
            "peak_mib": round(memory.peak / MIB),
            "anon_mib": round(memory.anonymous / MIB),
            "processes": len(memory.processes),
            "weights": "" if variant.startswith(PEERS) else fingerprint(weights),
            "norm": norm(weights),
            "load": round(os.getloadavg()[0], 2),
        }


def phases(spans: list[tuple[float, float]], launched: float, ended: float) -> dict[str, float]:
    """Wall clock, split into start-up, training (some site steps), idle and shutdown."""
    trained, until = 0.0, spans[0][0]
    for began, stop in spans:
        trained += max(0.0, stop - max(began, until))
        until = max(until, stop)
    startup, shutdown = spans[0][0] - launched, ended - until
    idle = until - spans[0][0] - trained
    parts = {
        "wall": ended - launched,
        "startup": startup,
        "training": trained,
        "idle": idle,
        "shutdown": shutdown,
        "overhead": startup + idle + shutdown,
    }
    return {name: rounded(seconds) for name, seconds in parts.items()}


def norm(path: Path) -> float:
    """Euclidean norm of all weights, eight digits: peers that average otherwise are next to the others by it."""
    import torch
    from safetensors.torch import load_file

    state = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=False)["model"]
    squares = sum(float(torch.as_tensor(tensor).double().square().sum()) for tensor in state.values())
    return float(f"{squares**0.5:.8g}")


def fingerprint(path: Path) -> str:
    """A hash of names and bytes of all tensors in a safetensors file."""
    from safetensors.torch import load_file

    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(load_file(path).items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def compare(
    size: Size,
    variants: list[str],
    repetitions: int,
    slow_repetitions: int,
    pythons: Mapping[str, str] = MappingProxyType({}),
) -> list[list[object]]:
    """Runs the variants interleaved and returns the table's rows: medians, ratios to the bare loop."""
    results: dict[str, list[dict[str, Any]]] = {variant: [] for variant in variants}
    for repetition in range(repetitions):
        for variant in variants:
            if not variant.startswith(SLOW) or repetition < slow_repetitions:
                row = run(variant, size, pythons)
                results[variant].append(row)
                say(row)
    base = results["bare"]
    same = len({row["weights"] for rows in results.values() for row in rows} - {""}) == 1
    say(
        {
            "check": "weights equal bit for bit in every variant of fedvlp",
            "sites": size.sites,
            "steps": size.steps,
            "ok": same,
        }
    )
    table_rows: list[list[object]] = []
    for variant, rows in results.items():
        wall, cpu, overhead, memory, own = (
            (median(rows, name), median(base, name)) for name in ("wall", "cpu", "overhead", "peak_mib", "anon_mib")
        )
        paired = statistics.median(r["wall"] / b["wall"] for r, b in zip(rows, base, strict=False))
        parts = " + ".join(f"{median(rows, name):.2f}" for name in ("startup", "idle", "shutdown"))
        table_rows.append(
            [
                variant,
                size.sites,
                size.steps,
                f"{wall[0]:.2f}",
                f"{paired:.3f}",
                parts,
                f"{overhead[0]:.2f}",
                f"{overhead[0] - overhead[1]:+.2f}",
                f"{(wall[1] + overhead[0] - overhead[1]) / wall[1]:.3f}",
                f"{cpu[0] / cpu[1]:.3f}",
                f"{memory[0]:.0f}",
                f"{memory[0] / memory[1]:.3f}",
                f"{own[0] / own[1]:.3f}",
                rows[0]["weights"],
                rows[0]["norm"],
            ]
        )
    return table_rows


HEADER = [
    "variant",
    "sites",
    "steps",
    "wall s",
    "x bare, same pass",
    "start-up + idle + shutdown s",
    "overhead s",
    "- bare's",
    "x bare, by overhead",
    "cpu x bare",
    "peak MiB",
    "x bare",
    "anon x bare",
    "weights",
    "norm of the weights",
]


def median(rows: list[dict[str, Any]], name: str) -> float:
    return float(statistics.median(row[name] for row in rows))


def growth(size: Size, counts: list[int], repetitions: int) -> str:
    """Peak memory of the engine over the same records dealt to more and more sites."""
    results: dict[int, list[dict[str, Any]]] = {count: [] for count in counts}
    for _ in range(repetitions):
        for count in counts:
            results[count].append(run("engine", replace(size, sites=count)))
            say(results[count][-1])
    first = results[counts[0]]
    rows = []
    for count, runs in results.items():
        further = max(1, count - counts[0])
        cells: list[object] = [count]
        for name in ("peak_mib", "anon_mib"):
            seen, least = median(runs, name), median(first, name)
            cells += [f"{seen:.0f}", f"{100 * (seen / least - 1) / further:+.3f} %"]
        rows.append(cells)
    return table(["sites", "peak MiB", "per further site", "anon MiB", "per further site"], rows)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--steps", type=int, nargs="+", default=[20, 2], help="steps of a site per round")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--flare-repetitions", type=int, default=1, help="FLARE takes minutes each; 0 leaves it out")
    parser.add_argument(
        "--flower", default="", metavar="PYTHON", help="one that has flwr; without it Flower is left out"
    )
    parser.add_argument("--pfl", default="", metavar="PYTHON", help="one that has pfl; without it pfl is left out")
    parser.add_argument("--growth", type=int, nargs="*", default=[5, 20, 50], help="numbers of sites; none: not done")
    parser.add_argument("--even", type=int, default=6, help="sites of the second comparison; 0 leaves it out")
    parser.add_argument("--quick", action="store_true", help="small, without FLARE: does everything run?")
    parser.add_argument("--inside", nargs=3, metavar=("VARIANT", "SIZE", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        variant, size, folder = options.inside[0], Size(**json.loads(options.inside[1])), Path(options.inside[2])
        bare(size, folder) if variant == "bare" else engine(size, folder, 2 if variant == "workers" else 1)
        return
    if options.quick:
        options.steps, options.repetitions, options.flare_repetitions = [2], 1, 0
        options.growth, options.even, base = [2, 3], 0, Size(2, 2, 1, 120, 4096)
    else:
        base = Size()
    say(machine())
    run("engine", Size(1, 2, 1, 120, 4096))  # reads the libraries into the page cache
    rows = []
    flare = ["flare-t5", "recipe-t5", "flare-t1", "recipe-t1"] if options.flare_repetitions else []
    pythons = {name: python for name in (FLOWER, PFL) if (python := getattr(options, name))}
    for steps in options.steps:
        size = replace(base, steps=steps)
        variants = ["bare", "engine", "workers", *flare, *pythons]
        rows += compare(size, variants, options.repetitions, options.flare_repetitions, pythons)
        if options.even:
            rows += compare(replace(size, sites=options.even), ["bare", "workers"], options.repetitions, 0)
    print("\nOne torch thread per process in every variant.\n\n" + table(HEADER, rows))
    if options.growth:
        largest = replace(base, steps=2, rounds=1, studies=base.studies * (1 if options.quick else 4))
        print("\n" + growth(largest, options.growth, options.repetitions))
    say(machine())


if __name__ == "__main__":
    main()
