"""Evaluations of a run, and downstream evaluations of any model: what ``fedvlp evaluate --what`` offers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, get_type_hints

import numpy as np

from fedvlp.core import norm_statistics
from fedvlp.core.client import TARGET, Client, named_state
from fedvlp.core.device import to_host
from fedvlp.core.method import sends, stays_initial
from fedvlp.core.server_state import Server
from fedvlp.core.types import State
from fedvlp.data.cohort import Cohort
from fedvlp.data.loader import SiteData
from fedvlp.evaluation import linear_probe as probes
from fedvlp.evaluation import retrieval as sources
from fedvlp.evaluation import segmentation as masks
from fedvlp.evaluation import zero_shot as zero
from fedvlp.evaluation.downstream import never_said, refuse_repeated
from fedvlp.evaluation.zero_shot import PROMPTS
from fedvlp.models.load import load_encoders, load_model
from fedvlp.objectives.convirt import ConVIRT
from fedvlp.run.assembly import Assembly
from fedvlp.run.experiment import Source
from fedvlp.run.folder import RunFolder
from fedvlp.run.measurements import PROBE, ZERO_SHOT, folder_of, note
from fedvlp.run.model_card import INITIAL_WEIGHTS
from fedvlp.run.model_use import told_apart
from fedvlp.training.settings import Training

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choices:
    """Options of an evaluation; None is the protocol's value. A plugin's evaluation may have fields of its own."""

    reads: ClassVar[frozenset[str] | None] = None  # the fields here that a plugin's evaluation reads; None: any

    steps: int | None = None  # optimiser steps of training a head at most
    data: Source | None = None  # records of a downstream evaluation, or of zero-shot; None: the run's own
    against: tuple[Path, ...] = ()  # other runs or model folders, to compare with on the same records
    out: Path | None = None  # folder of the files of a downstream evaluation; None: ``evaluation/`` in the run's
    probe: probes.LinearProbe = field(default_factory=probes.LinearProbe)
    segmentation: masks.Segmentation = field(default_factory=masks.Segmentation)
    classes: tuple[str, ...] = ()  # zero-shot: labels that are told apart, at least 2; none: ``told_apart``


def remembered(assembly: Assembly, site: str) -> State:
    """The normalisation that a site of the run keeps; nothing at a site that never trained."""
    if not assembly.site_only(site) or site not in assembly.sites():
        return {}
    return norm_statistics.split(assembly.site(site).memory.newest())[1]


Load = Callable[[Client, State, str], None]
"""Puts a model into a client as a site has it, for its own records."""


def load_shared(client: Client, state: State, site: str) -> None:
    """Put the model into the client; it is the same at every site."""
    client.load(state)


def loader(assembly: Assembly) -> Load:
    """Puts a model into a client as each site has it: where sites keep their normalisation, with the site's own."""
    data = {site: assembly.data(site) for site in assembly.evaluated_sites()}
    known = {site: norm_statistics.own(remembered(assembly, site), "model") for site in data}

    def load(client: Client, state: State, site: str) -> None:
        at_site = replace(client, name=site, data=data[site])
        client.load(norm_statistics.complete(at_site, client.here(state), client.here(known[site])))

    return load if assembly.site_only() else load_shared


def paired_sites(assembly: Assembly, least: int = 2) -> dict[str, Any]:
    """The data of the sites with pairs, training and held out: only these can be trained on and measured by retrieval.

    Sites with fewer than ``least`` test pairs are left out, and the log names them: a pair alone finds itself.
    Raises ValueError where no site is left.
    """
    data = {site: assembly.data(site) for site in assembly.data_sites()}
    paired = {site: records for site, records in data.items() if len(records.having("train"))}
    if not paired:
        raise ValueError("no site of this run holds images with reports, so nothing can be retrieved")
    few = [site for site, records in paired.items() if len(records.having("test")) < least]
    if few:
        log.warning("left out, with fewer than %d test pairs: %s", least, ", ".join(few))
    if len(few) == len(paired):
        raise ValueError(
            f"no site of this run has {least} test pairs, so nothing can be retrieved; give more records, or a larger "
            "share of them to the test split"
        )
    return {site: records for site, records in paired.items() if site not in few}


def models_at_sites(assembly: Assembly, state: State) -> dict[str, State]:
    """Site -> the whole model in its memory, for methods that leave models at the sites (Local); else none.

    Where sites send weights, a whole model in a memory is none that a site ends with: FedMOON's is what its contrast
    compares with. Running statistics are those that the site measures the model with (``norm_statistics.estimate``).
    """
    if sends(assembly.experiment.method, state):
        return {}
    memories = {site: assembly.memory(site).newest() for site in assembly.sites()}
    whole = {site: memory for site, memory in memories.items() if memory.keys() == state.keys()}
    return {site: _with_statistics(assembly, site, memory) for site, memory in whole.items()}


