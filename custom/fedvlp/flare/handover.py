"""Tasks between a site's job process and its training child: FLARE's FLModel there, flare/wire.py's messages here.

FLModel keeps the tensors as ``params`` and the DXO's meta as ``meta``, so a message survives as it is. On its way to
the child it also carries what the child has no other way to know: the experiment of this site's job, and the place.
"""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.shareable import Shareable
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from fedvlp.config import from_config, to_config
from fedvlp.core.site import reason
from fedvlp.core.types import Broadcast, Update
from fedvlp.experiment import Experiment
from fedvlp.flare import wire
from fedvlp.flare.places import Place

SITE = "fedvlp_site"
FAILURE = "fedvlp_failure"


def to_child(task: Shareable, experiment: Experiment, place: Place) -> Shareable:
    """The server's task, with the site's own part; the task's headers are kept."""
    dxo = from_shareable(task)
    parts = {f.name: to_config(getattr(experiment, f.name)) for f in fields(experiment)}
    meta = {**dxo.meta, SITE: {"experiment": parts, "place": asdict(place)}}
    return DXO(dxo.data_kind, data=dxo.data, meta=meta).update_shareable(task)


def in_child(model: FLModel) -> tuple[Broadcast, dict[str, str], Experiment, Place]:
    """What :func:`to_child` put together: the message, the server's run, the experiment and the place."""
    own: dict[str, Any] = model.meta[SITE]
    experiment = Experiment(**{name: from_config(value) for name, value in own["experiment"].items()})
    message, run = wire.receive_broadcast(FLModelUtils.to_shareable(model))
    return message, run, experiment, Place(**own["place"])


def answer(reply: Update | Exception) -> FLModel:
    """What the child sends back."""
    if isinstance(reply, Exception):
        return FLModel(metrics={}, meta={FAILURE: reason(reply)})
    return FLModelUtils.from_shareable(wire.send_update(reply))


def from_child(reply: Shareable, site: str) -> Update | str:
    """The child's update, or why there is none."""
    dxo = from_shareable(reply)
    failed = dxo.get_meta_prop(FAILURE)
    return str(failed) if dxo.data_kind == DataKind.METRICS and failed else wire.receive_update(reply, site)
