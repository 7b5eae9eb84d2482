"""The locks of what is installed, as data: constraints.txt and provisioning/requirements.txt."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from packaging.markers import Marker
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
EVERYTHING = ROOT / "constraints.txt"  # what is needed to develop
SITE = ROOT / "provisioning" / "requirements.txt"  # what a site or a server needs


@dataclass(frozen=True)
class Pin:
    """One version of one package, the environments that it is for, and the files that it may be."""

    name: str
    version: str
    marker: str
    hashes: frozenset[str]  # SHA-256

    def applies(self, **environment: str) -> bool:
        """Whether it is for this environment: the one that runs, with what is given changed, python_version for one."""
        return not self.marker or Marker(self.marker).evaluate(environment or None)


def pins(lock: Path) -> list[Pin]:
    """Every requirement of a lock. Fails for a line that is none with an exact version."""
    found = []
    for line in lock.read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
        if line and not line.startswith("#"):
            match = re.fullmatch(r"([\w.-]+)==([^\s;]+)(?: ; ([^\\]+?))?((?:\s+--hash=sha256:[0-9a-f]{64})*)\s*", line)
            assert match, f"{lock.name}: {line[:100]}"
            name, version, marker, hashes = match.groups()
            assert name == canonicalize_name(name)
            found.append(Pin(name, version, marker or "", frozenset(re.findall(r"sha256:(\w+)", hashes))))
    return found


def pinned(name: str, lock: Path = EVERYTHING) -> str:
    """The version of a package that is for this environment."""
    (pin,) = [pin for pin in pins(lock) if pin.name == name and pin.applies()]
    return pin.version
