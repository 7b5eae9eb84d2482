"""Estimates the memory that a site's training needs, from the shapes of its model: nothing of that size is made.

The model is built on torch's "meta" device, whose tensors have a shape and no values. A forward pass there tells what
autograd keeps of a record.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fedvlp.models.dual_encoder import ModelConfig
from fedvlp.run.experiment import Experiment

COPIES = 8
"""Of every weight: itself, as received, its gradient, AdamW's two moments, the method's anchor, the site's memory and
the update."""

PAIRWISE = 8
"""Numbers that a contrastive loss keeps of each pair of records of a batch."""

PROBED = 2
"""Records of the forward pass; batch normalisation needs two."""


def bytes_needed(experiment: Experiment, site: str, processes: int = 1) -> int:
    """Bytes that one of ``processes`` takes which train ``site`` together: weights, a batch's activations, images.

    A plugin's own kind of model counts as nothing: only its author knows its shapes.
    """
    config = dict(experiment.site_models).get(site, experiment.model)
    images = getattr(experiment.data, "size", 0) * getattr(experiment.data, "image_size", 0) ** 2  # made in memory
    if not isinstance(config, ModelConfig):
        return images
    training = experiment.training
    batch = -(-training.batch_size // processes)
    rows = min(batch, training.micro_batch or batch)
    model = config.outline()
    modules = [model, *_others(experiment, config, model)]
    weights = sum(_bytes(tensor) for module in modules for tensor in (*module.parameters(), *module.buffers()))
    width = 1.0 if training.precision == "float32" else 0.5
    activations = int(_kept_of_a_record(model) * rows * width)
    return COPIES * weights + activations + PAIRWISE * 4 * batch**2 + images


def _others(experiment: Experiment, config: ModelConfig, model: Any) -> list[nn.Module]:
    """The shapes of fedvlp's own objective and extra module."""
    own = [
        settings
        for settings in (experiment.objective, experiment.extra)
        if type(settings).__module__.startswith("fedvlp.")
    ]
    with torch.device("meta"):
        return [settings.build(model if settings is experiment.objective else config, 0) for settings in own]  # type: ignore[union-attr]


def _kept_of_a_record(model: Any) -> float:
    """Bytes that autograd keeps of one record between forward and backward pass, in float32."""
    config = model.config
    with torch.device("meta"):
        batch = {
            "image": torch.zeros(PROBED, 1, config.image_size, config.image_size),
            "text": torch.zeros(PROBED, config.max_tokens, dtype=torch.long),
            "text_mask": torch.ones(PROBED, config.max_tokens, dtype=torch.bool),
        }
    weights = {tensor.untyped_storage()._cdata for tensor in model.parameters()}
    stored: dict[int, Tensor] = {}  # by storage: several nodes of the graph may keep the same one

    def note(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in weights:
            stored[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model.train()(batch)
    return sum(tensor.untyped_storage().nbytes() for tensor in stored.values()) / PROBED


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
