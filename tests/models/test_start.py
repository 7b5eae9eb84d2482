"""Models of other libraries to start from: each written by its own library, tiny and random, with equal vectors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.starts import MEAN, SIZE, STD, TEXTS, TINY, VISION, films, pair, processor, words
from torch import Tensor

from fedvlp.models.load import load_model
from fedvlp.models.other_libraries import StartError, as_model, read


def close(seen: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(seen, torch.nn.functional.normalize(expected, dim=-1), rtol=1e-5, atol=1e-5)


def tokens(folder: Path, kind: str) -> Any:
    from transformers import AutoTokenizer

    padding = "max_length" if kind == "siglip" else True
    seen = AutoTokenizer.from_pretrained(folder)(TEXTS, padding=padding, truncation=True, return_tensors="pt")
    seen.pop("token_type_ids", None)
    if kind == "siglip":
        seen.pop("attention_mask")
    return seen


def again(start: Any, folder: Path) -> Any:
    """The model as it is after it was written and read."""
    as_model(start).save(folder)
    return load_model(folder)


@pytest.mark.parametrize("kind", ["clip", "siglip"])
@torch.no_grad()
def test_a_pair_of_transformers_gives_its_own_vectors_and_temperature(tmp_path: Path, kind: str) -> None:
    theirs = pair(tmp_path, kind)
    start = read(tmp_path)
    model = again(start, tmp_path / "own")
    ours, seen = films()
    out = theirs(pixel_values=seen, **tokens(tmp_path, kind))
    image, text = model.encode_image(ours), model.encode_text(TEXTS)
    close(image, out.image_embeds)
    close(text, out.text_embeds)
    logits = image @ text.T / start.said["temperature"] + start.said.get("logit_bias", 0)
    torch.testing.assert_close(logits, out.logits_per_image, rtol=1e-4, atol=1e-4)
    assert model.config.max_tokens == 16
    assert model.image_encoder.architecture()["mean"] == MEAN


IMAGES: dict[str, dict[str, Any]] = {
    "ViT": VISION,
    "Dinov2": {k: v for k, v in VISION.items() if k != "intermediate_size"},
    "Dinov2WithRegisters": {k: v for k, v in VISION.items() if k != "intermediate_size"},
    "Swin": {
        "image_size": SIZE,
        "patch_size": 4,
        "embed_dim": 16,
        "depths": [1, 1],
        "num_heads": [2, 2],
        "window_size": 4,
    },
    "ConvNext": {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]},
}


@pytest.mark.parametrize("kind", IMAGES)
@torch.no_grad()
def test_an_image_tower_of_transformers(tmp_path: Path, kind: str) -> None:
    """Its feature is the pooler's, of a ViT the class token (its pooler is for another task)."""
    import transformers as hf

    torch.manual_seed(0)
    theirs = getattr(hf, f"{kind}Model")(getattr(hf, f"{kind}Config")(**IMAGES[kind])).eval()
    theirs.save_pretrained(tmp_path)
    processor(tmp_path, size={"shortest_edge": 36}, crop_size={"height": SIZE, "width": SIZE}, do_center_crop=True)
    model = again(read(tmp_path), tmp_path / "own")
    ours, seen = films()
    out = theirs(pixel_values=seen)
    expected = out.last_hidden_state[:, 0] if kind == "ViT" else out.pooler_output.flatten(1)
    tokens = model.image_encoder(ours)
    torch.testing.assert_close(tokens[:, 0], expected, rtol=1e-5, atol=1e-5)
    assert tokens.shape[1] == 1 + {"Swin": 16, "ConvNext": 1}.get(kind, 16 if kind == "ViT" else (SIZE // 8) ** 2)
    assert model.image_encoder.maps(ours)[0].shape[0] == 20


@pytest.mark.parametrize("kind", ["Bert", "Roberta", "cxr-bert"])
@pytest.mark.parametrize("pickled", [False, True])
@torch.no_grad()
def test_a_text_tower_of_transformers(tmp_path: Path, kind: str, pickled: bool) -> None:
    """Of CXR-BERT the BERT: its own code, which its config.json names, is not run."""
    import transformers as hf

    torch.manual_seed(0)
    name = "Roberta" if kind == "Roberta" else "Bert"
    more = {"pad_token_id": 0, "vocab_size": words(tmp_path, "bert", 512), "max_position_embeddings": 20}
    theirs = getattr(hf, f"{name}ForMaskedLM")(getattr(hf, f"{name}Config")(**TINY, **more)).eval()
    theirs.save_pretrained(tmp_path)
    if pickled:
        (tmp_path / "model.safetensors").unlink()
        torch.save(theirs.state_dict(), tmp_path / "pytorch_model.bin")
    if kind == "cxr-bert":
        said = json.loads((tmp_path / "config.json").read_text())
        said |= {"model_type": kind, "auto_map": {"AutoModel": "modeling.CXRBertModel"}, "projection_size": 128}
        (tmp_path / "config.json").write_text(json.dumps(said))
    model = again(read(tmp_path), tmp_path / "own")
    assert model.config.max_tokens == (19 if kind == "Roberta" else 20)
    ids, mask = model.tokenizer(TEXTS)
    expected = theirs.base_model(input_ids=ids, attention_mask=mask.long()).last_hidden_state
    torch.testing.assert_close(model.text_encoder(ids, mask)[mask], expected[mask], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "channels"), [("vit_tiny_patch16_224", 3), ("resnet10t", 3), ("resnet10t", 1)])
@torch.no_grad()
def test_an_image_tower_of_timm(tmp_path: Path, name: str, channels: int) -> None:
    import timm

    args = {"img_size": SIZE} if name.startswith("vit") else {}
    theirs = timm.create_model(name, in_chans=channels, **args).eval()
    said = {"input_size": (channels, SIZE, SIZE), "mean": MEAN[:channels], "std": STD[:channels]}
    theirs.pretrained_cfg = {**theirs.pretrained_cfg, **said}
    timm.models.save_for_hf(theirs, tmp_path, model_args={"in_chans": channels, **args})
    model = again(read(tmp_path), tmp_path / "own")
    ours, seen = films(channels)
    expected = theirs.forward_head(theirs.forward_features(seen), pre_logits=True)
    torch.testing.assert_close(model.image_encoder(ours)[:, 0], expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_densenet_of_torchxrayvision(tmp_path: Path) -> None:
    """Its names are torchvision's; it sees one channel in -1024..1024, and its feature is the mean after a ReLU."""
    import torchvision

    torch.manual_seed(0)
    theirs = torchvision.models.densenet121(num_classes=18).eval()
    theirs.features.conv0 = torch.nn.Conv2d(1, 64, 7, 2, 3, bias=False)
    torch.save({**theirs.state_dict(), "op_threshs": torch.zeros(18)}, tmp_path / "nih.pt")
    model = again(read(tmp_path / "nih.pt"), tmp_path / "own")
    grey = torch.rand(2, 1, 224, 224)
    expected = theirs.features((2 * grey - 1) * 1024).relu().mean(dim=(2, 3))
    seen = model.image_encoder((grey - 0.5) / 0.5)[:, 0]
    torch.testing.assert_close(seen, expected, rtol=1e-5, atol=1e-5 * float(expected.max()))


@pytest.mark.parametrize(("pooler", "projection"), [("cls_last_hidden_state_pooler", "mlp"), ("mean_pooler", "linear")])
@torch.no_grad()
def test_a_pair_of_open_clip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pooler: str, projection: str) -> None:
    """As BiomedCLIP: a timm tower with a linear projection, BERT with one of two layers and without a config.json."""
    import open_clip
    import transformers as hf

    torch.manual_seed(0)
    count = words(tmp_path, "bert", 16)
    bert = hf.BertConfig(
        vocab_size=count, hidden_size=64, num_hidden_layers=2, num_attention_heads=1, intermediate_size=48,
        max_position_embeddings=16,
    )  # fmt: skip
    bert.save_pretrained(tmp_path)
    text = {"hf_model_name": str(tmp_path), "hf_tokenizer_name": str(tmp_path), "hf_model_pretrained": False}
    config = {
        "embed_dim": 24,
        "vision_cfg": {"timm_model_name": "vit_tiny_patch16_224", "timm_pool": "token", "timm_proj": "linear"},
        "text_cfg": {**text, "hf_pooler_type": pooler, "hf_proj_type": projection, "context_length": 16},
    }
    config["vision_cfg"]["image_size"] = 224  # type: ignore[index]
    theirs = open_clip.CustomTextCLIP(**config).eval()
    theirs.logit_scale.fill_(3.0)
    said = {"model_cfg": config, "preprocess_cfg": {"mean": MEAN, "std": STD}}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(said))
    torch.save(theirs.state_dict(), tmp_path / "open_clip_pytorch_model.bin")
    (tmp_path / "config.json").unlink()
    start = read(tmp_path)
    model = again(start, tmp_path / "own")
    grey = torch.rand(2, 1, 224, 224)
    mean, std = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))
    close(model.encode_image((grey - 0.5) / 0.5), theirs.encode_image((grey - mean) / std))
    ids, _ = model.tokenizer(TEXTS)
    close(model.encode_text(TEXTS), theirs.encode_text(ids))
    assert start.said["temperature"] == pytest.approx(torch.tensor(-3.0).exp().item())


