"""Prompt learning and adapters beside a frozen pair: losses by hand, exact contexts, what travels and what stays."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from support.toy import ADAMW, Pairs, Recorder, World, differs, same_bytes
from torch import Tensor, nn

from fedvlp.core.client import Client, NoLossError
from fedvlp.core.method import Method
from fedvlp.core.site_error import SiteError
from fedvlp.core.types import Broadcast, State
from fedvlp.evaluation import zero_shot
from fedvlp.federation.loop import Rounds
from fedvlp.methods import AdapterConfig, CLIPAdapter, ContextConfig, FedAvg, PromptLearning
from fedvlp.methods.clip_adapter import Masked
from fedvlp.methods.prompt_learning import ClassText, ClassTextConfig, words_of
from fedvlp.models.dual_encoder import DualEncoder, ModelConfig
from fedvlp.models.text import TransformersTower, bare_model
from fedvlp.models.tiny import HashTokenizer
from fedvlp.objectives.convirt import ConVIRT
from fedvlp.run import presets
from fedvlp.run.assembly import Assembly
from fedvlp.training import dp_sgd

MODEL = ModelConfig(embedding_dim=8, image_size=16, max_tokens=16, vocabulary=512, head_hidden=16, text_layers=1)
CLASSES = ("Edema", "Pneumonia")
CONTEXT, ADAPTER = ContextConfig(CLASSES, context=3), AdapterConfig(CLASSES, private_hidden=4)
ROUNDS = Rounds(rounds=2, evaluate_every=0)


def world(method: Method, extra: Any, modalities: tuple[str, ...] = ("image", "text")) -> World:
    """Two sites of random films with labels."""
    draw = torch.Generator().manual_seed(0)
    sites = {}
    for name, count in (("a", 8), ("b", 4)):
        images = torch.randn(count, 1, 16, 16, generator=draw)
        site = Pairs(images, torch.randint(2, 64, (count, 8), generator=draw), test=(images, images))
        site.labels, site.modalities = torch.randint(0, 2, (count, 2), generator=draw).float(), modalities
        sites[name] = site

    def objective() -> nn.Module:
        made = ConVIRT()
        if extra is not None:
            made.add_module("extra", extra.build(MODEL, 0))
        return made

    return World(method, sites, ADAMW, ROUNDS, model=partial(MODEL.build, 0), objective=objective)


def of_pair(state: State) -> State:
    return {name: tensor for name, tensor in state.items() if not name.startswith("objective.")}


# The loss


class Axes(ClassText):
    """The classes are the axes of a plane."""

    def directions(self, model: Any, classes: Any) -> Tensor:
        return torch.eye(2)


def loss(labels: list[list[float]], exclusive: bool) -> float:
    """Of x = (0.6, 0.8) for every record, at temperature 0.5: logits 1.2 and 1.6."""
    objective = ConVIRT()
    objective.add_module("extra", Axes(ClassTextConfig(CLASSES, exclusive)))
    client = Client("a", 0, nn.Identity(), objective, Pairs(torch.zeros(1, 1), torch.zeros(1, 1)))
    vectors = torch.tensor([[0.6, 0.8]]).expand(len(labels), 2)
    (term,) = PromptLearning(temperature=0.5).class_losses(client, vectors, torch.tensor(labels)).values()
    return float(term)


def test_the_loss_of_exclusive_classes_by_hand() -> None:
    """log(1 + e^(1.6 - 1.2)) = 0.9130; a record with no class, or with two, does not count; none at all give 0."""
    assert loss([[1, 0]], True) == pytest.approx(0.9130, abs=1e-4)
    assert loss([[1, 0], [0, 0], [1, 1], [1, -1]], True) == pytest.approx(0.9130, abs=1e-4)
    assert loss([[0, 0]], True) == 0


def test_the_loss_of_findings_by_hand() -> None:
    """log(1 + e^-1.2) = 0.2633 where the first is there, log(1 + e^1.6) = 1.7839 where the second is not."""
    nan = float("nan")
    assert loss([[1, 0]], False) == pytest.approx((0.2633 + 1.7839) / 2, abs=1e-4)
    assert loss([[1, nan]], False) == pytest.approx((0.2633 + 1.7839) / 2, abs=1e-4), "not mentioned is not there"
    assert loss([[1, -1]], False) == pytest.approx(0.2633, abs=1e-4), "uncertain is not known"


# The context


class Ending(HashTokenizer):
    """With a token that ends each text, where CLIP's tower takes its feature."""

    def __init__(self) -> None:
        super().__init__(511, 16)
        self.vocabulary, self.pieces = 512, torch.cat([self.pieces, self.pieces[:1]])

    def __call__(self, texts: Any) -> tuple[Tensor, Tensor]:
        ids, mask = super().__call__(texts)
        rows, end = torch.arange(len(ids)), mask.sum(dim=1)
        ids[rows, end], mask[rows, end] = 511, True
        return ids, mask


