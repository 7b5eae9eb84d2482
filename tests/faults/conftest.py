"""A provisioned consortium for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.provisioned import Consortium, connected, until


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Consortium]:
    with Consortium(tmp_path_factory.mktemp("faults") / "consortium") as consortium:
        until(lambda: connected(consortium), "both sites are connected")
        yield consortium
