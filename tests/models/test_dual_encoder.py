"""DualEncoder: names, determinism, masks, missing modalities, the papers' counts, and what a saved folder must be."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fedvlp.core.checkpoint import CheckpointError
from fedvlp.core.types import GROUPS, Batch, group
from fedvlp.models.dual_encoder import DualEncoder, ModelConfig, describe, masked_mean
from fedvlp.models.serialization import verify_checksums
from fedvlp.objectives.convirt import ConVIRT

SMALL = ModelConfig(
    image_size=32, max_tokens=12, vocabulary=64, text_layers=1, head_hidden=32, embedding_dim=16, head_norm="layer"
)


def batch_of(rows: int = 4, config: ModelConfig = SMALL, seed: int = 0) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, config.max_tokens - 3, (rows, 1), generator=draw)
    mask = torch.arange(config.max_tokens).expand(rows, -1) < lengths
    ids = torch.randint(2, config.vocabulary, (rows, config.max_tokens), generator=draw)
    images = torch.randn(rows, 1, config.image_size, config.image_size, generator=draw)
    return {"image": images, "text": ids * mask, "text_mask": mask}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[n] is b[n] is None or torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize("head_norm", ["batch", "layer", "none"])
@pytest.mark.parametrize("alignment", [True, False])
def test_names_outputs_and_gradients(head_norm: str, alignment: bool) -> None:
    model = dataclasses.replace(SMALL, head_norm=head_norm, alignment=alignment).build(0)
    prefixes = {f"{m}_{g}" for m in ("image", "text") for g in GROUPS if alignment or g != "alignment"}
    assert {n.partition(".")[0] for n in model.state_dict()} == prefixes
    assert {group(n) for n in model.state_dict()} == {p.rpartition("_")[2] for p in prefixes}
    out = model(batch := batch_of())
    assert out.image is not None
    assert out.text is not None
    assert out.image.shape == out.text.shape == (4, 16)
    torch.testing.assert_close(out.image.norm(dim=-1), torch.ones(4))
    assert out.image_tokens is not None
    assert out.text_tokens is not None
    assert out.image_tokens.shape == (4, 17, 128)
    assert out.text_tokens.shape == (4, 12, 128)
    assert out.text_mask is not None
    assert torch.equal(out.text_mask, batch["text_mask"])
    ConVIRT()(out, batch)["contrastive"].backward()
    idle = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert idle == []


def test_forward_is_project_of_encode() -> None:
    model, batch = SMALL.build(0), batch_of()
    direct, encoded = model(batch), model.encode(batch)
    assert encoded.image is not None
    assert encoded.image.shape == (4, 17, 128)
    for out in (model.project(encoded), model.project(encoded)):
        assert same(vars(direct), vars(out))


@pytest.mark.parametrize("alignment", [True, False])
def test_padding_does_not_change_the_text_embedding(alignment: bool) -> None:
    model = dataclasses.replace(SMALL, alignment=alignment).build(1).eval()
    batch = batch_of()
    short = {"text": batch["text"][:, :9], "text_mask": batch["text_mask"][:, :9]}
    other = torch.where(batch["text_mask"], batch["text"], torch.full_like(batch["text"], 5))
    expected = model(batch).text
    torch.testing.assert_close(model(short).text, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(model({**batch, "text": other}).text, expected, rtol=0, atol=1e-6)


def test_missing_modalities() -> None:
    model, batch = SMALL.build(0), batch_of()
    image_only, text_only, neither = model({"image": batch["image"]}), model({"text": batch["text"]}), model({})
    assert image_only.text is image_only.text_tokens is image_only.text_mask is None
    assert text_only.image is text_only.image_tokens is None
    assert text_only.text_mask is not None
    assert text_only.text_mask.all()
    assert neither.image is neither.text is None
    assert torch.equal(image_only.image, model(batch).image)  # type: ignore[arg-type]


def test_a_report_without_tokens_stays_finite() -> None:
    batch = {"text": torch.zeros(2, 12, dtype=torch.int64), "text_mask": torch.zeros(2, 12, dtype=torch.bool)}
    out = SMALL.build(0)(batch)
    assert out.text is not None
    assert torch.isfinite(out.text).all()
    assert out.text_mask is not None
    assert out.text_mask.sum().item() == 2


def test_build_is_deterministic_and_leaves_the_global_generator() -> None:
    before = torch.get_rng_state()
    first = SMALL.build(3).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    assert same(SMALL.build(3).state_dict(), first)
    assert not same(SMALL.build(4).state_dict(), first)
    without = dataclasses.replace(SMALL, alignment=False).build(3).state_dict()
    assert same(without, {n: t for n, t in first.items() if group(n) != "alignment"})


def test_paper_counts() -> None:
    """Spec 1.1: ViT-B 85,798,656, BERT-6 65,192,448, aligners 7,087,872 each, heads 1,841,280 each."""
    config = ModelConfig("vit_base_patch16_224", "bert-base-cased", 128, 6, 112, 224, head_hidden=2048)
    with torch.device("meta"), pytest.warns(UserWarning, match="words are hashed"):
        model = config.build(0)
    counts = describe(model)
    assert counts == {
        "image_encoder": 85_798_656,
        "text_encoder": 65_192_448,
        "image_alignment": 7_087_872,
        "text_alignment": 7_087_872,
        "image_head": 1_841_280,
        "text_head": 1_841_280,
        "encoder": 150_991_104,
        "alignment": 14_175_744,
        "head": 3_682_560,
        "total": 168_849_408,
    }
    assert counts["alignment"] + counts["head"] == 17_858_304  # "17.8M" in the papers' cost table


def test_batch_norm_head_says_what_to_do_about_one_sample() -> None:
    model = dataclasses.replace(SMALL, head_norm="batch").build(0)
    with pytest.raises(ValueError, match=r"training batch of 1.*head_norm to 'layer'"):
        model(batch_of(1))
    assert torch.isfinite(model.eval()(batch_of(1)).image).all()
    assert torch.isfinite(SMALL.build(0)(batch_of(1)).image).all()


def test_layer_norm_head_does_not_depend_on_the_batch() -> None:
    model, batch = SMALL.build(0), batch_of()
    alone = model({name: value[:1] for name, value in batch.items()})
    torch.testing.assert_close(model(batch).image[:1], alone.image, rtol=0, atol=1e-5)


def test_config_names_the_bad_field() -> None:
    for field, value in [
        ("image_tower", ""),
        ("text_tower", None),
        ("embedding_dim", 0),
        ("max_tokens", 1.5),
        ("image_size", True),
        ("text_layers", 0),
        ("in_channels", -1),
        ("head_norm", "instance"),
        ("alignment", "yes"),
        ("pretrained", True),
    ]:
        with pytest.raises(ValueError, match=rf"ModelConfig\.{field}"):
            ModelConfig(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("head_norm", ["batch", "layer"])
def test_save_and_load_bit_for_bit(tmp_path: Path, head_norm: str) -> None:
    model = dataclasses.replace(SMALL, head_norm=head_norm).build(5)
    model(batch_of())  # moves the running statistics
    model.save(tmp_path / "model")
    again = DualEncoder.from_pretrained(tmp_path / "model")
    assert again.config == model.config
    assert same(again.state_dict(), model.state_dict())
    assert torch.equal(again(batch_of()).image, model.eval()(batch_of()).image)
    assert sorted(p.name for p in (tmp_path / "model").iterdir()) == ["SHA256SUMS", "config.json", "model.safetensors"]
    SMALL.build(6).save(tmp_path / "model")  # over the old one
    assert same(DualEncoder.from_pretrained(tmp_path / "model").state_dict(), SMALL.build(6).state_dict())


def test_saved_folder_stands_alone(tmp_path: Path) -> None:
    """Towers from local folders: the saved model names no path and loads after the sources are gone."""
    from transformers import BertConfig, BertModel

    image, text = tmp_path / "image", tmp_path / "text"
    image.mkdir()
    (image / "config.json").write_text(json.dumps({"architecture": "resnet10t"}))
    settings = BertConfig(
        vocab_size=6, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    )
    BertModel(settings).save_pretrained(text)
    (text / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nno")
    config = ModelConfig(str(image), str(text), max_tokens=6, image_size=32, head_norm="layer", head_hidden=16)
    model = config.build(0).eval()
    model.save(tmp_path / "model")
    for source in (image, text):
        source.rename(source.with_suffix(".gone"))
    again = DualEncoder.from_pretrained(tmp_path / "model")
    assert same(again.state_dict(), model.state_dict())
    ids, mask = again.tokenizer(["no"])
    assert ids.tolist() == [[2, 5, 3, 0, 0, 0]]
    batch = {"image": torch.randn(1, 1, 32, 32), "text": ids, "text_mask": mask}
    assert torch.equal(again(batch).text, model(batch).text)
    for path in (tmp_path / "model").rglob("*.json"):
        assert str(tmp_path) not in path.read_text()


def test_interrupted_save_keeps_the_old_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SMALL.build(0).save(tmp_path)

    def full(*args: object) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(CheckpointError, match="no space"):
            SMALL.build(1).save(tmp_path)
    assert same(DualEncoder.from_pretrained(tmp_path).state_dict(), SMALL.build(0).state_dict())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["SHA256SUMS", "config.json", "model.safetensors"]


def test_the_weights_are_the_last_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose weights are there has finished, so all else of its model must be there as well."""
    order: list[str] = []
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda old, new: (order.append(Path(new).name), replace(old, new)))
    SMALL.build(0).save(tmp_path, more=lambda folder: (folder / "z.txt").write_text("more"))
    assert order == ["SHA256SUMS", "config.json", "z.txt", "model.safetensors"]


