"""Slow links that drop, on loopback: each passes its connections on at so many bits a second, and breaks them all.

A link has one speed for each direction, shared by all its connections. At random moments of a seed it breaks: its
connections end with a reset, what was under way is lost, and for a while nobody gets through.
"""

from __future__ import annotations

import asyncio
import random
import socket
import threading
from contextlib import suppress

CHUNK = 16 << 10  # bytes
BUFFER = 64 << 10  # bytes; what a socket of the link holds beside what is under way
LONGEST = 8.0  # seconds that a broken link stays so, at most
CREDIT = 0.2  # seconds that a direction may make up for; a busy machine wakes its thread late


class Link:
    """One site's link: what it listens on, where it leads, and what has passed."""

    def __init__(self, port: int, target: int, megabit: float, gap: float, seed: int) -> None:
        """``gap``: seconds between two breaks on average; 0 = none."""
        self.port, self.target = port, target
        self.up = self.down = self.breaks = 0  # bytes to the server, bytes to the site, times that it broke
        self.breaking = False  # whether it breaks by itself now
        self.rate, self._gap, self._draw = megabit * 1e6 / 8, gap, random.Random(seed)
        self._free = {"up": 0.0, "down": 0.0}  # when each direction has passed on what it took
        self._open: set[asyncio.StreamWriter] = set()
        self._broken = False

    async def start(self) -> None:
        """Listens, and passes connections on from now on."""
        listening = socket.socket()
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
        listening.bind(("127.0.0.1", self.port))
        await asyncio.start_server(self._connected, sock=listening, limit=CHUNK)
        self._breaks = asyncio.create_task(self._break())  # kept, or Python would collect it

    async def _break(self) -> None:
        while True:
            await asyncio.sleep(self._draw.expovariate(1 / self._gap) if self._gap else 3600.0)
            if not self.breaking or not self._gap:
                continue
            self.breaks += 1
            self._broken = True
            for writer in list(self._open):
                writer.transport.abort()
            await asyncio.sleep(self._draw.uniform(0.0, LONGEST))
            self._broken = False

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._broken:
            writer.transport.abort()
            return
        onward = socket.socket()
        onward.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
        onward.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(onward, ("127.0.0.1", self.target))
        except OSError:  # the server is down
            onward.close()
            writer.transport.abort()
            return
        far_reader, far_writer = await asyncio.open_connection(sock=onward, limit=CHUNK)
        ends = {writer, far_writer}
        self._open |= ends
        await asyncio.gather(self._pass(reader, far_writer, "up"), self._pass(far_reader, writer, "down"))
        self._open -= ends

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: str) -> None:
        """One direction of a connection, until either end closes it."""
        writer.transport.set_write_buffer_limits(high=BUFFER)
        with suppress(OSError):
            while data := await reader.read(CHUNK):
                await self._take(way, len(data))
                writer.write(data)
                await writer.drain()
                setattr(self, way, getattr(self, way) + len(data))
        writer.transport.abort()

    async def _take(self, way: str, count: int) -> None:
        """Waits for the turn of so many bytes."""
        now = asyncio.get_running_loop().time()
        self._free[way] = max(self._free[way], now - CREDIT) + count / self.rate
        if self._free[way] > now:
            await asyncio.sleep(self._free[way] - now)


class Links:
    """A context manager: the links run in a thread of this process."""

    def __init__(self, links: list[Link]) -> None:
        self.links = links
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Links:
        self._thread.start()
        for link in self.links:
            asyncio.run_coroutine_threadsafe(link.start(), self._loop).result(10)
        return self

    def breaking(self, on: bool) -> None:
        """Whether the links break by themselves from now on."""
        for link in self.links:
            link.breaking = on

    def passed(self) -> dict[str, int]:
        """Bytes that have passed in each direction, and breaks, over all links."""
        return {name: sum(getattr(link, name) for link in self.links) for name in ("up", "down", "breaks")}

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop)
        self._thread.join()

    def _stop(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.call_soon(self._loop.stop)  # after the tasks have heard of it
