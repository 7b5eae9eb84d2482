"""What the lead sends to a member: a provisioned startup kit that needs nothing of this repository.

To the kit that `nvflare provision` made (certificates, signed software) come the policies of its role, container files,
units of systemd, and the guide with this consortium's names. All is one archive. Its SHA-256 is read out by telephone.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fedvlp.deploy import software

SITE, SERVER = "site", "server"
STARTUP = {SITE: "fed_client.json", SERVER: "fed_server.json"}
"""The file of ``startup/`` by which a kit is one of a site, or of the server."""

DOCS = ("docs/own-data.md", "docs/security.md")
"""Pages for both roles that are not in ``provisioning/`` but beside it."""
SITE_PAGES = (
    "README.md", "DATA_FLOW.md", "PRIVACY.md", "ENCRYPTION.md", "RUNBOOK.md", "CLUSTERS.md", "DATA_CARD.md", *DOCS
)  # fmt: skip
GUIDES = {SITE: SITE_PAGES, SERVER: ("LEAD.md", *SITE_PAGES)}
FILES = {
    SITE: ("docker/Dockerfile", "docker/Dockerfile.dockerignore", "docker/site.yml", "docker/gpu.yml",
           "systemd/fedvlp-site.service", "systemd/fedvlp-jobs.service"),
    SERVER: ("docker/Dockerfile", "docker/server.yml",
             "systemd/fedvlp-server.service", "systemd/fedvlp-keep@.service"),
}  # fmt: skip
"""How its processes are run: containers, units of systemd. The kit of a person is sent as it is, so that the unit which
follows the lead's jobs comes with the server's."""
GUIDE = "guide"
"""The folder of a kit with the pages."""

EXAMPLE = {"site": "st-anna", "server": "fl.consortium.example", "port": "8002"}
"""What the pages of ``provisioning/`` call them; a kit's guide has its own names instead."""

LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")


class KitError(ValueError):
    """No archive can be made of this folder. Names files of the kit, and no content of them."""


@dataclass(frozen=True)
class Made:
    """An archive for one member."""

    archive: Path
    sha256: str  # of the archive
    role: str  # SITE or SERVER
    name: str  # of the member
    server: str  # HOST:PORT that a site reaches
    differing: tuple[str, ...]  # policies that its local/ had already, unlike those of ``provisioning``


def role_of(kit: Path) -> str:
    """Whose kit it is. Raises KitError for a folder that is none of a site or a server."""
    for role, file in STARTUP.items():
        if (kit / "startup" / file).is_file():
            return role
    raise KitError(
        f"{kit.name or 'this folder'} has neither startup/{STARTUP[SITE]} nor startup/{STARTUP[SERVER]}; give a folder "
        "of a site or the server below prod_00, as `nvflare provision` wrote it. Kits of people are sent as they are"
    )


def make(kit: Path, provisioning: Path, out: Path) -> Made:
    """Completes ``kit`` in place, and writes ``<out>/<name>.tar``, readable for its owner alone.

    ``provisioning``: the folder of this repository with the policies, pages and container files. What is in ``local/``
    already under the name of a policy is kept: the lead may have altered it, or an earlier call have put it there.
    Raises KitError for a kit without signed software or without the policies, and where the archive is there already.
    """
    role = role_of(kit)
    name, server = kit.resolve().name, _server(kit, role)
    _refuse_unsigned(kit)
    target = out / f"{name}.tar"
    if target.exists():
        raise KitError(f"{target.name} is there already; remove it, or give another folder with --out")
    differing = _policies(provisioning / role, kit / "local")
    if role == SERVER:
        _copy(provisioning / SITE / "site.env", kit / "local")
    names = {"site": name if role == SITE else EXAMPLE["site"], **server}
    for file in FILES[role]:
        (kit / file).parent.mkdir(exist_ok=True)
        (kit / file).write_text(_named(_read(provisioning / file), names), encoding="utf-8")
    _guide(kit, role, provisioning, names)
    out.mkdir(parents=True, exist_ok=True)
    _pack(kit.resolve(), target)
    sha256 = hashlib.sha256(target.read_bytes()).hexdigest()
    return Made(target, sha256, role, name, f"{server['server']}:{server['port']}", differing)


