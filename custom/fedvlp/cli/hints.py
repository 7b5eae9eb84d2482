"""What a person types who knows other tools, and the line that does it here: the group of all commands of fedvlp."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

from typer.core import TyperGroup

INSTEAD = {
    "--rounds": "--set rounds.rounds={}",
    "--num-rounds": "--set rounds.rounds={}",
    "--epochs": "--set training.local_epochs={}",
    "--local-epochs": "--set training.local_epochs={}",
    "--steps": "--set method.local_steps={}",
    "--local-steps": "--set method.local_steps={}",
    "--batch-size": "--set training.batch_size={}",
    "--lr": "--set training.lr={}",
    "--learning-rate": "--set training.lr={}",
    "--weight-decay": "--set training.weight_decay={}",
    "--optimizer": "--set training.optimizer={}",
    "--device": "--set training.device={}",
    "--gpu": "--set training.device=cuda",
    "--gpus": "--set training.device=cuda",
    "--cuda": "--set training.device=cuda",
    "--threads": "--set training.threads={}",
    "--precision": "--set training.precision={}",
    "--objective": "--set objective={}",
    "--loss": "--set objective={}",
    "--labels": "--set data.label_columns={}",
    "--clients": "--sites {}",
    "--num-clients": "--sites {}",
    "--output": "--runs {}",
    "--out": "--runs {}",
    "--name": "--set name={}",
}
"""Options of other tools, and what is typed here where a command has settings."""

HOME = re.compile(r"(?<=[=:,])~(?=/|$)")
"""The folder of one's own where a shell does not expand it: behind "=", ":" and ","."""


class Commands(TyperGroup):
    """The commands, which expand a home folder anywhere in an argument, and answer what other tools would take.

    Newer versions of typer have a click of their own, so contexts and errors are known by what they have alone.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments, each with its home folder in full; a job's are for other machines and stay."""
        if args[:1] != ["jobs"]:
            args = [HOME.sub(lambda _: os.path.expanduser("~"), one) for one in args]
        ctx.meta["typed"] = list(args)
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command of a name; that of a preset is answered with the line that trains it."""
        from fedvlp.cli.known import index

        name = args[0].lower() if args else ""
        if name in index()["presets"] and name not in self.commands:
            line = " ".join(["fedvlp simulate", name, *args[1:]])
            ctx.fail(f"No such command '{args[0]}': it is a preset; write {line}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; an option of another tool, and a blank in an argument, are answered with what to type."""
        try:
            return super().invoke(ctx)
        except Exception as error:
            if (said := _instead(error, ctx.meta["typed"])) and (of := getattr(error, "ctx", None)):
                of.fail(said)
            raise


def _instead(error: Any, typed: Sequence[str]) -> str:
    """What to say in the place of an error of usage; "" for any other."""
    said = str(getattr(error, "message", ""))
    if "unexpected extra argument" in said and "=" in said:
        return f"{said}; no blank stands behind a comma of --data"
    option = getattr(error, "option_name", "")
    known = {name for one in error.ctx.command.params for name in one.opts} if option and error.ctx else ()
    if option not in INSTEAD or "--set" not in known:
        return ""
    return f"No such option: {option}; write {INSTEAD[option].format(value_of(option, typed) or 'VALUE')}"


def value_of(option: str, typed: Sequence[str]) -> str:
    """What was typed as the value of an option; "" for nothing."""
    for index, one in enumerate(typed):
        name, equals, value = one.partition("=")
        if name == option:
            return value if equals else next(iter(typed[index + 1 : index + 2]), "")
    return ""
