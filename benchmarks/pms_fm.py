"""PMS-FM's tables on the built-in cohort: which model suits whom (Table 3), and what the selector tells sites by (5).

    python benchmarks/pms_fm.py [--seeds 3] [--workers 2] [--quick]

The preset ``pms-fm`` on twice as many studies, with 20 steps instead of 30 a phase. Zero-shot: accuracy of the five
findings (percent, chance 20, on records with one finding) and macro AUC (on all), of the global model, each site's own
and the one that is selected for each image; mean over 5 prompt seeds, then mean (deviation) over the run's seeds.
Selector: share of test studies whose site is told (chance 25), beside always naming the largest site; as trained in the
run, one step a round, from the study itself and, as zero-shot has to, from the image and prompts; then trained anew on
the final global encoders for ``STEPS`` steps, with embeddings left out and with both fusions. One pooled Adam step is
the aggregated one (tests/methods), so that part runs on pooled embeddings. About ten CPU minutes; ``--quick`` takes one
step in one round.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import machine, rounded, say, table
from torch import Tensor

from fedvlp.claims.selection import weighted
from fedvlp.core.client import Client
from fedvlp.core.server_state import Server
from fedvlp.data.synthetic.cases import FINDINGS
from fedvlp.evaluation import site_selection
from fedvlp.evaluation.zero_shot import GLOBAL, Result, ZeroShot, over_sites, zero_shot
from fedvlp.models.selector import SelectorConfig
from fedvlp.run import presets
from fedvlp.run.assembly import Assembly
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder
from fedvlp.run.simulate import simulate

STEPS = 100  # of the selectors trained anew, as many as the paper has rounds
ABLATION = {
    "image": (("image",), "mlp"),
    "report": (("report",), "mlp"),
    "token": (("token",), "mlp"),
    "image + report": (("image", "report"), "mlp"),
    "image + token": (("image", "token"), "mlp"),
    "report + token": (("report", "token"), "mlp"),
    "all, MLP": (("image", "report", "token"), "mlp"),
    "all, cross attention": (("image", "report", "token"), "attention"),
}


def configured(seed: int, quick: bool) -> Experiment:
    """The preset with another seed, more records to test on and fewer steps."""
    experiment: Any = presets.get("pms-fm")
    rounds = replace(experiment.rounds, seed=seed, evaluate_every=0)
    method = replace(experiment.method, local_steps=1 if quick else 20)
    data = replace(experiment.data, seed=seed, size=800 if quick else 4000)
    return replace(experiment, rounds=replace(rounds, rounds=1) if quick else rounds, method=method, data=data)


@torch.no_grad()
def embeddings(client: Client, data: dict[str, Any], split: str) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """(images [n, d], reports [n, d], labels [n, L]) of every site by the loaded model."""
    found = {}
    for site, records in data.items():
        batches = list(records.batches(split, 64, drop_last=False))
        outputs = [client.model(batch) for batch in batches]
        labels = torch.cat([batch["labels"] for batch in batches])
        found[site] = torch.cat([o.image for o in outputs]), torch.cat([o.text for o in outputs]), labels
    return found


@torch.no_grad()
def told(selector: Any, studies: dict[str, tuple[Tensor, Tensor, Tensor]], words: Tensor) -> float:
    """Percent of the studies whose site the selector names."""
    right = []
    for index, (image, report, labels) in enumerate(studies.values()):
        right.append(selector(image, report, words, selector.present(labels)).argmax(dim=1) == index)
    return 100 * float(torch.cat(right).double().mean())


def told_by_prompts(client: Client, studies: dict[str, tuple[Tensor, Tensor, Tensor]]) -> float:
    """The same from what zero-shot has: the image, and prompts in place of the report."""
    selector: Any = client.objective.extra
    images = {site: image for site, (image, _, _) in studies.items()}
    return weighted(site_selection.told(selector, client, images, FINDINGS), images)


def anew(config: SelectorConfig, experiment: Experiment, studies: dict[str, Any], words: Tensor, steps: int) -> Any:
    """A selector trained by full-batch Adam steps on everybody's embeddings."""
    selector = config.build(experiment.model, experiment.rounds.seed)
    adam = torch.optim.Adam(selector.parameters(), lr=experiment.method.selector_lr)  # type: ignore[attr-defined]
    total = sum(len(labels) for _, _, labels in studies.values())
    for _ in range(steps):
        adam.zero_grad()
        for index, (image, report, labels) in enumerate(studies.values()):
            (selector.loss(image, report, words, labels, index) * len(labels) / total).backward()
        adam.step()
    return selector


