"""An account of this machine with no right to anything, and what FLARE's processes say to it.

``python -m support.nobody`` reads [{port, cell, token, messages: [[target, channel, topic]]}] in JSON, becomes uid
65534 once FLARE is loaded, sends every message from a cell of that name at that port, and prints the return codes.
"""

from __future__ import annotations

import encodings
import importlib
import json
import os
import pkgutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

NOBODY = 65534


def lacking() -> str:
    """Why this machine cannot start a process of another account, or nothing."""
    return "" if os.geteuid() == 0 else "root, which alone starts processes of another account"


def said_to_nobody(attempts: Sequence[Mapping[str, Any]], seconds: float = 120.0) -> list[str]:
    """The return code of each message."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-m", "support.nobody"], input=json.dumps(list(attempts)), env=environment,
        capture_output=True, text=True, timeout=seconds, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    codes: list[str] = json.loads(done.stdout.splitlines()[-1])
    return codes


def main() -> None:
    from nvflare.fuel.f3.cellnet.cell import Cell
    from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
    from nvflare.fuel.f3.communicator import load_comm_drivers
    from nvflare.fuel.sec.authn import set_add_auth_headers_filters
    from nvflare.private.admin_defs import Message
    from nvflare.private.defs import new_cell_message

    for module in pkgutil.iter_modules(encodings.__path__):  # FLARE loads more as it goes, and nobody may read a file
        if module.name not in ("mbcs", "oem"):  # of Windows
            importlib.import_module(f"encodings.{module.name}")
    load_comm_drivers()
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    codes = []
    for attempt in json.load(sys.stdin):
        url = f"tcp://127.0.0.1:{attempt['port']}"
        cell = Cell(attempt["cell"], "", False, {}, create_internal_listener=False, parent_url=url)
        set_add_auth_headers_filters(cell, *attempt["token"])
        cell.start()
        time.sleep(0.5)  # FLARE connects in a thread
        for target, channel, topic in attempt["messages"]:
            body = Message(topic, "") if channel == "admin" else None
            reply = cell.core_cell.send_request(channel, topic, target, new_cell_message({}, body), timeout=2.0)
            codes.append(reply.get_header(MessageHeaderKey.RETURN_CODE))
    print(json.dumps(codes), flush=True)
    os._exit(0)  # cells would wait for their connections


if __name__ == "__main__":
    main()
