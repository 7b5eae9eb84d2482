"""Seconds of the chunked nearest-neighbour search beside two references.

    python studies/programs/neighbours.py [--quick] [--repetitions 5] [--pool 3000]

20,000 queries x 3,000 public items x 256 dimensions, the 10 nearest, one thread. ``scipy`` is cdist + argsort on the
whole matrix in float64 (480 MB), timed on a tenth of the queries and scaled; ``cdist`` is torch.cdist + topk in chunks
of 1,024; ``faiss`` is IndexFlatL2 (exact). Variants are interleaved, the first pass is thrown away; ``ratio`` is the
median over passes of variant / ours of that pass. About half a CPU minute; ``--quick`` takes a tenth of the queries.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable
from functools import partial

import torch
from common import command_line, interleaved, machine, rounded, say, spread
from torch import Tensor
from torch.nn.functional import normalize

from fedvlp.methods.math.neighbours import TILE, nearest


def by_scipy(queries: Tensor, pool: Tensor, k: int) -> Tensor:
    from scipy.spatial.distance import cdist

    distances = cdist(queries.numpy(), pool.numpy(), "sqeuclidean")
    return torch.from_numpy(distances.argsort(axis=1, kind="stable")[:, :k].copy())


def by_cdist(queries: Tensor, pool: Tensor, k: int) -> Tensor:
    found = [torch.cdist(part, pool).topk(k, dim=1, largest=False).indices for part in queries.split(TILE)]
    return torch.cat(found)


def by_faiss(queries: Tensor, pool: Tensor, k: int) -> Tensor:
    import faiss

    faiss.omp_set_num_threads(1)
    index = faiss.IndexFlatL2(pool.shape[1])
    index.add(pool.numpy())
    return torch.from_numpy(index.search(queries.numpy(), k)[1])


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--pool", type=int, default=3_000, help="public items")
    options = parser.parse_args()
    torch.set_num_threads(1)
    say(machine())
    count, k = 2_000 if options.quick else 20_000, 10
    generator = torch.Generator().manual_seed(0)
    queries, pool = (normalize(torch.randn(n, 256, generator=generator), dim=1) for n in (count, options.pool))
    tenth = queries[: count // 10]
    variants: dict[str, Callable[[], object]] = {
        "ours": partial(nearest, queries, pool, k),
        "cdist": partial(by_cdist, queries, pool, k),
        "scipy": partial(by_scipy, tenth, pool, k),
    }
    if importlib.util.find_spec("faiss"):
        variants["faiss"] = partial(by_faiss, queries, pool, k)
    times = interleaved(variants, options.repetitions)
    times["scipy"] = [10 * seconds for seconds in times["scipy"]]
    reference = by_scipy(tenth, pool, k)
    for name, seconds in times.items():
        found = {"ours": nearest, "cdist": by_cdist, "scipy": by_scipy, "faiss": by_faiss}[name](tenth, pool, k)
        ratio = statistics.median(s / own for s, own in zip(seconds, times["ours"], strict=True))
        same = (found == reference).float().mean().item()
        say({"variant": name, "seconds": spread(seconds), "ratio": rounded(ratio), "same_as_reference": rounded(same)})


if __name__ == "__main__":
    main()
