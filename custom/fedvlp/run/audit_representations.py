"""The attack on the representations that sites of a finished run sent last (evaluation/audit/representations.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedvlp.core.client import Client
from fedvlp.core.types import MODALITIES, State
from fedvlp.evaluation.audit.representations import GUESSED, guessed_cosines
from fedvlp.evaluation.audit.scores import MEMBERS, OTHERS
from fedvlp.evaluation.site_metrics import embed
from fedvlp.federation.site_memory import SiteMemory
from fedvlp.methods.ensemble import MODEL
from fedvlp.methods.math.contrast import representations
from fedvlp.run.assembly import Assembly
from fedvlp.run.folder import RunFolder

UNTRAINED, SENT = "representations, untrained", "representations"
"""Of the sites' models before and after training; the first is the control."""

Scores = dict[str, dict[str, dict[str, Tensor]]]
"""Whose scores -> site -> attack -> scores [members + others]."""


@torch.no_grad()
def representation_scores(assembly: Assembly, folder: RunFolder, state: State, data: Mapping[str, Any]) -> Scores:
    """Of the sites with films and reports whose models stay with them, where there is a public set; the server attacks.

    ``state``: the server's model. ``data``: site -> its records, as the server's model reads them.
    """
    scores: Scores = {}
    for site, records in data.items() if assembly.has_public else ():
        memory = SiteMemory(folder.path / "sites" / site).newest()
        own = {name.removeprefix(MODEL): tensor for name, tensor in memory.items() if name.startswith(MODEL)}
        if not own or set(records.modalities) != set(MODALITIES):
            continue
        server = assembly.client("server", records)
        server.load(state)
        known = _on_cpu(server)
        asked = (batch for name in (MEMBERS, OTHERS) for batch in records.batches(name, 32, drop_last=False))
        film, report = embed(server.model, asked)
        client = assembly.client(site, records, site)
        assert client.initial is not None
        for whose, weights in ((UNTRAINED, client.initial()), (SENT, own)):
            client.load(weights)
            score = guessed_cosines(known, _on_cpu(client), {"image": film, "text": report})
            scores.setdefault(whose, {})[site] = {GUESSED: score}
    return scores


def _on_cpu(client: Client) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in representations(client, MODALITIES).items()}
