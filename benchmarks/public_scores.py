"""Scoring a supplier's public representations (Eq. 4 of CreamFL) against the plain matrix product of that size.

    python benchmarks/public_scores.py [--items 50000] [--dim 512] [--quick]

Time and growth of peak memory of ``contrast_scores`` of [P, d] against [P, d], beside the product in the same tiles,
each thrown away (the whole [P, P] matrix would take 10 GB for 50,000), and of one training step's contrast of 128 items
against all. One thread, one to two CPU minutes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from common import MIB, fresh_peak, machine, peak, rounded, say
from torch import Tensor

from fedvlp.methods.math.contrast import TILE, contrast_scores, inter_contrast


def product(own: Tensor, paired: Tensor) -> None:
    """Every tile of ``own @ paired.T``."""
    for rows in own.split(TILE):
        for columns in paired.split(TILE):
            torch.mm(rows, columns.T)


def step(own: Tensor, paired: Tensor) -> None:
    """The inter-modal contrast of a batch and its gradient."""
    batch = own[:128].clone().requires_grad_()
    inter_contrast(batch, paired, torch.arange(128), 0.5).sum().backward()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=50_000)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--quick", action="store_true", help="4,000 items of 64 numbers")
    options = parser.parse_args()
    items, dim = (4_000, 64) if options.quick else (options.items, options.dim)
    torch.set_num_threads(1)
    say({**machine(), "items": items, "dim": dim, "whole_matrix_mib": rounded(4 * items**2 / MIB)})
    generator = torch.Generator().manual_seed(0)
    own, paired = (torch.nn.functional.normalize(torch.randn(items, dim, generator=generator), dim=1) for _ in "ab")
    work: dict[str, Callable[[Tensor, Tensor], object]] = {"product": product, "scores": contrast_scores, "step": step}
    seconds = {}
    for name, function in work.items():
        function(own[: 2 * TILE], paired[: 2 * TILE])  # the libraries' own buffers
        before, began = fresh_peak(), time.perf_counter()
        function(own, paired)
        seconds[name] = time.perf_counter() - began
        say({"what": name, "seconds": rounded(seconds[name]), "peak_growth_mib": rounded((peak() - before) / MIB)})
    say({"scores_to_product": rounded(seconds["scores"] / seconds["product"])})


if __name__ == "__main__":
    main()
