"""Tiny random models of other libraries, each written by its own library."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
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
    """What a folder says of its images; ``do_normalize=False`` stands beside a mean and std that do not count."""
    said = {"do_normalize": True, "image_mean": MEAN, "image_std": STD, "size": {"height": SIZE, "width": SIZE}}
    (folder / "preprocessor_config.json").write_text(json.dumps({**said, **more}))


REAL = Path(__file__).parents[2].parent / "shared" / "data" / "real-cxr" / "images"
"""Real X-rays, where they are."""


def grey(size: int = SIZE, count: int = 20) -> Tensor:
    """Images [N, 1, S, S] in 0..1: real X-rays where they are, else random ones."""
    if not REAL.is_dir():
        return torch.rand(count, 1, size, size, generator=torch.Generator().manual_seed(0))
    from PIL import Image

    files = sorted(REAL.iterdir())[:count]
    read = [np.asarray(Image.open(file).convert("L").resize((size, size)), dtype=np.float32) / 255 for file in files]
    return torch.from_numpy(np.stack(read))[:, None]


def films(size: int = SIZE, channels: int = 3) -> tuple[Tensor, Tensor]:
    """20 images as fedvlp prepares them, and as the other library sees them."""
    images = grey(size)
    return (images - 0.5) / 0.5, seen(images, channels)


def seen(images: Tensor, channels: int = 3) -> Tensor:
    """Grey images as a library with ``MEAN`` and ``STD`` sees them."""
    mean, std = (torch.tensor(values[:channels])[:, None, None] for values in (MEAN, STD))
    return (images - mean) / std


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


@dataclass
class Written:
    """A tiny random model as its own library wrote it, and what that library makes of images and of texts.

    Args:
        image: of grey images [N, 1, S, S] in 0..1, a pair's vectors or a tower's features.
        text: of ids and mask [N, T], the same; a tower's features are of each token.
        said: temperature and logit_bias of a pair.
    """

    path: Path
    image: Callable[[Tensor], Tensor] | None = None
    text: Callable[[Tensor, Tensor], Tensor] | None = None
    said: dict[str, float] = field(default_factory=dict)
    size: int = SIZE


def _hf_pair(kind: str, **of_text: Any) -> Callable[[Path], Written]:
    def write(folder: Path) -> Written:
        theirs = pair(folder, kind)
        file = folder / "config.json"
        _also(file, text_config=json.loads(file.read_text())["text_config"] | of_text)

        def text(ids: Tensor, mask: Tensor) -> Tensor:
            more = {} if kind == "siglip" else {"attention_mask": mask.long()}
            return theirs.get_text_features(input_ids=ids, **more).pooler_output  # type: ignore[no-any-return]

        said = {"temperature": float(torch.exp(-theirs.logit_scale.detach()))}
        if kind == "siglip":
            said["logit_bias"] = float(theirs.logit_bias.detach())
        return Written(folder, lambda x: theirs.get_image_features(pixel_values=seen(x)).pooler_output, text, said)

    return write


def _hf_image(kind: str, read_as: str = "", normalised: bool = True, **config: Any) -> Callable[[Path], Written]:
    """``read_as``: the kind whose vectors are expected, where its own model sees no whole image."""

    def write(folder: Path) -> Written:
        import transformers as hf

        torch.manual_seed(0)
        theirs = getattr(hf, f"{kind}Model")(getattr(hf, f"{kind}Config")(**config)).eval()
        theirs.save_pretrained(folder)
        crop = {"height": SIZE, "width": SIZE}
        processor(folder, size={"shortest_edge": 36}, crop_size=crop, do_center_crop=True, do_normalize=normalised)
        reader = theirs
        if read_as:
            reader = getattr(hf, f"{read_as}Model").from_pretrained(folder, add_pooling_layer=False).eval()

        def image(x: Tensor) -> Tensor:
            out = reader(pixel_values=seen(x) if normalised else x.expand(-1, 3, -1, -1))
            first = kind in ("ViT", "ViTMAE")  # the pooler of a ViT is for another task
            return out.last_hidden_state[:, 0] if first else out.pooler_output.flatten(1)  # type: ignore[no-any-return]

        return Written(folder, image)

    return write


def _hf_text(kind: str, pickled: bool = False, decodes: bool = False, mean: bool = False) -> Callable[[Path], Written]:
    """Of CXR-BERT the BERT: its own code, which its files name, is not run.

    ``decodes``: its configuration says that it sees what stands before a word alone; as a tower it sees all of a text.
    ``mean``: sentence-transformers' file beside it says that the feature of a text is the mean of its tokens.
    """

    def write(folder: Path) -> Written:
        import transformers as hf

        torch.manual_seed(0)
        name = "Roberta" if kind == "Roberta" else "Bert"
        more = {"pad_token_id": 0, "vocab_size": words(folder, "bert", 512), "max_position_embeddings": 20}
        theirs = getattr(hf, f"{name}ForMaskedLM")(getattr(hf, f"{name}Config")(**TINY, **more)).eval()
        theirs.save_pretrained(folder)
        if pickled:
            (folder / "model.safetensors").unlink()
            torch.save(theirs.state_dict(), folder / "pytorch_model.bin")
        if kind == "cxr-bert":
            _also(
                folder / "config.json", model_type=kind, auto_map={"AutoModel": "m.CXRBertModel"}, projection_size=128
            )
            _also(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["m.CXRBertTokenizer", None]})
        if decodes:
            _also(folder / "config.json", is_decoder=True)
        if mean:
            (folder / "1_Pooling").mkdir()
            (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
        base = theirs.base_model
        return Written(folder, text=lambda i, m: base(input_ids=i, attention_mask=m.long()).last_hidden_state)

    return write


def _also(file: Path, **more: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | more))


def _timm(name: str, channels: int, **args: Any) -> Callable[[Path], Written]:
    def write(folder: Path) -> Written:
        import timm

        torch.manual_seed(0)
        theirs = timm.create_model(name, in_chans=channels, **args).eval()
        said = {"input_size": (channels, SIZE, SIZE), "mean": MEAN[:channels], "std": STD[:channels]}
        theirs.pretrained_cfg = {**theirs.pretrained_cfg, **said}
        timm.models.save_for_hf(theirs, folder, model_args={"in_chans": channels, **args})

        def image(x: Tensor) -> Tensor:
            return theirs.forward_head(theirs.forward_features(seen(x, channels)), pre_logits=True)  # type: ignore[no-any-return]

        return Written(folder, image)

    return write


def _xrayvision(folder: Path) -> Written:
    """Its names are torchvision's; it sees one channel in -1024..1024, and its feature is the mean after a ReLU."""
    import torchvision

    torch.manual_seed(0)
    theirs = torchvision.models.densenet121(num_classes=18).eval()
    theirs.features.conv0 = torch.nn.Conv2d(1, 64, 7, 2, 3, bias=False)
    torch.save({**theirs.state_dict(), "op_threshs": torch.zeros(18)}, folder / "nih.pt")
    return Written(folder / "nih.pt", lambda x: theirs.features((2 * x - 1) * 1024).relu().mean(dim=(2, 3)), size=224)


