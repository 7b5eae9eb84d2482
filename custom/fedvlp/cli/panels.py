"""Under which heading `fedvlp --help` lists a command, and how a table looks: what needs nothing else of fedvlp."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from fedvlp.core.validate import printable

if TYPE_CHECKING:
    from rich.table import Table

TRAIN, JUDGE, USE, HOSPITALS, EXTEND = "Train", "Compare and judge", "Use a model", "Data and hospitals", "Extend"


def plain_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], right: bool = True) -> Table:
    """A table, whose columns but the first stand ``right``. Brackets in it are shown, and are no markup.

    Nothing in it steers the terminal.
    """
    from rich.table import Table
    from rich.text import Text

    made = Table(title=Text(printable(title), "table.title"), title_justify="left")
    for index, column in enumerate(columns):
        made.add_column(Text(printable(column)), justify="right" if index and right else "left", overflow="fold")
    for row in rows:
        made.add_row(*(Text(printable(str(cell))) for cell in row))
    return made
