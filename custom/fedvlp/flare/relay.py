"""A process of FLARE's that hands its task on to a worker that stays, and so needs no torch, which takes seconds.

In the simulator that is a site's own process (flare/site_executor.py). At a hospital it is the child that FLARE starts
and watches for every task: ``python -m fedvlp.flare.relay``, started by flare/executor.py. A worker that dies or falls
silent there costs the task, like a child that trains by itself (flare/child.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.fuel.f3.streaming.cacheable import CacheableObject, ItemConsumer
from nvflare.fuel.f3.streaming.download_service import download_object
from nvflare.fuel.utils.fobs import dots
from nvflare.fuel.utils.fobs.datum import DatumManager
from nvflare.fuel.utils.fobs.decomposers.via_downloader import ViaDownloaderDecomposer

from fedvlp.core.types import Failure, FailureKind
from fedvlp.flare import messages
from fedvlp.flare.messages import CHILD_LOST, COUNTED, FAILURE, KEY, SITE
from fedvlp.flare.retrying_cell import RetryingCell
from fedvlp.flare.worker import Worker, WorkerLostError

if TYPE_CHECKING:
    from nvflare.app_common.abstract.fl_model import FLModel


class Held:
    """A tensor as files of safetensors, one for each of its pieces (flare/tensor_stream.py)."""

    def __init__(self, files: Iterable[bytes]) -> None:
        self.files = list(files)


def _head(file: bytes) -> tuple[str, Any, int]:
    """Of a file of safetensors with one entry the name, the description, and where the values begin."""
    begin = 8 + int.from_bytes(file[:8], "little")
    ((name, entry),) = json.loads(file[8:begin]).items()
    return name, entry, begin


def _called(file: bytes, name: str) -> bytes:
    """The file with its tensor, or piece of a tensor, under the name that the receiver asks for."""
    old, entry, begin = _head(file)
    head = json.dumps({"|".join([name, *old.split("|")[1:]]): entry}).encode()
    head += b" " * (-len(head) % 8)  # the values begin at a multiple of 8
    return len(head).to_bytes(8, "little") + head + file[begin:]


class _Sent(CacheableObject):
    """Tensors that the other end fetches file by file."""

    def __init__(self, tensors: dict[str, Held], max_chunk_size: int) -> None:
        files = [(name, file) for name, tensor in tensors.items() for file in tensor.files]
        self._count = len(files)
        super().__init__(files, max_chunk_size)

    def get_item_count(self) -> int:
        return self._count

    def produce_item(self, index: int) -> bytes:
        name, file = self.base_obj[index]
        return _called(file, name)

    def get_item_size(self, index: int) -> int | None:
        held = self.base_obj
        return None if held is None else len(held[index][1])


class _Received(ItemConsumer):
    """Collects the files that are fetched, by tensor."""

    def consume_items(self, items: list[Any], result: Any) -> dict[str, Held]:
        collected: dict[str, Held] = result or {}
        for item in items:
            name = _head(item)[0].partition("|")[0]
            collected.setdefault(name, Held([])).files.append(bytes(item))
        return collected


class HeldDecomposer(ViaDownloaderDecomposer):
    """What FLARE's serialiser does with tensors in this process: the other end cannot tell that it has no torch."""

    def __init__(self) -> None:
        super().__init__(2 << 20, "tensor_")

    def supported_type(self) -> type:
        # The serialiser writes the name of a value's class, and the reader goes by it.
        Held.__module__, Held.__qualname__ = "torch", "Tensor"
        return Held

    def get_download_dot(self) -> int:
        number: int = dots.TENSOR_DOWNLOAD
        return number

    def to_downloadable(self, items: dict[str, Held], max_chunk_size: int, fobs_ctx: dict[str, Any]) -> _Sent:
        return _Sent(items, max_chunk_size)

    def download(self, *, cell: Any, **options: Any) -> tuple[str, dict[str, Held]]:
        received = _Received()
        download_object(consumer=received, cell=RetryingCell(cell), **options)
        return received.error, received.result or {}

    def native_decompose(self, target: Held, manager: DatumManager | None = None) -> bytes:
        (file,) = target.files  # a piece is a tensor of megabytes, and those are fetched
        return _called(file, "t")

    def native_recompose(self, data: bytes, manager: DatumManager | None = None) -> Held:
        return Held([data])


def handed_on(dxo: DXO, own: dict[str, Any], worker: Worker, should_stop: Callable[[], bool]) -> DXO | Failure | None:
    """The worker's answer to a task, of which the site says its ``own`` part; None when asked to stop.

    ``own``: "experiment", "paths" and "most_samples", as in flare/child_protocol.py. Raises WorkerLostError.
    """
    content = {name: own[name] for name in ("experiment", "paths", "most_samples")}
    content["message"] = messages.header_of(dxo)
    said = worker.ask(content, {name: tensor.files for name, tensor in dxo.data.items()}, should_stop)
    if said is None:
        return None
    answer, files = said
    if "failure" in answer:
        kind, text, public = answer["failure"]
        return Failure(FailureKind(kind), text, public)
    meta = {KEY: answer["update"], COUNTED: answer["behind"]}
    return DXO(DataKind.WEIGHTS, data={name: Held(pieces) for name, pieces in files.items()}, meta=meta)


def reply(model: FLModel) -> FLModel:
    """The worker's answer to a task of ``child_protocol.to_child``."""
    from nvflare.app_common.abstract.fl_model import FLModel
    from nvflare.app_common.utils.fl_model_utils import FLModelUtils

    own: dict[str, Any] = model.meta[SITE]
    try:
        dxo = from_shareable(FLModelUtils.to_shareable(model))
        said = handed_on(dxo, own, Worker(**own["worker"]), lambda: False)
    except WorkerLostError:
        said = Failure(FailureKind.LOST, CHILD_LOST, CHILD_LOST)
    if isinstance(said, DXO):
        answer: FLModel = FLModelUtils.from_shareable(said.to_shareable())
        return answer
    assert said is not None  # nobody asks it to stop
    return FLModel(metrics={}, meta={FAILURE: [said.kind.value, said.text, said.public]})


def main() -> None:
    """Answers the task that FLARE has for this process."""
    import nvflare.client as flare  # brings numpy, which a process of the simulator does without

    messages.register(HeldDecomposer())
    flare.init()
    while flare.is_running():
        flare.send(reply(flare.receive()))


if __name__ == "__main__":
    main()
