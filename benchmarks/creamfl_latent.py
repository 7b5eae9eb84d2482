"""The ladder of `fedvlp claims creamfl` in small: records drawn from a latent vector, MLP towers, seconds a run.

    python benchmarks/creamfl_latent.py [--names alone reamfl-mean ... creamfl] [--seeds 100 101 ...] [--kd 3 ...]

The product's methods, losses, round loop and presets' steps; only data and towers are others. A record is a latent
vector s of 16 normal numbers, its "image" tanh(2 A s) and its "text" tanh(2 B s), with noise, its five labels the signs
of s_1 to s_5. Two sites with pairs, two with images, one with texts; |P| pairs that all hold; a server whose towers are
the widest. The figure is the sum of R@1, R@5 and R@10 (mean of both directions, percent) of the server's model on 1,000
unseen pairs. A seed moves data, weights and batches, and all rows of one seed share it: mean and 95 % interval of the
paired differences (Student's t), and "holds", "fails" or "undecided" by whether that leaves 0 out.

First the preconditions, without which nothing is ranked: the server alone is better than the models of the paired sites
in the run of ``reamfl-mean``, which no teacher reaches; and before the first round an image-only site's images find
the text-only site's reports of the public set no better than by chance (R@10, by at most 2 standard errors).

``alone`` is ``kd_weight=0`` without contrast: no site has any influence. ``alone-long`` gives the steps of distillation
to the task as well. ``untrained-sites`` is ``reamfl-mean`` whose sites stay as they were drawn, which tells what they
learn from what distillation does whatever they send. ``--start shared`` gives all sites one initialisation, ``--spaces
shared`` one label space, ``--augmented`` distils noisy inputs: what was done before; so each can be tried by itself.
``--sample`` draws that many public items for the contrast of a batch, in place of all.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from common import machine, say, table
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from fedvlp.claims.page import INVALID
from fedvlp.claims.scenario import verdict
from fedvlp.core.client import Client, named_state
from fedvlp.core.seeds import seed as named_seed
from fedvlp.core.server_state import Server
from fedvlp.core.types import Batch, State, VLOutput
from fedvlp.evaluation.intervals import over_seeds
from fedvlp.evaluation.metric_names import recall_at
from fedvlp.evaluation.retrieval import retrieval
from fedvlp.federation.exchange import SequentialExchange
from fedvlp.federation.loop import Federation, Rounds
from fedvlp.federation.server_trainer import ServerTrainer
from fedvlp.federation.site import Site
from fedvlp.federation.site_memory import SiteMemory
from fedvlp.methods.ensemble import MODEL, PublicEnsemble
from fedvlp.objectives.creamfl import CreamFLTaskConfig
from fedvlp.run import presets
from fedvlp.training.config import Training

ALONE, ALONE_LONG, UNTRAINED, UNTAUGHT = "alone", "alone-long", "untrained-sites", "reamfl-mean"
NAMES = (ALONE, ALONE_LONG, UNTRAINED, *presets.REAMFL, "creamfl")
CLAIMS = (
    ("reamfl-avg", "reamfl-mean"),
    ("reamfl-iot", "reamfl-mean"),
    ("reamfl-gca", "reamfl-avg"),
    ("reamfl-gca", "reamfl-mean"),
    ("reamfl-inter", "reamfl-gca"),
    ("reamfl-intra", "reamfl-gca"),
    ("creamfl", "reamfl-inter"),
    ("creamfl", "reamfl-gca"),
    ("creamfl", ALONE),
    (UNTAUGHT, UNTRAINED),
    ("creamfl", UNTRAINED),
)
"""Who is said to be better than whom (the paper's Table 3)."""
KS = (1, 5, 10)
TOGETHER = "sites together"
"""The sum where an image or a text is the mean of what all sites make of it that train on such."""
Figures = dict[str, float]

LATENT, IMAGE, TEXT, DIM, LABELS = 16, 64, 48, 32, 5
NOISE = 1.0  # standard deviation; what is measured lies within -1 to 1
KINDS = {
    "site-1": ("image", "text"),
    "site-2": ("image", "text"),
    "site-3": ("image",),
    "site-4": ("image",),
    "site-5": ("text",),
}
WIDTHS = {"site-1": 64, "site-2": 96, "site-3": 64, "site-4": 96, "site-5": 64, "server": 256}
TRAINING = Training(batch_size=64, lr=2e-3, weight_decay=0.05, warmup_steps=3)


class Towers(nn.Module):
    """image [B, 64] and text [B, 48] to unit vectors [B, 32], each by an MLP."""

    def __init__(self, hidden: int, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.image_encoder, self.text_encoder = (
                nn.Sequential(nn.Linear(n, hidden), nn.GELU(), nn.LayerNorm(hidden), nn.Linear(hidden, DIM))
                for n in (IMAGE, TEXT)
            )

    def forward(self, batch: Batch) -> VLOutput:
        towers = {"image": self.image_encoder, "text": self.text_encoder}
        return VLOutput(**{n: F.normalize(tower(batch[n]), dim=1) for n, tower in towers.items() if n in batch})


@dataclass
class Records:
    """Records in memory, of these modalities; a training batch has fresh noise of 0.1, as an augmentation."""

    content: dict[str, Tensor]
    modalities: tuple[str, ...]

    @property
    def num_train(self) -> int:
        return len(self.content["image"])

    def train_batches(self, steps: int, batch_size: int, generator: Generator) -> Iterator[Batch]:
        for _ in range(steps):
            batch = self._batch(torch.randperm(self.num_train, generator=generator)[:batch_size])
            for name in self.modalities:
                batch[name] = batch[name] + 0.1 * torch.randn(batch[name].shape, generator=generator)
            yield batch

    def batches(self, split: str, batch_size: int, *, drop_last: bool, rows: Tensor | None = None) -> Iterator[Batch]:
        rows = torch.arange(self.num_train) if rows is None else rows
        for chosen in rows.split(batch_size):
            if len(chosen) == batch_size or not drop_last:
                yield self._batch(chosen)

    def _batch(self, rows: Tensor) -> Batch:
        held = (*self.modalities, "labels")
        return {"row": rows} | {name: self.content[name][rows] for name in held}


@dataclass
class Small:
    """One federation, and the figures of its server."""

    method: PublicEnsemble
    seed: int
    public: int
    records: int  # of a site
    start: str  # own | shared
    spaces: str  # disjoint | shared
    trained: bool  # whether the sites learn
    _sites: dict[str, Site] = field(default_factory=dict)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        maps = [torch.randn(LATENT, width, generator=generator) / LATENT**0.5 for width in (IMAGE, TEXT)]

        def drawn(count: int) -> dict[str, Tensor]:
            latent = torch.randn(count, LATENT, generator=generator)
            image, text = (torch.tanh(2 * latent @ m) for m in maps)
            image, text = (t + NOISE * torch.randn(t.shape, generator=generator) for t in (image, text))
            return {"image": image, "text": text, "labels": (latent[:, :LABELS] > 0).float()}

        self.shared, self.unseen = Records(drawn(self.public), KINDS["site-1"]), drawn(1000)
        self.data = {site: Records(drawn(self.records), kinds) for site, kinds in KINDS.items()}
        self.objective = CreamFLTaskConfig(LABELS + 1, DIM, reduction="mean", label_spaces=self.spaces)

    def client(self, name: str) -> Client:
        own = self.seed if self.start == "shared" or name == "server" else named_seed(self.seed, name, "initial")
        width = WIDTHS[name] if self.start == "own" or name == "server" else WIDTHS["site-1"]
        model, objective = Towers(width, own), self.objective.build(None, own)
        client = Client(name, self.seed, model, objective, self.data.get(name, self.shared), public=self.shared)
        first: State = {n: t.clone() for n, t in named_state(model, objective).items()}
        client.initial = lambda: first
        return client

    @property
    def training(self) -> Training:
        """Of the sites."""
        return TRAINING if self.trained else replace(TRAINING, lr=0.0)

    def site(self, name: str) -> Site:
        if name not in self._sites:
            self._sites[name] = Site(self.client(name), self.method, self.training, SiteMemory(None))
        return self._sites[name]

    def measure(self) -> Figures:
        host = self.client("server")
        server = Server(tuple(KINDS), {n: t.clone() for n, t in named_state(host.model, host.objective).items()})
        server.modalities, server.trainer = dict(KINDS), ServerTrainer(host, TRAINING)
        with torch.no_grad():
            images, texts = (self.client(site).model(self.shared.content) for site in ("site-3", "site-5"))
        gap = retrieval(images.image, texts.text, KS)[recall_at(10)]
        figures = {"gap R@10": gap, "chance R@10": 1000 / self.public, "public": float(self.public)}
        rounds = Rounds(rounds=presets.get("creamfl").rounds.rounds, seed=self.seed, evaluate_every=0)
        Federation(self.method, server, rounds, SequentialExchange(self.site)).run()
        with server.trainer.session(server.state) as client:
            recalls = recalled(*self.unseen_by(client.model).values())
        figures |= {f"R@{k}": value for k, value in recalls.items()}
        figures["sum"] = sum(recalls.values())
        made: dict[str, list[Tensor]] = {"image": [], "text": []}
        for name, kinds in KINDS.items():
            site = self.site(name)
            memory = site.memory.newest()
            site.client.load({n.removeprefix(MODEL): t for n, t in memory.items() if n.startswith(MODEL)})
            own = self.unseen_by(site.client.model)
            for kind in kinds:
                made[kind].append(own[kind])
            if len(kinds) == 2:
                figures[f"sum of {name}"] = sum(recalled(*own.values()).values())
        means = [F.normalize(torch.stack(of_sites).mean(0), dim=1) for of_sites in made.values()]
        figures[TOGETHER] = sum(recalled(*means).values())
        return figures

    @torch.no_grad()
    def unseen_by(self, model: nn.Module) -> dict[str, Tensor]:
        """Unit vectors [N, d] of the unseen images, and of their texts."""
        output = model.eval()(self.unseen)
        return {"image": output.image, "text": output.text}


def recalled(image: Tensor, text: Tensor) -> dict[int, float]:
    """R@k in percent, for each of ``KS``."""
    found = retrieval(image, text, KS)
    return {k: found[recall_at(k)] for k in KS}


def method(name: str, kd: float | None, augmented: bool, gamma: float | None, joint: bool) -> PublicEnsemble:
    """The preset's, or the server on the public set alone."""
    preset = "creamfl" if name.startswith(ALONE) else UNTAUGHT if name == UNTRAINED else name
    chosen = presets.get(preset).method
    assert isinstance(chosen, PublicEnsemble)
    if name.startswith(ALONE):
        return replace(chosen, kd_weight=0.0, gamma=0.0, server_steps=0 if name == ALONE else 20)  # type: ignore[call-arg]
    given = {name: value for name, value in (("kd_weight", kd), ("gamma", gamma)) if value is not None}
    return replace(chosen, distil_augmented=augmented, joint=joint, **given)  # type: ignore[call-arg]


def preconditions(found: dict[str, list[Figures]]) -> dict[str, bool]:
    """What must hold before anything is ranked, and whether it does; what cannot be told is left out."""
    told = {}
    untaught, alone = found.get(UNTAUGHT, []), found.get(ALONE, [])
    if untaught and alone:
        best = statistics.fmean(max(v for n, v in run.items() if n.startswith("sum of ")) for run in untaught)
        server = statistics.fmean(run["sum"] for run in alone)
        told[f"the server alone ({server:.1f}) is better than the best paired site ({best:.1f})"] = server > best
    runs = next(iter(found.values()))
    seen, chance = (statistics.fmean(run[name] for run in runs) for name in ("gap R@10", "chance R@10"))
    queries = 2 * sum(run["public"] for run in runs)
    error = math.sqrt(chance * (100 - chance) / queries)
    told[f"images and reports of lone sites start apart: R@10 {seen:.1f}, chance {chance:.1f}"] = (
        seen <= chance + 2 * error
    )
    return told


def compared(found: dict[str, list[Figures]], valid: bool) -> list[list[str]]:
    """A line for each claim whose two rows are there: the mean difference, its interval, by seed, and the verdict."""
    lines = []
    for better, than in CLAIMS:
        if better not in found or than not in found:
            continue
        gains = [a["sum"] - b["sum"] for a, b in zip(found[better], found[than], strict=True)]
        interval = over_seeds(gains)
        by_seed = " ".join(f"{gain:+.1f}" for gain in gains)
        lines.append([f"{better} > {than}", str(interval), by_seed, verdict(interval) if valid else INVALID])
    return lines


def spread(values: Sequence[float]) -> str:
    """Mean and sample standard deviation."""
    return f"{statistics.fmean(values):.1f} +- {statistics.stdev(values) if len(values) > 1 else 0.0:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", nargs="+", default=list(NAMES), choices=NAMES)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(8)))
    parser.add_argument("--public", type=int, default=640)
    parser.add_argument("--records", type=int, default=512, help="of each site")
    parser.add_argument("--start", choices=("own", "shared"), default="own")
    parser.add_argument("--spaces", choices=("disjoint", "shared"), default="disjoint")
    parser.add_argument("--augmented", action="store_true")
    parser.add_argument("--kd", type=float, help="instead of the presets' kd_weight")
    parser.add_argument("--gamma", type=float, help="instead of the presets'")
    parser.add_argument("--joint", action="store_true", help="the contrast in private steps, not in steps of its own")
    parser.add_argument(
        "--sample", type=int, default=0, help="contrast_sample: public items drawn for a batch; 0 = all"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    say({**machine(), **vars(options)})
    found: dict[str, list[Figures]] = {name: [] for name in options.names}
    for seed in options.seeds:
        for name, runs in found.items():
            chosen = method(name, options.kd, options.augmented, options.gamma, options.joint)
            chosen = replace(chosen, contrast_sample=options.sample)  # type: ignore[call-arg]
            sizes = options.public, options.records
            runs.append(Small(chosen, seed, *sizes, options.start, options.spaces, name != UNTRAINED).measure())
    told = preconditions(found)
    for what, holds in told.items():
        print(f"\nprecondition {'holds' if holds else 'FAILS'}: {what}")
    shown = [*(f"R@{k}" for k in KS), "sum", "sum of site-1", "sum of site-2", TOGETHER]
    rows = [[name, *(spread([run[key] for run in runs]) for key in shown)] for name, runs in found.items()]
    print("\n" + table(["server", *shown], rows))
    lines = compared(found, all(told.values()))
    print("\n" + table(["claim", "difference of the sums, 95 % interval", "by seed", "verdict"], lines))


if __name__ == "__main__":
    main()
