"""Weights as training programs wrap them, and the positions of text towers."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedvlp.core.types import with_prefix
from fedvlp.models.other_libraries import StartError, _tensors, unwrapped
from fedvlp.models.text import positions_of

PLAIN = {"blocks.0.weight": torch.ones(2), "head.bias": torch.zeros(1), "model_scale": torch.ones(1)}
OTHER = {name: tensor + 7 for name, tensor in PLAIN.items()}


def test_each_wrapping_gives_the_names_of_the_model_itself() -> None:
    """Of a teacher and its student the teacher is taken; a loss's and a projector's tensors are not the model's."""
    for seen in (
        PLAIN,
        {"model": PLAIN, "epoch": 399, "optimizer": {"state": {}}},
        {"state_dict": with_prefix("module.", PLAIN), "epoch": 20, "name": "run"},
        {"model_state_dict": PLAIN},
        {"state_dict": {"model": PLAIN}},
        {"model": PLAIN, "queue": torch.ones(3)},
        {"teacher": with_prefix("backbone.", PLAIN), "student": with_prefix("module.backbone.", OTHER)},
        with_prefix("_orig_mod.", PLAIN),
        with_prefix("module._orig_mod.", PLAIN),
        with_prefix("_orig_mod.module.", PLAIN),
        {"state_dict": {**with_prefix("model.", PLAIN), "criterion.weight": torch.ones(1)}},
        {
            **with_prefix("module.encoder_q.", PLAIN),
            **with_prefix("module.encoder_k.", OTHER),
            "module.queue": torch.ones(1),
        },
    ):
        got = unwrapped(seen)
        assert got.keys() == PLAIN.keys()
        assert all(torch.equal(got[name], PLAIN[name]) for name in PLAIN)
    for nothing in (None, {}, {"epoch": 3}, [1], {"model": {"epoch": 3}}):
        assert unwrapped(nothing) == {}


def test_settings_beside_the_weights_are_read_and_code_is_not(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return (print, ("run",))

    file = tmp_path / "checkpoint.pth"
    torch.save({"model": PLAIN, "args": argparse.Namespace(lr=0.1, output=Path("x"))}, file)
    assert _tensors(file).keys() == PLAIN.keys()
    torch.save({"model": PLAIN, "args": Evil()}, file)
    with pytest.raises(StartError, match="holds more than tensors"):
        _tensors(file)
    torch.save({"epoch": 3}, file)
    with pytest.raises(StartError, match=r"holds no tensors by name, nor under one of state_dict"):
        _tensors(file)


def test_a_text_tower_has_the_positions_that_its_embedding_has() -> None:
    """RoBERTa's and MPNet's 514 begin behind the padding's index, 1: 512 tokens."""
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    for name, more, positions in (
        ("Bert", {"max_position_embeddings": 40}, 40),
        ("Roberta", {"max_position_embeddings": 514, "pad_token_id": 1}, 512),
        ("XLMRoberta", {"max_position_embeddings": 130, "pad_token_id": 1}, 128),
        ("Camembert", {"max_position_embeddings": 514, "pad_token_id": 1}, 512),
        ("MPNet", {"max_position_embeddings": 514, "pad_token_id": 1}, 512),
        ("Electra", {"max_position_embeddings": 40}, 40),
        ("CLIPText", {"max_position_embeddings": 77}, 77),
    ):
        settings = getattr(transformers, f"{name}Config")(vocab_size=30, **small, **more)
        assert positions_of(settings) == positions, name
        model = transformers.AutoModel.from_config(settings).eval()
        ids = torch.full((1, positions), 5)
        out: Tensor = model(input_ids=ids).last_hidden_state
        assert out.shape[1] == positions
