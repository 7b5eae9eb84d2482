"""The ports that FLARE opens on a machine for processes of its own: who connects to them.

FLARE's process of a server or a site listens for the processes of its jobs, and a job's process for its training child.
Every account of the machine reaches these ports. The first asks for the kit's certificate (``local/comm_config.json``),
FLARE's protocol for the second leaves no room for one. So both look at the account that owns the other end, which the
system knows, before anything is read from it.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nvflare.fuel.f3.drivers.tcp_driver import TcpStreamServer

from fedvlp.deploy.machine import JOBS_SOCKET

CONNECTIONS = Path("/proc/self/net/tcp")
"""The system's table of connections, with the account that owns each end on this machine."""

HANDSHAKE_S = 10.0
"""FLARE takes one connection at a time: a silent one holds up the others for as long."""


def watch_inner_ports(refused: Callable[[str], None]) -> None:
    """Has this process close the connections of other accounts, and call ``refused`` with who it was."""

    def get_request(server: TcpStreamServer) -> tuple[socket.socket, Any]:
        """Takes a connection as the standard library does. It passes over one for which OSError is raised."""
        link, other_end = socket.socket.accept(server.socket)  # plain, so that nobody's silence is waited for
        account = _account(other_end, link.getsockname())
        if account not in _own_accounts():
            link.close()
            refused("unknown account" if account is None else f"uid {account}")
            raise PermissionError("another account's connection")
        if server.ssl_context:
            link.settimeout(HANDSHAKE_S)
            link = server.ssl_context.wrap_socket(link, server_side=True)
            link.settimeout(None)
        return link, other_end

    TcpStreamServer.get_request = get_request


def _own_accounts() -> set[int]:
    """This process's account, and the one that starts the jobs where that is a second one (flare/job_user.py)."""
    accounts = {os.geteuid()}
    if Path(JOBS_SOCKET).is_socket():
        accounts.add(Path(JOBS_SOCKET).stat().st_uid)
    return accounts


def _account(other_end: tuple[str, int], own_end: tuple[str, int]) -> int | None:
    """Who owns the other end of a connection; None where it is gone, or nobody knows.

    A process elsewhere, as in another container, is taken for this account's: there the certificate alone decides. So
    is every one where the system has no such table.
    """
    if not CONNECTIONS.exists():
        return os.geteuid()
    wanted = [_as_listed(other_end), _as_listed(own_end)]
    for line in CONNECTIONS.read_text(encoding="ascii").splitlines()[1:]:
        fields = line.split()
        if fields[1:3] == wanted:
            return int(fields[7])
    return None if ipaddress.ip_address(own_end[0]).is_loopback else os.geteuid()


def _as_listed(end: tuple[str, int]) -> str:
    """An address as the table writes it: the number in the machine's own order of bytes, then the port."""
    return f"{int.from_bytes(socket.inet_aton(end[0]), sys.byteorder):08X}:{end[1]:04X}"
