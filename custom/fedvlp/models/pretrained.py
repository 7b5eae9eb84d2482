"""Towers and alignment blocks of a dual encoder, by their names in its configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from fedvlp.models.fetched import located
from fedvlp.models.initial import own_folder
from fedvlp.models.tiny import (
    BagOfWords,
    Block,
    GRUText,
    Pixels,
    TextTower,
    TinyImage,
    TinyText,
    Tokenizer,
    Tower,
    heads_for,
)

if TYPE_CHECKING:
    from fedvlp.models.dual_encoder import ModelConfig


class NoAlignment(nn.Identity):
    """Takes the place of an alignment block that is switched off: no parameters, the mask is ignored."""

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """The tokens [B, T, W] themselves."""
        return tokens


def alignment_block(config: ModelConfig, tower: Tower, post_norm: bool) -> Block | NoAlignment:
    """The transformer block on top of a tower; ``NoAlignment`` where the configuration switches it off."""
    if not config.alignment:
        return NoAlignment()
    return Block(tower.width, heads_for(tower.width), tower.mlp_ratio, post_norm, tower.dropout)


def image_tower(config: ModelConfig, architecture: dict[str, Any] | None) -> Tower:
    """The image tower that the configuration names. ``architecture``: ``Tower.architecture`` of a saved model."""
    own = None if architecture is not None else own_folder(config.image_tower)
    if own is None:
        return _image_tower(config, config.image_tower, architecture)
    described = own.described["image_architecture"]
    return own.filled("image", _image_tower(config, described.get("name", "tiny"), described), config.pretrained)


def _image_tower(config: ModelConfig, name: str, architecture: dict[str, Any] | None) -> Tower:
    if name == "tiny":
        return TinyImage(config.image_size, config.in_channels or 1)
    if name == "pixels":
        return Pixels(config.image_size, config.in_channels or 1)
    from fedvlp.models.image import timm_tower, vision_tower

    if architecture and "config" in architecture:
        return vision_tower(architecture, config.image_size)
    published = config.pretrained and architecture is None  # else the weights come from where the architecture was read
    return timm_tower(located(name), config.image_size, published, config.in_channels, architecture)


def text_tower(config: ModelConfig, architecture: dict[str, Any] | None, tokenizer: Tokenizer | None) -> TextTower:
    """The text tower that the configuration names. ``architecture`` and ``tokenizer``: those of a saved model."""
    own = None if architecture is not None else own_folder(config.text_tower)
    if own is None:
        return _text_tower(config, config.text_tower, architecture, tokenizer)
    described = own.described["text_architecture"]
    if own.described.get("tokenizer") == "transformers":
        from fedvlp.models.text import load_tokenizer

        tokenizer = load_tokenizer(own.folder / "tokenizer", config.max_tokens)
    tower = _text_tower(config, described.get("model_type", "tiny"), described, tokenizer)
    return own.filled("text", tower, config.pretrained)


def _text_tower(
    config: ModelConfig, name: str, architecture: dict[str, Any] | None, tokenizer: Tokenizer | None
) -> TextTower:
    if name == "tiny":
        return TinyText(config.vocabulary, config.max_tokens, config.text_layers or 2)
    if name == "gru":
        return GRUText(config.vocabulary, config.max_tokens, config.text_layers or 1)
    if name == "words":
        return BagOfWords(config.vocabulary, config.max_tokens)
    from fedvlp.models.text import rebuild_tower, transformers_tower

    if architecture is not None:
        return rebuild_tower(architecture, config.max_tokens, tokenizer)
    return transformers_tower(located(name), config.text_layers, config.max_tokens, config.pretrained)
