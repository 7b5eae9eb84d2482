"""Plugins in tests: a method in a file, an installed package, and a process that has forgotten them again."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedvlp.run import plugins

PULLED = '''"""FedAvg with a pull towards the received weights."""

from dataclasses import dataclass, replace
from pathlib import Path

from fedvlp import Method, presets


@dataclass(frozen=True)
class Pulled(Method):
    mu: float = 0.5

    def losses(self, client, batch, message):
        terms = super().losses(client, batch, message)
        pull = sum((p - message.state[name]).square().sum() for name, p in client.trainable())
        return {**terms, "pull": self.mu * pull}


PRESETS = {"pulled": replace(presets.get("fedavg"), name="pulled", method=Pulled(local_steps=2))}
'''


def pulled(folder: Path, name: str = "pulled_method", text: str = PULLED) -> Path:
    """A method in a file of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.py"
    file.write_text(text)
    return file


def installed(folder: Path, module: str, text: str) -> Path:
    """A folder for ``sys.path``, as pip leaves it: a package of one module, and the entry point that names it."""
    package = folder / module
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(text)
    metadata = folder / f"{module}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{plugins.GROUP}]\nmine = {module}\n")
    return folder


def forget() -> None:
    """The plugins of this process, as if it began now."""
    for name, plugin in list(plugins._known.items()):
        if plugin.named and not name.startswith(("support.", "studies.")):  # what tests share stays imported
            for module in [m for m in sys.modules if m == name or m.startswith(f"{name}.")]:
                del sys.modules[module]
        del plugins._known[name]


@contextmanager
def fresh() -> Iterator[None]:
    """A process without plugins, before and after."""
    forget()
    yield
    forget()
