"""Averaging five updates of 190 million float32, against the memory's speed and FLARE.

    python studies/programs/aggregation.py [--repetitions 5] [--threads N] [--clock wall|cpu] [--part 1.0] [--quick]

What a run does is a phase of ``Federation`` itself: the gate, the norm of every update as a metric, the bound by the
median over sites (on by default), the mean. Its updates are views, as those of another process or of a download are,
of tensors in memory, where FLARE's are too. ``--clock cpu`` counts processor time, which with ``--threads 1`` is what
a busy machine can compare.

The streaming limit is what any server does that holds one update at a time: each of the five is read (4 bytes per
value) and the accumulator read and written (8), except that the first only writes it: 56 bytes per value, at the best
speed measured in the same run of a flat triad ``c = a + s b`` and an in-place ``a += s b`` with torch (12 bytes per
value each) and of numpy's ``c = a + b``. Non-temporal stores, which a C kernel would use, cannot be reached from
Python; the triads read what they overwrite, and those bytes are not counted.

Variants are interleaved, the first pass is thrown away. ``x limit`` compares best with best; on a busy machine medians
mean little. ``extra peak`` is memory beyond updates, global model and, where there is one, the lent accumulator, in
models. Last, the error against a float64 reference, small model and large.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from common import command_line, fresh_peak, interleaved, machine, peak, rounded, say, spread, table
from torch import Tensor

from fedvlp.core.aggregation import StreamingMean
from fedvlp.core.change import EXACT_NUMEL, Change
from fedvlp.core.gate import check_tensors
from fedvlp.core.server_state import Server
from fedvlp.core.types import Broadcast, LazyState, State, Update, size_of
from fedvlp.federation.loop import Federation, Rounds
from fedvlp.methods import FedAvg

KEPT = "fedvlp, mean alone, accumulator kept (round 2 on)"
RUN = "fedvlp, as a run does it: check + norms + bound + mean"
FLARE = "FLARE WeightedAggregationHelper, torch"
SITES = 5
SAMPLES = (310.0, 95.0, 120.0, 77.0, 204.0)


def shapes(layers: int, width: int, vocabulary: int) -> dict[str, tuple[int, ...]]:
    """Two transformers of ``layers`` blocks: an image tower and a text tower with word embeddings."""
    named: dict[str, tuple[int, ...]] = {
        "image_encoder.patch.weight": (width, 3, 16, 16),
        "image_encoder.patch.bias": (width,),
        "image_encoder.position": (1, 197, width),
        "image_encoder.summary": (1, 1, width),
        "text_encoder.words.weight": (vocabulary, width),
        "text_encoder.position": (512, width),
    }
    for tower in ("image_encoder", "text_encoder"):
        for layer in range(layers):
            at = f"{tower}.{layer}."
            named |= {at + "norm1.weight": (width,), at + "norm1.bias": (width,)}
            named |= {at + "norm2.weight": (width,), at + "norm2.bias": (width,)}
            named |= {at + "qkv.weight": (3 * width, width), at + "qkv.bias": (3 * width,)}
            named |= {at + "out.weight": (width, width), at + "out.bias": (width,)}
            named |= {at + "expand.weight": (4 * width, width), at + "expand.bias": (4 * width,)}
            named |= {at + "contract.weight": (width, 4 * width), at + "contract.bias": (width,)}
    return named


def random_state(named: dict[str, tuple[int, ...]], seed: int) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.empty(shape).uniform_(-0.1, 0.1, generator=generator) for name, shape in named.items()}


def limit(count: int, repetitions: int) -> dict[str, float]:
    """Measured bytes per second of the flat kernels, and the seconds that 56 bytes per value take at the best."""
    a, b, c = (torch.full((count,), value) for value in (1.0, 2.0, 0.0))
    first, second, third = (tensor.numpy() for tensor in (a, b, c))
    kernels: dict[str, Callable[[], object]] = {
        "torch triad c = a + s b": lambda: torch.add(a, b, alpha=0.5, out=c),
        "torch in place a += s b": lambda: c.add_(a, alpha=0.5),
        "numpy c = a + b": lambda: np.add(first, second, out=third),
    }
    speeds = {name: 12 * count / min(times) for name, times in interleaved(kernels, repetitions).items()}
    say({"bandwidth_gb_s": {name: rounded(speed / 1e9) for name, speed in speeds.items()}})
    return {"seconds": (12 * SITES - 4) * count / max(speeds.values()), "speed": max(speeds.values())}


class Held(LazyState):
    """A view of tensors that nobody changes."""

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self._state = state

    def __getitem__(self, name: str) -> Tensor:
        return self._state[name]

    def size(self, name: str) -> int:
        return size_of(self._state[name])


class Contest:
    """The variants, over the same updates. Two updates are held and sent in turns: neither fits a cache."""

    def __init__(self, named: dict[str, tuple[int, ...]]) -> None:
        self.model = random_state(named, 0)
        self.uploads = [random_state(named, 1), random_state(named, 2)]
        self.spare: State = {}
        self.kept = random_state(named, 3)  # the accumulator of an earlier round

    def stream(self) -> Iterator[tuple[State, float]]:
        for site in range(SITES):
            yield self.uploads[site % 2], SAMPLES[site]

    def check(self) -> None:
        for state, _ in self.stream():
            problem = check_tensors(state, self.model, Change(self.model).finite)
            if problem:
                raise SystemExit(problem)

    def ours(self, *, spare: bool = True) -> State:
        mean = StreamingMean(self.model, sum(SAMPLES), self.kept if spare else None)
        for state, samples in self.stream():
            mean.add(state, samples)
        return mean.result()

    def run(self) -> State:
        """One phase of a run with its default settings."""
        sites = tuple(f"site-{index + 1}" for index in range(SITES))

        def exchange(messages: Mapping[str, Broadcast]) -> Iterator[tuple[str, Update]]:
            for site, (state, samples) in zip(messages, self.stream(), strict=True):
                yield site, Update(site, 0, "train", int(samples), Held(state))  # type: ignore[arg-type]

        server = Server(sites, self.model, spare=self.kept)
        server.enrolled = {site: int(samples) for site, samples in zip(sites, SAMPLES, strict=True)}
        rounds = Rounds(rounds=1, evaluate_every=0)
        return Federation(FedAvg(), server, rounds, exchange).run()

    def least(self) -> State:
        """What check, norms and mean must read and write: update and model once before the mean, which is kept."""
        for state, _ in self.stream():
            for name, tensor in state.items():
                tensor.sum(), self.model[name].sum()
        return self.ours()

    def plain(self) -> State:
        """What most code does: a sum over the updates, key by key, all of them resident."""
        total = sum(SAMPLES)
        pairs = list(self.stream())
        return {
            n: sum((s[n] * (w / total) for s, w in pairs[1:]), pairs[0][0][n] * (pairs[0][1] / total))
            for n in self.model
        }

    def flare(self, kind: str) -> dict[str, Any]:
        from nvflare.app_common.aggregators.weighted_aggregation_helper import WeightedAggregationHelper

        helper = WeightedAggregationHelper()
        for site, (state, samples) in enumerate(self.stream()):
            data: dict[str, Any] = {n: t.numpy() for n, t in state.items()} if kind == "numpy" else dict(state)
            helper.add(data, samples, f"site-{site}", 0)
        result: dict[str, Any] = helper.get_result()
        return result


def extra_peak(work: Callable[[], object], count: int) -> float:
    """Models' worth of memory that ``work`` needs at its peak beyond what is already resident."""
    before = fresh_peak()
    kept = work()
    highest = peak()
    del kept
    return (highest - before) / (4 * count)


