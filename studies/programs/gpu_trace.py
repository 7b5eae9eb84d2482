"""How busy a GPU is over a whole run of FedDRA at paper size, on a clock of its own; draws the trace.

    python studies/programs/gpu_trace.py [--rounds 25] [--trace gpu-trace.json]     # open it in https://ui.perfetto.dev
    python studies/programs/gpu_trace.py --quick

No GPU is needed. The product's loader, loop, site, engine and server train small towers on a pretended device
(tests/support/pretend_device.py), which notes every copy, event and wait in the order in which the host asks for them.
That record is then played on a clock: a step, a copy and the host's own work take what ``Costs`` says, and whatever
waits in the record waits on the clock. So the order and the waiting are this program's, and the durations are those
that ``gpu.py`` measured on an H100, with the model as it is and compiled.

Four cases: all five sites of the simulation share a GPU; and a hospital's own GPU, which also waits for the server and
the line. The trace is the Chrome trace format of the first case and of the slowest one.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from common import command_line, machine, rounded, say, table

from fedvlp.federation.site import Site
from fedvlp.training.step import Stepper

MODEL_BYTES = 834e6
ALIGN_SHARE = 0.072  # of the model in alignment modules and heads, which alone travel after the align phase
BATCH, FILM = 388, 256


@dataclass
class Span:
    """Something that takes time on a track; seconds."""

    track: str  # host, gpu or copies
    name: str
    begin: Any
    end: Any


@dataclass
class Trace:
    """What a run did, and when."""

    spans: list[Span] = field(default_factory=list)
    inside: float = 1.0  # share of a span on the GPU in which kernels run, as far as that was measured
    measuring: float = 0.0  # seconds that measuring ``inside`` took
    kernels: dict[str, float] = field(default_factory=dict)  # share of the kernels' time, the longest first

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]

    def count(self, name: str) -> int:
        return len(self.named(name))

    def median_ms(self, name: str) -> float:
        lengths = [1000 * (span.end - span.begin) for span in self.named(name)]
        return rounded(statistics.median(lengths)) if lengths else 0.0

    def span(self) -> float:
        """Seconds from the beginning of the first task to the end of everything, without ``measuring``."""
        first = min(span.begin for span in self.spans if span.track == "host")
        return float(max(span.end for span in self.spans) - first - self.measuring)

    def host_seconds(self, name: str) -> float:
        return float(sum(span.end - span.begin for span in self.spans if span.name.startswith(name)))

    def busy(self) -> float:
        """Seconds in which the GPU works: the union of its spans, copies left out."""
        total, reached = 0.0, float("-inf")
        for span in sorted((span for span in self.spans if span.track == "gpu"), key=lambda span: span.begin):
            total += max(0.0, span.end - max(span.begin, reached))
            reached = max(reached, span.end)
        return total * self.inside

    def write(self, path: Path) -> None:
        """As Chrome trace JSON: microseconds, a thread a track."""
        tracks = {"host": 0, "gpu": 1, "copies": 2}
        names: list[dict[str, Any]] = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": number, "args": {"name": track}}
            for track, number in tracks.items()
        ]
        events = [
            {
                "ph": "X", "name": span.name, "pid": 0, "tid": tracks[span.track],
                "ts": round(1e6 * span.begin, 1), "dur": round(1e6 * (span.end - span.begin), 1),
            }
            for span in self.spans
        ]  # fmt: skip
        path.write_text(json.dumps({"traceEvents": [*names, *events], "displayTimeUnit": "ms"}), encoding="utf-8")


@contextmanager
def around(before: Callable[[Any], Any], after: Callable[[str, Any], None]) -> Iterator[None]:
    """Calls ``before(message)`` and ``after(name, what before gave)`` around tasks, measurements and steps."""
    now: dict[str, Any] = {"message": None}

    def wrapped(name: str, function: Any) -> Any:
        def call(self: Any, *arguments: Any, **options: Any) -> Any:
            if name == "task":
                now["message"] = arguments[0]
            began = before(name)
            result = function(self, *arguments, **options)
            phase = getattr(now["message"], "phase", "")
            after(f"{name} {phase}", began)
            return result

        return call

    places: list[tuple[Any, str, str]] = [
        (Site, "handle", "task"),
        (Site, "_measure", "measure"),
        (Stepper, "__call__", "step"),
    ]
    with ExitStack() as patches:
        for owner, attribute, name in places:
            patches.enter_context(patch.object(owner, attribute, wrapped(name, getattr(owner, attribute))))
        yield


@contextmanager
def traced(device: torch.device) -> Iterator[Trace]:
    """The trace of a real run on ``device``; on a GPU steps are timed by CUDA events, and some of them by kernel."""
    trace, cuda = Trace(), device.type == "cuda"
    began = time.perf_counter()
    first = torch.cuda.Event(enable_timing=True) if cuda else None
    kernels = Kernels()

    def here() -> tuple[float, Any]:
        place = torch.cuda.Event(enable_timing=True) if cuda else None
        if place is not None:
            place.record()
        return time.perf_counter() - began, place

    def before(name: str) -> tuple[float, Any]:
        if cuda and name == "step":
            kernels.step()
        return here()

    def after(name: str, started: tuple[float, Any]) -> None:
        ended = here()
        if name.startswith("task"):
            trace.spans.append(Span("host", name, started[0], ended[0]))
        else:
            trace.spans.append(Span("gpu", name, started, ended))

    if first is not None:
        torch.cuda.synchronize()
        first.record()
        began = time.perf_counter()
    with around(before, after):
        yield trace
    if cuda:
        torch.cuda.synchronize()
    for span in trace.spans:
        if span.track == "gpu":
            times = (span.begin, span.end)
            span.begin, span.end = (
                first.elapsed_time(place) / 1000 if first is not None else clock for clock, place in times
            )
    if cuda:
        without_waiting(trace.spans)
    trace.inside, trace.measuring, trace.kernels = kernels.share, kernels.seconds, kernels.shares


def without_waiting(spans: list[Span]) -> None:
    """Shortens the spans of the GPU that are longer than is usual: of a step the median, of a measurement the least.

    CUDA events mark when the GPU reached a place, and between two of them it may have waited for the host, which in a
    first round loads kernels and draws films.
    """
    lengths: dict[str, list[float]] = defaultdict(list)
    for span in spans:
        if span.track == "gpu":
            lengths[span.name].append(span.end - span.begin)
    for span in spans:
        if span.track == "gpu":
            usual = statistics.median if span.name.startswith("step") else min
            span.begin = max(span.begin, span.end - usual(lengths[span.name]))


class Kernels:
    """The share of time in which kernels run, over ten steps in the middle of a run."""

    FIRST, STEPS = 60, 10

    def __init__(self) -> None:
        self.share, self.seconds, self._done = 1.0, 0.0, 0
        self.shares: dict[str, float] = {}
        self._profile: Any = None

    def step(self) -> None:
        self._done += 1
        began = time.perf_counter()
        if self._done == self.FIRST:
            torch.cuda.synchronize()
            began = time.perf_counter()
            self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self._profile.__enter__()
        elif self._done == self.FIRST + self.STEPS and self._profile is not None:
            torch.cuda.synchronize()
            began = time.perf_counter()
            self._profile.__exit__(None, None, None)
            self._read(
                (event.time_range.start, event.time_range.end, event.name)
                for event in self._profile.events()
                if event.device_type == torch.autograd.DeviceType.CUDA and "HtoD" not in event.name
            )
            self._profile = None
        self.seconds += time.perf_counter() - began

    def _read(self, events: Iterator[tuple[float, float, str]]) -> None:
        ran = list(events)
        if not ran:
            return
        trace = Trace([Span("gpu", "", begin, end) for begin, end, _ in ran])
        self.share = trace.busy() / (max(end for _, end, _ in ran) - min(begin for begin, _, _ in ran))
        seconds: dict[str, float] = defaultdict(float)
        for begin, end, name in ran:
            seconds[name[:90]] += end - begin
        total, longest = sum(seconds.values()), sorted(seconds, key=lambda name: -seconds[name])
        self.shares = {name: seconds[name] / total for name in longest[:16]}


@dataclass(frozen=True)
class Costs:
    """Seconds, and bytes a second, of what is not computed here."""

    align: float = 0.0788  # of the GPU for a step of 388 pairs: a forward pass of the frozen towers, and the rest
    joint: float = 0.2644  # the anchor's pass included
    launch: float = 0.040  # of the host, to queue a step (assumed)
    draw: float = 0.020  # of the host, to gather a batch of films and pin it (assumed)
    pinned: float = 55e9
    pageable: float = 8e9
    ahead: int = 2  # steps that the host may be ahead: a queue holds about a thousand kernels
    line: float = float("inf")  # bytes a second between site and server, each way
    wire: float = 1.0  # share of the bytes that travel
    after_align: float = 0.5  # of the server: checks, mean, checkpoint
    after_joint: float = 1.7  # the same of all tensors: 1.4 measured with two sites, 0.1 a further one


def repeated(entries: list[Any], rounds: int) -> list[Any]:
    """A record of ``rounds`` rounds from a shorter one, whose last round comes again: all after the first are alike."""
    begins = [number for number, entry in enumerate(entries) if entry.name.startswith("task")]
    round_of = {number: int(entries[number].name.split()[-1]) for number in begins}
    last = max(round_of.values()) - 1  # the final task is the evaluation after the last round
    first = min(number for number in begins if round_of[number] == last)
    after = min(number for number in begins if round_of[number] > last)
    again: list[Any] = []
    for number in range(last + 1, rounds):
        for entry in entries[first:after]:
            renamed = entry.name.startswith("task")
            again.append(replace(entry, name=f"{entry.name.rpartition(' ')[0]} {number}") if renamed else entry)
    return [*entries[:after], *again, *entries[after:]]


def play(entries: list[Any], costs: Costs, site: str = "") -> Trace:
    """The record on a clock; of one ``site``'s tasks alone, where it has a GPU of its own."""
    clock = Clock(costs, state_bytes(entries))
    mine, last = not site, ""
    for entry in entries:
        kind, _, rest = entry.name.partition(" ") if entry.kind == "mark" else ("", "", "")
        if kind == "task":
            name, phase, round_ = rest.split()
            mine = site in ("", name)
            if mine:
                clock.task(phase, new=last not in ("", f"{phase} {round_}"), alone=bool(site))
                last = f"{phase} {round_}"
        elif kind == "end" and mine:
            clock.end()
        elif mine:
            clock.queue(entry, kind, rest)
    return clock.trace


