"""Builders for ``nvflare provision``: private keys, guarded processes and signed software in every kit."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from nvflare.lighter.constants import CommConfigArg, ConnSecurity, CtxKey, PropKey, ProvFileName
from nvflare.lighter.ctx import ProvisionContext
from nvflare.lighter.entity import Project
from nvflare.lighter.spec import Builder

from fedvlp.deploy.site_doctor import PERIMETER
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


class GuardedKits(Builder):
    """Puts ``fedvlp.flare.Perimeter`` into the default resources of server and sites, and has jobs show certificates.

    Name it after ``StaticFileBuilder``, which writes the resources, and ``local/comm_config.json`` in the end. A
    ``local/resources.json`` takes the default's place: it needs the component, too, as those of ``provisioning/`` have
    it.
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
