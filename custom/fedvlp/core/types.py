"""The contract's data: what travels between the server and the sites, and what a training step sees."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from fedvlp.core import metric_keys
from fedvlp.core.site_error import UNTOLD
from fedvlp.core.site_error import FailureKind as FailureKind

if TYPE_CHECKING:  # a process that only passes messages on does without torch
    from torch import Tensor

State = dict[str, "Tensor"]
"""Named tensors. Model parameters are named ``<modality>_<group>.<path>``, e.g. ``image_encoder.norm.weight``."""


class LazyState(Mapping[str, "Tensor"]):
    """A state too large to be held: ``make`` makes a tensor each time its name is read.

    Whether a name is there is answered without making its tensor, which Mapping's own ``in`` would do.
    """

    def __init__(
        self,
        names: Iterable[str],
        make: Callable[[str], Tensor] | None = None,
        size: Callable[[str], int] | None = None,
    ) -> None:
        """``size`` says the bytes of a tensor without making it, where that is known.

        A class that makes tensors itself overrides ``__getitem__``. Its bound method in the place of ``make`` would be
        a cycle of references: what it holds would stay until Python looks for cycles.
        """
        self._names = dict.fromkeys(names)
        self._make, self._size = make, size

    def __getitem__(self, name: str) -> Tensor:
        assert self._make is not None
        return self._make(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def size(self, name: str) -> int:
        """Bytes of a tensor."""
        return self._size(name) if self._size else size_of(self[name])


def size_of(value: object) -> int:
    """Bytes of a tensor; of anything else 0."""
    from torch import Tensor  # here: a visit of the simulator reads this module, and needs no torch

    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0


def total_size(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of all tensors of a state; what is none counts nothing."""
    if isinstance(tensors, LazyState):
        return sum(map(tensors.size, tensors))
    return sum(map(size_of, tensors.values()))


Batch = dict[str, "Tensor"]
"""One step's input; a missing key is a missing modality.

``image`` [B, C, H, W] float32, normalised, C = 1 for grey and 3 in colour; ``text`` [B, T] int64 token ids;
``text_mask`` [B, T] bool, True at real tokens; ``labels`` [B, L] float32 in {1, 0, -1 uncertain, nan not mentioned};
``row`` [B] int64, row of the split. Where a sentence stands for the report, ``text_labels`` [B, L] are the sentence's
own. What an objective draws (``Client.drawn``): ``views`` [B, V, C, H, W] float32, changed copies of the image;
``masked`` [B, P] bool, True at the patches that a view hides.
"""

IMAGE_TOKENS, TEXT_TOKENS = "image_tokens", "text_tokens"
"""Keys of a batch: cached token features from the frozen encoders, float32 [B, M, W] and [B, T, W]; no ``image`` then.

training/frozen_features.py puts them there."""

DRAWN_REPORT = "report"
"""Key of a batch whose records have several reports: which of all of them was drawn for each, int64 [B]."""

SPECIAL, WORD, CONTINUATION = 0, 1, 2
"""What a token id stands for: [CLS], [SEP] or padding; the first piece of a word; another piece of the same word."""


WIRE_VERSION = 1
"""Of the form in which Broadcast and Update cross between machines; a server writes this one.

It rises with every change that a peer of the version before would misread, and with no other: releases of one wire
version run side by side."""

WIRE_VERSIONS = range(1, WIRE_VERSION + 1)
"""What a site of this build reads, and answers in. Sites are updated before their server, which writes the newest."""


@dataclass(frozen=True)
class Broadcast:
    """Server to one site: the state that this phase starts from, and how the site is to train on it."""

    round: int
    phase: str
    state: State
    aux: State = field(default_factory=dict)  # the method's other tensors
    evaluate: int = 0  # held-out splits on which the received model is measured: 0 none, 1 val, 2 val and test
    lr_scale: float = 1.0  # factor of the learning rate in this phase, >= 0
    loss_scale: float = 1.0  # factor of the loss in this phase, >= 0
    public_id: int | None = None  # id of the server's public set, from 0 to 2^53; None where the run has none
    scalars: dict[str, float] = field(default_factory=dict)  # the method's; a hook adds to them, replaces none


@dataclass(frozen=True)
class Update:
    """One site's reply to the server: what it computed, and what the server must know of it."""

    site: str
    round: int
    phase: str
    num_samples: int  # of its training split, >= 0
    state: State = field(default_factory=dict)
    aux: State = field(default_factory=dict)
    scalars: dict[str, float] = field(default_factory=dict)  # what Method.probes declares; nan: unknown at this site
    metrics: dict[str, float] = field(default_factory=dict)  # finite; for people, never read by a method
    modalities: tuple[str, ...] = ()  # that its training records have
    public_id: int = 0  # of the public records that it holds; 0 = none

    @property
    def measured(self) -> dict[str, float]:
        """Every figure for the records of the run: the scalars that are known, as ``probe/<name>``, and the metrics."""
        known = {metric_keys.probe(name): value for name, value in self.scalars.items() if not math.isnan(value)}
        return {**known, **self.metrics}


