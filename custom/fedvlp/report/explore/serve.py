"""Serves the page of a model: to this machine alone unless asked, with nothing from outside, leaving nothing on disk.

Images and reports go to whoever reaches the port. The page has no accounts, so reaching it is what is guarded.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import ipaddress
import os
import re
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

LOOPBACK = "127.0.0.1"
PORT = 7860

SEEN_BY_OTHERS = (
    "whoever reaches this port, from any machine, sees the images and reports of the data set, without a password and "
    "unencrypted; end it with Ctrl-C, and leave --host out to serve this machine alone"
)

OWN_NAMES = ("localhost", LOOPBACK, "[::1]")
"""By which a browser on this machine may ask for the page. Another name that leads here is a stranger's (rebinding)."""

OUTSIDE = re.compile(rb"<(?:script|link|meta)\b[^>]*\bhttps?://[^>]*>(?:\s*</script>)?", re.IGNORECASE)
"""What Gradio's page would load from elsewhere: a script, a connection for fonts, a picture for those who share it."""

SCRIPT = re.compile(rb"<script\b(?![^>]*\bsrc=)[^>]*>(.*?)</script>", re.IGNORECASE | re.DOTALL)

POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-eval' {scripts}; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; object-src 'none'; "
    "frame-ancestors 'none'; base-uri 'self'; form-action 'self'"
)
"""Of the page: the browser loads and asks nothing but this server, and runs nothing that stands in a record's text.

Gradio's own scripts make functions of templates, hence 'unsafe-eval'; it does not let any other script run.
"""

SETTINGS = {
    "GRADIO_ANALYTICS_ENABLED": "False",
    "GRADIO_RUN_HISTORY": "False",
    "GRADIO_SHARE": "False",
    "GRADIO_SSR_MODE": "False",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
"""Environment of Gradio, which reads it when it is imported."""


class PageError(ValueError):
    """The page cannot be served; the message says what to do."""


def refuse_without_gradio() -> None:
    """Raises PageError where the extra ``fedvlp[app]`` is not installed."""
    from importlib.util import find_spec

    if find_spec("gradio") is None:
        raise PageError("explore: gradio is not installed here; pip install 'fedvlp[app]'")


def listening(name: str, port: int) -> socket.socket:
    """A socket that listens, so that nobody else takes the port while the model is loaded. ``port`` 0: any free one.

    Raises PageError for a port that is in use or not allowed, and a host that is not this machine's.
    """
    if not 0 <= port <= 65535:
        raise PageError(f"--port is {port}; expected 0 (any free one) to 65535")
    try:
        family, kind, protocol, _, bound = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0]
        opened = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError):
        raise PageError(f"--host is {name!r}, which is no name or address here; leave it out, or give one") from None
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(bound)
        opened.listen()
    except OSError as error:
        opened.close()
        raise PageError(_why_not(error, name, port)) from None
    return opened


def _why_not(error: OSError, name: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} is in use; end what uses it, or give another: --port {port + 1} (0: any free one)"
    if error.errno == errno.EACCES:
        return f"port {port} is not allowed to this user; give one above 1023, e.g. --port {PORT}"
    return f"--host {name}: {error.strerror}; give an address of this machine, or leave it out"


def is_loopback(opened: socket.socket) -> bool:
    """Whether only this machine reaches the socket."""
    return ipaddress.ip_address(opened.getsockname()[0].partition("%")[0]).is_loopback


def address(opened: socket.socket) -> str:
    """What to open in a browser."""
    number, port = opened.getsockname()[:2]
    return f"http://{f'[{number}]' if ':' in number else number}:{port}"


@contextmanager
def own_folder() -> Iterator[Path]:
    """A folder, readable by this user alone, for what Gradio and its server write; it is removed at the end.

    Gradio must be imported within.
    """
    before = {name: os.environ.get(name) for name in (*SETTINGS, "GRADIO_TEMP_DIR")}
    standard = tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="fedvlp-explore-", ignore_cleanup_errors=True) as folder:
        os.environ.update(SETTINGS, GRADIO_TEMP_DIR=folder)
        tempfile.tempdir = folder
        try:
            yield Path(folder)
        finally:
            tempfile.tempdir = standard
            for name, value in before.items():
                os.environ.pop(name, None)
                os.environ.update({} if value is None else {name: value})


