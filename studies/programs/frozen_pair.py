"""Prompt learning and adapters, on a frozen pair, beside a linear layer on the untouched tower and the same labels.

    fedvlp towers fetch lite0 && fedvlp towers fetch minilm
    python studies/programs/frozen_pair.py [--data ../shared/data/real-cxr] [--seeds 0-7] [--judged val|test]

The pair: `one-round-cca-real`'s closed form on the training pairs of each seed (real_towers.py). Labelled training
films: 5 or 20 of each class (covid19, pneumonia, no_finding) or all, drawn by the seed and dealt to four sites. Macro
AUROC in percent on the test images, of the three classes and of NIH's two, mean and 95 % over seeds; and minus that of
a linear layer on the tower's features that is trained on the very films. The learning rate (of 5e-3 and 1e-3, by the
residual adapter with all films) was chosen on seed 100 and the films of the validation split.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from common import command_line, machine, say, table
from real_towers import CCA, CLASSES, ROOT, _area, _classes, _films, _told, experiments
from torch import Generator, Tensor

from fedvlp.cli.overrides import seeds_of
from fedvlp.core.client import Client, named_state
from fedvlp.core.server_state import Server
from fedvlp.core.types import Batch
from fedvlp.evaluation.intervals import over_seeds
from fedvlp.evaluation.linear_probe import LinearProbe, Sample, fit
from fedvlp.federation.exchange import SequentialExchange
from fedvlp.federation.loop import Federation, Rounds
from fedvlp.federation.site import Site
from fedvlp.federation.site_memory import SiteMemory
from fedvlp.methods import AdapterConfig, CLIPAdapter, ContextConfig, PromptLearning
from fedvlp.methods.one_round_cca import before_heads, heads, moments_of_features
from fedvlp.objectives.convirt import ConVIRT
from fedvlp.run import presets
from fedvlp.run.assembly import Assembly
from fedvlp.training.settings import Training

SITES, ROUNDS, STEPS, SCALE = 4, 6, 12, 0.01
NAMES = ("COVID-19", "Pneumonia", "No Finding")
TRAINED = Training(batch_size=32, lr=5e-3, weight_decay=0.0, warmup_steps=10)

WAYS: dict[str, tuple[Any, Any, Training]] = {
    "prompt-learning": (
        PromptLearning(local_steps=STEPS, temperature=SCALE), ContextConfig(NAMES, True), TRAINED,
    ),
    "residual adapter": (
        CLIPAdapter(local_steps=STEPS, temperature=SCALE), AdapterConfig(NAMES, True), TRAINED,
    ),
    "attention adapter": (
        CLIPAdapter(local_steps=STEPS, temperature=SCALE), AdapterConfig(NAMES, True, form="attention"), TRAINED,
    ),
    "residual adapter and private classifier": (
        CLIPAdapter(local_steps=STEPS, temperature=SCALE, kl=1.0), AdapterConfig(NAMES, True, private_hidden=128),
        TRAINED,
    ),
}  # fmt: skip


class Films:
    """Features of a site's training images, with their classes."""

    modalities = ("image",)

    def __init__(self, features: Tensor, labels: Tensor) -> None:
        self.features, self.labels = features, labels

    @property
    def num_train(self) -> int:
        return len(self.labels)

    def modalities_in(self, split: str) -> tuple[str, ...]:
        return self.modalities

    def share_images(self, share: Any) -> None:
        """They are whole."""

    def train_batches(self, steps: int, batch_size: int, generator: Generator) -> Iterator[Batch]:
        for _ in range(steps):
            rows = torch.randperm(self.num_train, generator=generator)[:batch_size]
            yield {"row": rows, "image_tokens": self.features[rows][:, None], "labels": self.labels[rows]}

    def batches(self, split: str, batch_size: int, **how: Any) -> Iterator[Batch]:
        return iter(())


