"""PromptFL (Guo et al., 2023, https://arxiv.org/abs/2208.11625): a learned context before class names, averaged alone.

Differs: records may have several findings, each with words of its own for its absence (see ``ClassText``); the paper's
have exactly one class. Labels that are uncertain (-1) train nothing; a finding that is not mentioned is not there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedvlp.core.client import EXTRA, Client, NoLossError
from fedvlp.core.method import Method
from fedvlp.core.seeds import seeded
from fedvlp.core.site_error import SiteError
from fedvlp.core.types import SPECIAL, TEXT_TOKENS, Batch, Broadcast
from fedvlp.core.validate import require

TEXTS = ("text", "text_mask", TEXT_TOKENS)


@dataclass(frozen=True)
class FrozenPair(Method):
    """Two towers with their heads as they were received; a module beside them (``Experiment.extra``) learns classes.

    x is the unit vector of an image as that module changes it, w_c the vector of class c that it gives. Per record
    with labels the loss is the cross-entropy of softmax_c(x . w_c / ``temperature``), or, where a record may have
    several findings, of sigmoid(x . w_c / ``temperature``) for every finding c. The module alone is averaged.
    Without a module it is FedAvg.
    """

    temperature: float = 0.05  # of the cosines, above 0; CLIP's own pair: 0.01
    frozen: bool = True  # whether the pair stays as it is; false: its objective trains it too, as by FedAvg

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.temperature > 0, f"temperature is {self.temperature}; it must be above 0")

    def refuse_settings(self, experiment: Any) -> None:
        name = type(self).__name__
        require(
            experiment.extra is not None or not self.frozen,
            f"{name} trains Experiment.extra beside a frozen pair, and there is none: begin with the preset",
        )
        for setting in ("micro_batch", "compile"):
            require(
                not getattr(experiment.training, setting),
                f"training.{setting}: {name} puts vectors in the place of words, which a forward pass that is made "
                "again, or compiled, would not see; set it to 0",
            )

    def trains(self, name: str, phase: str) -> bool:
        return not self.frozen or name.startswith(EXTRA)

    def losses(self, client: Client, batch: Batch, message: Broadcast) -> dict[str, Tensor]:
        terms = {} if self.frozen else super().losses(client, batch, message)
        if client.extra is None:
            return terms
        if "labels" not in batch or not {"image", "image_tokens"} & batch.keys():
            raise NoLossError(
                f"{client.name}: {type(self).__name__} learns from images with labels, and this site has none",
                public="this site's records lack images or labels, from which this method learns",
            )
        vectors = client.model({name: t for name, t in batch.items() if name not in TEXTS}).image  # [B, d]
        return {**terms, **self.class_losses(client, vectors, batch["labels"])}

    def class_losses(self, client: Client, vectors: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Terms of a batch, from unit vectors [B, d] of its images and labels [B, C]."""
        extra: ClassText = client.extra
        logits = self.logits(client, extra.images(vectors))
        return {"classes": cross_entropy(logits, *targets(labels, extra.config), extra.config.exclusive)}

    def logits(self, client: Client, images: Tensor) -> Tensor:
        """x . w_c / ``temperature`` [B, C] of unit vectors [B, d]."""
        extra: ClassText = client.extra
        return images @ extra.directions(client.model, extra.config.classes).T / self.temperature


@dataclass(frozen=True)
class PromptLearning(FrozenPair):
    """w_c: what the frozen text tower makes of v_1 .. v_M before the name of class c; v [M, E] are learned.

    The vectors stand where M words would, after the token that begins every text, so that they go through the tower as
    word embeddings do.
    """


@dataclass(frozen=True)
class ClassTextConfig:
    """What classes are called. Raises ValueError for fewer than 2 classes, or 1 that is exclusive."""

    classes: tuple[str, ...] = ()  # names of the classes in the order of the data's label columns
    exclusive: bool = False  # whether a record has exactly one class (PromptFL); false: any of them, each or none
    absent: str = "no"  # word before the name of a finding that is not there

    def __post_init__(self) -> None:
        object.__setattr__(self, "classes", tuple(self.classes))  # JSON knows lists only
        least = 2 if self.exclusive else 1
        require(len(self.classes) >= least, f"classes: {len(self.classes)}, expected at least {least}")


@dataclass(frozen=True)
class ContextConfig(ClassTextConfig):
    """Configuration of ``Context``."""

    context: int = 16  # M, vectors before the name of a class, at least 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.context >= 1, f"context is {self.context}; at least 1")

    def build(self, model: Any, seed: int) -> Context:
        """A context for the text tower of ``model``, a ModelConfig; the same vectors for the same seed."""
        words = words_of(model.outline().text_encoder)
        return seeded(seed, 6, lambda: Context(self, words.weight.shape[1]))


