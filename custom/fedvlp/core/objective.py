"""What a loss module may do beside computing its terms: every hook has a default that does nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Generator, Tensor, nn

from fedvlp.core.types import MODALITIES, Batch, VLOutput

HOOKS = ("needs", "takes", "contrasts", "draw", "entropy", "after_step", "follow", "restart", "idle", "targets")


class ObjectiveModule(nn.Module):
    """Base class of losses: ``forward(output, batch)`` is a dictionary of named terms."""

    needs: tuple[str, ...] = ()  # of image, text, labels, patches, words, sentences, attention

    contrasts: ClassVar[bool] = False  # whether contrast(first, second) compares vectors of two views, [B, d] each

    @staticmethod
    def of(module: nn.Module) -> ObjectiveModule:
        """The hooks of a loss; those of a plain module do nothing. Raises TypeError for a plain one that has some."""
        if isinstance(module, ObjectiveModule):
            return module
        if own := [name for name in HOOKS if hasattr(module, name)]:
            raise TypeError(
                f"{type(module).__name__} has {', '.join(own)}, which are read of a "
                "fedvlp.core.objective.ObjectiveModule alone; derive it from that class"
            )
        return ObjectiveModule()

    def takes(self, modalities: Sequence[str]) -> bool:
        """Say whether there is a loss for records that have these of image and text, and nothing else."""
        return set(self.needs) & {*MODALITIES} <= {*modalities}

    @property
    def draws(self) -> bool:
        """Whether it draws anything for a batch."""
        return type(self).draw is not ObjectiveModule.draw

    def draw(self, batch: Batch, generator: Generator) -> Batch:
        """The batch with what is drawn for it from ``generator`` alone: views of the images, a mask."""
        return batch

    def entropy(self, output: VLOutput, batch: Batch) -> dict[str, Tensor]:
        """The least value of each term with soft targets, which no model can lower (spec Z4)."""
        return {}

    def after_step(self) -> None:
        """An optimiser step is done: for a loss that counts steps."""

    def follow(self, model: Any) -> None:
        """After every step: brings a target network nearer to ``model``."""

    def restart(self, model: Any) -> None:
        """Makes the target network a copy of ``model``."""

    def idle(self, modalities: Sequence[str]) -> frozenset[str]:
        """Names of its own tensors that records of these ``modalities`` do not train."""
        return frozenset()

    def targets(self, labels: Tensor) -> Tensor:
        """The targets [B, L] in {1, 0, nan} of a batch's labels [B, L]."""
        return labels
