"""Steps per second and memory of the training loop: every option against a plain eager float32 loop, interleaved.

    python studies/programs/training.py [--threads 1] [--quick]     # about six minutes of one core
    python studies/programs/training.py --device cuda               # ViT-B/16 + 6-layer BERT, batch 388, bfloat16

The plain loop is what one would write by hand: forward, backward, AdamW, no option. Memory is that of a process that
runs one variant alone. ``cache`` is gradient caching at 16 times the batch of a step. ``data`` is the loop that draws,
crops and normalises records of the built-in cohort, beside the same loop on the same batches drawn before. ``fixed`` is
a round at one site: FedDRA's beside FedAvg's with as many steps of the encoders, and with what received encoders make
of a record kept (``cache_features``): a demo's site and one of the ledger, where E1 is E2. On a CPU
seconds are processor time, which other programs on the machine disturb less than the wall clock.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import MIB, command_line, fresh_peak, interleaved, machine, peak, rounded, say, spread, table
from torch.utils.flop_counter import FlopCounterMode

from fedvlp.core.client import Client
from fedvlp.core.method import Method
from fedvlp.core.types import Batch, Broadcast
from fedvlp.data.loader import SiteData
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.federation.site import Site
from fedvlp.federation.site_memory import SiteMemory
from fedvlp.methods import FedAvg
from fedvlp.models.dual_encoder import DualEncoder, ModelConfig
from fedvlp.models.tiny import HashTokenizer
from fedvlp.objectives.convirt import ConVIRT
from fedvlp.run import presets
from fedvlp.run.assembly import Assembly
from fedvlp.training.autotune import choose, measured
from fedvlp.training.frozen_features import FixedFeatures
from fedvlp.training.local_training import train
from fedvlp.training.settings import Training

TOKENS = 64
PLAIN = Training(lr=2e-5)
FAST = replace(PLAIN, precision="bfloat16", attention="explicit")


@dataclass(frozen=True)
class Pair:
    """Two towers: a timm name (``tiny``: built in) and a BERT of so many layers and units, and the batch of a step."""

    image: str
    text: tuple[int, int] = (0, 0)
    batch: int = 32
    steps: int = 1  # of a timed phase
    options: dict[str, Training] = field(default_factory=dict)
    tokens: int = TOKENS  # of a report

    def model(self, size: int = 224) -> DualEncoder:
        """With random weights, the same every time."""
        if self.image == "tiny":
            return ModelConfig(head_hidden=256).build(0)
        layers, width = self.text
        settings = {
            "architectures": ["BertModel"],
            "model_type": "bert",
            "vocab_size": 4096 if width < 768 else 28_996,
            "hidden_size": width,
            "num_hidden_layers": layers,
            "num_attention_heads": width // 64,
            "intermediate_size": 4 * width,
            "max_position_embeddings": 512,
        }
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # there is no tokenizer, and none is needed
            (Path(folder) / "config.json").write_text(json.dumps(settings), encoding="utf-8")
            config = ModelConfig(
                image_tower=self.image, text_tower=folder, max_tokens=self.tokens, image_size=size, head_hidden=2048
            )
            return config.build(0)


LOW = {
    "fedvlp, bfloat16": replace(PLAIN, precision="bfloat16"),
    "fedvlp, bfloat16, explicit attention": FAST,
}
EACH = {
    **LOW,
    "fedvlp, explicit attention": replace(PLAIN, attention="explicit"),
    "fedvlp, channels_last": replace(PLAIN, channels_last=True),
    "fedvlp, clipping": replace(PLAIN, clip_norm=1.0),
    "fedvlp, cached micro-batches of 8": replace(PLAIN, micro_batch=8),
    "fedvlp, plain micro-batches of 8": replace(PLAIN, micro_batch=8, accumulation="plain"),
}
COMPILED = {"fedvlp, bfloat16, explicit, compiled": replace(FAST, compile=True)}
PAIRS = {
    "built-in towers": Pair("tiny", batch=32, steps=4, options=EACH),
    "ViT-Ti/16 + BERT 4 x 256": Pair("vit_tiny_patch16_224", (4, 256), 32, options=LOW),
    "ViT-S/16 + BERT 6 x 384": Pair("vit_small_patch16_224", (6, 384), 16, options=LOW),
}
GPU = Pair(
    "vit_base_patch16_224",
    (6, 768),
    388,
    10,
    {
        "fedvlp, bfloat16": replace(PLAIN, precision="bfloat16"),
        "fedvlp, bfloat16, explicit attention": FAST,
        "fedvlp, bfloat16, channels_last": replace(PLAIN, precision="bfloat16", channels_last=True),
        "fedvlp, bfloat16, compiled": replace(PLAIN, precision="bfloat16", compile=True),
    },
)


class Synthetic:
    """One batch again and again, already where it is needed."""

    modalities = ("image", "text")

    def __init__(self, model: DualEncoder, size: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)
        pixels, tokens = model.config.image_size, model.config.max_tokens
        ids = torch.randint(2, 4000, (size, tokens), generator=generator)
        batch = {"image": torch.randn(size, 1, pixels, pixels, generator=generator), "text": ids}
        self.batch: Batch = {name: tensor.to(device) for name, tensor in batch.items()}
        self.num_train = size

    def train_batches(self, steps: int, batch_size: int, generator: torch.Generator) -> Iterator[Batch]:
        return iter([self.batch] * steps)

    def share_images(self, share: object) -> None:
        """They are whole."""


class Drawn:
    """The first batches of ``data``, drawn beforehand; the same in every phase."""

    modalities = ("image", "text")

    def __init__(self, data: SiteData, steps: int, size: int) -> None:
        self.batches = list(data.train_batches(steps, size, torch.Generator().manual_seed(0)))
        self.num_train = data.num_train

    def train_batches(self, steps: int, batch_size: int, generator: torch.Generator) -> Iterator[Batch]:
        return iter(self.batches[:steps])

    def share_images(self, share: object) -> None:
        """They are whole."""


def plain(model: DualEncoder, data: Any, steps: int, fused: bool) -> None:
    """The loop that one would write by hand."""
    objective, parameters = ConVIRT(), list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=PLAIN.lr, weight_decay=PLAIN.weight_decay, fused=fused)
    model.train()
    for batch in data.train_batches(steps, 0, torch.Generator()):
        loss = objective(model(batch), batch)["contrastive"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def ours(model: DualEncoder, data: Any, steps: int, training: Training) -> None:
    """The same steps by fedvlp's loop."""
    client = Client("a", 0, model, ConVIRT(), data)
    train(FedAvg(local_steps=steps), client, Broadcast(0, "train", {}), training, lambda: False)


