"""The comparison of what is installed with the wheel and with pip's notes, on a small folder of packages."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import py_compile
import re
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import fedvlp
from fedvlp.deploy import installed, software

OTHER = "raise SystemExit('another code')\n"
CORE = "one/core.py"


def write(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def noted(folder: Path, *names: str) -> None:
    """RECORD of pip: a line for each file, with its SHA-256."""
    lines = ["one-1.0.dist-info/RECORD,,"]
    for name in names:
        digest = hashlib.sha256((folder / name).read_bytes()).digest()
        lines.append(f"{name},sha256={base64.urlsafe_b64encode(digest).decode().rstrip('=')},9")
    write(folder / "one-1.0.dist-info" / "RECORD", "\n".join(lines) + "\n")


def wheel(folder: Path, program: bytes | None) -> Path:
    """A wheel of the fedvlp that is installed in ``folder``, with this program to look at it."""
    file = folder.parent / "fedvlp-1-py3-none-any.whl"
    if program is not None:
        (folder / "fedvlp" / "deploy").mkdir(exist_ok=True)
        (folder / "fedvlp" / "deploy" / "installed.py").write_bytes(program)
    with zipfile.ZipFile(file, "w") as archive:
        for path in sorted((folder / "fedvlp").rglob("*.py")):
            archive.write(path, path.relative_to(folder))
    return file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two packages, and a program beside them, as pip installs them: one file was compiled, one twice."""
    made = tmp_path / "site-packages"
    for name in ("one/__init__.py", CORE, "fedvlp/__init__.py", "fedvlp/gate.py", "one.pth", "../bin/one"):
        write(made / name, f"HERE = {name!r}\n" if name.endswith(".py") else "")
    noted(made, "one/__init__.py", CORE, "one.pth", "../bin/one")
    py_compile.compile(str(made / CORE), optimize=1)
    for name in (CORE, "fedvlp/gate.py"):
        py_compile.compile(str(made / name))
    wheel(made, None)
    return made


def looked(folder: Path) -> list[str]:
    return list(installed.faults(folder.parent / "fedvlp-1-py3-none-any.whl", folder))


def test_what_is_as_it_was_installed_has_no_fault(folder: Path) -> None:
    assert looked(folder) == []


def tag(level: str = "") -> str:
    return f"{sys.implementation.cache_tag}{level and f'.opt-{level}'}.pyc"


def compiled(folder: Path, name: str, level: str = "") -> Path:
    return Path(importlib.util.cache_from_source(str(folder / name), optimization=level))


def of_other_code(name: str, level: str = "", flags: bytes | None = None) -> Callable[[Path], None]:
    """A compiled file that Python takes for the source's: the beginning stays, the code is another's."""

    def alter(folder: Path) -> None:
        file = compiled(folder, name, level)
        other = py_compile.compile(str(write(folder.parent / "other.py", OTHER)), str(folder.parent / "other.pyc"))
        begin = file.read_bytes()[:16]
        begin = begin[:4] + flags + bytes(8) if flags else begin
        file.write_bytes(begin + Path(str(other)).read_bytes()[16:])

    return alter


