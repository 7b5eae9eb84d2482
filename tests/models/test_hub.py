"""A hub that does not answer is asked once, for seconds, and what was fetched before is still used."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest
from huggingface_hub import constants

from fedvlp.models import fetched
from fedvlp.models.image import timm_tower
from fedvlp.models.text import transformers_tower


@pytest.fixture(autouse=True)
def _asked_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (*fetched.PROXIES, "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    fetched.unreachable.cache_clear()
    yield
    fetched.unreachable.cache_clear()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Where a connection was tried; none answers."""
    tried: list[tuple[str, int]] = []

    def silent(address: tuple[str, int], timeout: float) -> None:
        assert timeout <= 5
        tried.append(address)
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", silent)
    return tried


def test_it_is_asked_once(asked: list[tuple[str, int]]) -> None:
    assert fetched.unreachable()
    assert fetched.unreachable()
    assert asked == [("huggingface.co", 443)]


def test_a_mirror_is_asked_in_its_place(asked: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror.hospital:8080/hub")
    assert fetched.unreachable()
    assert asked == [("mirror.hospital", 8080)]


def test_behind_a_proxy_the_libraries_try_themselves(
    asked: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    assert not fetched.unreachable()
    assert asked == []


@pytest.mark.usefixtures("asked")
def test_nothing_is_fetched_then_and_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    import timm

    seen: list[Any] = []

    def created(*args: Any, **kwargs: Any) -> None:
        seen.append(constants.HF_HUB_OFFLINE)
        raise OSError("not here")

    monkeypatch.setattr(timm, "create_model", created)
    with pytest.raises(fetched.NoWeightsError, match=r"Give a local folder .*\(a site or server .* as models/NAME\)"):
        timm_tower("resnet10t", 64, True)
    assert seen == [True]
    assert constants.HF_HUB_OFFLINE is False, "as it was before"
    with pytest.raises(fetched.NoWeightsError, match=r"Give a local folder .*\(a site or server .* as models/NAME\)"):
        transformers_tower("nobody/nothing", None, 16, True)
