"""Compare the Python packages that run here with the kit's wheel, and with what pip noted when it installed them.

This is a program by itself, of the standard library alone, so that it trusts nothing of what it looks at. It is taken
from the wheel whose signature was checked, and Python is told to run nothing of the packages (``-I -S``):

    unzip -p fedvlp-*.whl fedvlp/deploy/installed.py |
      /opt/fedvlp/bin/python -I -S -B - fedvlp-*.whl /opt/fedvlp/lib/python3.*/site-packages

What pip noted is not signed: somebody who may write in the folder of packages can alter a package and its note alike.
fedvlp is compared with the wheel, so that this holds for the others alone.
"""

import base64
import csv
import hashlib
import importlib.util
import marshal
import multiprocessing
import os
import sys
import warnings
import zipfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.machinery import all_suffixes
from pathlib import Path
from types import CodeType

AT_EVERY_START = ("sitecustomize", "usercustomize")
"""Modules that Python runs whatever it was asked to run."""

HEADER = 16
"""Bytes of a compiled file before its code: magic number, flags, and the source's time and size."""


def faults(wheel: Path, folder: Path, package: Path | None = None) -> Iterator[str]:
    """What is not as it was installed, a line each: the kind, a colon, and the file as Python's packages name it.

    Args:
        wheel: of fedvlp, whose signature was checked.
        folder: where Python looks for packages.
        package: fedvlp's own, where it is not in ``folder``.
    """
    package = package or folder / "fedvlp"
    yield from (f"not the wheel's: {name}" for name in differing_files(wheel, package))
    listed = _listed(folder)
    for path in _importable(folder):
        if path.name.partition(".")[0] in AT_EVERY_START:
            yield f"run at every start: {path.relative_to(folder)}"
        elif str(path) not in listed and not path.is_relative_to(package):
            yield f"in no RECORD: {path.relative_to(folder)}"
    sources = {str(path): "" for path in package.rglob("*.py")}
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("fork")) as processes:
        for kind, file in processes.map(_fault, sorted((sources | listed).items()), chunksize=64):
            if kind:
                below = package.parent if Path(file).is_relative_to(package) else folder
                yield f"{kind}: {os.path.relpath(file, below)}"


def differing_files(wheel: Path, package: Path) -> list[str]:
    """The files of the fedvlp in ``package`` that are not those of ``wheel``: altered, missing, or in none."""
    with zipfile.ZipFile(wheel) as archive:
        wanted = {name: archive.read(name) for name in archive.namelist() if name.startswith("fedvlp/")}
    installed = {
        path.relative_to(package.parent).as_posix(): path.read_bytes()
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    return sorted(name for name in {*wanted, *installed} if wanted.get(name) != installed.get(name))


def _listed(folder: Path) -> dict[str, str]:
    """The path of each installed file, as pip noted it, with its SHA-256; "" for files that pip made itself."""
    listed = {}
    for record in folder.glob("*.dist-info/RECORD"):
        with record.open(encoding="utf-8", newline="") as rows:
            for name, digest, _ in csv.reader(rows):
                listed[os.path.normpath(folder / name)] = digest
    return listed


def _importable(folder: Path) -> Iterator[Path]:
    """Every file of ``folder`` that Python runs by itself or by an import, and links in the place of a folder."""
    suffixes = (*all_suffixes(), ".pth")
    for root, folders, files in os.walk(folder):
        if os.path.basename(root) == "__pycache__":  # read only beside a source
            continue
        yield from (Path(root, name) for name in files if name.endswith(suffixes))
        yield from (path for name in folders if (path := Path(root, name)).is_symlink())


def _fault(file: tuple[str, str]) -> tuple[str, str]:
    """The kind of fault of an installed file, "" for none, and its path."""
    path, digest = file
    try:
        content = Path(path).read_bytes() if digest or path.endswith(".py") else b""
    except OSError:
        return "missing", path
    kind, _, wanted = digest.partition("=")
    if digest and base64.urlsafe_b64encode(hashlib.new(kind, content).digest()).rstrip(b"=").decode() != wanted:
        return "altered", path
    if path.endswith(".py"):
        for level in ("", "1", "2"):
            compiled = Path(importlib.util.cache_from_source(path, optimization=level))
            if compiled.is_file() and not _compiled_from(compiled.read_bytes(), content, path, int(level or 0)):
                return "not compiled from its source", str(compiled)
    return "", path


def _compiled_from(compiled: bytes, source: bytes, path: str, level: int) -> bool:
    """Whether Python takes ``compiled`` for what the source says, and rightly so. One that it passes over is right.

    Code is read and compared here; none of it is run.
    """
    status = os.stat(path)
    flags, *times = (int.from_bytes(compiled[at : at + 4], "little") for at in (4, 8, 12))
    seen = [int(status.st_mtime) & 0xFFFFFFFF, status.st_size & 0xFFFFFFFF]
    if compiled[:4] != importlib.util.MAGIC_NUMBER or (flags == 0 and times != seen):
        return True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the source, which its authors know
        try:
            code = marshal.loads(compiled[HEADER:])
            return isinstance(code, CodeType) and code == compile(source, path, "exec", 0, True, level)
        except (EOFError, ValueError, TypeError, SyntaxError):
            return False


if __name__ == "__main__":
    wrong = list(faults(*map(Path, sys.argv[1:])))
    print("\n".join(wrong or ["all as installed"]))
    sys.exit(bool(wrong))
