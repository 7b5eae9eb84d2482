"""Builds what an experiment describes, in one process: cohort, models, sites and server."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedvlp.core import norm_statistics
from fedvlp.core.client import Client, named_state, restart_target
from fedvlp.core.method import SiteHooks, overridden
from fedvlp.core.objective import ObjectiveModule
from fedvlp.core.seeds import seed
from fedvlp.core.server_state import Server
from fedvlp.core.types import MODALITIES, State
from fedvlp.data.cohort import PUBLIC, SPLITS, Cohort, NoRecordsError, digest
from fedvlp.data.deid import Accepted, refuse_phi
from fedvlp.data.loader import SiteData
from fedvlp.data.partition import dirichlet_partition, published_columns
from fedvlp.data.record_ids import one_spelling
from fedvlp.data.report_imputation import retrieve_reports
from fedvlp.data.screening import Summary, kept_tokens, screen
from fedvlp.evaluation.classification import Classification
from fedvlp.evaluation.retrieval import Retrieval
from fedvlp.federation.server_trainer import ServerTrainer
from fedvlp.federation.site import Evaluate, Site
from fedvlp.federation.site_memory import SiteMemory
from fedvlp.methods.prompt_learning import ClassTextConfig
from fedvlp.models.dual_encoder import ModelConfig
from fedvlp.models.initial import load_initial, made
from fedvlp.models.multimodal import MultimodalConfig
from fedvlp.run.cautions import record_epsilon
from fedvlp.run.experiment import POOLED, Experiment
from fedvlp.run.folder import RunFolder
from fedvlp.run.metrics import about
from fedvlp.training import frozen_features
from fedvlp.training.frozen_features import FixedFeatures, FrozenFeatures


class Assembly:
    """Builds an experiment in one process: cohort, models, sites, server. The sites share model and cohort.

    ``folder`` is the run's, for the memories of its sites; None keeps them in this process. ``accept_phi_risk`` trains
    on reports although identifiers were found in them: of all kinds, or of those that it names.
    """

    def __init__(self, experiment: Experiment, folder: Path | None = None, accept_phi_risk: Accepted = False) -> None:
        self.experiment = experiment
        self.folder = folder
        self.accept_phi_risk = accept_phi_risk
        self.summary: Summary = {}  # of the data set, once the gate has been passed
        self._cohort: Cohort | None = None
        self._modules: dict[ModelConfig, tuple[Any, Any]] = {}
        self._public: dict[ModelConfig, SiteData] = {}

    @property
    def pooled(self) -> bool:
        """Whether the records of all sites are trained on together (Centralized)."""
        return self.experiment.method.pooled

    @property
    def cohort(self) -> Cohort:
        """The records, each with its site. Raises ValueError for settings that do not fit the data."""
        if self._cohort is None:
            self._cohort = self._dealt(self.experiment.data.build())
        return self._cohort

    def _dealt(self, cohort: Cohort) -> Cohort:
        """The records as the experiment's partition has them, each with its site."""
        if cohort.sites is None:
            cohort = cohort.with_sites(self._deal(cohort))
        split = self.experiment.partition
        refuse_other_sites(split.left_out_sites, cohort.sites or ())
        if split.public and PUBLIC not in (cohort.sites or ()):  # or else the data have a public set of their own
            chosen = draw_public(cohort, split.public, self.experiment.rounds.seed)
            chosen &= ~np.isin(np.asarray(cohort.sites), split.left_out_sites)
            cohort = cohort.with_sites(np.where(chosen, PUBLIC, np.asarray(cohort.sites)).tolist())
        cohort = drop_modalities(cohort, split.image_only, split.text_only, split.left_out_sites)
        refuse_other_labels(self.experiment, cohort)
        if self.experiment.method.uses_public:
            cohort = of_public_pairs(self.experiment.name, cohort)
        return retrieve_reports(cohort, self.experiment.rounds.seed, split.retrieve) if split.retrieve else cohort

    def _deal(self, cohort: Cohort) -> list[str]:
        """A site for each of N rows: "site-1", ..., Dirichlet over the labels."""
        split = self.experiment.partition
        if split.sites < 1:
            raise ValueError(f"partition.sites is {split.sites}; a run needs at least one site")
        groups = np.asarray(cohort.patients if split.unit == "patient" else cohort.studies)
        labels = published_columns(cohort.labels, cohort.label_names)
        owner = dirichlet_partition(
            labels, groups, split.sites, split.beta, self.experiment.rounds.seed, label_code=split.label_code
        )
        return [f"site-{index + 1}" for index in owner]

    def data_sites(self) -> tuple[str, ...]:
        """The sites that hold records and take part, sorted by name."""
        return tuple(sorted(set(self.cohort.sites or ()) - {PUBLIC, *self.experiment.partition.left_out_sites}))

    def evaluated_sites(self) -> tuple[str, ...]:
        """``data_sites``, then those that were left out of training."""
        return (*self.data_sites(), *self.experiment.partition.left_out_sites)

    def sites(self) -> tuple[str, ...]:
        """The sites that train, sorted by name.

        Raises ValueError for one that cannot be a folder's, and where ``site_models`` names another.
        """
        refuse_strangers(self.experiment, self.data_sites())
        for name in self._trained():
            refuse_no_folder(name)
        return self._trained()

    def _trained(self) -> tuple[str, ...]:
        return (POOLED,) if self.pooled else self.data_sites()

    def config(self, site: str | None = None) -> ModelConfig:
        """Configuration of a site's model; None: the server's."""
        return dict(self.experiment.site_models).get(site or "", self.experiment.model)

    def modules(self, site: str | None = None) -> tuple[Any, Any]:
        """Model and objective of a site (None: the server); sites with one architecture share them.

        Their weights are random: a resumed run does not need those that it started from (:meth:`initial`).
        """
        config = self.config(site)
        if config not in self._modules:
            self._modules[config] = self._build(config, self.experiment.rounds.seed)
        return self._modules[config]

    def _build(self, config: ModelConfig, own_seed: int) -> tuple[Any, Any]:
        """A model and an objective with the initial weights of this seed."""
        extra = self.experiment.extra
        model = config.build(own_seed)
        objective: Any = self.experiment.objective.build(model, own_seed)
        model.attention = "attention" in objective.needs
        if extra is not None:
            objective.add_module("extra", extra.build(config, own_seed))
        return model, objective

    def initial(self, site: str | None = None) -> State:
        """The weights from which a site's own model starts: of a seed of the site's; None: the server's.

        Where weights are averaged, sites start from those that they receive instead. ``model.init`` takes the place of
        the encoders' weights. Raises InitialWeightsError for it.

        What is beside those is fresh. With the seed that they were pre-trained with it would be what they were trained
        beside, and a run that begins so is ahead of one with any other seed: it takes another.
        """
        config, run = self.config(site), self.experiment.rounds.seed
        own = run if site is None else seed(run, site, "initial")
        if config.init and made(config.init).get("seed") == own:
            own = seed(own, "fresh")
        model, objective = self._build(config, own)
        load_initial(model, config.init)
        restart_target(model, objective)
        return named_state(model, objective)

    def open(self, folder: RunFolder, sites: tuple[str, ...]) -> tuple[Server, int]:
        """The server of a run and its next phase: as the last complete phase left them, or before round 0.

        Raises CheckpointError for a damaged checkpoint.
        """
        saved = folder.server()
        if saved is None:
            return self.server(sites), 0
        server, next_phase = saved
        return self.equip(server), next_phase

    def server(self, sites: tuple[str, ...]) -> Server:
        """A server for ``sites`` with the initial weights, before round 0."""
        site_only, start = self.site_only(), self.initial()
        # each goes when it has been copied: models may be large, and the untrained one of modules() is there as well
        own = {name: start.pop(name).detach().cpu().clone() for name in list(start) if name not in site_only}
        return self.equip(Server(sites, own))

    def site_only(self, site: str | None = None) -> frozenset[str]:
        """Names of the tensors of a site's model (None: the server's) that stay at the sites."""
        experiment, names = self.experiment, named_state(*self.modules(site))
        return norm_statistics.site_only(experiment.norm_statistics, experiment.method, names)

    def equip(self, server: Server) -> Server:
        """Adds to a server, new or restored, what the method needs of the public set, and returns it.

        Raises ValueError where the method needs a public set and the experiment has none.
        """
        if not self.experiment.method.uses_public:
            return server  # a server needs no data
        server.modalities = {site: self.data(site).modalities_in("train") for site in self.data_sites()}
        if not self.has_public:
            raise ValueError("this method needs a public set; set partition.public, or name site 'public' in the table")
        training = self.experiment.server_training or self.experiment.training
        server.trainer = ServerTrainer(
            self.client("server", self.public(None)),
            training,
            evaluation(self.config(), public=True),
            memory=lambda: server.memory,
        )
        return server

    @property
    def has_public(self) -> bool:
        """Whether there is a public set."""
        return PUBLIC in (self.cohort.sites or ())

    def data(self, site: str | None) -> SiteData:
        """The records of one site; None: of all that take part, without the public set."""
        rows = {split: self.cohort.rows(split, site) for split in SPLITS}
        if site is None:
            taking_part = np.isin(np.asarray(self.cohort.sites), self.data_sites())
            rows = {split: chosen[taking_part[chosen]] for split, chosen in rows.items()}
        return self._served(rows | {"train": self._trained_on(rows["train"], site)}, site)

    def _trained_on(self, rows: np.ndarray, site: str | None) -> np.ndarray:
        """Those of the training ``rows`` [n] that the objective has a loss for, if it has one for any.

        A loss of pairs has none for an image or a report alone, unless the method completes it.
        """
        if "complete" in overridden(self.experiment.method, SiteHooks):
            return rows
        image, report = self.cohort.has_image()[rows], self.cohort.has_report()[rows]
        if (image & report).all():
            return rows
        _, objective = self.modules(site)
        taken = np.zeros(len(rows), dtype=bool)
        for held in (("image",), ("text",), MODALITIES):
            if ObjectiveModule.of(objective).takes(held):
                taken |= (image == ("image" in held)) & (report == ("text" in held))
        return rows[taken] if taken.any() else rows

    def untrained(self) -> dict[str, int]:
        """Count the training records of each site (or of all, where they are pooled) that no loss is there for."""
        trained = {site: None if self.pooled else site for site in self._trained()}
        counts = {}
        for name, site in trained.items():
            rows = self.cohort.rows("train", site)
            if site is None:
                rows = rows[np.isin(np.asarray(self.cohort.sites)[rows], self.data_sites())]
            counts[name] = len(rows) - len(self._trained_on(rows, site))
        return {name: count for name, count in counts.items() if count}

    def _served(self, rows: dict[str, np.ndarray], site: str | None) -> Any:
        """The rows (by split) as batches for the model of ``site``, on the device that trains."""
        return self.serve(self.cohort, rows, site)

    def serve(self, cohort: Cohort, rows: dict[str, np.ndarray], site: str | None = None) -> Any:
        """Rows [n] (by split) of any cohort as ``data`` serves them: for the model of ``site`` (None: the server's)."""
        model, objective = self.modules(site)
        sentences = "sentences" in objective.needs
        folder = getattr(self.experiment.data, "cache", None)
        cache = Path(folder) if folder else None
        settings = (cohort, rows, kept_tokens(model.tokenizer, cache), self.config(site).image_size, sentences)
        device = self.experiment.training.torch_device()
        if self.experiment.training.cache_features:
            frozen_features.refuse_objective(model.config, objective)
        if not self._frozen(site):
            return SiteData(*settings, device=device)
        return FrozenFeatures(SiteData(*settings), model.to(device), cache)

    def _frozen(self, site: str | None) -> bool:
        """Whether a site's model reads what its towers, which never change, made of records once."""
        return self.experiment.training.cache_features and frozen_features.frozen_whole(self.config(site))

    def public(self, site: str | None) -> SiteData:
        """The public set as the model of ``site`` (None: the server) reads it; models of one architecture share it."""
        config = self.config(site)
        if config not in self._public:
            rows = {split: self.cohort.rows(split, PUBLIC) for split in SPLITS}
            self._public[config] = self._served(rows, site)
        return self._public[config]

    def gate(self) -> None:
        """Raises PHIError for reports that seem to identify people, unless the risk is accepted.

        It does so before any image is decoded, as long as nobody has asked for the cohort.
        """
        if self._cohort is not None:
            refuse_phi(self._cohort.phi, len(self._cohort), self.accept_phi_risk)
            return
        screened = screen(self.experiment.data)
        refuse_phi(screened.phi, screened.records, self.accept_phi_risk)
        cohort, self.summary = screened.prepare()
        self._cohort = self._dealt(cohort)

    def client(self, name: str, data: Any, site: str | None = None) -> Client:
        """A client named ``name`` that trains the model of ``site`` (None: the server's) on ``data``."""
        model, objective = (module.to(self.experiment.training.torch_device()) for module in self.modules(site))
        client = Client(name, self.experiment.rounds.seed, model, objective, data, site_only=self.site_only(site))
        choice, method = self.experiment.norm_statistics, self.experiment.method
        client.own_norm = norm_statistics.of_own_model(choice, method, client.state())
        client.initial = lambda: self.initial(site)
        if self.experiment.training.cache_features and not self._frozen(site):
            client.fixed = FixedFeatures()
        if self.has_public:
            client.public, client.public_id = self.public(site), public_id(self.cohort)
        return client

    def memory(self, site: str) -> SiteMemory:
        """What ``site`` remembers in the folder of the run."""
        return SiteMemory(self.folder / "sites" / site if self.folder else None)

    def site(self, name: str) -> Site:
        """The site ``name``, ready to answer broadcasts.

        Raises PHIError for reports that seem to identify people, NoRecordsError for a site without records, ValueError
        for a name that cannot be a folder's.
        """
        self.gate()
        if name not in self._trained():
            known = ", ".join(self._trained())
            raise NoRecordsError(
                f"site {name!r} has no records in this experiment; there are: {known}",
                public="this site has no records in this experiment",
            )
        refuse_no_folder(name)
        site = None if self.pooled else name
        client = self.client(name, self.data(site), site)
        evaluate = EverySite(self) if self.pooled else evaluation(self.config(site))
        return Site(
            client, self.experiment.method, self.experiment.training, self.memory(name), evaluate, record_epsilon
        )