def state_bytes(entries: list[Any]) -> float:
    """Bytes of the small model that the record has: the largest of what a task copies before its first step."""
    sizes, now = [0.0], 0.0
    for entry in entries:
        now = 0.0 if entry.name.startswith("task") else now
        now += entry.bytes if entry.kind == "copy" and entry.stream == 0 else 0
        if entry.name.startswith("step"):
            sizes.append(now)
    return max(sizes) or 1.0


class Clock:
    """The host and the two streams of a GPU."""

    def __init__(self, costs: Costs, state: float) -> None:
        self.costs, self.scale, self.trace = costs, MODEL_BYTES / state, Trace()
        self.host = 0.0
        self.free: dict[int, float] = {}
        self.events: dict[int, float] = {}
        self.steps: list[float] = []
        self.began = 0.0
        self.phase = ""
        self.measuring = False

    def task(self, phase: str, new: bool, alone: bool) -> None:
        """The server's work if a phase has ended, and the way to the site."""
        costs = self.costs
        share = ALIGN_SHARE if phase == "joint" else 1.0  # what the phase before has changed travels down
        self.host += new * (costs.after_align if phase == "joint" else costs.after_joint)
        self.host += alone * MODEL_BYTES * share * costs.wire / costs.line
        self.began, self.phase = self.host, phase

    def end(self) -> None:
        self.trace.spans.append(Span("host", f"task {self.phase}", self.began, self.host))
        share = ALIGN_SHARE if self.phase == "align" else 1.0
        if self.costs.line < float("inf"):
            self.host += MODEL_BYTES * share * self.costs.wire / self.costs.line

    def queue(self, entry: Any, mark: str, rest: str) -> None:
        if mark == "step":
            self.step()
        elif mark == "measure":
            self.measuring = rest == "begin"
        elif entry.kind in ("copy", "fetch"):
            self.copy(entry)
        elif entry.kind == "record":
            self.events[entry.event] = self.free.get(entry.stream, 0.0)
        elif entry.kind == "wait":
            self.free[entry.stream] = max(self.free.get(entry.stream, 0.0), self.events[entry.event])
        elif entry.kind == "sync":
            self.host = max(self.host, self.free.get(entry.stream, 0.0))

    def step(self) -> None:
        if len(self.steps) >= self.costs.ahead:
            self.host = max(self.host, self.steps[-self.costs.ahead])
        self.work(f"step {self.phase}", getattr(self.costs, self.phase), self.costs.launch)
        self.steps.append(self.free[0])

    def work(self, name: str, seconds: float, launch: float) -> None:
        """Kernels of so many seconds, queued one after the other while the GPU begins with the first."""
        begin = max(self.free.get(0, 0.0), self.host)
        self.host += launch
        self.free[0] = max(begin + seconds, self.host)
        self.trace.spans.append(Span("gpu", name, begin, begin + seconds))

    def copy(self, entry: Any) -> None:
        film = entry.dtype == "torch.uint8" and entry.kind == "copy"
        size = BATCH * FILM**2 if film else entry.bytes * (self.scale if entry.stream == 0 else 1.0)
        if film:
            self.host += self.costs.draw
        begin = max(self.free.get(entry.stream, 0.0), self.host)
        done = begin + size / (self.costs.pageable if entry.waits else self.costs.pinned)
        self.free[entry.stream] = done
        if size > 1e6:
            self.trace.spans.append(Span("copies", "films" if film else entry.kind, begin, done))
        if entry.waits:
            self.host = done
        if film and self.measuring:
            self.free[0] = max(self.free.get(0, 0.0), done)
            self.work("measure", self.costs.align, self.costs.launch / 3)


