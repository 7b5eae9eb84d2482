"""Low-rank adapters of frozen towers (LoRA, Hu et al., 2022, https://arxiv.org/abs/2106.09685, eq. 3).

A linear layer W of a tower becomes W x + (alpha / r) B A x: W stays as it is, A [r, in] and B [out, r] are trained. The
tensors of a frozen tower are no part of a model's State, so they neither travel nor are they averaged or saved: every
site reads them from the weights that the model starts from, whose checksum the experiment holds.

With private adapters every adapted layer has a second one, which stays at its site (``image_private.``,
``text_private.``; core/norm_statistics.py), so that the shared one learns what all sites have in common, as in
Med-DualLoRA.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NONE, LORA = "", "lora"
LAYERS = ("all", "attention")
"""Which linear layers of a tower are adapted: all, or those of its attention alone (as in the paper)."""

_ATTENTION = ("attn", "attention", "qkv", "out", "query", "key", "value", "q_proj", "k_proj", "v_proj", "out_proj")
_MLP = ("intermediate", "mlp", "expand", "contract", "fc1", "fc2", "ffn")


class Adapter(nn.Module):
    """x [..., in] -> (alpha / r) B A x, [..., out]. It starts at zero: A as a linear layer does, B at 0."""

    def __init__(self, inputs: int, outputs: int, rank: int, alpha: float) -> None:
        super().__init__()
        self.scale = alpha / rank
        self.down = nn.Parameter(torch.empty(rank, inputs))
        self.up = nn.Parameter(torch.zeros(outputs, rank))
        nn.init.kaiming_uniform_(self.down, a=5**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """What is added to the layer's output."""
        return self.scale * F.linear(F.linear(x, self.down), self.up)

    def change(self) -> Tensor:
        """What is added to the layer's weight, [out, in]."""
        return self.scale * self.up @ self.down


class AdaptedLinear(nn.Linear):
    """A linear layer with the weights of ``layer`` and adapters, which belong to another module."""

    def __init__(self, layer: nn.Linear, adapter: Adapter) -> None:
        super().__init__(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self._adapters: tuple[Adapter, ...] = (adapter,)  # no submodules, so the tower's tensors keep their names

    def add(self, adapter: Adapter) -> None:
        """One more adapter beside those that are there."""
        self._adapters = (*self._adapters, adapter)

    def forward(self, input: Tensor) -> Tensor:
        """W x + b + (alpha / r) B A x, with a term for each adapter."""
        output = super().forward(input)
        for adapter in self._adapters:
            output = output + adapter(input)
        return output

    def merged(self) -> nn.Linear:
        """The plain layer with the same function."""
        layer = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        weight = self.weight.detach()
        for adapter in self._adapters:
            weight = weight + adapter.change().detach()
        layer.weight, layer.bias = nn.Parameter(weight), self.bias
        return layer


def adapt(tower: nn.Module, rank: int, alpha: float, layers: str) -> nn.ModuleDict:
    """Puts adapters on the linear layers of ``tower``, in place, and returns them by the layers' names.

    Rank 0 gives none: the tower is frozen. Raises ValueError for a tower without such layers.
    """
    chosen = {
        name: module
        for name, module in tower.named_modules()
        if type(module) is nn.Linear and (layers == "all" or _of_attention(name))
    }
    if not chosen and rank:
        raise ValueError(
            f"ModelConfig.adapters: this tower has no linear layers ({layers}); choose all, or another tower"
        )
    adapters = nn.ModuleDict()
    for name, layer in chosen.items() if rank else ():
        adapter = Adapter(layer.in_features, layer.out_features, rank, alpha)
        adapters[name.replace(".", "/")] = adapter
        _put(tower, name, AdaptedLinear(layer, adapter))
    return adapters


def adapt_privately(tower: nn.Module, rank: int, alpha: float) -> nn.ModuleDict:
    """Puts a second adapter on every adapted layer of ``tower``, in place, and returns these by the layers' names."""
    adapters = nn.ModuleDict()
    for name, layer in tower.named_modules():
        if isinstance(layer, AdaptedLinear):
            adapter = Adapter(layer.in_features, layer.out_features, rank, alpha)
            adapters[name.replace(".", "/")] = adapter
            layer.add(adapter)
    return adapters


@torch.no_grad()
def merge_private(model: nn.Module, tensors: Mapping[str, Tensor], scale: float) -> None:
    """Adds a site's private adapters (``tensors``, by their names) to the weights of a model without adapters."""
    for name, up in tensors.items():
        prefix, _, rest = name.partition("_private.")
        layer, _, half = rest.rpartition(".")
        if half == "up":
            linear: Any = model.get_submodule(f"{prefix}_encoder.{layer.replace('/', '.')}")
            linear.weight += scale * up @ tensors[f"{prefix}_private.{layer}.down"]


def merge(tower: nn.Module) -> None:
    """Replaces the adapted layers of ``tower``, in place, by plain ones with the same function."""
    for name, module in list(tower.named_modules()):
        if isinstance(module, AdaptedLinear):
            _put(tower, name, module.merged())


def digest(tensors: Mapping[str, Tensor], prefixes: Iterable[str]) -> str:
    """SHA-256 over names, shapes and bytes of the tensors whose names begin so."""
    hashed = hashlib.sha256()
    for name in sorted(name for name in tensors if name.startswith(tuple(prefixes))):
        tensor = tensors[name].detach().cpu().contiguous()
        hashed.update(f"{name} {list(tensor.shape)} {tensor.dtype}\n".encode())
        hashed.update(tensor.view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return hashed.hexdigest()


def _of_attention(name: str) -> bool:
    path = set(name.split("."))
    return not path.isdisjoint(_ATTENTION) and path.isdisjoint(_MLP)


def _put(tower: nn.Module, name: str, module: nn.Module) -> None:
    owner, _, own = name.rpartition(".")
    setattr(tower.get_submodule(owner), own, module)
