"""A task's child at a site whose trainer stays: ``python -m fedvlp.flare.child_front``, started by flare/executor.py.

FLARE starts and watches a child for every task, and the job's process holds the tensors before and after, so all that
holds of a child that trains by itself (flare/child.py) holds of this one. It imports no torch: it hands the task to the
job's trainer (flare/trainer.py) and passes the answer on. A trainer that dies or falls silent in a task costs this
task, like a child; where there is none to be asked, this process trains.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nvflare.client as flare
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from fedvlp.core.types import FailureKind
from fedvlp.flare import messages, raw_tensors
from fedvlp.flare.messages import COUNTED, FAILURE, SITE
from fedvlp.flare.trainer_link import Answer, TrainerLink, TrainerLostError


def main() -> None:
    """Answers the task that FLARE has for this process."""
    messages.register(raw_tensors.RawDecomposer())
    flare.init()
    while flare.is_running():
        flare.send(reply(flare.receive()))


def reply(model: FLModel) -> FLModel:
    """The trainer's answer to a task of ``child_protocol.to_child``, or this process's own."""
    own: dict[str, Any] = model.meta[SITE]
    if "trainer" not in own:
        return _trained_here(model)
    try:
        return _of_answer(_asked(model, own))
    except TrainerLostError as lost:
        if lost.begun:
            said = messages.CHILD_LOST
            return FLModel(metrics={}, meta={FAILURE: [FailureKind.LOST.value, said, said]})
        return _trained_here(model)


def _asked(model: FLModel, own: Mapping[str, Any]) -> Answer:
    trainer = own["trainer"]
    link = TrainerLink(Path(trainer["folder"]), trainer["parent"], trainer["started"], Path(trainer["log"]))
    dxo = from_shareable(FLModelUtils.to_shareable(model))
    content = {
        "settings": own["experiment"]["settings"],
        "plugins": own["experiment"]["plugins"],
        "paths": own["paths"],
        "message": messages.header_of(dxo),
        "most_samples": own["most_samples"],
    }
    tensors = {name: raw_tensors.raw(tensor) for name, tensor in dxo.data.items()}
    limits = {name: trainer[name] for name in ("made_of", "tasks", "silence")}
    return link.ask(content, tensors, lambda: False, **limits)


def _of_answer(said: Answer) -> FLModel:
    if said.failure is not None:
        return FLModel(metrics={}, meta={FAILURE: list(said.failure)})
    dxo = DXO(DataKind.WEIGHTS, data=dict(said.tensors), meta={messages.KEY: said.update})
    model: FLModel = FLModelUtils.from_shareable(dxo.to_shareable())
    if said.behind is not None:
        model.meta[COUNTED] = said.behind
    return model


def _trained_here(model: FLModel) -> FLModel:
    from fedvlp.flare import child, child_protocol

    model.params = raw_tensors.with_torch(model.params)
    try:
        update, behind = child.answer(child_protocol.in_child(model))
    except Exception as error:
        return child_protocol.answer(error)
    return child_protocol.answer(update, behind)


if __name__ == "__main__":
    main()