def hugging_face(kind: str) -> TransformersTower:
    """A random text tower of this family, 2 layers of width 16."""
    from transformers import BertConfig, CLIPTextConfig, RobertaConfig, SiglipTextConfig

    settings: Any = {
        "bert": BertConfig, "roberta": RobertaConfig, "clip": CLIPTextConfig, "siglip": SiglipTextConfig
    }[kind](
        vocab_size=512, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=20, bos_token_id=1, eos_token_id=511, pad_token_id=0,
    )  # fmt: skip
    return TransformersTower(bare_model(settings), Ending())


@pytest.mark.parametrize("tower", ["tiny", "gru", "words", "bert", "roberta", "clip", "siglip"])
def test_a_context_of_words_embeddings_is_those_words(tower: str) -> None:
    """The vectors go through the tower where the words would: the text is the same, to rounding."""
    model = replace(MODEL, text_tower=tower if tower in ("tiny", "gru", "words") else "tiny", text_layers=None).build(0)
    if model.config.text_tower != tower:
        model.text_encoder = hugging_face(tower)
        model.text_head = nn.Linear(16, 8)
        model.text_alignment = nn.Identity()
        model.text_alignment.forward = lambda tokens, mask: tokens  # type: ignore[method-assign]
    model.eval()
    context = CONTEXT.build(replace(MODEL, text_tower="tiny"), 0)
    ids, _ = model.tokenizer(["there is large"])
    with torch.no_grad():
        context.vectors = nn.Parameter(words_of(model.text_encoder)(ids[0, 1:4]))
        written_ids, mask = model.tokenizer(["there is large edema", "there is large pleural effusion"])
        written = model({"text": written_ids, "text_mask": mask}).text
        torch.testing.assert_close(context.texts(model, ["edema", "pleural effusion"]), written, atol=1e-5, rtol=0)
    context.directions(model, CLASSES).sum().backward()
    assert context.vectors.grad is not None
    assert context.vectors.grad.abs().sum() > 0


def test_a_tower_without_vectors_of_words_is_named() -> None:
    class Characters(TransformersTower):
        def words_layer(self) -> Any:
            return None

    tower = hugging_face("bert")
    with pytest.raises(SiteError, match="the text tower bert has no vector for each word"):
        words_of(Characters(tower.model, tower.tokenizer))


def test_a_context_that_leaves_no_room_for_a_class_is_refused() -> None:
    context = replace(CONTEXT, context=15).build(MODEL, 0)
    with pytest.raises(SiteError, match="a class has 4 tokens, and beside 15 learned ones the text tower reads 1"):
        context.directions(MODEL.build(0), ("Pleural effusion", "Edema"))


# The adapter


def test_both_adapters_by_hand() -> None:
    """x = (0.6, 0.8). Residual, alpha 1/2, W_1 = (1, 0), W_2 = (0, 2)^T: (0.3, 0.4) + (0, 0.6) = (0.3, 1), / 1.0440.

    Attention whose last layer is 0 weighs both halves alike, so that x stays.
    """
    x = torch.tensor([[0.6, 0.8]])
    model = replace(MODEL, embedding_dim=2)
    residual = replace(ADAPTER, ratio=0.5, reduction=2).build(model, 0)
    with torch.no_grad():
        residual.layers[0].weight.copy_(torch.tensor([[1.0, 0.0]]))
        residual.layers[2].weight.copy_(torch.tensor([[0.0], [2.0]]))
    torch.testing.assert_close(residual.images(x), torch.tensor([[0.3, 1.0]]) / 1.0440307, atol=1e-6, rtol=0)
    attention = replace(ADAPTER, form="attention").build(model, 0)
    for parameter in attention.layers[2].parameters():
        nn.init.zeros_(parameter)
    torch.testing.assert_close(attention.images(x), x, atol=1e-6, rtol=0)
    nothing = replace(ADAPTER, ratio=0.0).build(model, 0)
    torch.testing.assert_close(nothing.images(x), x, atol=1e-6, rtol=0)