def draw_public(cohort: Cohort, share: float, seed: int) -> np.ndarray:
    """Records of the public set, [N] bool: those of a ``share`` (0..1) of the patients of each split.

    Only patients whose records all have image and report are drawn.
    """
    patients, splits = np.asarray(cohort.patients), np.asarray(cohort.splits)
    unpaired = set(patients[~(cohort.has_image() & cohort.has_report())].tolist())
    rng = np.random.default_rng([seed, 1])  # another stream than the one that deals records to sites
    chosen: set[str] = set()
    for split in SPLITS:
        members = sorted(set(patients[splits == split].tolist()) - unpaired)
        chosen |= set(rng.permutation(members)[: round(share * len(members))].tolist())
    return np.isin(patients, sorted(chosen))


def of_public_pairs(name: str, cohort: Cohort) -> Cohort:
    """Leave public records without an image or without a report out of the cohort, for a method that needs pairs.

    Raises ValueError, with the method's ``name``, where there are public training records and none is a pair.
    """
    public, train = np.asarray(cohort.sites or ()) == PUBLIC, np.asarray(cohort.splits) == "train"
    image, report = cohort.has_image(), cohort.has_report()
    unpaired = public & ~(image & report)
    if not unpaired.any():
        return cohort
    if not (public & train & ~unpaired).any():
        raise ValueError(
            f"{name} needs a public set of images with their reports; of {int((public & train).sum())} public training "
            f"records {int((public & train & image).sum())} have an image, {int((public & train & report).sum())} a "
            "report and none has both. Give pairs, or a method that needs no public set"
        )
    return cohort.take(np.flatnonzero(~unpaired))