def _biomedclip(pooler: str, projection: str) -> Callable[[Path], Written]:
    """A timm tower with a linear projection, BERT with one of two layers and without a config.json."""

    def write(folder: Path) -> Written:
        import open_clip
        import transformers as hf

        torch.manual_seed(0)
        more = {"vocab_size": words(folder, "bert", 16), "max_position_embeddings": 16}
        hf.BertConfig(**{**TINY, **more, "hidden_size": 64, "num_attention_heads": 1}).save_pretrained(folder)
        text = {"hf_model_name": str(folder), "hf_tokenizer_name": str(folder), "hf_model_pretrained": False}
        image = {"timm_model_name": "vit_tiny_patch16_224", "timm_pool": "token", "timm_proj": "linear"}
        return _open_clip(
            folder,
            open_clip.CustomTextCLIP,
            {
                "embed_dim": 24,
                "vision_cfg": {**image, "image_size": 224},
                "text_cfg": {**text, "hf_pooler_type": pooler, "hf_proj_type": projection, "context_length": 16},
            },
            224,
        )

    return write


def _clip_of_open_clip(quick: bool) -> Callable[[Path], Written]:
    """As CLIP's ViTs: both towers are transformers' CLIP under other names."""

    def write(folder: Path) -> Written:
        import open_clip

        torch.manual_seed(0)
        text = {"context_length": 16, "vocab_size": words(folder, "clip", 16), "width": 32, "heads": 2, "layers": 2}
        vision = {"image_size": SIZE, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8}
        config = {"embed_dim": 24, "quick_gelu": quick, "vision_cfg": vision, "text_cfg": text}
        written = _open_clip(folder, open_clip.CLIP, config, SIZE)
        return written

    return write


