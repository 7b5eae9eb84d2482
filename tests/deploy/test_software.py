"""A release's sums, its signature, and the comparison with what runs. Kits and doctor: test_site_doctor.py."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from support import release

from fedvlp.deploy import software
from fedvlp.deploy.software import SoftwareError


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return release.written(tmp_path_factory.mktemp("release") / "release")


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A release that a test may alter."""
    return Path(shutil.copytree(written, tmp_path / "release"))


def test_the_sums_of_a_release_are_those_of_its_files(folder: Path) -> None:
    names = software.checked_sums(folder).keys()
    assert names == {software.wheel_of(folder).name, software.LOCK}
    subprocess.run(["sha256sum", "--check", "--strict", software.SUMS], cwd=folder, check=True, capture_output=True)


def second_wheel(folder: Path) -> None:
    shutil.copy(software.wheel_of(folder), folder / "other-1-py3-none-any.whl")
    release.summed(folder)


def no_wheel(folder: Path) -> None:
    software.wheel_of(folder).unlink()
    release.summed(folder)


def line(text: str) -> Callable[[Path], None]:
    def add(folder: Path) -> None:
        sums = folder / software.SUMS
        sums.write_text(sums.read_text() + text + "\n")

    return add


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "altered": (lambda folder: (folder / software.LOCK).write_text(""), "not the SHA-256"),
    "missing": (lambda folder: (folder / software.LOCK).unlink(), "the folder holds"),
    "not listed": (lambda folder: (folder / "more.py").write_text(""), "the folder holds"),
    "two wheels": (second_wheel, "exactly one wheel"),
    "no wheel": (no_wheel, "exactly one wheel"),
    "no sums": (lambda folder: (folder / software.SUMS).unlink(), "no readable SHA256SUMS"),
    "no text": (lambda folder: (folder / software.SUMS).write_bytes(b"\xff"), "no readable SHA256SUMS"),
    "a path": (line(f"{'0' * 64}  ../startup/client.key"), "is not '<SHA-256>  <file>'"),
    "an absolute path": (line(f"{'0' * 64}  /etc/passwd"), "is not '<SHA-256>  <file>'"),
    "a short sum": (line(f"{'0' * 63}  more"), "is not '<SHA-256>  <file>'"),
    "an empty line": (line(""), "is not '<SHA-256>  <file>'"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_release_that_is_not_whole_is_refused(what: str, folder: Path) -> None:
    alter, said = WRONG[what]
    alter(folder)
    with pytest.raises(SoftwareError, match=said) as refused:
        software.checked_sums(folder)
    assert str(folder) not in str(refused.value)


def root(key: rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "root")])
    now = datetime.now(timezone.utc)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    dated = builder.serial_number(1).not_valid_before(now).not_valid_after(now + timedelta(days=1))
    return dated.sign(key, hashes.SHA256())


@pytest.fixture(scope="module")
def key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(65537, 2048)


def test_what_the_root_signed_is_known_by_its_certificate_and_by_openssl(folder: Path, key: rsa.RSAPrivateKey) -> None:
    sums = folder / software.SUMS
    (folder / software.SIGNATURE).write_bytes(software.signature(sums.read_bytes(), key))
    software.check_signature(folder, root(key))
    pem = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    (folder / "root.pub").write_bytes(pem)
    command = "openssl dgst -sha256 -sigopt rsa_padding_mode:pss -verify root.pub -signature SHA256SUMS.sig SHA256SUMS"
    subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)


def test_nobody_elses_signature_is_taken(folder: Path, key: rsa.RSAPrivateKey) -> None:
    sums, signed = folder / software.SUMS, folder / software.SIGNATURE
    with pytest.raises(SoftwareError, match="no readable"):
        software.check_signature(folder, root(key))
    other = rsa.generate_private_key(65537, 2048)
    signed.write_bytes(software.signature(sums.read_bytes(), other))
    with pytest.raises(SoftwareError, match="not by the root"):
        software.check_signature(folder, root(key))
    signed.write_bytes(software.signature(sums.read_bytes(), key))
    sums.write_bytes(sums.read_bytes() + b"\n")
    with pytest.raises(SoftwareError, match="not by the root"):
        software.check_signature(folder, root(key))


def test_a_root_of_another_kind_of_key_is_said(folder: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    with pytest.raises(SoftwareError, match="no RSA key"):
        software.signature(b"sums", key)
    (folder / software.SIGNATURE).write_bytes(b"signed")
    with pytest.raises(SoftwareError, match="not by the root"):
        software.check_signature(folder, root(key))


def test_versions_that_the_lock_does_not_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that is not installed is of another platform or an unused extra; one of two pins is enough."""
    lines = [
        "a-b==1.0 ; python_full_version < '3.11' \\",
        "    --hash=sha256:0",
        "a-b==2.0 \\",
        "    --hash=sha256:0",
        "c==1",
        "d==1",
    ]
    (tmp_path / "lock").write_text("\n".join(lines))
    there = {"a-b": "2.0", "c": "3"}

    def version(name: str) -> str:
        if name not in there:
            raise software.PackageNotFoundError(name)
        return there[name]

    monkeypatch.setattr(software, "version", version)
    assert software.other_versions(tmp_path / "lock") == ["c 3 (1)"]
    there["a-b"] = "3.0"
    assert software.other_versions(tmp_path / "lock") == ["a-b 3.0 (1.0 or 2.0)", "c 3 (1)"]