def _with_statistics(assembly: Assembly, site: str, own: State) -> State:
    """A site's own model with the statistics that it estimates; as it is where it estimates none."""
    client = assembly.client(site, assembly.data(site), site)
    if not client.own_norm:
        return own
    client.load(client.here(own))
    norm_statistics.estimate(client)
    return to_host({name: tensor.clone() for name, tensor in client.state().items()})


def last_server(folder: RunFolder) -> Server:
    """The server of the last complete phase. Raises ValueError where there is none."""
    saved = folder.server()
    if saved is None:
        raise ValueError(f"{folder.path} has no checkpoint yet: nothing was trained there")
    return saved[0]


def trained_state(assembly: Assembly, server: Server) -> State:
    """The trained model of a run, as a client takes it (``Client.load``).

    A target network that stays at the sites (FedU, FedEMA) is a copy of the model, as at a site that has not trained.
    """
    state = assembly.experiment.method.finish(server)
    client = assembly.client("trained", None)
    live = client.state()
    lacking = [name for name in live if name.startswith(TARGET) and name not in state.keys() | client.site_only]
    if not lacking:
        return state
    client.load({**live, **state})
    client.restart_target()
    return state | {name: live[name].detach().cpu().clone() for name in lacking}


def _zero_shot_of_model(folder: RunFolder, choices: Choices) -> list[Path]:
    """The same for a model without a run, e.g. one of another library before any training, on ``choices.data``."""
    cohort, model = records_for(folder, choices), load_model(folder.path)
    model.require_comparable("zero-shot")
    classes = _prompted(choices.data, cohort.label_names, choices.classes)
    objective = ConVIRT()  # it is not called
    tests = {"test": _imaged(cohort)}
    data = SiteData(_unknown_where_never_said(cohort), tests, model.tokenizer, model.config.image_size)
    client = Client("model", 0, model, objective, data)
    states = {zero.GLOBAL: named_state(model, objective)}
    results, chosen = zero.zero_shot(zero.ZeroShot(classes), client, states, {ELSEWHERE: data}, cohort.label_names)
    title = f"{folder.path.name}: zero-shot accuracy, %"
    return zero.write_results(results, chosen, target_of(folder, choices, "zero-shot", cohort), title)


def zero_shot(folder: RunFolder, choices: Choices) -> list[Path]:
    """Zero-shot classification of each site's test records, or of ``choices.data`` (spec 10.4). Returns the files.

    Measures the global model, each site's own, and the one that a selector chooses, as far as the run has them.
    Raises ValueError for classes that the records do not have as labels, and for records without a test image.
    """
    import torch

    refuse_against(choices)
    refuse_repeated(choices.classes, "zero-shot")  # before minutes of reading records
    if _is_model(folder):
        return _zero_shot_of_model(folder, choices)
    experiment = folder.experiment()
    torch.set_num_threads(experiment.training.threads)
    warn_of_initial(folder.path, measured="what is measured as the global model")
    assembly, server = Assembly(experiment, folder.path), last_server(folder)
    cohort = assembly.cohort if choices.data is None else choices.data.build()
    source = choices.data or experiment.data
    classes = _prompted(source, cohort.label_names, choices.classes)
    threshold = getattr(experiment.method, "threshold", 2.0)
    asked = bool(choices.classes) or not PROMPTS.keys() >= set(classes)
    protocol = zero.ZeroShot(classes, threshold, new_words=asked)
    state = trained_state(assembly, server)
    states = {zero.GLOBAL: state} | own_models(assembly, server, state)
    data = _imaged_sites(assembly) if choices.data is None else {ELSEWHERE: _elsewhere(assembly, cohort)}
    load = loader(assembly) if assembly.site_only() else None
    client = assembly.client(zero.SELECTED, None)
    results, chosen = zero.zero_shot(protocol, client, states, data, cohort.label_names, load)
    title = f"{experiment.name}, round {server.round}: zero-shot accuracy, %"
    target = target_of(folder, choices, ZERO_SHOT, cohort)
    files = zero.write_results(results, chosen, target, title)
    people = {} if load else _subgroups(assembly, cohort)
    if people:
        of_people, _ = zero.zero_shot(protocol, client, states, people, cohort.label_names)
        files.append(zero.write_subgroups(of_people, target))
    return _noted(folder, files)