class Guarded:
    """ASGI: an application that answers only who asks by a name of this machine, and whose pages load nothing else.

    No page of another site is answered. ``names`` None answers whatever name it is asked by.
    """

    def __init__(self, app: Any, names: tuple[str, ...] | None = OWN_NAMES) -> None:
        self.app, self.names = app, names

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif not self._allowed(scope):
            await send({"type": "http.response.start", "status": 421, "headers": [(b"content-type", b"text/plain")]})
            await send({"type": "http.response.body", "body": b"this page is for this machine alone"})
        else:
            await self.app(scope, receive, _Answer(send))

    def _allowed(self, scope: Any) -> bool:
        if scope["type"] != "http":  # Gradio has no web sockets
            return False
        headers = dict(scope["headers"])
        asked = headers.get(b"host", b"").decode("latin-1").lower()
        origin = headers.get(b"origin")
        if origin is not None and urlsplit(origin.decode("latin-1").lower()).netloc != asked:
            return False  # another site's page asks
        kind = (headers.get(b"sec-fetch-site", b"none"), headers.get(b"sec-fetch-mode"))
        if kind[0] not in (b"none", b"same-origin") and kind[1] != b"navigate":
            return False  # or shows an image of this one: a picture and a script are asked for without an origin
        return self.names is None or re.sub(r":\d+$", "", asked) in self.names


class _Answer:
    """Passes an answer on. HTML is held until it is whole, and cleaned; nothing is stored by the browser."""

    def __init__(self, send: Any) -> None:
        self.send = send
        self.start: Any = None  # of an answer that is HTML
        self.body = b""

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            headers = [(name.lower(), value) for name, value in message["headers"]]
            headers = [(name, value) for name, value in headers if name != b"cache-control"]
            headers += [
                (b"cache-control", b"no-store"),
                (b"referrer-policy", b"no-referrer"),
                (b"x-content-type-options", b"nosniff"),
            ]
            message = {**message, "headers": headers}
            if dict(headers).get(b"content-type", b"").startswith(b"text/html"):
                self.start = message
                return
        elif self.start is not None:
            self.body += message.get("body", b"")
            if not message.get("more_body"):
                await self._finish()
            return
        await self.send(message)

    async def _finish(self) -> None:
        page, policy = cleaned(self.body)
        headers = [(name, value) for name, value in self.start["headers"] if name != b"content-length"]
        headers += [(b"content-length", str(len(page)).encode()), (b"content-security-policy", policy.encode())]
        await self.send({**self.start, "headers": headers})
        await self.send({"type": "http.response.body", "body": page})


def cleaned(page: bytes) -> tuple[bytes, str]:
    """A page without what it would load from outside, and a policy by which it runs its own scripts and no other."""
    page = OUTSIDE.sub(b"", page)
    digests = sorted({hashlib.sha256(script).digest() for script in SCRIPT.findall(page)})
    scripts = " ".join(f"'sha256-{base64.b64encode(digest).decode('ascii')}'" for digest in digests)
    return page, POLICY.format(scripts=scripts)


def serve(app: Any, opened: socket.socket) -> None:
    """Answers until Ctrl-C or SIGTERM, which it passes on to whoever handled them before."""
    import uvicorn

    names = (*OWN_NAMES, opened.getsockname()[0]) if is_loopback(opened) else None
    config = uvicorn.Config(
        Guarded(app, names),
        log_level="critical",  # below, it tells of pages that are still open at the end, and of names of files
        access_log=False,
        timeout_graceful_shutdown=1,  # open pages listen for as long as they are open
        server_header=False,
    )
    uvicorn.Server(config).run(sockets=[opened])
