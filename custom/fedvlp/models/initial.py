"""Weights that training starts from: named tensors in a folder, at least those of both encoders (spec 4.4, Z5).

``ModelConfig.init`` names them, as ``NAME`` or ``NAME@SHA256``: NAME is that of weights that ship with fedvlp
(``SHIPPED``) or a folder with a model.safetensors, such as that of a finished run (`fedvlp simulate tiny-pool`).
The checksum is of that file, so that two machines, or a run and its continuation, cannot mean different weights.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedvlp.core.checkpoint import save_bytes, save_json
from fedvlp.core.json_file import read_json, refuse_special
from fedvlp.core.site_error import SiteError
from fedvlp.models.fetched import folder_of
from fedvlp.models.serialization import refuse_long_header
from fedvlp.models.tiny import BUILT_IN

SHIPPED = {
    "tiny-pool": "28aeea72cf32aea60c22a73377e941ccb9d6818f156093fe227f3d71f7a1bb07",
}
"""Weights in this package, each a folder of ``shipped``: SHA-256 of its model.safetensors. `make towers` makes them."""

RANDOM = "random"
"""May be said for no weights at all."""

FOLDER = Path(__file__).parent / "shipped"
WEIGHTS, CONFIG = "model.safetensors", "config.json"
DESCRIBED = ("image_architecture", "text_architecture", "tokenizer")
"""What config.json says of the towers, beside their tensors' shapes."""

_PINNED = re.compile(r"(.+)@([0-9a-f]{64})", re.DOTALL)


class InitialWeightsError(SiteError, ValueError):
    """The weights to start from are not there, are damaged, or do not fit the model. Holds no path."""

    told = "the weights to start from are not there, or damaged"


class Init(NamedTuple):
    """What ``ModelConfig.init`` says."""

    name: str  # of shipped weights, or a folder
    digest: str  # SHA-256 of the file, 64 hexadecimal digits; "" where it is not said

    def __str__(self) -> str:
        return f"{self.name}@{self.digest}" if self.digest else self.name

    @property
    def shown(self) -> str:
        """The name for a message: of a folder its own name alone."""
        return repr(self.name if self.name in SHIPPED else Path(self.name).name)

    @property
    def folder(self) -> Path:
        """Where the files are: in this package, in a folder, or where `fedvlp towers import` wrote them."""
        folder = FOLDER / self.name if self.name in SHIPPED else Path(self.name)
        if not folder.is_dir() and "/" not in self.name and folder_of(self.name).is_dir():
            folder = folder_of(self.name)
        return folder / "model" if (folder / "model").is_dir() else folder


def parse(init: str) -> Init:
    """Name and checksum."""
    pinned = _PINNED.fullmatch(init)
    return Init(pinned[1], pinned[2]) if pinned else Init(init, "")


def settled(init: str) -> str:
    """``init`` as it stands in a configuration: "" for random weights, with the checksum where the weights ship."""
    if init == RANDOM:
        return ""
    return str(Init(init, SHIPPED[init])) if init in SHIPPED else init


def pinned(init: str) -> str:
    """``init`` with the checksum of the file. Raises InitialWeightsError where a folder without one cannot be read."""
    wanted = parse(init)
    if not init or wanted.digest:
        return init
    return str(Init(wanted.name, hashlib.sha256(_content(wanted)).hexdigest()))


class OwnFolder(NamedTuple):
    """A folder in fedvlp's own form that a tower is named by, e.g. one that `fedvlp towers import` wrote."""

    init: Init
    described: dict[str, Any]  # its config.json

    @property
    def folder(self) -> Path:
        """Where the files are."""
        return self.init.folder

    def filled(self, modality: str, tower: Any, pretrained: bool) -> Any:
        """``tower`` with its weights of the folder, where ``pretrained``. Raises InitialWeightsError."""
        towers = (self.described.get("start") or {}).get("towers", [modality])
        if modality not in towers:
            raise InitialWeightsError(
                f"{modality}_tower {self.init.shown}: that model is an {towers[0]} tower alone; name it as "
                f"{towers[0]}_tower"
            )
        if not pretrained:
            return tower
        prefix, content = f"{modality}_encoder.", _content(self.init)
        _refuse_other_content(self.init, self.described, hashlib.sha256(content).hexdigest())
        seen = {name: tensor for name, tensor in _tensors(self.init, content).items() if name.startswith(prefix)}
        mine = {prefix + name: tensor for name, tensor in tower.state_dict().items()}
        if problems := misfits(mine, seen):
            raise InitialWeightsError(f"{modality}_tower {self.init.shown} does not fit: {'; '.join(problems)}")
        for name, tensor in mine.items():
            tensor.copy_(seen[name])
        return tower


