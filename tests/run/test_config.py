"""Experiments as JSON and back, what is refused, and what --set may do."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest

from fedvlp.federation.loop import Rounds
from fedvlp.methods import FedAvg, FedDRA, FedFed
from fedvlp.models.dual_encoder import ModelConfig
from fedvlp.objectives import OBJECTIVES, GLoRIAConfig
from fedvlp.run.config import fingerprint, from_config, nearest, override, to_config
from fedvlp.run.experiment import Experiment
from fedvlp.run.presets import PRESETS
from fedvlp.training.config import Training

DEMO = PRESETS["feddra"]


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_comes_back_from_json_text(name: str) -> None:
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


@pytest.mark.parametrize(
    "path",
    [
        "os.system", "subprocess.Popen", "builtins.eval", "torch.nn.Linear", "fedvlpx.core.method.Method", "", "Method",
        "fedvlp.training.loop.train", "fedvlp.run.config.importlib", "fedvlp.core.method",
        "fedvlp.core.client.Data", "fedvlp.methods.METHODS", "fedvlp.core.method.torch",
    ],
)  # fmt: skip
def test_only_fedvlps_own_dataclasses_are_built(path: str) -> None:
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


@pytest.mark.parametrize(
    "path", ["fedvlp.methods.fedavgg.FedAvg", "fedvlp.x.X", "fedvlp.core.server_state.Server.load"]
)
def test_a_module_that_does_not_exist_is_a_value_error(path: str) -> None:
    with pytest.raises(ValueError, match="expected a configuration class"):
        from_config(config(path))


def test_an_unknown_key_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"fedvlp\.methods\.FedDRA has no 'rhoo'; did you mean 'rho'\?"):
        from_config(config("fedvlp.methods.FedDRA", rhoo=0.1))
    with pytest.raises(ValueError, match=r"has no 'zzz'$"):
        from_config(config("fedvlp.methods.FedDRA", zzz=0.1))


def test_a_value_out_of_range_is_refused_by_the_class_itself() -> None:
    with pytest.raises(ValueError, match="rho is -1"):
        from_config(config("fedvlp.methods.FedDRA", rho=-1))


@pytest.mark.parametrize("args", [{"local_steps": "20"}, {"local_steps": 2.5}, {"local_steps": None}])
def test_a_value_of_the_wrong_type_in_a_file_is_a_value_error(args: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="local_steps"):
        from_config(config("fedvlp.methods.FedAvg", **args))


def leaves(value: Any, path: str = "") -> list[tuple[str, Any]]:
    """Every plain field of an experiment with its dotted name."""
    found = []
    for field in dataclasses.fields(value):
        inner, name = getattr(value, field.name), f"{path}{field.name}"
        found += leaves(inner, f"{name}.") if dataclasses.is_dataclass(inner) else [(name, inner)]
    return found


CHANGED = {  # a valid other value, where adding one or a half is none
    "norm_statistics": "site",
    "method.weighting": "samples", "method.divergence": "kl", "method.projection": "kl", "method.dro_apply": "loss",
    "method.dro_fraction": "0.2", "method.constraint_rows": "0.5",
    "method.constraint_reduction": "mean_dim", "model.image_tower": "x",
    "model.text_tower": "x", "model.text_layers": "3", "model.in_channels": "3", "model.head_norm": "none",
    "model.alignment": "false", "model.gradient_checkpointing": "true", "objective.reduction": "mean",
    "model.adapters": "lora", "model.adapter_layers": "attention",
    "data.hard_site": "site-1", "data.shared_habits": "false",
    "data.labels": "fourteen", "data.label_code": "mention", "partition.label_code": "positive",
    "partition.unit": "patient",
    "data.captions": '["Edema"]', "training.optimizer": "sgd",
    "training.beta1": "0.8", "training.beta2": "0.9", "training.momentum": "0.5", "data.image_size": "80",
    "model.image_size": "128", "partition.public": "0.2", "partition.retrieve": "true", "model.text_pooling": "mean",
    "training.precision": "auto", "training.attention": "auto", "training.compile": "true",
    "training.channels_last": "true", "training.accumulation": "plain", "training.gather_negatives": "true",
    "training.optimizer_state": "keep", "training.make_up_warmup": "true",
    "training.dp_delta": "1e-4",
    "training.device": "auto", "wire.down": "bfloat16", "wire.up": "bfloat16", "wire.difference": "true",
    "wire.skip_unchanged": "true", "rounds.max_share": "0.4", "rounds.averaging": "median", "rounds.trim": "0.1",
    "rounds.server_optimizer": "adam", "rounds.server_beta1": "0.8", "rounds.server_beta2": "0.9",
    "site_models": '[["site-1", {"path": "fedvlp.models.ModelConfig", "args": {"image_size": 32}}]]',
}  # fmt: skip


BOUND = ("model.pretrained", "model.adapter_private", "training.dp_noise", "training.cache_features")
"""What needs other settings beside it: tests of its own say so."""


def another(name: str, value: Any) -> str:
    if name in CHANGED:
        return CHANGED[name]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value + 1)
    return f"{value}x"


@pytest.mark.parametrize("name", [name for name, _ in leaves(DEMO) if name not in BOUND])
def test_the_fingerprint_changes_with_any_field(name: str) -> None:
    """So a site or a resumed run with any other setting is refused."""
    value = dict(leaves(DEMO))[name]
    changed = override(DEMO, name, another(name, value))
    assert dict(leaves(changed))[name] != value
    assert fingerprint(changed) != fingerprint(DEMO)


def test_the_fingerprint_is_of_the_class_too() -> None:
    assert fingerprint(FedAvg()) != fingerprint(dataclasses.make_dataclass("FedAvg", [])())
    assert fingerprint(FedAvg()) == fingerprint(FedAvg())
    assert len(fingerprint(FedAvg())) == 16


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("method.rho", "0.5", 0.5), ("method.rho", "1", 1.0), ("method.rho", "1e-3", 1e-3), ("name", "mine", "mine"),
        ("name", "123", "123"), ("name", "true", "true"), ("rounds.rounds", "3", 3),
        ("method.dro_apply", "loss", "loss"),
        ("model.alignment", "false", False), ("model.text_layers", "2", 2), ("training.lr", "2e-5", 2e-5),
        ("data.hard_site", "site-2", "site-2"),
    ],
)  # fmt: skip
def test_override(key: str, text: str, value: Any) -> None:
    changed = override(DEMO, key, text)
    seen = dict(leaves(changed))[key]
    assert seen == value
    assert type(seen) is type(value)
    others = [(name, old) for name, old in leaves(DEMO) if name != key]
    assert [(name, new) for name, new in leaves(changed) if name != key] == others


@pytest.mark.parametrize(
    ("key", "text", "said"),
    [
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
    ],
)
def test_override_refuses(key: str, text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        override(DEMO, key, text)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_is_chosen_by_its_name(name: str) -> None:
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
    model = dataclasses.replace(PRESETS["fedfed"].model, embedding_dim=32, image_size=40)
    fedfed = dataclasses.replace(PRESETS["fedfed"], model=model)
    assert isinstance(fedfed.method, FedFed)
    assert (fedfed.method.embedding_dim, fedfed.method.image_size) == (32, 40)
    creamfl = override(PRESETS["creamfl"], "model.embedding_dim", "32")
    assert creamfl.objective.dim == 32
    assert from_config(to_config(fedfed)) == fedfed


def test_a_value_that_follows_another_does_so_however_often_that_changes() -> None:
    """What it followed before is no value of its own."""
    once = override(PRESETS["fedfed"], "model.image_size", "40")
    again = override(override(once, "model.image_size", "48"), "model.embedding_dim", "16")
    assert (again.method.image_size, again.method.embedding_dim) == (48, 16)


def test_a_size_given_twice_must_be_the_same() -> None:
    with pytest.raises(
        ValueError, match=r"method.embedding_dim is 48, but it follows model.embedding_dim, which is 128"
    ):
        override(PRESETS["fedfed"], "method.embedding_dim", "48")
