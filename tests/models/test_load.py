"""A trained model from the folder of its run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedvlp import load_model
from fedvlp.models import DualEncoder, ModelConfig, MultimodalClassifier, MultimodalConfig

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
