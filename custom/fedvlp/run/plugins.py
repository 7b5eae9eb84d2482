"""Methods, objectives, sources and evaluations from outside of fedvlp (docs/extending.md).

A plugin is a module. It is named on purpose, by ``--plugin`` or by an entry point of an installed package, and nothing
else outside of fedvlp is imported because a file names it: a configuration that somebody sends runs no code of theirs.
Importing a plugin only defines: classes, and the tables by which the commands find them (``TABLES``).
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

GROUP = "fedvlp.plugins"
"""The entry points whose values are modules of plugins."""

TABLES = ("PRESETS", "GROUPS", "OBJECTIVES", "SOURCES", "FEDERATIONS", "EVALUATIONS", "SECTIONS")
"""What a plugin may define, each a dictionary by name that is added to the table of fedvlp with this name."""

OURS = "fedvlp"


class PluginError(ValueError):
    """A plugin cannot be found or imported, or is not the one that a run began with."""


@dataclasses.dataclass(frozen=True)
class Plugin:
    """A module from outside of fedvlp, and what its content was when this process imported it."""

    name: str  # of the module, as configurations write it
    digest: str  # BLAKE2b of the content, 32 hexadecimal digits: for one file, what `b2sum -l 128` prints
    file: Path
    source: bytes | None  # of a single file, which runs and jobs take along; None: a package, which is installed
    installed: bool  # an entry point names it
    named: bool  # by --plugin or an entry point; else only its classes are here, in an object of this process

    @property
    def module(self) -> ModuleType:
        """The imported module."""
        return sys.modules[self.name]

    @property
    def text(self) -> str:
        """The source of a single file. Raises PluginError where it is not UTF-8."""
        assert self.source is not None
        try:
            return self.source.decode()
        except UnicodeDecodeError as error:
            raise PluginError(f"plugin {self.name}: the file is not UTF-8 ({error.reason}); save it as UTF-8") from None

    def table(self, name: str) -> dict[str, Any]:
        """One of ``TABLES``, empty where the plugin has none or was not named."""
        return dict(getattr(self.module, name, {})) if self.named else {}


_known: dict[str, Plugin] = {}
"""The plugins of this process, by the names of their modules."""


def use(named: str | Path) -> Plugin:
    """Imports the plugin ``named``: a file that ends in ".py", or a module that can be imported.

    Raises PluginError for one that is not there, that fails, or whose name is taken.
    """
    return _use_file(Path(named)) if str(named).endswith(".py") else _use_module(str(named))


def _use_file(path: Path) -> Plugin:
    if not path.is_file():
        raise PluginError(f"--plugin {path}: there is no such file")
    name, source = path.stem, path.read_bytes()
    if name in _known:
        if _known[name].source != source:
            raise PluginError(f"plugin {name} is in use with other content; a process takes one plugin of a name")
        return _note(name, _known[name].file, source)
    _refuse_taken(name, path, source)
    if name not in sys.modules:
        _execute(name, path, source)
    return _note(name, path.absolute(), source)  # a link has another name than the file that it leads to


def _refuse_taken(name: str, path: Path, source: bytes) -> None:
    """Raises PluginError where ``import name`` means, or could mean, another module than this file."""
    if not name.isidentifier():
        raise PluginError(f"--plugin {path}: {name!r} is no name of a module; use letters, digits and '_'")
    if name in sys.stdlib_module_names or name == OURS:
        raise PluginError(f"--plugin {path}: {name!r} is the name of another module; rename the file")
    if name in sys.modules:
        other = getattr(sys.modules[name], "__file__", None) or "without a file"
    else:
        spec = importlib.util.find_spec(name)
        other = spec.origin if spec else str(path)
    if other is not None and (not Path(other).is_file() or Path(other).read_bytes() != source):
        raise PluginError(f"--plugin {path}: there is another module {name!r} ({other}); rename the file")


def refuse_taken(name: str) -> None:
    """Raises PluginError where no new file could be the plugin ``name``, because another module has this name."""
    if name in (*sys.stdlib_module_names, OURS, *sys.modules) or importlib.util.find_spec(name) is not None:
        raise PluginError(f"{name!r} is the name of another module, which a plugin cannot have; choose another name")


def _execute(name: str, path: Path, source: bytes) -> None:
    """Runs the bytes that were read, so that the digest is of what runs. Nothing is written beside the file."""
    module = ModuleType(name)
    module.__file__ = str(path.resolve())
    sys.modules[name] = module  # before it runs: dataclasses look their module up
    try:
        exec(compile(source, str(path), "exec"), module.__dict__)
    except Exception as error:
        del sys.modules[name]
        raise PluginError(f"plugin {path} cannot be imported: {type(error).__name__}: {error}") from error


def _use_module(name: str) -> Plugin:
    if name in _known and _known[name].named:
        return _known[name]
    if _part_of(name, OURS):
        raise PluginError(f"--plugin {name}: that is fedvlp itself, which needs no naming")
    try:
        module = importlib.import_module(name)
    except Exception as error:
        raise PluginError(
            f"plugin {name} cannot be imported: {type(error).__name__}: {error}. Give the path of a file that ends in "
            ".py, or a module that is installed here"
        ) from error
    return _adopt(module, named=True)


def _adopt(module: ModuleType, named: bool) -> Plugin:
    """Notes a module that is imported already."""
    name, file = module.__name__, Path(module.__file__ or "")
    if not file.is_file():
        raise PluginError(f"plugin {name} has no source file; put it into one")
    if "." in name or hasattr(module, "__path__"):
        return _note(name, file, None, named)
    return _note(name, file, file.read_bytes(), named)


def _note(name: str, file: Path, source: bytes | None, named: bool = True) -> Plugin:
    plugin = Plugin(name, _digest(file, source), file, source, name in _installed(), named)
    _known[name] = plugin
    return plugin


def _digest(file: Path, source: bytes | None) -> str:
    """Of the file's content; of a package, of the names and contents of all its Python files."""
    content = hashlib.blake2b(digest_size=16)
    if source is not None:
        content.update(source)
    elif file.name != "__init__.py":
        content.update(file.read_bytes())
    else:
        for path in sorted(file.parent.rglob("*.py")):
            body = path.read_bytes()
            content.update(f"{path.relative_to(file.parent).as_posix()} {len(body)}\n".encode() + body)
    return content.hexdigest()


