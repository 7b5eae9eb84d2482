"""What low-rank adapters on frozen towers cost and save: recall at demo size, and the bytes of an exchange.

    python studies/programs/adapters.py [--seeds 0-2] [--jobs 2] [--rank 8] [--alpha 16] [--only NAME ...] [--quick]
    python studies/programs/adapters.py --socket [--rank 8] [--rounds 1]                  # 16 GB, some minutes

Recall: FedAvg's demo preset with all weights trained, with adapters on both frozen towers (on their linear layers, or
on all that the towers have, the latter also sent at 8 bits both ways), and with towers that are frozen alone; the same
start, records and steps. Test split, percent: mean of both directions and of all sites, and the worst site; beside it
the difference to full training and its 95 % interval (Student's t over seeds), and the bytes that all sites sent and
received. The demo has 300 test pairs, too few to tell models apart that differ by less than two points: ``fresh`` is
the average on 6,000 other studies of the same scanner and wording, among 32 and among 96 of a site. Stopped and started
again, it goes on.
Bytes of one exchange at a paper's size: ViT-B/16 and BERT-base with all twelve layers, counted from the tensors that
travel, for heads and alignment blocks as in the paper, and for small heads without these blocks. ``--socket``: the
latter counted by the loopback device while FLARE's simulator runs rounds of one step at two sites. At 8 bits the first
broadcast is whole, in float32, so a run of one round saves less than a longer one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from bytes import on_socket
from common import command_line, machine, mean_sd, say, table
from torch import Tensor, nn

from fedvlp.cli.overrides import seeds_of
from fedvlp.core.client import named_state
from fedvlp.core.metric_keys import BYTES_DOWN, BYTES_UP
from fedvlp.data.cohort import SPLITS
from fedvlp.data.loader import SiteData
from fedvlp.evaluation.intervals import over_seeds
from fedvlp.evaluation.retrieval import embed
from fedvlp.federation.codec import Wire
from fedvlp.models.dual_encoder import ModelConfig
from fedvlp.models.initial import save_initial
from fedvlp.run import presets
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder
from studies.claims.cell_results import Figures, measured, spent
from studies.claims.ledger import AVERAGE, WORST, seeded, trained, trained_client
from studies.claims.scenario import Scenario, cells_of

ROOT = Path(__file__).parents[2]
FULL = "all-weights"
MIB = 1 << 20
ALPHA = ModelConfig.adapter_alpha
FRESH, AMONG = 6000, (32, 96)
"""Studies that nobody trained on, and among how many of them a film's report is looked for."""
EIGHT_BITS = Wire(down="bfloat16", up="int8")
PAPER = ModelConfig("vit_base_patch16_224", "bert-base-uncased", image_size=224, max_tokens=112, head_hidden=2048)


def experiments(rank: int, alpha: float, quick: bool, seed: int) -> Mapping[str, Experiment]:
    """Name -> FedAvg's demo with another model."""
    demo: Any = seeded(presets.get("fedavg"), seed)
    if quick:
        demo = replace(
            demo,
            data=replace(demo.data, size=1000),
            method=replace(demo.method, local_steps=2),
            rounds=replace(demo.rounds, rounds=1),
        )
    adapted = replace(demo.model, adapters="lora", adapter_rank=rank, adapter_alpha=alpha)
    name = f"adapters-{rank}" if alpha == ALPHA else f"adapters-{rank}-alpha-{alpha:g}"
    models = {
        FULL: demo.model,
        name: adapted,
        f"{name}-every": replace(adapted, adapter_layers="every"),
        "frozen": replace(adapted, adapter_rank=0),
    }
    chosen = {name: replace(demo, model=model) for name, model in models.items()}
    return {**chosen, f"{name}-every-int8": replace(chosen[f"{name}-every"], wire=EIGHT_BITS)}


def figures(folder: RunFolder) -> Figures:
    """The summary of a run, and what its sites sent and received."""
    wire = spent(folder.history())
    return {**trained(folder), **fresh(folder), "bytes": wire[BYTES_UP] + wire[BYTES_DOWN]}


def fresh(folder: RunFolder) -> Figures:
    """R@1 of the trained model on other studies of the run's sites, by how many they are among."""
    experiment: Any = folder.experiment()
    cohort = replace(experiment.data, size=FRESH).build()  # its scanner and wording follow from the seed alone
    model = trained_client(folder).model.eval()
    found: dict[int, list[float]] = {among: [] for among in AMONG}
    for site in sorted(set(cohort.sites or ())):
        rows = np.concatenate([cohort.rows(split, site) for split in SPLITS])
        data = SiteData(cohort, {"test": rows}, model.tokenizer, experiment.model.image_size)
        image, text = embed(model, data.batches("test", max(AMONG), drop_last=False))
        order = torch.randperm(len(image), generator=torch.Generator().manual_seed(0))
        for among in AMONG:
            batches = [batch for batch in order.split(among) if len(batch) == among]
            hits = [first(image[batch] @ text[batch].T) for batch in batches]
            found[among].append(100 * fmean(hits))
    return {f"fresh R@1 of {among}": fmean(sites) for among, sites in found.items()}


