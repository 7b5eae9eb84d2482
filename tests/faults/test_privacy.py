"""Spec faults, row 34: differential privacy that is none, or spent, in the policy as FLARE itself loads and applies it.

A hospital's ``local/privacy.json`` goes through FLARE's own loader, its filters through FLARE's own order of a task.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import FilterKey, FLContextKey, ReservedKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.apis.workspace import Workspace
from nvflare.private.fed.app.fl_conf import create_privacy_manager
from support.flare_memory import Engine, MemoryFlare, in_engine, serialised, site_executor, toy_experiment
from support.toy import three_sites

from fedvlp.core.types import Broadcast, Update
from fedvlp.deploy.site_doctor import _privacy
from fedvlp.flare import messages
from fedvlp.flare.privacy_budget import Ledger
from fedvlp.run.experiment import Experiment

POLICY = Path(__file__).parents[2] / "provisioning" / "site" / "privacy-dp.json"
RUN = {"folder": "fedavg/001", "fingerprint": "abc", "version": "0"}
Settings = dict[str, Any]


def policy(kit: Path, edit: Callable[[Settings], Any] = lambda content: None) -> Path:
    """A kit with the shipped policy, changed."""
    for folder in ("startup", "local"):
        (kit / folder).mkdir(parents=True, exist_ok=True)
    content = json.loads(POLICY.read_text())
    edit(content)
    (kit / "local" / "privacy.json").write_text(json.dumps(content))
    return kit


def noise(**settings: Any) -> Callable[[Settings], None]:
    return lambda content: content["scopes"][0]["task_result_filters"][0]["args"].update(settings)


def loaded(kit: Path) -> Any:
    """The policy as FLARE's process of a job loads it, before anything of the job is run."""
    return create_privacy_manager(Workspace(str(kit), "st-anna"), names_only=False)


def outgoing(kit: Path) -> list[Any]:
    """What FLARE applies to a result on its way out."""
    manager = loaded(kit)
    return [] if manager.default_scope is None else list(manager.default_scope.task_result_filters[FilterKey.OUT])


NONE: dict[str, Callable[[Settings], Any]] = {
    "no noise": noise(noise_multiplier=0), "no noise, as a float": noise(noise_multiplier=0.0),
    "noise that is no number": noise(noise_multiplier="8"), "negative noise": noise(noise_multiplier=-8.0),
    "NaN": noise(noise_multiplier=float("nan")), "infinite clipping": noise(clip=float("inf")),
    "no clipping": noise(clip=0), "an endless budget": noise(epsilon=float("inf")), "no delta": noise(delta=0),
    "a delta of 1": noise(delta=1.0), "nobody's budget": noise(dataset=""), "a setting that is none": noise(sigma=1.0),
    "noise left out": lambda c: c["scopes"][0]["task_result_filters"][0]["args"].pop("noise_multiplier"),
    "a class that is none": lambda c: c["scopes"][0]["task_result_filters"][0].update(path="fedvlp.flare.ClipAndNoize"),
}  # fmt: skip


def test_a_policy_that_gives_no_privacy_starts_no_job(tmp_path: Path) -> None:
    """FLARE's job process cannot load it, so it ends before it asks for a task; it does not go on without a filter."""
    for mistake, edit in NONE.items():
        with pytest.raises(Exception, match=r"ClipAndNoi|noise_multiplier|sigma|not supported|must be"):
            loaded(policy(tmp_path / mistake, edit))


PASSED_OVER: dict[str, Callable[[Settings], Any]] = {
    "a misspelt chain": lambda c: c["scopes"][0].update(task_results_filters=c["scopes"][0].pop("task_result_filters")),
    "the other direction": lambda c: [f.update(direction="in") for f in c["scopes"][0]["task_result_filters"]],
    "a filter outside of the scope": lambda c: c.update(task_result_filters=c["scopes"][0].pop("task_result_filters")),
}


@pytest.mark.parametrize("mistake", PASSED_OVER)
def test_what_flare_passes_over_in_silence_the_doctor_fails(mistake: str, tmp_path: Path) -> None:
    """FLARE loads each of these without a word, and applies nothing to what leaves."""
    assert len(outgoing(policy(tmp_path))) == 2
    fine = _privacy(tmp_path / "local" / "privacy.json")
    assert (fine.ok, fine.found) == (True, "results pass ClipAndNoise, AllowMetrics")
    assert outgoing(policy(tmp_path, PASSED_OVER[mistake])) == []
    assert _privacy(tmp_path / "local" / "privacy.json").ok is False


def test_the_doctor_knows_other_policies_that_are_none(tmp_path: Path) -> None:
    file = tmp_path / "privacy.json"
    assert _privacy(file).ok is None
    for content in ("{", "[]", '{"scopes": 3, "default_scope": "x"}', '{"scopes": []}', '{"scopes": [{"name": 1}]}'):
        file.write_text(content)
        assert _privacy(file).ok is False
    second = {"name": "weaker", "properties": {}, "task_data_filters": [], "task_result_filters": []}
    policy(tmp_path, lambda content: content["scopes"].append(second))
    assert "a job chooses the weaker" in _privacy(tmp_path / "local" / "privacy.json").found
    policy(tmp_path, lambda content: content["scopes"][0]["task_result_filters"].clear())
    assert _privacy(tmp_path / "local" / "privacy.json").ok is None


