"""The software of a kit: fedvlp's wheel, the lock of what it needs, their SHA-256 and the consortium's signature.

``make release`` writes the files and ``SHA256SUMS`` (the form of ``sha256sum``). Provisioning puts them into
``software/`` of every kit and signs ``SHA256SUMS`` with the private key of the consortium's root, whose certificate is
``startup/rootCA.pem``: RSA-PSS with SHA-256, which ``openssl dgst`` reads as well, before any fedvlp is installed.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import sysconfig
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import fedvlp

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

FOLDER = "software"  # of a kit
SUMS = "SHA256SUMS"
SIGNATURE = "SHA256SUMS.sig"
LOCK = "requirements.txt"
LISTED = re.compile(r"([0-9a-f]{64}) [ *]([\w.+-]+)")  # a line of SHA256SUMS; names of files, never a path
PINNED = re.compile(r"^([\w.-]+)==([^\s;\\]+)", re.MULTILINE)  # a line of the lock


class SoftwareError(ValueError):
    """The files of a release are not those that were summed, or not what the consortium signed."""


def checked_sums(folder: Path) -> dict[str, str]:
    """{name: SHA-256} of every file of a release in ``folder``, as ``SHA256SUMS`` says and as each file is.

    Raises SoftwareError for a file that is missing, altered, or not listed, and where there is no list or no wheel.
    """
    try:
        lines = (folder / SUMS).read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        raise SoftwareError(f"there is no readable {SUMS}; `make release` writes it") from None
    listed: dict[str, str] = {}
    for line in lines:
        match = LISTED.fullmatch(line)
        if match is None:
            raise SoftwareError(f"{SUMS} has a line that is not '<SHA-256>  <file>'")
        listed[match[2]] = match[1]
    there = {path.name for path in folder.iterdir()} - {SUMS, SIGNATURE}
    if there != listed.keys():
        raise SoftwareError(f"{SUMS} lists {sorted(listed)}, the folder holds {sorted(there)}; get the release again")
    altered = sorted(name for name, digest in listed.items() if _digest((folder / name).read_bytes()) != digest)
    if altered:
        raise SoftwareError(f"{', '.join(altered)}: not the SHA-256 of {SUMS}; install nothing of it, ask for it again")
    if sum(name.endswith(".whl") for name in listed) != 1:
        raise SoftwareError(f"{SUMS} lists {sorted(listed)}; a release has exactly one wheel")
    return listed


def signature(sums: bytes, key: object) -> bytes:
    """The signature of a ``SHA256SUMS`` by the root's private ``key``. Raises SoftwareError if it is no RSA key."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import padding
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey

    if not isinstance(key, RSAPrivateKey):
        raise SoftwareError("the root's key is no RSA key; FLARE's own are, provision with those")
    pss = padding.PSS(padding.MGF1(hashes.SHA256()), padding.PSS.DIGEST_LENGTH)
    return key.sign(sums, pss, hashes.SHA256())


def check_signature(folder: Path, root: Certificate) -> None:
    """Raises SoftwareError unless the consortium of the certificate ``root`` signed ``SHA256SUMS`` of ``folder``."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import padding
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

    try:
        signed, sums = (folder / SIGNATURE).read_bytes(), (folder / SUMS).read_bytes()
    except OSError:
        raise SoftwareError(f"no readable {SUMS} and {SIGNATURE}; ask the consortium for the kit's software") from None
    public = root.public_key()
    pss = padding.PSS(padding.MGF1(hashes.SHA256()), padding.PSS.AUTO)
    try:
        if not isinstance(public, RSAPublicKey):
            raise InvalidSignature
        public.verify(signed, sums, pss, hashes.SHA256())
    except InvalidSignature:
        raise SoftwareError(
            f"{SIGNATURE} is not by the root of startup/rootCA.pem; install nothing of it, ask the consortium"
        ) from None


def wheel_of(folder: Path) -> Path:
    """The wheel of a release whose sums were checked."""
    (wheel,) = folder.glob("*.whl")
    return wheel


def installed_faults(wheel: Path) -> list[str]:
    """What is installed otherwise than by ``wheel`` and by pip, a line each; it takes a minute, most of it for torch.

    Raises SoftwareError where that cannot be looked at. The program that looks is the wheel's (deploy/installed.py), in
    a process that runs nothing of the packages.
    """
    isolated = [sys.executable, "-I", "-S", "-B", "-"]
    command = [*isolated, str(wheel), sysconfig.get_path("purelib"), str(Path(fedvlp.__file__).parent)]
    try:
        with zipfile.ZipFile(wheel) as archive:
            program = archive.read("fedvlp/deploy/installed.py")
    except KeyError:
        raise SoftwareError(
            f"{wheel.name} is of a fedvlp that cannot look at what is installed; ask for a newer kit"
        ) from None
    done = subprocess.run(command, input=program, capture_output=True, check=False)
    lines = done.stdout.decode(errors="replace").splitlines()
    if done.returncode and not lines:
        raise SoftwareError(f"what is installed could not be compared with {wheel.name} (exit code {done.returncode})")
    return lines if done.returncode else []


def other_versions(lock: Path) -> list[str]:
    """Each package that is installed in a version that the lock does not pin, as "torch 2.1 (2.15.0)"."""
    pinned: dict[str, list[str]] = {}
    for name, pin in PINNED.findall(lock.read_text(encoding="utf-8")):
        pinned.setdefault(name, []).append(pin)
    others = []
    for name, pins in sorted(pinned.items()):
        try:
            installed = version(name)
        except PackageNotFoundError:  # of another platform, or an extra that the site does not use
            continue
        if installed not in pins:
            others.append(f"{name} {installed} ({' or '.join(pins)})")
    return others


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
