"""Results of finished cells as small text files, to be committed: the figures and what made them.

They hold no weights, no texts and no paths of data, so that a ledger that takes hours can go on at another time and on
another machine: ``<folder>/<scenario>/<seed>/<method>.json``. A file counts where its experiment is the one that is
wanted: with the same plugins, and with the same records where these are read from a disk.
"""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

import fedvlp
from fedvlp.core.checkpoint import save_text
from fedvlp.core.metric_names import BYTES_DOWN, BYTES_UP
from fedvlp.data.cohort import digest
from fedvlp.data.synthetic.cohort import SyntheticCohort
from fedvlp.data.synthetic.latent import LatentCohort
from fedvlp.evaluation import metric_names as names
from fedvlp.models.initial import parse
from fedvlp.run import plugins
from fedvlp.run.assembly import Assembly
from fedvlp.run.cell_table import Figures, Origin
from fedvlp.run.config import described, fingerprint, from_config, to_config
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder, environment
from fedvlp.run.metrics import Record, by_site, overall
from fedvlp.run.paths import with_paths
from fedvlp.run.pretrain import machine
from fedvlp.run.simulate import noted_cohort
from fedvlp.run.terms import processor_seconds

log = logging.getLogger(__name__)

DECIMALS = 4
LEFT_OUT = "..."
"""In place of a path."""

GPU = "gpu"
PACKAGES = ("fedvlp", "numpy")
ROOMS = ("core", "training", "federation", "models", "objectives", "data", "methods", "evaluation", "run")
"""Whose code decides a figure; with it the module that measures."""


Measure = Callable[[RunFolder], Figures]
"""Measures a finished run."""


