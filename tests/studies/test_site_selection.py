"""How often a selector names the site: counted by hand, in the sites' order, and trained on images that differ."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedvlp.core.client import Client
from fedvlp.core.types import Batch, VLOutput
from fedvlp.models.dual_encoder import ModelConfig
from fedvlp.models.selector import SelectorConfig
from fedvlp.objectives.convirt import ConVIRT
from studies.claims.site_selection import fit, images_of, told

D = 4
CLASSES = ("Edema", "Pneumonia")
TEMPLATES = (("mild edema",), ("severe pneumonia",))
CONFIG = SelectorConfig(sites=3, classes=CLASSES, hidden=16, templates=TEMPLATES)


class Reader(nn.Module):
    """Images are their own embeddings [B, 4]; a text's follows from its letters."""

    def tokenizer(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        made = [torch.randn(D, generator=torch.Generator().manual_seed(zlib.crc32(text.encode()))) for text in texts]
        return torch.stack(made), torch.ones(len(texts), 1).bool()

    def forward(self, batch: Batch) -> VLOutput:
        return VLOutput(batch.get("image"), F.normalize(batch["text"], dim=1) if "text" in batch else None)


class NamesSite(nn.Module):
    """Names the site that the image's first number says, whatever the text."""

    words, config = CLASSES, CONFIG

    def uses(self, embedding: str) -> bool:
        return embedding == "image"

    def forward(self, image: Tensor, report: Tensor, words: Tensor, present: Tensor | None) -> Tensor:
        return F.one_hot(image[:, 0].long(), 3).float()


def client() -> Client:
    return Client("x", 0, Reader(), ConVIRT(), None)  # type: ignore[arg-type]


def named(*sites: int) -> Tensor:
    return torch.tensor([[float(site)] + [0.0] * (D - 1) for site in sites])


def test_told_by_hand() -> None:
    """Site a: 3 of 4 named 0; b has no image and still counts as number 1; c: 1 of 2 named 2."""
    images = {"a": named(0, 0, 1, 0), "b": torch.empty(0), "c": named(2, 1)}
    selector: Any = NamesSite()
    assert told(selector, client(), images, CLASSES) == {"a": 0.75, "c": 0.5}


def around(site: int, seed: int) -> Tensor:
    """40 unit vectors around an axis of their own."""
    noise = 0.3 * torch.randn(40, D, generator=torch.Generator().manual_seed(seed))
    return F.normalize(F.one_hot(torch.tensor(site), D) + noise, dim=1)


@pytest.mark.parametrize("embeddings", [("image",), ("image", "report", "token")])
def test_a_selector_learns_from_images_and_templates_and_is_judged_on_prompts(embeddings: tuple[str, ...]) -> None:
    """Unlike images are told apart, untrained at most by chance; with steps of size 0 nothing is learned."""
    train, test = ({str(site): around(site, 10 * site + seed) for site in range(3)} for seed in (0, 1))

    def share(steps: int, lr: float) -> float:
        config = SelectorConfig(
            sites=3, classes=CLASSES, hidden=16, templates=TEMPLATES, embeddings=embeddings, fusion="mlp"
        )
        selector = config.build(ModelConfig(embedding_dim=D), 0)
        fit(selector, client(), train, steps, lr)
        return sum(told(selector, client(), test, CLASSES).values()) / 3

    assert share(60, 0.02) > 0.9
    assert share(60, 0.0) == share(0, 0.02) < 0.7


def test_a_site_weighs_as_many_images_as_it_has() -> None:
    """Sites whose images are the same, 30 and 10 times: each image is of the first with a probability of 3/4."""
    image = around(0, 0)[:1]
    selector = SelectorConfig(sites=2, classes=CLASSES, hidden=16, templates=TEMPLATES, embeddings=("image",)).build(
        ModelConfig(embedding_dim=D), 0
    )
    fit(selector, client(), {"a": image.repeat(30, 1), "b": image.repeat(10, 1)}, 200, 0.02)
    with torch.no_grad():
        odds = selector(image, None, torch.empty(0), None).softmax(dim=1)
    assert odds[0].tolist() == pytest.approx([0.75, 0.25], abs=0.01)


def test_a_selector_without_templates_is_refused() -> None:
    selector = SelectorConfig(sites=3, classes=CLASSES, hidden=16).build(ModelConfig(embedding_dim=D), 0)
    with pytest.raises(ValueError, match=r"no templates \(extra\.templates\)"):
        fit(selector, client(), {"a": around(0, 0)}, 1, 0.1)


class Records:
    """Test images of a site, numbered."""

    def __init__(self, count: int) -> None:
        self.sizes = {"test": count}

    def batches(self, split: str, size: int, *, drop_last: bool, rows: Tensor) -> list[Batch]:
        return [{"image": chosen[:, None].float()} for chosen in rows.split(size) if len(chosen)]


def test_the_first_images_of_each_site_or_all() -> None:
    data = {"a": Records(70), "b": Records(0)}
    assert images_of(client(), data, "test")["a"][:, 0].tolist() == list(range(70))
    assert images_of(client(), data, "test", most=3)["a"][:, 0].tolist() == [0, 1, 2]
    assert len(images_of(client(), data, "test")["b"]) == len(images_of(client(), data, "val")["a"]) == 0
