"""All that a GPU has to show, in nine minutes, on one H100 or H200.

    python studies/programs/gpu.py --resume gpu.json             # goes on with what gpu.json lacks
    python studies/programs/gpu.py --only run steps              # some pieces alone
    python studies/programs/gpu.py --quick --device cpu          # everything small, to see that it runs

The most telling pieces come first and those that compile last, each in a process of its own with a limit in seconds:
one that fails, or takes too long, costs no other. What is measured is written to the file of ``--resume`` at once.
Times are those of CUDA events, blocks of steps interleaved, medians. "Of the peak" is the share of a bfloat16 matrix
product of 8,192 x 8,192 in the same piece; operations are counted, not estimated. ``run`` is FedDRA of the preset
feddra-paper by ``simulate``: loader, anchor, probe, evaluation, aggregation and checkpoints (hashed words, random
weights: nothing is fetched), with the kernels that ten of its steps spend the most time in.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from common import command_line, machine, rounded, say, spread, table
from gpu_trace import Trace, traced
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from training import Pair, Synthetic, ours, plain

from fedvlp.core.aggregation import StreamingMean
from fedvlp.core.client import Client
from fedvlp.core.device import moved, to_host
from fedvlp.core.types import Broadcast
from fedvlp.data import loader
from fedvlp.data.loader import SiteData
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.evaluation.retrieval import ranks
from fedvlp.methods import FedAvg
from fedvlp.methods.math.contrast import inter_contrast
from fedvlp.models.dual_encoder import DualEncoder, ModelConfig
from fedvlp.objectives.convirt import ConVIRT, info_nce
from fedvlp.run import presets
from fedvlp.run.assembly import Assembly
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder
from fedvlp.run.simulate import simulate
from fedvlp.training.autotune import choose
from fedvlp.training.local_training import train
from fedvlp.training.settings import Training

MINUTES = 9.0
LIMITS = {
    "ceilings": 40, "run": 130, "steps": 110, "between tasks": 45, "caching": 60, "contrast": 45, "retrieval": 45,
    "run, compiled": 240, "steps, compiled": 170,
}  # fmt: skip
"""Seconds of each piece, in the order in which they are measured."""

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Bench:
    """Where and how large."""

    device: torch.device
    quick: bool
    traces: Path | None = None  # folder of the traces of runs

    def of(self, full: int, quick: int) -> int:
        return quick if self.quick else full

    def finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def seconds(self, call: Callable[[], object]) -> float:
        """Of one call: by CUDA events, or by the clock."""
        if self.device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            return begin.elapsed_time(end) / 1000
        began = time.perf_counter()
        call()
        return time.perf_counter() - began

    def interleaved(self, calls: dict[str, Callable[[], object]], blocks: int) -> dict[str, list[float]]:
        """Seconds of each call, A B C A B C; the first block warms up."""
        found: dict[str, list[float]] = {name: [] for name in calls}
        for block in range(blocks + 1):
            for name, call in calls.items():
                taken = self.seconds(call)
                if block:
                    found[name].append(taken)
        return found

    def peak(self) -> float:
        """Operations per second of a bfloat16 matrix product."""
        size = self.of(8192, 256)
        a, b = (torch.randn(size, size, device=self.device).bfloat16() for _ in range(2))
        return 2 * size**3 / statistics.median(self.interleaved({"product": lambda: a @ b}, 20)["product"])

    def fresh_memory(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def memory_gib(self) -> float:
        return rounded(torch.cuda.max_memory_allocated() / 2**30) if self.device.type == "cuda" else 0.0


def ceilings(bench: Bench) -> Rows:
    """Matrix product, copies on the device, and of the 834 MB model from and to the host."""
    values = bench.of(208_480_513, 10_000)
    host, there = torch.randn(values), torch.empty(values, device=bench.device)
    pinned = host.pin_memory() if bench.device.type == "cuda" else host.clone()
    other = torch.empty_like(there)
    calls: dict[str, Callable[[], object]] = {
        "device to device": lambda: other.copy_(there),
        "pageable to device": lambda: there.copy_(host),
        "pinned to device": lambda: there.copy_(pinned, non_blocking=True),
        "device to pageable": lambda: host.copy_(there),
        "device to pinned": lambda: pinned.copy_(there, non_blocking=True),
    }
    found = bench.interleaved(calls, 5)
    rows: Rows = [{"what": "bfloat16 product", "tflop_per_s": rounded(bench.peak() / 1e12)}]
    for name, seconds in found.items():
        moved_bytes = 4 * values * (2 if name == "device to device" else 1)  # read and written
        rate = moved_bytes / statistics.median(seconds) / 1e9
        rows.append({"what": name, "ms": rounded(1000 * statistics.median(seconds)), "gb_per_s": rounded(rate)})
    return rows


def paper(bench: Bench, compiled: bool) -> Experiment:
    """feddra-paper with random weights, two sites and two rounds; when quick, with the smallest of everything."""
    chosen = presets.get("feddra-paper")
    model = replace(chosen.model, pretrained=False)
    training = replace(chosen.training, compile=compiled, device="cuda" if bench.device.type == "cuda" else "cpu")
    data = SyntheticCohort(sites=2, size=1300, image_size=256)
    if bench.quick:
        model = ModelConfig(image_size=64, head_hidden=16, text_layers=1)
        data = SyntheticCohort(sites=2, size=90, image_size=72)
        training = replace(training, batch_size=8, threads=1, precision="float32", attention="sdpa", compile=False)
    method: Any = chosen.method
    if bench.quick:
        method = replace(method, align_steps=1, local_steps=2, dro_batch=8)
    rounds = replace(chosen.rounds, rounds=2)
    return replace(chosen, method=method, model=model, training=training, data=data, rounds=rounds)


def operations(experiment: Experiment) -> dict[str, float]:
    """Operations of matrix products of a record in a step of each phase, forward and backward, the anchor's too."""
    data: Any = experiment.data
    assembly = Assembly(replace(experiment, data=replace(data, size=60)))
    site = assembly.site(assembly.sites()[0])
    client, method = site.client, site.method
    state = {name: tensor.detach().clone() for name, tensor in client.state().items()}
    batch = next(client.data.train_batches(1, 4, torch.Generator()))
    counted = {}
    for phase in method.phases(0):
        client.set_trainable(lambda name, phase=phase: method.trains(name, phase))
        client.model.set_attention("explicit")  # fused kernels are not counted everywhere
        with FlopCounterMode(display=False) as counter:
            torch.stack(list(method.losses(client, batch, Broadcast(0, phase, state)).values())).sum().backward()
        counted[phase] = counter.get_total_flops() / len(batch["row"])
    return counted


