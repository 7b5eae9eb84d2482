"""Makes the encoders that ship with fedvlp of a finished run of tiny-pool, and says whether they are the same.

    fedvlp simulate tiny-pool --runs build/towers
    python studies/programs/towers.py build/towers/tiny-pool/001 build/towers/tiny-pool/encoders

That is `make towers`. It is a run like any other, of a method that trains on everybody's records together, by the one
training loop; the encoders are written in half precision. Exits with 2 where they are not the shipped ones.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlp import __version__
from fedvlp.core.client import OBJECTIVE
from fedvlp.core.types import group
from fedvlp.core.validate import require
from fedvlp.data.loader import SiteData
from fedvlp.evaluation import metric_names as names
from fedvlp.evaluation.retrieval import Retrieval
from fedvlp.models.initial import SHIPPED, load_initial, made, parse, pinned, save_initial, settled
from fedvlp.run import presets
from fedvlp.run.assembly import Assembly
from fedvlp.run.experiment import Experiment
from fedvlp.run.fitting import absolute
from fedvlp.run.folder import RunFolder
from studies.claims.cell_results import machine

SPLIT = "test"
"""Records of the pool that nothing was chosen on: the figures that are written beside the weights are of these."""


def write_towers(folder: RunFolder, out: Path) -> tuple[str, dict[str, Any]]:
    """Writes the encoders of a finished run into ``out``.

    Returns what ``model.init`` says for them, and what config.json there says of their making.
    """
    experiment = folder.experiment()
    require(experiment.method.pooled, f"the method of {experiment.name} trains at sites; give a run of tiny-pool")
    torch.set_num_threads(experiment.training.threads)
    saved = folder.server()
    finished = saved is not None and folder.model.exists()
    require(finished, "the run has not finished; resume it with `fedvlp simulate --resume`")
    assert saved is not None
    state = experiment.method.finish(saved[0])
    assembly = Assembly(experiment)
    model, _ = assembly.modules()
    weights = {name: tensor for name, tensor in state.items() if not name.startswith(OBJECTIVE)}
    rounded = {
        n: t.half().to(t.dtype) if group(n) == "encoder" and t.is_floating_point() else t for n, t in weights.items()
    }
    model.load_state_dict(rounded)
    said = {
        "command": f"fedvlp simulate {experiment.name}",
        "fedvlp": __version__,
        "seed": experiment.rounds.seed,
        "cohort": assembly.cohort.fingerprint,
        "records": len(assembly.cohort),
        "trained_on": len(assembly.cohort.rows("train")),
        "steps": experiment.rounds.rounds * experiment.method.local_steps,
        "batch_size": experiment.training.batch_size,
        "lr": experiment.training.lr,
        "machine": machine(),
        "held_out": held_out(assembly, model),
    }
    save_initial(model, out, said)
    return pinned(str(out)), said


def held_out(assembly: Assembly, model: Any) -> dict[str, float]:
    """Recall on the pool's test records, in percent, with the number of queries and what chance would give.

    ``r1`` and ``r5`` are among records of all sources, where scanner and wording help to distinguish them;
    ``r1_within_sites`` is the mean over the sites of recall among their own. Where no batch of pairs is held out there
    is no query and no recall; where no site has one, none within sites.
    """
    protocol = Retrieval()
    recalls: dict[str, float] = {}
    queries = 0
    data = assembly.data(None)
    if _has_pairs(data, protocol.batch_size):
        figures = protocol.measure(model, data, SPLIT)
        queries = 2 * (data.sizes[SPLIT] // protocol.batch_size) * protocol.batch_size  # images and reports
        recalls = {f"r{k}": figures[names.recall(SPLIT, k)] for k in (1, 5)}
    own = [assembly.data(site) for site in assembly.data_sites()]
    within = [protocol.measure(model, of, SPLIT) for of in own if _has_pairs(of, protocol.batch_size)]
    if within:
        recalls["r1_within_sites"] = fmean(measured[names.recall(SPLIT, 1)] for measured in within)
    return {
        "queries": queries,
        "candidates": protocol.batch_size,
        "chance_r1": 100 / protocol.batch_size,
        **{name: round(value, 2) for name, value in recalls.items()},
    }


def _has_pairs(data: SiteData, count: int) -> bool:
    """Whether so many pairs are held out."""
    return len(data.having(SPLIT)) >= count


@dataclass(frozen=True)
class TowerComparison:
    """Towers that were made again, against those that they should be."""

    same_bytes: bool
    same_machine: bool  # so the bytes must be the same, too
    recall: tuple[float, float | None]  # R@1 on the pool's test records, as recorded and now; None: too few of them
    error: float  # standard error of one R@1, in points
    cosine: dict[str, float]  # by tower, mean over the test records of both towers' feature of a record

    @property
    def problem(self) -> str:
        """Why these are not the towers, or ""."""
        if self.same_bytes:
            return ""
        if self.same_machine:
            return "this machine, with this torch, should have made the same bytes"
        if self.recall[1] is None:
            return "too few records are held out to measure the recall of these"
        if abs(self.recall[1] - self.recall[0]) > 3 * self.error:
            return "the held-out recall is more than three standard errors from that which is recorded"
        return ""


def compare(experiment: Experiment, recorded: str, remade: Path) -> TowerComparison:
    """Compares the folder ``remade`` with the weights ``recorded`` (of ``ModelConfig.init``) that it should equal."""
    torch.set_num_threads(experiment.training.threads)
    before, now = made(recorded), made(str(remade))
    digests = [parse(pinned(init)).digest for init in (recorded, str(remade))]
    assembly = Assembly(experiment)
    features = [_features(assembly, init) for init in (recorded, str(remade))]
    recall = float(before["held_out"]["r1"]), now["held_out"].get("r1")
    share, queries = recall[0] / 100, before["held_out"]["queries"]
    return TowerComparison(
        same_bytes=digests[0] == digests[1],
        same_machine=before["machine"] == now["machine"],
        recall=recall,
        error=100 * (share * (1 - share) / queries) ** 0.5,
        cosine={name: float(F.cosine_similarity(features[0][name], features[1][name]).mean()) for name in features[0]},
    )


@torch.no_grad()
def _features(assembly: Assembly, init: str) -> Mapping[str, Tensor]:
    """The encoders' summary tokens [N, W] of the test records, by tower; no part of the model above them."""
    model = replace(assembly.experiment.model, init=init).build().eval()
    load_initial(model, init)
    encoded = [model.towers(batch) for batch in assembly.data(None).batches(SPLIT, 100, drop_last=False)]
    images = [tokens.image[:, 0] for tokens in encoded if tokens.image is not None]
    texts = [tokens.text[:, 0] for tokens in encoded if tokens.text is not None]
    return {"image": torch.cat(images), "text": torch.cat(texts)}


