"""Models of other libraries to start from, read into fedvlp's own: open_clip, transformers, timm and torchxrayvision.

What a folder or file holds is told by its files and built by the installed libraries; code that lies in it is never
run, and pickled weights are read as tensors alone. A pair keeps its projections, as the model's heads, so its vectors
are those of the library that wrote it. An image or a text tower alone stands beside a tiny tower of random weights.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedvlp.core.json_file import read_json
from fedvlp.core.site_error import SiteError
from fedvlp.core.types import without_prefix
from fedvlp.models.dual_encoder import DualEncoder, ModelConfig
from fedvlp.models.image import TransformersImage, timm_tower, vision_tower
from fedvlp.models.serialization import checked_shapes
from fedvlp.models.text import TransformersTower, bare_model, load_tokenizer, positions_of
from fedvlp.models.tiny import Normalised, TextTower, Tower

CONFIG, OPEN_CLIP = "config.json", "open_clip_config.json"
SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")
PAIRS = {"clip": "CLIP", "siglip": "SigLIP"}
BUILT_AS = {"cxr-bert": "bert", "vit_mae": "vit"}
"""Model types of transformers folders -> those whose tower they have.

CXR-BERT, which is BioViL-T's text too, comes with code of its own; ViT-MAE's model hides most of an image at random.
"""

PLACEHOLDERS = {
    b"version https://git-lfs": "a pointer of Git LFS in place of the file; run `git lfs pull` where it was cloned",
    b"<!doctype": "a web page in place of the file; download it again, signed in where the model asks for it",
}
PLACEHOLDERS |= dict.fromkeys((b"<html", b"<?xml"), PLACEHOLDERS[b"<!doctype"])
"""How files begin that a download left in place of a model's."""

ARCHIVES = (".zip", ".tar", ".gz", ".tgz", ".7z")

KINDS = (
    "an open_clip folder (open_clip_config.json), a transformers folder (config.json with model_type: CLIP, SigLIP, an "
    "image model such as ViT, DINOv2 or Swin, a text model such as BERT), a timm folder (config.json with "
    "architecture), or the state dict of a torchxrayvision DenseNet (.pt)"
)


class StartError(SiteError, ValueError):
    """A folder or file that training cannot start from. Says what it is and what is missing, and holds no path."""

    told = "the model to start from cannot be read"


@dataclass(frozen=True)
class Start:
    """A model of another library: its towers and heads, and what is known of it."""

    family: str  # which library's model it is, for people
    image: Any = None  # a Tower
    text: TextTower | None = None
    heads: tuple[nn.Linear, nn.Linear] | None = None  # of image and text; None: it is no pair
    text_pooling: str = "summary"
    said: dict[str, float] = field(default_factory=dict)  # temperature and logit_bias of a pair

    @property
    def towers(self) -> tuple[str, ...]:
        """Which towers it has: "image", "text" or both."""
        return tuple(name for name in ("image", "text") if getattr(self, name) is not None)


def read(path: Path) -> Start:
    """The model in a folder or file. Raises StartError."""
    if not path.exists():
        raise StartError(f"--start {path.name!r}: there is no such folder or file; give {KINDS}")
    try:
        return _xrayvision(path) if path.is_file() else _folder(_described_in(path))
    except StartError:
        raise
    except Exception as error:  # whatever a library raises for a configuration that it cannot build
        raise StartError(
            f"--start {path.name!r}: the installed library cannot build what its configuration says "
            f"({type(error).__name__}); download it again"
        ) from None


def _folder(path: Path) -> Start:
    if _is_there(path / OPEN_CLIP):
        return _open_clip(path, _json(path / OPEN_CLIP))
    if not _is_there(path / CONFIG):
        raise StartError(f"--start {path.name!r}: it is {_seen_in(path)}, without {CONFIG}; give {KINDS}")
    described = _json(path / CONFIG)
    if "architecture" in described:
        return _timm(path, described)
    if isinstance(described.get("model_type"), str):
        return _transformers(path, described)
    raise StartError(
        f"--start {path.name!r}: its {CONFIG} names neither model_type (transformers) nor architecture (timm); give "
        f"{KINDS}"
    )


