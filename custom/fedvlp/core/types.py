"""The contract's data: what travels between the server and the sites, and what a training step sees."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor

State = dict[str, Tensor]
"""Named tensors. Model parameters are named ``<modality>_<group>.<path>``, e.g. ``image_encoder.norm.weight``."""


class LazyState(Mapping[str, Tensor]):
    """A state too large to be held: ``__getitem__`` makes a tensor anew whenever it is asked for.

    Asking for a name makes none, as Mapping's own ``in`` would.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = dict.fromkeys(names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


Batch = dict[str, Tensor]
"""One step's input; a missing key is a missing modality.

``image`` [B, 1, H, W] float32, normalised; ``text`` [B, T] int64 token ids; ``text_mask`` [B, T] bool, True at real
tokens; ``labels`` [B, L] float32 in {1, 0, -1 uncertain, nan not mentioned}; ``row`` [B] int64, row of the split.
"""

SPECIAL, WORD, CONTINUATION = 0, 1, 2
"""What a token id stands for: [CLS], [SEP] or padding; the first piece of a word; another piece of the same word."""


@dataclass(frozen=True)
class Broadcast:
    """Server to one site: the global state this phase starts from. ``scalars`` may differ per site."""

    round: int
    phase: str
    state: State
    aux: State = field(default_factory=dict)
    scalars: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Update:
    """One site's reply to the server. ``num_samples`` is the size of its training split.

    ``modalities`` are those of its records; ``public_id`` stands for the public records that it holds, 0 = none.
    """

    site: str
    round: int
    phase: str
    num_samples: int
    state: State = field(default_factory=dict)
    aux: State = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    modalities: tuple[str, ...] = ()
    public_id: int = 0


Reply = Update | Exception
"""A site's answer: its update, or why there is none."""


@dataclass(frozen=True)
class VLOutput:
    """What a dual encoder returns. ``image``/``text`` are unit vectors [B, d]; None where the modality is absent.

    ``image_tokens`` [B, M, W] and ``text_tokens`` [B, T, W] are the alignment modules' outputs, position 0 the summary
    token; ``text_mask`` [B, T] is True at real tokens. Local objectives (GLoRIA, MGCA) read them.
    ``image_attention`` [B, M-1] and ``text_attention`` [B, T-1] say how much the summary token attends to each other
    token in the block that gave the tokens: mean over its heads, no gradient, None where not asked for or not known.
    ``logits`` [B, L] are a classifier's, one per finding.
    """

    image: Tensor | None = None
    text: Tensor | None = None
    image_tokens: Tensor | None = None
    text_tokens: Tensor | None = None
    text_mask: Tensor | None = None
    logits: Tensor | None = None
    image_attention: Tensor | None = None
    text_attention: Tensor | None = None


GROUPS = ("encoder", "alignment", "head")


def group(name: str) -> str:
    """Group of a tensor named ``<modality>_<group>.<path>``: encoder, alignment or head; else the whole prefix."""
    prefix = name.partition(".")[0]
    return prefix.rpartition("_")[2]


MODALITIES = ("image", "text")


def modality(name: str) -> str:
    """Whose tower a tensor belongs to, ``image`` or ``text``; "" for what both share, e.g. a classifier."""
    prefix = name.partition("_")[0]
    return prefix if prefix in MODALITIES else ""


def is_statistic(name: str) -> bool:
    """Whether a tensor is a running statistic of batch normalisation, and no weight."""
    return name.rpartition(".")[2] in ("running_mean", "running_var", "num_batches_tracked")


EVALUATE = "evaluate"
"""A phase that only measures; and a scalar: 1 measures the received model on the val split, 2 on test as well."""

PUBLIC = "public"
"""A scalar: the ``public_id`` of the server's public set, where the method uses one."""