def drop_modalities(cohort: Cohort, image_only: int, text_only: int, left_out: Sequence[str] = ()) -> Cohort:
    """The cohort without the reports of some sites and the images of others.

    In the order of the sites but those ``left_out``, the last ``text_only`` lose their images, and the ``image_only``
    before them their reports. Raises ValueError where these are more than there are sites.
    """
    if not image_only and not text_only:
        return cohort
    sites = np.asarray(cohort.sites)
    order = sorted(
        set(sites.tolist()) - {PUBLIC, *left_out}, key=lambda name: (len(name), name)
    )  # site-2 before site-10
    paired = len(order) - image_only - text_only
    if paired < 0:
        raise ValueError(
            f"partition: image_only {image_only} and text_only {text_only} are more than the {len(order)} sites"
        )
    without_report, without_image = order[paired : paired + image_only], order[paired + image_only :]
    dropped = cohort.without(reports=np.isin(sites, without_report), images=np.isin(sites, without_image))
    left = dropped.has_image() | dropped.has_report()
    return dropped if left.all() else dropped.take(np.flatnonzero(left))  # of what was there alone nothing is left


def refuse_other_sites(left_out: Sequence[str], sites: Sequence[str]) -> None:
    """Raises ValueError where a site to leave out is none of ``sites``, the public set, or the last one."""
    names = sorted(set(sites) - {PUBLIC})
    strange = [name for name in left_out if name not in names]
    if strange or (names and set(names) == set(left_out)):
        seen = f"{', '.join(strange)}, which is no site" if strange else "every site"
        raise ValueError(
            f"partition.left_out names {seen}; the sites are {', '.join(names)}. Name some of them, not all"
        )


