"""Every method and collection that there is to test: those of fedvlp, and those that a clone has for papers' tables.

The latter run with the slow tests (``support.cases``), beside the tests of their own in tests/studies.
"""

from __future__ import annotations

from typing import Any

from fedvlp.core.method import Method
from fedvlp.data.sources import SOURCES as OUR_SOURCES
from fedvlp.methods import METHODS as OURS
from studies import collections, rivals

METHODS: dict[str, type[Method]] = {**OURS, **rivals.METHODS}
"""Method by name; the order is that of the registries."""

SOURCES: dict[str, Any] = {**OUR_SOURCES, **collections.SOURCES}
"""Source of files by name."""