def test_weak_outputs_of_a_masked_layer_are_switched_off() -> None:
    layer = Masked(2, 2)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, 1.0], [0.004, -0.01]]))
        layer.bias.zero_()
    assert layer(torch.tensor([[1.0, 2.0]])).tolist() == [[3.0, 0.0]]


def test_the_divergence_by_hand() -> None:
    """One finding: p = sigma(1) = 0.7311 of the adapter, q = 1/2 of a classifier of zeros. KL(p||q) + KL(q||p) is
    (p - q) log(p / q) + (q - p) log((1 - p) / (1 - q)) = 0.2311 * 0.3799 + 0.2311 * 0.6201 = 0.2311; half is 0.1155."""
    extra = AdapterConfig(("Edema",), private_hidden=2).build(replace(MODEL, embedding_dim=1), 0)
    for parameter in extra.private.parameters():
        nn.init.zeros_(parameter)
    extra.images = lambda vectors: vectors
    extra.directions = lambda model, classes: torch.ones(1, 1)
    objective = ConVIRT()
    objective.add_module("extra", extra)
    client = Client("a", 0, nn.Identity(), objective, Pairs(torch.zeros(1, 1), torch.zeros(1, 1)))
    terms = CLIPAdapter(temperature=1.0, kl=1.0).class_losses(client, torch.ones(1, 1), torch.ones(1, 1))
    assert {name: round(term.item(), 4) for name, term in terms.items()} == {
        "classes": 0.3133, "classifier": 0.6931, "kl": 0.1155,
    }  # fmt: skip


# A federation


@pytest.mark.parametrize(
    ("method", "extra", "sent"),
    [
        (PromptLearning(local_steps=2), CONTEXT, {"vectors"}),
        (CLIPAdapter(local_steps=2), replace(ADAPTER, private_hidden=0), {"layers.0.weight", "layers.2.weight"}),
        (CLIPAdapter(local_steps=2, kl=1.0), ADAPTER, {"layers.0.weight", "layers.2.weight"}),
    ],
    ids=["context", "adapter", "classifier"],
)
@pytest.mark.parametrize("modalities", [("image", "text"), ("image",)], ids=["pairs", "images"])
def test_what_stands_beside_the_pair_travels_alone(
    method: Method, extra: Any, sent: set[str], modalities: tuple[str, ...]
) -> None:
    """Sites without reports learn as well, since the classes' texts are written here."""
    one = world(method, extra, modalities)
    before, spy = one.server().state, Recorder(one)
    after = one.run(spy).state
    assert len(spy.replies) == 4
    for _, reply in spy.replies:
        assert reply.state.keys() == {f"objective.extra.{name}" for name in sent}
    same_bytes(of_pair(after), of_pair(before))
    assert differs(after, before, [f"objective.extra.{name}" for name in sent])
    assert not any("private" in name for name in after)


def test_the_classifier_of_a_site_learns_and_stays() -> None:
    one = world(CLIPAdapter(local_steps=2, kl=1.0), ADAPTER)
    sites = {name: one.site(name) for name in "ab"}

    class Kept:
        def __call__(self, messages: dict[str, Broadcast]) -> Any:
            return [(name, sites[name].handle(message)) for name, message in messages.items()]

    one.run(Kept())
    own = [site.memory.newest() for site in sites.values()]
    names = [name for name in own[0] if "objective.extra.private." in name]
    assert names
    assert not any(torch.equal(own[0][name], own[1][name]) for name in names)


def test_without_divergence_a_classifier_changes_nothing() -> None:
    plain, beside = (
        world(CLIPAdapter(local_steps=2), replace(ADAPTER, private_hidden=hidden)).run().state for hidden in (0, 4)
    )
    same_bytes(plain, beside)


@pytest.mark.parametrize("kind", [PromptLearning, CLIPAdapter])
def test_without_a_module_and_unfrozen_it_is_fedavg(kind: type[PromptLearning]) -> None:
    ours = world(kind(local_steps=2, frozen=False), None).run().state
    same_bytes(ours, world(FedAvg(local_steps=2), None).run().state)