def as_model(start: Start) -> DualEncoder:
    """The model in fedvlp's own form, in evaluation mode; a tower that it lacks is tiny and random."""
    size = start.image.image_size if start.image is not None else 64
    tokens = start.text.tokenizer.max_tokens if start.text is not None else 64
    width = start.heads[0].out_features if start.heads else 128
    config = ModelConfig(
        image_size=size,
        max_tokens=tokens,
        embedding_dim=width,
        head_hidden=None,
        head_norm="none",
        text_pooling=start.text_pooling,
        alignment=False,
    )
    model = DualEncoder(config)
    if start.image is not None:
        model.image_encoder = start.image
    if start.text is not None:
        model.text_encoder = start.text
    model.image_head, model.text_head = model.new_head("image"), model.new_head("text")
    if start.heads is not None:
        model.image_head, model.text_head = (nn.Sequential(layer) for layer in start.heads)
    model.config = replace(config, in_channels=getattr(start.image, "in_channels", None))
    _try(model.eval(), f"--start: {start.family}")
    return model


@torch.no_grad()
def _try(model: DualEncoder, what: str) -> None:
    """Makes a vector of a grey image and of a text. Raises StartError where that fails, or they are not finite."""
    size = model.config.image_size
    try:
        made = [model.encode_image(torch.zeros(1, 1, size, size)), model.encode_text(["no finding"])]
    except Exception as error:
        raise StartError(
            f"{what} cannot be run on an image of {size} x {size} pixels and a text ({type(error).__name__}); give "
            f"{KINDS}"
        ) from None
    if not all(bool(vector.isfinite().all()) for vector in made):
        raise StartError(f"{what} makes vectors that are not finite: its weights are damaged; download them again")


# What is in a folder


def _described_in(folder: Path) -> Path:
    """The folder, or where it has no description the one below it that has: of a cache of Hugging Face its snapshot."""
    for pattern in ("", "*/", "*/*/"):
        folders = sorted({file.parent for name in (OPEN_CLIP, CONFIG) for file in folder.glob(pattern + name)})
        if len(folders) > 1:
            names = ", ".join(str(inner.relative_to(folder)) for inner in folders[:5])
            raise StartError(f"--start {folder.name!r}: there are {len(folders)} models in it; give one: {names}")
        if folders:
            return folders[0]
    return folder


def _is_there(file: Path) -> bool:
    """Whether a folder has the file, or a link that says that it had."""
    return file.is_file() or file.is_symlink()


def _genuine(file: Path) -> Path:
    """The file. Raises StartError where it cannot be read, or a download left something else in its place."""
    what = f"--start {file.parent.name!r}: {file.name}"
    if file.is_symlink() and not file.exists():
        raise StartError(f"{what} is a link to a file that is not here; copy the folder again by `cp -rL`")
    try:
        with file.open("rb") as opened:
            begins = opened.read(64).lstrip().lower()
    except OSError as error:
        raise StartError(f"{what} cannot be read ({error.strerror}); allow this account to read it") from None
    for start, seen in PLACEHOLDERS.items():
        if begins.startswith(start):
            raise StartError(f"{what} is {seen}")
    return file


def _json(file: Path) -> dict[str, Any]:
    _genuine(file)
    try:
        described = read_json(file, follow=True)
    except (OSError, ValueError) as error:
        raise StartError(f"--start {file.parent.name!r}: {file.name} cannot be read ({type(error).__name__})") from None
    if not isinstance(described, dict):
        raise StartError(f"--start {file.parent.name!r}: {file.name} is no JSON object")
    return described


def _seen_in(folder: Path) -> str:
    """What a folder without a known description is, in words."""
    names = sorted(file.name for file in folder.iterdir())
    if not names:
        return "an empty folder"
    if "adapter_config.json" in names:
        return "a folder of adapters (PEFT), which are no model: merge them into their base first"
    for suffix, kind in ((".onnx", "an ONNX model"), (".gguf", "a GGUF model"), (".h5", "a TensorFlow model")):
        if any(name.endswith(suffix) for name in names):
            return f"{kind}, which is not read"
    if any(name.endswith(SUFFIXES) for name in names):
        return "a folder of weights"
    return f"a folder of {len(names)} other files"


