"""An experiment: everything that determines a run's result."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn

from fedvlp.core.method import Method
from fedvlp.core.validate import require, require_name
from fedvlp.data.cohort import Cohort
from fedvlp.data.synthetic.cohort import SyntheticCohort
from fedvlp.federation.codec import Wire
from fedvlp.federation.loop import Rounds
from fedvlp.models.dual_encoder import ModelConfig
from fedvlp.objectives import OBJECTIVES, ConVIRTConfig
from fedvlp.run.config import from_config
from fedvlp.training.config import Training

POOLED = "pooled"


class Source(Protocol):
    """A configured data set."""

    def build(self) -> Cohort: ...


class Objective(Protocol):
    """A configured loss: (VLOutput, batch) -> named terms; ``model`` is the DualEncoder whose outputs it will see."""

    def build(self, model: Any = None, seed: int = 0) -> nn.Module: ...


class Extra(Protocol):
    """What a method trains beside model and objective, e.g. PMS-FM's selector, for a model of this configuration."""

    def build(self, model: ModelConfig, seed: int) -> nn.Module: ...


@dataclass(frozen=True)
class Partition:
    """How records without a site are dealt to sites in simulation (spec 12.1)."""

    sites: int = 5
    beta: float = 1.0  # Dirichlet concentration; smaller is more skewed
    label_code: str = "mention"  # mention (papers) | positive
    image_only: int = 0  # sites without reports; sites stand in the order paired, image-only, text-only
    text_only: int = 0  # sites without images
    public: float = 0.0  # share of the patients of every split whose records are the public set and at no site
    retrieve: bool = (
        False  # records without a report get one of the public set by their labels (data/report_imputation.py)
    )

    def __post_init__(self) -> None:
        for name in ("image_only", "text_only"):
            require(getattr(self, name) >= 0, f"partition.{name} is {getattr(self, name)}; it must not be negative")
        require(0 <= self.public < 1, f"partition.public is {self.public}; it must be in [0, 1)")


@dataclass(frozen=True)
class Experiment:
    """Everything that determines the result of a run."""

    name: str  # a-z, 0-9 and "-": runs lie in a folder of this name
    method: Method
    model: ModelConfig = field(default_factory=ModelConfig)
    objective: Objective = field(default_factory=ConVIRTConfig, metadata={"choices": OBJECTIVES})
    data: Source = field(default_factory=SyntheticCohort)
    partition: Partition = field(default_factory=Partition)
    training: Training = field(default_factory=Training)
    rounds: Rounds = field(default_factory=Rounds)
    site_models: tuple[tuple[str, ModelConfig], ...] = ()  # (site, its model) where it is not ``model``, the server's
    server_training: Training | None = None  # of the server's model on the public set; None = ``training``
    wire: Wire = field(default_factory=Wire)  # how models and updates travel
    extra: Extra | None = None  # ``objective.extra``, so its tensors are named "objective.extra.<path>"

    def __post_init__(self) -> None:
        require_name("the name of an experiment", self.name)
        # FLARE's component builder leaves what is inside of a list unbuilt
        object.__setattr__(self, "site_models", from_config(list(self.site_models)))