class ClassText(nn.Module):
    """Directions w_c [C, d] of classes c; with several findings that of "c" minus that of "no c"."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def images(self, vectors: Tensor) -> Tensor:
        """Unit vectors [B, d] of images as this module changes them."""
        return vectors

    def directions(self, model: Any, classes: Sequence[str]) -> Tensor:
        """w_c [C, d] of these classes, or of any others."""
        names = [name.lower() for name in classes]
        if self.config.exclusive:
            return self.texts(model, names)
        both = self.texts(model, [*names, *(f"{self.config.absent} {name}" for name in names)])
        there, absent = both.chunk(2)
        return there - absent

    def texts(self, model: Any, sentences: Sequence[str]) -> Tensor:
        """Unit vectors [N, d] of sentences."""
        ids, mask = tokens(model, sentences)
        return model({"text": ids, "text_mask": mask}).text


class Context(ClassText):
    """Learned vectors [M, E] before every sentence, initially small (standard deviation 0.02, as CoOp's)."""

    def __init__(self, config: ContextConfig, width: int) -> None:
        super().__init__(config)
        self.vectors = nn.Parameter(0.02 * torch.randn(config.context, width))

    def texts(self, model: Any, sentences: Sequence[str]) -> Tensor:
        ids, mask = tokens(model, sentences)
        first = int((model.tokenizer.pieces.to(ids.device)[ids[0]] != SPECIAL).int().argmax())  # of the first word
        most = model.tokenizer.max_tokens - len(self.vectors)
        if ids.shape[1] > most:
            raise SiteError(
                f"a class has {ids.shape[1]} tokens, and beside {len(self.vectors)} learned ones the text tower reads "
                f"{most}; lower extra.context, or raise model.max_tokens"
            )
        held = ids[:, first : first + 1].expand(-1, len(self.vectors))  # ids of words, whose vectors are replaced
        ids = torch.cat([ids[:, :first], held, ids[:, first:]], dim=1)  # [N, M + T]
        mask = torch.cat([torch.ones_like(held, dtype=torch.bool), mask], dim=1)
        with in_place_of_words(words_of(model.text_encoder), slice(first, first + len(self.vectors)), self.vectors):
            return model({"text": ids, "text_mask": mask}).text


def tokens(model: Any, sentences: Sequence[str]) -> tuple[Tensor, Tensor]:
    """ids and mask [N, T] of sentences on the model's device, T that of the longest."""
    ids, mask = model.tokenizer(list(sentences))
    longest = int((mask * torch.arange(1, mask.shape[1] + 1)).max())
    device = next(model.parameters()).device
    return ids[:, :longest].to(device), mask[:, :longest].to(device)


def words_of(tower: Any) -> nn.Embedding:
    """The layer of a text tower that gives each id a vector [E]. Raises SiteError for a tower without one."""
    layer = tower.words_layer()
    if not isinstance(layer, nn.Embedding):
        raise SiteError(
            f"the text tower {tower.architecture().get('model_type', type(tower).__name__)} has no vector for each "
            "word in the place of which a learned one could stand; take another, such as BERT, CLIP or SigLIP, or "
            "clip-adapter, which learns beside the image tower"
        )
    return layer


@contextmanager
def in_place_of_words(words: nn.Module, where: slice, vectors: Tensor) -> Iterator[None]:
    """The layer ``words`` gives ``vectors`` [M, E] at the positions ``where`` of every text."""

    def put(layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        learned = vectors.to(output.dtype).expand(len(output), -1, -1)
        return torch.cat([output[:, : where.start], learned, output[:, where.stop :]], dim=1)

    hook = words.register_forward_hook(put)
    try:
        yield
    finally:
        hook.remove()


def targets(labels: Tensor, config: Any) -> tuple[Tensor, Tensor]:
    """What log_probabilities should be 1 of, and which of them are known.

    Exclusive classes: [B, C] and [B], known where a record has exactly one class; findings: [B, C, 2], there and not,
    and [B, C]. Raises SiteError where the data's labels are not the classes.
    """
    if labels.shape[1] != len(config.classes):
        raise SiteError(
            f"the data have {labels.shape[1]} label columns, extra.classes names {len(config.classes)}; name each "
            "column, in the order of the data"
        )
    there = (labels == 1).float()
    if config.exclusive:
        return there, there.sum(dim=1) == 1
    return torch.stack([there, 1 - there], dim=-1), labels != -1


def log_probabilities(logits: Tensor, exclusive: bool) -> Tensor:
    """Of exclusive classes [B, C], softmax over them; of findings [B, C, 2], each there or not."""
    logits = logits.float()
    if exclusive:
        return F.log_softmax(logits, dim=1)
    return torch.stack([F.logsigmoid(logits), F.logsigmoid(-logits)], dim=-1)


def cross_entropy(logits: Tensor, target: Tensor, known: Tensor, exclusive: bool) -> Tensor:
    """Mean over what is known, in nats; 0 where nothing is."""
    terms = -(target * log_probabilities(logits, exclusive)).sum(dim=-1)
    return (terms * known).sum() / known.sum().clamp(min=1)