def own_folder(name: str) -> OwnFolder | None:
    """The folder of fedvlp's own form that a tower's ``name`` or NAME@SHA256 stands for; None where it is none."""
    wanted = parse(name)
    if name in BUILT_IN:  # whatever lies in a folder of that name
        return None
    try:
        described = read_json(wanted.folder / CONFIG, follow=True)
    except (OSError, ValueError):
        described = {}
    if isinstance(described, dict) and {"image_architecture", "text_architecture"} <= described.keys():
        return OwnFolder(wanted, described)
    if wanted.digest:
        raise InitialWeightsError(
            f"the tower {wanted.shown} is not on this machine; run `fedvlp towers import` with its folder here (a site "
            "or server of a consortium: with --to KIT/models/NAME)"
        )
    return None


def load_initial(model: nn.Module, init: str) -> None:
    """Copies the weights into ``model``, as float32 whatever they are stored in; what they lack stays as it is.

    Raises InitialWeightsError unless the file has the checksum, the encoders are complete, any other part of the model
    is complete or absent, and all names, shapes and towers are this model's; the model is then unchanged.
    """
    if not init:
        return
    wanted = parse(init)
    content = _content(wanted)
    described = _described(wanted)
    _refuse_other_content(wanted, described, hashlib.sha256(content).hexdigest())
    _refuse_other_towers(wanted, described, model)
    seen = _tensors(wanted, content)
    mine = model.state_dict()
    problems = misfits(mine, seen)
    if problems:
        raise InitialWeightsError(
            f"model.init {wanted.shown} does not fit this model: {'; '.join(problems)}. Choose the towers and sizes "
            "that the weights were made with, leave parts other than the encoders out, or set model.init=random",
            public="the weights to start from do not fit this model",
        )
    with torch.no_grad():
        for name, tensor in seen.items():
            mine[name].copy_(tensor)


def misfits(model: Mapping[str, Tensor], seen: Mapping[str, Tensor]) -> list[str]:
    """Why the tensors ``seen`` cannot be put into ``model``, in words; empty if they can."""
    modules = {_module(name) for name in seen} | {_module(name) for name in model if _of_tower(name)}
    wrong = {
        "missing": sorted(name for name in model if _module(name) in modules and name not in seen),
        "unknown": sorted(name for name in seen if name not in model),
        "of another shape or kind": sorted(
            f"{name} {list(seen[name].shape)}, expected {list(tensor.shape)}"
            for name, tensor in model.items()
            if name in seen
            and (seen[name].shape != tensor.shape or seen[name].is_floating_point() != tensor.is_floating_point())
        ),
        "not finite": sorted(name for name, tensor in seen.items() if not bool(torch.isfinite(tensor).all())),
    }
    return [
        f"{len(names)} tensors {what} ({', '.join(names[:3])}{', ...' * (len(names) > 3)})"
        for what, names in wrong.items()
        if names
    ]


def save_initial(
    model: Any, folder: Path, made: Mapping[str, Any], dtype: torch.dtype = torch.float16
) -> tuple[str, int]:
    """Writes the encoders of ``model``, a DualEncoder, its floating tensors as ``dtype``; returns checksum and numbers.

    ``made`` says in config.json how they were made. Raises ValueError for a value that ``dtype`` cannot hold.
    """
    from safetensors.torch import save

    tensors = {}
    for name, tensor in model.state_dict().items():
        if _of_tower(name):
            tensor = tensor.detach().cpu()
            tensors[name] = (tensor.to(dtype) if tensor.is_floating_point() else tensor).contiguous()
    beyond = sorted(name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all()))
    if beyond:
        raise ValueError(f"{len(beyond)} tensors hold values that {dtype} cannot ({', '.join(beyond[:3])})")
    content = save(tensors)
    digest = hashlib.sha256(content).hexdigest()
    numbers = sum(tensor.numel() for tensor in tensors.values())
    weights = {"sha256": digest, "bytes": len(content), "numbers": numbers, "dtype": str(dtype).removeprefix("torch.")}
    save_bytes(folder / WEIGHTS, content)
    save_json(folder / CONFIG, {**model.described(), "weights": weights, "made": dict(made)})
    return digest, numbers