def variants(pair: Pair, compiled: bool) -> dict[str, Callable[[DualEncoder, Any, int], None]]:
    """Every loop of a pair by its name, the plain one first."""
    chosen: dict[str, Callable[[DualEncoder, Any, int], None]] = {
        "plain loop": lambda model, data, steps: plain(model, data, steps, fused=False),
        "plain loop, fused AdamW": lambda model, data, steps: plain(model, data, steps, fused=True),
    }
    for name, training in {"fedvlp": PLAIN, **pair.options, **(COMPILED if compiled else {})}.items():
        chosen[name] = lambda model, data, steps, training=training: ours(model, data, steps, training)
    return chosen


def flops(pair: Pair, device: torch.device) -> float:
    """Floating-point operations of matrix products per pair and step, counted, forward and backward."""
    model = pair.model().to(device)
    model.set_attention("explicit")
    data = Synthetic(model, 2, device)
    with FlopCounterMode(display=False) as counter:
        output = model(data.batch)
        (output.image.sum() + output.text.sum()).backward()
    return counter.get_total_flops() / 2


def matmul_peak(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Operations per second of one large matrix product: the ceiling in the same run."""
    a = torch.randn(size, size, device=device).to(dtype)
    finish = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    times = interleaved({"product": lambda: (a @ a, finish())}, 8, clock)
    return float(2 * size**3 / min(times["product"]))


def speed(name: str, pair: Pair, repetitions: int, device: torch.device, compiled: bool = False) -> None:
    """Times every variant and compares the weights of the plain fused loop with fedvlp's, which take equal steps."""
    start = pair.model().to(device)
    models = {variant: copy.deepcopy(start) for variant in variants(pair, compiled)}
    data = Synthetic(start, pair.batch, device)
    finish = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def timed(variant: str) -> Callable[[], None]:
        run = variants(pair, compiled)[variant]

        def phase() -> None:
            torch.manual_seed(0)  # of dropout
            run(models[variant], data, pair.steps)
            finish()

        return phase

    clock = time.perf_counter if device.type == "cuda" else time.process_time
    times = interleaved({variant: timed(variant) for variant in models}, repetitions, clock)
    same = all(
        torch.equal(a, b)
        for a, b in zip(
            models["fedvlp"].state_dict().values(), models["plain loop, fused AdamW"].state_dict().values(), strict=True
        )
    )
    work = flops(pair, device) * pair.batch
    bits = torch.bfloat16
    ceiling = {d: matmul_peak(device, d, 8192 if device.type == "cuda" else 2048) for d in (torch.float32, bits)}
    rows = []
    for variant, seconds in times.items():
        step = spread([value / pair.steps for value in seconds])
        ratios = spread([p / s for p, s in zip(times["plain loop"], seconds, strict=True)])
        top = ceiling[bits if "bfloat16" in variant else torch.float32]
        use = work / step["median"] / top
        say(
            {
                "pair": name,
                "variant": variant,
                "batch": pair.batch,
                "seconds_per_step": step,
                "x_plain": ratios,
                "pairs_per_second": rounded(pair.batch / step["median"]),
                "of_matmul_peak": rounded(use),
            }
        )
        rows.append(
            [
                variant,
                f"{1000 * step['median']:.0f}",
                f"{pair.batch / step['median']:.1f}",
                f"{ratios['median']:.2f}",
                f"{ratios['min']:.2f} to {ratios['max']:.2f}",
                f"{100 * use:.0f} %",
            ]
        )
    print(
        f"\n{name}, batch {pair.batch}, {sum(p.numel() for p in start.parameters()):,} parameters, "
        f"{work / pair.batch / 1e9:.1f} GFLOP a pair; fedvlp and the plain fused loop end "
        f"{'with the same weights, bit for bit' if same else 'with DIFFERENT weights'}\n"
    )
    print(table(["variant", "ms a step", "pairs a second", "x plain", "range", "of the matmul peak"], rows) + "\n")


def loaded(names: list[str], repetitions: int) -> None:
    """The loop with its data beside the same on batches that were drawn before."""
    rows = []
    for name in names:
        pair = PAIRS[name]
        model = pair.model()
        pixels, steps = model.config.image_size, 4 * pair.steps
        cohort = SyntheticCohort(sites=1, size=500, image_size=pixels * 9 // 8).build()
        tokenizer = HashTokenizer(4000, model.config.max_tokens)
        data = SiteData(cohort, {"train": cohort.rows("train")}, tokenizer, pixels)
        training = replace(PLAIN, batch_size=pair.batch)
        sources = {"drawn before": Drawn(data, steps, pair.batch), "with its data": data}

        phases = {
            source: partial(ours, copy.deepcopy(model), batches, steps, training) for source, batches in sources.items()
        }
        times = interleaved(phases, repetitions, time.process_time)
        before, alive = times.values()
        ratio = spread([b / a for b, a in zip(before, alive, strict=True)])
        say({"pair": name, "batch": pair.batch, "of the drawn batches' speed": ratio})
        rows.append([name, pair.batch, f"{ratio['median']:.3f}", f"{ratio['min']:.3f} to {ratio['max']:.3f}"])
    print("\n" + table(["pair", "batch", "speed, x drawn batches", "range"], rows) + "\n")


def memory(
    pair: Pair, batch: int, run: Callable[[DualEncoder, Any, int], None], device: torch.device, steps: int
) -> float:
    """MiB that the steps need beyond the model, its batch and what was there before."""
    model = pair.model().to(device)
    data = Synthetic(model, batch, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(model, data, steps)
        return (torch.cuda.max_memory_allocated() - before) / MIB
    run(model, Synthetic(model, 2, device), 1)  # what the first step ever sets up
    before = fresh_peak()
    run(model, data, steps)
    return (peak() - before) / MIB


def alone(*arguments: str) -> float:
    """A measurement of :func:`memory` in a process of its own."""
    done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, check=True)
    return float(done.stdout.strip().splitlines()[-1])


def memories(names: list[str], common: list[str]) -> None:
    """Peak memory of every variant."""
    rows = []
    for name in names:
        for variant in variants(PAIRS.get(name, GPU), compiled=False):
            used = alone("--memory-of", name, "--variant", variant, *common)
            say({"pair": name, "variant": variant, "peak_mib": rounded(used)})
            rows.append([name, variant, f"{used:.0f}"])
    print("\n" + table(["pair", "variant", "peak MiB beyond model and batch"], rows) + "\n")


def cache(names: list[str], common: list[str]) -> None:
    """Gradient caching at 4 and 16 times the batch of a step; what a record adds is the slope between the two.

    (With one part the gradients grow while activations shrink; with several they are there all the time.)
    """
    rows = []
    for name in names:
        pair = PAIRS.get(name, GPU)
        step, four, sixteen = (
            alone("--memory-of", name, "--variant", "cache", "--batch", str(times * pair.batch), *common)
            for times in (1, 4, 16)
        )
        more = (sixteen - four) / (12 * pair.batch) * 1024
        whole = step / pair.batch * 1024
        say(
            {
                "pair": name,
                "batch": pair.batch,
                "step_mib": rounded(step),
                "cached_4x_mib": rounded(four),
                "cached_16x_mib": rounded(sixteen),
                "kib_per_cached_record": rounded(more),
                "kib_per_record_of_a_step": rounded(whole),
            }
        )
        rows.append(
            [name, pair.batch, *(f"{used:.0f}" for used in (step, four, sixteen)), f"{more:.0f}", f"{whole:.0f}"]
        )
    header = ["pair", "a step holds", "MiB", "MiB cached, 4x", "MiB cached, 16x", "KiB a record more"]
    print("\n" + table([*header, "KiB a record of a step"], rows) + "\n")


def fixed(records: int, align: int, joint: int, made_up: bool, repetitions: int) -> None:
    """Processor seconds of a round at a site of so many training records."""
    demo = presets.get("feddra")
    assembly = Assembly(replace(demo, data=replace(demo.data, size=records * 2)))
    rows = assembly.cohort.rows("train")[:records]
    training = replace(demo.training, make_up_warmup=made_up)
    dra, state = replace(demo.method, align_steps=align, local_steps=joint), assembly.initial()
    methods: dict[str, tuple[Method, bool]] = {
        "FedAvg": (FedAvg(local_steps=joint), False), "FedDRA": (dra, False), "FedDRA, kept": (dra, True)
    }  # fmt: skip

    def visited(method: Method, kept: bool) -> Callable[[], None]:
        one = assembly.client("site-1", assembly.serve(assembly.cohort, {"train": rows}))
        one.fixed = FixedFeatures() if kept else None
        site = Site(one, method, training, SiteMemory(None))

        def visit() -> None:
            model = {name: tensor.clone() for name, tensor in state.items()}
            for phase in method.phases(0):
                answer = site.handle(Broadcast(0, phase, model))
                model = model | {name: tensor.clone() for name, tensor in answer.state.items()}

        return visit

    visits = {name: visited(*method) for name, method in methods.items()}
    times = interleaved(visits, repetitions, time.process_time)
    for name, seconds in times.items():
        ratios = spread([own / other for own, other in zip(seconds, times["FedAvg"], strict=True)])
        say({"records": records, "E1": align, "E2": joint, "variant": name, "s": spread(seconds), "x_FedAvg": ratios})


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--only", choices=["speed", "memory", "cache", "data", "fixed"], help="one part instead of all")
    parser.add_argument("--compile", action="store_true", help="torch.compile too: a minute more for each pair")
    parser.add_argument("--quick", action="store_true")
    for hidden in ("--memory-of", "--variant"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--batch", type=int, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    device = torch.device(chosen.device)
    if chosen.memory_of:
        pair = PAIRS.get(chosen.memory_of, GPU)
        cached = replace(FAST, micro_batch=pair.batch)
        runs = {**variants(pair, False), "cache": lambda model, data, steps: ours(model, data, steps, cached)}
        steps = 1 if chosen.variant == "cache" else 2  # the second one has the optimiser's moments beside it
        print(memory(pair, chosen.batch or pair.batch, runs[chosen.variant], device, steps))
        return
    say(machine())
    names = ["ViT-B/16 + BERT 6 x 768"] if chosen.device == "cuda" else list(PAIRS)[: 1 if chosen.quick else None]
    common = ["--threads", str(chosen.threads), "--device", chosen.device]
    found = choose("auto", "auto", device)
    say({"probe": {" ".join(v): rounded(s) for v, s in measured(device, chosen.threads).items()}, "auto": found})
    repetitions = 1 if chosen.quick else chosen.repetitions
    if chosen.only in (None, "speed"):
        for name in names:
            speed(name, PAIRS.get(name, GPU), repetitions, device, chosen.compile or chosen.device == "cuda")
    if chosen.only in (None, "memory"):
        memories(names[-1:], common)
    if chosen.only in (None, "cache"):
        cache(names, common)
    if chosen.only in (None, "data") and chosen.device == "cpu":  # gpu.py has it on a GPU
        loaded(names, repetitions)
    if chosen.only in (None, "fixed") and chosen.device == "cpu":
        for site in [(64, 1, 2, False)] if chosen.quick else [(280, 10, 40, False), (1300, 45, 45, True)]:
            fixed(*site, repetitions)
    say(machine())


if __name__ == "__main__":
    main()
