"""What running a federation costs beside its training: fedvlp's engine and FLARE's simulator against a bare loop.

    python benchmarks/orchestration.py [--steps 20 2] [--repetitions 3] [--flare-repetitions 1] [--quick]

One workload (a 4.9-million-parameter dual encoder, FedAvg, 5 sites, 5 rounds, batch 32, the built-in cohort, no
evaluation, the same seeds, one torch thread) in fresh processes, variants interleaved:

    bare       a hand-written FedAvg loop over the same model, data and loss; writes the final weights and nothing else
    engine     runs.simulate, sites in turn, with everything it writes: checkpoints, metrics.csv, TensorBoard, model
    workers    the same with two forked workers
    flare-tN   ``nvflare simulator -t N`` on the exported job

Overhead is start-up (launch to first step) + idle (time in between in which no site trains) + shutdown (last step to
exit), from notes that the workload itself writes; ``cpu`` is processor time, which a busy machine moves less. ``anon``
is memory without the pages of libraries. Weights must be equal bit for bit. A second part grows the number of sites
over the same records and shows the peak memory.
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common import MIB, TreeMemory, machine, rounded, say, table
from timed import EVENTS, TimedFedAvg, note

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Size:
    """A workload."""

    steps: int = 20
    sites: int = 5
    rounds: int = 5
    studies: int = 1000
    vocabulary: int = 30_522  # with the tiny towers: 4 889 856 parameters


def experiment(size: Size) -> Any:
    """The workload as fedvlp describes it."""
    from fedvlp.data.synthetic.cohort import SyntheticCohort
    from fedvlp.federation.loop import Rounds
    from fedvlp.models.dual_encoder import ModelConfig
    from fedvlp.run.experiment import Experiment
    from fedvlp.training.config import Training

    model = ModelConfig(vocabulary=size.vocabulary, head_norm="layer", head_hidden=256)
    data = SyntheticCohort(sites=size.sites, size=size.studies, image_size=72, beta=1000.0)
    rounds = Rounds(rounds=size.rounds, evaluate_every=0)
    method = TimedFedAvg(local_steps=size.steps)
    return Experiment("bench", method, model, data=data, training=Training(lr=5e-4, threads=1), rounds=rounds)


def bare(size: Size, folder: Path) -> None:
    """FedAvg as one would write it: nothing of fedvlp but the model, the loss, the records and how seeds are named."""
    import torch
    from safetensors.torch import save_file

    from fedvlp.core.seeds import seed
    from fedvlp.data.loader import SiteData
    from fedvlp.data.synthetic.cohort import SyntheticCohort
    from fedvlp.models.dual_encoder import ModelConfig
    from fedvlp.objectives.convirt import ConVIRT

    torch.set_num_threads(1)
    cohort = SyntheticCohort(sites=size.sites, size=size.studies, image_size=72, beta=1000.0).build()
    model = ModelConfig(vocabulary=size.vocabulary, head_norm="layer", head_hidden=256).build(0)
    loss_of = ConVIRT()
    sites = sorted(set(cohort.sites or ()))
    splits = {site: {"train": cohort.rows("train", site)} for site in sites}
    data = {site: SiteData(cohort, splits[site], model.tokenizer, 64) for site in sites}
    total = sum(data[site].num_train for site in sites)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for number in range(size.rounds):
        mean = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in state.items()}
        for site in sites:
            model.load_state_dict(state)
            model.train()
            optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.05, fused=True)
            order = torch.Generator().manual_seed(seed(0, site, number, 0, "batches"))
            began = 0.0
            for batch in data[site].train_batches(size.steps, 32, order):
                began = began or time.monotonic()
                loss = loss_of(model(batch), batch)["contrastive"]
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
            note(site, began, time.monotonic())
            for name, tensor in model.state_dict().items():
                mean[name].add_(tensor, alpha=data[site].num_train)
        state = {name: (tensor / total).float() for name, tensor in mean.items()}
    save_file(state, folder / "model.safetensors")


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


def run(variant: str, size: Size) -> dict[str, Any]:
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
        }
        if variant.startswith("flare"):
            simulator = Path(sys.executable).with_name("nvflare")
            job = str(flare_job(size, folder))
            workspace = str(folder / "workspace")
            command = [str(simulator), "simulator", job, "-t", variant.partition("-t")[2], "-w", workspace]
        else:
            command = [sys.executable, __file__, "--inside", variant, json.dumps(vars(size)), str(folder)]
        with TreeMemory(tag) as memory, open(folder / "log", "w", encoding="utf-8") as log:
            launched = time.monotonic()
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            _, status, usage = os.wait4(process.pid, 0)
            ended = time.monotonic()
            process.returncode = status
        weights = next(folder.rglob("model.safetensors"), None)
        if status or weights is None or not events.exists():
            raise SystemExit(f"{variant} failed (exit {status}):\n" + (folder / "log").read_text()[-3000:])
        visits = [line.split() for line in events.read_text().splitlines()]
        spans = sorted((float(began), float(stop)) for _, began, stop in visits)
        row = {"variant": variant, **vars(size), "visits": len(spans), **phases(spans, launched, ended)}
        return row | {
            "cpu": rounded(usage.ru_utime + usage.ru_stime),
            "peak_mib": round(memory.peak / MIB),
            "anon_mib": round(memory.anonymous / MIB),
            "processes": len(memory.processes),
            "weights": fingerprint(weights),
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


def fingerprint(path: Path) -> str:
    """A hash of names and bytes of all tensors in a safetensors file."""
    from safetensors.torch import load_file

    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(load_file(path).items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def compare(size: Size, variants: list[str], repetitions: int, flare_repetitions: int) -> list[list[object]]:
    """Runs the variants interleaved and returns the table's rows: medians, ratios to the bare loop."""
    results: dict[str, list[dict[str, Any]]] = {variant: [] for variant in variants}
    for repetition in range(repetitions):
        for variant in variants:
            if not variant.startswith("flare") or repetition < flare_repetitions:
                row = run(variant, size)
                results[variant].append(row)
                say(row)
    base = results["bare"]
    same = len({row["weights"] for rows in results.values() for row in rows}) == 1
    say({"check": "weights equal bit for bit in every variant", "sites": size.sites, "steps": size.steps, "ok": same})
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=[20, 2], help="steps of a site per round")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--flare-repetitions", type=int, default=1, help="FLARE takes minutes each; 0 leaves it out")
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
    flare = ["flare-t5", "flare-t1"] if options.flare_repetitions else []
    for steps in options.steps:
        size = replace(base, steps=steps)
        variants = ["bare", "engine", "workers", *flare]
        rows += compare(size, variants, options.repetitions, options.flare_repetitions)
        if options.even:
            rows += compare(replace(size, sites=options.even), ["bare", "workers"], options.repetitions, 0)
    print("\nOne torch thread per process in every variant.\n\n" + table(HEADER, rows))
    if options.growth:
        largest = replace(base, steps=2, rounds=1, studies=base.studies * (1 if options.quick else 4))
        print("\n" + growth(largest, options.growth, options.repetitions))
    say(machine())


if __name__ == "__main__":
    main()
