"""What the summary token attends to, in every tower and alignment block; blocks that are run again for gradients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.towers import local_bert
from torch import Tensor

from fedvlp.core.types import Batch
from fedvlp.models.dual_encoder import DualEncoder, ModelConfig
from fedvlp.models.image import timm_tower
from fedvlp.models.text import transformers_tower
from fedvlp.models.tiny import Block, GRUText, TinyImage, TinyText, Tower
from fedvlp.objectives import OBJECTIVES

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "no", "left", "pleural", "effusion", "##s"]
SMALL = ModelConfig(image_size=32, max_tokens=12, vocabulary=64, text_layers=2, head_hidden=16, embedding_dim=8)


@pytest.fixture
def bert(tmp_path: Path) -> str:
    """The folder of a BERT of two layers, width 32, and a ten-word vocabulary."""
    return str(local_bert(tmp_path, WORDS))


def batch_of(rows: int = 4, seed: int = 0) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    mask = torch.arange(12) < torch.tensor([[12], [7], [3], [1]])[:rows]
    ids = torch.randint(2, 64, (rows, 12), generator=draw) * mask
    return {"image": torch.randn(rows, 1, 32, 32, generator=draw), "text": ids, "text_mask": mask}


@pytest.mark.parametrize("post_norm", [False, True])
def test_a_blocks_attention_by_the_formula(post_norm: bool) -> None:
    """Head by head: softmax over real tokens of q_0 . k_t / sqrt(8), then the mean of both heads."""
    block, tokens = Block(16, 2, post_norm=post_norm).double(), torch.randn(3, 5, 16).double()
    mask = torch.arange(5) < torch.tensor([[5], [3], [1]])
    q, k, _ = block.qkv(tokens if post_norm else block.norm1(tokens)).chunk(3, dim=-1)
    expected = torch.zeros(3, 5).double()
    for row in range(3):
        for head in (slice(0, 8), slice(8, 16)):
            real = int(mask[row].sum())
            scores = torch.stack([q[row, 0, head] @ k[row, t, head] / 8**0.5 for t in range(real)])
            expected[row, :real] += scores.softmax(0) / 2
    found = block.summary_attention(tokens, mask)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert not found.requires_grad


def tiny_image() -> tuple[Tower, tuple[Tensor, ...]]:
    return TinyImage(32), (batch_of()["image"],)


def tiny_text() -> tuple[Tower, tuple[Tensor, ...]]:
    return TinyText(64, 12), (batch_of()["text"], batch_of()["text_mask"])


@pytest.mark.parametrize("build", [tiny_image, tiny_text])
def test_a_tiny_tower_tells_the_attention_of_its_last_block(build: Any) -> None:
    tower, inputs = build()
    seen: list[Any] = []
    tower.blocks[-1].register_forward_pre_hook(lambda block, given: seen.append(given))
    tokens, attention = tower.with_attention(*inputs)
    assert torch.equal(tokens, tower(*inputs))
    assert torch.equal(attention, tower.blocks[-1].summary_attention(*seen[0]))


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"])
def test_a_vits_attention_is_timms_own(name: str) -> None:
    torch.manual_seed(0)
    tower = timm_tower(name, 64, False).eval()
    last, seen = tower.model.blocks[-1].attn, []  # type: ignore[union-attr, index]
    images = torch.randn(2, 1, 64, 64)
    tokens, attention = tower.with_attention(images)
    assert attention is not None
    torch.testing.assert_close(tokens, tower(images), rtol=0, atol=0)
    last.fused_attn = False  # then the softmax passes through a dropout of its own
    last.attn_drop.register_forward_hook(lambda module, given, out: seen.append(out))
    tower(images)
    own = seen[0][:, :, 0].mean(1)  # [B, prefix + patches]
    expected = torch.cat([own[:, :1], own[:, tower.prefix :]], 1)
    torch.testing.assert_close(attention, expected, rtol=1e-5, atol=1e-7)
    assert attention.shape == (2, 17)


@pytest.mark.parametrize(
    ("name", "size"), [("resnet10t", 64), ("swin_tiny_patch4_window7_224", 224), ("vit_small_patch16_dinov3", 64)]
)
def test_a_tower_without_such_a_block_says_so(name: str, size: int) -> None:
    with torch.device("meta"):
        tower = timm_tower(name, size, False)
        tokens, attention = tower.with_attention(torch.empty(2, 1, size, size))
    assert attention is None
    assert tokens.shape[0] == 2
    assert GRUText(64, 12).with_attention(batch_of()["text"], batch_of()["text_mask"])[1] is None


def test_a_berts_attention_is_transformers_own(bert: str) -> None:
    from transformers import BertModel

    tower = transformers_tower(bert, None, 8, pretrained=True).eval()
    ids, mask = tower.tokenizer(["no left effusions", "no"])
    tokens, attention = tower.with_attention(ids, mask)
    assert attention is not None
    torch.testing.assert_close(tokens, tower(ids, mask), rtol=0, atol=1e-6)
    eager = BertModel.from_pretrained(bert, attn_implementation="eager").eval()
    own = eager(ids, attention_mask=mask.long(), output_attentions=True).attentions[-1][:, :, 0].mean(1)
    torch.testing.assert_close(attention, own, rtol=1e-5, atol=1e-6)
    assert not attention[~mask].any()


@pytest.mark.parametrize("alignment", [True, False])
def test_outputs_tell_attention_where_asked_for(alignment: bool) -> None:
    """Of the alignment blocks, or without them of the towers' last blocks; everything else is the same."""
    model, batch = replace(SMALL, alignment=alignment).build(0).eval(), batch_of()
    without = model(batch)
    assert without.image_attention is without.text_attention is None
    model.attention = True
    seen = model(batch)
    for name in ("image", "text", "image_tokens", "text_tokens"):
        assert torch.equal(getattr(seen, name), getattr(without, name))
    if alignment:
        inputs = model.encode(batch)
        image = model.image_alignment.summary_attention(inputs.image)
        text = model.text_alignment.summary_attention(inputs.text, batch["text_mask"])
    else:
        _, image = model.image_encoder.with_attention(batch["image"])
        _, text = model.text_encoder.with_attention(batch["text"], batch["text_mask"])
    assert torch.equal(seen.image_attention, image[:, 1:])
    assert torch.equal(seen.text_attention, text[:, 1:])
    assert seen.image_attention.shape == (4, 16)
    assert not seen.text_attention[~batch["text_mask"][:, 1:]].any()
    lone = model({"image": batch["image"]})
    assert torch.equal(lone.image_attention, seen.image_attention)
    assert lone.text_attention is None


