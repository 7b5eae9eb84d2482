"""The classes that a job may name: exactly those that fedvlp's own jobs do, for ``class_allow_list`` of a policy.

FLARE takes an entry that ends with a dot, or that is a package, for everything below it, functions included, and calls
what it finds. So a list holds classes by their full names, and it is made from jobs, never written by hand.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

from fedvlp.core.checkpoint import save_json
from fedvlp.deploy.named_data import NamedData
from fedvlp.federation.codec import Wire
from fedvlp.flare.job_check import CONFIGS, LIST, named
from fedvlp.flare.jobs import job_files
from fedvlp.objectives import OBJECTIVES
from fedvlp.run import presets
from fedvlp.run.experiment import Experiment

PACKINGS: tuple[dict[str, bool], ...] = ({}, {"child": True})
ENCODED = Wire(up="float16")  # any other than plain: the job then brings the filters of the wire


@cache
def needed(side: str) -> tuple[str, ...]:
    """The classes that jobs make ``side`` ("client" or "server") build, sorted.

    The jobs are those of every preset, as `fedvlp jobs export` writes them with its options. MLflow's receiver is left
    out, since its address can be any folder of the server: who runs the server adds it to the list on purpose.
    """
    classes: set[str] = set()
    for experiment, packing in _exported():
        sites = tuple(site for site, _ in experiment.site_models) or ("site",)
        files = job_files(experiment, sites=sites, **packing)  # type: ignore[arg-type]
        classes |= set(named(json.loads(files[f"app/config/{CONFIGS[side]}"])))
    return tuple(sorted(classes))


def _exported() -> Iterator[tuple[Experiment, dict[str, bool]]]:
    """Every experiment with every way of packing it, and an encrypted job."""
    yield from ((experiment, packing) for experiment in _experiments() for packing in PACKINGS)
    yield presets.get("fedavg"), {"encrypted": True}


def _experiments() -> Iterator[Experiment]:
    """Every preset, and one of them with every option that changes the classes of a job."""
    yield from presets.PRESETS.values()
    usual = presets.get("fedavg")
    yield replace(usual, data=NamedData("pretrain"))
    yield replace(usual, wire=ENCODED)
    for objective in OBJECTIVES.values():
        yield replace(usual, objective=objective())


def write(side: str, resources: Path) -> list[str]:
    """Puts the list into a ``resources.json``, whose other settings stay; returns the entries that this removes.

    Raises ValueError for another file.
    """
    try:
        content = json.loads(resources.read_text(encoding="utf-8"))
    except ValueError:
        content = None
    if not isinstance(content, dict) or "components" not in content:
        raise ValueError(f"{resources.name} is no resources.json of FLARE: it has no components; give a kit's")
    before = content.get(LIST)
    content[LIST] = list(needed(side))
    save_json(resources, content)
    return sorted(str(entry) for entry in set(before) - set(content[LIST])) if isinstance(before, list) else []