class Hospital(Executor):
    """A site's executor between its own filters, in the order of FLARE's client runner."""

    def __init__(self, inner: Executor, kit: Path) -> None:
        super().__init__()
        self.inner, self.kit = inner, kit
        manager = loaded(kit)
        self.filters = list(manager.default_scope.task_result_filters[FilterKey.OUT])
        self.components = list(manager.components.values())

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        fl_ctx.set_prop(FLContextKey.TASK_DATA, shareable, private=True, sticky=False)
        for component in self.components:
            component.handle_event(EventType.BEFORE_TASK_EXECUTION, fl_ctx)
        reply = self.inner.execute(task_name, shareable, fl_ctx, abort_signal)
        for chosen in self.filters:
            reply = chosen.process(reply, fl_ctx)
        return reply


def context(kit: Path) -> FLContext:
    fl_ctx = Engine("st-anna", kit, "job-1").new_context()
    fl_ctx.set_prop(ReservedKey.IDENTITY_NAME, "st-anna", private=False, sticky=False)
    return fl_ctx


class OnlyAtB(Executor):
    """Site b has the policy of ``kit``; the others send what they have."""

    def __init__(self, inner: Executor, kit: Path) -> None:
        super().__init__()
        self.inner, self.hospital = inner, Hospital(inner, kit)

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        chosen = self.hospital if fl_ctx.get_identity_name() == "b" else self.inner
        return chosen.execute(task_name, shareable, fl_ctx, abort_signal)


class Sends(Executor):
    """Answers with these tensors, whatever it was sent."""

    def __init__(self, state: dict[str, torch.Tensor], **rest: Any) -> None:
        super().__init__()
        self.update = Update("st-anna", 0, "train", 100, state, **rest)

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        return messages.send_update(self.update)


def left(kit: Path, received: dict[str, torch.Tensor], sent: dict[str, torch.Tensor], **rest: Any) -> str:
    """Why nothing left; fails where something did, or where budget was spent on it."""
    (kit / "startup" / "fed_client.json").unlink(missing_ok=True)
    task = messages.send_broadcast(Broadcast(0, "train", received), RUN)
    reply = Hospital(Sends(sent, **rest), kit).execute("train", task, context(kit), Signal())
    failed = messages.failure(reply)
    assert failed is not None
    assert not reply.get("DXO")
    assert not (kit / "privacy" / "ledger.json").exists()
    return failed.text


WEIGHTS = torch.ones(2, 3)
DTYPES = [torch.float16, torch.bfloat16, torch.int8, torch.int64, torch.bool, torch.complex64, torch.uint8]
DTYPES += [getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2", "uint16") if hasattr(torch, name)]


def test_a_type_that_noise_does_not_protect_stays(tmp_path: Path) -> None:
    """It closes on every other type of torch, whatever else is in the update, also where the task brought it so.

    What else cannot be clipped: core/test_privacy.py.
    """
    for dtype in DTYPES:
        other = torch.ones(2, 3).to(dtype)
        said = left(policy(tmp_path / str(dtype)), {"w": WEIGHTS, "n": other}, {"w": WEIGHTS + 1, "n": other})
        assert said.startswith("PrivacyError"), dtype
        assert "float32 and float64" in said, dtype


def test_so_little_noise_that_one_release_is_all_the_budget_lets_nothing_go(tmp_path: Path) -> None:
    """sigma = 10^-6 is a number that the settings take; its epsilon is beyond every budget."""
    pytest.importorskip("opacus")
    kit = policy(tmp_path, noise(noise_multiplier=1e-6))
    assert "privacy budget" in left(kit, {"w": WEIGHTS}, {"w": WEIGHTS + 1})


def releases(kit: Path) -> int:
    return len(json.loads((kit / "privacy" / "ledger.json").read_text()))


def test_a_budget_that_ends_in_the_middle_of_a_job_ends_it_for_that_site_in_every_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """b's policy allows two releases. From the third round on b is dropped and named while a and c go on; the lead
    submits again, and b sends nothing. Every release is told, at the site and as a metric."""
    pytest.importorskip("opacus")
    two = allows(2, tmp_path / "other")
    kits: list[Path] = []

    def executor(experiment: Experiment) -> Executor:
        kit = policy(tmp_path / "run" / "b", noise(epsilon=two))
        kits.append(kit)
        return OnlyAtB(site_executor(experiment), kit)

    settings = {"rounds": 4, "evaluate_every": 0, "max_missed": 99}
    flare = MemoryFlare(tmp_path / "run", monkeypatch, toy_experiment(**settings), three_sites())
    flare.make_executor, flare.carry = executor, serialised
    with caplog.at_level("INFO"):
        assert flare.submit().panic == ""
    assert [list(record["dropped"]) for record in flare.records] == [[], [], ["b"], ["b"]]
    assert "privacy budget" in flare.records[2]["dropped"]["b"]
    told = [record["sites"]["b"]["privacy/epsilon"] for record in flare.records[:2]]
    assert 0 < told[0] < told[1] <= two
    for number, spent in enumerate(told, 1):
        assert f"release {number}, epsilon {spent:.3f} of {two:g}" in caplog.text
    assert releases(kits[0]) == 2
    first = flare.run.path
    assert flare.submit().panic == ""
    assert flare.run.path != first
    assert [list(record["dropped"]) for record in flare.records] == [["b"]] * 4
    assert releases(kits[0]) == 2
    _, model = in_engine(flare.experiment, flare.data, tmp_path / "plain", lambda site, message: site != "b")
    assert flare.run.model.read_bytes() == model.read_bytes(), "nothing of b is in the model of the second job"


def allows(count: int, folder: Path) -> float:
    """An epsilon that so many releases of the shipped noise keep to, and one more does not."""
    book = Ledger(folder / "ledger.json", folder / "marker.json")
    folder.mkdir()
    spent = [book.spend("pretrain", 8.0, 1e9, 1e-5)[1] for _ in range(count + 1)]
    return (spent[-2] + spent[-1]) / 2