def whole_run(bench: Bench, compiled: bool = False) -> Rows:
    """Share of a run in which the GPU works, and of its peak, by the run's own trace."""
    experiment = paper(bench, compiled)
    with tempfile.TemporaryDirectory() as folder, traced(bench.device) as trace:
        began = time.perf_counter()
        simulate(experiment, RunFolder.create(Path(folder), experiment))
        bench.finish()
        wall = time.perf_counter() - began
    wall -= trace.measuring
    if bench.traces is not None:
        trace.write(bench.traces / f"gpu-trace{'-compiled' if compiled else ''}.json")
    arithmetic = choose(experiment.training.precision, experiment.training.attention, bench.device)
    figures = told(trace, wall, operations(experiment), bench.peak(), experiment)
    kernels: Rows = [{"kernel": name, "share": rounded(share)} for name, share in trace.kernels.items()]
    return [{"arithmetic": " ".join(arithmetic)} | figures, *kernels]


def told(trace: Trace, wall: float, work: dict[str, float], peak: float, experiment: Experiment) -> dict[str, Any]:
    """The shares of the whole run, and of the time from its first task to its last (without preparing the data)."""
    batch = experiment.training.batch_size
    steps = {phase: trace.count(f"step {phase}") for phase in work}
    flops = sum(count * batch * work[phase] for phase, count in steps.items())
    span = trace.span()
    return {
        "steps": steps,
        "seconds": rounded(wall),
        "seconds_of_tasks": rounded(span),
        "busy_of_tasks": rounded(trace.busy() / span),
        "busy_inside_tasks": rounded(trace.busy() / (trace.host_seconds("task") - trace.measuring)),
        "busy_of_run": rounded(trace.busy() / wall),
        "of_peak_of_tasks": rounded(flops / span / peak),
        "ms_per_step": {phase: trace.median_ms(f"step {phase}") for phase in work},
        "pairs_per_second": rounded(batch * sum(steps.values()) / span),
    }


def pair(bench: Bench) -> Pair:
    return Pair("tiny", batch=8) if bench.quick else Pair("vit_base_patch16_224", (12, 768), 388, tokens=128)