@pytest.mark.parametrize("quick", [False, True])
@torch.no_grad()
def test_a_pair_of_open_clips_own_towers(tmp_path: Path, quick: bool) -> None:
    """As CLIP's ViTs: both towers are transformers' CLIP under other names."""
    import open_clip

    torch.manual_seed(0)
    count = words(tmp_path, "clip", 16)
    config = {
        "embed_dim": 24,
        "quick_gelu": quick,
        "vision_cfg": {"image_size": SIZE, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8},
        "text_cfg": {"context_length": 16, "vocab_size": count, "width": 32, "heads": 2, "layers": 2},
    }
    theirs = open_clip.CLIP(**config).eval()  # type: ignore[arg-type]
    said = {"model_cfg": config, "preprocess_cfg": {"mean": MEAN, "std": STD}}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(said))
    torch.save(theirs.state_dict(), tmp_path / "open_clip_pytorch_model.bin")
    model = again(read(tmp_path), tmp_path / "own")
    ours, seen = films()
    close(model.encode_image(ours), theirs.encode_image(seen))
    ids, _ = model.tokenizer(TEXTS)
    theirs.text_pool_type, theirs.text_eos_id = "eos", 0  # it takes the greatest id, which ends CLIP's texts, not these
    close(model.encode_text(TEXTS), theirs.encode_text(ids))


