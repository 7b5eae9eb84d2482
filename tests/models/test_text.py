"""transformers text towers: the papers' parameter count, masks, local folders, tokenizers, offline errors."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from support.towers import local_bert

from fedvlp.models.text import TransformersTokenizer, load_tokenizer, rebuild_tower, transformers_tower
from fedvlp.models.tiny import HashTokenizer

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "no", "left", "pleural", "effusion", "##s"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A local BERT of two layers, width 32, with weights (with a pooler) and a ten-word vocabulary."""
    return local_bert(tmp_path, WORDS)


@pytest.mark.parametrize(
    ("name", "layers", "parameters"),
    [
        ("bert-base-cased", 6, 65_192_448),  # spec 1.1: "BERT-base" of FedDRA, FedRGB and MGCA
        ("emilyalsentzer/Bio_ClinicalBERT", 6, 65_192_448),
        ("google-bert/bert-base-uncased", 12, 65_192_448 + 6 * 7_087_872 + (30_522 - 28_996) * 768),
        ("bert-base-cased", None, 65_192_448 + 6 * 7_087_872),
    ],
)
def test_family_parameters_without_network(name: str, layers: int | None, parameters: int) -> None:
    with torch.device("meta"), pytest.warns(UserWarning, match="words are hashed"):
        tower = transformers_tower(name, layers, 112, pretrained=False)
    assert sum(p.numel() for p in tower.parameters()) == parameters
    assert isinstance(tower.tokenizer, HashTokenizer)
    assert (tower.width, tower.dropout, tower.tokenizer.max_tokens) == (768, 0.1, 112)
    assert not [n for n, _ in tower.named_parameters() if "pooler" in n or "crossattention" in n]


def test_local_folder_weights_and_tokenizer(folder: Path) -> None:
    from transformers import AutoModel, BertModel

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        tower = transformers_tower(str(folder), 1, 6, pretrained=True).eval()
    source = AutoModel.from_pretrained(folder)
    assert torch.equal(tower.model.embeddings.word_embeddings.weight, source.embeddings.word_embeddings.weight)
    ids, mask = tower.tokenizer(["no left effusions", ""])
    assert ids.tolist() == [[2, 5, 6, 8, 9, 3], [2, 3, 0, 0, 0, 0]]
    assert mask.sum(1).tolist() == [6, 2]
    expected = BertModel.from_pretrained(folder, num_hidden_layers=1).eval()
    torch.testing.assert_close(tower(ids, mask), expected(ids, attention_mask=mask.long()).last_hidden_state)


def test_random_weights_from_a_local_folder(folder: Path) -> None:
    from transformers import AutoModel

    tower = transformers_tower(str(folder), None, 6, pretrained=False)
    source = AutoModel.from_pretrained(folder)
    assert not torch.equal(tower.model.embeddings.word_embeddings.weight, source.embeddings.word_embeddings.weight)
    assert isinstance(tower.tokenizer, TransformersTokenizer)


def test_padding_does_not_change_tokens(folder: Path) -> None:
    tower = transformers_tower(str(folder), None, 12, pretrained=True).eval()
    ids, mask = tower.tokenizer(["no left effusions"])
    torch.testing.assert_close(tower(ids, mask)[:, :6], tower(ids[:, :6], mask[:, :6]), rtol=0, atol=1e-6)


def test_every_parameter_learns(folder: Path) -> None:
    tower = transformers_tower(str(folder), None, 6, pretrained=True)
    tower(*tower.tokenizer(["no left effusions"])).square().sum().backward()
    assert [n for n, p in tower.named_parameters() if p.grad is None] == []


def test_tokenizer_truncates_and_takes_no_text(folder: Path) -> None:
    tokenizer = load_tokenizer(folder, 4)
    ids, mask = tokenizer(["no left pleural effusion", "no", None])  # type: ignore[list-item]
    assert ids.tolist() == [[2, 5, 6, 3], [2, 5, 3, 0], [2, 3, 0, 0]]
    assert mask.sum(1).tolist() == [4, 3, 2]
    assert tokenizer.truncated == 1
    with pytest.raises(TypeError, match="sequence"):
        tokenizer("no")


def test_a_tokenizer_says_all_that_its_ids_depend_on(folder: Path, tmp_path: Path) -> None:
    """What is kept of one tokenizer must not be read for another."""
    other = local_bert(tmp_path / "other", [*WORDS[:5], "left", "no", *WORDS[7:]])
    said = {load_tokenizer(at, length).identity() for at, length in ((folder, 4), (folder, 5), (other, 4))}
    assert len(said) == 3
    assert load_tokenizer(folder, 4).identity() in said


def test_another_family_and_rebuilding(tmp_path: Path) -> None:
    from transformers import DistilBertConfig

    DistilBertConfig(vocab_size=50, dim=32, n_layers=3, n_heads=2, hidden_dim=64).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="hashed into 50 ids"):
        tower = transformers_tower(str(tmp_path), 2, 8, pretrained=False)
    ids, mask = tower.tokenizer(["no left effusion"])
    assert tower(ids, mask).shape == (1, 8, 32)
    again = rebuild_tower(tower.architecture(), 8, None)
    again.load_state_dict(tower.state_dict())
    assert torch.equal(again.eval()(ids, mask), tower.eval()(ids, mask))
    assert str(tmp_path) not in str(tower.architecture())
    with pytest.raises(ValueError, match="vocabulary files are missing"):
        load_tokenizer(tmp_path, 8)


def test_refusals(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="text_layers 3"):
        transformers_tower(str(folder), 3, 6, pretrained=False)
    with pytest.raises(ValueError, match="max_tokens 600"):
        transformers_tower(str(folder), 1, 600, pretrained=False)
    with pytest.raises(ValueError, match="cannot build it"):
        rebuild_tower({"model_type": "no_such_model"}, 6, None)
    (folder / "model.safetensors").unlink()
    with pytest.raises(RuntimeError, match=r"weights not loaded.*local folder"):
        transformers_tower(str(folder), 1, 6, pretrained=True)

    def unreachable(*args: object, **kwargs: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", unreachable)
    for name, pretrained in (("someone/unknown", False), ("bert-base-cased", True)):
        with pytest.raises(RuntimeError, match=r"no configuration found \(OSError\).*local folder.*bert-base-cased"):
            transformers_tower(name, 6, 64, pretrained)