def site_data(bench: Bench, model: DualEncoder, size: int) -> SiteData:
    """Drawn films of 256 pixels with their reports: what a site's loader reads."""
    spec = SyntheticCohort(sites=1, size=int(size * 1.6) + 40, image_size=bench.of(256, 72))
    cohort = spec.build()
    return SiteData(
        cohort, {"train": cohort.rows("train")}, model.tokenizer, model.config.image_size, False, bench.device
    )


def peer(bench: Bench, folder: Path) -> nn.Module | None:
    """open_clip's model of the same towers with random weights, where it is installed."""
    try:
        from open_clip.model import CustomTextCLIP
    except ImportError:
        return None
    layers, width = (1, 64) if bench.quick else (12, 768)
    settings = {
        "model_type": "bert", "architectures": ["BertModel"], "vocab_size": 28_996, "hidden_size": width,
        "num_hidden_layers": layers, "num_attention_heads": width // 64, "intermediate_size": 4 * width,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    vision = {"image_size": bench.of(224, 64), "layers": layers, "width": width, "head_width": 64, "patch_size": 16}
    text = {
        "hf_model_name": str(folder), "hf_tokenizer_name": str(folder), "hf_model_pretrained": False,
        "hf_pooler_type": "cls_last_hidden_state_pooler", "hf_proj_type": "linear",
    }  # fmt: skip
    return CustomTextCLIP(512, vision, text).to(bench.device)


def peer_steps(bench: Bench, model: nn.Module, batch: dict[str, Tensor], steps: int, optimizer: Any) -> None:
    """open_clip's step as its training program makes it: amp_bf16, fused AdamW, its own loss."""
    from open_clip.loss import ClipLoss

    model.train()
    image = batch["image"].expand(-1, 3, -1, -1)
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast(bench.device.type, torch.bfloat16):
            features = model(image, batch["text"])
            loss = ClipLoss()(*features[:3])
        loss.backward()
        optimizer.step()


def steps(bench: Bench, compiled: bool = False) -> Rows:
    """A step of each kind, interleaved: by hand, by the product's loop, with the real loader, open_clip's."""
    chosen, count = pair(bench), bench.of(6, 2)
    low = Training(lr=2e-5, batch_size=chosen.batch, precision="bfloat16")
    one = chosen.model().to(bench.device)
    data, synthetic = site_data(bench, one, chosen.batch), Synthetic(one, chosen.batch, bench.device)

    def by_hand(fused: bool) -> None:
        with torch.autocast(bench.device.type, torch.bfloat16):
            plain(one, synthetic, count, fused)

    def loaded(training: Training, bucket: int = 16) -> None:
        with patch.object(loader, "BUCKET", bucket):
            client = Client("a", 0, one, ConVIRT(), data)
            train(FedAvg(local_steps=count), client, Broadcast(0, "train", {}), training, lambda: False)

    longest = one.config.max_tokens
    calls: dict[str, Callable[[], object]]
    if compiled:
        calls = {"fedvlp, loader, length buckets": lambda: loaded(replace(low, compile=not bench.quick))}
    else:
        calls = {
            "by hand, bfloat16": lambda: by_hand(False),
            "by hand, fused AdamW": lambda: by_hand(True),
            "fedvlp, a batch that is there": lambda: ours(one, synthetic, count, low),
            "fedvlp, loader, all texts as long as the longest": lambda: loaded(low, longest),
            "fedvlp, loader, length buckets": lambda: loaded(low),
        }
    with tempfile.TemporaryDirectory() as folder:
        theirs = peer(bench, Path(folder))
    if theirs is not None:
        optimizer = torch.optim.AdamW(theirs.parameters(), lr=2e-5, fused=True)
        model: Any = torch.compile(theirs) if compiled and not bench.quick else theirs
        calls["open_clip"] = lambda: peer_steps(bench, model, synthetic.batch, count, optimizer)
    peak, work = bench.peak(), model_operations(one, synthetic)
    bench.fresh_memory()
    rows = []
    for name, seconds in bench.interleaved(calls, bench.of(3, 1)).items():
        step = [taken / count for taken in seconds]
        rate = chosen.batch / statistics.median(step)
        row = {"what": name, "ms": spread([1000 * one for one in step]), "pairs_per_second": rounded(rate)}
        rows.append(row | {"of_peak": rounded(rate * work / peak)})
    return [*rows, {"what": "peak memory of all", "gib": bench.memory_gib(), "gflop_a_pair": rounded(work / 1e9)}]


def model_operations(model: DualEncoder, data: Synthetic) -> float:
    """Operations of a pair's forward and backward pass, all tokens counted."""
    model.set_attention("explicit")
    batch = {name: tensor[:2] for name, tensor in data.batch.items()}
    with FlopCounterMode(display=False) as counter:
        output = model(batch)
        (output.image.sum() + output.text.sum()).backward()
    model.set_attention("sdpa")
    model.zero_grad()
    return counter.get_total_flops() / 2


def caching(bench: Bench) -> Rows:
    """Gradient caching at about ten times the batch that fits, against a plain step."""
    chosen = pair(bench)
    model = chosen.model().to(bench.device)
    low = Training(lr=2e-5, precision="bfloat16")
    rows: Rows = []
    whole = bench.of(4096, 32)
    for size, training in ((chosen.batch, low), (whole, replace(low, micro_batch=chosen.batch))):
        data = Synthetic(model, size, bench.device)
        ours(model, data, 1, training)
        bench.fresh_memory()
        taken = statistics.median(bench.seconds(lambda: ours(model, data, 1, training)) for _ in range(bench.of(3, 1)))  # noqa: B023
        rate = size / taken
        rows.append({"what": f"batch {size}", "pairs_per_second": rounded(rate), "gib": bench.memory_gib()})
    return [*rows, {"what": "x plain", "ratio": rounded(rows[1]["pairs_per_second"] / rows[0]["pairs_per_second"])}]


def between_tasks(bench: Bench) -> Rows:
    """What a run does between training: another site's weights in and out, the mean of five updates."""
    model = pair(bench).model().to(bench.device)
    client = Client("a", 0, model, ConVIRT(), Synthetic(model, 2, bench.device))
    own = {name: tensor.detach().clone() for name, tensor in client.state().items()}
    host = {name: tensor.cpu() for name, tensor in own.items()}
    pinned = {n: t.pin_memory() for n, t in host.items()} if bench.device.type == "cuda" else host
    five = [{name: tensor.clone() for name, tensor in own.items()} for _ in range(5)]

    def mean() -> None:
        folded = StreamingMean(own, 5.0)
        for state in five:
            folded.add(state, 1.0)
        folded.result()

    calls: dict[str, Callable[[], object]] = {
        "weights from the device": lambda: client.load(own),
        "weights from pinned memory": lambda: client.load(moved(pinned, bench.device)),
        "weights from pageable memory": lambda: client.load(client.here(host)),
        "weights to pageable memory": lambda: {name: tensor.cpu() for name, tensor in client.state().items()},
        "weights to pinned memory": lambda: to_host(client.state()),
        "mean of five on the device": mean,
    }
    size = sum(tensor.numel() * tensor.element_size() for tensor in own.values())
    found = bench.interleaved(calls, 5)
    return [
        {"what": name, "ms": spread([1000 * s for s in seconds]), "mb": size // 10**6}
        for name, seconds in found.items()
    ]


def contrast(bench: Bench) -> Rows:
    """InfoNCE in blocks (of CreamFL) against all logits, both with gradients, and the bare matrix product."""
    rows: Rows = []
    for size in (64,) if bench.quick else (8192, 16_384, 32_768):
        image, text = (F.normalize(torch.randn(size, 512, device=bench.device), dim=1).requires_grad_() for _ in "ab")
        all_rows = torch.arange(size, device=bench.device)

        def full(image: Tensor = image, text: Tensor = text) -> None:
            torch.stack(info_nce(image, text, 0.07)).sum().backward()

        def blocked(image: Tensor = image, text: Tensor = text, rows: Tensor = all_rows) -> None:
            both = inter_contrast(image, text, rows, 0.07).mean(), inter_contrast(text, image, rows, 0.07).mean()
            torch.stack(both).sum().backward()

        @torch.no_grad()
        def product(image: Tensor = image, text: Tensor = text) -> None:
            for part in image.split(4096):
                part @ text.T

        for name, call in {"all logits": full, "blocks": blocked, "product": product}.items():
            bench.fresh_memory()
            taken = statistics.median(bench.interleaved({"": call}, 3)[""])
            rows.append({"what": f"{name}, {size}", "ms": rounded(1000 * taken), "gib": bench.memory_gib()})
    return rows


def retrieval(bench: Bench) -> Rows:
    """Exact ranks of 50,000 x 50,000, both directions, against the product of all scores."""
    size = bench.of(50_000, 500)
    text = F.normalize(torch.randn(size, 512, device=bench.device), dim=1)
    image = F.normalize(text + 0.5 * torch.randn(size, 512, device=bench.device), dim=1)
    tile = (bench.of(8192, 128),) * 2

    def product() -> None:
        for part in image.split(8192):
            part @ text.T

    found = bench.interleaved({"ranks": lambda: ranks(image, text, tile=tile), "product": product}, bench.of(3, 1))
    return [{"what": name, "ms": spread([1000 * one for one in seconds])} for name, seconds in found.items()]


PIECES: dict[str, Callable[[Bench], Rows]] = {
    "ceilings": ceilings,
    "run": whole_run,
    "steps": steps,
    "between tasks": between_tasks,
    "caching": caching,
    "contrast": contrast,
    "retrieval": retrieval,
    "run, compiled": partial(whole_run, compiled=True),
    "steps, compiled": partial(steps, compiled=True),
}


def measured(name: str, common: list[str], limit: float) -> dict[str, Any]:
    """A piece in a process of its own: its rows, and why it ended early, if it did."""
    began, why = time.perf_counter(), ""
    command = [sys.executable, __file__, "--piece", name, *common]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
        output = done.stdout
        if done.returncode:
            why = (done.stderr.strip().splitlines() or ["no message"])[-1]
    except subprocess.TimeoutExpired as stopped:
        output, why = (stopped.stdout or b"").decode(), f"stopped after {limit:.0f} s"
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    rows: Rows = next((line["rows"] for line in lines if "rows" in line), [])
    return {
        "rows": rows,
        "why": why or ("" if rows else "it printed nothing"),
        "seconds": rounded(time.perf_counter() - began),
    }


def is_done(piece: dict[str, Any], terms: dict[str, Any]) -> bool:
    """Whether a piece of the file is whole, and was measured on these ``terms``: card, size and torch."""
    return piece.get("why") == "" and {name: piece.get(name) for name in terms} == terms


def shown(name: str, piece: dict[str, Any]) -> str:
    """A piece as a table."""
    keys = list(dict.fromkeys(key for row in piece["rows"] for key in row))
    rows = [[row.get(key, "") for key in keys] for row in piece["rows"]]
    head = f"\n{name} ({piece['seconds']} s{', ' + piece['why'] if piece['why'] else ''})\n\n"
    return head + (table(keys, rows) if rows else "nothing was measured")


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="+", choices=list(PIECES), default=list(PIECES))
    parser.add_argument(
        "--resume",
        type=Path,
        help="file of finished pieces, read and written; another card, torch or --quick measures them again",
    )
    parser.add_argument("--traces", type=Path, help="folder for Chrome traces of the runs")
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--piece", choices=list(PIECES), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.piece:
        bench = Bench(torch.device(chosen.device), chosen.quick, chosen.traces)
        print(json.dumps({"rows": PIECES[chosen.piece](bench)}), flush=True)
        return
    end = time.monotonic() + 60 * chosen.minutes
    card = torch.cuda.get_device_name() if chosen.device == "cuda" else "cpu"
    say(machine() | {"device": card})
    kept: dict[str, Any] = {}
    if chosen.resume and chosen.resume.is_file():
        kept = json.loads(chosen.resume.read_text(encoding="utf-8"))
    terms = {"device": card, "quick": chosen.quick, "torch": torch.__version__}
    common = ["--device", chosen.device, *(["--quick"] if chosen.quick else [])]
    common += ["--traces", str(chosen.traces)] if chosen.traces else []
    for name in chosen.only:
        left, limit = end - time.monotonic(), LIMITS[name] if chosen.device == "cuda" else 60 * chosen.minutes
        if is_done(kept.get(name, {}), terms):
            print(shown(name, kept[name]))
            continue
        if left < 5:
            print(f"\n{name}: no time left; the same command with --resume goes on here")
            continue
        kept[name] = measured(name, common, min(limit, left)) | terms
        print(shown(name, kept[name]), flush=True)
        if chosen.resume:
            chosen.resume.write_text(json.dumps(kept, indent=1), encoding="utf-8")
    say(machine() | {"device": card})


if __name__ == "__main__":
    main()
