"""How a configuration refuses values that cannot work."""

from __future__ import annotations

import re

NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
"""What a run or a data set may be called: it becomes the name of a folder, at machines that others own."""


MOST_SITES = 1000
"""That the selector of a preset may tell apart on the sites' own data."""

_BOUNDS = {
    2**63: "seed",
    10**9: "max_samples",
    1_000_000: "align_steps aligner_steps checkpoint_steps contrast_sample distil_steps dro_records freeze_steps "
    "gca_sample local_steps server_steps size test_rows warmup_steps",
    2**18: "vocabulary",
    100_000: "align_every cosine_rounds distil_phases evaluate_every max_empty max_missed plain_rounds probe_every "
    "rounds server_rounds",
    2**16: "batch_size dp_group dro_batch micro_batch prototypes",
    2**14: "head_hidden hidden private_hidden",
    10**4: "classes",
    2**12: "dim embedding_dim image_size latent max_tokens reduction shared width",
    MOST_SITES: "image_only k local_epochs quorum sites sites_per_round text_only",
    2**10: "adapter_rank channels context threads",
    2**8: "heads retrieve",
    2**7: "blocks iterations layers text_layers",
    16: "in_channels",
}
BOUNDS = {name: most for most, names in _BOUNDS.items() for name in names.split()}
"""The largest whole number that a job, or a model of others, may give a setting of this name: several times what any
published run used.

A whole number of a class of fedvlp that is missing here fails a test.
"""

LARGEST = 10**6
"""No rate, weight or temperature of an honest job is a larger number, nor any number of a plugin's settings or of a
tower."""


def require(condition: bool, message: str) -> None:
    """Raises ValueError(message) unless ``condition``: for ``__post_init__`` of hyper-parameters."""
    if not condition:
        raise ValueError(message)


def is_number(value: object) -> bool:
    """Whether it is an int or a float; True and False are neither."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def printable(text: str) -> str:
    """``text`` in one line, without what would steer a terminal: what a job, a run or a record says is shown so."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def counted(number: int, what: str) -> str:
    """Write a number with its noun, in the plural but for 1: "1 round", "1,200 records"."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def require_name(what: str, name: object) -> None:
    """Raises ValueError unless ``name`` is 1 to 64 characters of a-z, 0-9 and "-", the first no dash."""
    if not (isinstance(name, str) and NAME.fullmatch(name)):
        said = repr(name) if isinstance(name, str) and len(name) <= 64 else "not a string of at most 64 characters"
        raise ValueError(
            f"{what} is {said}; it takes 1 to 64 characters of a-z, 0-9 and '-', and begins with a letter or a digit"
        )