class Code:
    """What unpickling would run."""

    def __reduce__(self) -> Any:
        return (Path.touch, (Path("ran"),))


def config(folder: Path, **said: Any) -> None:
    (folder / "config.json").write_text(json.dumps(said))


def unlinked(*names: str) -> Any:
    """A pair of CLIP without some of its files."""

    def write(folder: Path) -> None:
        pair(folder, "clip")
        for name in names:
            (folder / name).unlink()

    return write


def pair_but(name: str, content: Any = None, **changes: Any) -> Any:
    """A pair of CLIP of which a file is another: has this content, or in its JSON these values."""

    def write(folder: Path) -> None:
        pair(folder, "clip")
        file = folder / name
        before = file.read_bytes()
        file.write_bytes(content(before) if content else json.dumps({**json.loads(before), **changes}).encode())

    return write


def tensors_but(change: Any) -> Any:
    """A pair of CLIP whose tensors are changed."""

    def write(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        pair(folder, "clip")
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return write


def lfs(_: bytes) -> bytes:
    return b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 598635032\n"


def page(_: bytes) -> bytes:
    return b"\n<!DOCTYPE html><html><title>404</title></html>"


def text_config(**changes: Any) -> Any:
    """A pair whose config.json says other things of its text tower than its weights."""

    def content(before: bytes) -> bytes:
        said = json.loads(before)
        said["text_config"] |= changes
        return json.dumps(said).encode()

    return pair_but("config.json", content)


def in_parts(folder: Path, seed: int = 0) -> Any:
    model = pair(folder, "clip", seed)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="20KB")
    return model


def part_missing(folder: Path) -> None:
    in_parts(folder)
    (folder / "model-00002-of-00009.safetensors").unlink()


def linked(folder: Path) -> None:
    pair(folder, "clip")
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("../../blobs/0123")


def two_models(folder: Path) -> None:
    for name in ("a", "b"):
        (folder / name).mkdir()
        config(folder / name, model_type="bert")


def timm_with(**args: Any) -> Any:
    def write(folder: Path) -> None:
        import timm

        timm.models.save_for_hf(timm.create_model("resnet10t"), folder, model_args=args)

    return write


def siglip2(folder: Path) -> None:
    """Its image tower is given patches, however many an image has, and no image."""
    import transformers as hf

    hf.Siglip2VisionModel(hf.Siglip2VisionConfig(**TINY, num_patches=16, patch_size=8)).save_pretrained(folder)
    processor(folder)


def pickled(folder: Path) -> None:
    unlinked("model.safetensors")(folder)
    torch.save({"weight": Code()}, folder / "pytorch_model.bin")


def open_clip_own(folder: Path) -> None:
    said = {
        "model_cfg": {
            "embed_dim": 8,
            "vision_cfg": {"layers": [2, 2], "attentional_pool": True},
            "text_cfg": {"layers": 2},
        }
    }
    (folder / "open_clip_config.json").write_text(json.dumps(said))


