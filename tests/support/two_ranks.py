"""What tests/training/test_distributed.py starts under torchrun: trains each case and writes what every rank ends with.

torchrun --standalone --nproc-per-node 2 tests/support/two_ranks.py OUT
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fedvlp.core.checkpoint import save_tensors
from fedvlp.core.metric_keys import TIMES
from fedvlp.core.types import Broadcast, Update
from fedvlp.data.loader import SiteData
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.federation.site import Site
from fedvlp.federation.site_memory import SiteMemory
from fedvlp.methods import FedAvg, FedDRA, FedRGB
from fedvlp.models.tiny import HashTokenizer
from fedvlp.training import distributed
from fedvlp.training.frozen_features import FixedFeatures
from fedvlp.training.settings import Training
from support.towers import client, encoder
from support.toy import SGD

STEP = replace(SGD, batch_size=10, lr=0.002)
UNEVEN = replace(STEP, batch_size=9, gather_negatives=True)
AVERAGE = FedAvg(local_steps=3)
CASES: dict[str, tuple[Any, str, Training, float]] = {  # method, phase, training, dropout
    "gathered": (AVERAGE, "train", replace(STEP, gather_negatives=True), 0.0),
    "uneven, in micro-batches": (AVERAGE, "train", replace(UNEVEN, micro_batch=2), 0.0),
    "align": (FedDRA(align_steps=3), "align", UNEVEN, 0.0),
    "joint": (FedDRA(local_steps=3), "joint", UNEVEN, 0.0),
    "kept, align": (FedDRA(align_steps=3), "align", UNEVEN, 0.0),
    "kept, joint": (FedDRA(local_steps=3), "joint", STEP, 0.0),
    "guided": (FedRGB(local_steps=3), "local", UNEVEN, 0.0),
    "apart": (AVERAGE, "train", STEP, 0.0),
    "films": (AVERAGE, "train", replace(STEP, lr=0.02), 0.0),
    "dropout": (AVERAGE, "train", replace(STEP, gather_negatives=True), 0.5),
}


class Films(SiteData):
    """Drawn films of 36 pixels, cropped to 32, which are read for every batch; ``read``: the rows of each."""

    def __init__(self) -> None:
        cohort = SyntheticCohort(sites=1, size=60, image_size=36).build()
        super().__init__(cohort, {"train": cohort.rows("train")}, HashTokenizer(50, 6), 32)
        self.read: list[int] = []

    def _reader(self, rows: Any, imaged: Any) -> Any:
        def read(chosen: torch.Tensor) -> torch.Tensor:
            self.read.append(len(chosen))
            return self._pixels(rows[chosen.numpy()])

        return read


def handled(name: str, folder: Path | None = None) -> tuple[Update, Any]:
    """The answer of a site with this process's part of the work, and the site's whole state."""
    method, phase, training, dropout = CASES[name]
    one = client(encoder(dropout, image_size=32 if name.startswith("films") else 16))
    if name.startswith("films"):
        one.data = Films()
    if name.startswith("kept"):
        one.fixed = FixedFeatures()
    state = {n: t.clone() for n, t in one.state().items()}
    update = Site(one, method, training, SiteMemory(folder)).handle(Broadcast(0, phase, state))
    if isinstance(one.data, Films):
        update = replace(update, metrics=update.metrics | {"read": float(sum(one.data.read))})
    return update, one.state()


def main(out: Path) -> None:
    torch.set_num_threads(1)
    distributed.join()
    for name in CASES:
        update, state = handled(name, out / name)
        metrics = {n: v for n, v in update.metrics.items() if n not in TIMES}
        save_tensors(out / f"{name}-{distributed.rank()}.safetensors", state, metrics)
    told = distributed.tell(*(({"a": [1, "x"]}, {"w": torch.arange(6.0).view(2, 3), "n": torch.tensor(7)})
                        if distributed.rank() == 0 else (None, {})))  # fmt: skip
    save_tensors(out / f"told-{distributed.rank()}.safetensors", told[1], told[0])
    try:
        distributed.my_rows(3, 2)
    except ValueError as error:
        (out / f"refused-{distributed.rank()}.json").write_text(json.dumps(str(error)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
