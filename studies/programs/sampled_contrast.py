"""CreamFL's contrast with a sample of the public items in place of all: bias, scatter, time and memory of a step.

    python studies/programs/sampled_contrast.py [--items 500000] [--dim 256] [--temperatures 0.5 0.1] [--draws 100]

A step is the inter-modal contrast of 128 items and its gradient: ``inter_contrast`` with all items, and
``sampled_contrast`` with n that are drawn anew. Every item has one of ``--topics`` directions; its representation at
the server is that direction with noise, and the site's is the same direction with other noise, both of length 1. So
the terms of the sum differ as they do where some items are alike; ``v`` is their deviation in units of their mean, and
the smaller the temperature the larger it is.

``bias`` is the mean over draws of the batch's loss, less that with all items, in nats, with its 95 % interval; beside
it what half of the relative variance would be (methods/math/contrast.py), and ``scatter``, the deviation of one draw.
Of the gradient, in units of its own length: how far one draw is from it, how far the mean over draws is, and how far
that would be if draws had no bias. Time is a step's, with the drawing, in processor seconds of one thread; memory what
a step needs at its peak beside the items.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import torch
from common import MIB, command_line, fresh_peak, machine, peak, rounded, say, table
from torch import Tensor
from torch.nn import functional as F

from fedvlp.evaluation.intervals import over_seeds
from fedvlp.methods.math.contrast import inter_contrast, sampled_contrast

BATCH = 128
Loss = Callable[[Tensor], Tensor]


def representations(items: int, dim: int, topics: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """A batch's rows [B], what the site makes of them [B, d], and the server's representations of all [P, d]."""
    directions = F.normalize(torch.randn(topics, dim, generator=generator), dim=1)
    topic = torch.randint(topics, (items,), generator=generator)
    others = torch.randn(items, dim, generator=generator).mul_(dim**-0.5)
    for some, of in zip(others.split(10_000), topic.split(10_000), strict=True):
        some.copy_(F.normalize(some + directions[of], dim=1))
    rows = torch.randperm(items, generator=generator)[:BATCH]
    own = torch.randn(BATCH, dim, generator=generator).mul_(dim**-0.5) + directions[topic[rows]]
    return rows, F.normalize(own, dim=1), others


def step(own: Tensor, loss: Loss) -> tuple[float, Tensor]:
    """The batch's mean loss and its gradient."""
    given = own.clone().requires_grad_()
    value = loss(given).mean()
    value.backward()
    assert given.grad is not None
    return value.item(), given.grad


def deviation(own: Tensor, others: Tensor, temperature: float) -> float:
    """v of the terms of the sum, their mean over the batch."""
    mean, square = (torch.zeros(len(own), dtype=torch.float64) for _ in range(2))
    for some in others.split(10_000):
        terms = (own @ some.T / temperature).double().exp()
        mean, square = mean + terms.sum(dim=1), square + terms.square().sum(dim=1)
    mean, square = mean / len(others), square / len(others)
    return float(((square - mean**2).sqrt() / mean).mean())


def measured(work: Callable[[], object]) -> tuple[float, float]:
    """Processor seconds, and MiB at the peak."""
    work()  # the libraries' own buffers
    before, began = fresh_peak(), time.process_time()
    work()
    return time.process_time() - began, (peak() - before) / MIB


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--items", type=int, default=500_000)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--topics", type=int, default=50)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.5, 0.1])
    parser.add_argument("--samples", type=int, nargs="+", default=[256, 1024, 4096, 16_384, 65_536])
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--quick", action="store_true", help="4,000 items of 64 numbers, two sizes, 10 draws")
    options = parser.parse_args()
    items, dim, draws, sizes = options.items, options.dim, options.draws, options.samples
    if options.quick:
        items, dim, draws, sizes = 4_000, 64, 10, [256, 1024]
    torch.set_num_threads(1)
    say({**machine(), "items": items, "dim": dim, "topics": options.topics, "draws": draws})
    generator = torch.Generator().manual_seed(0)
    rows, own, others = representations(items, dim, options.topics, generator)

    def sampled(size: int, temperature: float) -> Loss:
        sample = torch.randperm(items, generator=generator)[:size]
        return lambda given: sampled_contrast(given, others, rows, sample, temperature)

    for temperature in options.temperatures:

        def whole(given: Tensor, temperature: float = temperature) -> Tensor:
            return inter_contrast(given, others, rows, temperature)

        v = deviation(own, others, temperature)
        loss, gradient = step(own, whole)
        seconds, memory = measured(lambda whole=whole: step(own, whole))  # type: ignore[misc]
        say({"temperature": temperature, "v": rounded(v), "loss": rounded(loss)})
        lines = [["all", "", "", "", "", "", "", f"{seconds:.3f}", f"{memory:.0f}"]]
        for size in sizes:
            found = [step(own, sampled(size, temperature)) for _ in range(draws)]
            bias = over_seeds([value - loss for value, _ in found])
            formula = -v * v / 2 / size * (1 - size / items)
            far = statistics.fmean(float((one - gradient).norm() / gradient.norm()) for _, one in found)
            mean = torch.stack([one for _, one in found]).mean(dim=0)
            seconds, memory = measured(
                lambda size=size, temperature=temperature: step(own, sampled(size, temperature))  # type: ignore[misc]
            )
            lines.append(
                [
                    f"{size:,}",
                    f"{bias.value:+.1e} +- {bias.high - bias.value:.0e}",
                    f"{formula:+.1e}",
                    f"{statistics.stdev(value for value, _ in found):.1e}",
                    f"{far:.4f}",
                    f"{float((mean - gradient).norm() / gradient.norm()):.4f}",
                    f"{far / math.sqrt(draws):.4f}",
                    f"{seconds:.3f}",
                    f"{memory:.0f}",
                ]
            )
        header = ["n", "bias of the loss", "by the formula", "scatter", "gradient, one draw off", "its mean off"]
        print(table([*header, "without bias", "s a step", "MiB"], lines) + "\n")
    say(machine())


if __name__ == "__main__":
    main()
