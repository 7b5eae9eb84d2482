"""Sites with random films and token ids on a small dual encoder: what the self-supervised objectives need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedvlp.core.method import Method
from fedvlp.core.types import Batch
from fedvlp.federation.loop import Rounds
from fedvlp.models.dual_encoder import DualEncoder, ModelConfig
from studies.rivals import BYOLConfig, MAEConfig, NTXentConfig
from support.toy import ADAMW, Pairs, World

SIDE = 16
MODEL = ModelConfig(
    embedding_dim=8, image_size=SIDE, max_tokens=8, vocabulary=64, head_hidden=16, head_norm="layer", text_layers=1
)  # fmt: skip
BYOL, NT_XENT = BYOLConfig(hidden=16, dim=8), NTXentConfig(hidden=16, dim=8, temperature=0.1)
MAE = MAEConfig(width=16, blocks=1, heads=2)


class Films(Pairs):
    """Random films [n, 1, 16, 16] in -1..1 and token ids [n, 8]."""

    def __init__(self, seed: int, count: int, tick: Callable[[], None] = lambda: None) -> None:
        generator = torch.Generator().manual_seed(seed)
        image = 2 * torch.rand(count, 1, SIDE, SIDE, generator=generator) - 1
        super().__init__(image, torch.randint(2, 64, (count, 8), generator=generator), tick)


def sites(tick: Callable[[], None] = lambda: None) -> dict[str, Films]:
    return {"a": Films(0, 8, tick), "b": Films(1, 6, tick)}


def model() -> DualEncoder:
    return MODEL.build(0)


def world(method: Method, objective: Any, **settings: Any) -> World:
    """Two rounds of two sites, unless ``settings`` of ``World`` say otherwise."""
    chosen = {"data": sites(), "training": ADAMW, "rounds": Rounds(rounds=2, evaluate_every=0), **settings}
    return World(method, model=model, objective=lambda: objective.build(model(), 0), **chosen)


def drawn(objective: Any, films: Tensor, seed: int = 0) -> Batch:
    """A batch of ``films`` with what ``objective`` draws for it."""
    batch: Batch = objective.draw({"image": films}, torch.Generator().manual_seed(seed))
    return batch