def listed_too(folder: Path) -> None:
    """RECORD is not signed: who writes a module may note it, too."""
    write(folder / "usercustomize.py", OTHER)
    noted(folder, "one/__init__.py", CORE, "one.pth", "../bin/one", "usercustomize.py")


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "a module of a package": (lambda folder: write(folder / CORE, OTHER), f"altered: {CORE}"),
    "a program": (lambda folder: write(folder / "../bin/one", OTHER), "altered: ../bin/one"),
    "a path file": (lambda folder: write(folder / "one.pth", "import os"), "altered: one.pth"),
    "a module gone": (lambda folder: (folder / CORE).unlink(), f"missing: {CORE}"),
    "a module more": (lambda folder: write(folder / "more.py", OTHER), "in no RECORD: more.py"),
    "a module more in a package": (lambda folder: write(folder / "one/more.py", OTHER), "in no RECORD: one/more.py"),
    "a compiled module without source": (lambda folder: write(folder / "m.pyc", ""), "in no RECORD: m.pyc"),
    "a library before a module": (lambda folder: write(folder / "one/core.so", ""), "in no RECORD: one/core.so"),
    "a path file more": (lambda folder: write(folder / "more.pth", "import os"), "in no RECORD: more.pth"),
    "a link to a package": (lambda folder: (folder / "more").symlink_to("/tmp"), "in no RECORD: more"),
    "sitecustomize": (lambda folder: write(folder / "sitecustomize.py", OTHER), "run at every start: sitecustomize.py"),
    "usercustomize in RECORD": (listed_too, "run at every start: usercustomize.py"),
    "sitecustomize as a package": (
        lambda folder: write(folder / "sitecustomize/__init__.py", OTHER), "in no RECORD: sitecustomize/__init__.py",
    ),
    "fedvlp's module": (lambda folder: write(folder / "fedvlp/gate.py", OTHER), "not the wheel's: fedvlp/gate.py"),
    "fedvlp's module gone": (lambda folder: (folder / "fedvlp/gate.py").unlink(), "not the wheel's: fedvlp/gate.py"),
    "one more of fedvlp": (lambda folder: write(folder / "fedvlp/gate.so", ""), "not the wheel's: fedvlp/gate.so"),
    "fedvlp compiled": (
        of_other_code("fedvlp/gate.py"), f"not compiled from its source: fedvlp/__pycache__/gate.{tag()}",
    ),
    "compiled": (of_other_code(CORE), f"not compiled from its source: one/__pycache__/core.{tag()}"),
    "compiled with -O": (of_other_code(CORE, "1"), f"not compiled from its source: one/__pycache__/core.{tag('1')}"),
    "compiled, by hash, unchecked": (
        of_other_code(CORE, flags=b"\x01\0\0\0"), f"not compiled from its source: one/__pycache__/core.{tag()}",
    ),
    "cut": (
        lambda folder: compiled(folder, CORE).write_bytes(compiled(folder, CORE).read_bytes()[:-9]),
        f"not compiled from its source: one/__pycache__/core.{tag()}",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_each_thing_that_is_not_as_it_was_installed_is_named(what: str, folder: Path) -> None:
    alter, fault = WRONG[what]
    alter(folder)
    assert looked(folder) == [fault]


def test_what_python_passes_over_is_no_fault(folder: Path) -> None:
    """A compiled file of another Python, and one that is older than its source: both are compiled anew."""
    file = compiled(folder, CORE)
    of_other_code(CORE)(folder)
    content = file.read_bytes()
    file.write_bytes(b"\0\0\r\n" + content[4:])
    assert looked(folder) == []
    file.write_bytes(content[:8] + bytes(4) + content[12:])
    assert looked(folder) == []
    write(folder / "one/__pycache__/left.cpython-311.pyc", "of a module that is gone")
    assert looked(folder) == []


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder, in the place of this Python's own."""
    monkeypatch.setattr(fedvlp, "__file__", str(folder / "fedvlp" / "__init__.py"))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(folder))
    return folder


def test_the_program_is_the_wheels_and_runs_nothing_of_what_it_looks_at(here: Path) -> None:
    file = wheel(here, Path(installed.__file__).read_bytes())
    assert software.installed_faults(file) == []
    write(here / "sitecustomize.py", "raise SystemExit(0)")
    write(here / "zipfile.py", "raise SystemExit(0)")
    write(here / "fedvlp/deploy/installed.py", "raise SystemExit(0)")
    assert software.installed_faults(file) == [
        "not the wheel's: fedvlp/deploy/installed.py", *sorted(("in no RECORD: zipfile.py",
        "run at every start: sitecustomize.py")),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("program", "said"), [(None, "ask for a newer kit"), (b"raise SystemExit(3)", "could not be compared")]
)
def test_a_wheel_that_cannot_look_is_no_answer(program: bytes | None, said: str, here: Path) -> None:
    with pytest.raises(software.SoftwareError, match=said):
        software.installed_faults(wheel(here, program))


def test_the_guides_own_command_is_this_program(here: Path, tmp_path: Path) -> None:
    """As an engineer runs it, before anything of what is installed runs."""
    guide = (Path(__file__).parents[2] / "provisioning" / "README.md").read_text()
    (lines,) = re.findall(r"^ *unzip -p .*\n.*", guide, re.MULTILINE)
    wheel(here, Path(installed.__file__).read_bytes())
    command = lines.replace("/opt/fedvlp/bin/python", sys.executable).replace(
        "/opt/fedvlp/lib/python3.*/site-packages", str(here)
    )
    for expected, code in (("all as installed", 0), ("in no RECORD: more.pth", 1)):
        done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (done.stdout.strip(), done.returncode) == (expected, code), done
        write(here / "more.pth", "")
