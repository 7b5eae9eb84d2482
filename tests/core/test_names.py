"""Public names are the file format: none disappears, and files of the time before them are read all the same."""

from __future__ import annotations

import dataclasses
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from nvflare.fuel.utils.component_builder import ComponentBuilder

import fedvlp
from fedvlp.core import names
from fedvlp.run import presets
from fedvlp.run.config import from_config, to_config
from fedvlp.run.experiment import Experiment

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
COMMITTED = json.loads((HERE / "public_names.json").read_text())
FORMER = HERE.parent / "run" / "former"  # cut from what commit 7e9898b wrote
FORMER_PATHS = json.loads((FORMER / "paths.json").read_text())


def test_no_public_name_disappears() -> None:
    """A name that is added is added to public_names.json as well; one that is removed breaks somebody's files."""
    assert sorted(names.PUBLIC) == COMMITTED


@pytest.mark.parametrize("name", COMMITTED)
def test_every_public_name_is_found_where_flare_looks_for_it(name: str) -> None:
    """FLARE imports all but the last part of a path and asks that module for the last."""
    module, _, attribute = name.rpartition(".")
    found = getattr(importlib.import_module(module), attribute)
    assert found is names.load(name)
    assert attribute in dir(importlib.import_module(module))


@pytest.mark.parametrize("name", COMMITTED)
def test_a_class_is_written_under_its_public_name(name: str) -> None:
    """So the table says where the class is defined: a class that has moved is written under its name all the same."""
    found = names.load(name)
    if isinstance(found, type):
        assert names.name_of(found) == name


def paths(config: Any) -> set[str]:
    """Every path of this package that a configuration names."""
    if isinstance(config, dict):
        own = {config["path"]} if str(config.get("path")).startswith("fedvlp.") else set()
        return own.union(*map(paths, config.values()))
    return set().union(*map(paths, config)) if isinstance(config, list) else set()


@pytest.mark.parametrize("file", sorted(str(f.relative_to(ROOT)) for f in (ROOT / "jobs").rglob("config_*.json")))
def test_a_committed_job_names_public_names_alone(file: str) -> None:
    named = paths(json.loads((ROOT / file).read_text()))
    assert named
    assert named <= names.PUBLIC.keys()


@pytest.mark.parametrize("file", sorted(str(f.relative_to(ROOT)) for f in (ROOT / "provisioning").rglob("*.json")))
def test_a_sites_policy_names_public_names_alone(file: str) -> None:
    assert paths(json.loads((ROOT / file).read_text())) <= names.PUBLIC.keys()


@pytest.mark.parametrize("name", presets.PRESETS)
def test_a_preset_is_written_with_public_names_alone(name: str) -> None:
    assert paths(to_config(presets.PRESETS[name])) <= names.PUBLIC.keys()


@pytest.mark.parametrize("path", FORMER_PATHS)
def test_every_former_path_stands_for_a_class_with_a_public_name(path: str) -> None:
    module, _, name = path.rpartition(".")
    found = getattr(importlib.import_module(module), name)
    public = names.name_of(found)
    assert public in names.PUBLIC
    assert public.rpartition(".")[2] == name
    assert names.BEFORE.get(path, public) == public


def test_a_former_module_holds_its_public_classes_and_nothing_else() -> None:
    module = importlib.import_module("fedvlp.core.training")
    assert module.Training is fedvlp.Training
    with pytest.raises(AttributeError, match=r"module 'fedvlp\.core\.training' has no attribute 'require'"):
        _ = module.require


@pytest.mark.parametrize("name", ["fedvlp.core.trainin", "fedvlp.core.training.x", "fedvlp.gone", "core.training"])
def test_other_modules_that_do_not_exist_are_not_found(name: str) -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(name)


def shape(value: Any) -> Any:
    """A configuration with the names of classes in the place of their paths."""
    if isinstance(value, dict):
        return {key: item.rpartition(".")[2] if key == "path" else shape(item) for key, item in value.items()}
    return [shape(item) for item in value] if isinstance(value, list) else value


def agrees(written: Any, built: Any) -> bool:
    """Whether all that was written is in what was built of it, which may have fields that are younger."""
    if isinstance(written, dict):
        return isinstance(built, dict) and all(key in built and agrees(written[key], built[key]) for key in written)
    if isinstance(written, list):
        return isinstance(built, list) and len(written) == len(built) and all(map(agrees, written, built))
    return type(written) is type(built) and written == built


def test_a_former_runs_configuration_is_read() -> None:
    written = json.loads((FORMER / "config.json").read_text())
    built = from_config(written)
    assert isinstance(built, Experiment)
    assert (type(built.method).__name__, type(built.extra).__name__) == ("PMSFM", "SelectorConfig")
    assert agrees(shape(written), shape(to_config(built)))
    assert from_config(to_config(built)) == built


class Builder(ComponentBuilder):
    """FLARE's own, which builds the components of a job."""

    def get_module_scanner(self) -> None:
        return None


@pytest.mark.parametrize("side", ["server", "client"])
def test_flare_builds_every_component_of_a_former_job(side: str) -> None:
    """From the paths that the job names, as a site does that was updated while the job was kept."""
    config = json.loads((FORMER / f"config_fed_{side}.json").read_text())
    entry = config["workflows"][0] if side == "server" else config["executors"][0]["executor"]
    written = {key: value for key, value in entry["args"].items() if key in experiment_fields()}
    expected = Experiment(**{key: from_config(value) for key, value in written.items()})
    for component in [entry, *config["components"]]:
        if component["path"].startswith("fedvlp."):
            built = Builder().build_component(json.loads(json.dumps(component)))
            assert type(built) is names.load(names.BEFORE.get(component["path"], names.name_of(type(built))))
    built = Builder().build_component(json.loads(json.dumps(entry)))
    assert built.experiment == expected
    fields = {field: shape(to_config(getattr(expected, field))) for field in experiment_fields()}
    assert agrees(shape(written), fields)


def experiment_fields() -> list[str]:
    return [field.name for field in dataclasses.fields(Experiment)]


def test_the_front_door_costs_nothing_until_it_is_used() -> None:
    code = (
        "import sys, fedvlp; before = {'torch', 'numpy'} & set(sys.modules); fedvlp.Training; "
        "finders = [type(finder).__name__ for finder in sys.meta_path]; "
        "print(sorted(before), 'torch' in sys.modules, finders.count('_FormerModules'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[] True 1", done.stderr[-2000:]


def test_what_is_no_public_name_is_an_attribute_error() -> None:
    for package in ("fedvlp", "fedvlp.data", "fedvlp.models", "fedvlp.flare", "fedvlp.deploy"):
        with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'Nonsense'"):
            _ = importlib.import_module(package).Nonsense


def test_a_strangers_class_keeps_its_own_path() -> None:
    assert names.name_of(Builder) == f"{Builder.__module__}.Builder"
