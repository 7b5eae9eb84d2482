"""Noise on OneRoundCCA's moments: what retrieval is left, and what membership inference finds.

    fedvlp towers fetch lite0 && fedvlp towers fetch minilm
    python studies/programs/noised_moments.py [--data ../shared/data/real-cxr] [--seeds 0-4] [--noise 0.0001,0.001,1]

The films, splits and features of frozen_pair.py. Each of four sites clips its five moments to the median norm of the
sites (a hospital must choose it without looking) and adds noise of so many times the clip (`ClipAndNoise`, whose unit
is the site's whole data set). R@1 within sources and membership by cosine as in real_towers.py, percent, mean and 95 %
over seeds; epsilon of the one release at delta 1e-5.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median

import torch
from common import command_line, machine, say, table
from frozen_pair import bare, pair_features
from real_towers import CCA, ROOT, experiments
from torch import Tensor
from torch.nn import functional as F

from fedvlp.cli.overrides import seeds_of
from fedvlp.core.change import BESIDE, change_norms
from fedvlp.core.client import named_state
from fedvlp.core.privacy import clip_and_noise
from fedvlp.core.types import State
from fedvlp.evaluation.audit.membership import matching_weights, membership, standardised
from fedvlp.evaluation.intervals import over_seeds
from fedvlp.evaluation.retrieval import WITHIN, recall_rows
from fedvlp.flare.privacy_budget import epsilon
from fedvlp.methods.one_round_cca import head_of, heads, moments_of_features
from fedvlp.objectives.convirt import ConVIRT

Pairs = dict[str, tuple[Tensor, Tensor, list[str]]]  # site -> features of images and of texts, patients


def of_split(data: Path, seed: int, split: str) -> Pairs:
    """The pairs of a split."""
    cohort = experiments(data, False, seed)[CCA].data.build()
    images, texts = pair_features(data)
    found = {}
    for site in sorted(set(cohort.sites or ())):
        rows = cohort.rows(split, site)
        ids = [cohort.ids[row] for row in rows]
        image, text = (torch.stack([of[i] for i in ids]) for of in (images, texts))
        found[site] = image, text, [cohort.patients[row] for row in rows]
    return found


def solved(data: Path, seed: int, pairs: Pairs, noise: float) -> State:
    """The heads of the sites' moments, with noise on each."""
    sent = {site: moments_of_features(image.double(), text.double()) for site, (image, text, _) in pairs.items()}
    clip = median(change_norms(moments, {})[BESIDE] for moments in sent.values())
    mean: dict[str, Tensor] = {}
    total = sum(len(image) for image, _, _ in pairs.values())
    for site, moments in sent.items():
        released = clip_and_noise(moments, {}, clip, noise) if noise else moments
        for name, tensor in released.items():
            mean[name] = mean.get(name, 0) + len(pairs[site][0]) / total * tensor.double()
    method = experiments(data, False, seed)[CCA].method
    return heads(method, mean, named_state(bare(), ConVIRT()))  # type: ignore[arg-type]


def vectors(state: State, pairs: Pairs) -> dict[str, tuple[Tensor, Tensor]]:
    """Unit vectors of a site's images and texts."""
    (image_weight, image_bias), (text_weight, text_bias) = (head_of(name, state) for name in ("image", "text"))
    return {
        site: (
            F.normalize(image @ state[image_weight].T + state[image_bias], dim=1),
            F.normalize(text @ state[text_weight].T + state[text_bias], dim=1),
        )
        for site, (image, text, _) in pairs.items()
    }


def figures(state: State, train: Pairs, test: Pairs) -> tuple[float, float]:
    """R@1 within sources, and the area of membership by cosine."""
    made = {True: vectors(state, train), False: vectors(state, test)}
    image, text = (torch.cat([of[which] for of in made[False].values()]) for which in (0, 1))
    sites = [site for site, (images, _, _) in test.items() for _ in images]
    patients = [patient for _, _, of in test.values() for patient in of]
    rows = recall_rows(image, text, sites, patients, (1,), resamples=2)
    cosines, member, whose = [], [], []
    for is_member, of_split in made.items():
        for site, (images, texts) in of_split.items():
            cosines.append((images * texts).sum(dim=1).double())
            member += [is_member] * len(images)
            whose += [site] * len(images)
    truth = torch.tensor(member)
    weight = matching_weights(whose, truth)
    scores = standardised(torch.cat(cosines), truth, weight, whose)
    area = membership("", "", "", scores, truth, weight, range(len(truth)), resamples=2).area.value
    return next(row.recall.value for row in rows if row.scope == WITHIN), area


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data" / "real-cxr")
    parser.add_argument("--seeds", default="0-4", help="FIRST-LAST")
    parser.add_argument("--noise", default="0.0001,0.001,1", help="noise multipliers, beside none")
    options = parser.parse_args()
    say({**machine(), **vars(options)})
    torch.set_num_threads(1)
    rows: dict[float, list[tuple[float, float]]] = {}
    for seed in seeds_of(options.seeds):
        train, test = (of_split(options.data, seed, split) for split in ("train", "test"))
        for noise in (0.0, *map(float, options.noise.split(","))):
            rows.setdefault(noise, []).append(figures(solved(options.data, seed, train, noise), train, test))
            say({"seed": seed, "noise": noise, "recall, membership": rows[noise][-1]})
    body = []
    for noise, found in rows.items():
        spent = f"{epsilon({noise: 1}, 1e-5):.3g}" if noise else "none"
        body.append([f"{noise:g}", spent, *(str(over_seeds([one[which] for one in found])) for which in (0, 1))])
    print("\n" + table(["noise, times the clip", "epsilon", "R@1 within sources", "membership AUC"], body))
    say(machine())


if __name__ == "__main__":
    main()