@pytest.mark.parametrize("objective", ["convirt", "mgca"])
def test_blocks_that_are_run_again_give_the_same_gradients(objective: str) -> None:
    def gradients(again: bool) -> tuple[Tensor, dict[str, Tensor]]:
        model = replace(SMALL, gradient_checkpointing=again).build(0)
        model.attention = objective == "mgca"
        loss = sum(OBJECTIVES[objective]().build(model, 0)(model(batch_of()), batch_of()).values())
        loss.backward()
        return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    (one, plain), (other, again) = gradients(False), gradients(True)
    assert torch.equal(one, other)
    assert plain.keys() == again.keys()
    assert all(torch.equal(plain[name], again[name]) for name in plain)


def runs(module: torch.nn.Module) -> list[int]:
    counted: list[int] = []
    module.register_forward_pre_hook(lambda *_: counted.append(1))  # a second run stops before its end
    return counted


def gradients_of(tower: Tower, inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    torch.manual_seed(3)  # of dropout
    tower(*inputs).square().mean().backward()
    return {name: p.grad.clone() for name, p in tower.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "resnet10t"])
def test_timm_towers_run_their_blocks_again(name: str) -> None:
    torch.manual_seed(0)
    tower, images = timm_tower(name, 64, False), torch.randn(2, 1, 64, 64)
    plain = gradients_of(tower, (images,))
    again = timm_tower(name, 64, False)
    again.load_state_dict(tower.state_dict())
    again.checkpoint_blocks()
    stages: Any = again.model
    last = stages.blocks if hasattr(stages, "blocks") else stages.layers if hasattr(stages, "layers") else stages.layer4
    counted = runs(last[-1].blocks[-1] if hasattr(last[-1], "blocks") else last[-1])
    found = gradients_of(again, (images,))
    assert len(counted) == 2
    assert found.keys() == plain.keys()
    for parameter in plain:
        torch.testing.assert_close(found[parameter], plain[parameter], rtol=1e-4, atol=1e-6)


def test_a_bert_runs_its_layers_again_with_the_same_dropout(bert: str) -> None:
    tower, again = (transformers_tower(bert, None, 8, pretrained=True).train() for _ in range(2))
    inputs = tower.tokenizer(["no left effusions", "no"])
    again.checkpoint_blocks()
    counted = runs(again.model.encoder.layer[0].output)  # type: ignore[union-attr, index]
    plain, found = gradients_of(tower, inputs), gradients_of(again, inputs)
    assert len(counted) == 2
    assert tower.dropout > 0
    assert found.keys() == plain.keys()
    for parameter in plain:
        torch.testing.assert_close(found[parameter], plain[parameter], rtol=0, atol=1e-7)


@pytest.mark.parametrize("build", [tiny_image, tiny_text])
def test_tiny_towers_run_their_blocks_again_for_gradients_alone(build: Any) -> None:
    tower, inputs = build()
    tower.checkpoint_blocks()
    counted = runs(tower.blocks[0])
    with torch.no_grad():
        tower(*inputs)
    assert len(counted) == 1
    gradients_of(tower, inputs)
    assert len(counted) == 3


def test_the_setting_is_saved_with_the_model(tmp_path: Path) -> None:
    model = replace(SMALL, gradient_checkpointing=True).build(0)
    model.save(tmp_path)
    again = DualEncoder.from_pretrained(tmp_path)
    assert again.config == model.config
    assert again.image_encoder.checkpointing
    assert again.state_dict().keys() == SMALL.build(0).state_dict().keys()