def refuse_other_folder(folder: Path) -> None:
    """Raises FileExistsError if ``save_initial`` would overwrite files of anything but initial weights.

    A trained model has a model.safetensors and a config.json as well.
    """
    if not folder.exists() or not any(folder.iterdir()):
        return
    try:
        described = read_json(folder / CONFIG, follow=True)
    except (OSError, ValueError):
        described = None
    if not (isinstance(described, dict) and "weights" in described):
        raise FileExistsError(
            f"{folder} is not empty and its {CONFIG} is not that of weights to start from; choose another folder"
        )


def made(init: str) -> dict[str, Any]:
    """What config.json says of how weights were made; empty where it says nothing."""
    return dict(_described(parse(init)).get("made", {}))


def _module(name: str) -> str:
    """The model's own submodule that a tensor belongs to, e.g. "image_head"."""
    return name.partition(".")[0]


def _of_tower(name: str) -> bool:
    """Whether a tensor is of a tower itself, and of none of its adapters."""
    return _module(name).endswith("_encoder")


def _content(wanted: Init) -> bytes:
    try:
        refuse_special(wanted.folder / WEIGHTS)
        return (wanted.folder / WEIGHTS).read_bytes()
    except OSError as error:
        raise InitialWeightsError(
            f"model.init {wanted.shown}: {WEIGHTS} cannot be read there ({error.strerror}). Give one of "
            f"{', '.join(SHIPPED)}, the folder of a finished run, or random; for a folder of another machine "
            f"NAME@SHA256, the latter of its {WEIGHTS}"
        ) from None


def _described(wanted: Init) -> dict[str, Any]:
    try:
        described = read_json(wanted.folder / CONFIG, follow=True)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InitialWeightsError(
            f"model.init {wanted.shown}: {CONFIG} cannot be read there ({type(error).__name__}); copy the folder again"
        ) from None
    return described if isinstance(described, dict) else {}


def _refuse_other_content(wanted: Init, described: Mapping[str, Any], seen: str) -> None:
    weights = described.get("weights")
    written = weights.get("sha256") if isinstance(weights, dict) else None
    if written not in (None, seen):
        raise InitialWeightsError(
            f"model.init {wanted.shown}: {WEIGHTS} has the SHA-256 {seen}, and {CONFIG} says {str(written)[:64]}: the "
            "file is damaged or is another's; copy the folder again"
        )
    if wanted.digest not in ("", seen):
        raise InitialWeightsError(
            f"model.init {wanted.shown}: {WEIGHTS} has the SHA-256 {seen}, but the experiment was made with "
            f"{wanted.digest}; restore those weights, or begin anew with these",
            public="the weights to start from are not those that the experiment was made with",
        )


def _refuse_other_towers(wanted: Init, described: Mapping[str, Any], model: Any) -> None:
    if not described or not hasattr(model, "described"):
        return
    mine = model.described()
    other = [
        f"{key} {described.get(key)!r}, expected {mine[key]!r}" for key in DESCRIBED if described.get(key) != mine[key]
    ]
    if other:
        raise InitialWeightsError(
            f"model.init {wanted.shown} was made for other towers: {'; '.join(other)}. Set model.image_tower and "
            "model.text_tower to those, or model.init=random"
        )


def _tensors(wanted: Init, content: bytes) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        refuse_long_header(content)
        return load(content)
    except (SafetensorError, ValueError, KeyError) as error:
        raise InitialWeightsError(
            f"model.init {wanted.shown}: {WEIGHTS} is damaged or none ({type(error).__name__}); copy the folder again"
        ) from None