def _server(kit: Path, role: str) -> dict[str, str]:
    """Name and port of the server. Raises KitError where the kit does not say them."""
    try:
        given = json.loads((kit / "startup" / STARTUP[role]).read_text(encoding="utf-8"))
        name, port = given["servers"][0]["service"]["target"].split(":")
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise KitError(
            f"startup/{STARTUP[role]} does not say where the server is ({type(error).__name__}); provision it again"
        ) from None
    return {"server": name, "port": port}


def _refuse_unsigned(kit: Path) -> None:
    from cryptography import x509

    folder = kit / software.FOLDER
    if not folder.is_dir():
        raise KitError(
            f"the kit has no {software.FOLDER}/; run `make release`, and provision with fedvlp.flare.SignedSoftware as "
            "provisioning/project.yml does"
        )
    try:
        root = x509.load_pem_x509_certificate((kit / "startup" / "rootCA.pem").read_bytes())
    except (OSError, ValueError):
        raise KitError("startup/rootCA.pem is missing or damaged; provision the kit again") from None
    software.checked_sums(folder)
    software.check_signature(folder, root)


def _policies(given: Path, local: Path) -> tuple[str, ...]:
    """Copies the policies into ``local/``; a file that is there stays. Returns the names of those that differ."""
    if not given.is_dir():
        raise KitError(f"there is no {given.name}/ with policies; give the folder provisioning/ with --provisioning")
    local.mkdir(exist_ok=True)
    differing = []
    for file in sorted(path for path in given.iterdir() if path.is_file()):
        if not (local / file.name).exists():
            _copy(file, local)
        elif (local / file.name).read_bytes() != file.read_bytes():
            differing.append(file.name)
    # `nvflare deploy prepare` begins with the default and removes the file that a site has in its stead.
    _write(local / "resources.json.default", _read(local / "resources.json"))
    return tuple(differing)


def _copy(file: Path, folder: Path) -> None:
    _write(folder / file.name, _read(file))


def _write(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8")


def _guide(kit: Path, role: str, provisioning: Path, names: Mapping[str, str]) -> None:
    """The pages for this member, with its own names; a link to what the kit does not have becomes its text."""
    folder = kit / GUIDE
    folder.mkdir(exist_ok=True)
    there = {(provisioning.parent if file in DOCS else provisioning) / file: Path(file).name for file in GUIDES[role]}
    for page, name in there.items():
        text = _linked(_named(_read(page), names), page, there)
        (folder / name).write_text(text, encoding="utf-8")


def _read(file: Path) -> str:
    if not file.is_file():
        raise KitError(f"there is no {file.parent.name}/{file.name}; give the folder provisioning/ with --provisioning")
    return file.read_text(encoding="utf-8")


def _named(text: str, names: Mapping[str, str]) -> str:
    for key, example in EXAMPLE.items():
        text = re.sub(rf"(?<![\w.]){re.escape(example)}(?!\w)", lambda _, key=key: names[key], text)  # type: ignore[misc]
    return text


def _linked(text: str, page: Path, there: Mapping[Path, str]) -> str:
    """The text of ``page``, its links led to the pages of the kit; ``there``: a page, its name in the kit's one folder.

    A link to what the kit does not have becomes its text.
    """
    names = {os.path.normpath(path): name for path, name in there.items()}

    def plain(match: re.Match[str]) -> str:
        target, hash_, section = match[2].partition("#")
        if target == "" or match[2].startswith("https://"):
            return match[0]
        name = names.get(os.path.normpath(page.parent / target))
        return f"[{match[1]}]({name}{hash_}{section})" if name else match[1]

    return LINK.sub(plain, text)


def _pack(kit: Path, target: Path) -> None:
    """The kit as an archive. Who may read a file stays as it is; owners' names do not go with it."""

    def anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        return entry

    draft = target.with_name(target.name + ".partial")
    opened: Callable[[str, int], int] = lambda path, flags: os.open(path, flags, 0o600)  # noqa: E731  # it holds a key
    try:
        with open(draft, "wb", opener=opened) as file, tarfile.open(fileobj=file, mode="w") as archive:
            archive.add(kit, arcname=kit.name, filter=anonymous)
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)
