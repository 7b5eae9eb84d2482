"""Experiments as JSON and back, what is refused, and what --set may do."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from operator import attrgetter
from typing import Any

import pytest

from fedvlp.federation.loop import Rounds
from fedvlp.methods import FedAvg, FedDRA
from fedvlp.models.dual_encoder import ModelConfig
from fedvlp.objectives import OBJECTIVES, GLoRIAConfig
from fedvlp.run.config import fingerprint, from_config, nearest, override, to_config
from fedvlp.run.experiment import Experiment
from fedvlp.run.presets import PRESETS, get
from fedvlp.training.settings import Training
from studies.rivals import FedFed

DEMO = PRESETS["feddra"]


def test_every_preset_comes_back_from_json_text() -> None:
    for name in PRESETS:
        experiment = PRESETS[name]
        text = json.dumps(to_config(experiment))
        again = from_config(json.loads(text))
        assert again == experiment
        assert type(again.method) is type(experiment.method)
        assert json.dumps(to_config(again)) == text
        assert fingerprint(again) == fingerprint(experiment)


def test_the_form_is_that_of_flares_component_builder() -> None:
    assert to_config(FedAvg(local_steps=3)) == {
        "path": "fedvlp.methods.FedAvg",
        "args": {"weighting": "samples", "local_steps": 3},  # defaults included: they may change one day
    }


def test_nested_values() -> None:
    config = to_config(DEMO)
    assert config["args"]["method"]["path"] == "fedvlp.methods.FedDRA"
    assert config["args"]["rounds"]["args"]["rounds"] == DEMO.rounds.rounds
    assert from_config([1, [2.5, "x"], None]) == (1, (2.5, "x"), None)
    assert to_config((1, (2.5, FedAvg()))) == [1, [2.5, to_config(FedAvg())]]


def config(path: str, **args: Any) -> dict[str, Any]:
    return {"path": path, "args": args}


def test_only_fedvlps_own_dataclasses_are_built() -> None:
    for path in [
            "os.system", "subprocess.Popen", "builtins.eval", "torch.nn.Linear", "fedvlpx.core.method.Method", "",
            "Method", "fedvlp.training.local_training.train", "fedvlp.run.config.importlib", "fedvlp.core.method",
            "fedvlp.core.client.Data", "fedvlp.methods.METHODS", "fedvlp.core.method.torch",
            "fedvlp.methods.fedavgg.FedAvg", "fedvlp.x.X", "fedvlp.core.server_state.Server.load",
        ]:  # fmt: skip
        with pytest.raises(ValueError, match="expected a configuration class of fedvlp"):
            from_config(config(path))


def test_a_foreign_module_is_not_even_imported(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "canary.py").write_text("raise SystemExit('sprung')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match=r"'canary\.Trap'"):
        from_config(config("canary.Trap"))
    with pytest.raises(ValueError, match="''"):
        from_config({"name": "FedAvg", "args": {}})
    nested = config("fedvlp.Experiment", name="x", method=config("canary.Trap"))
    with pytest.raises(ValueError, match=r"'canary\.Trap'"):
        from_config(nested)


def test_an_unknown_key_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"fedvlp\.methods\.FedDRA has no 'rhoo'; did you mean 'rho'\?"):
        from_config(config("fedvlp.methods.FedDRA", rhoo=0.1))
    with pytest.raises(ValueError, match=r"has no 'zzz'$"):
        from_config(config("fedvlp.methods.FedDRA", zzz=0.1))


def test_a_value_out_of_range_is_refused_by_the_class_itself() -> None:
    with pytest.raises(ValueError, match="rho is -1"):
        from_config(config("fedvlp.methods.FedDRA", rho=-1))


def test_a_value_of_the_wrong_type_in_a_file_is_a_value_error() -> None:
    for args in [{"local_steps": "20"}, {"local_steps": 2.5}, {"local_steps": None}]:
        with pytest.raises(ValueError, match="local_steps"):
            from_config(config("fedvlp.methods.FedAvg", **args))


def leaves(value: Any, path: str = "") -> list[tuple[str, Any]]:
    """Every plain field of an experiment with its dotted name."""
    found = []
    for field in dataclasses.fields(value):
        inner, name = getattr(value, field.name), f"{path}{field.name}"
        found += leaves(inner, f"{name}.") if dataclasses.is_dataclass(inner) else [(name, inner)]
    return found


def test_the_fingerprint_changes_with_any_field() -> None:
    """So a site or a resumed run with any other setting is refused; what a setting may be is its class's to say."""
    for name, value in leaves(DEMO):
        changed, (*groups, last) = copy.deepcopy(DEMO), name.split(".")
        object.__setattr__(attrgetter(".".join(groups))(changed) if groups else changed, last, f"other than {value}")
        assert fingerprint(changed) != fingerprint(DEMO), name


def test_the_fingerprint_is_of_the_class_too() -> None:
    assert fingerprint(FedAvg()) != fingerprint(dataclasses.make_dataclass("FedAvg", [])())
    assert fingerprint(FedAvg()) == fingerprint(FedAvg())
    assert len(fingerprint(FedAvg())) == 16


