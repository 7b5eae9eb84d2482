"""The console's commands at the server: those for which FLARE asks authorization.json, and so many of an account."""

from __future__ import annotations

from typing import Any

from nvflare.fuel.f3.cellnet.defs import MessagePropKey
from nvflare.fuel.hci.conn import Connection
from nvflare.fuel.hci.proto import InternalCommands, MetaStatusValue, make_meta
from nvflare.fuel.hci.server.constants import ConnProps
from nvflare.fuel.hci.server.reg import CommandFilter, ServerCommandRegister

from fedvlp.flare.audit_log import Allowance, RefusedLines

OPEN = frozenset(
    {
        InternalCommands.CERT_LOGIN,
        InternalCommands.LOGOUT,
        InternalCommands.CHECK_SESSION,
        InternalCommands.GET_CMD_LIST,
    }
)
"""What every account may ask: the login and its end, whether it holds, and which commands there are."""


AT_ONCE, A_SECOND = 600, 5
"""Commands of an account. Each writes a line at the server, and many one at every site, 0.1 GB a day at most."""


class CommandRate(CommandFilter):
    """Refuses the commands of an account that gives too many, before anybody is asked for anything."""

    def __init__(self) -> None:
        super().__init__()
        self._allowance, self._audit = Allowance(AT_ONCE, A_SECOND), RefusedLines()

    def pre_command(self, conn: Connection, args: list[str]) -> bool:
        """FLARE's hook: whether the command is done. Before the login the account is the one of the certificate."""
        message = conn.get_prop(ConnProps.REQUEST)
        account = conn.get_prop(ConnProps.USER_NAME) or (message and message.get_prop(MessagePropKey.COMMON_NAME))
        if self._allowance.take(str(account)) is not None:
            return True
        why = f"not done: {AT_ONCE} commands at once and {A_SECOND} a second are an account's; wait a while"
        self._audit.write(str(account), user=str(account), msg=why)
        conn.append_error(why, meta=make_meta(MetaStatusValue.ERROR, why))
        return False


def bound_commands() -> None:
    """Has the server register no command that is neither authorized nor ``OPEN``, and count those that it is given.

    FLARE registers diagnostics that anybody may call, and hides them. They show connections with what is said there,
    and send messages of any size between processes.
    """
    finalize = ServerCommandRegister.finalize

    def without_the_rest(register: ServerCommandRegister, *args: Any) -> None:
        if register.cmd_map:  # it is final already
            return
        for scope in register.scopes.values():
            for name, command in list(scope.entries.items()):
                if command.authz_func is None and name not in OPEN:
                    del scope.entries[name]
        register.filters.insert(1, CommandRate())  # after the one that knows whose session it is
        finalize(register, *args)

    ServerCommandRegister.finalize = without_the_rest
