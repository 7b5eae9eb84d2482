"""The networks of provisioning/docker/site.yml, rebuilt of this machine's network namespaces: what can a site reach?

Docker makes a network of a bridge in the host's namespace: with an address unless the driver is told otherwise, and
with a default route for its containers unless it is ``internal``. The same is made here of ``ip`` and ``unshare``, in a
world of its own that has no way to this machine's networks and ends with the process. The gate is the real ``socat``
with the compose file's own arguments. ``python -m support.site_network COMPOSE`` prints what `reached` returns.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SERVER, OTHER, THIRD, NAME_SERVER = (
    "192.0.2.10",
    "192.0.2.20",
    "192.0.2.30",
    "192.0.2.53",
)  # documentation's addresses, RFC 5737
OUTSIDE = "198.51.100"  # the network between the gate and the host
PORT, HOST_PORT = 8002, 2222
ENTER = ["unshare", "--user", "--map-root-user", "--net", "--mount", "--pid", "--fork", "--kill-child"]
CONNECT_S = 3.0  # for an answer; a busy machine needs a while to start the gate's child


def lacking() -> str | None:
    """Why this machine cannot rebuild the networks, or nothing."""
    missing = [program for program in ("unshare", "nsenter", "ip", "socat") if shutil.which(program) is None]
    if missing:
        return f"{', '.join(missing)} not installed (Debian: util-linux, iproute2, socat)"
    tried = (
        "mount -t tmpfs none /run && ip netns add one && ip link add name two type bridge"
        " && ip link add name three type veth peer name four"
    )
    done = subprocess.run([*ENTER, "sh", "-c", tried], capture_output=True, text=True, check=False, timeout=20)
    return None if done.returncode == 0 else f"no network namespaces here: {done.stderr.strip()[:200]}"


def interpolated(compose: Path, **variables: str) -> dict[str, Any]:
    """The file as compose reads it, for the keys that are needed here: ${NAME}, ${NAME:-default}, ${NAME:?error}."""
    import yaml

    def value(match: re.Match[str]) -> str:
        name, _, rest = match[1].partition(":")
        return variables.get(name, rest[1:] if rest.startswith("-") else "")

    content: dict[str, Any] = yaml.safe_load(re.sub(r"\$\{([^}]*)\}", value, compose.read_text(encoding="utf-8")))
    return content


def answers(compose: dict[str, Any]) -> dict[str, bool]:
    """`reached`, in a world of its own."""
    command = [*ENTER, sys.executable, "-m", "support.site_network", json.dumps(compose)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, bool] = json.loads(done.stdout)
    return found


def reached(compose: dict[str, Any]) -> dict[str, bool]:
    """{what a process in the site's container tries: whether somebody answers}."""
    network, gate = compose["networks"]["site"], compose["services"]["gate"]
    subnet = network["ipam"]["config"][0]["subnet"]
    base, bits = subnet.rpartition(".")[0], subnet.partition("/")[2]
    passage = gate["networks"]["site"]["ipv4_address"]
    _build(base, bits, passage, network, gate)
    name_of_server, _, address = compose["services"]["jobs"]["extra_hosts"][0].rpartition(":")
    assert name_of_server, "the site knows the server by its name"
    tries = {
        "the server's port, by its name": (address, PORT),
        "the server's port, past the gate": (SERVER, PORT),
        "another port of the server": (SERVER, 443),
        "another machine": (OTHER, PORT),
        "another port of the gate": (passage, 443),
        "a name server": (NAME_SERVER, 53),
        "a service of the host": (f"{base}.1", HOST_PORT),
        "a service of the host, on its other network": (f"{OUTSIDE}.1", HOST_PORT),
        "another machine, with the gate as router": (THIRD, PORT),
    }
    with (
        _listening("world", SERVER, PORT, 443),
        _listening("world", OTHER, PORT),
        _listening("world", THIRD, PORT),
        _listening("world", NAME_SERVER, 53),
        _listening("host", "0.0.0.0", HOST_PORT),
        _gate(gate),
        ThreadPoolExecutor() as together,
    ):
        _until(lambda: _connects("gate", passage, PORT), "the gate listens")
        answered = together.map(lambda where: _connects("site", *where), tries.values())
        return dict(zip(tries, answered, strict=True))


def _build(base: str, bits: str, passage: str, network: dict[str, Any], gate: dict[str, Any]) -> None:
    """Namespaces site, gate, host and world, and the ways between them that the compose file leaves."""
    _run("mount", "-t", "tmpfs", "none", "/run")
    for name in ("site", "gate", "host", "world"):
        _run("ip", "netns", "add", name)
        _in(name, "ip", "link", "set", "lo", "up")
    _in("host", "ip", "link", "add", "bridge", "type", "bridge")
    _in("host", "ip", "link", "set", "bridge", "up")
    _forwards("host", 1)
    _cable("site", "eth0", f"{base}.3/{bits}", "host", "to-site", master="bridge")
    _cable("gate", "eth0", f"{passage}/{bits}", "host", "to-gate", master="bridge")
    _cable("gate", "eth1", f"{OUTSIDE}.2/24", "host", "outside", f"{OUTSIDE}.1/24")
    _cable("world", "eth0", "203.0.113.2/24", "host", "world", "203.0.113.1/24")
    for address in (SERVER, OTHER, THIRD, NAME_SERVER):
        _in("world", "ip", "address", "add", f"{address}/32", "dev", "lo")
    _in("world", "ip", "route", "add", "default", "via", "203.0.113.1")
    _in("host", "ip", "route", "add", "192.0.2.0/24", "via", "203.0.113.2")
    _in("site", "ip", "route", "add", THIRD, "via", passage)  # as nobody without CAP_NET_ADMIN could
    _in("gate", "ip", "route", "add", "default", "via", f"{OUTSIDE}.1")
    _forwards("gate", gate.get("sysctls", {}).get("net.ipv4.ip_forward", 1))  # 1 is what containers begin with
    internal = network.get("internal", False)
    if network.get("driver_opts", {}).get("com.docker.network.bridge.inhibit_ipv4") != "true" or not internal:
        _in("host", "ip", "address", "add", f"{base}.1/{bits}", "dev", "bridge")
    else:  # so that what the gate's network let out would find its way back
        _in("host", "ip", "route", "add", f"{base}.0/{bits}", "via", f"{OUTSIDE}.2")
    if not internal:
        _in("site", "ip", "route", "add", "default", "via", f"{base}.1")


def _cable(
    a: str, a_port: str, a_address: str, b: str, b_port: str, b_address: str | None = None, master: str | None = None
) -> None:
    """A link between two namespaces; its second end has an address or belongs to a bridge."""
    _run("ip", "link", "add", a_port, "netns", a, "type", "veth", "peer", "name", b_port, "netns", b)
    _in(a, "ip", "address", "add", a_address, "dev", a_port)
    if b_address:
        _in(b, "ip", "address", "add", b_address, "dev", b_port)
    if master:
        _in(b, "ip", "link", "set", b_port, "master", master)
    _in(a, "ip", "link", "set", a_port, "up")
    _in(b, "ip", "link", "set", b_port, "up")


@contextmanager
def _listening(namespace: str, address: str, *ports: int) -> Iterator[None]:
    """Somebody who answers on these ports with one byte."""
    program = (
        "import socket, sys, threading\n"
        "def serve(port):\n"
        "    with socket.create_server((sys.argv[1], port)) as server:\n"
        "        while True:\n"
        "            connection, _ = server.accept()\n"
        "            connection.sendall(b'.')\n"
        "            connection.close()\n"
        "[threading.Thread(target=serve, args=(int(p),)).start() for p in sys.argv[2:]]\n"
    )
    command = [*_inside(namespace), sys.executable, "-c", program, address, *map(str, ports)]
    with subprocess.Popen(command) as process:
        try:
            own = "127.0.0.1" if address == "0.0.0.0" else address
            for port in ports:
                _until(lambda port=port: _connects(namespace, own, port), f"{namespace} listens on {port}")
            yield
        finally:
            process.kill()


@contextmanager
def _gate(service: dict[str, Any]) -> Iterator[None]:
    """The compose file's command, with the server's address in the place of its name: there is no name server here."""
    words = [word.replace("fl.consortium.example", SERVER) for word in service["command"]]
    with subprocess.Popen([*_inside("gate"), "socat", *words]) as process:
        try:
            yield
        finally:
            process.kill()


def _connects(namespace: str, address: str, port: int) -> bool:
    """Whether somebody answers a process of the namespace there."""
    program = (
        "import socket, sys\n"
        f"with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout={CONNECT_S}) as opened:\n"
        "    sys.exit(opened.recv(1) != b'.')\n"
    )
    command = [*_inside(namespace), sys.executable, "-S", "-c", program, address, str(port)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def _forwards(namespace: str, yes: int) -> None:
    """Whether a namespace passes on packets that are not for itself."""
    _in(namespace, "sh", "-c", f"echo {yes} >/proc/sys/net/ipv4/ip_forward")


def _inside(namespace: str) -> list[str]:
    return ["nsenter", f"--net=/run/netns/{namespace}"]


def _in(namespace: str, *command: str) -> None:
    _run(*_inside(namespace), *command)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


if __name__ == "__main__":
    socket.setdefaulttimeout(CONNECT_S)
    print(json.dumps(reached(json.loads(sys.argv[1]))))
