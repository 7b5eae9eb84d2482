"""Time and extra memory of exact retrieval ranks against the bare matrix product.

    python studies/programs/retrieval.py [--full] [--repetitions 5] [--tile 1024 1024]

Variants are interleaved, the first round is thrown away, medians are printed with minimum and maximum. ``product`` is
every score computed once, in blocks of 1,024 images against all texts into one buffer, and nothing done with it: the
limit. ``ratio`` is the median over rounds of ranks / product of that round. ``open_clip``, where open_clip_torch is
installed and the whole matrix fits, are its own metrics (``get_clip_metrics``), with ``open_clip_ratio`` to ranks.
Extra memory is the peak resident size above the size before the call (Linux). ``--full`` adds 50,000 x 50,000 (10 GB
of scores, never held). One JSON line per size. On shared cores (see ``load``) every thread barrier of a tile waits
for the scheduler and ``ratio`` means little: run with OMP_NUM_THREADS=1 and read ``cpu_ratio``, the same from the
process's CPU seconds.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import command_line
from torch import Tensor
from torch.nn.functional import normalize

from fedvlp.evaluation.retrieval import ranks, recall

DIMENSION = 512
MOST_AS_A_WHOLE = 10_000  # records whose scores open_clip holds at once, with their ranking as 64-bit numbers: 2 GB
WAYS = ("image_to_text", "text_to_image")


def embeddings(images: int, captions: int) -> tuple[Tensor, Tensor, Tensor]:
    """Unit vectors [N, d], [N captions, d] with partial agreement, and the image of each text."""
    generator = torch.Generator().manual_seed(0)
    owner = torch.arange(images).repeat_interleave(captions)
    image = normalize(torch.randn(images, DIMENSION, generator=generator), dim=1)
    text = torch.randn(owner.numel(), DIMENSION, generator=generator).mul_(0.2)
    for part in torch.arange(owner.numel()).split(4096):
        text[part] = normalize(text[part] + image[owner[part]], dim=1)
    return image, text, owner


def product(image: Tensor, text: Tensor) -> None:
    """All scores, 1,024 images at a time, into one buffer."""
    buffer = torch.empty(1024, text.shape[0])
    for part in image.split(1024):
        torch.mm(part, text.t(), out=buffer[: part.shape[0]])


def by_open_clip() -> Callable[[Tensor, Tensor], object] | None:
    """open_clip's recalls and ranks of unit vectors [N, d] and [N, d]; None where it is not installed."""
    if importlib.util.find_spec("open_clip_train") is None:
        return None
    from open_clip_train.train import get_clip_metrics

    return partial(get_clip_metrics, logit_scale=1.0)


def measured(call: Callable[[], object]) -> tuple[float, float, float, object]:
    """Seconds, CPU seconds, extra peak MB (nan where the kernel does not tell) and the result."""
    before = _resident("VmRSS", reset=True)
    began, busy = time.perf_counter(), time.process_time()
    result = call()
    seconds, busy = time.perf_counter() - began, time.process_time() - busy
    return seconds, busy, (_resident("VmHWM") - before) / 1e3, result


def _resident(field: str, reset: bool = False) -> float:
    """Kilobytes from the kernel's account; ``reset`` returns free memory and restarts the peak."""
    try:
        if reset:
            ctypes.CDLL("libc.so.6").malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return float("nan")
    return float(next(line.split()[1] for line in lines if line.startswith(field)))


def compare(images: int, captions: int, tile: tuple[int, int], repetitions: int) -> dict[str, object]:
    image, text, owner = embeddings(images, captions)
    calls: dict[str, Callable[[], object]] = {
        "product": partial(product, image, text),
        "ranks": partial(ranks, image, text, image_of_text=owner, tile=tile),
    }
    peer = by_open_clip()
    if peer and captions == 1 and images <= MOST_AS_A_WHOLE:
        calls["open_clip"] = partial(peer, image, text)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    busy: dict[str, list[float]] = {name: [] for name in calls}
    megabytes: dict[str, list[float]] = {name: [] for name in calls}
    results: dict[str, object] = {}
    for _ in range(repetitions + 1):
        for name, call in calls.items():
            elapsed, cpu, extra, results[name] = measured(call)
            seconds[name].append(elapsed)
            busy[name].append(cpu)
            megabytes[name].append(extra)
    found = results["ranks"]
    assert isinstance(found, tuple)
    row: dict[str, object] = {"images": images, "texts": images * captions, "d": DIMENSION, "tile": list(tile)}
    for name in calls:
        kept = seconds[name][1:]
        row[f"{name}_s"] = [round(f(kept), 3) for f in (statistics.median, min, max)]
        row[f"{name}_extra_mb"] = round(max(megabytes[name][1:]), 1)
    for key, spent in (("ratio", seconds), ("cpu_ratio", busy)):
        pairs = zip(spent["ranks"][1:], spent["product"][1:], strict=True)
        row[key] = round(statistics.median(a / b for a, b in pairs), 2)
    row["gflops_product"] = round(2e-9 * DIMENSION * images * images * captions / min(seconds["product"][1:]))
    row["recall_at_1"] = [round(recall(direction, 1), 2) for direction in found]
    if "open_clip" in results:
        peers: Any = results["open_clip"]
        row["open_clip_recall_at_1"] = [round(100 * peers[f"{way}_R@1"], 2) for way in WAYS]
        for key, spent in (("open_clip_ratio", seconds), ("open_clip_cpu_ratio", busy)):
            pairs = zip(spent["open_clip"][1:], spent["ranks"][1:], strict=True)
            row[key] = round(statistics.median(a / b for a, b in pairs), 2)
    row["load"] = round(os.getloadavg()[0], 2)
    return row


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--full", action="store_true", help="also 50,000 x 50,000, about a minute on two cores")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--tile", type=int, nargs=2, default=(1024, 1024))
    options = parser.parse_args()
    print(json.dumps({"threads": torch.get_num_threads(), "cores": os.cpu_count(), "torch": torch.__version__}))
    tile = (options.tile[0], options.tile[1])
    for images, captions in ((5_000, 1), (5_000, 5), *([(50_000, 1)] if options.full else [])):
        repetitions = min(options.repetitions, 3) if images == 50_000 else options.repetitions
        print(json.dumps(compare(images, captions, tile, repetitions)), flush=True)


if __name__ == "__main__":
    main()
