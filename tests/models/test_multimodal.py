"""The multimodal classifier: late fusion by hand, absent modalities, and saving."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedvlp.core.types import Batch
from fedvlp.models.dual_encoder import describe
from fedvlp.models.multimodal import MultimodalClassifier, MultimodalConfig
from fedvlp.run.config import from_config, to_config

SMALL = MultimodalConfig(
    embedding_dim=8,
    image_size=16,
    max_tokens=8,
    vocabulary=64,
    text_layers=1,
    labels=("Edema", "Pneumonia", "Fracture"),
)


def batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(2, 64, (3, 8), generator=generator)
    return {"image": torch.randn(3, 1, 16, 16, generator=generator), "text": text}


def test_logits_are_linear_in_both_unit_features() -> None:
    model = SMALL.build().eval()
    out = model(batch())
    assert out.image is not None
    assert out.text is not None
    torch.testing.assert_close(out.image.norm(dim=1), torch.ones(3))
    weight, bias = model.classifier.weight, model.classifier.bias
    torch.testing.assert_close(out.logits, out.image @ weight[:, :8].T + out.text @ weight[:, 8:].T + bias)
    assert out.logits.shape == (3, 3)


@pytest.mark.parametrize(("present", "columns"), [("image", slice(0, 8)), ("text", slice(8, 16))])
def test_an_absent_modality_adds_nothing(present: str, columns: slice) -> None:
    model, full = SMALL.build().eval(), batch()
    out = model({present: full[present]})
    feature = getattr(out, present)
    torch.testing.assert_close(out.logits, feature @ model.classifier.weight[:, columns].T + model.classifier.bias)
    assert torch.equal(feature, getattr(model(full), present)), "the other modality does not enter the feature"


def test_heads_are_one_linear_layer_and_names_tell_the_parts() -> None:
    model = SMALL.build()
    names = set(model.state_dict())
    assert {n for n in names if "head" in n} == {
        f"{m}_head.0.{k}" for m in ("image", "text") for k in ("weight", "bias")
    }
    assert {"classifier.weight", "classifier.bias"} <= names
    counts = describe(model)
    assert counts["classifier"] == 16 * 3 + 3
    assert counts["total"] == sum(p.numel() for p in model.parameters())


def test_the_papers_image_part_has_its_parameters() -> None:
    """ResNet-50 and Linear(2048, 256): 24.03 M (spec 8.1); the classifier of 14 findings: 7,182."""
    config = MultimodalConfig("resnet50", image_size=224, labels=tuple(map(str, range(14))))
    counts = describe(config.build())
    assert round((counts["image_encoder"] + counts["image_head"]) / 1e6, 2) == 24.03
    assert counts["classifier"] == 7_182


def test_the_same_seed_gives_the_same_weights_and_another_seed_others() -> None:
    one, same, other = (SMALL.build(seed).classifier.weight for seed in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_saved_and_loaded_it_is_the_same_classifier(tmp_path: Path) -> None:
    model = SMALL.build(3).eval()
    model.save(tmp_path)
    loaded = MultimodalClassifier.from_pretrained(tmp_path)
    assert loaded.config == SMALL
    assert torch.equal(loaded(batch()).logits, model(batch()).logits)


def test_labels_survive_json_and_are_checked() -> None:
    assert from_config(to_config(SMALL)) == SMALL == replace(SMALL, labels=list(SMALL.labels))
    for wrong in ((), ("a", "a"), "Edema"):
        with pytest.raises(ValueError, match=r"MultimodalConfig\.labels"):
            MultimodalConfig(labels=wrong)
