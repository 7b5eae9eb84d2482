"""Image towers from timm (Wightman, https://github.com/huggingface/pytorch-image-models), as token sequences."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedvlp.core.json_file import read_json
from fedvlp.models.fetched import IN_KIT, NoWeightsError, what_is_here
from fedvlp.models.tiny import Normalised, Tower, as_channels, first_attention


class TimmTower(Tower):
    """A timm model without classifier or pooling: images [B, 1 or C, H, W] -> tokens [B, M, W].

    Position 0 is the class token where the model has one (ViT), else the mean of the map (Swin, ResNet, ConvNeXt);
    positions 1.. are the patches in row order. Distillation and register tokens are left out of the output.
    """

    def __init__(self, model: nn.Module, image_size: int, in_channels: int, architecture: dict[str, Any]) -> None:
        super().__init__()
        self.model, self.image_size, self.in_channels = model, image_size, in_channels
        self.width = int(model.num_features)  # type: ignore[arg-type]
        self.prefix = int(getattr(model, "num_prefix_tokens", 0) or 0)
        self.has_summary = self.prefix > 0 and getattr(model, "cls_token", None) is not None
        self.channels_last = str(getattr(model, "output_fmt", "NCHW")) == "NHWC"
        self.normalise = Normalised(architecture.get("mean", ()), architecture.get("std", ()))
        self._architecture = architecture

    def _seen(self, images: Tensor) -> Tensor:
        """Images [B, 1 or C, H, W] as the model sees them, [B, C, H, W]."""
        return self.normalise(as_channels(images, self.in_channels, self.image_size))

    def forward(self, images: Tensor) -> Tensor:
        """Tokens [B, M, W] of images [B, 1 or C, H, W]."""
        model: Any = self.model
        return self._tokens(model.forward_features(self._seen(images)))

    def with_attention(self, *inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        """Tokens and the class token's attention [B, M].

        None for windowed (Swin), rotary (DINOv3) or no attention (CNNs), and without a class token.
        """
        from timm.layers import Attention

        model: Any = self.model
        last: Any = model.blocks[-1] if isinstance(getattr(model, "blocks", None), nn.Sequential) else None
        if not (self.has_summary and last is not None and isinstance(getattr(last, "attn", None), Attention)):
            return self(*inputs), None
        (images,) = inputs
        out, hidden = model.forward_intermediates(
            self._seen(images),
            indices=[len(model.blocks) - 2],
            return_prefix_tokens=True,
            output_fmt="NLC",
        )
        with torch.no_grad():
            (patches, prefix), attention = hidden[0], last.attn
            qkv = attention.qkv(last.norm1(torch.cat([prefix, patches], dim=1)))
            q, k, _ = qkv.unflatten(-1, (3, attention.num_heads, -1)).permute(2, 0, 3, 1, 4)  # [B, H, M, d]
            seen = first_attention(attention.q_norm(q), attention.k_norm(k))  # [B, prefix + patches]
        return self._tokens(out), torch.cat([seen[:, :1], seen[:, self.prefix :]], dim=1)

    def maps(self, images: Tensor) -> list[Tensor]:
        """Feature maps [B, C, h, w] from fine to coarse: of a CNN or Swin one for each stage, of a ViT its patches."""
        model: Any = self.model
        if len({stage["reduction"] for stage in getattr(model, "feature_info", [])}) < 2:
            return super().maps(images)
        stages: list[Tensor] = model.forward_intermediates(self._seen(images), intermediates_only=True)
        return stages

    def checkpoint_blocks(self) -> None:
        """As for every tower. The running statistics of a CNN then see each batch twice."""
        self.model.set_grad_checkpointing(True)  # type: ignore[operator]

    def _tokens(self, out: Tensor) -> Tensor:
        """timm's output, tokens or a feature map, as [B, M, W]."""
        model: Any = self.model
        if out.ndim == 4:
            out = model.forward_head(out)  # without pooling and classifier: at most ConvNeXt's last norm
            patches = (out if self.channels_last else out.permute(0, 2, 3, 1)).flatten(1, 2)  # [B, M-1, W]
            return torch.cat([patches.mean(dim=1, keepdim=True), patches], dim=1)  # [B, M, W]
        if out.ndim != 3:
            raise ValueError(f"image tower: timm gave {list(out.shape)}, expected tokens [B, M, W] or a map")
        if getattr(model, "fc_norm", None) is not None:
            out = model.fc_norm(out)  # the last norm of the ViTs without class token
        patches = out[:, self.prefix :]
        summary = out[:, :1] if self.has_summary else patches.mean(dim=1, keepdim=True)
        return torch.cat([summary, patches], dim=1)  # [B, M, W]

    def architecture(self) -> dict[str, Any]:
        """timm's name and arguments."""
        return self._architecture


