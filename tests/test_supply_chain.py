"""What is installed: nothing without a SHA-256, from one index, within ranges; and the release that sites are given."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support import lock

from fedvlp.deploy import installed, software

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = PROJECT["project"]["optional-dependencies"]
PYTHONS = ("3.10", "3.11", "3.12")
AT_SITES = ("dicom", "privacy", "he", "ocr")  # extras of which a site's policies may need any
LOCKS = {lock.SITE: AT_SITES, lock.EVERYTHING: ("dev",)}


def ranges(extras: tuple[str, ...]) -> list[Requirement]:
    """What pyproject.toml asks for with these extras."""
    found = [Requirement(text) for text in PROJECT["project"]["dependencies"]]
    for text in (text for extra in extras for text in EXTRAS[extra]):
        required = Requirement(text)
        found += ranges(tuple(sorted(required.extras))) if required.name == "fedvlp" else [required]
    return found


def test_every_file_that_may_be_installed_has_a_hash() -> None:
    """``lock.pins`` refuses a line that is anything else than an exact version: an address, an option, a range."""
    for file in LOCKS:
        pins = lock.pins(file)
        assert len(pins) > 100
        assert [pin.name for pin in pins if not pin.hashes] == []


def needed(requirement: Requirement, seen: set[tuple[str, str]]) -> Iterator[str]:
    """The name of what is installed here for a requirement, and of all that it needs in turn."""
    name = canonicalize_name(requirement.name)
    for extra in ("", *requirement.extras):
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        try:
            asks = distribution(name).requires or []
        except PackageNotFoundError:  # an extra that this environment lacks
            continue
        yield name
        for inner in map(Requirement, asks):
            if inner.marker is None or inner.marker.evaluate({"extra": extra}):
                yield from needed(inner, seen)


def test_all_that_is_installed_is_in_the_lock() -> None:
    """Followed through the metadata of what is installed here, which no list of ours made."""
    for file in LOCKS:
        seen: set[tuple[str, str]] = set()
        names = {name for requirement in ranges(LOCKS[file]) for name in needed(requirement, seen)}
        assert len(names) > 80
        assert names <= {pin.name for pin in lock.pins(file)}


def test_the_lock_keeps_to_the_ranges() -> None:
    """On Linux, x86-64. Run `make lock` after a change of pyproject.toml."""
    for file in LOCKS:
        for python in PYTHONS:
            where = {
                "python_version": python, "python_full_version": f"{python}.9", "sys_platform": "linux",
                "platform_machine": "x86_64",
            }  # fmt: skip
            applying: dict[str, list[str]] = {}
            for pin in lock.pins(file):
                if pin.applies(**where):
                    applying.setdefault(pin.name, []).append(pin.version)
            assert {name: versions for name, versions in applying.items() if len(versions) != 1} == {}
            for requirement in ranges(LOCKS[file]) + [
                Requirement(text) for text in PROJECT["build-system"]["requires"]
            ]:
                if requirement.marker and not requirement.marker.evaluate(where):
                    continue
                (version,) = applying[canonicalize_name(requirement.name)]
                assert requirement.specifier.contains(version), f"{requirement}: {version}"


def test_every_range_ends_somewhere() -> None:
    """The next major version of a package is tried here before it is anywhere."""
    texts = [*PROJECT["project"]["dependencies"], *PROJECT["build-system"]["requires"]]
    texts += [text for extra in EXTRAS.values() for text in extra]
    operators = {
        text: {specifier.operator for specifier in Requirement(text).specifier}
        for text in texts
        if Requirement(text).name != "fedvlp"
    }
    assert [text for text, used in operators.items() if used.isdisjoint({"<", "~=", "=="})] == []


def test_a_site_runs_what_was_tested() -> None:
    """Each pin of a site's lock is one of the lock that the tests run with, with the same files."""
    tested = {(pin.name, pin.version): pin.hashes for pin in lock.pins(lock.EVERYTHING)}
    for pin in lock.pins(lock.SITE):
        assert tested[pin.name, pin.version] == pin.hashes


def installs() -> list[list[list[str]]]:
    """What `make` installs by, step by step: the words after ``pip`` of uv's command and of pip's, or pip's alone."""
    command = ["make", "--dry-run", "--always-make", "VENV=no-such", "no-such/tools"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if " pip " in line and " install " in line]
    return [
        [shlex.split(one.partition(" pip ")[2]) for one in line.split(" || ") if " install " in one] for line in lines
    ]


def without_options(words: list[str]) -> list[str]:
    return [word for word in words if word not in ("--quiet", "--disable-pip-version-check", "--python")]


def test_make_installs_nothing_without_a_hash() -> None:
    """uv by pip; what a site needs, and the tools, by uv or by pip; fedvlp itself."""
    (uv,), site, (own,), tools = installs()
    for step in (site, tools):
        with_uv, with_pip = map(without_options, step)
        assert [word for word in with_uv if word != "no-such/bin/python"] == with_pip
    fetched = [uv, *site, *tools]
    assert [words[-1] for words in (uv, site[0], tools[0])] == [
        "no-such/uv.txt", "provisioning/requirements.txt", "constraints.txt",
    ]  # fmt: skip
    assert all({"--require-hashes", "--no-deps"} <= set(words) for words in fetched), "nothing is resolved"
    assert {"--no-deps", "--no-build-isolation", "."} <= set(own), "nothing is fetched for it, setuptools neither"
    assert all("--only-binary" in words for words in (uv, *site))
    assert all("--no-build-isolation" in words for words in tools), (
        "what is no wheel is built with the lock's setuptools"
    )
    assert not [word for words in (*fetched, own) for word in words if "index" in word or "find-links" in word]


