"""Tiny random models of other libraries, each written by its own library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SIZE = 32
TEXTS = ["left basal effusion", "no effusion", "the heart is of normal size and the lungs are clear " * 4]
TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
VISION = {**TINY, "image_size": SIZE, "patch_size": 8}
MEAN, STD = [0.48, 0.45, 0.40], [0.26, 0.27, 0.28]


def words(folder: Path, kind: str, max_tokens: int) -> int:
    """Writes a tokenizer of whole words, as ``kind`` ends its texts; returns the number of its words."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = {
        "bert": ("[CLS]", "[SEP]", "[PAD]"),
        "clip": ("<|s|>", "<|e|>", "<|e|>"),
        "siglip": (None, "</s>", "<p>"),
    }
    first, last, pad = special[kind]
    names = dict.fromkeys([pad, "[UNK]", first, last, *sorted(set(" ".join(TEXTS).split()))])
    vocabulary = {name: number for number, name in enumerate(name for name in names if name)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, "[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    single = f"{first} $A {last}" if first else f"$A {last}"
    ends = [(name, vocabulary[name]) for name in dict.fromkeys((first, last)) if name]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=ends)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, unk_token="[UNK]", eos_token=last, model_max_length=max_tokens
    ).save_pretrained(folder)
    return len(vocabulary)


def processor(folder: Path, **more: Any) -> None:
    said = {"do_normalize": True, "image_mean": MEAN, "image_std": STD, "size": {"height": SIZE, "width": SIZE}}
    (folder / "preprocessor_config.json").write_text(json.dumps({**said, **more}))


def films(channels: int = 3) -> tuple[Tensor, Tensor]:
    """20 films as fedvlp prepares them, and as the other library sees them."""
    grey = torch.rand(20, 1, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    mean, std = (torch.tensor(values[:channels])[:, None, None] for values in (MEAN, STD))
    return (grey - 0.5) / 0.5, (grey - mean) / std


def pair(folder: Path, kind: str, seed: int = 0) -> Any:
    """A random pair of transformers, written by transformers."""
    import transformers as hf

    torch.manual_seed(seed)
    count = words(folder, kind, 16)
    vision, text = {
        "clip": (hf.CLIPVisionConfig, hf.CLIPTextConfig),
        "siglip": (hf.SiglipVisionConfig, hf.SiglipTextConfig),
    }[kind]
    said = {**TINY, "vocab_size": count, "max_position_embeddings": 16}
    said |= {
        "clip": {"bos_token_id": 2, "eos_token_id": 0, "pad_token_id": 0},
        "siglip": {"pad_token_id": 0, "eos_token_id": 2, "bos_token_id": 1},
    }[kind]
    if kind == "clip":
        config: Any = hf.CLIPConfig(
            text_config=text(**said).to_dict(), vision_config=vision(**VISION).to_dict(), projection_dim=24
        )
        model: Any = hf.CLIPModel(config)
    else:
        config = hf.SiglipConfig(text_config=text(**said).to_dict(), vision_config=vision(**VISION).to_dict())
        model = hf.SiglipModel(config)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.2) if weight.ndim else weight.data.fill_(2.5)
    model.eval().save_pretrained(folder)
    processor(folder)
    return model.eval()
