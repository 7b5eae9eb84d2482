"""BYOL (Grill et al., 2020, https://arxiv.org/abs/2006.07733): one view predicts a target network's vector of another.

It stands beside InfoNCE of images and reports. Differs: the decay of the target network is constant, as in FedU and
FedEMA, and not a cosine schedule; there is no dropout in the target network (spec Z1).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

from fedvlp.core.client import Trainee
from fedvlp.core.seeds import seeded
from fedvlp.core.types import Batch
from studies.rivals.views import OnTwoViews, TwoViews, mlp


def regression(predicted: Tensor, target: Tensor) -> Tensor:
    """|q - z|^2 = 2 - 2 cos(q, z) of unit vectors (eq. 2), mean over the rows of ``predicted`` and ``target`` [B, d].

    Computed in at least float32, also under autocast.
    """
    with torch.autocast(predicted.device.type, enabled=False):
        dtype = torch.promote_types(predicted.dtype, torch.float32)
        return (2 - 2 * F.cosine_similarity(predicted.to(dtype), target.to(dtype), dim=1)).mean()


class Target(nn.Module):
    """The target network: tower, alignment module and projector, [..., C, H, W] -> [..., d], without gradients.

    Its weights are buffers, so that no optimiser, decay or pull reaches them, and they are saved, sent and averaged as
    all else of an objective.
    """

    def __init__(self, *modules: nn.Module) -> None:
        """``modules``: those that it begins as a copy of: an image tower, its alignment module and a projector."""
        super().__init__()
        self.encoder, self.alignment, self.projector = (untrained(copy.deepcopy(module)) for module in modules)

    @torch.no_grad()
    def forward(self, views: Tensor) -> Tensor:
        """Vectors [B, V, d] of ``views`` [B, V, C, H, W]."""
        tokens = self.alignment(self.encoder(views.flatten(0, 1)))  # [B V, M, W]
        vectors: Tensor = self.projector(tokens[:, 0])
        return vectors.unflatten(0, views.shape[:2])

    @torch.no_grad()
    def follow(self, modules: tuple[nn.Module, ...], decay: float) -> None:
        """xi <- decay xi + (1 - decay) theta (eq. 1) for the weights theta of ``modules``; integers are copied."""
        for mine, online in zip((self.encoder, self.alignment, self.projector), modules, strict=True):
            new = online.state_dict()
            for name, tensor in mine.state_dict().items():
                if tensor.is_floating_point():
                    tensor.lerp_(new[name], 1 - decay)
                else:
                    tensor.copy_(new[name])

    def train(self, mode: bool = True) -> Target:
        """Only batch normalisation has a training mode here: it is the model's own function, without its dropout."""
        super().train(False)
        for module in self.modules():
            if isinstance(module, BatchNorm):
                module.training = mode
        return self


def untrained(module: nn.Module) -> nn.Module:
    """``module`` with its parameters as buffers, by the same names."""
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            delattr(owner, name)
            owner.register_buffer(name, parameter.detach().clone())
    return module


class BYOL(OnTwoViews):
    """Terms ``contrastive`` (InfoNCE of pairs, where there are reports) and ``byol`` (of views, 0 to 8).

    ``byol`` = |q(z_1) - z'_2|^2 + |q(z_2) - z'_1|^2 of unit vectors: z of the model and the projector, q the predictor,
    z' of the target network. The loop lets the target network ``follow`` the model after every step.
    """

    def __init__(self, config: BYOLConfig, model: Any) -> None:
        super().__init__(config, model.image_encoder.width)
        if Trainee.of(model).frozen_prefixes:
            raise ValueError(
                "BYOL: its target network follows a tower's own weights, which adapters leave as they are; leave "
                "model.adapters out, or choose another objective"
            )
        self.decay = config.decay
        self.predictor = mlp(config.dim, config.hidden, config.dim)
        self.target = Target(*self._online(model))

    def compare(self, views: Tensor, batch: Batch) -> dict[str, Tensor]:
        """The term ``byol``; ``batch`` has the ``views`` [B, 2, C, H, W] themselves, for the target network."""
        # Each view predicts the target network's vector of the other.
        predicted = self.predictor(self.project(views))  # [B, 2, d]
        target = self.target(batch["views"].to(views.device))  # [B, 2, d]
        return {"byol": regression(predicted[:, 0], target[:, 1]) + regression(predicted[:, 1], target[:, 0])}

    def follow(self, model: Any) -> None:
        """Brings the target network nearer to ``model`` and the projector."""
        self.target.follow(self._online(model), self.decay)

    def restart(self, model: Any) -> None:
        """Makes the target network a copy of ``model`` and the projector."""
        self.target.follow(self._online(model), 0.0)

    def _online(self, model: Any) -> tuple[nn.Module, ...]:
        return model.image_encoder, model.image_alignment, self.projector


@dataclass(frozen=True)
class BYOLConfig(TwoViews):
    """Configuration of ``BYOL``. Raises ValueError for a value outside of its range."""

    decay: float = 0.99  # tau of the target network, 0 to 1; 0 is the model itself, 1 stays as it began

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.decay <= 1:
            raise ValueError(f"BYOL: decay {self.decay}, expected 0 to 1")

    def build(self, model: Any, seed: int = 0) -> nn.Module:
        """The loss for outputs of ``model``, a DualEncoder; the same weights for the same seed."""
        return seeded(seed, 7, lambda: BYOL(self, model))