@pytest.mark.parametrize("kind", [PromptLearning, CLIPAdapter])
def test_noise_for_each_record_covers_it(kind: type[PromptLearning]) -> None:
    """It reads records in the loss alone, and so may DP-SGD be used with it."""
    experiment = presets.get("prompt-learning" if kind is PromptLearning else "clip-adapter")
    private = replace(experiment.training, dp_noise=1.0, dp_clip=1.0)
    dp_sgd.refuse_settings(experiment.method, private)
    made = kind(local_steps=1)
    training = replace(ADAMW, dp_noise=1.0, dp_clip=1.0)
    extra = CONTEXT if kind is PromptLearning else replace(ADAPTER, private_hidden=0)
    one = replace(world(made, extra), training=training)
    assert differs(one.run().state, one.server().state)


def test_zero_shot_is_by_what_was_learned() -> None:
    one = world(CLIPAdapter(), replace(ADAPTER, ratio=0.9))
    client = one.client("a")
    client.model.eval()
    with torch.no_grad():
        image = zero_shot.test_images(client, client.data, 4, None)
        vectors = client.model({"image": client.data.content["test"][0]}).image
        torch.testing.assert_close(image, client.extra.images(vectors))
        _, texts, _ = zero_shot.class_texts(client, {"Pneumonia": ("ignored",), "Edema": ("ignored",)})
        there, absent = client.extra.texts(client.model, ["edema", "no edema"])
    torch.testing.assert_close(texts["Edema"][0], there - absent)
    assert zero_shot.class_scores(image, texts).shape == (8, 2)


# What is refused


def test_a_site_without_labels_says_so() -> None:
    one = world(PromptLearning(), CONTEXT)
    client = one.client("a")
    with pytest.raises(NoLossError, match="a: PromptLearning learns from images with labels, and this site has none"):
        PromptLearning().losses(client, {"image": torch.zeros(2, 1, 16, 16)}, Broadcast(0, "train", {}))


def test_other_label_columns_than_classes_are_refused() -> None:
    experiment = presets.get("prompt-learning")
    assembly = Assembly(replace(experiment, extra=ContextConfig(CLASSES), data=replace(experiment.data, size=40)))
    with pytest.raises(ValueError, match=r"extra\.classes are Edema, Pneumonia; the data's are Edema, Pleural"):
        _ = assembly.cohort
    with pytest.raises(SiteError, match=r"the data have 3 label columns, extra\.classes names 2"):
        loss([[1, 0, 0]], False)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"extra": None}, "CLIPAdapter trains Experiment.extra beside a frozen pair, and there is none"),
        ({"method": CLIPAdapter(kl=1.0)}, "kl is 1.0 without a classifier; set extra.private_hidden"),
        ({"micro_batch": 8}, "training.micro_batch: CLIPAdapter puts vectors in the place of words"),
    ],
)
def test_settings_that_go_wrong_are_refused(change: dict[str, Any], said: str) -> None:
    experiment = presets.get("clip-adapter")
    if "micro_batch" in change:
        change = {"training": replace(experiment.training, **change)}
    with pytest.raises(ValueError, match=said):
        replace(experiment, **change)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (partial(ContextConfig), "classes: 0, expected at least 1"),
        (partial(ContextConfig, ("a",), True), "classes: 1, expected at least 2"),
        (partial(ContextConfig, ("a",), context=0), "context is 0"),
        (partial(AdapterConfig, ("a",), form="lora"), "form is 'lora'; choose residual or attention"),
        (partial(AdapterConfig, ("a",), ratio=1.5), "ratio is 1.5"),
        (partial(PromptLearning, temperature=0.0), "temperature is 0.0; it must be above 0"),
        (partial(CLIPAdapter, kl=-1.0), "kl is -1.0; it must not be negative"),
    ],
)
def test_values_out_of_range_are_refused(make: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


def test_the_pair_that_it_begins_with_is_a_saved_model(tmp_path: Any) -> None:
    """The preset's towers stay as they are: a saved model's heads are loaded with them."""
    model = MODEL.build(3)
    model.save(tmp_path)
    experiment = presets.get("prompt-learning")
    begun = replace(experiment, model=replace(MODEL, init=str(tmp_path)), data=replace(experiment.data, size=40))
    state = of_pair(Assembly(begun).initial())
    same_bytes(state, dict(DualEncoder.from_pretrained(tmp_path).state_dict()))
