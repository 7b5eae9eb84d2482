"""`--start`: an experiment that begins with a model of another library, kept in fedvlp's own form by a name."""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedvlp.data.preprocessing import Preprocessing
from fedvlp.models.fetched import PACKAGES, folder_of
from fedvlp.models.initial import SHIPPED, own_folder, pinned
from fedvlp.models.other_libraries import Start, StartError, as_model, read
from fedvlp.models.tiny import BUILT_IN
from fedvlp.run.experiment import Experiment

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
HUB = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")  # OWNER/MODEL, as Hugging Face names a model


def imported(path: Path, name: str, to: Path | None = None) -> tuple[Path, Start]:
    """Writes the model of another library as ``name``, where models look for it or into ``to``. Raises StartError."""
    if not NAME.fullmatch(name) or name in (*BUILT_IN, *PACKAGES, *SHIPPED):
        raise StartError(f"--as {name!r}: give another name, of letters, digits, dots, hyphens and underscores")
    start, folder = read(path), to or folder_of(name)
    if folder.exists() and any(folder.iterdir()) and not _is_import(folder):
        raise StartError(f"--as {name!r}: there is something else by that name; choose another")
    model = as_model(start)
    size = model.config.image_size
    model.preprocessing = Preprocessing(size, size).described()
    model.start = {"family": start.family, "towers": list(start.towers), **start.said}
    model.save(folder)
    return folder, start


def _is_import(folder: Path) -> bool:
    own = own_folder(str(folder))
    return own is not None and "start" in own.described


def begin(experiment: Experiment, given: str, travels: bool = False) -> Experiment:
    """The experiment from the model ``given``: a name of `fedvlp towers import`, or a folder or file, imported here.

    It takes over towers, sizes and, of a pair, heads and temperature. ``travels``: it is for other machines, which know
    names alone. Raises StartError.
    """
    name = given
    if not (NAME.fullmatch(given) and own_folder(given)):
        path = Path(given)
        if HUB.fullmatch(given) and not path.exists():
            raise StartError(
                f"--start {given!r} is a name on a hub, from which nothing is downloaded by itself; get its folder "
                f"first (hf download {given} --local-dir {path.name}), then give --start {path.name}"
            )
        if travels:
            raise StartError(
                f"--start {path.name!r}: a job names what it starts from; run `fedvlp towers import` with its folder "
                "and --as NAME here, at the server and at every site (--to KIT/models/NAME), then give --start NAME"
            )
        name = given if path.is_dir() and own_folder(given) else _name_of(path)
        if name != given:
            imported(path, name)
    own = own_folder(name)
    if own is None:
        raise StartError(f"--start {Path(given).name!r}: it is no model to start from")
    said, saved = own.described.get("start") or {"towers": ["image", "text"]}, own.described["model"]
    model = experiment.model
    changes: dict[str, Any] = {"init": "", "pretrained": True, "alignment": False}
    if model.adapters:
        changes["adapters"] = model.adapters.partition("@")[0]  # the towers are others
    if "image" in said["towers"]:
        changes |= {"image_tower": name, "image_size": saved["image_size"], "in_channels": saved["in_channels"]}
    if "text" in said["towers"]:
        longest = saved["max_tokens"] if len(said["towers"]) == 2 else min(model.max_tokens, saved["max_tokens"])
        changes |= {"text_tower": name, "max_tokens": longest, "text_layers": None}
        changes["text_pooling"] = saved["text_pooling"]
    if len(said["towers"]) == 2:
        changes |= {key: saved[key] for key in ("embedding_dim", "head_hidden", "head_norm", "alignment", "vocabulary")}
        changes |= {"pretrained": False, "init": pinned(name)}
    data: Any = experiment.data
    size = int(changes.get("image_size", model.image_size))
    if size > model.image_size and hasattr(data, "image_size"):
        data = replace(data, image_size=size if experiment.crops_centres else size * 9 // 8)
    objective: Any = experiment.objective
    if said.get("temperature") and hasattr(objective, "temperature"):
        objective = replace(objective, temperature=float(said["temperature"]))
    return replace(experiment, model=replace(model, **changes), data=data, objective=objective)


def _name_of(path: Path) -> str:
    """A name for a folder or file that none was given: its own, and a few digits of its path's checksum."""
    plain = re.sub(r"[^A-Za-z0-9_.-]", "-", path.absolute().name).lstrip("._-") or "start"
    return f"{plain[:80]}-{hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:8]}"
