"""How a configuration refuses values that cannot work."""

from __future__ import annotations


def require(condition: bool, message: str) -> None:
    """Raises ValueError(message) unless ``condition``: for ``__post_init__`` of hyper-parameters."""
    if not condition:
        raise ValueError(message)