def exactness(named: dict[str, tuple[int, ...]]) -> dict[str, float]:
    """Largest |mean - float64 reference| of a model, in units of the last place at 0.1 (2^-27)."""
    updates = [random_state(named, seed) for seed in range(SITES)]
    mean = StreamingMean(updates[0], sum(SAMPLES))
    for state, samples in zip(updates, SAMPLES, strict=True):
        mean.add(state, samples)
    worst = rounding = 0.0
    for name, seen in mean.result().items():
        wide: Tensor = torch.zeros(seen.shape, dtype=torch.float64)
        for state, samples in zip(updates, SAMPLES, strict=True):
            wide += state[name].double() * samples
        wide /= sum(SAMPLES)
        worst = max(worst, float((seen.double() - wide).abs().max()))
        rounding = max(rounding, float((seen - wide.float()).abs().max()))
    return {"max_abs_error": rounded(worst), "beyond_rounding": rounded(rounding), "ulp_at_0.1": 2.0**-27}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0, help="torch threads; 0: torch's own choice, the cores")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--part", type=float, default=1.0, help="of the layers and of the vocabulary")
    parser.add_argument("--quick", action="store_true", help="a twentieth of the size, one repetition")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    repetitions = 1 if options.quick else options.repetitions
    whole = shapes(round(12 * options.part), 768, round(28_996 * options.part))
    named = shapes(1, 768, 4000) if options.quick else whole
    count = sum(math.prod(shape) for shape in named.values())
    say({**machine(), "threads": torch.get_num_threads(), "parameters": count, "tensors": len(named)})
    floor = limit(count, max(3, repetitions))
    contest = Contest(named)
    variants: dict[str, Callable[[], object]] = {
        KEPT: contest.ours,
        "fedvlp, fresh accumulator (round 1)": lambda: contest.ours(spare=False),
        "fedvlp, check + norms alone": contest.check,
        RUN: contest.run,
        "the least: update and model read once, then the mean": contest.least,
        FLARE: lambda: contest.flare("torch"),
        "FLARE WeightedAggregationHelper, numpy": lambda: contest.flare("numpy"),
        "torch sum by key": contest.plain,
    }
    times = interleaved(variants, repetitions, time.process_time if options.clock == "cpu" else time.perf_counter)
    own = statistics.median(times[KEPT])
    rows = []
    for name, work in variants.items():
        seconds, extra = spread(times[name]), extra_peak(work, count)
        say({"variant": name, "seconds": seconds, "extra_peak_models": round(extra, 2)})
        rows.append(
            [
                name,
                f"{seconds['median']:.3f}",
                f"{seconds['min']:.3f}-{seconds['max']:.3f}",
                f"{seconds['min'] / floor['seconds']:.2f}",
                f"{seconds['median'] / own:.2f}",
                f"{extra:.2f}",
            ]
        )
    print(
        f"\nStreaming limit {floor['seconds']:.3f} s at {floor['speed'] / 1e9:.1f} GB/s; {torch.get_num_threads()} "
        f"threads; {count:,} values in {len(named)} tensors; {SITES} updates.\n"
    )
    ratios = [ours / theirs for ours, theirs in zip(times[RUN], times[FLARE], strict=True)]
    say({"a run's path / FLARE's torch mean": spread(ratios), "goal": 1.0})
    print(table(["variant", "median s", "range", "x limit", "x fedvlp", "extra peak, models"], rows) + "\n")
    small, large = shapes(1, 128, 2000), shapes(1, 768, 8000)
    for what, chosen in (("small (float64)", small), ("large (float32)", large)):
        size = sum(math.prod(shape) for shape in chosen.values())
        if (size <= EXACT_NUMEL) == (what == "small (float64)"):
            say({"exactness": what, "values": size, **exactness(chosen)})
    say(machine())


if __name__ == "__main__":
    main()