def recorded(rounds: int, quick: bool) -> list[Any]:
    """What the host asks of the GPU over a run of feddra-paper's schedule: five sites, small towers and films."""
    sys.path.append(str(Path(__file__).parents[2] / "tests"))
    from support import pretend_device, pretend_streams

    from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
    from fedvlp.models.dual_encoder import ModelConfig
    from fedvlp.run import presets
    from fedvlp.run.folder import RunFolder
    from fedvlp.run.simulate import simulate
    from fedvlp.training.settings import Training

    chosen = presets.get("feddra-paper")
    model = ModelConfig(image_size=32, max_tokens=32, head_hidden=16, head_norm="layer", text_layers=1)
    training = Training(batch_size=8, optimizer="sgd", lr=1e-4)
    method: Any = chosen.method
    method = replace(method, dro_batch=8)
    if quick:
        method = replace(method, align_steps=2, local_steps=5)
    data = SyntheticCohort(sites=5, size=400, image_size=36)
    rounds_ = replace(chosen.rounds, rounds=rounds)
    experiment = replace(chosen, method=method, model=model, training=training, data=data, rounds=rounds_)
    handle = Site.handle

    def task(self: Any, message: Any, *rest: Any) -> Any:
        pretend_streams.mark(f"task {self.client.name} {message.phase} {message.round}")
        update = handle(self, message, *rest)
        pretend_streams.mark("end")
        return update

    def before(name: str) -> None:
        if name == "measure":
            pretend_streams.mark("measure begin")

    def after(name: str, _: None) -> None:
        kind = name.partition(" ")[0]
        if kind != "task":
            pretend_streams.mark("measure end" if kind == "measure" else name)

    pretend_device.install()
    pretend_streams.QUEUED.clear()
    where = partial(torch.device, pretend_device.NAME, 0)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as patches:
        patches.enter_context(patch.object(Training, "torch_device", lambda self: where()))
        patches.enter_context(around(before, after))
        patches.enter_context(patch.object(Site, "handle", task))
        simulate(experiment, RunFolder.create(Path(folder), experiment))
    return list(pretend_streams.QUEUED)