def _weights(folder: Path, *names: str) -> Path:
    """The file of weights, or the index of its shards. Raises StartError where it, or a shard, is not there."""
    file = next((folder / name for name in names if _is_there(folder / name)), None)
    if file is None:
        raise StartError(f"--start {folder.name!r}: its weights are missing; expected {' or '.join(names)}")
    if file.suffix != ".json":
        return _genuine(file)
    shards = sorted({str(shard) for shard in dict(_json(file).get("weight_map") or {}).values()})
    missing = [shard for shard in shards if not _is_there(folder / shard)]
    if missing or not shards:
        raise StartError(
            f"--start {folder.name!r}: {len(missing)} of the {len(shards)} shards that {file.name} names are missing "
            f"({', '.join(missing[:3])}); copy the folder whole"
        )
    for shard in shards:
        _genuine(folder / shard)
    return file


def _tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a file, by name. Raises StartError for a file that is damaged, or holds more than tensors."""
    tensors = unwrapped(_content(file))
    if not tensors:
        raise StartError(
            f"--start {file.name!r}: it holds no tensors by name, nor under one of {', '.join(CONTAINERS)}"
        )
    return tensors


def _content(file: Path) -> Any:
    """What a file of weights holds. Raises StartError for one that is damaged, or holds more than tensors."""
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            checked_shapes(file)
            return load_file(file)
        with torch.serialization.safe_globals(HARMLESS):
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch's refusal of what is no tensor is one of pickle's
        reason = type(error).__name__
        more = (
            ""
            if file.suffix == ".safetensors"
            else "; a pickled model holds code, which is not run: where its library is installed, write "
            "torch.save(model.state_dict(), FILE)"
        )
        raise StartError(f"--start {file.name!r}: it is damaged, or holds more than tensors ({reason}){more}") from None


CONTAINERS = ("state_dict", "model_state_dict", "model", "teacher", "module", "net", "network", "weights", "params")
"""Keys under which training programs keep a model's weights beside their own state; of several the first is taken."""

WRAPPERS = ("module", "_orig_mod", "model", "backbone", "teacher", "net", "network", "encoder_q", "base_encoder")
"""First parts of names that wrappers of a model add: of several GPUs, compilation, Lightning, self-supervision."""

MOST = 0.4
"""Of a checkpoint's tensors are behind a wrapper, at least: of a model and its slower copy nearly half are."""

HARMLESS: list[Any] = [argparse.Namespace, type(Path())]
"""Classes beside tensors in checkpoints of training programs: their settings. They run no code."""


def unwrapped(seen: Any) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint by the names that the model itself gives them; none where there are none.

    They may lie under one of CONTAINERS, one in another, and behind WRAPPERS. What lies beside a wrapped model, a loss
    or a projector, is left out.
    """
    inner = seen
    while isinstance(inner, Mapping):
        seen = inner
        inner = next((seen[key] for key in CONTAINERS if isinstance(seen.get(key), Mapping)), None)
    if not isinstance(seen, Mapping):
        return {}
    tensors = {str(name): value for name, value in seen.items() if isinstance(value, Tensor)}
    while tensors:
        wrapped = {word: without_prefix(tensors, f"{word}.") for word in WRAPPERS}
        most = max(wrapped.values(), key=len)
        if len(most) < MOST * len(tensors):
            break
        tensors = most
    return tensors


def _fill(module: nn.Module, tensors: Mapping[str, Tensor], what: str) -> None:
    """Copies the tensors into ``module``. Raises StartError unless each of its own is there with its shape."""
    mine = module.state_dict()
    missing = sorted(name for name in mine if name not in tensors and not name.endswith("num_batches_tracked"))
    wrong = sorted(name for name in mine if name in tensors and tensors[name].shape != mine[name].shape)
    if missing or wrong:
        seen = [
            f"{len(names)} tensors are {kind} (e.g. {names[0]})"
            for kind, names in (("missing", missing), ("of another shape", wrong))
            if names
        ]
        raise StartError(f"{what}: its weights do not fit its configuration: {'; '.join(seen)}")
    with torch.no_grad():
        for name, tensor in mine.items():
            if name in tensors:
                tensor.copy_(tensors[name])


def _linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """A head with these weights; without a bias it begins at 0."""
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(torch.zeros(len(weight)) if bias is None else bias)
    return layer


# transformers


def _transformers(folder: Path, described: dict[str, Any]) -> Start:
    kind = str(described["model_type"])
    settings = _settings(folder, described, kind)
    if kind in PAIRS:
        return _pair(folder, settings, PAIRS[kind])
    if hasattr(settings, "text_config") or hasattr(settings, "decoder"):
        raise StartError(
            f"--start {folder.name!r}: it is a {kind} of several parts; of pairs, CLIP and SigLIP are read, SigLIP "
            "2 of one image size, whose model_type is siglip"
        )
    if _sees_images(settings):
        image = _vision(folder, settings)
        _load(folder, image.model, settings)
        return Start(f"a {kind} of transformers", image=image)
    from transformers import MODEL_FOR_MASKED_LM_MAPPING

    if type(settings) not in MODEL_FOR_MASKED_LM_MAPPING and kind != "clip_text_model":
        raise StartError(
            f"--start {folder.name!r}: it is a {kind}, which is neither an image tower nor a text encoder like BERT"
        )
    settings.is_decoder = settings.add_cross_attention = False
    text = _text(folder, settings)
    _load(folder, text.model, settings)
    return Start(f"a {kind} of transformers", text=text, text_pooling=_pooling(folder))


def _sees_images(settings: Any) -> bool:
    from transformers import MODEL_MAPPING

    return getattr(MODEL_MAPPING.get(type(settings), None), "main_input_name", "") == "pixel_values"


def _settings(folder: Path, described: dict[str, Any], kind: str) -> Any:
    """transformers' configuration. Raises StartError for a model that needs code of its own, or is unknown."""
    from transformers import CONFIG_MAPPING

    if kind in BUILT_AS:
        kind = BUILT_AS[kind]
        described = {key: value for key, value in described.items() if key != "auto_map"} | {"model_type": kind}
    if kind not in CONFIG_MAPPING:
        reason = "comes with code of its own, which is not run" if "auto_map" in described else "is not known"
        raise StartError(
            f"--start {folder.name!r}: model_type {kind!r} {reason} by the installed transformers; {KINDS}"
        )
    try:
        return CONFIG_MAPPING[kind].from_dict(described)
    except Exception as error:
        raise StartError(f"--start {folder.name!r}: its {CONFIG} is no {kind}'s ({type(error).__name__})") from None