def _installed() -> dict[str, str]:
    """The modules that entry points name, each with the name of its entry point. Imports nothing."""
    return {entry.module: entry.name for entry in entry_points(group=GROUP)}


def _part_of(module: str, plugin: str) -> bool:
    return module == plugin or module.startswith(f"{plugin}.")


def admitted(module: str) -> Plugin | None:
    """The plugin that ``module`` is or is part of; None, and nothing is imported, where no one has named it.

    Raises PluginError where an installed plugin cannot be imported.
    """
    for name, plugin in _known.items():
        if _part_of(module, name):
            return plugin
    for name in _installed():
        if _part_of(module, name):
            return _use_module(name)
    return None


def in_use() -> list[str]:
    """What ``use`` is to be given, one after the other, for another process to have the plugins of this one."""
    return [plugin.name if plugin.source is None else str(plugin.file) for plugin in _known.values() if plugin.named]


def of(value: Any) -> list[Plugin]:
    """The plugins whose classes ``value`` is made of, by name. Their modules are imported, or it would not be there."""
    by_name = {}
    for name in sorted({kind.__module__ for kind in _classes(value)}):
        file = getattr(sys.modules.get(name), "__file__", None)
        if not _part_of(name, OURS) and file is not None:
            plugin = admitted(name) or _adopt(sys.modules[name], named=False)
            by_name[plugin.name] = plugin
    return list(by_name.values())


def _classes(value: Any) -> Iterator[type]:
    """Every class of settings in ``value``."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _classes(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield type(value)
        for field in dataclasses.fields(value):
            yield from _classes(getattr(value, field.name))


def digests(value: Any) -> dict[str, str]:
    """The digests of the plugins whose classes ``value`` is made of, by name."""
    return {plugin.name: plugin.digest for plugin in of(value)}


# Tables


def table(name: str, own: Mapping[str, Any], wanted: str) -> dict[str, Any]:
    """fedvlp's ``own`` entries and those that plugins have in their table ``name`` (one of ``TABLES``).

    Installed plugins are imported only when nobody else has the entry ``wanted``. Raises PluginError where two have an
    entry of one name.
    """
    joined = _joined(name, own)
    if wanted in joined:
        return joined
    use_installed()
    return _joined(name, own)


def use_installed() -> None:
    """Imports every plugin that an entry point names. Raises PluginError where one cannot be imported."""
    for module in _installed():
        _use_module(module)


def _joined(name: str, own: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of fedvlp and of the plugins in use."""
    joined = dict(own)
    owner = dict.fromkeys(own, OURS)
    for plugin in _known.values():
        for key, value in plugin.table(name).items():
            if key in joined:
                raise PluginError(
                    f"plugin {plugin.name}: {name} has {key!r}, which {owner[key]} has as well; name it otherwise"
                )
            joined[key], owner[key] = value, plugin.name
    return joined
