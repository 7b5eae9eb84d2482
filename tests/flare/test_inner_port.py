"""The ports that FLARE opens for its own processes, with FLARE's own server of them and a second account."""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nvflare.fuel.f3.drivers.tcp_driver import TcpStreamServer
from support.nobody import NOBODY, lacking

from fedvlp.deploy.machine import JOBS_SOCKET
from fedvlp.flare import inner_port
from fedvlp.flare.inner_port import watch_inner_ports


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Who was refused."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(TcpStreamServer, "get_request", TcpStreamServer.get_request)
    accounts: list[str] = []
    watch_inner_ports(accounts.append)
    return accounts


@contextmanager
def listening(**params: Any) -> Iterator[tuple[int, list[Any]]]:
    """The port of FLARE's server for children, and the connections that it took."""
    taken: list[Any] = []
    driver = SimpleNamespace(add_connection=taken.append, close_connection=lambda connection: None)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    server = TcpStreamServer(driver, SimpleNamespace(params={"host": "127.0.0.1", "port": port, **params}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield port, taken
    finally:
        threading.Thread(target=server.shutdown, daemon=True).start()  # which waits for the one that it takes
        thread.join(5.0)
        server.server_close()


def connected_as(account: int, port: int) -> None:
    """A process of another account connects, and waits until the other side closes."""
    program = (
        f"import os, socket, encodings.idna\nos.setuid({account})\n"  # loaded first: it may read no file of ours
        f"with socket.create_connection(('127.0.0.1', {port}), 10) as link:\n"
        " try: link.sendall(b'x' * 16); assert link.recv(1) == b''\n except ConnectionError: pass"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=20)


def until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_this_account_connects(refused: list[str]) -> None:
    with listening() as (port, taken), closing(socket.create_connection(("127.0.0.1", port))):
        until(lambda: taken)
    assert refused == []


@pytest.mark.skipif(bool(lacking()), reason=lacking())
def test_another_account_is_put_out_before_a_word_of_it_is_read(refused: list[str]) -> None:
    with listening() as (port, taken):
        connected_as(NOBODY, port)
        assert (refused, taken) == ([f"uid {NOBODY}"], [])


@pytest.mark.skipif(bool(lacking()), reason=lacking())
def test_the_account_that_starts_the_jobs_connects(refused: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It owns a socket in the kit, where FLARE's process runs (flare/job_user.py); it shows the kit's certificate."""
    with socket.socket(socket.AF_UNIX) as jobs:
        jobs.bind(JOBS_SOCKET)
        os.chown(JOBS_SOCKET, NOBODY, NOBODY)
        assert inner_port._own_accounts() == {os.geteuid(), NOBODY}
    Path(JOBS_SOCKET).unlink()
    Path(JOBS_SOCKET).write_text("")
    os.chown(JOBS_SOCKET, NOBODY, NOBODY)
    assert inner_port._own_accounts() == {os.geteuid()}


@pytest.fixture
def certified(tmp_path: Path) -> dict[str, Any]:
    """FLARE's parameters of a port that asks for a certificate, and has one of its own."""
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "certificate.pem")
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=site-1", "-days", "2"]
    subprocess.run([*words, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return {
        "scheme": "stcp", "connection_security": "mtls",
        "ca_cert": certificate, "server_cert": certificate, "server_key": key,
    }  # fmt: skip


def test_a_silent_connection_holds_up_the_others_for_a_while_only(
    refused: list[str], certified: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The standard library would wait for its first word, and take no other connection as long."""
    monkeypatch.setattr(inner_port, "HANDSHAKE_S", 0.1)
    context = ssl.create_default_context(cafile=certified["ca_cert"])
    context.check_hostname = False
    context.load_cert_chain(certified["server_cert"], certified["server_key"])
    with (
        listening(**certified) as (port, taken),
        closing(socket.create_connection(("127.0.0.1", port))),
        socket.create_connection(("127.0.0.1", port), timeout=10.0) as plain,
        context.wrap_socket(plain),
    ):
        until(lambda: taken)
        assert taken[0].get_conn_properties()["peer_cn"] == "site-1"
        assert taken[0].sock.gettimeout() is None


def test_without_a_certificate_nobody_is_heard(refused: list[str], certified: dict[str, Any]) -> None:
    context = ssl.create_default_context(cafile=certified["ca_cert"])
    context.check_hostname = False
    with listening(**certified) as (port, taken), socket.create_connection(("127.0.0.1", port)) as plain:
        with pytest.raises((ssl.SSLError, ConnectionError)), context.wrap_socket(plain) as link:  # noqa: PT012
            link.sendall(b"x" * 16)
            link.recv(1)
        assert taken == []


def test_an_address_is_found_as_the_system_lists_it() -> None:
    """127.0.0.1:8002 in /proc/net/tcp of a machine that writes the lowest byte first: 0100007F:1F42."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        other_end, own_end = ("127.0.0.2", 8002), server.getsockname()
        assert inner_port._as_listed(other_end) == "0200007F:1F42"
        assert inner_port._account(other_end, own_end) is None, "nobody has that end"
        with socket.create_connection(own_end) as there:
            assert inner_port._account(there.getsockname(), own_end) == os.geteuid()
    assert inner_port._account(("192.0.2.1", 8002), ("192.0.2.2", 1)) == os.geteuid(), "the certificate decides"
