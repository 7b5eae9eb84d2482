"""From which size on training pays: heads on frozen towers, sites with 50 to 5,000 pairs.

    fedvlp towers fetch lite0 && fedvlp towers fetch minilm
    python studies/programs/sizes.py [--seeds 0-2] [--sizes 50,500,1500,5000] [--picture docs/pictures/sizes.png]

Three sites of the built-in cohort (films of 112 pixels), each with as many training pairs, and 200 test pairs each.
Features of the frozen towers are computed once, and kept. R@1 within sources, percent, mean of both
directions (of sites alone, each by its own model), and macro AUROC of a linear layer for the five findings, learned
from the image vectors of 300 other images, minus that of the untouched tower. Training is that of the presets for real
films: 6 rounds of 12 steps of 32 pairs, or of one pass over a site's pairs where that is more. Seeds are of heads and
batches; records are the same. Hollow signs are the real films of real_towers.py (docs/results.md), some 72 training
pairs a site.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from common import command_line, machine, say, table
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from fedvlp.cli.overrides import seeds_of
from fedvlp.core.client import Client, named_state
from fedvlp.core.method import Method
from fedvlp.core.seeds import seeded
from fedvlp.core.server_state import Server
from fedvlp.core.types import Batch, VLOutput
from fedvlp.data.synthetic.cases import FINDINGS
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.evaluation.intervals import over_seeds
from fedvlp.evaluation.linear_probe import LinearProbe, Sample, Task, areas_of, fit
from fedvlp.evaluation.output import new_figure, write_png
from fedvlp.evaluation.retrieval import WITHIN, recall_rows
from fedvlp.federation.exchange import SequentialExchange
from fedvlp.federation.loop import Federation, Rounds
from fedvlp.federation.site import Site
from fedvlp.federation.site_memory import SiteMemory
from fedvlp.methods import Centralized, FedAvg, Local, OneRoundCCA
from fedvlp.methods.one_round_cca import before_heads
from fedvlp.models.dual_encoder import head
from fedvlp.objectives.convirt import ConVIRT
from fedvlp.run import presets
from fedvlp.run.assembly import Assembly

ROOT = Path(__file__).parents[2]
SITES, TEST, LABELLED, PART = 3, 200, 100, 500
NAMES = tuple(f"site-{number + 1}" for number in range(SITES))
WAYS = ("alone", "FedAvg", "OneRoundCCA", "OneRoundCCA, then steps", "pooled")
REAL = {  # of docs/results.md: R@1 within sources over its chance, probe less the tower's
    "alone": (10.3 / 5.6, -5.0), "FedAvg": (9.1 / 5.6, -6.4), "OneRoundCCA": (13.2 / 5.6, 0.2),
    "OneRoundCCA, then steps": (12.6 / 5.6, 1.0), "pooled": (10.1 / 5.6, -6.9),
}  # fmt: skip
REAL_PAIRS = 72


class Pairs:
    """Features of a site's training pairs from the frozen towers."""

    modalities = ("image", "text")

    def __init__(self, image: Tensor, text: Tensor) -> None:
        self.image, self.text = image, text

    @property
    def num_train(self) -> int:
        return len(self.image)

    def modalities_in(self, split: str) -> tuple[str, ...]:
        return self.modalities

    def report_batches(self, batch_size: int) -> None:
        """Each has one report."""

    def share_images(self, share: Any) -> None:
        """They are whole."""

    def train_batches(self, steps: int, batch_size: int, generator: Generator) -> Iterator[Batch]:
        for _ in range(steps):
            yield self._batch(torch.randperm(self.num_train, generator=generator)[:batch_size])

    def batches(self, split: str, batch_size: int, *, drop_last: bool, rows: Any = None) -> Iterator[Batch]:
        yield from map(self._batch, torch.arange(self.num_train if split == "train" else 0).split(batch_size))

    def _batch(self, rows: Tensor) -> Batch:
        return {"row": rows, "image": self.image[rows], "text": self.text[rows]}


class Heads(nn.Module):
    """The heads alone: features of images [B, W] and reports [B, V] to unit vectors [B, d]."""

    def __init__(self, seed: int, width: int, text_width: int, hidden: int | None, dim: int) -> None:
        super().__init__()
        self.image_head = seeded(seed, 4, lambda: head(width, hidden, dim, "layer"))
        self.text_head = seeded(seed, 5, lambda: head(text_width, hidden, dim, "layer"))

    def forward(self, batch: Batch) -> VLOutput:
        image, text = self.image_head(batch["image"]), self.text_head(batch["text"])
        return VLOutput(F.normalize(image, dim=1), F.normalize(text, dim=1))


