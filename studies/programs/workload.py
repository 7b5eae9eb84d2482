"""The workload of ``orchestration.py``: what a site does in a round, for whatever asks it to."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from timed import note

LR = 5e-4
BATCH = 32


@dataclass(frozen=True)
class Size:
    """How much of it."""

    steps: int = 20
    sites: int = 5
    rounds: int = 5
    studies: int = 1000
    vocabulary: int = 30_522  # with the tiny towers: 4 889 856 parameters


@cache
def built(size: Size) -> tuple[Any, dict[str, Any]]:
    """The model, and the data of each site, sorted by name."""
    from fedvlp.data.loader import SiteData
    from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
    from fedvlp.models.dual_encoder import ModelConfig

    cohort = SyntheticCohort(sites=size.sites, size=size.studies, image_size=72, beta=1000.0).build()
    model = ModelConfig(vocabulary=size.vocabulary, head_norm="layer", head_hidden=256).build(0)
    return model, {
        site: SiteData(cohort, {"train": cohort.rows("train", site)}, model.tokenizer, 64)
        for site in sorted(set(cohort.sites or ()))
    }


def visit(size: Size, site: str, number: int, state: Mapping[str, Any]) -> dict[str, Any]:
    """The model's tensors after the steps of ``site`` in round ``number`` on ``state``; the model's own, not copies."""
    import torch

    from fedvlp.core.seeds import seed
    from fedvlp.objectives.convirt import ConVIRT

    model, data = built(size)
    loss_of = ConVIRT()
    model.load_state_dict(state)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.05, fused=True)
    order = torch.Generator().manual_seed(seed(0, site, number, 0, "batches"))
    began = 0.0
    for batch in data[site].train_batches(size.steps, BATCH, order):
        began = began or time.monotonic()
        loss = loss_of(model(batch), batch)["contrastive"]
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    note(site, began, time.monotonic())
    tensors: dict[str, Any] = model.state_dict()
    return tensors


def save(state: Mapping[str, Any], folder: Path) -> None:
    """Writes the final weights."""
    from safetensors.torch import save_file

    save_file(dict(state), folder / "model.safetensors")