def _noted(folder: RunFolder, files: list[Path]) -> list[Path]:
    """The files; those in the folder of a run are noted as of its model, so that its report shows them."""
    for file in files:
        if file.parent == folder_of(folder) and folder.checkpoint.exists():
            note(folder, file)
    return files


ELSEWHERE = "other records"
"""In place of a site's name, in the table of zero-shot on records of no site."""


def _prompted(source: Any, labels: tuple[str, ...], wanted: tuple[str, ...]) -> tuple[str, ...]:
    """The classes of zero-shot: those wanted, or those that are ``told_apart``. Raises ValueError for no label."""
    if strange := [name for name in wanted if name not in labels]:
        raise ValueError(
            f"zero-shot: classes {', '.join(strange)} are no labels of these records; there are: "
            f"{', '.join(labels) or 'none'}"
        )
    return wanted or told_apart(source, labels)


def _imaged_sites(assembly: Assembly) -> dict[str, Any]:
    """The test images of the sites that have some, those that were left out of training among them.

    Raises ValueError where no site has one.
    """
    cohort = assembly.cohort
    rows = {site: cohort.rows("test", site) for site in assembly.evaluated_sites()}
    rows = {site: of_site[cohort.has_image()[of_site]] for site, of_site in rows.items()}
    if not any(map(len, rows.values())):
        raise ValueError("zero-shot: no test record of this run's sites has an image; give others with --data")
    return {site: assembly.serve(cohort, {"test": of_site}, site) for site, of_site in rows.items() if len(of_site)}


def _elsewhere(assembly: Assembly, cohort: Cohort) -> Any:
    """The test images of a cohort of no site. Raises ValueError where there is none, or no model is made for them."""
    if assembly.site_only():
        raise ValueError(
            "zero-shot: every site of this run keeps its normalisation (norm_statistics=site) or private adapters, so "
            "no model is made for other records; leave --data out, or evaluate a run without"
        )
    return assembly.serve(_unknown_where_never_said(cohort), {"test": _imaged(cohort)})


def _imaged(cohort: Cohort) -> np.ndarray:
    """The test rows with an image. Raises ValueError where there is none."""
    rows = cohort.rows("test")
    rows = rows[cohort.has_image()[rows]]
    if not len(rows):
        raise ValueError("zero-shot: no test record of these has an image; choose other records")
    return rows


def _unknown_where_never_said(cohort: Cohort) -> Cohort:
    """The cohort with labels that no record of a site has uncertain there: in no AUC (``downstream.never_said``)."""
    return replace(cohort, labels=np.where(never_said(cohort), np.float32(-1), cohort.labels))


def _subgroups(assembly: Assembly, cohort: Cohort) -> dict[str, Any]:
    """ "sex: F" -> the test images of that subgroup, whatever their site."""
    rows = cohort.rows("test")
    rows = rows[cohort.has_image()[rows]]
    cohort = _unknown_where_never_said(cohort)
    data = {}
    for name in cohort.subgroup_names:
        values = cohort.subgroup(name)[rows]
        for value in sorted(set(values.tolist()) - {""}):
            data[f"{name}: {value}"] = assembly.serve(cohort, {"test": rows[values == value]})
    return data


def own_models(assembly: Assembly, server: Server, state: State) -> dict[str, State]:
    """Site -> its own model, where the method has such: at the server (PMS-FM, FedSM) or at the sites (Local)."""
    personal = {site: assembly.experiment.method.personal(server, site) for site in server.sites}
    if any(personal.values()):
        return {site: {**state, **own} for site, own in personal.items()}
    return models_at_sites(assembly, state)


def _is_model(folder: RunFolder) -> bool:
    """Whether the folder is a model's, and not that of a run, which may not have begun."""
    return not folder.checkpoint.exists() and (folder.path / folder.model.name).exists()


def records_for(folder: RunFolder, choices: Choices) -> Cohort:
    """The records of a downstream evaluation. Raises ValueError for a model folder without ``choices.data``."""
    if choices.data is not None:
        return choices.data.build()
    if _is_model(folder):
        raise ValueError(f"{folder.path} is a model and no run, so it has no records of its own; give --data")
    return Assembly(folder.experiment(), folder.path).cohort


def warn_of_initial(*paths: Path, measured: str = "what is measured now") -> None:
    """Says so of folders whose model was not trained: that of a run whose sites trained alone."""
    for folder in (RunFolder(path) for path in paths):
        if not (folder.checkpoint.exists() and folder.config.exists()):
            continue  # a model without its run
        if stays_initial(folder.experiment().method, last_server(folder).state):
            log.warning("%s: %s; %s is of no trained model", folder.path, INITIAL_WEIGHTS, measured)


