"""Whether CreamFL's sites have anything to teach its server, and which sites get weight.

    python studies/programs/creamfl_teachers.py [--seeds 0-4] [--rows creamfl creamfl-many]

``creamfl`` and ``reamfl-gca``: as in `fedvlp claims creamfl`, on the same runs. ``-drawn``: as there on drawn vectors.
``-many``: fourteen sites in place of five, four with images alone, four with reports alone and six with pairs (in the
paper ten, ten and fifteen), which together have twelve times as many records as the public set. The sum of R@1, R@5 and
R@10 in percent on the held-out studies, mean over seeds, at the end of a run: of the server; of the best site with
pairs; and of the sites together, where a film or a report is the mean of what all sites make of it that train on such.
Then of a new server that is only distilled from these means, for as many steps as the run's server had in all: on the
public set, and on pairs of the sites' own, at most 2,400, which no server ever sees. Then differences with their 95 %
interval (Student's t over seeds).

The second table tells what the weights by global contrast (Eq. 4 to 6) see at the end of a run, on the public set: the
cosine of what a site makes of one half of a pair and the server of the other, which those weights are made from; and
the weight of a site with pairs, where 1 is what the mean would give it. Two minutes of one core a run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from common import machine, say, table
from ledger_cells import finished, mean, parser_of
from torch import Tensor
from torch.nn import functional as F

from fedvlp.core.types import MODALITIES
from fedvlp.data.cohort import PUBLIC
from fedvlp.evaluation.intervals import over_seeds
from fedvlp.evaluation.retrieval import embed
from fedvlp.methods.ensemble import as_represented, squared_distance
from fedvlp.methods.math.contrast import contrast_scores
from fedvlp.models.dual_encoder import ModelConfig
from fedvlp.run.assembly import Assembly
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder
from studies.claims import ensembles
from studies.claims.cell_results import Figures, Table, origin
from studies.claims.ensembles import RSUM
from studies.claims.ledger import CREAMFL, UNTRAINED, drawn_ladder, ladder

MANY, DRAWN = "-many", "-drawn"
ROWS = (
    "reamfl-gca",
    "creamfl",
    *(f"{name}{MANY}" for name in ("server-alone", UNTRAINED, "creamfl")),
    *(f"{name}{DRAWN}" for name in ("reamfl-gca", "creamfl")),
)
SERVER, SITE, TOGETHER = "server", "best site with pairs", "sites together"
ON_PUBLIC, ON_PRIVATE = "distilled on the public set", "distilled on private pairs"
COSINE, WEIGHT = "cosine of a site's half and the server's other half", "weight of a site with pairs"
HELD_OUT = "held-out"
PRIVATE = 2400  # pairs of the sites' own, at most
BATCH = 64

Pairs = Sequence[Tensor]
"""Unit vectors of images [N, d] and of their reports [N, d]."""


def experiments(seed: int) -> dict[str, Experiment]:
    """The rows by name."""
    films, drawn = ladder(seed), drawn_ladder(seed)
    rows = {f"{name}{MANY}": many(one) for name, one in films.items()}
    rows |= {f"{name}{DRAWN}": one for name, one in drawn.items()} | films
    return {row: rows[row] for row in ROWS}


def many(one: Any) -> Any:
    """The same with fourteen sites."""
    site = one.site_models[0][1]
    data = replace(one.data, sites=14, size=9000)
    partition = replace(one.partition, image_only=4, text_only=4, public=0.075)
    models = tuple((f"site-{index}", site) for index in range(1, data.sites + 1))
    return replace(one, data=data, partition=partition, site_models=models)


def figures(folder: RunFolder) -> Figures:
    """All figures of a finished run."""
    experiment, saved = folder.experiment(), folder.server()
    assert saved is not None
    assembly = Assembly(experiment, folder.path)
    records = Records(assembly)
    server = assembly.client("figures", None)
    server.load(experiment.method.finish(saved[0]))
    servers = records.represented(server.model, None)
    found = {SERVER: recalled(servers[HELD_OUT]), SITE: 0.0}
    public: dict[str, Pairs] = {}
    sums: dict[str, dict[str, Any]] = {part: dict.fromkeys(MODALITIES, 0.0) for part in PARTS}
    for site in assembly.data_sites():
        made = records.represented(ensembles.site_model(assembly, site), site)
        modalities = assembly.data(site).modalities
        public[site] = made[ON_PUBLIC]
        if modalities == MODALITIES:
            found[SITE] = max(found[SITE], recalled(made[HELD_OUT]))
        for part, pairs in made.items():
            for name, vectors in zip(MODALITIES, pairs, strict=True):
                if name in modalities:
                    sums[part][name] = sums[part][name] + vectors
    means = {part: tuple(F.normalize(of[name], dim=1) for name in MODALITIES) for part, of in sums.items()}
    found[TOGETHER] = recalled(means[HELD_OUT])
    kinds = {site: assembly.data(site).modalities for site in public}
    found |= listened(public, kinds, servers[ON_PUBLIC], experiment)
    for part in (ON_PUBLIC, ON_PRIVATE):
        server.load(assembly.initial(None))
        distil(server.model, records.served(None)[part], means[part], experiment)
        found[part] = recalled(records.represented(server.model, None)[HELD_OUT])
    return found


def listened(
    made: Mapping[str, Pairs], kinds: Mapping[str, Sequence[str]], servers: Pairs, experiment: Experiment
) -> Figures:
    """``COSINE`` and ``WEIGHT``, means over items, sites and modalities, of what sites made of the public set.

    ``kinds``: the modalities that each site trains on, of which alone it sends representations.
    """
    method: Any = experiment.method
    cosines, weights = [], []
    for name, opposite in zip(MODALITIES, reversed(servers), strict=True):
        senders = [site for site in made if name in kinds[site]]
        sent = [made[site][MODALITIES.index(name)] for site in senders]
        cosines += [float((one * opposite).sum(1).mean()) for one in sent]
        scores = [contrast_scores(one, opposite, method.gca_temperature, method.gca_exclude_positive) for one in sent]
        shares = len(senders) * torch.stack(scores).softmax(0).mean(1)
        weights += [float(share) for site, share in zip(senders, shares, strict=True) if len(kinds[site]) == 2]
    return {COSINE: sum(cosines) / len(cosines), WEIGHT: sum(weights) / len(weights)}


PARTS = (HELD_OUT, ON_PUBLIC, ON_PRIVATE)
"""Where models are measured, and what a new server is distilled on."""


class Records:
    """The records of ``PARTS`` as the models of a run read them, all of them with both modalities."""

    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly
        self._whole, dealt = assembly.experiment.data.build(), assembly.cohort
        private = np.concatenate([dealt.rows("train", site) for site in assembly.data_sites()])
        drawn = np.random.default_rng(assembly.experiment.rounds.seed).permutation(private)[:PRIVATE]
        held_out = np.concatenate([self._whole.rows(split) for split in ensembles.HELD_OUT])
        self._rows = dict(zip(PARTS, (held_out, dealt.rows("train", PUBLIC), drawn), strict=True))
        self._served: dict[ModelConfig, dict[str, Any]] = {}

    def served(self, site: str | None) -> dict[str, Any]:
        """By part, the records for the model of ``site`` (None: the server's), as a training split."""
        config = self._assembly.config(site)
        if config not in self._served:
            parts = self._rows.items()
            self._served[config] = {
                part: self._assembly.serve(self._whole, {"train": rows}, site) for part, rows in parts
            }
        return self._served[config]

    def represented(self, model: Any, site: str | None) -> dict[str, Pairs]:
        """By part, what ``model`` makes of the records, in their order."""
        return {
            part: embed(model, data.batches("train", BATCH, drop_last=False))
            for part, data in self.served(site).items()
        }


def recalled(pairs: Pairs) -> float:
    """The sum of R@k, in percent."""
    image, text = pairs
    return sum(ensembles.recalls(image, text))


def distil(model: Any, data: Any, wanted: Pairs, experiment: Experiment) -> None:
    """Trains ``model`` towards ``wanted``, of all rows of ``data``, for as many steps as the server had in a run."""
    method: Any = experiment.method
    training, rounds = experiment.server_training or experiment.training, experiment.rounds
    steps = rounds.rounds * (method.server_steps + method.distil_steps)
    trained = [tensor for tensor in model.parameters() if tensor.requires_grad]
    optimizer = torch.optim.AdamW(trained, training.lr, weight_decay=training.weight_decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1 + math.cos(math.pi * step / steps)) / 2)
    model.train()
    for batch in islice(as_represented(data, BATCH, torch.Generator().manual_seed(rounds.seed)), steps):
        output, rows = model(batch), batch["row"].cpu()
        own = (output.image, output.text)
        terms = [squared_distance(one, all_of[rows].to(one)) for one, all_of in zip(own, wanted, strict=True)]
        optimizer.zero_grad()
        torch.stack(terms).sum().backward()
        optimizer.step()
        schedule.step()


