"""Low-rank adapters of frozen towers (LoRA, Hu et al., 2022, https://arxiv.org/abs/2106.09685, eq. 3).

A linear layer W of a tower becomes W x + (alpha / r) B A x: W stays as it is, A [r, in] and B [out, r] are trained.
Convolutions and embeddings can have adapters too, with their weights as matrices: a row for each kernel, [out, in k k],
or for each word, [words, width].
The tensors of a frozen tower are no part of a model's State, so they neither travel nor are they averaged or saved:
every site reads them from the weights that the model starts from, whose checksum the experiment holds. Where every
layer has an adapter, what is no matrix (norms, biases, positions) is trained as it is, and travels.

A and B are averaged apart, and the mean of B times the mean of A is not the mean of B A: where sites are unlike, a part
of what they have learned is lost.

With private adapters every adapted layer has a second one, which stays at its site (``image_private.``,
``text_private.``; core/norm_statistics.py), so that the shared one learns what all sites have in common, as in
Med-DualLoRA.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NONE, LORA = "", "lora"
LAYERS = ("all", "attention", "every")
"""Which layers of a tower are adapted: all linear ones, those of its attention alone (as in the paper), or convolutions
and embeddings as well, beside norms, biases and positions."""

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


class Adapted(nn.Module):
    """Base of adapted layers: the tensors of a layer of the tower, and adapters, which belong to another module."""

    weight: Any
    bias: Any

    def take(self, layer: nn.Module, adapter: Adapter) -> None:
        """The tensors of ``layer``, and its first adapter."""
        self.weight, self.bias = layer.weight, getattr(layer, "bias", None)
        self._adapters: tuple[Adapter, ...] = (adapter,)  # no submodules, so the tower's tensors keep their names

    def add(self, adapter: Adapter) -> None:
        """One more adapter beside those that are there."""
        self._adapters = (*self._adapters, adapter)

    def whole(self) -> Tensor:
        """The weight with the changes of all adapters."""
        weight = self.weight
        for adapter in self._adapters:
            weight = weight + adapter.change().view_as(weight)
        return weight

    def merged(self) -> nn.Module:
        """The plain layer with the same function."""
        layer = plain(self)
        layer.weight = nn.Parameter(self.whole().detach())
        if self.bias is not None:
            layer.bias = self.bias
        return layer


class AdaptedLinear(Adapted, nn.Linear):
    """W x + b + (alpha / r) B A x, with a term for each adapter."""

    def forward(self, input: Tensor) -> Tensor:
        output = nn.Linear.forward(self, input)
        for adapter in self._adapters:
            output = output + adapter(input)
        return output


class AdaptedConv2d(Adapted, nn.Conv2d):
    """A convolution by W + (alpha / r) B A: kernels are small, so their sum costs less than a second convolution."""

    def forward(self, input: Tensor) -> Tensor:
        return self._conv_forward(input, self.whole(), self.bias)


class AdaptedEmbedding(Adapted, nn.Embedding):
    """The rows of W + (alpha / r) B A that are asked for; B has a row for each word."""

    def forward(self, input: Tensor) -> Tensor:
        output = nn.Embedding.forward(self, input)
        for adapter in self._adapters:
            output = output + adapter.scale * F.embedding(input, adapter.up) @ adapter.down
        return output


KINDS: dict[type[nn.Module], type[Adapted]] = {
    nn.Linear: AdaptedLinear, nn.Conv2d: AdaptedConv2d, nn.Embedding: AdaptedEmbedding,
}  # fmt: skip
"""What a layer becomes. A class derived from these is left as it is: it may do more than they do."""


def made(kind: Any, layer: Any) -> Any:
    """A layer of class ``kind`` with the sizes of ``layer``, its tensors on the meta device."""
    if isinstance(layer, nn.Linear):
        return kind(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
    if isinstance(layer, nn.Embedding):
        return kind(layer.num_embeddings, layer.embedding_dim, device="meta")
    size, stride, padding, dilation = layer.kernel_size, layer.stride, layer.padding, layer.dilation
    form = (layer.in_channels, layer.out_channels, size, stride, padding, dilation, layer.groups)
    return kind(*form, layer.bias is not None, layer.padding_mode, device="meta")


def plain(layer: Adapted) -> Any:
    """The layer of torch's own class with the sizes of an adapted one, its tensors on the meta device."""
    return made(next(kind for kind, adapted in KINDS.items() if type(layer) is adapted), layer)