def refuse_strangers(experiment: Experiment, sites: Sequence[str]) -> None:
    """Raises ValueError where ``site_models`` gives a model to a site that is none of ``sites``."""
    strangers = [site for site, _ in experiment.site_models if site not in sites]
    if strangers:
        raise ValueError(
            f"site_models names {', '.join(strangers)}; the sites are {', '.join(sites) or 'none'}. Name sites of this "
            "experiment, or leave those models out: a site that is not named has the model of the server"
        )


def refuse_no_folder(name: str) -> None:
    """Raises ValueError for a site's name that cannot be a folder's, as a table may have it."""
    if not re.fullmatch(r"[\w.-]*\w[\w.-]*", name):
        (called,) = one_spelling([name]).values()
        raise ValueError(
            f"site {name!r}: a site's name is also a folder's, and may hold letters, digits, '.', '_' and '-' only"
            + (f"; call it {called}" if called else "")
        )


def refuse_other_labels(experiment: Experiment, cohort: Cohort) -> None:
    """Raises ValueError unless the labels of a classifier, or the classes of prompts, are the data's in their order."""
    model, extra = experiment.model, experiment.extra
    said = {"model.labels": model.labels} if isinstance(model, MultimodalConfig) else {}
    if isinstance(extra, ClassTextConfig):
        said["extra.classes"] = extra.classes
    for setting, names in said.items():
        if names != cohort.label_names:
            raise ValueError(
                f"{setting} are {', '.join(names)}; the data's are {', '.join(cohort.label_names) or 'none'}. "
                "Give both the same names in one order"
            )