@cache
def pair_features(data: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Features of the pairs from both towers, by their ids."""
    kept = ROOT / "runs" / "frozen-pair" / "pairs.pt"
    if kept.exists():
        return torch.load(kept)  # type: ignore[no-any-return]
    assembly = Assembly(experiments(data, False, 0)[CCA])
    rows = torch.arange(len(assembly.cohort)).numpy()
    client = assembly.client("figures", None)
    client.model.eval()
    image: list[Tensor] = []
    text: list[Tensor] = []
    served = assembly.serve(assembly.cohort, {"train": rows[:0], "test": rows})
    with torch.no_grad(), before_heads(client.model) as seen:
        for batch in served.batches("test", 32, drop_last=False):
            client.model(batch)
            image += seen["image"]
            text += seen["text"]
    ids = assembly.cohort.ids
    found = dict(zip(ids, image, strict=True)), dict(zip(ids, text, strict=True))
    kept.parent.mkdir(parents=True, exist_ok=True)
    torch.save(found, kept)
    return found


@cache
def films(data: Path) -> tuple[Any, Any, Tensor]:
    """The task, its records by split, and the tower's features [N, W] of all films."""
    kept = ROOT / "runs" / "frozen-pair" / "films.pt"
    if kept.exists():
        return torch.load(kept, weights_only=False)  # type: ignore[no-any-return]
    cohort, tokens = _films(data)
    found = (*_told(cohort, settings()), tokens[:, 0].clone())
    torch.save(found, kept)
    return found


def settings() -> LinearProbe:
    return LinearProbe(classes=_classes(CLASSES), fractions=(1.0,), shots=(5, 20), solver="lbfgs")


@cache
def bare() -> Any:
    """The frozen pair, with heads to be set."""
    return presets.get(CCA).model.build(0).eval()


def pair(data: Path, seed: int) -> Any:
    """The frozen pair of a seed: the heads of the closed form, from the moments of its training pairs."""
    images, texts = pair_features(data)
    experiment = experiments(data, False, seed)[CCA]
    cohort = replace(experiment.data, cache=None).build()
    total = 0
    mean: dict[str, Tensor] = {}
    for site in sorted(set(cohort.sites or ())):
        ids = [cohort.ids[row] for row in cohort.rows("train", site)]
        found = moments_of_features(*(torch.stack([of[i] for i in ids]).double() for of in (images, texts)))
        for name, tensor in found.items():
            mean[name] = mean.get(name, torch.zeros_like(tensor)) + len(ids) * tensor
        total += len(ids)
    model = bare()
    state = named_state(model, ConVIRT())
    method: Any = experiment.method
    solved = heads(method, {name: tensor / total for name, tensor in mean.items()}, state)
    with torch.no_grad():
        for name, tensor in solved.items():
            state[name].copy_(tensor)
    return model


def learned(model: Any, way: tuple[Any, Any, Training], features: Tensor, labels: Tensor, seed: int) -> Any:
    """What stands beside the pair after a federation of sites to which the films are dealt."""
    method, config, training = way
    objective = ConVIRT()
    extra = config.build(model.config, seed)
    if isinstance(config, AdapterConfig):  # its sentences never change: the text tower reads them once
        with torch.no_grad():
            sentences = extra.directions(model, config.classes)
        extra.directions = lambda model, classes: sentences
    objective.add_module("extra", extra)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    data = {f"site-{one}": Films(features[order[one::SITES]], labels[order[one::SITES]]) for one in range(SITES)}
    names = named_state(model, objective)
    private = frozenset(name for name in names if name.startswith("objective.extra.private."))
    initial = {name: tensor.clone() for name, tensor in names.items()}
    server = Server(tuple(data), {name: tensor for name, tensor in initial.items() if name not in private})

    @cache
    def site(name: str) -> Site:
        client = Client(name, seed, model, objective, data[name], site_only=private, initial=lambda: initial)
        return Site(client, method, training, SiteMemory(None), None)

    federation = Federation(
        method, server, Rounds(rounds=ROUNDS, evaluate_every=0, seed=seed), SequentialExchange(site)
    )
    federation.run(0)
    state = named_state(model, objective)
    with torch.no_grad():
        for name, tensor in federation.server.state.items():
            state[name].copy_(tensor)
    objective.eval()
    return objective.extra


def areas(logits: Tensor, targets: Tensor) -> tuple[float, float]:
    """Of the three classes, and of NIH's pneumonia against its films without finding."""
    nih = targets[:, 0] == 0
    apart = (logits[:, 1] - logits[:, 2])[nih, None]
    return _area(logits, targets), _area(apart, targets[nih][:, 1:2])


@torch.no_grad()
def logits_of(model: Any, extra: Any, features: Tensor, method: Any) -> Tensor:
    vectors = torch.nn.functional.normalize(model.image_head(features), dim=1)
    return extra.images(vectors) @ extra.directions(model, extra.config.classes).T / method.temperature


def measured(
    data: Path, seed: int, judged: str, ways: dict[str, Any]
) -> Iterator[tuple[str, str, tuple[float, float]]]:
    """(way, films it learned from, areas) of one seed."""
    task, rows, features = films(data)
    train = Sample(features[rows.train], task.targets[rows.train])
    judge = Sample(features[getattr(rows, judged)], task.targets[getattr(rows, judged)])
    model = pair(data, seed)
    for subset in settings().subsets():
        chosen = train.take(subset.draw(train.targets == 1, seed))
        head = fit(task, settings(), chosen, chosen, seed, None)
        with torch.no_grad():
            yield "linear layer on the tower", str(subset), areas(head(judge.features).double(), judge.targets)
        for name, way in ways.items():
            extra = learned(model, way, chosen.features, chosen.targets.float(), seed)
            found = logits_of(model, extra, judge.features, way[0]).double()
            yield name, str(subset), areas(found, judge.targets)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data" / "real-cxr")
    parser.add_argument("--seeds", default="0-7", help="FIRST-LAST")
    parser.add_argument("--judged", choices=("val", "test"), default="test")
    parser.add_argument("--ways", default=",".join(WAYS), help="NAME,NAME")
    options = parser.parse_args()
    say({**machine(), **vars(options)})
    torch.set_num_threads(1)
    rows: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for seed in seeds_of(options.seeds):
        for way, subset, found in measured(
            options.data, seed, options.judged, {name: WAYS[name] for name in options.ways.split(",")}
        ):
            rows.setdefault((way, subset), []).append(found)
            say({"seed": seed, "way": way, "films": subset, "areas": found})
    subsets = list(dict.fromkeys(subset for _, subset in rows))
    body = []
    for way in dict.fromkeys(way for way, _ in rows):
        cells = [way]
        for subset in subsets:
            own, first = rows[way, subset], rows["linear layer on the tower", subset]
            for kind in (0, 1):
                cells.append(str(over_seeds([one[kind] for one in own])))
                cells.append(str(over_seeds([a[kind] - b[kind] for a, b in zip(own, first, strict=True)])))
        body.append(cells)
    kinds = ("three classes", "minus the layer's", "NIH", "minus the layer's")
    print("\n" + table(["AUROC", *(f"{subset}, {kind}" for subset in subsets for kind in kinds)], body))
    say(machine())


if __name__ == "__main__":
    main()