def _pair(folder: Path, settings: Any, name: str) -> Start:
    from transformers import AutoModel

    image, text = _vision(folder, settings.vision_config), _text(folder, settings.text_config)
    model = AutoModel.from_config(settings, dtype=torch.float32)
    _load(folder, model, settings)
    _fill(image.model, model.vision_model.state_dict(), folder.name)
    _fill(text.model, model.text_model.state_dict(), folder.name)
    if hasattr(model, "visual_projection"):
        heads = _linear(model.visual_projection.weight), _linear(model.text_projection.weight)
    else:
        heads = _linear(torch.eye(image.width)), _linear(torch.eye(text.width))
    said = {"temperature": math.exp(-model.logit_scale.item())}
    if hasattr(model, "logit_bias"):
        said["logit_bias"] = model.logit_bias.item()
    return Start(f"a {name} pair of transformers", image, text, heads, said=said)


def _load(folder: Path, model: Any, settings: Any) -> None:
    """Puts the weights of a transformers folder into ``model``, by transformers' own loader."""
    names = ("model.safetensors", "pytorch_model.bin", "model.safetensors.index.json", "pytorch_model.bin.index.json")
    file = _weights(folder, *names)
    what = f"--start {folder.name!r}: {file.name}"
    tensors = {} if file.suffix == ".json" else _wrapped(file)
    wrapped = {"state_dict": tensors} if tensors else {}
    more = {"add_pooling_layer": False} if getattr(model, "pooler", 0) is None else {}
    try:
        with _quiet():
            loaded, report = type(model).from_pretrained(
                None if wrapped else folder,
                config=settings,
                local_files_only=True,
                trust_remote_code=False,
                dtype=torch.float32,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **wrapped,
                **more,
            )
    except Exception as error:
        raise StartError(
            f"{what} is cut short or damaged, or holds more than tensors ({type(error).__name__}); download it again"
        ) from None
    if other := sorted(report["mismatched_keys"]):
        name, seen, expected = other[0]
        raise StartError(
            f"{what} does not fit {CONFIG}: {len(other)} tensors have another shape (e.g. {name} {list(seen)}, "
            f"expected {list(expected)}); give both files of one model"
        )
    if missing := sorted(report["missing_keys"]):
        raise StartError(
            f"{what}: {len(missing)} tensors of a {settings.model_type} are missing in its weights (e.g. {missing[0]})"
        )
    model.load_state_dict(loaded.state_dict())


