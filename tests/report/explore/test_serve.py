"""The page's server: loopback unless asked, a port that is in use, nothing from outside, nothing left on disk."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import socket
import stat
import tempfile
from pathlib import Path
from typing import Any

import pytest

from fedvlp.report.explore import serve


def test_it_listens_on_loopback_and_says_where() -> None:
    with serve.listening(serve.LOOPBACK, 0) as opened:
        port = opened.getsockname()[1]
        assert port > 0
        assert serve.is_loopback(opened)
        assert serve.address(opened) == f"http://127.0.0.1:{port}"
        with pytest.raises(serve.PageError, match=f"port {port} is in use; .* --port {port + 1}"):
            serve.listening(serve.LOOPBACK, port)
    with serve.listening(serve.LOOPBACK, port) as again:
        assert again.getsockname()[1] == port


def test_every_interface_is_not_loopback() -> None:
    with socket.socket() as everywhere:
        everywhere.bind(("0.0.0.0", 0))
        assert not serve.is_loopback(everywhere)


def test_what_cannot_be_listened_to_is_said() -> None:
    for host, port, said in [
        (serve.LOOPBACK, 70000, "--port is 70000; expected 0"),
        (serve.LOOPBACK, -1, "--port is -1; expected 0"),
        ("no such host", 0, "--host is 'no such host', which is no name or address here"),
        ("192.0.2.1", 0, "--host 192.0.2.1: Cannot assign requested address; give an address of this machine"),
    ]:
        with pytest.raises(serve.PageError, match=said):
            serve.listening(host, port)


def test_a_port_of_the_administrators() -> None:
    said = serve._why_not(PermissionError(13, "Permission denied"), "127.0.0.1", 80)
    assert said.startswith("port 80 is not allowed to this user; give one above 1023")


def answer(path: str, host: str | None, body: bytes = b"", kind: str = "text/html", **options: Any) -> Any:
    """Status, headers and body that an application gives through ``Guarded``, in two chunks."""
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"Content-Type", kind.encode()), (b"Cache-Control", b"max-age=3600"), (b"content-length", b"9")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body[:20], "more_body": True})
        await send({"type": "http.response.body", "body": body[20:]})

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asked = {b"host": host, b"origin": options.pop("origin", None)}
    asked |= {b"sec-fetch-site": options.pop("site", None), b"sec-fetch-mode": options.pop("mode", None)}
    headers = [(name, value.encode()) for name, value in asked.items() if value is not None]
    scope = {"type": options.pop("type", "http"), "path": path, "headers": headers}
    asyncio.run(serve.Guarded(app, **options)(scope, None, send))
    content = b"".join(message.get("body", b"") for message in sent[1:])
    return sent[0]["status"], dict(sent[0]["headers"]), content


PAGE = b"""<!doctype html><head>
<meta property="og:image" content="https://elsewhere.example/picture.png" />
<link rel="preconnect" href="https://fonts.example" crossorigin="anonymous" />
<script src="https://cdn.example/resizer.js" async></script>
<script>window.config = {"a": 1};</script>
<script type="module" src="./assets/index.js"></script><link rel="stylesheet" href="./theme.css">
</head><body>films</body>"""


def test_a_page_loads_nothing_from_elsewhere_and_runs_its_own_scripts_alone() -> None:
    status, headers, content = answer("/", "127.0.0.1:7860", PAGE)
    assert status == 200
    assert b"http" not in content
    for remains in (b"./assets/index.js", b"./theme.css", b'window.config = {"a": 1};', b"<body>films</body>"):
        assert remains in content
    assert headers[b"content-length"] == str(len(content)).encode()
    policy = headers[b"content-security-policy"].decode()
    digest = base64.b64encode(hashlib.sha256(b'window.config = {"a": 1};').digest()).decode()
    assert f"script-src 'self' 'unsafe-eval' 'sha256-{digest}';" in policy
    assert policy.startswith("default-src 'self';")
    assert "connect-src 'self'" in policy
    assert headers[b"cache-control"] == b"no-store"


def test_other_answers_pass_as_they_are_and_are_not_stored() -> None:
    script = b'load("https://elsewhere.example")' * 3
    status, headers, content = answer("/a.js", "localhost", script, kind="text/javascript")
    assert (status, content) == (200, script)
    assert headers[b"cache-control"] == b"no-store"
    assert headers[b"content-length"] == b"9"


def test_another_name_that_leads_here_is_refused() -> None:
    """A stranger's page whose name has been bound to 127.0.0.1 asks by that name."""
    for host in ["evil.example", "evil.example:7860", "127.0.0.1.evil.example", "", None]:
        status, _, content = answer("/", host, PAGE)
        assert status == 421
        assert b"films" not in content


def test_this_machines_own_names_are_answered() -> None:
    for host in ["localhost:7860", "127.0.0.1", "[::1]:7860", "LOCALHOST"]:
        assert answer("/", host, PAGE)[0] == 200


def test_another_sites_page_may_not_ask() -> None:
    """The browser tells whose page asks."""
    for names in [serve.OWN_NAMES, None]:
        own = answer("/", "127.0.0.1:7860", PAGE, origin="http://127.0.0.1:7860", names=names)
        assert own[0] == 200
        for origin in ("https://evil.example", "null", "http://127.0.0.1:8000"):
            status, _, content = answer("/", "127.0.0.1:7860", PAGE, origin=origin, names=names)
            assert status == 421
            assert b"films" not in content


def test_another_sites_page_shows_no_film_of_this_one() -> None:
    for site, mode, status in [
        ("cross-site", "no-cors", 421),  # <img>, <script>
        ("same-site", "no-cors", 421),  # of a page at another port of this machine
        ("cross-site", "navigate", 200),  # a link to the page
        ("same-origin", "no-cors", 200),
        ("none", "navigate", 200),
    ]:
        assert answer("/file", "127.0.0.1:7860", PAGE, site=site, mode=mode)[0] == status


def test_every_name_is_answered_where_others_were_let_in() -> None:
    assert answer("/", "reading-room.example", PAGE, names=None)[0] == 200
    assert answer("/", "localhost", PAGE, type="websocket")[0] == 421


def interrupted(seen: list[Path]) -> None:
    """Ctrl-C while a film lies in the folder."""
    with serve.own_folder() as folder:
        seen.append(folder)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert os.environ["GRADIO_TEMP_DIR"] == str(folder)
        assert os.environ["GRADIO_ANALYTICS_ENABLED"] == "False"
        assert Path(tempfile.gettempdir()) == folder
        (folder / "upload").mkdir()
        (folder / "upload" / "film.dcm").write_bytes(b"film")
        raise KeyboardInterrupt


def test_the_folder_of_uploads_is_its_owners_and_goes() -> None:
    before, seen = (dict(os.environ), tempfile.gettempdir()), []
    with pytest.raises(KeyboardInterrupt):
        interrupted(seen)
    assert [folder.exists() for folder in seen] == [False]
    assert (dict(os.environ), tempfile.gettempdir()) == before


def test_without_gradio_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(serve.PageError, match=r"gradio is not installed here; pip install 'fedvlp\[app\]'"):
        serve.refuse_without_gradio()