@pytest.mark.parametrize("name", ["/dev/zero", "../secret", "link", "folder/link", "pipe", "."])
def test_checksums_make_nothing_be_read_that_is_no_file_of_the_folder(tmp_path: Path, name: str) -> None:
    """A device would be read for ever, a pipe waited for, and 16 digits of another file's hash be shown."""
    model = tmp_path / "model"
    (model / "folder").mkdir(parents=True)
    (tmp_path / "secret").write_text("a word")
    for link in ("link", "folder/link"):
        (model / link).symlink_to(tmp_path / "secret")
    os.mkfifo(model / "pipe")
    (model / "SHA256SUMS").write_text(f"{'0' * 64}  {name}\n")
    with pytest.raises(ValueError, match="is missing or cannot be read; copy the folder again"):
        verify_checksums(model)


@pytest.mark.parametrize("kind", ["a pipe", "a device"])
def test_a_list_of_checksums_that_has_no_end_is_refused(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "SHA256SUMS"
    os.mkfifo(file) if kind == "a pipe" else file.symlink_to("/dev/zero")
    with pytest.raises(ValueError, match="copy the folder again"):
        verify_checksums(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_that_is_not_as_it_was_saved_is_refused(tmp_path: Path, name: str) -> None:
    """One changed bit, or a missing file; without checksums, as older folders are, nothing is compared."""
    SMALL.build(0).save(tmp_path, more=lambda folder: (folder / "README.md").write_text("a card"))
    checked = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=tmp_path, capture_output=True, check=False)
    assert checked.returncode == 0, checked.stderr
    (tmp_path / "README.md").write_text("people may write in it")
    DualEncoder.from_pretrained(tmp_path)
    path = tmp_path / name
    content = path.read_bytes()
    path.write_bytes(content[:-2] + bytes([content[-2] ^ 1]) + content[-1:])
    with pytest.raises(ValueError, match=rf"{name} is not as it was saved: its SHA-256 is .*; copy the folder again"):
        DualEncoder.from_pretrained(tmp_path)
    path.unlink()
    with pytest.raises(ValueError, match=f"{name} is missing or cannot be read; copy the folder again"):
        DualEncoder.from_pretrained(tmp_path)
    path.write_bytes(content)
    (tmp_path / "SHA256SUMS").unlink()
    assert same(DualEncoder.from_pretrained(tmp_path).state_dict(), SMALL.build(0).state_dict())


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    SMALL.build(0).save(tmp_path)
    (tmp_path / "SHA256SUMS").unlink()
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name, *_ = sorted(tensors)
    faults = {
        r"1 unexpected \(image_spy\.weight\)": {**tensors, "image_spy.weight": torch.zeros(1)},
        rf"1 missing \({name}\)": {n: t for n, t in tensors.items() if n != name},
        rf"1 shape \({name}: \[3\] torch\.float32, expected": {**tensors, name: torch.zeros(3)},
        rf"1 shape \({name}: .*torch\.int64, expected": {**tensors, name: tensors[name].long()},
    }
    for message, content in faults.items():
        save_file(content, path)
        with pytest.raises(ValueError, match=message):
            DualEncoder.from_pretrained(tmp_path)


def test_damaged_folders(tmp_path: Path) -> None:
    """As they are found where there are no checksums."""
    SMALL.build(0).save(tmp_path)
    (tmp_path / "SHA256SUMS").unlink()
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="unreadable or damaged weights"):
        DualEncoder.from_pretrained(tmp_path)
    path.unlink()
    with pytest.raises(ValueError, match="unreadable or damaged weights"):
        DualEncoder.from_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**saved, "format": 99}))
    with pytest.raises(ValueError, match="format 99, expected 1"):
        DualEncoder.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**saved, "model": {"depth": 3}}))
    with pytest.raises(ValueError, match="depth"):
        DualEncoder.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"config\.json"):
        DualEncoder.from_pretrained(tmp_path / "nowhere")


def test_a_mean_over_tokens_leaves_the_padding_out() -> None:
    """MedCLIP's pooling: other padding changes nothing, and one real token's mean is the summary itself."""
    model = dataclasses.replace(SMALL, text_pooling="mean").build(0).eval()
    batch = batch_of()
    padded = {**batch, "text": batch["text"] + 5 * ~batch["text_mask"]}
    torch.testing.assert_close(model(padded).text, model(batch).text)
    other = {**batch, "text": batch["text"].flip(1)}
    assert not torch.allclose(model(other).text, model(batch).text)
    tokens = torch.tensor([[[1.0], [3.0], [100.0]], [[2.0], [4.0], [6.0]]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    assert masked_mean(tokens, mask).tolist() == [[2.0], [4.0]]
    alone = {"text": batch["text"][:, :1], "text_mask": batch["text_mask"][:, :1]}
    assert torch.equal(model(alone).text, SMALL.build(0).eval()(alone).text)
    with pytest.raises(ValueError, match="text_pooling: 'max', expected one of summary, mean"):
        dataclasses.replace(SMALL, text_pooling="max")
