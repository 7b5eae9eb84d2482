"""Tasks between a site's job process and its training child: FLARE's FLModel there, flare/messages.py's messages here.

FLModel keeps the tensors as ``params`` and the DXO's meta as ``meta``, so a message survives as it is. On its way to
the child it also carries what the child has no other way to know: the experiment of this site's job, and the paths.
"""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.shareable import Shareable
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from fedvlp.core.types import Broadcast, Failure, FailureKind, Reply, State, Update
from fedvlp.deploy.envelope import Behind
from fedvlp.federation.site import failure
from fedvlp.flare import messages
from fedvlp.flare.messages import COUNTED, FAILURE, SITE
from fedvlp.flare.paths import SitePaths
from fedvlp.run import plugins
from fedvlp.run.config import from_config, to_config
from fedvlp.run.experiment import Experiment
from fedvlp.training import distributed

Task = tuple[Broadcast, dict[str, str], Experiment, SitePaths, int | None]
"""What a training process is given; the number is the most records that its answer has room for, None: any."""


def to_child(
    task: Shareable,
    experiment: Experiment,
    paths: SitePaths,
    most_samples: int | None = None,
    worker: dict[str, Any] | None = None,
) -> Shareable:
    """The server's task, with the site's own part; the task's headers are kept.

    ``worker``: how the persistent worker (flare/worker.py) is found, where there is one.
    """
    dxo = from_shareable(task)
    own = {"experiment": _parts(experiment), "paths": asdict(paths), "most_samples": most_samples}
    if worker is not None:
        own["worker"] = worker
    meta = {**dxo.meta, SITE: own}
    return DXO(dxo.data_kind, data=dxo.data, meta=meta).update_shareable(task)


def in_child(model: FLModel) -> Task:
    """What :func:`to_child` put together: the message, the server's run, the experiment and the paths."""
    return task_of({**model.meta[SITE], "message": model.meta[messages.KEY]}, model.params or {})


def task_of(content: dict[str, Any], tensors: State) -> Task:
    """A task, of its tensors and all else. Plug-ins that are not installed are read anew, as they may have changed."""
    sent = DXO(DataKind.WEIGHTS, data=tensors, meta={messages.KEY: content["message"]})
    message, run = messages.receive_broadcast(sent.to_shareable())
    for file in content["experiment"]["plugins"]:
        plugins.use(file)
    settings = {name: from_config(value) for name, value in content["experiment"]["settings"].items()}
    return message, run, Experiment(**settings), SitePaths(**content["paths"]), content["most_samples"]


def apart(message: Shareable) -> tuple[dict[str, Any], State]:
    """A message without its tensors, and its tensors."""
    dxo = from_shareable(message)
    return messages.header_of(dxo), dxo.data


def to_ranks(task: Task | None) -> Task | None:
    """Rank 0's task (None: there are no more) at every process of the site (training/distributed.py)."""
    content: dict[str, Any] | None = None
    tensors: State = {}
    if task is not None:
        message, run, experiment, paths, most = task
        header, tensors = apart(messages.send_broadcast(message, run))
        content = {"message": header, "experiment": _parts(experiment), "paths": asdict(paths), "most_samples": most}
    content, tensors = distributed.tell(content, tensors)
    return None if content is None else task_of(content, tensors)


def _parts(experiment: Experiment) -> dict[str, Any]:
    """The experiment's settings, and what :func:`plugins.use` must be given for those that are not installed."""
    settings = {f.name: to_config(getattr(experiment, f.name)) for f in fields(experiment)}
    brought = [plugin for plugin in plugins.of(experiment) if not plugin.installed]
    return {"settings": settings, "plugins": [p.name if p.source is None else str(p.file) for p in brought]}


def answer(reply: Update | Exception, behind: Behind | None = None) -> FLModel:
    """What the child sends back; ``behind``: the records that its update rests on."""
    if isinstance(reply, Exception):
        failed = failure(reply)
        return FLModel(metrics={}, meta={FAILURE: [failed.kind.value, failed.text, failed.public]})
    model = FLModelUtils.from_shareable(messages.send_update(reply))
    if behind is not None:
        model.meta[COUNTED] = asdict(behind)
    return model


def behind(reply: Shareable) -> Behind | None:
    """The records behind the child's update, where the site has an envelope."""
    counted = from_shareable(reply).get_meta_prop(COUNTED)
    return Behind(**counted) if isinstance(counted, dict) else None


def from_child(reply: Shareable, site: str) -> Reply:
    """The child's update, or why there is none."""
    dxo = from_shareable(reply)
    failed = dxo.get_meta_prop(FAILURE)
    if dxo.data_kind != DataKind.METRICS or not failed:
        return messages.receive_update(reply, site)
    kind, text, public = failed
    return Failure(FailureKind(kind), text, public)
