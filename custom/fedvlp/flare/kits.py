"""Builders for ``nvflare provision``: private keys or members' own, guarded processes, signed software in every kit."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from cryptography.hazmat.primitives.serialization import Encoding
from nvflare.lighter.constants import CommConfigArg, ConnSecurity, CtxKey, ParticipantType, PropKey, ProvFileName
from nvflare.lighter.ctx import ProvisionContext
from nvflare.lighter.entity import Project
from nvflare.lighter.spec import Builder

from fedvlp.deploy.site_doctor import DESCRIPTORS, PERIMETER
from fedvlp.deploy.software import FOLDER, SIGNATURE, SUMS, SoftwareError, checked_sums, signature

INNER_PORT = {CommConfigArg.HOST: "127.0.0.1", CommConfigArg.CONN_SEC: ConnSecurity.MTLS}
"""Where FLARE's process listens for those of its jobs, and what they have to show."""


class PrivateKits(Builder):
    """Lets nobody else on this machine read what is provisioned, from the moment that a file is made.

    FLARE gives the keys of kits a mode of their own; the root's private key (``state/cert.json``) and the contexts of
    homomorphic encryption get what the shell's umask leaves. Name it first: its ``initialize`` is then the first.
    """

    def initialize(self, project: Project, ctx: ProvisionContext) -> None:
        """Takes every right of group and others from what this process creates."""
        os.umask(0o077)


DESCRIPTORS_LINE = f'ulimit -S -n {DESCRIPTORS} || ulimit -S -n "$(ulimit -H -n)"\n'


class GuardedKits(Builder):
    """Puts ``fedvlp.flare.Perimeter`` into the default resources of server and sites, and has jobs show certificates.

    Name it after ``StaticFileBuilder``, which writes the resources, and ``local/comm_config.json`` in the end. A
    ``local/resources.json`` takes the default's place: it needs the component, too, as those of ``provisioning/`` have
    it. FLARE's start script puts ``/local/custom`` and the folder where it is started before Python's own; here it
    leaves ``PYTHONPATH`` alone, and takes the descriptors that a server needs.
    """

    def build(self, project: Project, ctx: ProvisionContext) -> None:
        """Raises ValueError before there are resources: FLARE then makes no kits."""
        sides = [(project.get_server(), "server"), *((site, "client") for site in project.get_clients())]
        for participant, side in sides:
            file = Path(ctx.get_local_dir(participant)) / ProvFileName.RESOURCES_JSON_DEFAULT
            if not file.exists():
                raise ValueError(f"no {file.name} to guard; name fedvlp.flare.GuardedKits after StaticFileBuilder")
            resources = json.loads(file.read_text(encoding="utf-8"))
            resources["components"].append({"id": "perimeter", "path": PERIMETER, "args": {"side": side}})
            file.write_text(json.dumps(resources, indent=2), encoding="utf-8")
            participant.get_prop(PropKey.COMM_CONFIG_ARGS).update(INNER_PORT)
            script = Path(ctx.get_kit_dir(participant)) / ProvFileName.SUB_START_SH
            text, count = re.subn(r"^.*PYTHONPATH.*\n", "", script.read_text(encoding="utf-8"), flags=re.MULTILINE)
            if count != 2:
                raise ValueError(f"{script.name} is not FLARE 2.9's: it names PYTHONPATH in {count} lines, expected 2")
            script.write_text(text.replace("\n", f"\n{DESCRIPTORS_LINE}", 1), encoding="utf-8")


class RequestedCertificates(Builder):
    """Certifies the key of a member that lets nobody else make it; the one that FLARE made leaves its kit.

    The member sends a request, ``openssl req -new``, which lies here as ``NAME.csr``, and puts its key into the kit.
    Name, organisation, role and dates are those of FLARE's certificate, whatever the request says. Name it after
    ``CertBuilder``.

    Args:
        folder: of the requests, relative to where ``nvflare provision`` runs.
    """

    def __init__(self, folder: str = "requests") -> None:
        self.folder = Path(folder)

    def build(self, project: Project, ctx: ProvisionContext) -> None:
        """Raises ValueError for a request of nobody, of no use, or before there is a root: FLARE then makes no kits."""
        members = {member.name: member for member in project.get_all_participants()}
        for file in sorted(self.folder.glob("*.csr")):
            member, root = members.get(file.stem), ctx.get(CtxKey.ROOT_PRI_KEY)
            if member is None or root is None:
                raise ValueError(
                    f"{file}: there is no participant of this name, or no root yet: name the file after one, and "
                    "fedvlp.flare.RequestedCertificates after CertBuilder"
                )
            kind = ParticipantType.SERVER if member.type == ParticipantType.SERVER else ParticipantType.CLIENT
            made = Path(ctx.get_kit_dir(member)) / f"{kind}.crt"
            made.write_bytes(_certified(file, x509.load_pem_x509_certificate(made.read_bytes()), root))
            made.with_suffix(".key").unlink()


def _certified(file: Path, made: x509.Certificate, root: Any) -> bytes:
    """The certificate ``made``, of the key in the request instead. Raises ValueError."""
    try:
        request = x509.load_pem_x509_csr(file.read_bytes())
        key = request.public_key()
        fit = request.is_signature_valid and isinstance(key, RSAPublicKey) and key.key_size >= 2048
    except ValueError:
        fit = False
    if not fit:
        raise ValueError(
            f"{file} is no request for an RSA key of 2048 bits or more, signed with it, as FLARE wants one"
        )
    builder = x509.CertificateBuilder(
        issuer_name=made.issuer,
        subject_name=made.subject,
        public_key=key,
        serial_number=x509.random_serial_number(),
        not_valid_before=made.not_valid_before_utc,
        not_valid_after=made.not_valid_after_utc,
    )
    for extension in made.extensions:
        of_key = isinstance(extension.value, x509.SubjectKeyIdentifier)
        value = x509.SubjectKeyIdentifier.from_public_key(key) if of_key else extension.value
        builder = builder.add_extension(value, extension.critical)
    return builder.sign(root, hashes.SHA256()).public_bytes(Encoding.PEM)


class SignedSoftware(Builder):
    """Puts a release into ``software/`` of every kit, signed with the key of the consortium's root.

    Name it after ``CertBuilder``, which has that key.

    Args:
        folder: what ``make release`` wrote, relative to where ``nvflare provision`` runs.
    """

    def __init__(self, folder: str = "build/release") -> None:
        self.folder = Path(folder)

    def build(self, project: Project, ctx: ProvisionContext) -> None:
        """Raises SoftwareError without a whole release, or before there is a root: FLARE then makes no kits."""
        names = checked_sums(self.folder)
        key = ctx.get(CtxKey.ROOT_PRI_KEY)
        if key is None:
            raise SoftwareError("there is no root yet; name fedvlp.flare.SignedSoftware after CertBuilder")
        signed = signature((self.folder / SUMS).read_bytes(), key)
        for participant in project.get_all_participants():
            software = Path(ctx.get_ws_dir(participant)) / FOLDER
            software.mkdir()
            for name in (SUMS, *names):
                shutil.copyfile(self.folder / name, software / name)
            (software / SIGNATURE).write_bytes(signed)
