"""Time of the DRO client weights against plain bisection on the same multiplier: interleaved runs, medians, in ms.

    python studies/programs/dro_weights.py [--sizes 5 1000 1000000] [--repetitions 7]

The baseline is what the reference implementations do: 60 halvings of the multiplier, one pass over the clients each.
``residual`` is |D(p) - rho|; ``difference`` is the largest |p - p of the baseline|. One JSON line per row.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Callable
from functools import partial

import numpy as np
from common import command_line, interleaved

from fedvlp.methods.math.dro import divergence, dro_weights

GAMMA, RHO = 1.0, 0.01  # the ball binds at every size


def bisection(weights: np.ndarray, losses: np.ndarray, ball: str) -> np.ndarray:
    """chi2/euclid or kl/kl by 60 halvings of 1/(1 + multiplier) in (0, 1]."""
    stepped = weights * np.exp(GAMMA * (losses - losses.max()))
    stepped /= stepped.sum()
    uniform, logs = 1.0 / len(stepped), np.log(stepped)

    def candidate(share: float) -> np.ndarray:
        if ball == "chi2":
            return uniform + share * (stepped - uniform)
        point = np.exp(share * logs)
        return point / point.sum()

    def size(point: np.ndarray) -> float:
        if ball == "chi2":
            return 0.5 * len(point) * float(np.sum((point - uniform) ** 2))
        return float(np.sum(point * np.log(point))) + math.log(len(point))

    low, high = 0.0, 1.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if size(candidate(middle)) <= RHO else (low, middle)
    return candidate(low)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[5, 1_000, 100_000, 1_000_000])
    parser.add_argument("--repetitions", type=int, default=7)
    options = parser.parse_args()
    for count in options.sizes:
        weights, losses = np.full(count, 1.0 / count), np.random.default_rng(0).normal(size=count)
        pairs = [(ball, near) for ball in ("chi2", "kl") for near in ("euclid", "kl")]
        variants: dict[str, Callable[[], object]] = {
            f"{ball}/{near}": partial(dro_weights, weights, losses, GAMMA, RHO, ball, near) for ball, near in pairs
        }
        variants |= {f"bisection {ball}": partial(bisection, weights, losses, ball) for ball in ("chi2", "kl")}
        seconds = interleaved(variants, options.repetitions)
        milliseconds = {name: 1e3 * statistics.median(times) for name, times in seconds.items()}
        for ball, near in pairs:
            name, point = f"{ball}/{near}", dro_weights(weights, losses, GAMMA, RHO, ball, near)
            row: dict[str, object] = {"clients": count, "variant": name, "ms": round(milliseconds[name], 4)}
            row["residual"] = abs(divergence(point, ball) - RHO)
            if (ball, near) in (("chi2", "euclid"), ("kl", "kl")):
                baseline = milliseconds[f"bisection {ball}"]
                row |= {"bisection_ms": round(baseline, 4), "times_faster": round(baseline / milliseconds[name], 1)}
                row["difference"] = float(np.abs(point - bisection(weights, losses, ball)).max())
            print(json.dumps(row), flush=True)
    print(json.dumps({"cores": os.cpu_count(), "load": os.getloadavg()[0], "numpy": np.__version__}))


if __name__ == "__main__":
    main()
