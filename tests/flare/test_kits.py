"""Builders of ``nvflare provision``: the key of a member that lets nobody else make it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key
from support.programs import forked
from support.provisioned import PROJECT, Consortium, connected, until

CERT = "  - path: nvflare.lighter.impl.cert.CertBuilder\n"
STATIC = "nvflare.lighter.impl.static_file.StaticFileBuilder, args: {{config_folder: config}}}}\n"
REQUESTS = "  - path: fedvlp.flare.RequestedCertificates\n"
PEOPLE = "\n".join(f"  - {{name: {name}, type: client, org: hospital}}" for name in ("site-1", "site-2"))


def request(folder: Path, name: str, kind: str = "rsa:2048", called: str = "somebody else") -> None:
    """As the guide has it: a key that stays with the member, and a request for it."""
    folder.mkdir(exist_ok=True)
    key, csr = folder / f"{name}.key", folder / f"{name}.csr"
    words = ["openssl", "req", "-new", "-newkey", kind, "-nodes", "-keyout", str(key), "-out", str(csr)]
    subprocess.run([*words, "-subj", f"/CN={called}/O=their own"], check=True, capture_output=True, timeout=120)


def provision(folder: Path, project: str) -> tuple[int, str, Path]:
    """Exit code and output of ``nvflare provision``, and where the kits are."""
    text = project.format(port=8002, admin=8002, sites=PEOPLE, lead="lead@lead.org")
    (folder / "project.yml").write_text(text, encoding="utf-8")
    done = forked(["nvflare", "provision", "-p", "project.yml", "-w", "ws", "--force", "-s"], folder, os.environ)
    return done.returncode, done.stdout + done.stderr, folder / "ws" / "vlp" / "prod_00"


def public(key: object) -> bytes:
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)  # type: ignore[attr-defined,no-any-return]


def test_a_members_own_key_is_certified_under_its_name_and_no_other_is_in_its_kit(tmp_path: Path) -> None:
    """A site, the server and a person; what the request calls itself does not count."""
    names = {"site-1": "client", "localhost": "server", "lead@lead.org": "client"}
    for name in names:
        request(tmp_path / "requests", name)
    code, said, kits = provision(tmp_path, PROJECT.replace(CERT, CERT + REQUESTS))
    assert code == 0, said
    root = x509.load_pem_x509_certificate((kits / "site-2" / "startup" / "rootCA.pem").read_bytes())
    for name, kind in names.items():
        startup = kits / name / "startup"
        made = x509.load_pem_x509_certificate((startup / f"{kind}.crt").read_bytes())
        own = load_pem_private_key((tmp_path / "requests" / f"{name}.key").read_bytes(), None)
        assert public(made.public_key()) == public(own.public_key())
        made.verify_directly_issued_by(root)
        subject = {part.rfc4514_attribute_name: part.value for part in made.subject}
        assert (subject["CN"], subject["O"]) == (name, "hospital" if name == "site-1" else "lead")
        assert not list(startup.glob("*.key")), name
        identifier = made.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        assert identifier == x509.SubjectKeyIdentifier.from_public_key(made.public_key())
    other = x509.load_pem_x509_certificate((kits / "site-2" / "startup" / "client.crt").read_bytes())
    assert other.not_valid_after_utc - made.not_valid_after_utc < other.not_valid_after_utc - other.not_valid_before_utc
    assert {e.oid for e in other.extensions} == {
        e.oid
        for e in x509.load_pem_x509_certificate((kits / "site-1" / "startup" / "client.crt").read_bytes()).extensions
    }
    assert (kits / "site-2" / "startup" / "client.key").is_file()


@pytest.mark.parametrize("kind", ["nobody", "text", "another kind of key", "too small", "too early"])
def test_a_request_of_no_use_makes_no_kits(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "requests"
    if kind == "another kind of key":
        parameters = tmp_path / "ec.pem"
        words = ["openssl", "ecparam", "-name", "prime256v1", "-out", str(parameters)]
        subprocess.run(words, check=True, capture_output=True, timeout=60)
        request(folder, "site-1", f"ec:{parameters}")
    elif kind == "text":
        folder.mkdir()
        (folder / "site-1.csr").write_text("no request", encoding="utf-8")
    else:
        request(folder, "site-3" if kind == "nobody" else "site-1", "rsa:1024" if kind == "too small" else "rsa:2048")
    project = PROJECT.replace(CERT, REQUESTS + CERT if kind == "too early" else CERT + REQUESTS)
    _, said, kits = provision(tmp_path, project)
    assert not kits.exists()
    assert ("there is no participant" if kind in ("nobody", "too early") else "is no request for an RSA key") in said


@pytest.mark.slow(seconds=30)
def test_a_site_with_its_own_key_joins(tmp_path: Path) -> None:
    """It puts the key where the kit's would be."""
    request(tmp_path / "requests", "site-1")

    class WithOwnKey(Consortium):
        def _configure(self) -> None:
            super()._configure()
            (tmp_path / "requests" / "site-1.key").rename(self.kits / "site-1" / "startup" / "client.key")

    asked = REQUESTS.rstrip("\n") + f"\n    args: {{{{folder: {tmp_path / 'requests'}}}}}\n"
    project = PROJECT.replace(CERT, CERT + asked).replace(STATIC, STATIC + "  - path: fedvlp.flare.GuardedKits\n")
    with WithOwnKey(tmp_path / "consortium", sites=("site-1",), project=project) as here:
        until(lambda: connected(here), "the site is connected")