WRONG: dict[str, tuple[Any, str]] = {
    "empty": (lambda folder: None, "it is an empty folder, without config.json; give an open_clip folder"),
    "weights alone": (unlinked("config.json", "tokenizer.json"), "it is a folder of weights, without config.json"),
    "no weights": (unlinked("model.safetensors"), "its weights are missing; expected model.safetensors or pytorch"),
    "no tokenizer": (
        unlinked("tokenizer.json", "tokenizer_config.json"),
        "tokenizer are missing or damaged: seen none, expected",
    ),
    "no processor": (unlinked("preprocessor_config.json"), "preprocessor_config.json is missing, which says the size"),
    "no statistics": (
        pair_but("preprocessor_config.json", lambda _: b'{"size": 32}'),
        "image_mean or image_std is missing in preprocessor_config.json",
    ),
    "no numbers": (
        pair_but("preprocessor_config.json", image_std="x"),
        r"and std 'x' of its images; expected 3 numbers",
    ),
    "std of 0": (pair_but("preprocessor_config.json", image_std=[0, 0, 0]), r"std \[0, 0, 0\] of its images; expected"),
    "two channels": (pair_but("preprocessor_config.json", image_mean=[0.5, 0.5]), r"mean \[0.5, 0.5\] and std"),
    "no square": (
        pair_but("preprocessor_config.json", size={"height": 32, "width": 64}),
        "says images of .* read are squares",
    ),
    "damaged": (
        pair_but("model.safetensors", lambda c: c[:5000]),
        r"model.safetensors is cut short or damaged, or .*Safet",
    ),
    "emptied": (pair_but("model.safetensors", lambda c: b""), "model.safetensors is cut short or damaged"),
    "partial": (
        tensors_but(lambda t: t.pop("visual_projection.weight")),
        r"1 tensors of a clip are missing in its weights \(e.g. visual_projection.weight\)",
    ),
    "not finite": (
        tensors_but(lambda t: t["visual_projection.weight"].fill_(torch.nan)),
        "vectors that are not finite",
    ),
    "LFS weights": (pair_but("model.safetensors", lfs), "model.safetensors is a pointer of Git LFS .* `git lfs pull`"),
    "LFS words": (pair_but("tokenizer.json", lfs), "tokenizer.json is a pointer of Git LFS"),
    "LFS config": (pair_but("config.json", lfs), "config.json is a pointer of Git LFS"),
    "page as config": (
        pair_but("config.json", page),
        "config.json is a web page in place of the file; download it again",
    ),
    "page as weights": (pair_but("model.safetensors", page), "model.safetensors is a web page"),
    "page as processor": (pair_but("preprocessor_config.json", page), "preprocessor_config.json is a web page"),
    "half a config": (pair_but("config.json", lambda c: c[:50]), "config.json cannot be read"),
    "link": (linked, "config.json is a link to a file that is not here; copy the folder again by `cp -rL`"),
    "part missing": (
        part_missing,
        r"1 of the 9 shards that model.safetensors.index.json names are missing \(model-00002",
    ),
    "two models": (two_models, "there are 2 models in it; give one: a, b"),
    "fewer words": (text_config(vocab_size=9), "its tokenizer has 17 words, and its text tower 9"),
    "more words": (
        text_config(vocab_size=99),
        r"does not fit config.json: 1 tensors .* \[17, 32\], expected \[99, 32\]",
    ),
    "projection": (
        pair_but("config.json", projection_dim=9),
        r"2 tensors have another shape \(e.g. text_projection.weight \[24, 32\], expected \[9, 32\]\); give both files",
    ),
    "values of others": (text_config(hidden_size="wide"), "its config.json is no clip's"),
    "SigLIP 2": (siglip2, "cannot be run on an image of 32 x 32 pixels and a text"),
    "unknown argument": (timm_with(nonsense=1), "the installed library cannot build what its configuration says"),
    "code in weights": (pickled, "pytorch_model.bin is cut short or damaged, or holds more than tensors"),
    "code of its own": (
        lambda f: config(f, model_type="biovil", auto_map={"AutoModel": "m.M"}),
        "code of its own, which",
    ),
    "unknown": (lambda f: config(f, model_type="biovil"), "model_type 'biovil' is not known by the installed"),
    "language model": (lambda f: config(f, model_type="gpt2"), "it is a gpt2, which is neither an image tower nor"),
    "other pair": (lambda f: config(f, model_type="blip"), "it is a blip of several parts; of pairs, CLIP and SigLIP"),
    "other json": (
        lambda f: config(f, name="x"),
        r"names neither model_type \(transformers\) nor architecture \(timm\)",
    ),
    "adapters": (lambda f: (f / "adapter_config.json").touch(), r"adapters \(PEFT\), which are no model"),
    "ONNX": (lambda f: (f / "m.onnx").touch(), "an ONNX model, which is not read"),
    "unknown timm": (
        lambda f: config(f, architecture="vit_x", pretrained_cfg={"input_size": [3, 32, 32], "mean": MEAN, "std": STD}),
        "has no model 'vit_x'",
    ),
    "timm without size": (lambda f: config(f, architecture="resnet10t"), "has no input_size in pretrained_cfg"),
    "timm without std": (
        lambda f: config(f, architecture="resnet10t", pretrained_cfg={"input_size": [3, 32, 32], "mean": MEAN}),
        "std missing in pretrained_cfg",
    ),
    "open_clip's own towers": (open_clip_own, "an open_clip model with towers that are not read"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_folder_is_told_what_it_is_and_what_is_missing(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """No text names a folder of this machine, nor does what the other library prints."""
    monkeypatch.chdir(tmp_path)
    write, sentence = WRONG[kind]
    folder = tmp_path / "given"
    folder.mkdir()
    write(folder)
    with pytest.raises(StartError, match=sentence) as refused:
        as_model(read(folder))
    assert str(tmp_path) not in str(refused.value) + "".join(capfd.readouterr())
    assert not Path("ran").exists()


def test_a_wrong_file_is_told_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchxrayvision publishes whole pickled models: code, which is not run."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StartError, match="there is no such folder or file"):
        read(tmp_path / "gone")
    torch.save(Code(), "code.pt")
    with pytest.raises(StartError, match=r"holds more than tensors .*torch.save\(model.state_dict\(\), FILE\)"):
        read(tmp_path / "code.pt")
    torch.save({"layer.weight": torch.zeros(2)}, "other.pt")
    with pytest.raises(StartError, match="its tensors are no DenseNet's of torchxrayvision"):
        read(tmp_path / "other.pt")
    Path("model.zip").touch()
    with pytest.raises(StartError, match="it is an archive; unpack it and give the folder in it"):
        read(tmp_path / "model.zip")
    Path("lfs.pt").write_bytes(lfs(b""))
    with pytest.raises(StartError, match="a pointer of Git LFS"):
        read(tmp_path / "lfs.pt")
    Path("notes.txt").touch()
    with pytest.raises(StartError, match="it is no file of weights"):
        read(tmp_path / "notes.txt")
    assert not Path("ran").exists()


def test_what_may_not_be_read_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As root reads whatever there is, the refusal is pretended."""
    pair(tmp_path, "clip")
    opened = Path.open

    def refused(file: Path, *args: Any, **more: Any) -> Any:
        if file.name == "model.safetensors":
            raise PermissionError(13, "Permission denied")
        return opened(file, *args, **more)

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(StartError, match=r"model.safetensors cannot be read \(Permission denied\); allow this account"):
        read(tmp_path)


@pytest.mark.parametrize("how", ["cache", "inner", "float16", "bfloat16", "parts"])
@torch.no_grad()
def test_folders_as_downloads_leave_them(tmp_path: Path, how: str) -> None:
    """A cache of Hugging Face, whose files are links; a folder in a folder; weights of half size; weights in parts."""
    from safetensors.torch import load_file, save_file

    folder, files = tmp_path / "given", tmp_path / "files"
    files.mkdir()
    theirs = in_parts(files) if how == "parts" else pair(files, "clip")
    if "float" in how:
        tensors = load_file(files / "model.safetensors")
        halves = {name: tensor.to(getattr(torch, how)) for name, tensor in tensors.items()}
        save_file(halves, files / "model.safetensors", {"format": "pt"})
    if how == "cache":
        snapshot = folder / "snapshots" / "0123abcd"
        snapshot.mkdir(parents=True)
        for file in files.iterdir():
            (snapshot / file.name).symlink_to(file)
    elif how == "inner":
        folder.mkdir()
        files.rename(folder / "model")
    else:
        files.rename(folder)
    ours, seen = films()
    vectors = as_model(read(folder)).encode_image(ours)
    expected = torch.nn.functional.normalize(theirs.get_image_features(pixel_values=seen).pooler_output, dim=1)
    rough = {"float16": 1e-3, "bfloat16": 1e-2}.get(how, 1e-5)
    torch.testing.assert_close(vectors, expected, rtol=rough, atol=rough)