def test_override() -> None:
    for key, text, value in [
            ("method.rho", "0.5", 0.5), ("method.rho", "1", 1.0), ("method.rho", "1e-3", 1e-3),
            ("name", "mine", "mine"), ("name", "123", "123"), ("name", "true", "true"), ("rounds.rounds", "3", 3),
            ("method.dro_apply", "loss", "loss"),
            ("model.alignment", "false", False), ("model.text_layers", "2", 2), ("training.lr", "2e-5", 2e-5),
            ("data.hard_site", "site-2", "site-2"),
        ]:  # fmt: skip
        changed = override(DEMO, key, text)
        seen = dict(leaves(changed))[key]
        assert seen == value
        assert type(seen) is type(value)
        others = [(name, old) for name, old in leaves(DEMO) if name != key]
        assert [(name, new) for name, new in leaves(changed) if name != key] == others


def test_override_refuses() -> None:
    for key, text, said in [
        ("method.rhoo", "1", r"unknown setting 'rhoo'; did you mean 'rho'\?"),
        ("metod.rho", "1", r"unknown setting 'metod'; did you mean 'method'\?"),
        ("qqq", "1", "unknown setting 'qqq'; there are: data, extra, method"),
        ("method", "fedavg", "a group of settings; set one of them, e.g. method.weighting"),
        ("objective", "gloriaa", "choose one of convirt, gloria, mgca, .* or set one of them, e.g. objective.temperat"),
        ("name.x", "1", "a plain value and has no setting 'x'"),
        ("rounds.rounds", "many", "rounds is 'many'; Rounds.rounds takes a whole number"),
        ("rounds.rounds", "2.5", r"Rounds\.rounds takes a whole number"),
        ("rounds.rounds", "true", r"Rounds\.rounds takes a whole number"),
        ("rounds.rounds", "null", r"Rounds\.rounds takes a whole number"),
        ("method.rho", "true", r"FedDRA\.rho takes a number"),
        ("method.rho", "high", r"FedDRA\.rho takes a number"),
        ("model.alignment", "1", r"ModelConfig\.alignment takes bool"),
        ("model.alignment", "yes", r"ModelConfig\.alignment takes bool"),
        ("method.rho", "-1", "rho is -1"),
        ("method.rho", "NaN", "rho is nan"),
        ("training.optimizer", "adam", "adamw or sgd"),
        ("training.batch_size", "1", "at least 2"),
    ]:
        with pytest.raises(ValueError, match=said):
            override(DEMO, key, text)


def test_an_objective_is_chosen_by_its_name() -> None:
    for name in OBJECTIVES:
        changed = override(DEMO, "objective", name)
        assert changed.objective == OBJECTIVES[name]()
        assert dataclasses.replace(changed, objective=DEMO.objective) == DEMO
        assert from_config(json.loads(json.dumps(to_config(changed)))) == changed


def test_settings_of_a_chosen_objective_follow_its_choice() -> None:
    assert override(override(DEMO, "objective", "gloria"), "objective.temp1", "2").objective == GLoRIAConfig(temp1=2.0)


def test_override_leaves_the_original_alone() -> None:
    before = fingerprint(DEMO)
    override(DEMO, "method.rho", "0.9")
    assert fingerprint(DEMO) == before
    assert DEMO.method.rho == 0.1  # type: ignore[attr-defined]


def test_infinity_survives_the_round_trip() -> None:
    method = FedDRA(rho=math.inf)
    assert from_config(json.loads(json.dumps(to_config(method)))) == method
    assert override(DEMO, "method.rho", "Infinity").method.rho == math.inf


def test_an_optional_setting_can_be_emptied() -> None:
    override(PRESETS["feddra-paper"], "model.text_layers", "null")


def test_nearest() -> None:
    assert nearest("fedarg", ["fedavg", "local"]) == "; did you mean 'fedavg'?"
    assert nearest("zzz", ["fedavg", "local"]) == ""


def test_defaults_are_an_experiment() -> None:
    experiment = Experiment("x", FedAvg())
    assert (experiment.model, experiment.training, experiment.rounds) == (ModelConfig(), Training(), Rounds())


def test_a_size_that_two_parts_share_is_given_once() -> None:
    """FedFed's pool and CreamFL's class weights have the model's sizes, in whatever order settings are overridden."""
    model = dataclasses.replace(get("fedfed").model, embedding_dim=32, image_size=40)
    fedfed = dataclasses.replace(get("fedfed"), model=model)
    assert isinstance(fedfed.method, FedFed)
    assert (fedfed.method.embedding_dim, fedfed.method.image_size) == (32, 40)
    creamfl = override(PRESETS["creamfl"], "model.embedding_dim", "32")
    assert creamfl.objective.dim == 32
    assert from_config(to_config(fedfed)) == fedfed


def test_a_value_that_follows_another_does_so_however_often_that_changes() -> None:
    """What it followed before is no value of its own."""
    once = override(get("fedfed"), "model.image_size", "40")
    again = override(override(once, "model.image_size", "48"), "model.embedding_dim", "16")
    assert (again.method.image_size, again.method.embedding_dim) == (48, 16)


def test_a_size_given_twice_must_be_the_same() -> None:
    with pytest.raises(
        ValueError, match=r"method.embedding_dim is 48, but it follows model.embedding_dim, which is 128"
    ):
        override(get("fedfed"), "method.embedding_dim", "48")
