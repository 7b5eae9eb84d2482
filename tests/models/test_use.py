"""Films and phrases to vectors: shapes, modes, what is refused, and the cosines of zero-shot classes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedvlp.evaluation.zero_shot import class_scores
from fedvlp.models import DualEncoder, ModelConfig, MultimodalConfig

SIZES = {"embedding_dim": 16, "image_size": 16, "max_tokens": 8, "vocabulary": 64, "head_hidden": 16, "text_layers": 1}


class Numbered:
    """In the place of data/preprocessing.py: an image is a number, and seeds its pixels; phrases are lower-cased."""

    def films(self, films: Sequence[Any]) -> Tensor:
        drawn = [torch.rand(1, 16, 16, generator=torch.Generator().manual_seed(film)) for film in films]
        return 2 * torch.stack(drawn) - 1

    def text(self, phrase: str) -> str:
        return phrase.replace("-", " ")


def ready() -> DualEncoder:
    model = ModelConfig(**SIZES).build(0).eval()
    model.prepare = Numbered()
    model.prompts = {"Edema": ("mild edema", "severe edema"), "Effusion": ("effusion",)}
    return model


def test_one_gives_a_vector_and_a_list_gives_rows() -> None:
    model = ready()
    rows = model.encode_image([1, 2, 3], batch_size=2)
    assert rows.shape == (3, 16)
    torch.testing.assert_close(model.encode_image(2), rows[1], atol=1e-6, rtol=0)
    torch.testing.assert_close(model.encode_image(model.preprocess(2)), rows[1], atol=1e-6, rtol=0)
    torch.testing.assert_close(model.encode_image(model.preprocess([1, 2, 3])), rows, atol=1e-6, rtol=0)
    assert model.preprocess(1).shape == (1, 16, 16)
    texts = model.encode_text(["no edema", "effusion"])
    assert texts.shape == (2, 16)
    torch.testing.assert_close(model.encode_text("effusion"), texts[1], atol=1e-6, rtol=0)
    for vectors in (rows, texts):
        torch.testing.assert_close(vectors.norm(dim=1), torch.ones(len(vectors)))
    assert model.encode_image([]).shape == model.encode_text([]).shape == (0, 16)


def test_vectors_are_the_models_own() -> None:
    model = ready()
    ids, mask = model.tokenizer(["no edema"])
    output = model({"image": Numbered().films([1]), "text": ids, "text_mask": mask})
    assert torch.equal(model.encode_image([1]), output.image)
    assert torch.equal(model.encode_text(["no-edema"]), output.text), "phrases are prepared as reports were"


def test_a_model_in_training_stays_there_and_its_statistics_too() -> None:
    model = ready()
    expected = model.encode_image([1, 2])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.train()
    vectors = model.encode_image([1, 2])
    assert model.training
    assert not vectors.requires_grad
    assert torch.equal(vectors, expected)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_zero_shot_is_the_score_that_the_evaluation_judges() -> None:
    model = ready()
    scores = model.zero_shot([1, 2])
    texts = {name: model.encode_text(sentences) for name, sentences in model.prompts.items()}
    expected = class_scores(model.encode_image([1, 2]), texts)
    torch.testing.assert_close(torch.tensor([list(of.values()) for of in scores]).double(), expected.double())
    assert [list(of) for of in scores] == [["Edema", "Effusion"]] * 2
    assert model.zero_shot(1) == pytest.approx(scores[0], abs=1e-6)


def test_classes_are_names_or_sentences_by_name() -> None:
    model = ready()
    own = model.zero_shot(1)
    given = model.zero_shot(1, ["edema", "a fracture"])
    assert list(given) == ["edema", "a fracture"]
    assert given["edema"] == pytest.approx(own["Edema"])
    said = model.zero_shot(1, {"broken": ["a fracture"], "effusion": "effusion"})
    assert said["broken"] == pytest.approx(given["a fracture"])
    assert said["effusion"] == pytest.approx(own["Effusion"])


@pytest.mark.parametrize("classes", [[], {}, "Edema"])
def test_zero_shot_needs_classes(classes: Any) -> None:
    with pytest.raises(ValueError, match="zero_shot: classes is a list of at least one name"):
        ready().zero_shot(1, classes)
    without = ready()
    without.prompts = {}
    with pytest.raises(ValueError, match="this model has no classes of its own"):
        without.zero_shot(1)


def test_a_classifier_compares_no_films_with_texts() -> None:
    model = MultimodalConfig(**SIZES, labels=("a",)).build(0)
    model.prepare = Numbered()
    assert model.encode_image([1]).shape == (1, 16)
    with pytest.raises(ValueError, match="MultimodalClassifier compares no images with texts"):
        model.zero_shot(1, ["a"])


@pytest.mark.parametrize("films", [torch.zeros(1, 1, 8, 8), torch.zeros(16, 16), torch.zeros(1, 16, 16).byte()])
def test_a_tensor_must_be_prepared(films: Tensor) -> None:
    with pytest.raises(ValueError, match=r"expected images that preprocess has prepared, float32 \[N, 1, 16, 16\]"):
        ready().encode_image(films)


def test_without_a_preparation_nothing_is_guessed(tmp_path: Path) -> None:
    model = ModelConfig(**SIZES).build(0)
    with pytest.raises(ValueError, match="folder does not say how images are prepared"):
        model.encode_image(tmp_path / "film.png")
    with pytest.raises(ValueError, match="expected a text or a list of texts"):
        model.encode_text([1])  # type: ignore[list-item]
    assert model.encode_text("no edema").shape == (16,)


def test_preparation_and_prompts_are_saved_with_the_model(tmp_path: Path) -> None:
    model = ready()
    model.preprocessing = {"input_size": 16, "longest_side": 18}
    model.save(tmp_path)
    again = DualEncoder.from_pretrained(tmp_path)
    assert (again.preprocessing, again.prompts) == (model.preprocessing, model.prompts)
    assert str(again.device) == "cpu"


def test_every_module_gets_its_own_mode_back() -> None:
    """A frozen tower is in evaluation mode while the rest trains, and stays so."""
    model = ready().train()
    model.image_encoder.eval()
    modes = [module.training for module in model.modules()]
    assert len(set(modes)) == 2
    model.encode_image([1, 2])
    model.encode_text("no edema")
    assert [module.training for module in model.modules()] == modes