def first(scores: Tensor) -> float:
    """How often the pair [n, n] has the largest score, of both directions."""
    pair = scores.diagonal()
    return float(torch.stack([(scores.max(dim=way).values <= pair).float() for way in (0, 1)]).mean())


def exchanged(config: ModelConfig) -> int:
    """Bytes of the tensors of a model that travel."""
    state = named_state(config.build(), nn.Module())
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())


def exchanges(rank: int) -> str:
    """The Markdown table of bytes at a paper's size."""
    rows = []
    small = replace(PAPER, head_hidden=256, alignment=False)
    with TemporaryDirectory() as folder:
        save_initial(small.build(), Path(folder), {})
        for name, full in (("alignment blocks, heads of 2,048", PAPER), ("heads of 256 alone", small)):
            adapted = replace(full, init=folder, adapters="lora", adapter_rank=rank)
            whole, part = exchanged(full), exchanged(adapted)
            rows.append([name, f"{whole / MIB:.0f}", f"{part / MIB:.1f}", f"{100 * part / whole:.2f}"])
    return table(["beside the towers", "all weights, MiB", "with adapters, MiB", "percent"], rows)


def sockets(rank: int, rounds: int) -> str:
    """The Markdown table of bytes that loopback carried in a run with two sites: all weights, then adapters."""
    rows = []
    small = replace(PAPER, head_hidden=256, alignment=False)
    demo: Any = presets.get("fedavg")
    demo = replace(
        demo,
        data=replace(demo.data, sites=2, size=60, image_size=small.image_size),
        method=replace(demo.method, local_steps=1),
        training=replace(demo.training, batch_size=4),
        rounds=replace(demo.rounds, rounds=rounds, evaluate_every=0),
    )
    with TemporaryDirectory() as folder:
        save_initial(small.build(), Path(folder), {})
        whole = replace(demo, model=replace(small, init=folder))
        linear = replace(whole, model=replace(whole.model, adapters="lora", adapter_rank=rank))
        every = replace(whole, model=replace(linear.model, adapter_layers="every"))
        for name, experiment in {
            "all weights": whole,
            f"adapters of rank {rank}": linear,
            f"adapters of rank {rank} on every layer": every,
            f"adapters of rank {rank} on every layer, 8 bits": replace(every, wire=EIGHT_BITS),
        }.items():
            counted, _ = on_socket(experiment, seconds=900 * rounds)
            if counted is None:
                return "no network namespace is allowed here, so loopback's bytes are not those of this run alone"
            rows.append((name, counted))
            say({"model": name, "socket": counted})
    full = rows[0][1]
    return table(
        ["trained", "MiB on the socket", "percent"],
        [[name, f"{counted / MIB:.1f}", f"{100 * counted / full:.2f}"] for name, counted in rows],
    )


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--seeds", default="0-2", help="FIRST-LAST")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--alpha", type=float, default=ALPHA, help="of the runs; bytes do not depend on it")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "adapters", help="where the runs are kept")
    parser.add_argument("--quick", action="store_true", help="one round, few steps: does everything run?")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these models beside all weights")
    parser.add_argument("--socket", action="store_true", help="counts bytes with a paper's towers, and nothing else")
    parser.add_argument("--rounds", type=int, default=1, help="of --socket")
    options = parser.parse_args()
    if options.socket:
        say(machine())
        counted = sockets(options.rank, options.rounds)
        print(f"\nTwo sites, rounds: {options.rounds}, rank {options.rank}\n\n{counted}\n")
        return
    say({**machine(), **vars(options)})
    scenario = Scenario(
        "quick" if options.quick else "adapters",
        "",
        lambda seed: experiments(options.rank, options.alpha, options.quick, seed),
        figures,
        (),
        (),
        (),
    )
    names = list(scenario.experiments(int(first)))
    if unknown := set(options.only or ()) - set(names):
        parser.error(f"--only {', '.join(sorted(unknown))}: choose from {', '.join(names)}")
    names = [name for name in names if name == FULL or not options.only or name in options.only]
    cells = cells_of(scenario, names, seeds_of(options.seeds))
    rows = measured(
        scenario,
        cells,
        options.runs,
        options.runs / "results",
        options.jobs,
        lambda name, seed, what: say({"model": name, "seed": seed, "cell": what}),
    )
    judged = (AVERAGE, WORST, *(f"fresh R@1 of {among}" for among in AMONG))
    body = []
    for name in names:
        values = {figure: rows.values(name, figure) for figure in (*judged, "bytes")}
        shown = [mean_sd(values[figure]) for figure in judged]
        apart = ["" if name == FULL else str(over_seeds(rows.difference(name, FULL, figure))) for figure in judged]
        body.append([name, *shown, *apart, f"{fmean(values['bytes']) / MIB:.0f}"])
    columns = ["average", "worst", *(f"fresh, of {among}" for among in AMONG)]
    header = [
        "trained",
        *(f"R@1 {one}" for one in columns),
        *(f"{one}, less all" for one in columns),
        "MiB on the wire",
    ]
    print(f"\nFedAvg's demo, seeds {options.seeds}\n\n{table(header, body)}\n")
    print(f"One exchange, rank {options.rank}\n\n{exchanges(options.rank)}\n")
    say(machine())


if __name__ == "__main__":
    main()
