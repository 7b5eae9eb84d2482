"""What a run will take, from one round at one of its sites of which every phase is cut to a few steps."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import islice
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from fedvlp.core.client import Client
from fedvlp.core.method import SiteHooks, overridden
from fedvlp.core.metric_keys import SECONDS
from fedvlp.core.types import EVALUATE, Batch
from fedvlp.data.cohort import SPLITS
from fedvlp.data.deid import Accepted
from fedvlp.data.screening import rows_used
from fedvlp.federation.exchange import SequentialExchange
from fedvlp.federation.loop import Federation
from fedvlp.federation.wire import EncodedSite, SiteEnd, site_memory
from fedvlp.models.dual_encoder import ModelConfig
from fedvlp.run import beside
from fedvlp.run.assembly import Assembly
from fedvlp.run.experiment import Experiment

TYPICAL = 10
"""Percent: what R@1 is on a few hundred pairs, by which the width of its interval is told beforehand."""

PROBED = 3
"""Steps of each phase that are taken. The first is left out of the time of a step: it sets things up."""


@dataclass(frozen=True)
class Phase:
    """A phase of a round as it will be: its steps, and seconds without and with the server's part."""

    name: str
    steps: int  # at a site
    sites: int  # that take part: one where the records are pooled, fewer than all where some are drawn
    site_seconds: float
    server_seconds: float


