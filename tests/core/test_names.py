"""Public names are the file format: none disappears, and files of the time before them are read all the same."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from nvflare.fuel.utils.component_builder import ComponentBuilder

from fedvlp.core import names
from fedvlp.run import presets
from fedvlp.run.config import to_config

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
COMMITTED = json.loads((HERE / "public_names.json").read_text())


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


class Builder(ComponentBuilder):
    """FLARE's own, which builds the components of a job."""

    def get_module_scanner(self) -> None:
        return None


def test_the_front_door_costs_nothing_until_it_is_used() -> None:
    code = (
        "import sys, fedvlp; before = {'torch', 'numpy'} & set(sys.modules); fedvlp.Training; "
        "print(sorted(before), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[] True", done.stderr[-2000:]


def test_what_is_no_public_name_is_an_attribute_error() -> None:
    for package in ("fedvlp", "fedvlp.data", "fedvlp.models", "fedvlp.flare", "fedvlp.deploy"):
        with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'Nonsense'"):
            _ = importlib.import_module(package).Nonsense


def test_a_strangers_class_keeps_its_own_path() -> None:
    assert names.name_of(Builder) == f"{Builder.__module__}.Builder"