TENSORS = ("state", "aux")
"""The fields of a Broadcast and of an Update that hold tensors."""


def header(message: Broadcast | Update) -> dict[str, Any]:
    """All other fields of a message: plain numbers, words, and dictionaries and tuples of them."""
    return {f.name: getattr(message, f.name) for f in fields(message) if f.name not in TENSORS}


@dataclass(frozen=True)
class Failure:
    """A site's reply that is no update. The texts are for people: who reads them knows the site."""

    kind: FailureKind
    text: str  # for the log of the machine where it was raised
    public: str = field(default=UNTOLD, compare=False)  # what may leave the site (core/site_error.py)


Reply = Update | Failure
"""A site's answer: its update, or why there is none."""


@dataclass(frozen=True)
class Expected:
    """The tensors that a site's update must carry, no more and no fewer, as examples of shape and dtype."""

    state: State = field(default_factory=dict)
    aux: State = field(default_factory=dict)


@dataclass(frozen=True)
class VLOutput:
    """What a dual encoder returns. ``image``/``text`` are unit vectors [B, d]; None where the modality is absent.

    ``image_tokens`` [B, M, W] and ``text_tokens`` [B, T, W] are the alignment modules' outputs, position 0 the summary
    token; ``text_mask`` [B, T] is True at real tokens. Local objectives (GLoRIA, MGCA) read them.
    ``image_attention`` [B, M-1] and ``text_attention`` [B, T-1] say how much the summary token attends to each other
    token in the block that gave the tokens: mean over its heads, no gradient, None where not asked for or not known.
    ``logits`` [B, L] are a classifier's, one per finding.
    ``views`` [B, V, M, W] are the image alignment module's outputs for the ``views`` of a batch, position 0 the summary
    token; the rest may be left out (M = 1) for an objective that does not need "patches".
    """

    image: Tensor | None = None
    text: Tensor | None = None
    image_tokens: Tensor | None = None
    text_tokens: Tensor | None = None
    text_mask: Tensor | None = None
    logits: Tensor | None = None
    image_attention: Tensor | None = None
    text_attention: Tensor | None = None
    views: Tensor | None = None


GROUPS = ("encoder", "alignment", "head")


def group(name: str) -> str:
    """Group of a tensor named ``<modality>_<group>.<path>``: encoder, alignment or head; else the whole prefix.

    Adapters of an encoder are of its group, private ones too.
    """
    prefix = name.partition(".")[0]
    seen = prefix.rpartition("_")[2]
    return "encoder" if seen in ("adapter", "private") else seen


PRIVATE = "objective.extra.private."
"""Tensors of what a method trains beside the model and that never leave their site."""


def is_private(name: str) -> bool:
    """Whether a tensor never leaves its site: of an adapter (models/adapters.py), or a method's own."""
    return name.partition(".")[0].endswith("_private") or name.startswith(PRIVATE)


MODALITIES = ("image", "text")


def modality(name: str) -> str:
    """Whose tower a tensor belongs to, ``image`` or ``text``; "" for what both share, e.g. a classifier."""
    prefix = name.partition("_")[0]
    return prefix if prefix in MODALITIES else ""


def is_statistic(name: str) -> bool:
    """Whether a tensor is a running statistic of batch normalisation, and no weight."""
    return name.rpartition(".")[2] in ("running_mean", "running_var", "num_batches_tracked")


CHANGE = "change/"
"""Prefix, in an update, of a change to what the server keeps beside the model for the tensor that follows it.

It is measured from zero, and shortened where changes of the model are (core/aggregation.py).
"""

GRADIENT = "gradient/"
"""Prefix, in an update, of a gradient of what the server trains by itself. Measured and shortened like ``CHANGE``."""

KEPT = "kept"
"""Scalar for an aggregator: the factor by which such changes of an update were shortened."""


def subject(name: str) -> str:
    """The tensor of the model that a tensor of an update is about: ``change/<name>`` of ``<name>``, any of itself."""
    return name.rpartition("/")[2]


def without_prefix(tensors: Mapping[str, Tensor], prefix: str) -> State:
    """The tensors whose names begin with ``prefix``, without it."""
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def with_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> State:
    """The tensors under names that begin with ``prefix``."""
    return {prefix + name: tensor for name, tensor in tensors.items()}


EVALUATE = "evaluate"
"""The phase at the end of a run that only measures."""


def curve(tag: str, phase: str) -> str:
    """The name of a figure's curve: "<tag>/<phase>" where every phase of a round has its own value, else the tag."""
    return f"{tag}/{phase}" if metric_keys.is_of_phase(tag) and phase != EVALUATE else tag