@dataclass(frozen=True)
class DryRun:
    """What a run will take; each of its sites counts as the one that was probed, which has the most records."""

    records: dict[str, dict[str, int]]  # site -> split -> records
    probed: str
    rounds: int
    phases: tuple[Phase, ...]  # of a round, as the first one has them; then the last evaluation, if there is one
    bytes: int  # of tensors to and from all sites in the whole run
    peak_bytes: int  # memory of this process; of the accelerator where the run uses one
    used: str = ""  # how many rows of the data set are, and why others are not
    test_patients: Mapping[str, int] = field(default_factory=dict)  # of test pairs, by site
    measuring: float = 0.0  # seconds after the last round, in which the report measures the test records again
    processor_seconds: float = 0.0  # that the dry run itself took, features of frozen towers among them

    @property
    def reach(self) -> float:
        """Half the width of the 95 % interval of an R@1 of ``TYPICAL`` percent, mean over sites; nan without a pair.

        Of the normal approximation to the binomial, a patient being one draw: his records are alike.
        """
        counts = [count for count in self.test_patients.values() if count]
        if not counts:
            return math.nan
        variance = TYPICAL * (100 - TYPICAL) * sum(1 / count for count in counts) / len(counts) ** 2
        return 1.96 * math.sqrt(variance)

    def seconds(self, workers: int) -> float:
        """Of the whole run with sites trained side by side by so many workers, each as fast as one alone."""
        whole = self.measuring
        for phase in self.phases:
            turns = -(-phase.sites // max(1, workers))
            spent = phase.site_seconds * turns + phase.server_seconds
            whole += spent if phase.name == EVALUATE else spent * self.rounds
        return whole


def dry_run(experiment: Experiment, accept_phi_risk: Accepted = False) -> DryRun:
    """Builds all of ``experiment``, takes a few steps at its largest site, and writes nothing of a run.

    What the data set's cache lacks is decoded into it: the run finds it there.
    Raises what the run itself would raise before its first round: PHIError, ValueError for settings that do not fit.
    """
    began = time.process_time()
    assembly = Assembly(experiment, accept_phi_risk=accept_phi_risk)
    assembly.gate()
    sites = assembly.sites()
    of_site = {site: assembly.data(None if assembly.pooled else site) for site in sites}
    probed = max(sites, key=lambda site: (len(of_site[site].modalities), of_site[site].num_train))
    rounds = experiment.rounds.rounds
    short = replace(experiment.rounds, rounds=min(1, rounds), quorum=1)
    method, wire = experiment.method, experiment.wire
    cut: list[ShortPhases] = []

    def site(name: str) -> EncodedSite:
        made = assembly.site(name)
        cut.append(ShortPhases(made.client))
        return EncodedSite(made, SiteEnd(wire, method, site_memory(None)))

    torch.set_num_threads(experiment.training.threads)
    server = assembly.server((probed,))
    trained = len(method.asks(replace(server, sites=sites)))
    if server.trainer:
        cut.append(ShortPhases(server.trainer.client))
    phases: list[Phase] = []

    def noted(record: dict[str, Any]) -> None:
        asked = len(sites) if record["phase"] == EVALUATE else trained
        phases.append(_whole(record, probed, asked, cut, _declared(experiment, record["phase"])))

    with closing(SequentialExchange(site)) as exchange:
        Federation(method, server, short, exchange, wire=wire, report=noted).run()
    traffic = sum(
        sum(record["bytes"].values()) * phase.sites * (1 if phase.name == EVALUATE else rounds)
        for record, phase in zip(server.history, phases, strict=True)
    )
    return DryRun(
        {name: {split: len(assembly.cohort.rows(split, name)) for split in SPLITS} for name in assembly.data_sites()},
        probed,
        rounds,
        tuple(phases),
        traffic,
        _peak(experiment),
        rows_used(assembly.summary),
        _test_patients(assembly),
        _measuring(assembly),
        time.process_time() - began,
    )


def _measuring(assembly: Assembly) -> float:
    try:
        return beside.seconds(assembly)
    except ValueError:  # no site has test pairs, so a report measures nothing
        return 0.0


def _test_patients(assembly: Assembly) -> dict[str, int]:
    """Site -> patients with an image and a report in its test split."""
    cohort = assembly.cohort
    paired = cohort.has_image() & cohort.has_report()
    rows = {site: cohort.rows("test", site) for site in assembly.data_sites()}
    return {site: len({cohort.patients[row] for row in of_site[paired[of_site]]}) for site, of_site in rows.items()}


class ShortPhases:
    """Ends every phase of a client after ``PROBED`` steps, and notes what one takes and how many there would be."""

    def __init__(self, client: Client) -> None:
        self._drawn: Callable[..., Iterator[Batch]] = client.drawn
        client.drawn = self.drawn  # type: ignore[method-assign]
        self.of_server = client.name == "server"
        self.since: list[_Steps] = []  # the phases of training since the last record

    def drawn(self, batches: Iterator[Batch], generator: torch.Generator) -> Iterator[Batch]:
        """The first batches of those that the client draws."""
        steps = _Steps(batches)
        self.since.append(steps)
        for batch in islice(self._drawn(batches, generator), PROBED):
            steps.began.append(time.perf_counter())
            yield batch
        steps.began.append(time.perf_counter())


@dataclass
class _Steps:
    """The steps of one phase: when each began (and the last ended), and the batches that were not taken."""

    rest: Iterator[Batch]
    began: list[float] = field(default_factory=list)

    def missing(self, declared: int | None) -> int:
        """The steps that were not taken; those that nobody declared are counted by drawing their batches."""
        taken = len(self.began) - 1
        return sum(1 for _ in self.rest) if declared is None else max(0, declared - taken)

    @property
    def seconds(self) -> float:
        """Of one step."""
        spans = [end - start for start, end in zip(self.began, self.began[1:], strict=False)]
        return median(spans[1:] or spans) if spans else 0.0  # a method without steps


def _whole(record: dict[str, Any], probed: str, asked: int, cut: list[ShortPhases], declared: int | None) -> Phase:
    """The phase of a record as it would be with all of its steps."""
    site = record["sites"][probed][SECONDS]
    server, steps = record["seconds"] - site, 0
    for one in cut:
        for done in one.since:
            missing = done.missing(None if one.of_server else declared)
            if one.of_server:
                server += missing * done.seconds
            else:
                site, steps = site + missing * done.seconds, steps + len(done.began) - 1 + missing
        one.since = []
    return Phase(record["phase"], steps, asked, site, server)


def _declared(experiment: Experiment, phase: str) -> int | None:
    """The steps of a site's phase, where the method says them; None where they depend on the records."""
    method = experiment.method
    if phase == EVALUATE or experiment.training.local_epochs or "batches" in overridden(method, SiteHooks):
        return None
    steps = method.steps(phase)
    return steps + experiment.training.made_up(steps)


def _peak(experiment: Experiment) -> int:
    device = experiment.training.torch_device()
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


# Estimates the memory that a site's training needs, from the shapes of its model: nothing of that size is made.
#
# The model is built on torch's "meta" device, whose tensors have a shape and no values. A forward pass there tells what
# autograd keeps of a record.

COPIES = 8
"""Of every weight: itself, as received, its gradient, AdamW's two moments, the method's anchor, the site's memory and
the update."""

PAIRWISE = 8
"""Numbers that a contrastive loss keeps of each pair of records of a batch."""

PROBED_RECORDS = 2
"""Records of the forward pass; batch normalisation needs two."""


def bytes_needed(experiment: Experiment, site: str, processes: int = 1) -> int:
    """Bytes that one of ``processes`` takes which train ``site`` together: weights, a batch's activations, images.

    A plugin's own kind of model counts as nothing: only its author knows its shapes.
    """
    config = dict(experiment.site_models).get(site, experiment.model)
    images = getattr(experiment.data, "size", 0) * getattr(experiment.data, "image_size", 0) ** 2  # made in memory
    if not isinstance(config, ModelConfig):
        return images
    training = experiment.training
    batch = -(-training.batch_size // processes)
    rows = min(batch, training.micro_batch or batch)
    model = config.outline()
    modules = [model, *_others(experiment, config, model)]
    weights = sum(_bytes(tensor) for module in modules for tensor in (*module.parameters(), *module.buffers()))
    width = 1.0 if training.precision == "float32" else 0.5
    activations = int(_kept_of_a_record(model) * rows * width)
    return COPIES * weights + activations + PAIRWISE * 4 * batch**2 + images


def _others(experiment: Experiment, config: ModelConfig, model: Any) -> list[nn.Module]:
    """The shapes of fedvlp's own objective and extra module."""
    own = [
        settings
        for settings in (experiment.objective, experiment.extra)
        if type(settings).__module__.startswith("fedvlp.")
    ]
    with torch.device("meta"):
        return [settings.build(model if settings is experiment.objective else config, 0) for settings in own]  # type: ignore[union-attr]


def _kept_of_a_record(model: Any) -> float:
    """Bytes that autograd keeps of one record between forward and backward pass, in float32."""
    config = model.config
    with torch.device("meta"):
        batch = {
            "image": torch.zeros(PROBED_RECORDS, 1, config.image_size, config.image_size),
            "text": torch.zeros(PROBED_RECORDS, config.max_tokens, dtype=torch.long),
            "text_mask": torch.ones(PROBED_RECORDS, config.max_tokens, dtype=torch.bool),
        }
    weights = {tensor.untyped_storage()._cdata for tensor in model.parameters()}
    stored: dict[int, Tensor] = {}  # by storage: several nodes of the graph may keep the same one

    def note(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in weights:
            stored[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model.train()(batch)
    return sum(tensor.untyped_storage().nbytes() for tensor in stored.values()) / PROBED_RECORDS


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