def features(folder: Path, size: int, most: int | None) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Site and part ("test", "labelled", "train") -> images [n, W], reports [n, V] and labels [n, L].

    Makes those of ``most`` training records a site; None: none, and takes what is there.
    """
    experiment = presets.get("fedavg-real")
    experiment = replace(
        experiment,
        data=SyntheticCohort(sites=SITES, size=size, image_size=112),
        model=replace(experiment.model, image_size=112),
        training=replace(experiment.training, cache_features=False, threads=1),
    )
    assembly = Assembly(experiment)
    cohort, draw, none = assembly.cohort, np.random.default_rng(0), np.arange(0)
    sites = assembly.data_sites()
    tests = {site: cohort.rows("test", site)[:TEST] for site in sites}
    others = {site: draw.permutation(cohort.rows("train", site))[:most] for site in sites}
    order = np.concatenate([*tests.values(), draw.permutation(np.concatenate(list(others.values())))])
    client = assembly.client("figures", None)
    client.model.eval()
    folder.mkdir(parents=True, exist_ok=True)
    for start in range(0, 0 if most is None else len(order), PART):
        rows, kept = order[start : start + PART], folder / f"part-0-{start:06d}.pt"
        if kept.exists():
            continue
        image: list[Tensor] = []
        text: list[Tensor] = []
        with torch.no_grad(), before_heads(client.model) as seen:
            for batch in assembly.serve(cohort, {"train": none, "test": rows}).batches("test", 50, drop_last=False):
                client.model(batch)
                image.append(seen["image"])
                text.append(seen["text"])
        part = {"row": torch.from_numpy(rows), "image": torch.cat(image).half(), "text": torch.cat(text).half()}
        torch.save(part, kept)
        say({"features": start + len(rows), "of": len(order)})
    return sorted_by_site(folder, cohort, tests, others)


def sorted_by_site(folder: Path, cohort: Any, tests: Any, others: Any) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """The features that were made, by site and part."""
    parts = [torch.load(file) for file in sorted(folder.glob("part-0-*.pt"))]
    rows = torch.cat([part["row"] for part in parts]).tolist()
    image, text = (torch.cat([part[name] for part in parts]).float() for name in ("image", "text"))
    at = {row: index for index, row in enumerate(rows)}
    labels = torch.from_numpy(cohort.labels).double()
    found = {}
    for site in tests:
        made = [row for row in others[site].tolist() if row in at]
        wanted = {"test": tests[site].tolist(), "labelled": made[:LABELLED], "train": made[LABELLED:]}
        for part, of_part in wanted.items():
            where = [at[row] for row in of_part]
            found[f"{site} {part}"] = image[where], text[where], labels[of_part]
    return found


def method_of(way: str, size: int) -> tuple[Method, int]:
    """A way's method and its rounds for sites of this size."""
    steps = max(12, size // 32)
    if way == "OneRoundCCA":
        return OneRoundCCA(local_steps=0), 1
    if way == "OneRoundCCA, then steps":
        return OneRoundCCA(local_steps=steps), 7
    return {"alone": Local, "FedAvg": FedAvg, "pooled": Centralized}[way](local_steps=steps), 6


def trained(way: str, data: dict[str, Any], size: int, seed: int) -> dict[str, Heads]:
    """Site -> the heads that it has after a run."""
    method, rounds = method_of(way, size)
    training = presets.get("fedavg-real").training
    sites = {site: Pairs(*(tensor[:size] for tensor in data[f"{site} train"][:2])) for site in NAMES}
    if way == "pooled":
        joined = (torch.cat([getattr(one, name) for one in sites.values()]) for name in ("image", "text"))
        sites, training = {"pooled": Pairs(*joined)}, replace(training, batch_size=SITES * training.batch_size)
    widths = [tensor.shape[1] for tensor in data["site-1 test"][:2]]
    linear = isinstance(method, OneRoundCCA)
    dim = widths[0] + 1 + 128 if linear else 128
    model, objective = Heads(seed, *widths, None if linear else 256, dim), ConVIRT()
    server = Server(tuple(sites), {name: tensor.clone() for name, tensor in named_state(model, objective).items()})

    @cache
    def site(name: str) -> Site:
        return Site(Client(name, seed, model, objective, sites[name]), method, training, SiteMemory(None), None)

    Federation(method, server, Rounds(rounds=rounds, evaluate_every=0, seed=seed), SequentialExchange(site)).run(0)
    found = {}
    for name in NAMES:
        state = site(name).memory.newest() if way == "alone" else server.state
        own = Heads(seed, *widths, None if linear else 256, dim)
        own.load_state_dict({key: state[key] for key in own.state_dict()})
        found[name] = own.eval()
    return found


@torch.no_grad()
def recall(models: dict[str, Heads], data: dict[str, Any]) -> float:
    """R@1 within sources, percent."""
    made = [
        (model.image_head(image), model.text_head(text))
        for site, model in models.items()
        for image, text, _ in [data[f"{site} test"]]
    ]
    image, text = (F.normalize(torch.cat(halves), dim=1) for halves in zip(*made, strict=True))
    sources = [site for site in models for _ in range(TEST)]
    patients = [str(number) for number in range(len(sources))]
    rows = recall_rows(image, text, sources, patients, (1,), resamples=2)
    return next(row.recall.value for row in rows if row.scope == WITHIN)


def probe(made: Any, data: dict[str, Any]) -> float:
    """Macro AUROC, percent, of a linear layer on what ``made`` makes of images [n, W]."""
    parts = {}
    for part in ("labelled", "test"):
        images, labels = (torch.cat([data[f"{site} {part}"][which] for site in NAMES]) for which in (0, 2))
        with torch.no_grad():
            parts[part] = Sample(made(images), torch.where(labels == -1, torch.nan, (labels == 1).double()))
    settings = LinearProbe(classes=FINDINGS, solver="lbfgs")
    task = Task(FINDINGS, parts["labelled"].targets, False)
    layer = fit(task, settings, parts["labelled"], parts["labelled"], 0, None)
    with torch.no_grad():
        scores = layer(parts["test"].features).double()
    every = torch.ones(1, len(scores), dtype=torch.float64)
    return 100 * fmean(float(area(every)) for area in areas_of(scores, parts["test"].targets))


def figures(way: str, data: dict[str, Any], size: int, seed: int, tower: float) -> tuple[float, float]:
    """R@1 within sources, and the probe less the untouched tower's."""
    models = trained(way, data, size, seed)
    different = models.values() if way == "alone" else list(models.values())[:1]
    return recall(models, data), fmean(probe(model.image_head, data) for model in different) - tower


def picture(rows: dict[tuple[str, int], list[tuple[float, float]]], path: Path) -> None:
    """R@1 over its chance, and the probe less the tower's, by the pairs of a site."""
    figure, whole = new_figure(9.0, 3.8)
    whole.remove()
    both = figure.subplots(1, 2)
    sizes = sorted({size for _, size in rows})
    for number, way in enumerate(WAYS):
        for which, axes in enumerate(both):
            unit = 100 / TEST if which == 0 else 1.0
            means = [fmean(one[which] for one in rows[way, size]) / unit for size in sizes]
            axes.plot(sizes, means, marker="o", color=f"C{number}", label=way)
            axes.plot([REAL_PAIRS], [REAL[way][which]], marker="o", mfc="none", color=f"C{number}", ls="none")
    both[0].set(title="R@1 within sources / chance", ylabel="times chance", yscale="log")
    both[1].set(title="Linear probe minus the untouched tower's", ylabel="macro AUROC, points")
    both[1].axhline(0, color="grey", lw=0.8)
    for axes in both:
        axes.set(xscale="log", xlabel="training pairs a site (hollow: real X-rays)")
    both[0].legend(fontsize="small")
    write_png(path, figure)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--seeds", default="0-2", help="FIRST-LAST")
    parser.add_argument("--sizes", default="50,500,1500,5000")
    parser.add_argument("--cohort", type=int, default=24_000, help="records of the cohort")
    parser.add_argument("--made", action="store_true", help="use the features that are there, and make none")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "pictures" / "sizes.png")
    options = parser.parse_args()
    say({**machine(), **vars(options)})
    torch.set_num_threads(1)
    sizes = [int(size) for size in options.sizes.split(",")]
    data = features(ROOT / "runs" / "sizes", options.cohort, None if options.made else LABELLED + max(sizes))
    tower = probe(lambda images: images, data)
    say({"tower": tower, "pairs": [len(data[f"{site} train"][0]) for site in NAMES]})
    rows: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for size in sizes:
        for way in WAYS:
            for seed in seeds_of(options.seeds):
                rows.setdefault((way, size), []).append(figures(way, data, size, seed, tower))
            say({"way": way, "pairs": size, "recall, probe": rows[way, size]})
    body = []
    for way in WAYS:
        cells = [str(over_seeds([one[which] for one in rows[way, size]])) for which in (0, 1) for size in sizes]
        body.append([way, *cells])
    heading = [f"{what}, {size}" for what in ("R@1", "probe less the tower's") for size in sizes]
    print("\n" + table(["way", *heading], body))
    picture(rows, options.picture)
    say(machine())


if __name__ == "__main__":
    main()