def report(shown: Sequence[str], rows: Table) -> str:
    """The Markdown table, of the rows that have finished."""
    names = (SERVER, SITE, TOGETHER, ON_PUBLIC, ON_PRIVATE)
    apart = ((TOGETHER, SERVER), (ON_PUBLIC, TOGETHER), (ON_PRIVATE, TOGETHER))
    body = [
        [row, *(mean(rows, row, name, 1) for name in names)]
        + [str(over_seeds(rows.difference(row, row, one, other))) for one, other in apart]
        for row in shown
        if rows.has(row, SERVER)
    ]
    return table(["row", *names, *(f"{one} less {other}" for one, other in apart)], body)


def weights(shown: Sequence[str], rows: Table) -> str:
    """The Markdown table of the weights of the sites, of the rows that have it."""
    names = (COSINE, WEIGHT)
    body = [[row, *(mean(rows, row, name, 2) for name in names)] for row in shown if rows.has(row, WEIGHT)]
    return table(["row", *names], body)


def main() -> None:
    parser = parser_of(__doc__, "0-4")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW")
    options = parser.parse_args()
    say({**machine(), **vars(options)})
    scenario = replace(
        CREAMFL,
        name=f"{CREAMFL.name}-teachers",
        runs=CREAMFL.name,
        experiments=lambda seed: {name: experiments(seed)[name] for name in options.rows},
        figures=figures,
    )
    rows = finished(scenario, options)
    print(f"\n{RSUM}, seeds {options.seeds}.\n\n{report(options.rows, rows)}\n\n{weights(options.rows, rows)}")
    print(f"\n{origin(rows)}")
    say(machine())


if __name__ == "__main__":
    main()
