"""Bytes between server and sites under each option of the wire, counted on the socket, and what they cost in recall.

    python studies/programs/bytes.py [--seeds 3] [--out FOLDER] [--quick]       # about 40 minutes of one core

Bytes: `nvflare simulator` runs the job in a network namespace of its own (``unshare``), where the loopback device
counts every byte of it: TCP, TLS-free, with polling and headers; where that is not allowed the table says so and shows
the tensors' own bytes. ``x full`` divides by what FLARE sends as it comes: every tensor in float32, both ways, in every
phase, at every site. The first broadcast, which brings everything, is in the total; ``later`` leaves round 0 out, by
the tensors' bytes in the run's history. ``alignment only`` is FedDRA without its joint phase: the encoders stay.
``scale`` counts such a round of ViT-B/16 + BERT-base, whose alignment modules are a smaller part of the whole; 8 GB.

Recall: the in-process engine, whose bytes are the simulator's, trains three sites for three rounds from a model that
nine rounds of FedAvg made in float32, at a tenth of its learning rate, as the papers' towers start trained: from random
weights the last bits alone move R@1 by a point or two. Mean and standard deviation over seeds of R@1 and R@5 in batches
of 32 over 9,600 studies that no site has, and of the differences to float32 of the same seed. A control changes nothing
but the last bits. Results already in ``--out`` are kept.

Codec: milliseconds of processor, and times a copy of the same float32 tensors into touched memory in the same pass; one
thread. ``least`` reads and writes what coding must, in blocks as it does, with one operation for each.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import command_line, interleaved, machine, mean_sd, rounded, say, table
from echo import EchoModel

from fedvlp.core.checkpoint import load_tensors, save_tensors
from fedvlp.core.metric_keys import BYTES_DOWN, BYTES_UP
from fedvlp.core.types import Broadcast, Reply, State, Update, group
from fedvlp.data.cohort import SPLITS
from fedvlp.evaluation.metric_names import recall_at
from fedvlp.evaluation.retrieval import embed, in_batch_retrieval
from fedvlp.federation.codec import PLAIN, Wire, _blocks, cast, dequantise, quantise, widen
from fedvlp.federation.exchange import SequentialExchange
from fedvlp.federation.loop import Federation
from fedvlp.federation.site_memory import SiteMemory
from fedvlp.federation.wire import EncodedSite, ServerEnd, SiteEnd
from fedvlp.flare.jobs import write_job
from fedvlp.methods import FedDRA
from fedvlp.run import presets
from fedvlp.run.assembly import Assembly
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder

ALIGN = FedDRA(align_steps=1, local_steps=0)
"""Its phases are ``align`` alone."""

OPTIONS = {
    "float32": PLAIN,
    "bfloat16 both ways": Wire(down="bfloat16", up="bfloat16"),
    "bfloat16 down, 8 bit up": Wire(down="bfloat16", up="int8"),
}
ALIGNMENT = "feddra, alignment only"
OTHER_BITS = "float32, learning rate x (1 + 1e-6)"
"""The same run to within rounding: how far apart two such runs end is what an option must be compared with."""

NVFLARE = Path(sys.executable).parent / "nvflare"
COUNTED = """ip link set lo up; "$@" >&2; code=$?; awk '$1 == "lo:" {print $2}' /proc/net/dev; exit $code"""


def workload(method: str, wire: Wire, seed: int, rounds: int, steps: int, size: int) -> Experiment:
    """Three sites; as many optimiser steps in a FedDRA round (a fifth of them align) as in FedAvg's."""
    experiment = presets.get(method.partition(",")[0])
    if method == "fedavg":
        chosen: Any = replace(experiment.method, local_steps=steps)
    else:
        align = steps if method == ALIGNMENT else steps // 5
        chosen = replace(experiment.method, align_steps=align, local_steps=steps - align)
    return replace(
        experiment,
        method=chosen,
        wire=wire,
        data=replace(experiment.data, sites=3, size=size, seed=seed),
        rounds=replace(experiment.rounds, rounds=rounds, seed=seed),
    )


