"""How fast an update comes in: fedvlp's pieces over FLARE's transport, beside a raw socket of the same bytes.

    python studies/programs/ingest.py [--megabytes 834] [--pieces 8 32 128] [--repetitions 3] [--quick]

All over loopback, without TLS. Per variant one process holds the update, as a site does, and sends it when
asked to; this process receives it as the server of a large model does: piece by piece to disk (``arrived``), then
every tensor read and added to the mean (``added``). The raw socket's bytes are received into one buffer and forgotten,
and so are FLARE's: as many bytes, in replies of its cells as large as a piece, with no tensor and no disk.
Processor seconds are of both ends together. ``--pieces``: most bytes of a piece, in MiB; 8 is fedvlp's own.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
from common import command_line, interleaved, machine, rounded, say, spread, table
from echo import Echo, EchoModel
from nvflare.fuel.f3.cellnet.cell import Cell
from nvflare.fuel.f3.cellnet.utils import make_reply, new_cell_message

from fedvlp.core.aggregation import StreamingMean
from fedvlp.core.types import State, Update
from fedvlp.flare import messages
from fedvlp.flare.tensor_stream import SETTING, PieceDecomposer

ROUTE = {"channel": "ingest", "topic": "update"}
PLAIN = {"channel": "ingest", "topic": "bytes"}
SERVER = "server"
RAW = "raw socket"
BUFFER = 8 << 20
WHOLE = 834e6


def site(name: str, url: str, part: float, piece: int, port: Any) -> None:
    """A process that holds an update and sends it to whoever asks, by FLARE and by a socket of its own."""
    os.environ[f"NVFLARE_{SETTING}".upper()] = str(piece)
    state: State = Echo(EchoModel(part=part).named(), 0).state_dict()
    messages.register()
    cell = Cell(fqcn=name, root_url=url, secure=False, credentials={})
    cell.register_request_cb(cb=lambda request: make_reply("ok", body=messages.send_update(update(state))), **ROUTE)
    block = bytes(piece)
    cell.register_request_cb(cb=lambda request: make_reply("ok", body=block), **PLAIN)
    cell.start()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port.put(listening.getsockname()[1])
        while True:
            connection, _ = listening.accept()
            with connection:
                for tensor in state.values():
                    connection.sendall(memoryview(tensor.numpy()).cast("B"))


def update(state: State) -> Update:
    """The site's update of these tensors."""
    return Update("", 0, "train", 10, state)


def raw(port: int, size: int) -> None:
    """Receives so many bytes."""
    buffer = bytearray(BUFFER)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        while size:
            size -= connection.recv_into(buffer)


class Server:
    """Receives updates, and notes of each how long it took to arrive."""

    def __init__(self, url: str, spool: Path, reference: State) -> None:
        decomposer = PieceDecomposer(at_server=True)
        messages.register(decomposer)
        decomposer.spool_to(spool)
        self._reference = reference
        self.arrived: dict[str, list[float]] = {}
        self.cell = Cell(fqcn=SERVER, root_url=url, secure=False, credentials={})
        self.cell.start()

    def ingest(self, name: str) -> None:
        """Fetches a site's update and adds it to a mean."""
        began = time.perf_counter()
        reply = self.cell.send_request(target=name, request=new_cell_message({}, {}), timeout=60.0, **ROUTE)
        received = messages.receive_update(reply.payload, name)
        self.arrived.setdefault(name, []).append(time.perf_counter() - began)
        mean = StreamingMean(self._reference)
        mean.add(received.state, 1.0)

    def plain(self, name: str, size: int, piece: int) -> None:
        """Fetches as many bytes, and forgets them."""
        for _ in range(-(-size // piece)):
            self.cell.send_request(target=name, request=new_cell_message({}, {}), timeout=60.0, **PLAIN)


class Processors:
    """Processor seconds of some processes, as a clock."""

    def __init__(self, pids: list[int]) -> None:
        self._processes = [psutil.Process(pid) for pid in pids]

    def __call__(self) -> float:
        return sum(sum(process.cpu_times()[:2]) for process in self._processes)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--megabytes", type=float, default=834)
    parser.add_argument("--pieces", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.megabytes, chosen.pieces, chosen.repetitions = 20, [1, 8], 1
    say(machine())
    part = min(1.0, chosen.megabytes * 1e6 / WHOLE)
    reference = Echo(EchoModel(part=part).named(), 1).state_dict()
    size = 4 * sum(math.prod(tensor.shape) for tensor in reference.values())
    with socket.create_server(("127.0.0.1", 0)) as probe:
        url = f"tcp://localhost:{probe.getsockname()[1]}"
    with tempfile.TemporaryDirectory() as place:
        server = Server(url, Path(place) / "spool", reference)
        measure(server, url, part, size, chosen)
    say(machine())
    for process in multiprocessing.active_children():
        process.kill()
    os._exit(0)  # FLARE's threads would wait


def beside(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median of ratios of the same pass."""
    return spread([a / b for a, b in zip(ours, theirs, strict=True)])["median"]


def measure(server: Server, url: str, part: float, size: int, chosen: argparse.Namespace) -> None:
    """The table: every variant, interleaved."""
    context, variants, ports = multiprocessing.get_context("spawn"), {}, []
    pids = [os.getpid()]
    for piece in chosen.pieces:
        port, name = context.Queue(), f"site-{piece}"
        process = context.Process(target=site, args=(name, url, part, piece << 20, port), daemon=True)
        process.start()
        ports.append(port.get())
        pids.append(process.pid)
        variants[f"pieces of {piece} MiB"] = lambda name=name: server.ingest(name)
    first = chosen.pieces[0]
    variants[f"FLARE's bytes by {first} MiB"] = lambda: server.plain(f"site-{first}", size, first << 20)
    variants = {RAW: lambda: raw(ports[0], size), **variants}
    clock, spent = Processors(pids), {name: [] for name in variants}

    def counted(name: str, variant: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            before = clock()
            variant()
            spent[name].append(clock() - before)

        return run

    times = interleaved({name: counted(name, variant) for name, variant in variants.items()}, chosen.repetitions)
    rows = []
    for name, seconds in times.items():
        pieces = name.removeprefix("pieces of ").removesuffix(" MiB")
        arrived = server.arrived.get(f"site-{pieces}", [])[1:] or seconds
        processor = spread(spent[name][1:])["median"]
        ratios = [beside(ours, times[RAW]) for ours in (arrived, seconds)]
        median = spread(arrived)["median"]
        rows.append([name, median, *ratios, processor, rounded(size / 1e9 / median)])
        say({"variant": name, "arrived": spread(arrived), "added": spread(seconds), "processor": processor})
    print(table(["variant", "arrived, s", "x raw", "and added, x raw", "processor s", "GB/s"], rows))


if __name__ == "__main__":
    main()
