"""The timeouts of a job fit each other and reach both sides of it under the names that FLARE reads."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nvflare.apis.controller_spec import Task
from nvflare.apis.fl_constant import ConfigVarName
from nvflare.apis.shareable import Shareable

from fedvlp.core.client import named_state
from fedvlp.flare.jobs import job_files
from fedvlp.flare.timeouts import Timeouts, model_bytes
from fedvlp.run import presets
from fedvlp.run.assembly import Assembly


def test_758_mb_at_20_mbit_by_hand() -> None:
    """758e6 * 8 / 20e6 = 303.2 s, three times that 909.6 s: more than FLARE's 600 s for a piece that stands still."""
    assert asdict(Timeouts.of(758 * 10**6, 20.0)) == {
        "tensor_streaming_per_request_timeout": pytest.approx(909.6),
        "tensor_min_download_timeout": pytest.approx(1819.2),
        "get_task_timeout": pytest.approx(1819.2),
        "submit_task_result_timeout": pytest.approx(1819.2),
        "task_timeout": 7239,  # an hour of training and 2 * 1819.2, rounded up
        "grace": pytest.approx(1819.2),
    }


@given(st.integers(1, 10**11), st.floats(0.1, 1e5), st.floats(0.0, 1e5))
def test_each_outlasts_what_it_bounds(size: int, link: float, training: float) -> None:
    t = Timeouts.of(size, link, training)
    transfer = size * 8 / (link * 1e6)
    assert t.tensor_streaming_per_request_timeout >= max(600.0, transfer)
    assert t.tensor_min_download_timeout > t.tensor_streaming_per_request_timeout, "a repeated request finds it"
    assert t.get_task_timeout >= max(300.0, transfer + t.tensor_streaming_per_request_timeout)
    assert t.submit_task_result_timeout >= t.get_task_timeout
    assert t.task_timeout >= training + t.get_task_timeout + t.submit_task_result_timeout
    assert t.grace >= 2 * transfer, "a site on the slowest link is later than one next to the server by both ways"
    Task("train", Shareable(), timeout=t.task_timeout)


@pytest.mark.parametrize("link", [0.0, -1.0])
def test_a_link_without_speed_is_refused(link: float) -> None:
    with pytest.raises(ValueError, match="give a positive number"):
        Timeouts.of(1, link)


def test_they_reach_server_sites_controller_and_children() -> None:
    t = Timeouts.of(10**9, 10.0)
    files = {path: json.loads(text) for path, text in job_files(presets.get("fedavg"), child=True, timeouts=t).items()
             if path.endswith(".json")}  # fmt: skip
    server, client = (files[f"app/config/config_fed_{side}.json"] for side in ("server", "client"))
    for side in (server, client):
        assert side[f"tensor_{ConfigVarName.STREAMING_PER_REQUEST_TIMEOUT}"] == t.tensor_streaming_per_request_timeout
        assert side[f"tensor_{ConfigVarName.MIN_DOWNLOAD_TIMEOUT}"] == t.tensor_min_download_timeout
    assert client[ConfigVarName.GET_TASK_TIMEOUT] == t.get_task_timeout
    assert client[ConfigVarName.SUBMIT_TASK_RESULT_TIMEOUT] == t.submit_task_result_timeout
    controller, child = server["workflows"][0]["args"], client["executors"][0]["executor"]
    assert (controller["task_timeout"], controller["grace"]) == (t.task_timeout, t.grace)
    assert child["path"] == "fedvlp.flare.ChildExecutor"
    assert child["args"]["task_timeout"] == t.task_timeout


def test_the_size_is_that_of_all_tensors_that_travel() -> None:
    experiment = presets.get("fedavg")
    state = named_state(*Assembly(experiment).modules())
    assert model_bytes(experiment) == sum(t.numel() * t.element_size() for t in state.values())
