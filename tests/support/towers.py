"""A dual encoder with real (tiny) towers, on records in memory: for what needs tokens, dropout or BatchNorm heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from fedvlp.core.client import Client
from fedvlp.models.dual_encoder import DualEncoder, ModelConfig
from fedvlp.models.initial import save_initial
from fedvlp.objectives.convirt import ConVIRT
from support.toy import Pairs

CONFIG = ModelConfig(image_size=16, max_tokens=6, vocabulary=50, head_hidden=16, embedding_dim=8)


class Records(Pairs):
    """Images [n, 1, 16, 16] and reports [n, 6] of 1 to 6 tokens."""

    def _batch(self, split: str, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        batch = super()._batch(split, rows)
        return {**batch, "text_mask": torch.arange(6) <= rows[:, None] % 6}


def records(count: int = 40, dtype: torch.dtype = torch.float32) -> Records:
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(count, 1, 16, 16, generator=generator)
    return Records(images.to(dtype), torch.randint(2, 50, (count, 6), generator=generator))


def encoder(dropout: float = 0.0, dtype: torch.dtype = torch.float32, **changes: object) -> DualEncoder:
    """The same weights every time; ``dropout`` in every block."""
    model = ModelConfig(**{**CONFIG.__dict__, **changes}).build(seed=1).to(dtype)  # type: ignore[arg-type]
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.dropout = dropout  # type: ignore[assignment]
    return model


def client(model: DualEncoder | None = None, objective: nn.Module | None = None, **options: object) -> Client:
    model = model or encoder()
    dtype = next(model.parameters()).dtype
    return Client("a", 0, model, objective or ConVIRT(), records(dtype=dtype), **options)  # type: ignore[arg-type]


def frozen_batch_norm(folder: Path) -> ModelConfig:
    """A frozen image tower that normalises by the batch, with statistics that it has learned, and heads that do too.

    Its weights are written to ``folder``.
    """
    config = ModelConfig(image_tower="test_resnet", head_hidden=32, head_norm="batch", alignment=False, max_tokens=32)
    model = config.build(0)
    model.image_encoder.train()
    for _ in range(5):
        model.image_encoder(torch.randn(8, 1, 64, 64, generator=torch.Generator().manual_seed(4)))
    save_initial(model, folder, {}, torch.float32)
    return replace(config, init=str(folder), adapters="lora", adapter_layers="every", adapter_rank=2)


def local_bert(folder: Path, words: Sequence[str]) -> Path:
    """The folder of a BERT of two layers, width 32, with weights (with a pooler) and a vocabulary of ten words."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    settings = BertConfig(
        vocab_size=10, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    BertModel(settings).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(words))
    return folder
