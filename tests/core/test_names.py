"""Public names are the file format: none disappears, and files of the time before them are read all the same."""

from __future__ import annotations

import importlib
import json
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


def test_every_public_name_is_found_where_flare_looks_for_it_and_written_so() -> None:
    """FLARE imports all but the last part of a path and asks that module for the last.

    The table says where a class is defined: one that has moved is written under its public name all the same.
    """
    for name in COMMITTED:
        module, _, attribute = name.rpartition(".")
        found = getattr(importlib.import_module(module), attribute)
        assert found is names.load(name), name
        assert attribute in dir(importlib.import_module(module)), name
        assert not isinstance(found, type) or names.name_of(found) == name


def paths(config: Any) -> set[str]:
    """Every path of this package that a configuration names."""
    if isinstance(config, dict):
        own = {config["path"]} if str(config.get("path")).startswith("fedvlp.") else set()
        return own.union(*map(paths, config.values()))
    return set().union(*map(paths, config)) if isinstance(config, list) else set()


def test_jobs_policies_and_presets_are_written_with_public_names_alone() -> None:
    jobs, policies = [*(ROOT / "jobs").rglob("config_*.json")], [*(ROOT / "provisioning").rglob("*.json")]
    written = {str(file): paths(json.loads(file.read_text())) for file in (*jobs, *policies)}
    assert all(written[str(file)] for file in jobs)
    written |= {name: paths(to_config(preset)) for name, preset in presets.PRESETS.items()}
    strange = {where: named - names.PUBLIC.keys() for where, named in written.items() if named - names.PUBLIC.keys()}
    assert not strange


class Builder(ComponentBuilder):
    """FLARE's own, which builds the components of a job."""

    def get_module_scanner(self) -> None:
        return None


def test_what_is_no_public_name_is_an_attribute_error() -> None:
    for package in ("fedvlp", "fedvlp.data", "fedvlp.models", "fedvlp.flare", "fedvlp.deploy"):
        with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'Nonsense'"):
            _ = importlib.import_module(package).Nonsense


def test_a_strangers_class_keeps_its_own_path() -> None:
    assert names.name_of(Builder) == f"{Builder.__module__}.Builder"