def _open_clip(folder: Path, kind: Any, config: dict[str, Any], size: int) -> Written:
    theirs = kind(**config).eval()
    theirs.logit_scale.data.fill_(3.0)
    if hasattr(theirs, "text_pool_type"):  # it takes the greatest id, which ends CLIP's texts, not these
        theirs.text_pool_type, theirs.text_eos_id = "eos", 0
    said = {"model_cfg": config, "preprocess_cfg": {"mean": MEAN, "std": STD}}
    (folder / "open_clip_config.json").write_text(json.dumps(said))
    torch.save(theirs.state_dict(), folder / "open_clip_pytorch_model.bin")
    (folder / "config.json").unlink(missing_ok=True)
    temperature = {"temperature": float(np.exp(-3.0))}
    return Written(
        folder, lambda x: theirs.encode_image(seen(x)), lambda ids, _: theirs.encode_text(ids), temperature, size
    )


_DINO = {key: value for key, value in VISION.items() if key != "intermediate_size"}
_SWIN = {"image_size": SIZE, "patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}
_CONVNEXT = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}

FAMILIES: dict[str, Callable[[Path], Written]] = {
    "CLIP": _hf_pair("clip"),
    "SigLIP": _hf_pair("siglip"),
    "SigLIP 2 of one size": _hf_pair("siglip", pad_token_id=1),  # another id than its tokenizer pads with
    "ViT": _hf_image("ViT", **VISION),
    "ViT-MAE": _hf_image("ViTMAE", "ViT", **VISION),
    "ViT, images as they are": _hf_image("ViT", normalised=False, **VISION),
    "DINOv2": _hf_image("Dinov2", **_DINO),
    "DINOv2 with registers": _hf_image("Dinov2WithRegisters", **_DINO),
    "DINOv3": _hf_image("DINOv3ViT", **VISION, num_register_tokens=2),
    "DINOv3 ConvNeXt": _hf_image("DINOv3ConvNext", **_CONVNEXT, image_size=SIZE),
    "BEiT": _hf_image("Beit", **VISION),
    "Swin": _hf_image("Swin", **_SWIN),
    "Swin v2": _hf_image("Swinv2", **_SWIN),
    "ConvNeXt": _hf_image("ConvNext", **_CONVNEXT),
    "BERT": _hf_text("Bert"),
    "BERT, pickled": _hf_text("Bert", pickled=True),
    "BERT that decodes": _hf_text("Bert", decodes=True),
    "BERT of sentence-transformers": _hf_text("Bert", mean=True),
    "RoBERTa": _hf_text("Roberta"),
    "CXR-BERT": _hf_text("cxr-bert"),
    "ViT of timm": _timm("vit_tiny_patch16_224", 3, img_size=SIZE),
    "ResNet of timm": _timm("resnet10t", 3),
    "ResNet of timm, one channel": _timm("resnet10t", 1),
    "torchxrayvision": _xrayvision,
    "BiomedCLIP": _biomedclip("cls_last_hidden_state_pooler", "mlp"),
    "BiomedCLIP, mean": _biomedclip("mean_pooler", "linear"),
    "open_clip": _clip_of_open_clip(False),
    "open_clip, quick": _clip_of_open_clip(True),
}
"""Family -> what writes one of its models into a folder."""


@torch.no_grad()
def assert_same(model: Any, theirs: Written) -> None:
    """A model of fedvlp gives the library's own vectors of 20 images and of texts."""
    images = grey(theirs.size, 20 if theirs.size == SIZE else 2)
    ours = (images - 0.5) / 0.5
    if theirs.image is not None:
        expected = theirs.image(images)
        if theirs.said:
            close(model.encode_image(ours), torch.nn.functional.normalize(expected, dim=-1))
        else:
            close(model.image_encoder(ours)[:, 0], expected)
    if theirs.text is not None:
        ids, mask = model.tokenizer(TEXTS)
        expected = theirs.text(ids, mask)
        if (theirs.path / "1_Pooling").is_dir():
            assert model.config.text_pooling == "mean"
        if theirs.said:
            expected = torch.nn.functional.normalize(expected, dim=-1)
            close(model.encode_text(TEXTS), expected)
            cut = int(mask[:2].sum(1).max())  # as a batch of short reports is
            close(model({"text": ids[:2, :cut], "text_mask": mask[:2, :cut]}).text, expected[:2])
        else:
            close(model.text_encoder(ids, mask)[mask], expected[mask])


def close(ours: Tensor, theirs: Tensor) -> None:
    """Equal to 1e-5, of features that are large to 1e-5 of the greatest."""
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * max(1.0, float(theirs.abs().max())))
