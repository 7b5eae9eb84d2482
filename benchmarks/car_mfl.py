"""Macro AUC of mFedAvg, mFedAvgP and CAR-MFL on the built-in cohort, by which sites lack what, and by public-set size.

    python benchmarks/car_mfl.py [--mixes 4:0:2 0:4:2 2:2:2] [--bounds] [--sizes 0.05 0.3] [--seeds 3] [--quick]

A mix I:T:M is image-only, text-only and paired sites. Macro AUC of the trained model on every held-out record of the
cohort (test split, images and reports, those of the public set too), in percent: mean and, in brackets, least and
largest over the seeds, which change cohort, public set and weights. ``image`` is the share of the classifier's absolute
weight on the image (0.5: no modality bias). For 4:0:2 also, with ``--bounds``, ``lower``, the public set alone, and
``upper``, everything pooled and paired; and ``--sizes``, other shares of the patients in the public set than 0.15.
Six rounds of ten steps of 16 records on 48-pixel films: about ten CPU minutes. ``--quick`` takes one step a round.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace

import torch
from common import machine, rounded, say, table

from fedvlp.core.method import Method
from fedvlp.data.loader import SiteData
from fedvlp.data.synthetic.cases import FINDINGS
from fedvlp.data.synthetic.cohort import SyntheticCohort
from fedvlp.evaluation.classification import auc, modality_shares, predict
from fedvlp.federation.exchange import SequentialExchange
from fedvlp.federation.loop import Federation, Rounds
from fedvlp.methods import CARMFL, Centralized, MFedAvg
from fedvlp.models.multimodal import MultimodalConfig
from fedvlp.objectives.bce import BCEConfig
from fedvlp.run.assembly import Assembly
from fedvlp.run.experiment import Experiment, Partition
from fedvlp.training.config import Training

METHODS: dict[str, Method] = {
    "mFedAvg": MFedAvg(),
    "mFedAvgP": MFedAvg(public=True),
    "CAR-MFL softmax": CARMFL(),
    "CAR-MFL linear": CARMFL(renorm="linear"),
}
BOUNDS: dict[str, Method] = {"lower": MFedAvg(public=True, private=False), "upper": Centralized()}
PUBLIC, IMAGES = 0.15, "4:0:2"
MODEL = MultimodalConfig(labels=FINDINGS, image_size=48, max_tokens=48)


def experiment(method: Method, mix: str, public: float, seed: int, steps: int) -> Experiment:
    """Six rounds; ``upper`` sees as many records a step as all sites and the server together."""
    image_only, text_only, paired = (int(count) for count in mix.split(":"))
    sites = image_only + text_only + paired
    pooled = isinstance(method, Centralized)
    partition = Partition() if pooled else Partition(image_only=image_only, text_only=text_only, public=public)
    return Experiment(
        "benchmark",
        replace(method, local_steps=steps),
        MODEL,
        BCEConfig(blank="zeros"),
        SyntheticCohort(sites=sites, size=400 * sites, image_size=54, seed=seed),
        partition,
        Training(batch_size=16 * (sites + 1 if pooled else 1), lr=5e-4, weight_decay=0.0, warmup_steps=5),
        Rounds(rounds=6, evaluate_every=0, seed=seed),
    )


def measure(chosen: Experiment) -> tuple[float, float]:
    """Macro AUC in percent of the trained model on all held-out pairs, and the image's share of the classifier."""
    assembly = Assembly(chosen)
    server = assembly.server(assembly.sites())
    state = Federation(chosen.method, server, chosen.rounds, SequentialExchange(assembly.site)).run()
    model, objective = assembly.modules()
    model.load_state_dict(state)
    cohort = chosen.data.build()
    data = SiteData(cohort, {"test": cohort.rows("test")}, model.tokenizer, MODEL.image_size)
    scores, targets = predict(model, objective, data.batches("test", 96, drop_last=False))
    macro = auc(scores, targets, FINDINGS).macro()
    assert macro is not None
    return 100 * macro, modality_shares(model.classifier.weight)["image"]


def rows(mixes: list[str], bounds: bool, sizes: list[float]) -> list[tuple[str, float, str, Method]]:
    """(mix, public share, name, method) of every line of the table."""
    lines = [(mix, PUBLIC, name, method) for mix in mixes for name, method in METHODS.items()]
    lines += [(IMAGES, PUBLIC, name, method) for name, method in BOUNDS.items() if bounds]
    return lines + [(IMAGES, size, name, METHODS[name]) for size in sizes for name in METHODS if name != "mFedAvg"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixes", nargs="*", default=[IMAGES, "0:4:2", "2:2:2"])
    parser.add_argument("--bounds", action="store_true")
    parser.add_argument("--sizes", nargs="*", type=float, default=[])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    say({**machine(), **vars(options)})
    printed = []
    for mix, public, name, method in rows(options.mixes, options.bounds, options.sizes):
        steps = 1 if options.quick else 10
        found = [measure(experiment(method, mix, public, seed, steps)) for seed in range(options.seeds)]
        areas, shares = zip(*found, strict=True)
        share = statistics.fmean(shares)
        say({"mix": mix, "public": public, "method": name, "auc": [rounded(a) for a in areas], "image": rounded(share)})
        area = f"{statistics.fmean(areas):.1f} ({min(areas):.1f}-{max(areas):.1f})"
        printed.append([mix, f"{public:g}", name, area, f"{share:.3f}"])
    print("\n" + table(["I:T:M", "public share", "method", "macro AUC (%)", "image"], printed) + "\n")
    say(machine())


if __name__ == "__main__":
    main()
