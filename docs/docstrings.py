"""An extension of griffe, which reads the docstrings for the site.

fedvlp says what a field of a dataclass means in the comment behind it: ``mu: float = 5.0  # weight of eq. 1``. And its
docstrings are plain text, in which a star is a star.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Attribute, Docstring, Extension, Object

STAR = re.compile(r"(``.*?``)|(?<=\S)\*(?=\S)", re.DOTALL)


class Docstrings(Extension):
    """Gives a field its comment as docstring, and keeps Markdown from reading z* ... z* as emphasis."""

    def on_attribute_instance(self, *, attr: Attribute, **kwargs: Any) -> None:
        if attr.docstring or attr.lineno is None or attr.endlineno is None:
            return
        last = attr.lines_collection[attr.filepath][attr.endlineno - 1]
        comment = re.search(r"  # (.+)", last)
        if comment:
            attr.docstring = Docstring(comment[1], lineno=attr.endlineno, parent=attr)

    def on_instance(self, *, obj: Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = STAR.sub(lambda match: match[1] or r"\*", obj.docstring.value)