def test_uv_itself_is_taken_from_the_lock() -> None:
    """The line of the Makefile that picks it, run on the lock: one pin, with all its hashes."""
    command = ["make", "--dry-run", "--always-make", "VENV=no-such", "no-such/ready"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("sed ")]
    picked = subprocess.run(shlex.split(line.partition(">")[0]), cwd=ROOT, capture_output=True, text=True, check=True)
    (pin,) = [pin for pin in lock.pins(lock.EVERYTHING) if pin.name == "uv"]
    name, *hashes = picked.stdout.replace("\\\n", " ").split()
    assert name == f"uv=={pin.version}"
    assert {one.removeprefix("--hash=sha256:") for one in hashes} == set(pin.hashes)


@pytest.mark.parametrize("installer", ["uv", "pip"])
@pytest.mark.slow(seconds=2)
@pytest.mark.parametrize("altered", [False, True])
def test_an_altered_file_is_not_installed(altered: bool, installer: str, tmp_path: Path) -> None:
    """`make`'s step for a site, by uv and by pip, with a lock of one package that lies in a folder here."""
    wheels, target = tmp_path / "wheels", tmp_path / "target"
    wheels.mkdir()
    wheel = wheels / "tiny-1-py3-none-any.whl"
    files = {
        "tiny.py": "A = 1\n",
        "tiny-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: tiny\nVersion: 1\n",
        "tiny-1.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: none\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "tiny-1.dist-info/RECORD": "tiny.py,,\ntiny-1.dist-info/RECORD,,\n",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    (tmp_path / "provisioning").mkdir()
    (tmp_path / "provisioning" / "requirements.txt").write_text(f"tiny==1 \\\n    --hash=sha256:{digest}\n")
    if altered:
        with zipfile.ZipFile(wheel, "a") as archive:
            archive.writestr("more.py", "B = 2\n")
    program = [str(Path(sys.executable).with_name("uv"))] if installer == "uv" else [sys.executable, "-m"]
    words = [word.replace("no-such/bin/python", sys.executable) for word in installs()[1][installer == "pip"]]
    here = ["--no-index", "--find-links", str(wheels), "--target", str(target)]
    done = subprocess.run(
        [*program, "pip", *words, *here], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60,
        env={**os.environ, "PIP_CONFIG_FILE": os.devnull, "UV_NO_CONFIG": "1", "UV_CACHE_DIR": str(tmp_path / "cache")},
    )  # fmt: skip
    if altered:
        assert done.returncode != 0
        assert re.search("DO NOT MATCH THE HASHES|Hash mismatch", done.stderr)
        assert not (target / "tiny.py").exists()
    else:
        assert done.returncode == 0, done.stderr
        assert (target / "tiny.py").exists()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What `make release` reads, with things beside it that must not get into the wheel, and this environment."""
    folder = tmp_path / "checkout"
    shutil.copytree(ROOT / "custom", folder / "custom", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    (folder / "provisioning").mkdir()
    for name in ("Makefile", "pyproject.toml", "README.md", "LICENSE", "provisioning/requirements.txt"):
        shutil.copy(ROOT / name, folder / name)
    stale = folder / "build" / "lib" / "fedvlp"
    stale.mkdir(parents=True)
    (stale / "removed_long_ago.py").write_text("")
    (folder / "environment").symlink_to(sys.prefix)
    return folder


def make(folder: Path, *words: str, umask: int = -1) -> None:
    """`make` with this environment, which is not made anew."""
    command = ["make", "--old-file=environment/tools", "VENV=environment", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=600, umask=umask)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow(seconds=15)
def test_a_release_is_the_code_its_lock_and_a_list_of_both(checkout: Path) -> None:
    make(checkout, "release")
    release = checkout / "build" / "release"
    assert software.checked_sums(release).keys() == {software.wheel_of(release).name, "requirements.txt", "sbom.json"}
    package = Path(software.__file__).parents[1]
    differing = installed.differing_files(software.wheel_of(release), package)
    assert differing == [], "the wheel is the code that the tests ran"
    assert (release / "requirements.txt").read_bytes() == lock.SITE.read_bytes()
    listed = json.loads((release / "sbom.json").read_text())
    assert listed["metadata"]["component"]["name"] == "fedvlp"
    components = {
        (part["name"], part["version"]): {digest["content"] for digest in part["externalReferences"][0]["hashes"]}
        for part in listed["components"]
    }
    assert components == {(pin.name, pin.version): set(pin.hashes) for pin in lock.pins(lock.SITE)}
    first = {path.name: path.read_bytes() for path in release.iterdir()}
    for file in (checkout / "custom").rglob("*.py"):
        file.chmod(0o600)
    make(checkout, "release", "VALIDATE=--no-validate", umask=0o077)
    again = {path.name: path.read_bytes() for path in release.iterdir()}
    assert first == again, "whoever has the code can make the same bytes"


@pytest.mark.slow(seconds=5)
def test_the_list_of_an_environment_names_what_is_installed_in_it(checkout: Path) -> None:
    make(checkout, "sbom", "VALIDATE=--no-validate")
    listed = json.loads((checkout / "build" / "sbom.json").read_text())
    assert listed["bomFormat"] == "CycloneDX"
    components = {canonicalize_name(part["name"]): part for part in listed["components"]}
    seen: set[tuple[str, str]] = set()
    for name in {name for requirement in ranges(AT_SITES) for name in needed(requirement, seen)}:
        assert components[name]["version"] == distribution(name).version
        listed_name = components[name]["purl"].removeprefix("pkg:pypi/").partition("@")[0]
        assert canonicalize_name(listed_name) == name
    assert components["torch"]["licenses"]