def told(preset: str, comparison: TowerComparison) -> str:
    """Say how near the new encoders are to the shipped ones, in a line."""
    exact = "the same bytes" if comparison.same_bytes else "other bytes"
    where = "made on such a machine" if comparison.same_machine else "made on another machine or torch"
    cosines = ", ".join(f"{name} {value:.4f}" for name, value in comparison.cosine.items())
    return (
        f"shipped {preset} ({where}): {exact}; held-out R@1 {comparison.recall[0]} then, {comparison.recall[1]} "
        f"now (standard error {comparison.error:.1f}); cosine of the features of a record: {cosines}"
    )


def wherever(experiment: Experiment) -> Experiment:
    """The experiment without that by which machines differ, and the saving of what is half done."""
    training = replace(experiment.training, device="cpu", threads=1, checkpoint_steps=0)
    return replace(experiment, training=training)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a finished run of a preset whose encoders ship")
    parser.add_argument("out", type=Path, help="folder for the encoders")
    options = parser.parse_args()
    folder = RunFolder(options.run)
    experiment = folder.experiment()
    if experiment.name not in SHIPPED:
        parser.error(f"no weights ship under the name {experiment.name}; there are: {', '.join(SHIPPED)}")
    if wherever(experiment) != wherever(absolute(presets.get(experiment.name)).pinned()):
        parser.error(f"the run is not of the preset {experiment.name} as it is, so its encoders are others")
    wrote, made_now = write_towers(folder, options.out)
    print(f"held-out records of the pool: {made_now['held_out']}\nwrote {wrote}")
    comparison = compare(experiment, settled(experiment.name), options.out)
    print(told(experiment.name, comparison))
    if comparison.problem:
        parser.error(f"these are not the shipped {experiment.name}: {comparison.problem}")


if __name__ == "__main__":
    main()