GIGABIT = 1e9 / 8
ALIGN_COMPILED, JOINT_COMPILED = 0.0672, 0.2125
"""Seconds of a step of the compiled model; compiling took 84 s, once, and is not counted."""
CASES = {
    "five sites share the GPU": ("", Costs()),
    "a hospital, 10 Gbit/s": ("site-1", Costs(line=10 * GIGABIT)),
    "a hospital, 1 Gbit/s, 8 bit both ways": ("site-1", Costs(line=GIGABIT, wire=0.26)),
    "a hospital, 1 Gbit/s": ("site-1", Costs(line=GIGABIT)),
}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--recorded", type=int, default=3, help="rounds that are computed; the last one is repeated")
    parser.add_argument("--trace", type=Path, default=Path("gpu-trace.json"))
    parser.add_argument("--quick", action="store_true")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    say(machine())
    entries = recorded(2 if chosen.quick else min(chosen.recorded, chosen.rounds), chosen.quick)
    entries = repeated(entries, 3 if chosen.quick else chosen.rounds)
    steps = [index for index, entry in enumerate(entries) if entry.name.startswith("step")]
    waits = {
        "steps": len(steps),
        "waits_of_the_host_between_steps_of_a_task": sum(
            any(entry.waits for entry in entries[a:b])
            for a, b in pairwise(steps)
            if not any(entry.name == "end" for entry in entries[a:b])
        ),
    }
    say(waits)
    rows = []
    for name, (site, line) in CASES.items():
        for how, costs in (("", line), ("compiled", replace(line, align=ALIGN_COMPILED, joint=JOINT_COMPILED))):
            trace = play(entries, costs, site)
            busy, span = trace.busy(), trace.span()
            inside = busy / trace.host_seconds("task")
            row = {"case": name, "model": how or "as it is", "seconds": rounded(span), "busy": rounded(busy / span)}
            say(row | {"busy_inside_tasks": rounded(inside)})
            rows.append([name, how, f"{span:.0f}", f"{100 * busy / span:.0f} %", f"{100 * inside:.0f} %"])
        if name in (next(iter(CASES)), list(CASES)[-1]):
            trace.write(chosen.trace.with_stem(chosen.trace.stem + ("" if not site else "-hospital")))
    print("\n" + table(["case", "model", "seconds", "GPU busy", "inside tasks"], rows))
    say(machine())


if __name__ == "__main__":
    main()