def _wrapped(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a file whose names are not the model's own; none where they are, or nobody can read it."""
    try:
        seen = _content(file)
    except StartError:
        return {}
    tensors = unwrapped(seen)
    return {} if tensors.keys() == seen.keys() else tensors


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' bars and reports, which name folders of this machine."""
    from transformers.utils import logging

    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _vision(folder: Path, settings: Any) -> TransformersImage:
    """The image tower, randomly initialised, for the size, mean and std that the folder says."""
    size, statistics = _processor(folder, settings)
    config = {key: value for key, value in _plain(settings).items() if key != "model_type"}
    normalise = _normalised(folder, statistics, settings.num_channels)
    return vision_tower({"name": settings.model_type, "config": config, **normalise.said}, size)


def _plain(settings: Any) -> dict[str, Any]:
    """A configuration as JSON values, without the name of its source."""
    described = json.loads(settings.to_json_string(use_diff=False))
    return {key: value for key, value in described.items() if key not in ("_name_or_path", "transformers_version")}


def _processor(folder: Path, settings: Any) -> tuple[int, dict[str, Any]]:
    """The side of the square that the tower sees, and mean and std. Raises StartError where the folder does not say."""
    names = ("preprocessor_config.json", "processor_config.json")
    file = next((folder / name for name in names if (folder / name).is_file()), None)
    if file is None:
        raise StartError(
            f"--start {folder.name!r}: {names[0]} is missing, which says the size, mean and std of its images"
        )
    said = _json(file)
    said = said.get("image_processor", said)
    size = said.get("crop_size") if said.get("do_center_crop") else said.get("size")
    if isinstance(size, dict):
        if size.get("height") != size.get("width"):
            raise StartError(f"--start {folder.name!r}: {file.name} says images of {size}; read are squares")
        size = size.get("height") or size.get("shortest_edge")
    size = size or settings.image_size
    if not isinstance(size, int):
        raise StartError(f"--start {folder.name!r}: {file.name} says no size of images")
    if said.get("do_normalize") is False:
        return size, {"mean": [0.0], "std": [1.0]}
    if not (said.get("image_mean") and said.get("image_std")):
        raise StartError(f"--start {folder.name!r}: image_mean or image_std is missing in {file.name}")
    return size, {"mean": said["image_mean"], "std": said["image_std"]}


def _normalised(folder: Path, said: Mapping[str, Any], channels: int) -> Normalised:
    """What the tower sees of an image by the mean and std of its folder. Raises StartError for what is none."""
    try:
        return Normalised(*(_each(said[key], channels) for key in ("mean", "std")))
    except (TypeError, ValueError):
        raise StartError(
            f"--start {folder.name!r}: mean {said['mean']!r} and std {said['std']!r} of its images; expected "
            f"{channels} numbers each, std above 0"
        ) from None


def _each(values: Any, channels: int) -> list[float]:
    """A figure for each channel. Raises ValueError for figures of other channels."""
    given = [float(value) for value in values] if isinstance(values, (list, tuple)) else [float(values)]
    if len(given) != channels and 1 not in (len(given), channels):
        raise ValueError(f"{len(given)} figures of {channels} channels")
    return given if len(given) == channels else [sum(given) / len(given)] * channels


def _text(folder: Path, settings: Any) -> TransformersTower:
    """The text tower with its tokenizer, randomly initialised."""
    tokenizer = _tokenizer(folder, positions_of(settings) or MOST_TOKENS, settings)
    settings.pad_token_id = tokenizer.tokenizer.pad_token_id or 0  # SigLIP 2's configuration has that of SigLIP
    return TransformersTower(bare_model(settings), tokenizer)


MOST_TOKENS = 512
"""Of a text tower that has no positions to run out of."""

TOKENIZER_FILES = ("tokenizer*.json", "vocab*", "merges.txt", "*.model", "special_tokens_map.json")


def _tokenizer(folder: Path, longest: int, settings: Any) -> Any:
    """The tokenizer of a folder, of texts as long as it and the tower allow. Raises StartError without one."""
    files = [file for name in TOKENIZER_FILES for file in sorted(folder.glob(name)) if _is_there(file)]
    for file in files:
        _genuine(file)
    try:
        with _quiet():
            tokenizer = load_tokenizer(folder, longest)
    except Exception as error:
        seen = ", ".join(file.name for file in files) or "none"
        raise StartError(
            f"--start {folder.name!r}: the files of its tokenizer are missing or damaged: seen {seen}, expected "
            f"tokenizer.json, or vocab and merges ({type(error).__name__})"
        ) from None
    if tokenizer.vocabulary > settings.vocab_size:
        raise StartError(
            f"--start {folder.name!r}: its tokenizer has {tokenizer.vocabulary} words, and its text tower "
            f"{settings.vocab_size}"
        )
    tokenizer.max_tokens = min(longest, int(tokenizer.tokenizer.model_max_length))
    return tokenizer


def _pooling(folder: Path) -> str:
    """Pooling of a text tower alone: the mean where sentence-transformers' file says so, else the first token."""
    file = folder / "1_Pooling" / CONFIG
    return "mean" if file.is_file() and _json(file).get("pooling_mode_mean_tokens") else "summary"


# timm


def _timm(folder: Path, described: dict[str, Any]) -> Start:
    published = described.get("pretrained_cfg") or {}
    size = (published.get("input_size") or [None])[-1]
    if not isinstance(size, int):
        raise StartError(f"--start {folder.name!r}: its {CONFIG} has no input_size in pretrained_cfg")
    lacking = [key for key in ("mean", "std") if not published.get(key)]
    if lacking:
        raise StartError(f"--start {folder.name!r}: {' and '.join(lacking)} missing in pretrained_cfg of its {CONFIG}")
    return Start(
        f"a {described['architecture']} of timm",
        image=_timm_tower(folder, str(described["architecture"]), described, size, published),
    )


def _timm_tower(folder: Path, name: str, described: dict[str, Any], size: int, statistics: Mapping[str, Any]) -> Tower:
    import timm

    if not timm.is_model(name):
        raise StartError(f"--start {folder.name!r}: timm {timm.__version__} has no model {name!r}")
    tensors = _tensors(_weights(folder, "model.safetensors", "pytorch_model.bin"))
    args = dict(described.get("model_args") or {})
    channels = int(args.get("in_chans") or (statistics.get("input_size") or [3])[0])
    normalise = _normalised(folder, statistics, channels)
    args = {key: value for key, value in args.items() if key not in ("in_chans", "num_classes", "global_pool")}
    tower = timm_tower(name, size, False, channels, {"name": name, "args": args, **normalise.said})
    _fill(tower.model, tensors, f"--start {folder.name!r}")
    return tower


def _xrayvision(file: Path) -> Start:
    """torchxrayvision's DenseNet: one channel, pixels in -1024..1024."""
    if file.suffix in ARCHIVES:
        raise StartError(f"--start {file.name!r}: it is an archive; unpack it and give the folder in it")
    if file.suffix not in SUFFIXES:
        raise StartError(f"--start {file.name!r}: it is no file of weights ({', '.join(SUFFIXES)}); give {KINDS}")
    tensors = _tensors(_genuine(file))
    name = "densenet121"
    if "features.conv0.weight" not in tensors or "features.norm5.weight" not in tensors:
        raise StartError(f"--start {file.name!r}: its tensors are no DenseNet's of torchxrayvision; give {KINDS}")
    channels = int(tensors["features.conv0.weight"].shape[1])
    statistics = {"mean": [0.5] * channels, "std": [0.5 / 1024] * channels}
    tower = timm_tower(name, 224, False, channels, {"name": name, "args": {}, **statistics})
    _fill(tower.model, tensors, f"--start {file.name!r}")
    return Start("a DenseNet-121 of torchxrayvision", image=tower)


# open_clip


def _open_clip(folder: Path, described: dict[str, Any]) -> Start:
    config, film = described.get("model_cfg") or {}, described.get("preprocess_cfg") or {}
    vision, said = config.get("vision_cfg") or {}, config.get("text_cfg") or {}
    own = set(vision) <= OWN_VISION and set(said) <= OWN_TEXT
    if not own and not (vision.get("timm_model_name") and said.get("hf_model_name")):
        raise StartError(
            f"--start {folder.name!r}: it is an open_clip model with towers that are not read; those that are: a timm "
            "and a transformers tower (as BiomedCLIP), and both as in CLIP's own ViTs"
        )
    if not (film.get("mean") and film.get("std")):
        raise StartError(f"--start {folder.name!r}: mean or std is missing in preprocess_cfg of its {OPEN_CLIP}")
    tensors = _tensors(_weights(folder, "open_clip_model.safetensors", "open_clip_pytorch_model.bin"))
    image: Tower
    if own:
        image, image_head, text, text_head = _open_clip_own(folder, config, film, tensors)
        pooling = "summary"
    else:
        image, image_head = _open_clip_image(folder, vision, film, tensors)
        text, text_head, pooling = _open_clip_text(folder, said, config, tensors)
    values = {"temperature": math.exp(-float(tensors["logit_scale"]))} if "logit_scale" in tensors else {}
    if "logit_bias" in tensors:
        values["logit_bias"] = float(tensors["logit_bias"])
    return Start("an open_clip pair", image, text, (image_head, text_head), pooling, values)


OWN_VISION = {"image_size", "layers", "width", "patch_size", "head_width", "mlp_ratio"}
OWN_TEXT = {"context_length", "vocab_size", "width", "heads", "layers"}
"""Settings of open_clip's own towers where these are CLIP's; any other one changes the architecture."""

RENAMED = (
    ("transformer.resblocks.", "encoder.layers."), (".ln_1.", ".layer_norm1."), (".ln_2.", ".layer_norm2."),
    (".attn.out_proj.", ".self_attn.out_proj."), (".mlp.c_fc.", ".mlp.fc1."), (".mlp.c_proj.", ".mlp.fc2."),
    ("class_embedding", "embeddings.class_embedding"), ("conv1.", "embeddings.patch_embedding."),
    ("ln_pre.", "pre_layrnorm."), ("ln_post.", "post_layernorm."), ("ln_final.", "final_layer_norm."),
    ("token_embedding.", "embeddings.token_embedding."),
)  # fmt: skip
"""Parts of names in open_clip's towers -> in transformers' CLIP."""


def _open_clip_own(
    folder: Path, config: dict[str, Any], film: dict[str, Any], tensors: dict[str, Tensor]
) -> tuple[TransformersImage, nn.Linear, TransformersTower, nn.Linear]:
    """CLIP's own towers, which transformers has under other names."""
    from transformers import CLIPTextConfig, CLIPVisionConfig

    vision, said, what = config["vision_cfg"], config["text_cfg"], f"--start {folder.name!r}"
    act = {"hidden_act": "quick_gelu" if config.get("quick_gelu") else "gelu"}
    try:
        width, size = int(vision["width"]), int(vision["image_size"])
        settings = CLIPVisionConfig(
            hidden_size=width,
            num_hidden_layers=vision["layers"],
            image_size=size,
            patch_size=vision["patch_size"],
            num_attention_heads=width // vision.get("head_width", 64),
            intermediate_size=int(width * vision.get("mlp_ratio", 4)),
            **act,
        )
        text_settings = CLIPTextConfig(
            vocab_size=said["vocab_size"],
            hidden_size=said["width"],
            num_hidden_layers=said["layers"],
            num_attention_heads=said["heads"],
            intermediate_size=4 * said["width"],
            max_position_embeddings=said.get("context_length", 77),
            **act,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise StartError(f"{what}: model_cfg of its {OPEN_CLIP} is incomplete ({error})") from None
    tokenizer = _tokenizer(folder, text_settings.max_position_embeddings, text_settings)
    special = tokenizer.tokenizer
    text_settings.eos_token_id, text_settings.pad_token_id = special.eos_token_id, special.pad_token_id
    text_settings.bos_token_id = special.bos_token_id
    described = {key: value for key, value in _plain(settings).items() if key != "model_type"}
    normalise = _normalised(folder, film, 3)
    image = vision_tower({"name": settings.model_type, "config": described, **normalise.said}, size)
    text = TransformersTower(bare_model(text_settings), tokenizer)
    shown = without_prefix(tensors, "visual.")
    written = without_prefix(tensors, "text.") or tensors
    _fill(image.model, _as_transformers(shown), what)
    _fill(text.model, _as_transformers(written), what)
    if "proj" not in shown or "text_projection" not in written:
        raise StartError(f"{what}: its projections are missing in the weights")
    return image, _linear(shown["proj"].T), text, _linear(written["text_projection"].T)


def _as_transformers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of one of open_clip's own towers under transformers' names."""
    renamed = {}
    for name, tensor in tensors.items():
        for old, new in RENAMED:
            name = name.replace(old, new)
        layer, joined, kind = name.rpartition(".attn.in_proj_")
        if joined:
            for key, third in zip(("q_proj", "k_proj", "v_proj"), tensor.chunk(3), strict=True):
                renamed[f"{layer}.self_attn.{key}.{kind}"] = third
        else:
            renamed["embeddings.position_embedding.weight" if name == "positional_embedding" else name] = tensor
    return renamed


def _open_clip_image(
    folder: Path, vision: dict[str, Any], film: dict[str, Any], tensors: dict[str, Tensor]
) -> tuple[Tower, nn.Linear]:
    name, size = str(vision["timm_model_name"]), int(vision.get("image_size") or 224)
    wrong = vision.get("timm_pool") in ("abs_attn", "rot_attn", "map") or vision.get("timm_proj") not in ("linear",)
    if wrong:
        raise StartError(
            f"--start {folder.name!r}: its image tower ends with pooling {vision.get('timm_pool')!r} and projection "
            f"{vision.get('timm_proj')!r}; read are a token or mean and a linear projection"
        )
    normalise = _normalised(folder, film, 3)
    tower = timm_tower(name, size, False, 3, {"name": name, "args": {}, **normalise.said})
    if vision.get("timm_pool") == "avg" and tower.has_summary:
        raise StartError(
            f"--start {folder.name!r}: its image tower has a class token and takes the mean of its patches"
        )
    what = f"--start {folder.name!r}"
    _fill(tower.model, without_prefix(tensors, "visual.trunk."), what)
    return tower, _linear(*_of(tensors, "visual.head.proj", what))


def _of(tensors: Mapping[str, Tensor], name: str, what: str) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of a linear layer."""
    if f"{name}.weight" not in tensors:
        raise StartError(f"{what}: its projection {name} is missing in the weights")
    return tensors[f"{name}.weight"], tensors.get(f"{name}.bias")


def _open_clip_text(
    folder: Path, said: dict[str, Any], config: dict[str, Any], tensors: dict[str, Tensor]
) -> tuple[TransformersTower, nn.Linear, str]:
    poolers = {"cls_last_hidden_state_pooler": "summary", "mean_pooler": "mean"}
    pooler, projection = said.get("hf_pooler_type"), said.get("hf_proj_type")
    if (
        pooler not in poolers
        or projection not in ("linear", "mlp")
        or (pooler == "mean_pooler") > (projection != "mlp")
    ):
        raise StartError(
            f"--start {folder.name!r}: its text tower ends with {pooler!r} and projection {projection!r}; read are "
            "cls_last_hidden_state_pooler with linear or mlp, and mean_pooler with linear"
        )
    what, inside = f"--start {folder.name!r}", without_prefix(tensors, "text.transformer.")
    settings = _text_settings(folder, inside)
    if projection == "mlp":
        settings.inner_projection = len(_of(tensors, "text.proj.0", what)[0])
    tower = TransformersTower(bare_model(settings), _tokenizer(folder, settings.max_position_embeddings, settings))
    tower.tokenizer.max_tokens = int(said.get("context_length") or tower.tokenizer.max_tokens)
    _fill(tower.model, inside, what)
    if tower.inner is not None:
        _fill(tower.inner, {"weight": tensors["text.proj.0.weight"]}, what)
    last = "text.proj" if projection == "linear" else "text.proj.2"
    return tower, _linear(*_of(tensors, last, what)), poolers[pooler]


def _text_settings(folder: Path, tensors: Mapping[str, Tensor]) -> Any:
    """The configuration of open_clip's text tower: that of the folder, else of a BERT with these shapes.

    open_clip looks it up by its name on the hub. Of BERT all is in the shapes but the heads, of 64 numbers each.
    """
    if (folder / CONFIG).is_file():
        described = _json(folder / CONFIG)
        return _settings(folder, described, str(described.get("model_type")))
    from transformers import BertConfig

    try:
        words, width = tensors["embeddings.word_embeddings.weight"].shape
        layers = len({name.split(".")[2] for name in tensors if name.startswith("encoder.layer.")})
        return BertConfig(
            vocab_size=words,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=max(1, width // 64),
            intermediate_size=len(tensors["encoder.layer.0.intermediate.dense.weight"]),
            max_position_embeddings=len(tensors["embeddings.position_embeddings.weight"]),
        )
    except KeyError:
        raise StartError(
            f"--start {folder.name!r}: {CONFIG} of its text tower is missing, and its weights are no BERT's"
        ) from None
