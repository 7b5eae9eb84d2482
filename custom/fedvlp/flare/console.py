"""The console's commands at the server: those for which FLARE asks authorization.json, and no others."""

from __future__ import annotations

from typing import Any

from nvflare.fuel.hci.proto import InternalCommands
from nvflare.fuel.hci.server.reg import ServerCommandRegister

OPEN = frozenset(
    {
        InternalCommands.CERT_LOGIN,
        InternalCommands.LOGOUT,
        InternalCommands.CHECK_SESSION,
        InternalCommands.GET_CMD_LIST,
    }
)
"""What every account may ask: the login and its end, whether it holds, and which commands there are."""


def authorized_alone() -> None:
    """Has the server register no command that is neither authorized nor ``OPEN``.

    FLARE registers diagnostics that anybody may call, and hides them. They show connections with what is said there,
    and send messages of any size between processes.
    """
    finalize = ServerCommandRegister.finalize

    def without_the_rest(register: ServerCommandRegister, *args: Any) -> None:
        for scope in register.scopes.values():
            for name, command in list(scope.entries.items()):
                if command.authz_func is None and name not in OPEN:
                    del scope.entries[name]
        finalize(register, *args)

    ServerCommandRegister.finalize = without_the_rest