def measure(seed: int, workers: int, quick: bool) -> tuple[list[Result], dict[str, float]]:
    """Zero-shot results and selector accuracies of one run."""
    experiment = configured(seed, quick)
    with tempfile.TemporaryDirectory(prefix="fedvlp-bench-") as root:
        folder = RunFolder.create(Path(root), experiment)
        simulate(experiment, folder, workers=workers)
        server = Server.load(folder.checkpoint)[0]
    assembly, method = Assembly(experiment), experiment.method
    data = {site: assembly.data(site) for site in assembly.data_sites()}
    client = Client("bench", seed, *assembly.modules(), data["site-1"])
    own = {site: {**server.state, **method.personal(server, site)} for site in server.sites}  # type: ignore[attr-defined]
    protocol = ZeroShot(FINDINGS, method.threshold)  # type: ignore[attr-defined]
    results, choices = zero_shot(protocol, client, {GLOBAL: server.state, **own}, data, FINDINGS)
    client.load(server.state)
    client.model.eval()
    selector: Any = client.objective.extra
    with torch.no_grad():
        ids, mask = client.model.tokenizer(selector.words)
        words = client.model({"text": ids, "text_mask": mask}).text
    train, test = (embeddings(client, data, split) for split in ("train", "test"))
    counts = [len(labels) for _, _, labels in test.values()]
    accuracy = {"always the largest site": 100 * max(counts) / sum(counts)}
    accuracy |= {"in the run, study": told(selector, test, words), "in the run, prompts": told_by_prompts(client, test)}
    for name, (kept, fusion) in ABLATION.items():
        config = replace(experiment.extra, embeddings=kept, fusion=fusion)  # type: ignore[type-var]
        made = anew(config, experiment, train, words, 2 if quick else STEPS)
        accuracy[name] = told(made, test, words)
    accuracy["global model used"] = 100 * statistics.fmean(choice.shares[GLOBAL] for choice in choices)
    return results, accuracy


def spread(values: list[float]) -> str:
    """Mean (population deviation)."""
    return f"{statistics.fmean(values):.1f} ({statistics.pstdev(values):.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2, help="sites trained side by side")
    parser.add_argument("--quick", action="store_true", help="one round of one step: does everything run?")
    options = parser.parse_args()
    torch.set_num_threads(1)
    say({**machine(), **vars(options)})
    runs = []
    for seed in range(options.seeds):
        results, accuracy = measure(seed, options.workers, options.quick)
        runs.append((results, accuracy))
        means = {model: tuple(rounded(v) for v in figures) for model, figures in over_sites(results).items()}
        say({"seed": seed, "zero_shot": means, "selector": {name: rounded(v) for name, v in accuracy.items()}})
    for title, figure, scale in (("accuracy, %", "accuracy", 1), ("macro AUC, %", "auc", 100)):
        cells: dict[str, dict[str, list[float]]] = {}
        for results, _ in runs:
            for result in results:
                value = getattr(result, figure)
                row = cells.setdefault(result.model, {}).setdefault(result.site, [])
                row.extend([scale * value[0]] if value else [])
            for model, means_of in over_sites(results).items():
                cells[model].setdefault("mean", []).append(scale * means_of[figure == "auc"])
        sites = list(next(iter(cells.values())))
        rows = [[model, *(spread(row[site]) for site in sites)] for model, row in cells.items()]
        print("\n" + table([f"zero-shot {title}", *sites], rows))
    rows = [[name, spread([accuracy[name] for _, accuracy in runs])] for name in runs[0][1]]
    print("\n" + table(["selector, % of sites told (chance 25)", "mean (deviation)"], rows) + "\n")
    say(machine())


if __name__ == "__main__":
    main()
