"""Recall against epsilon: noise in every step for single records, beside noise on what a whole site sends.

    python studies/programs/record_privacy.py [--seeds 0-2] [--epsilons 1,3,8] [--rounds 3] [--size 2000]

FedAvg's demo with layer normalisation. Record: DP-SGD (training/dp_sgd.py), epsilon for one image-text pair, of the
site with fewest records. Site: each update clipped to the length 2.5 and noised (ClipAndNoise), epsilon for a site's
whole data set. Site, shared: the same epsilon for the sum alone, each of the sites adding a share of the noise, as
under an encryption of the sum, where a round needs all sites but one and one of these reads the sum. From four
starts: the shipped encoders frozen, with one linear layer each to train, for which each record goes through them
once; the same with random towers; all weights from the shipped encoders; all weights from random ones (for single
records twenty minutes a run on a CPU). R@1 on the test records in percent, mean over sites and of the worst, with the
deviation over seeds. Delta 1e-5.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from common import command_line, machine, mean_sd, say, table

from fedvlp.cli.overrides import seeds_of
from fedvlp.core.privacy import clip_and_noise
from fedvlp.core.types import Broadcast, Update
from fedvlp.federation.exchange import SequentialExchange
from fedvlp.federation.loop import Federation
from fedvlp.federation.site import Site
from fedvlp.flare.privacy_budget import epsilon as of_releases
from fedvlp.methods import FedAvg
from fedvlp.models.initial import save_initial
from fedvlp.run import presets
from fedvlp.run.assembly import Assembly
from fedvlp.run.cautions import record_epsilon
from fedvlp.run.experiment import Experiment
from fedvlp.run.metrics import summary
from fedvlp.training import dp_sgd
from studies.claims.ledger import AVERAGE, WORST, seeded

DELTA, CLIP = 1e-5, 2.5
RECORD, SITE, SHARED, NONE = "record", "site", "site, shared", "none"
INITIAL = "initial"


def starts(size: int, rounds: int, quick: bool, folder: Path) -> dict[str, Experiment]:
    """Name -> FedAvg's demo from that start, on ``size`` studies; random towers that stay are kept in ``folder``."""
    demo: Any = presets.get("fedavg")
    steps = 2 if quick else 50
    demo = replace(
        demo, method=FedAvg(local_steps=steps), rounds=replace(demo.rounds, rounds=rounds, evaluate_every=rounds),
        data=replace(demo.data, size=size),
    )  # fmt: skip
    linear = replace(demo.model, alignment=False, head_hidden=None, head_norm="none")
    save_initial(replace(linear, init="").build(), folder, {})
    kept = replace(demo.training, cache_features=True)

    def frozen(init: str) -> Experiment:
        model = replace(linear, init=init, adapters="lora", adapter_rank=0)
        return replace(demo, model=model, training=kept)

    return {
        "frozen, linear heads": frozen(demo.model.init),
        "random towers, linear heads": frozen(str(folder)),
        "all weights": demo,
        "all weights from random ones": replace(demo, model=replace(demo.model, init="")),
    }


@dataclass
class Noised:
    """A site behind a filter of its own."""

    site: Site
    noise: float  # in units of the clipping length

    def handle(self, message: Broadcast, should_stop: Callable[[], bool] = lambda: False) -> Update:
        update = self.site.handle(message, should_stop)
        if not update.state:
            return update
        return replace(update, state=clip_and_noise(update.state, message.state, CLIP, self.noise))


def smallest(cost: Callable[[float], float], wanted: float) -> float:
    """The smallest noise, to a thousandth, of which ``cost`` is at most the epsilon that is wanted."""
    low, high = 1e-2, 1e4
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if cost(middle) > wanted else (low, middle)
    return high


def recall(experiment: Experiment, kind: str, epsilon: float, batch: int) -> tuple[float, float]:
    """R@1 of a run, average and worst, under noise of one kind."""
    counts = [Assembly(experiment).data(site).num_train for site in Assembly(experiment).sites()]
    site_noise = 0.0
    if kind == RECORD:
        rounds, method = experiment.rounds.rounds, experiment.method
        steps = dp_sgd.steps(method, rounds - 1, 0)
        private = replace(experiment.training, batch_size=batch, dp_noise=1.0, dp_clip=0.5, dp_group=8)
        noise = smallest(lambda one: record_epsilon(replace(private, dp_noise=one), min(counts), steps, DELTA), epsilon)
        experiment = replace(experiment, training=replace(private, dp_noise=noise))
    elif kind == INITIAL:
        experiment = replace(experiment, method=FedAvg(local_steps=1))
    elif kind in (SITE, SHARED):
        site_noise = smallest(lambda one: of_releases({one: experiment.rounds.rounds}, DELTA), epsilon)
    assembly = Assembly(experiment)
    server = assembly.server(assembly.sites())

    def site(name: str) -> Any:
        one = assembly.site(name)
        if kind == SHARED:
            share = site_noise / max(1, len(counts) - 2) ** 0.5  # if sites shared it under encryption
            return Noised(one, share * max(counts) / one.client.data.num_train)
        return Noised(one, site_noise) if site_noise else one

    Federation(experiment.method, server, experiment.rounds, SequentialExchange(site)).run()
    trained = summary(server.history)[INITIAL if kind == INITIAL else "trained"]
    return trained[AVERAGE], trained[WORST]


def measured(
    start: str, experiment: Experiment, kinds: Sequence[tuple[str, float]], seeds: Sequence[int], batch: int
) -> Iterator[list[str]]:
    """A line of the table for each kind of noise and its epsilon."""
    for kind, epsilon in kinds:
        of_seeds = []
        for seed in seeds:
            of_seeds.append(recall(seeded(experiment, seed), kind, epsilon, batch))
            say({"start": start, "noise": kind, "epsilon": epsilon, "seed": seed, "R@1": of_seeds[-1]})
        average, worst = (mean_sd([one[index] for one in of_seeds]) for index in (0, 1))
        yield [start, kind, f"{epsilon:g}", average, worst]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--seeds", default="0-2", help="FIRST-LAST")
    parser.add_argument("--epsilons", default="1,3,8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--size", type=int, default=2000, help="studies of the cohort")
    parser.add_argument("--batch", type=int, default=128, help="records drawn in a step of DP-SGD, on average")
    parser.add_argument("--starts", default="", help="of them, by their names up to the comma: frozen")
    parser.add_argument("--quick", action="store_true", help="two steps a round: does everything run?")
    options = parser.parse_args()
    seeds = seeds_of(options.seeds)
    torch.set_num_threads(1)
    say({**machine(), **vars(options)})
    kinds = [(INITIAL, 0.0), (NONE, math.inf)]
    kinds += [(kind, float(one)) for kind in (RECORD, SITE, SHARED) for one in options.epsilons.split(",")]
    chosen = options.starts.split(",") if options.starts else None
    with TemporaryDirectory() as folder:
        of_starts = starts(options.size, options.rounds, options.quick, Path(folder))
        rows = [
            row for start, experiment in of_starts.items() if chosen is None or start.partition(",")[0] in chosen
            for row in measured(start, experiment, kinds, seeds, options.batch)
        ]  # fmt: skip
    print(table(["start", "noise", "epsilon", "R@1 average", "R@1 worst"], rows))
    say(machine())


if __name__ == "__main__":
    main()