def on_socket(experiment: Experiment, seconds: float = 900) -> tuple[int | None, list[dict[str, Any]]]:
    """Bytes that loopback carried in one run of FLARE's simulator (None: no namespace), and the run's history.

    Raises subprocess.TimeoutExpired for a run longer than ``seconds``.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = [str(NVFLARE), "simulator", str(write_job(experiment, folder / "job")), "-t", str(experiment.data.sites)]
        alone = ["unshare", "-rn", "sh", "-c", COUNTED, "sh"]
        allowed = subprocess.run([*alone, "true"], capture_output=True, check=False).returncode == 0
        environment = {key: value for key, value in os.environ.items() if key != "FEDVLP_HOME"}
        done = subprocess.run(
            [*alone, *run] if allowed else run,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(done.stderr[-2000:])
        history = RunFolder(folder / "runs" / experiment.name / "001").history()
        return int(done.stdout.split()[-1]) if allowed else None, history


def traffic(rounds: int, quick: bool) -> Iterator[dict[str, Any]]:
    """One row per method and option: bytes, and their ratio to the full exchange."""
    for method in ("fedavg", "feddra", ALIGNMENT):
        for option in OPTIONS:
            experiment = workload(method, OPTIONS[option], 0, rounds, 5, 400 if quick else 700)
            experiment = replace(experiment, rounds=replace(experiment.rounds, evaluate_every=0))
            model = experiment.model.build(0)
            whole = sum(t.numel() * t.element_size() for t in model.state_dict().values())
            counted, history = on_socket(experiment)
            down = sum(record["bytes"][BYTES_DOWN] for record in history)
            up = sum(record["bytes"][BYTES_UP] for record in history)
            later = [record["bytes"] for record in history if record["round"]]
            full = 2 * 3 * whole
            row = {
                "method": method,
                "option": option,
                "model_bytes": whole,
                "rounds": rounds,
                "socket": counted,
                "down": down,
                "up": up,
                "x full, socket": counted and rounded(counted / (full * len(history))),
                "x full": rounded((down + up) / (full * len(history))),
                "x full, later": rounded(sum(sum(b.values()) for b in later) / (full * len(later))),
            }
            say(row)
            yield row


def at_scale(part: float) -> Iterator[list[str]]:
    """Rows for one round of one site in which the alignment modules and heads of ViT-B/16 + BERT-base alone change.

    Both ends of the wire in this process, so what counts is the tensors' own bytes (the socket adds one per cent).
    """
    torch.set_num_threads(1)
    named = EchoModel(part).named()
    trained = [name for name in named if group(name) != "encoder"]
    generator = torch.Generator().manual_seed(0)

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor + 1e-3 * torch.randn(tensor.shape, generator=generator)

    for option, wire in OPTIONS.items():
        state = {name: torch.randn(shape, generator=generator) for name, shape in named.items()}
        whole = sum(t.numel() * t.element_size() for t in state.values())
        site = SiteEnd(wire, ALIGN, SiteMemory(None))

        def exchange(messages: Mapping[str, Broadcast], site: SiteEnd = site) -> Iterator[tuple[str, Reply]]:
            for name, message in messages.items():
                received = site.decode(message)
                update = {key: moved(received.state[key]) for key in trained}
                yield name, site.encode(Update(name, message.round, message.phase, 1, update))

        server = ServerEnd(wire, exchange)
        for turn in range(2):  # the first brings everything
            for _, reply in server({"site": Broadcast(turn, "align", state)}):
                assert isinstance(reply, Update)
                state = {**state, **reply.state}
        share = sum(state[name].numel() for name in trained) * 4 / whole
        sent = sum(server.bytes.values())
        yield [option, f"{whole / 1e6:.0f} MB", f"{share:.3f}", f"{sent / 1e6:.1f} MB", f"{sent / (2 * whole):.4f}"]


class Fresh:
    """Studies that no site has: another cohort of the same generator, decoded once."""

    def __init__(self, experiment: Experiment, size: int) -> None:
        self.assembly = Assembly(replace(experiment, data=replace(experiment.data, seed=1000, size=size)))  # type: ignore[type-var]
        data = self.assembly.data(None)
        self.batches = [batch for split in SPLITS for batch in data.batches(split, 64, drop_last=False)]

    def recall(self, state: State) -> dict[str, float]:
        """R@1 and R@5 of a model in batches of 32, mean of both directions, in percent."""
        client = self.assembly.site("site-1").client
        client.load(state)
        client.model.eval()
        image, text = embed(client.model, iter(self.batches))
        order = torch.randperm(len(image), generator=torch.Generator().manual_seed(0))
        found = in_batch_retrieval(image[order], text[order])
        return {f"R@{k}": found[recall_at(k)] for k in (1, 5)}


def run_from(experiment: Experiment, start: State | None) -> State:
    """What the model of ``start`` (None: random weights) becomes, over the encoded wire."""
    assembly = Assembly(experiment)
    server = assembly.server(assembly.sites())
    if start is not None:
        server.replace(start)
    method = experiment.method
    exchange = SequentialExchange(
        lambda name: EncodedSite(assembly.site(name), SiteEnd(experiment.wire, method, SiteMemory(None)))
    )
    return Federation(experiment.method, server, experiment.rounds, exchange, wire=experiment.wire).run()


def recall(out: Path, seeds: int, rounds: int, steps: int, size: int, fresh: int) -> Iterator[list[str]]:
    """Rows of the recall table; every finished run is noted in ``out``."""
    results: dict[tuple[str, str], list[dict[str, float]]] = {}
    torch.set_num_threads(1)
    unseen = Fresh(workload("fedavg", PLAIN, 0, 1, 1, size), fresh)
    for seed in range(seeds):
        saved = out / f"start-{seed}-{rounds}-{steps}.safetensors"
        if not saved.exists():
            save_tensors(saved, run_from(workload("fedavg", PLAIN, seed, 3 * rounds, steps, size), None))
        start = load_tensors(saved)[0]
        say({"seed": seed, "start": unseen.recall(start)})
        for method in ("fedavg", "feddra"):
            for place, option in enumerate([*OPTIONS, OTHER_BITS]):
                note = out / f"{method}-{place}-{seed}-{rounds}-{steps}.json"
                if not note.exists():
                    experiment = workload(method, OPTIONS.get(option, PLAIN), seed, rounds, steps, size)
                    lr = experiment.training.lr / 10 * (1 + 1e-6 * (option == OTHER_BITS))
                    experiment = replace(experiment, training=replace(experiment.training, lr=lr))
                    note.write_text(json.dumps(unseen.recall(run_from(experiment, start))))
                measured = json.loads(note.read_text())
                results.setdefault((method, option), []).append(measured)
                say({"method": method, "option": option, "seed": seed, **measured})
    for (method, option), runs in results.items():
        cells = [mean_sd([run[f"R@{k}"] for run in runs], 2) for k in (1, 5)]
        plain = results[method, "float32"]
        paired = [
            mean_sd([run[f"R@{k}"] - one[f"R@{k}"] for run, one in zip(runs, plain, strict=True)], 2) for k in (1, 5)
        ]
        yield [method, option, *cells, *paired]


def speed(count: int) -> Iterator[list[str]]:
    """Rows of the codec's speed on ``count`` tensors [3072, 768] (a transformer's), results kept in new memory."""
    torch.set_num_threads(1)
    values = [torch.randn(3072, 768) for _ in range(count)]
    bases = [value + 0.01 * torch.randn_like(value) for value in values]
    missed, into = ([torch.zeros_like(value) for value in values] for _ in range(2))
    coded = [quantise(*tensors) for tensors in zip(values, bases, missed, strict=True)]
    halves = [cast("value", value, "bfloat16") for value in values]

    def least() -> None:
        for value, base, left, (codes, _) in zip(values, bases, missed, coded, strict=True):
            for some, start, error, code in _blocks(value, base, left, codes):
                code.copy_(error.add_(some, alpha=0.0).sub(start))

    def decoded_in_turn() -> None:
        for pair, base in zip(coded, bases, strict=True):
            dequantise(*pair, base)

    times = interleaved(
        {
            "copy": lambda: [out.copy_(value) for out, value in zip(into, values, strict=True)],
            "copy into new memory": lambda: [value.clone() for value in values],
            "8 bit, encode with error feedback": lambda: [*map(quantise, values, bases, missed)],
            "8 bit, encode: least": least,
            "8 bit, decode one by one, as a run does": decoded_in_turn,
            "8 bit, decode": lambda: [dequantise(*pair, base) for pair, base in zip(coded, bases, strict=True)],
            "bfloat16, encode": lambda: [cast("value", value, "bfloat16") for value in values],
            "bfloat16, decode": lambda: [widen(half) for half in halves],
        },
        9,
        time.process_time,
    )
    for name, seconds in times.items():
        copied = [one / copy for one, copy in zip(seconds, times["copy"], strict=True)]
        median = statistics.median(seconds)
        yield [name, f"{median * 1e3:.1f}", f"{statistics.median(copied):.2f}", f"{min(copied):.2f}"]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", choices=["traffic", "scale", "recall", "speed"])
    parser.add_argument("--out", type=Path, default=Path("build/bytes"), help="where finished recall runs are noted")
    parser.add_argument("--quick", action="store_true")
    chosen = parser.parse_args()
    say(machine())
    if chosen.only in (None, "speed"):
        print(table(["codec", "ms", "x copy, median", "x copy, least"], speed(2 if chosen.quick else 16)))
    if chosen.only in (None, "traffic"):
        rows = list(traffic(2 if chosen.quick else 3, chosen.quick))
        keys = ("method", "option", "socket", "down", "up", "x full, socket", "x full", "x full, later")
        print(table(keys, ([row[key] for key in keys] for row in rows)))
    if chosen.only in (None, "scale"):
        head = ["option", "model", "share that trains", "later round, both ways", "x full"]
        print(table(head, at_scale(0.02 if chosen.quick else 1.0)))
    if chosen.only in (None, "recall"):
        chosen.out.mkdir(parents=True, exist_ok=True)
        sizes = (1, 5, 400, 400) if chosen.quick else (3, 50, 1200, 9600)  # rounds, steps, studies, fresh studies
        lines = recall(chosen.out, 1 if chosen.quick else chosen.seeds, *sizes)
        head = ["method", "option", "R@1", "R@5", "R@1 less float32's, by seed", "R@5 less float32's, by seed"]
        print(table(head, list(lines)))
    say(machine())


if __name__ == "__main__":
    main()