def new_adapter(layer: Any, rank: int, alpha: float) -> Adapter:
    """An adapter for a layer's weight as a matrix [rows, columns]."""
    rows, *columns = layer.weight.shape
    return Adapter(math.prod(columns), rows, rank, alpha)


def adapt(tower: nn.Module, rank: int, alpha: float, layers: str) -> nn.ModuleDict:
    """Puts adapters on the ``layers`` of ``tower``, in place, and returns them by the layers' names.

    Rank 0 gives none: the tower is frozen. Raises ValueError for a tower without such layers.
    """
    kinds = tuple(KINDS) if layers == "every" else (nn.Linear,)
    chosen = {
        name: module
        for name, module in tower.named_modules()
        if type(module) in kinds and (layers != "attention" or _of_attention(name))
    }
    if not chosen and rank:
        raise ValueError(
            f"ModelConfig.adapters: this tower has no layers to adapt ({layers}); choose every, or another tower"
        )
    adapters = nn.ModuleDict()
    for name, layer in chosen.items() if rank else ():
        adapters[name.replace(".", "/")] = adapter = new_adapter(layer, rank, alpha)
        adapted = made(KINDS[type(layer)], layer)
        adapted.take(layer, adapter)
        _put(tower, name, adapted)
    return adapters


def adapt_privately(tower: nn.Module, rank: int, alpha: float) -> nn.ModuleDict:
    """Puts a second adapter on every adapted layer of ``tower``, in place, and returns these by the layers' names."""
    adapters = nn.ModuleDict()
    for name, layer in tower.named_modules():
        if isinstance(layer, Adapted):
            adapters[name.replace(".", "/")] = adapter = new_adapter(layer, rank, alpha)
            layer.add(adapter)
    return adapters


def frozen(tower: nn.Module, rank: int, layers: str) -> tuple[str, ...]:
    """What the names of an adapted tower's frozen tensors begin with: "" for all of them.

    With ``layers`` "every", parameters that are no matrix of a layer are trained. Not in a tower that normalises by the
    batch: trained, it would take the batch's statistics in the place of those that it has learned.
    """
    normalised = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in tower.modules())
    if layers != "every" or not rank or normalised:
        return ("",)
    trained = {
        name for name, weight in tower.named_parameters() if weight.ndim < 2 or "weight" not in name.rpartition(".")[2]
    }
    return tuple(name for name in tower.state_dict() if name not in trained)


@torch.no_grad()
def merge_private(model: nn.Module, tensors: Mapping[str, Tensor], scale: float) -> None:
    """Adds a site's private adapters (``tensors``, by their names) to the weights of a model without adapters."""
    for name, up in tensors.items():
        prefix, _, rest = name.partition("_private.")
        layer, _, half = rest.rpartition(".")
        if half == "up":
            adapted: Any = model.get_submodule(f"{prefix}_encoder.{layer.replace('/', '.')}")
            adapted.weight += (scale * up @ tensors[f"{prefix}_private.{layer}.down"]).view_as(adapted.weight)


def merge(tower: nn.Module) -> None:
    """Replaces the adapted layers of ``tower``, in place, by plain ones with the same function."""
    for name, module in list(tower.named_modules()):
        if isinstance(module, Adapted):
            _put(tower, name, module.merged())


def _of_attention(name: str) -> bool:
    path = set(name.split("."))
    return not path.isdisjoint(_ATTENTION) and path.isdisjoint(_MLP)


def _put(tower: nn.Module, name: str, module: nn.Module) -> None:
    owner, _, own = name.rpartition(".")
    setattr(tower.get_submodule(owner), own, module)
