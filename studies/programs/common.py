"""What the benchmark programs share: the machine in words, medians, peak memory, one JSON line per measurement."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

MIB = 1 << 20


def machine() -> dict[str, Any]:
    """Processor, cores, memory, versions and how busy the machine is: printed with every result."""
    import torch

    names = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    flags = next((line.split() for line in _lines("/proc/cpuinfo") if line.startswith("flags")), [])
    total = next((int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    return {
        "processor": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "simd": [flag for flag in ("avx2", "avx512f", "amx_bf16") if flag in flags],
        "memory_gib": round(total / MIB, 1),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def command_line(text: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the program's own docstring."""
    return argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)


def say(row: Mapping[str, Any]) -> None:
    """One JSON line; floats with five significant digits."""
    print(json.dumps(row, default=str), flush=True)


def rounded(value: float) -> float:
    """Five significant digits."""
    return float(f"{value:.5g}")


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and largest."""
    return {
        "median": rounded(statistics.median(values)),
        "min": rounded(min(values)),
        "max": rounded(max(values)),
    }


def mean_sd(values: Sequence[float], digits: int = 1) -> str:
    """Mean and sample standard deviation, over seeds or runs; of a single one the mean alone."""
    mean = f"{statistics.fmean(values):.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


def interleaved(
    variants: Mapping[str, Callable[[], object]], repetitions: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds of each variant by ``clock``, run A B C A B C; the first pass is thrown away."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repetitions + 1):
        for name, variant in variants.items():
            began = clock()
            variant()
            times[name].append(clock() - began)
    return {name: values[1:] for name, values in times.items()}


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def fresh_peak() -> int:
    """Gives free memory back to the system, starts a new peak, and returns the bytes resident now."""
    import gc

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _status("VmRSS")


def peak() -> int:
    """The largest resident size in bytes since :func:`fresh_peak`."""
    return _status("VmHWM")


def _status(name: str) -> int:
    return next(int(line.split()[1]) * 1024 for line in _lines("/proc/self/status") if line.startswith(name + ":"))


class TreeMemory(threading.Thread):
    """Peak memory of every process whose environment holds ``tag``, from /proc/*/smaps_rollup; a context manager.

    ``detached`` are the processor seconds that no one of them waits for, and so ``os.wait4`` of the first one does not
    tell: of the processes that outlived the one that started them, as last seen, and of those that they waited for.
    ``peak`` is the largest sum of proportional set sizes (shared pages counted once), ``anonymous`` the same without
    the pages of files (libraries), which is what a run itself allocates. Bytes.
    """

    def __init__(self, tag: str, interval: float = 0.2) -> None:
        super().__init__(daemon=True)
        self.tag, self.interval = tag.encode(), interval
        self.peak = self.anonymous = 0
        self.processes: set[int] = set()
        self._unwaited: dict[int, float] = {}  # processor seconds of the processes that nobody of the tree waits for
        self._strangers: set[int] = {os.getpid()}
        self._done = threading.Event()

    def run(self) -> None:
        while not self._done.wait(self.interval):
            self._look()
        self._look()  # at those that go on when the first one has ended

    @property
    def detached(self) -> float:
        return sum(self._unwaited.values())

    def _look(self) -> None:
        total = anonymous = 0
        for pid in list(self._tagged()):
            sizes = self._sizes(pid)
            total, anonymous = total + sizes.get("Pss:", 0), anonymous + sizes.get("Pss_Anon:", 0)
            self._count(pid)
        self.peak, self.anonymous = max(self.peak, total), max(self.anonymous, anonymous)

    def _count(self, pid: int) -> None:
        """Notes the processor time of a process whose parent is neither of the tree nor this process."""
        status = " ".join(_lines(f"/proc/{pid}/stat"))
        fields = status.rpartition(")")[2].split()  # what stands before may hold spaces: the name of the program
        if fields and int(fields[1]) not in self.processes | {os.getpid()}:
            self._unwaited[pid] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")

    def _tagged(self) -> Iterable[int]:
        for pid in [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]:
            if pid in self._strangers:
                continue
            try:
                own = pid in self.processes or self.tag in Path(f"/proc/{pid}/environ").read_bytes()
            except OSError:
                own = False
            if own:
                self.processes.add(pid)
                yield pid
            else:
                self._strangers.add(pid)

    @staticmethod
    def _sizes(pid: int) -> dict[str, int]:
        parts = [line.split() for line in _lines(f"/proc/{pid}/smaps_rollup")[1:]]
        return {part[0]: int(part[1]) * 1024 for part in parts}

    def __enter__(self) -> TreeMemory:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self.join()