def public_id(cohort: Cohort) -> int:
    """A hash, below 2^48, of the ids of the public set in their order."""
    ids = (cohort.ids[row] for split in SPLITS for row in cohort.rows(split, PUBLIC))
    return int(digest(*ids)[:12], 16)


def _retrieval(model: ModelConfig, public: bool) -> Evaluate | None:
    if isinstance(model, MultimodalConfig):
        return None
    return Retrieval(captions=True, folds=5) if public else Retrieval()


def _classification(model: ModelConfig, public: bool) -> Evaluate | None:
    return Classification() if isinstance(model, MultimodalConfig) else None


MEASURES = (_retrieval, _classification)
"""What is measured in every evaluated round: for a model's configuration, and whether the records are the public set's,
a callable of client and splits that returns figures by name, or None where there is nothing of the kind to measure."""


def evaluation(model: ModelConfig, public: bool = False) -> Evaluate:
    """The evaluation of a model on held-out records of a site, or of the ``public`` set."""
    measures = [measure for make in MEASURES if (measure := make(model, public)) is not None]

    def together(client: Client, splits: tuple[str, ...]) -> dict[str, float]:
        figures: dict[str, float] = {}
        for measure in measures:
            figures |= measure(client, splits)
        return figures

    return together


class EverySite:
    """Evaluates a pooled model on the held-out records of every site; names are made by ``run.metrics.about``.

    Where sites keep their normalisation, the statistics are estimated at each of them, since none has trained.
    """

    def __init__(self, assembly: Assembly) -> None:
        self._data = {site: assembly.data(site) for site in assembly.data_sites()}
        self._evaluate = evaluation(assembly.config())

    def __call__(self, client: Client, splits: tuple[str, ...]) -> dict[str, float]:
        """Name -> figure of the client's model on ``splits`` of every site."""
        of_site = replace(client)
        metrics: dict[str, float] = {}
        pooled = {name: tensor.clone() for name, tensor in client.state().items() if name in client.site_only}
        for site, data in self._data.items():
            of_site.data = data
            if client.site_only:
                norm_statistics.estimate(of_site)
            metrics |= {about(site, name): value for name, value in self._evaluate(of_site, splits).items()}
        for name, tensor in pooled.items():
            client.state()[name].copy_(tensor)
        return metrics