class TransformersImage(Tower):
    """A vision model of transformers: images [B, 1 or C, H, W] -> tokens [B, M, W], position 0 what its pooler gives.

    Where it has no pooler, position 0 is the class token; register tokens are left out. ``architecture``: its
    configuration, and the mean and std that it sees.
    """

    def __init__(self, model: nn.Module, image_size: int, architecture: dict[str, Any]) -> None:
        super().__init__()
        settings: Any = model.config
        self.model, self.image_size, self.in_channels = model, image_size, int(settings.num_channels)
        sizes = getattr(settings, "hidden_sizes", None)  # of the stages of ConvNeXt and ResNet
        self.width = int(sizes[-1] if sizes else settings.hidden_size)
        self.normalise = Normalised(architecture.get("mean", ()), architecture.get("std", ()))
        stretch = "interpolate_pos_encoding" in inspect.signature(model.forward).parameters
        self._more = {"interpolate_pos_encoding": True} if stretch and settings.image_size != image_size else {}
        self._architecture = architecture

    def forward(self, images: Tensor) -> Tensor:
        """Tokens [B, M, W] of images [B, 1 or C, H, W]."""
        seen = self.normalise(as_channels(images, self.in_channels, self.image_size))
        out = self.model(pixel_values=seen, **self._more)
        hidden: Tensor = out.last_hidden_state
        pooled: Any = getattr(out, "pooler_output", None)
        if hidden.ndim == 4:  # a map [B, W, h, w]
            hidden, pooled = hidden.flatten(2).transpose(1, 2), pooled.flatten(1)
        summary = hidden[:, 0] if pooled is None else pooled
        return torch.cat([summary[:, None], hidden[:, -self._patches(hidden.shape[1]) :]], dim=1)

    def _patches(self, tokens: int) -> int:
        """How many of so many tokens are patches: the last ones, a square."""
        settings: Any = self.model.config
        stages = len(getattr(settings, "depths", None) or ()) - 1
        stride = int(getattr(settings, "patch_size", 1)) * 2 ** max(0, stages)
        return min(tokens, (self.image_size // stride) ** 2)

    def checkpoint_blocks(self) -> None:
        """As for every tower, by transformers' own switch."""
        self.model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]

    def architecture(self) -> dict[str, Any]:
        """The kind of the model, transformers' configuration, and mean and std."""
        return self._architecture


def vision_tower(architecture: dict[str, Any], image_size: int) -> TransformersImage:
    """The tower that ``TransformersImage.architecture()`` describes, randomly initialised, without network."""
    from transformers import AutoConfig

    from fedvlp.models.text import bare_model

    settings = AutoConfig.for_model(architecture["name"], **architecture["config"])
    return TransformersImage(bare_model(settings), image_size, architecture)


def timm_tower(
    name: str,
    image_size: int,
    pretrained: bool,
    in_channels: int | None = None,
    saved: dict[str, Any] | None = None,
) -> TimmTower:
    """Builds a timm model by name, or from a local folder in timm's layout (config.json, model.safetensors).

    ``vit_base_patch16_224``: 85,798,656 parameters. Weights are loaded only when ``pretrained``; without it nothing is
    read from the network. Images are normalised by the mean and std that the folder or the published weights say.
    ``in_channels`` None: those of the folder, else 3. ``saved``: the architecture of a saved model; ``name`` is then
    never a folder. Raises ValueError for an unknown name or folder, NoWeightsError where weights cannot be loaded.
    """
    import timm

    architecture, overlay = (saved, None) if saved is not None else _locate(name, pretrained)
    kwargs = dict(architecture["args"])
    channels = in_channels or kwargs.get("in_chans", 3)
    kwargs.pop("in_chans", None)
    default = timm.get_pretrained_cfg(architecture["name"])
    if default is None and not timm.is_model(architecture["name"]):
        raise ValueError(
            f"image_tower {name!r}: timm {timm.__version__} has no model {architecture['name']!r}; expected 'tiny', a "
            "name from timm.list_models(), or a folder with timm's config.json"
        )
    if default is not None and default.fixed_input_size and default.input_size[-1] != image_size:
        kwargs["img_size"] = image_size
    shape = {"num_classes": 0, "in_chans": channels, "pretrained_cfg_overlay": overlay}
    model = _created(name, pretrained, architecture["name"], **shape, **kwargs)
    model.reset_classifier(0, "")
    statistics = {key: architecture[key] for key in ("mean", "std") if key in architecture}
    if pretrained and not statistics and default is not None:
        statistics = {"mean": default.mean, "std": default.std}
    normalise = Normalised(**{key: _of_channels(values, channels) for key, values in statistics.items()})
    described = {"name": architecture["name"], "args": kwargs, **normalise.said}
    return TimmTower(model, image_size, channels, described)


def _created(name: str, pretrained: bool, architecture: str, **kwargs: Any) -> Any:
    """timm's model. Raises NoWeightsError where it has to be ``pretrained`` and its weights cannot be loaded."""
    import timm

    try:
        with what_is_here() if pretrained else nullcontext():
            return timm.create_model(architecture, pretrained=pretrained, **kwargs)
    except Exception as error:
        if not pretrained:
            raise
        raise NoWeightsError(
            f"image_tower {name!r}: pretrained weights could not be loaded ({type(error).__name__}). Give a local "
            f"folder with config.json and model.safetensors as image_tower {IN_KIT}, or set pretrained to false"
        ) from error


def _of_channels(values: Any, channels: int) -> list[float]:
    """Statistics of each of C channels; of one channel, their mean where they are of three."""
    given = [float(value) for value in values]
    return given if len(given) == channels else [sum(given) / len(given)] * channels


def _locate(name: str, pretrained: bool) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Architecture (name, args) of a timm name or a local folder, and timm's overlay naming the folder's weights."""
    folder = Path(name)
    if not folder.is_dir():
        if ":" in name or folder.is_absolute():
            raise ValueError(f"image_tower {name!r}: neither an existing folder nor a timm model name")
        return {"name": name, "args": {}}, None
    try:
        described = read_json(folder / "config.json", follow=True)
        architecture = {"name": str(described["architecture"]), "args": dict(described.get("model_args") or {})}
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"image_tower {name!r}: no config.json with timm's 'architecture' in that folder") from error
    weights = folder / "model.safetensors"
    if pretrained and not weights.is_file():
        raise ValueError(f"image_tower {name!r}: no model.safetensors in that folder (pickled weights are not read)")
    published = described.get("pretrained_cfg") or {}
    architecture |= {key: published[key] for key in ("mean", "std") if published.get(key)}
    classes = described.get("num_classes", published.get("num_classes", 1000))
    return architecture, {"file": str(weights), "num_classes": classes} if pretrained else None