def device_of(folder: RunFolder) -> torch.device:
    """Where the run of a folder trains; of a model alone, a GPU if there is one."""
    training = folder.experiment().training if folder.checkpoint.exists() else Training()
    return training.torch_device()


def target_of(folder: RunFolder, choices: Choices, name: str, cohort: Cohort) -> Path:
    """Path, without suffix, of the files; other records than the run's own are in the name, by their fingerprint."""
    own = name if choices.data is None else f"{name}-{cohort.fingerprint[:8]}"
    return (folder_of(folder) if choices.out is None else choices.out) / own


def linear_probe(folder: RunFolder, choices: Choices) -> list[Path]:
    """Linear probes of the frozen image tower on shares of the training records (spec 10.2). Returns the files written.

    Each model of ``choices.against`` is probed alike and compared by DeLong's test. Raises ValueError for one of
    another input size: the records are decoded once, for the first model, and the other would see a part of each image.
    """
    warn_of_initial(folder.path, *choices.against)
    models = [load_encoders(path) for path in (folder.path, *choices.against)]  # a wrong path before minutes of probing
    size = models[0].config.image_size
    for path, model in zip(choices.against, models[1:], strict=True):
        if model.config.image_size != size:
            raise ValueError(
                f"--against {path}: that model sees images of {model.config.image_size} pixels, and {folder.path} "
                f"those of {size}; expected the same, since both are probed on the same decoded images. Compare models "
                "of one input size, or evaluate each by itself"
            )
    cohort = records_for(folder, choices)
    one, *others = (
        probes.linear_probe(choices.probe, model.to(device_of(folder)), cohort, choices.steps) for model in models
    )
    named = {str(path): probed for path, probed in zip(choices.against, others, strict=True)}
    differences = probes.compare(one, named, choices.probe.resamples)
    return _noted(folder, probes.write_probe(one, differences, target_of(folder, choices, PROBE, cohort)))


def refuse_against(choices: Choices) -> None:
    """Raises ValueError where models are given that nothing is compared with."""
    if choices.against:
        raise ValueError("--against compares linear probes; leave it out, and evaluate the other model by itself")


def segment(folder: RunFolder, choices: Choices) -> list[Path]:
    """Dice of decoders on the frozen image tower (spec 10.3). Returns the files written."""
    refuse_against(choices)
    warn_of_initial(folder.path)
    cohort, model = records_for(folder, choices), load_encoders(folder.path).to(device_of(folder))
    segmented = masks.segmentation(choices.segmentation, model, cohort, choices.steps)
    return masks.write_segmentation(segmented, target_of(folder, choices, "segmentation", cohort))


def retrieve(folder: RunFolder, choices: Choices) -> list[Path]:
    """Whole-set retrieval with chance, the source oracle, recall within sources, and intervals (spec 0 Z11).

    Returns the files written.
    """
    refuse_against(choices)
    warn_of_initial(folder.path)
    cohort, model = records_for(folder, choices), load_model(folder.path).to(device_of(folder))
    model.require_comparable("retrieval")
    split, rows = sources.source_retrieval(model, cohort)
    return sources.write_retrieval(split, rows, target_of(folder, choices, "retrieval", cohort))


def choices_of(measure: Callable[..., list[Path]]) -> type[Choices]:
    """Return the options of an evaluation: the type of its argument ``choices``, which in a plugin may be its own."""
    kind: type[Choices] = get_type_hints(measure).get("choices", Choices)
    return kind


EVALUATIONS: dict[str, Callable[[RunFolder, Choices], list[Path]]] = {
    "zero-shot": zero_shot,
    "linear-probe": linear_probe,
    "segmentation": segment,
    "retrieval": retrieve,
}
"""Evaluations by name. Each writes files, into the run's ``evaluation/`` by default, and returns their paths."""

DOWNSTREAM = frozenset({"linear-probe", "segmentation", "retrieval", "zero-shot"})
"""Those of ``EVALUATIONS`` that take ``Choices.data`` and ``out``, and any folder with a model."""

READ_BY: dict[str, frozenset[str]] = {
    "steps": frozenset({"linear-probe", "segmentation"}),
    "data": DOWNSTREAM,
    "against": frozenset({"linear-probe"}),
    "out": DOWNSTREAM,
    "probe": frozenset({"linear-probe"}),
    "segmentation": frozenset({"segmentation"}),
    "classes": frozenset({"zero-shot"}),
}
"""Field of ``Choices`` -> those of ``EVALUATIONS`` that read it; a plugin's evaluation reads what it likes."""