class Records:
    """The fingerprints of the records on which cells train; cells with the same records have them read once."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    def of(self, experiment: Experiment) -> str | None:
        """The fingerprint of the records as they are now; None of a drawn cohort, which its configuration determines.

        Raises ValueError where they cannot be read.
        """
        if is_drawn(experiment):
            return None
        decides = experiment.data, experiment.partition, experiment.rounds.seed
        key = json.dumps(to_config(decides), sort_keys=True)
        if key not in self._known:
            self._known[key] = Assembly(experiment).cohort.fingerprint
        return self._known[key]


def is_drawn(experiment: Experiment) -> bool:
    """Whether its configuration alone determines its records: they are drawn, and not read from a disk."""
    return isinstance(experiment.data, SyntheticCohort | LatentCohort)


def path(folder: Path, scenario: str, method: str, seed: int) -> Path:
    """The file of a cell."""
    return folder / scenario / str(seed) / f"{method}.json"


def save(file: Path, run: RunFolder, figures: Figures, measure: Measure, seconds: float = 0.0) -> Figures:
    """Writes the file of a finished cell; ``seconds``: of measuring the figures. Returns them as the file has them."""
    experiment, history = run.experiment(), run.history()
    versions = environment(experiment)["packages"]
    held_out = [record for record in history if overall(record)]
    rounded = _rounded(figures)
    content = {
        "figures": rounded,
        "spent": _rounded(spent(history) | {MEASURING: seconds}),
        "sites": {site: _rounded(of_site) for site, of_site in _last(held_out).items()},
        "rounds": [{"round": record["round"], **_rounded(_in_short(record))} for record in held_out],
        "processor_seconds": _rounded({"of a site in a round": processor_seconds(history)}),
        "machine": machine() | gpu(experiment),
        "packages": {name: versions[name] for name in PACKAGES},
        "code": code(measure),
        "experiment": described(portable(experiment)),
    }
    if not is_drawn(experiment):
        content["cohort"] = noted_cohort(run)
    file.parent.mkdir(parents=True, exist_ok=True)
    save_text(file, json.dumps(content, indent=1, allow_nan=False) + "\n")
    return rounded


MEASURING, PHASES = "seconds of measuring", "seconds of phases"
"""What a cell took beside training, and what its phases took, evaluations among them."""


def spent(history: list[Record]) -> dict[str, float]:
    """Seconds of all phases, and bytes on the wire to and from all sites."""
    return {
        PHASES: sum(record["seconds"] for record in history),
        **{name: sum(record.get("bytes", {}).get(name, 0) for record in history) for name in (BYTES_DOWN, BYTES_UP)},
    }


def load(
    file: Path, experiment: Experiment, measure: Measure, records: Records | None = None
) -> tuple[Figures, Origin] | None:
    """The figures in ``file`` and where they are from, if there is one of this very experiment.

    A setting that is younger than the file counts as it has its default, as in a run's own configuration. On which
    device it trained makes no other experiment: like another processor, it is told. It is another where a plugin has
    other content now, and where records that are read from a disk have changed, which ``records`` tells; None: they
    are not read, and count as unchanged. Raises ValueError for a damaged file.
    """
    if not file.exists():
        return None
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        measured = {name: float(value) for name, value in content["figures"].items()}
        config = content["experiment"]
        of_plugins = config.get("plugins", {})
        of, by = str(content["code"]), content["machine"]
        ran_on = ", ".join([str(by["processor"]), *([str(by[GPU])] if GPU in by else [])])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"claims: the result {file.parent.parent.name}/{file.parent.name}/{file.name} is damaged "
            f"({type(error).__name__}); restore it, or remove it to run the cell again"
        ) from None
    if of_plugins != plugins.digests(experiment):
        return None
    try:
        filed = on_device(from_config(config), experiment.training.device)
        same = fingerprint(portable(filed)) == fingerprint(portable(experiment.pinned()))
    except ValueError as error:  # it names what this fedvlp does not have, so it is another experiment
        log.warning("claims: %s of seed %s is run again: %s", file.stem, file.parent.name, error)
        return None
    if same and records is not None:
        same = content.get("cohort") == records.of(experiment)
    return (measured, Origin(ran_on, of == code(measure))) if same else None


def by_round(file: Path) -> dict[int, Figures]:
    """Average and worst R@1 after every round that was evaluated, 0 the start, of a file that :func:`load` has read."""
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return {entry.pop("round"): entry for entry in content["rounds"]}


def gpu(experiment: Experiment) -> dict[str, str]:
    """The name of the GPU that it trains on, if any."""
    device = experiment.training.torch_device()
    return {GPU: torch.cuda.get_device_name(device)} if device.type == "cuda" else {}


def on_device(experiment: Experiment, device: str) -> Experiment:
    """The same experiment, trained on ``device`` (``training.device``), also at the server."""
    server = experiment.server_training
    return replace(
        experiment,
        training=replace(experiment.training, device=device),
        server_training=replace(server, device=device) if server else None,
    )


def portable(experiment: Experiment) -> Experiment:
    """The same without the paths of this machine: a folder of data may be moved, and is nobody's business elsewhere.

    Which records there are is told by their fingerprint (``Records``). Of a folder that models start from its own name
    stays; the checksum says which weights it holds.
    """

    def moved(model: Any) -> Any:
        init = parse(model.init)
        return replace(model, init=str(init._replace(name=Path(init.name).name)))

    apart = tuple((site, moved(model)) for site, model in experiment.site_models)
    data = with_paths(experiment.data, lambda path: LEFT_OUT)
    return replace(experiment, data=data, model=moved(experiment.model), site_models=apart)


@cache
def code(measure: Measure) -> str:
    """A digest of the code that decides a figure: a cell of other code may differ, and the page says so."""
    package = Path(fedvlp.__file__).parent
    of_rooms = sorted(file for room in ROOMS for file in (package / room).rglob("*.py"))
    pieces = [piece for file in of_rooms for piece in (file.relative_to(package).as_posix(), file.read_bytes())]
    return digest(*pieces, Path(str(sys.modules[measure.__module__].__file__)).read_bytes())[:16]


def _last(held_out: list[Record]) -> dict[str, dict[str, float]]:
    """Site -> the recalls and areas of the last evaluation."""
    sites = by_site(held_out[-1]) if held_out else {}
    return {
        site: {name: value for name, value in of_site.items() if names.is_recall(name) or names.parse_auc(name)}
        for site, of_site in sites.items()
    }


def _in_short(record: Record) -> dict[str, float]:
    """Average and worst R@1 of both held-out splits, by which a plateau can be told."""
    measured = overall(record)
    wanted = [
        names.over_sites(names.recall(split, 1, scope), kind)
        for split in ("val", "test")
        for scope in (names.IN_BATCH, names.WHOLE_SET)
        for kind in (names.AVERAGE, names.WORST)
    ]
    return {name: measured[name] for name in wanted if name in measured}


def _rounded(figures: dict[str, float]) -> dict[str, float]:
    """The finite figures of both directions together; those of one direction alone would double the file."""
    one_way = tuple(f"/{direction}/" for direction in (names.I2T, names.T2I))
    return {
        name: round(value, DECIMALS)
        for name, value in sorted(figures.items())
        if math.isfinite(value) and not any(mark in name for mark in one_way)
    }
