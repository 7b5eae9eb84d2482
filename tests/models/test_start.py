"""Models of other libraries to start from: each written by its own library, tiny and random, with equal vectors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.starts import FAMILIES, MEAN, STD, TINY, assert_same, films, pair, processor

from fedvlp.models.load import load_model
from fedvlp.models.other_libraries import StartError, as_model, read


@pytest.mark.parametrize("family", FAMILIES)
def test_it_gives_its_librarys_own_vectors(tmp_path: Path, family: str) -> None:
    """After it was written in fedvlp's form and read: images, texts, and what makes logits of a pair's cosines."""
    theirs = FAMILIES[family](tmp_path)
    start = read(theirs.path)
    as_model(start).save(tmp_path / "own")
    model = load_model(tmp_path / "own")
    assert_same(model, theirs)
    assert start.said == pytest.approx(theirs.said)
    assert model.config.image_size == (theirs.size if theirs.image else 64)
    assert model.config.max_tokens == (64 if not theirs.text else 16 if theirs.said else 20 - (family == "RoBERTa"))


PATCHES = {"ViT": 16, "ViT-MAE": 16, "DINOv2 with registers": 16, "DINOv3": 16, "Swin": 16, "ConvNeXt": 1}


@pytest.mark.parametrize("family", PATCHES)
@torch.no_grad()
def test_an_image_tower_of_transformers_gives_its_patches(tmp_path: Path, family: str) -> None:
    """Without the register tokens."""
    tower = read(FAMILIES[family](tmp_path).path).image
    tokens = tower.eval()(films()[0])
    assert tokens.shape[1] == 1 + PATCHES[family]
    assert tower.maps(films()[0])[0].shape[0] == 20


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
