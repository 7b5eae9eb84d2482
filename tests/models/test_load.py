"""A trained model from the folder of its run."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedvlp import load_model
from fedvlp.core.validate import BOUNDS
from fedvlp.models import DualEncoder, ModelConfig, MultimodalClassifier, MultimodalConfig, serialization
from fedvlp.models.initial import InitialWeightsError, load_initial
from fedvlp.models.other_libraries import StartError, _tensors

SIZES = {"embedding_dim": 16, "image_size": 16, "max_tokens": 8, "vocabulary": 64, "head_hidden": 16, "text_layers": 1}


@pytest.mark.parametrize(
    ("config", "kind"),
    [(ModelConfig(**SIZES), DualEncoder), (MultimodalConfig(**SIZES, labels=("a", "b")), MultimodalClassifier)],
)
@pytest.mark.parametrize("inside", ["model", "."])
def test_a_model_is_read_as_what_it_is(tmp_path: Path, config: ModelConfig, kind: type, inside: str) -> None:
    """From a run's folder and from the folder of the model itself; a classifier is no plain dual encoder."""
    saved = config.build(0)
    saved.save(tmp_path / inside)
    loaded = load_model(tmp_path)
    assert type(loaded) is kind
    assert not loaded.training
    for name, tensor in saved.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


@pytest.mark.parametrize("content", [None, "{}", "no json", '{"path": "fedvlp.Experiment", "args": {}}'])
def test_a_folder_without_a_model_says_so(tmp_path: Path, content: str | None) -> None:
    """A run that has not finished has a config.json too: the experiment's."""
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match="holds no trained model; give the folder of a run that has finished"):
        load_model(tmp_path)


def test_batches_for_the_statistics_must_reach_every_layer(tmp_path: Path) -> None:
    """Else heads would normalise by the mean 0 and the variance 1 of no records."""
    ModelConfig(**SIZES, head_norm="batch").build(0).save(tmp_path)
    films, words = torch.rand(4, 1, 16, 16), torch.randint(2, 64, (4, 8))
    for batches, lacking in (([], "image or text"), ([{"image": films}], "text"), ([{"text": words}], "image")):
        with pytest.raises(ValueError, match=f"statistics: no batch has {lacking}, and"):
            load_model(tmp_path, batches)
    assert load_model(tmp_path, [{"image": films}, {"text": words}])


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model's folder as somebody sends it: without sums, which who sends it would write anew."""
    folder = tmp_path / "foreign"
    ModelConfig(**SIZES).build(0).save(folder)
    (folder / "SHA256SUMS").unlink()

    def built(model: DualEncoder, *arguments: Any, **named: Any) -> None:
        assert torch.empty(0).device.type == "meta", "a model was built with memory of its own"
        made(model, *arguments, **named)

    made = DualEncoder.__init__
    monkeypatch.setattr(DualEncoder, "__init__", built)
    return folder


def says(folder: Path, group: str, **values: Any) -> None:
    """Alters config.json."""
    content = json.loads((folder / "config.json").read_text())
    content[group] |= values
    (folder / "config.json").write_text(json.dumps(content))


def of_tensors(file: Path, header: dict[str, Any] | bytes, content: bytes = b"") -> None:
    words = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(words)) + words + content)


@pytest.mark.parametrize(
    "name", ["embedding_dim", "image_size", "vocabulary", "text_layers", "max_tokens", "head_hidden"]
)
def test_no_model_of_others_is_built_beyond_the_bounds_of_a_job(name: str, foreign: Path) -> None:
    most = BOUNDS[name]
    for value in (most + 1, 10**9):
        says(foreign, "model", **{name: value})
        with pytest.raises(ValueError, match=rf"{name} is {value:,}; a model has at most {most:,}"):
            load_model(foreign)


@pytest.mark.parametrize("name", ["image_architecture", "text_architecture"])
def test_no_tower_of_others_is_built_beyond_what_a_tower_may_have(name: str, foreign: Path) -> None:
    for value in ({"depth": 10**7}, {"args": {"depths": [2, 10**7]}}, {"config": [{"hidden_size": 10**9}]}):
        says(foreign, name, **value)
        with pytest.raises(ValueError, match="; a model has at most 1,000,000"):
            load_model(foreign)


def test_within_the_bounds_the_shapes_of_the_weights_decide_before_anything_is_built(foreign: Path) -> None:
    """A gigabyte of words, or 128 layers of them, is described by a file of few kilobytes."""
    for settings, said in (
        ({"vocabulary": 2**18, "embedding_dim": 2**12}, "does not fit config.json: .* shape "),
        ({"text_layers": 2**7}, "it describes a model of more than .* tensors|does not fit config.json: .* missing"),
    ):
        says(foreign, "model", **{name: SIZES[name] for name in ("vocabulary", "embedding_dim", "text_layers")})
        says(foreign, "model", **settings)
        with pytest.raises(ValueError, match=said):
            load_model(foreign)


def test_a_model_of_far_more_tensors_than_its_file_is_not_even_outlined(
    foreign: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serialization, "SPARE", 0)
    of_tensors(foreign / "model.safetensors", {"t": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, bytes(4))
    with pytest.raises(ValueError, match="it describes a model of more than 2 tensors"):
        load_model(foreign)


HEADERS: dict[str, dict[str, Any] | bytes] = {
    "a million empty tensors": {f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(90_000)},
    "90 MB of blanks": b"{" + b" " * (serialization.LARGEST_HEADER - 1) + b"}",
    "a shape of 2^64 values": {"t": {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 0]}},
    "depth": b'{"__metadata__":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001,
    "overlap": {name: {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} for name in "ab"},
}


@pytest.mark.parametrize("what", HEADERS)
def test_what_a_file_says_of_its_tensors_is_bounded(
    what: str, foreign: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model, of weights to start from, and of towers of another library alike."""
    file = foreign / "model.safetensors"
    of_tensors(file, HEADERS[what])
    with pytest.raises(ValueError, match="unreadable or damaged weights"):
        load_model(foreign)
    with pytest.raises(StartError):
        _tensors(file)
    with pytest.raises(InitialWeightsError, match=r"model\.safetensors is damaged or none"):
        load_initial(torch.nn.Linear(1, 1), str(foreign))


def test_the_length_of_a_header_is_read_and_not_believed(foreign: Path) -> None:
    (foreign / "model.safetensors").write_bytes(struct.pack("<Q", 2**62))
    with pytest.raises(ValueError, match="it describes its tensors in 4,611,686,018,427,387,904 bytes"):
        load_model(foreign)


def pipe(file: Path) -> None:
    import os

    os.mkfifo(file)


@pytest.mark.parametrize("put", [pipe, lambda file: file.symlink_to("/dev/zero"), Path.mkdir])
def test_weights_that_are_no_file_are_not_waited_for(put: Callable[[Path], object], foreign: Path) -> None:
    file = foreign / "model.safetensors"
    file.unlink()
    put(file)
    with pytest.raises(ValueError, match="unreadable or damaged weights"):
        load_model(foreign)
    with pytest.raises(InitialWeightsError, match=r"model\.safetensors cannot be read there"):
        load_initial(torch.nn.Linear(1, 1), str(foreign))


def test_a_tokenizer_of_others_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serialization, "LARGEST_TOKENIZER", 9)
    (tmp_path / "weights.safetensors").write_bytes(bytes(10))
    (tmp_path / "tokenizer.json").write_bytes(bytes(9))
    serialization.refuse_large_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(bytes(10))
    with pytest.raises(ValueError, match="json of the tokenizer has more than 9 bytes"):
        serialization.refuse_large_tokenizer(tmp_path)
