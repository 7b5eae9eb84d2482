"""The server's record of the model: which tensors it lends to the next mean."""

from __future__ import annotations

import pytest
import torch

from fedvlp.core import server_state
from fedvlp.core.server_state import Server


@pytest.mark.parametrize(("size", "lent"), [(3, False), (4, True)])
def test_tensors_of_a_large_model_are_lent_when_they_are_replaced(
    size: int, lent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large is more than EXACT_NUMEL numbers, 3 here. What is not replaced stays the model's."""
    monkeypatch.setattr(server_state, "EXACT_NUMEL", 3)
    old, kept = torch.zeros(size), torch.ones(9)
    server = Server(("a",), {"w": old, "v": kept})
    server.replace({"w": torch.full((size,), 2.0)})
    assert server.spare.keys() == ({"w"} if lent else set())
    assert not lent or server.spare["w"] is old
    assert server.state["w"].tolist() == [2.0] * size
    assert server.state["v"] is kept
