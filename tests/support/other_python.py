"""Imports fedvlp with another Python, which need have none of its packages, and looks at its settings.

    pythonX.Y tests/support/other_python.py

What is not installed there stands in for itself: any attribute, call, index or base class of it is another stand-in.
So what is found is what the version of Python makes wrong: syntax, the standard library, type hints of settings.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.abc
import importlib.machinery
import pkgutil
import sys
import types
import typing
from pathlib import Path

HOUSE = Path(__file__).parents[2] / "custom"


class StandIn(type):
    """The class of all that is not there: each attribute is a class again."""

    def __getattr__(cls, name: str) -> typing.Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "tolist":
            return lambda: [0]
        return StandIn(name, (), {})

    def __call__(cls, /, *given: object, **named: object) -> typing.Any:
        return given[0] if len(given) == 1 and callable(given[0]) and not named else StandIn(cls.__name__, (), {})

    def __getitem__(cls, index: object) -> StandIn:
        return cls

    def __or__(cls, other: object) -> typing.Any:
        return typing.Any

    def __ror__(cls, other: object) -> typing.Any:
        return typing.Any

    def __add__(cls, other: object) -> StandIn:
        return cls

    def __iter__(cls) -> typing.Iterator[typing.Any]:
        return iter(())

    def __lt__(cls, other: object) -> bool:
        return True


class Missing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds any module that no other finder does, but for the standard library's and fedvlp's."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        root = name.partition(".")[0]
        if root == "fedvlp" or root in sys.stdlib_module_names:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__dict__["__getattr__"] = lambda name: StandIn(name, (), {})
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing is in it."""


def main() -> None:
    """Print how many modules were imported, of how many settings the hints are known, and how a table is read."""
    sys.meta_path.append(Missing())
    sys.path.insert(0, str(HOUSE))
    sys.dont_write_bytecode = True
    import fedvlp

    names = [found.name for found in pkgutil.walk_packages(fedvlp.__path__, "fedvlp.")]
    modules = [importlib.import_module(name) for name in names if not name.endswith("__main__")]
    from fedvlp.core.names import PUBLIC

    kinds = []  # of settings
    for path in PUBLIC.values():
        module, _, name = path.rpartition(".")
        kind = getattr(importlib.import_module(module), name)
        if dataclasses.is_dataclass(kind):
            typing.get_type_hints(kind)
            kinds.append(kind)
    from fedvlp.data.delimited import read
    from fedvlp.data.sources import SOURCES

    made = [source("table.csv") for source in SOURCES.values() if hasattr(source, "frontal")]
    lines = read(b"image,report\na.png,no \0effusion\n", {"image", "report"}).lines
    version = ".".join(map(str, sys.version_info[:2]))
    print(version, len(modules), len(kinds), len(made), lines)


if __name__ == "__main__":
    main()
