"""What a site asks of a GPU in a phase of FedDRA, told by the pretended device: a JSON line with everything queued.

    python tests/support/pretend_steps.py [joint|align]

The site is the product's own (assembly, loader, loop, site, the record of what it has served): films of 72 pixels,
crops of 64, a BERT of two layers, batches of 8, the anchor on. There is no dropout, so that losses can be compared.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from unittest.mock import patch

import torch

sys.path.append(str(Path(__file__).parents[1]))
from fedvlp.core.types import Broadcast
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.deploy.envelope import Watched
from fedvlp.methods import FedDRA
from fedvlp.models.dual_encoder import ModelConfig
from fedvlp.run.assembly import Assembly
from fedvlp.run.experiment import Experiment
from fedvlp.training.settings import Training
from support import pretend_device, pretend_streams

STEPS, BATCH, FILM = 5, 8, 72


def bert(folder: Path) -> str:
    """The configuration of a BERT of two layers, without weights or a vocabulary."""
    settings = {
        "architectures": ["BertModel"], "model_type": "bert", "vocab_size": 512, "hidden_size": 32,
        "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "max_position_embeddings": 64,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    return str(folder)


def experiment(folder: Path) -> Experiment:
    model = ModelConfig(
        text_tower=bert(folder), max_tokens=64, image_size=64, head_hidden=16, embedding_dim=8, head_norm="layer"
    )
    method = FedDRA(align_steps=STEPS, local_steps=STEPS, rho=0.1)
    training = Training(batch_size=BATCH, lr=1e-3, optimizer="sgd")
    data = SyntheticCohort(sites=2, size=160, image_size=FILM)
    return Experiment("pretended", method, model, data=data, training=training)


def handled(phase: str) -> dict[str, float]:
    """The figures of one task of site-1; every optimiser step is marked."""
    with tempfile.TemporaryDirectory() as folder:
        chosen = experiment(Path(folder))
        site = Assembly(chosen).site("site-1")
        site.client.data = site.client.observer = Watched(site.client.data)
        site.client.counted = lambda: pretend_streams.mark("step")
        state = {name: tensor.cpu().clone() for name, tensor in site.client.state().items()}
        pretend_streams.mark("task")
        return site.handle(Broadcast(0, phase, state)).metrics


def main(phase: str = "joint") -> None:
    pretend_device.install()
    with patch.object(Training, "torch_device", lambda self: torch.device(pretend_device.NAME, 0)):
        metrics = handled(phase)
    with patch.object(Training, "torch_device", lambda self: torch.device("cpu")):
        expected = handled(phase)
    losses = {name: [value, expected[name]] for name, value in metrics.items() if name.startswith("loss/")}
    print(json.dumps({"queued": [asdict(entry) for entry in pretend_streams.QUEUED], "losses": losses}))


if __name__ == "__main__":
    main(*sys.argv[1:])
