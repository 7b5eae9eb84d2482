"""Published weights: whether the hub that has them answers, and what is said where they cannot be had."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from urllib.parse import urlsplit

from fedvlp.core.site_error import SiteError

HUB = "https://huggingface.co"
PROXIES = ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
WAIT = 3.0
"""Seconds that the hub is given to answer."""


IN_KIT = "(a site or server of a consortium: put that folder into the kit, as models/NAME)"
"""What a remedy adds for machines that take no path from a job."""


class NoWeightsError(SiteError, RuntimeError):
    """Published weights, a configuration or a tokenizer that can neither be read here nor fetched."""

    told = (
        "the weights of a tower that the job names are not on this machine; they belong into models/ of its kit, under "
        "the tower's name"
    )


@lru_cache
def unreachable() -> bool:
    """Whether the hub does not answer, so that only what was fetched before can be used.

    Asked once: the libraries themselves try again and again for a minute. Behind a proxy nobody can tell.
    """
    if any(os.environ.get(name) for name in PROXIES):
        return False
    address = urlsplit(os.environ.get("HF_ENDPOINT") or HUB)
    try:
        socket.create_connection((address.hostname or "", address.port or 443), timeout=WAIT).close()
    except OSError:
        return True
    return False


@contextmanager
def what_is_here() -> Iterator[None]:
    """Where the hub does not answer, nothing is fetched: for a library that cannot be told."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or unreachable()
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
