"""What was made of a site's reports, kept in its cache folder, so that a process that is started again finds it there.

A file is named by a hash of all that it was made of. Tokens are as confidential as the reports: they are for their
owner alone, and lie where the decoded films lie (data/cache.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from fedvlp.core.checkpoint import CheckpointError, save_bytes
from fedvlp.data.deid import KINDS, Findings, scan
from fedvlp.data.loader import Tokenize


class KeptTokens:
    """``tokenizer``, which is asked once for the same texts; later their ids and masks are read from ``folder``.

    ``identity`` is all that its answer depends on beside the texts.
    """

    def __init__(self, tokenizer: Tokenize, identity: str, folder: Path) -> None:
        self._tokenizer, self._identity, self._folder = tokenizer, identity, folder
        self.truncated, self.unknown = 0, getattr(tokenizer, "unknown", None)

    def __call__(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """ids [N, T] int64 and mask [N, T] bool of N texts."""
        file = self._folder / f"tokens-{_hash([self._identity], texts)}.safetensors"
        tensors: dict[str, Tensor] = {}
        with contextlib.suppress(OSError, SafetensorError):  # none there, or a damaged one, which is written anew
            tensors = load_file(file)
        if not tensors:
            before = getattr(self._tokenizer, "truncated", 0)
            ids, mask = self._tokenizer(texts)
            cut = torch.tensor(getattr(self._tokenizer, "truncated", 0) - before)
            tensors = {"ids": ids.to(torch.int32), "mask": mask, "cut": cut}
            with contextlib.suppress(CheckpointError):  # a full disk costs time at the next start, and no run
                save_bytes(file, save(tensors), private=True)
        self.truncated += int(tensors["cut"])
        return tensors["ids"].to(torch.int64), tensors["mask"]


def kept_tokens(tokenizer: Any, folder: Path | None) -> Tokenize:
    """The tokenizer with a memory in ``folder``, where there is one and it says all that its answer depends on."""
    identity = getattr(tokenizer, "identity", lambda: "")()
    return KeptTokens(tokenizer, identity, folder) if folder and identity else tokenizer


def searched(folder: str | None, reports: Sequence[str], where: Iterable[object]) -> Findings:
    """:func:`data.deid.scan`, which is not repeated where these reports were searched before and nothing was found."""
    if not folder:
        return scan(reports, where)
    patterns = [json.dumps([kind, pattern.pattern, pattern.flags]) for kind, pattern in KINDS.items()]
    file = Path(folder) / f"searched-{_hash(patterns, reports)}.json"
    if file.is_file():
        return Findings({})
    counts = scan(reports, where)
    if not counts:
        with contextlib.suppress(CheckpointError):
            save_bytes(file, json.dumps({"reports": len(reports)}).encode(), private=True)
    return counts


def _hash(*lists: Iterable[str]) -> str:
    """Of lists of texts: which they are, and where each ends."""
    hashed = hashlib.blake2b(digest_size=16)
    for texts in lists:
        for text in texts:
            content = text.encode("utf-8", "surrogatepass")
            hashed.update(len(content).to_bytes(8, "little") + content)
        hashed.update(b"\xff" * 8)
    return hashed.hexdigest()
