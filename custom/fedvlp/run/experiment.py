"""An experiment: everything that determines a run's result."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass, replace
from operator import attrgetter
from typing import Any, Protocol

from torch import nn

from fedvlp.core.method import Method, SiteHooks, overridden
from fedvlp.core.norm_statistics import AVERAGED, CHOICES
from fedvlp.core.validate import require, require_name
from fedvlp.data.screening import Source
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.federation.codec import Wire
from fedvlp.federation.loop import Rounds
from fedvlp.models.dual_encoder import ModelConfig
from fedvlp.models.initial import InitialWeightsError, parse, pinned
from fedvlp.objectives import OBJECTIVES, ConVIRTConfig
from fedvlp.run.config import from_config
from fedvlp.training import dp_sgd, frozen_features
from fedvlp.training.settings import Training

POOLED = "pooled"
"""Name of the one site that trains in a run of ``Centralized``."""


class Objective(Protocol):
    """A configured loss."""

    def build(self, model: Any, seed: int = 0) -> nn.Module:
        """A module (VLOutput, batch) -> named terms, for outputs of ``model``, a DualEncoder."""
        ...


class Extra(Protocol):
    """What a method trains beside model and objective, e.g. PMS-FM's selector."""

    def build(self, model: ModelConfig, seed: int) -> nn.Module:
        """The module, for a model of this configuration; the same weights for the same seed."""
        ...


@dataclass(frozen=True)
class Partition:
    """How a simulation deals records to sites (spec 12.1). Raises ValueError for a value outside of its range."""

    sites: int = 5  # at least 1; for data whose records have no site
    beta: float = 1.0  # Dirichlet concentration, above 0; smaller is more skewed
    label_code: str = "mention"  # class of a record: findings that are mentioned (papers) or "positive"
    unit: str = "study"  # what is dealt as a whole: a study, or all that a "patient" has
    image_only: int = 0  # number of sites that lose their reports; order of the sites: paired, image-only, text-only
    text_only: int = 0  # number of sites that lose their images
    public: float = 0.0  # share of the patients of every split, 0 to below 1, who form the public set, at no site
    retrieve: int = 0  # reports of the public set for a record without one, found by labels (data/report_imputation.py)
    left_out: str = ""  # sites that take no part and that the model is evaluated on (leave one site out): "a,b"

    def __post_init__(self) -> None:
        object.__setattr__(self, "retrieve", int(self.retrieve))  # true in an older file is 1
        for name in ("image_only", "text_only", "retrieve"):
            require(getattr(self, name) >= 0, f"partition.{name} is {getattr(self, name)}; it must not be negative")
        require(self.unit in ("study", "patient"), f"partition.unit is {self.unit!r}; choose study or patient")
        require(0 <= self.public < 1, f"partition.public is {self.public}; it must be in [0, 1)")

    @property
    def left_out_sites(self) -> tuple[str, ...]:
        """The names in ``left_out``."""
        return tuple(name for given in self.left_out.split(",") if (name := given.strip()))


@dataclass(frozen=True)
class Experiment:
    """Everything that determines the result of a run."""

    name: str  # a-z, 0-9 and "-": runs lie in a folder of this name
    method: Method
    model: ModelConfig = field(default_factory=ModelConfig)
    objective: Objective = field(default_factory=ConVIRTConfig, metadata={"choices": OBJECTIVES, "table": "OBJECTIVES"})
    data: Source = field(default_factory=SyntheticCohort)
    partition: Partition = field(default_factory=Partition)
    training: Training = field(default_factory=Training)
    rounds: Rounds = field(default_factory=Rounds)
    site_models: tuple[tuple[str, ModelConfig], ...] = ()  # (site, its model) where that differs from ``model``
    server_training: Training | None = None  # of the server's model on the public set; None: ``training``
    wire: Wire = field(default_factory=Wire)  # how models and updates travel
    norm_statistics: str = AVERAGED  # of batch normalisation: averaged, or each site's own (core/norm_statistics.py)
    extra: Extra | None = None  # becomes ``objective.extra``; its tensors are named "objective.extra.<path>"

    def __post_init__(self) -> None:
        require_name("the name of an experiment", self.name)
        seen = self.norm_statistics
        require(seen in CHOICES, f"norm_statistics is {seen!r}; choose {' or '.join(CHOICES)}")
        # FLARE's component builder does not build what is in a list
        object.__setattr__(self, "site_models", from_config(list(self.site_models)))
        if self.training.cache_features:
            require(
                not self.method.reads_films,
                f"training.cache_features: {type(self.method).__name__} reads the images themselves at every step; set "
                "cache_features to false",
            )
            if not self.method.fixes_encoders:
                for model in (self.model, *(model for _, model in self.site_models)):
                    frozen_features.refuse_towers(model)
        if self.training.dp_noise:
            dp_sgd.refuse_settings(self.method, self.training)
        for name in ("method", "objective", "extra"):
            object.__setattr__(self, name, self._following(name))
        self.method.refuse_settings(self)

    @property
    def crops_centres(self) -> bool:
        """Whether every image is cropped at the centre, since its tokens are all that training reads of it."""
        return self.training.cache_features and frozen_features.frozen_whole(self.model)

    @property
    def takes_steps(self) -> bool:
        """Whether a site takes an optimiser step in some round; a closed form takes none."""
        method, rounds = self.method, range(self.rounds.rounds)
        if self.training.local_epochs or "batches" in overridden(method, SiteHooks):
            return bool(rounds)
        return any(method.steps(phase) for round in rounds for phase in method.phases(round))

    def pinned(self) -> Experiment:
        """The same with the checksum of every weights that models start from. Raises InitialWeightsError."""
        models = tuple((site, _pinned(model)) for site, model in self.site_models)
        return replace(self, model=_pinned(self.model), site_models=models)

    def refuse_unpinned(self) -> None:
        """Raises InitialWeightsError for weights to start from without a checksum: a job opens no file to find it."""
        for model in (self.model, *(model for _, model in self.site_models)):
            if isinstance(model, ModelConfig) and not model.is_pinned():
                raise InitialWeightsError(
                    "model.adapters lacks the checksum of the frozen towers; export the job where they can be read"
                )
            init = parse(model.init)
            if init.name and not init.digest:
                raise InitialWeightsError(
                    f"model.init {init.shown} lacks the checksum of the weights; export the job again, "
                    "with NAME@SHA256",
                    public="model.init lacks the checksum of the weights; export the job again, with NAME@SHA256",
                )

    def _following(self, name: str) -> Any:
        """The settings ``name``, with the values that follow others (metadata ``follows``) filled in from those.

        So a size that two groups of settings share is given once. Raises ValueError where it was given twice and
        differs.
        """
        group = getattr(self, name)
        settings = fields(group) if is_dataclass(group) else ()
        followed = {}
        for setting in settings:
            path = setting.metadata.get("follows")
            if path is None:
                continue
            own, wanted = getattr(group, setting.name), attrgetter(path)(self)
            require(
                own in (wanted, setting.default),
                f"{name}.{setting.name} is {own}, but it follows {path}, which is {wanted}; set only that",
            )
            followed[setting.name] = wanted
        return replace(group, **followed) if followed else group


def _pinned(model: ModelConfig) -> ModelConfig:
    """The model with the checksum of its weights; a plugin's own kind of model has but those of ``init``."""
    return model.pinned() if isinstance(model, ModelConfig) else replace(model, init=pinned(model.init))
