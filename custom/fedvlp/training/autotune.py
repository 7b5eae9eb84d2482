"""Which precision and form of attention train fastest here: measured, since neither follows from the machine's name."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlp.core.checkpoint import save_json
from fedvlp.core.seeds import set_global
from fedvlp.training import distributed

if TYPE_CHECKING:
    from fedvlp.training.settings import Training

CHOICE, KEYS = "precision.json", ("precision", "attention")
"""Name of the file of a site's or the server's choice, and what it holds."""

TOKENS = 197  # of an image of 224 pixels in patches of 16
SIZES = {"cpu": (8, 384, 6), "cuda": (128, 768, 12)}
"""Records, width and heads of the block that is timed: of ViT-S on a CPU; of ViT-B, and enough of them to fill a GPU. A
smaller block says nothing there: it waits for its launches, of which bfloat16 has more (an H100 chose float32)."""
BUDGET = 1.0  # seconds for all variants together
VARIANTS = [(precision, attention) for precision in ("float32", "bfloat16") for attention in ("sdpa", "explicit")]


def choose(precision: str, attention: str, device: torch.device) -> tuple[str, str]:
    """The two settings with every ``auto`` replaced by what the probe finds fastest; rank 0's finding holds for all."""
    if "auto" not in (precision, attention):
        return precision, attention
    best = fastest(precision, attention, measured(device, torch.get_num_threads()))
    if distributed.together():
        best = tuple(distributed.tell(list(best), {})[0])
    return best


def fastest(precision: str, attention: str, seconds: Mapping[tuple[str, str], float]) -> tuple[str, str]:
    """Of the variants that the settings allow the one with the least ``seconds``."""
    allowed = {v: s for v, s in seconds.items() if precision in (v[0], "auto") and attention in (v[1], "auto")}
    if not allowed:  # float16 is not timed: it needs a GPU, where the fused kernels are the fast ones
        return precision, "sdpa"
    return min(allowed, key=lambda variant: allowed[variant])


def fixed(training: Training, device: torch.device, folder: Path | None) -> Training:
    """The settings with every ``auto`` replaced by what the probe found when the site or server first trained in a run.

    That is kept in its ``folder`` (None: nowhere): a busy machine or another process could choose otherwise, and a run
    would continue with other arithmetic than it began with.
    """
    if "auto" not in (training.precision, training.attention) or folder is None:
        return training
    file = folder / CHOICE
    if distributed.rank() == 0 and not file.exists():
        seconds = measured(device, torch.get_num_threads())
        chosen = dict(zip(KEYS, fastest(training.precision, training.attention, seconds), strict=True))
        save_json(file, chosen)
    stored = json.loads(file.read_text(encoding="utf-8")) if distributed.rank() == 0 else {}
    if distributed.together():
        stored = distributed.tell(stored, {})[0]
    mine = {key: stored[key] for key in KEYS if getattr(training, key) == "auto"}
    return replace(training, **mine)


@cache
def measured(device: torch.device, threads: int) -> dict[tuple[str, str], float]:
    """Seconds of a transformer block, forward and backward, in each variant: the least of a few interleaved runs."""
    seconds = dict.fromkeys(VARIANTS, float("inf"))
    with torch.random.fork_rng(devices=[]):
        set_global(0)
        records, width, heads = SIZES[device.type]
        tokens = torch.randn(records, TOKENS, width).to(device)
        shapes = ((3 * width, width), (width, width), (4 * width, width), (width, 4 * width))
        weights = [(0.02 * torch.randn(shape)).to(device).requires_grad_() for shape in shapes]
    end = time.perf_counter() + BUDGET
    for repetition in range(8):
        for variant in VARIANTS:
            taken = _time(tokens, weights, heads, *variant)
            if repetition:  # the first run of each also sets kernels up
                seconds[variant] = min(seconds[variant], taken)
        if repetition and time.perf_counter() > end:
            break
    timings = ", ".join(f"{' '.join(variant)} {1000 * taken:.1f} ms" for variant, taken in seconds.items())
    print(f"a transformer block on {device}, {threads} threads: {timings}; training.precision, .attention overrule it")
    return seconds


def _time(tokens: Tensor, weights: list[Tensor], heads: int, precision: str, attention: str) -> float:
    synchronize = torch.cuda.synchronize if tokens.is_cuda else lambda: None
    synchronize()
    began = time.perf_counter()
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=precision == "bfloat16"):
        loss = _block(tokens, weights, heads, attention).square().mean()
    torch.autograd.grad(loss, weights)
    synchronize()
    return time.perf_counter() - began


def _block(tokens: Tensor, weights: list[Tensor], heads: int, attention: str) -> Tensor:
    qkv, out, expand, contract = weights
    q, k, v = F.linear(tokens, qkv).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)  # [B, H, T, W/H]
    if attention == "sdpa":
        mixed = F.scaled_dot_product_attention(q, k, v)
    else:
        mixed = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(dim=-1) @ v
    tokens = tokens + F.linear(mixed.transpose(1, 2).flatten(2), out)
    return tokens + F.linear(F.gelu(F.linear(F.layer_norm(tokens, tokens.shape[2:]), expand)), contract)
