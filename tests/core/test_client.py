"""What a method's site half works on: names, loading, the anchor, and what trains."""

from __future__ import annotations

import pytest
import torch
from support.toy import Toy, clone, pairs, same_bytes
from torch import nn

from fedvlp.core.client import Client, StateMismatchError, Trainee, named_state, skeleton
from fedvlp.core.types import group
from fedvlp.objectives.convirt import ConVIRT


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("seen", torch.tensor(0))


def client(seed: int = 0, **options) -> Client:
    return Client("a", 0, Toy(seed, **options), Scaled(), pairs(0))


def test_names_have_modality_and_group() -> None:
    names = set(client(norm=True).state())
    assert {"image_encoder.0.weight", "text_alignment.bias", "objective.scale", "objective.seen"} <= names
    assert "image_encoder.1.num_batches_tracked" in names
    groups = {name: group(name) for name in ("image_encoder.0.weight", "text_alignment.bias", "text_head.bias",
                                             "objective.scale", "fusion.x.encoder")}  # fmt: skip
    assert list(groups.values()) == ["encoder", "alignment", "head", "objective", "fusion"]


def test_parameters_are_named_as_in_the_state() -> None:
    one = client(norm=True)
    state = one.state()
    for name, parameter in one.parameters():
        assert state[name].data_ptr() == parameter.data_ptr()
    buffers = {"running_mean", "running_var", "num_batches_tracked", "seen"}
    left = set(state) - {name for name, _ in one.parameters()}
    assert {name.rpartition(".")[2] for name in left} == buffers


def test_load_copies_everything() -> None:
    one, other = client(0, norm=True), client(1, norm=True)
    other.state()["objective.seen"].fill_(5)
    state = clone(other.state())
    one.load(state)
    same_bytes(clone(one.state()), state)
    one.state()["text_head.bias"].add_(1)
    assert not torch.equal(one.state()["text_head.bias"], state["text_head.bias"])  # nothing is shared


@pytest.mark.parametrize("change", ["missing", "shape", "unknown"])
def test_load_refuses_another_models_state_and_changes_nothing(change: str) -> None:
    one = client()
    state = {name: tensor + 1 for name, tensor in clone(one.state()).items()}
    if change == "missing":
        del state["text_head.bias"]
    elif change == "shape":
        state["text_head.bias"] = torch.zeros(1)  # copy_ would broadcast it
    else:
        state["text_head.extra"] = torch.zeros(1)
    before = clone(one.state())
    with pytest.raises(StateMismatchError, match=r"a: .*text_head\.(bias|extra)"):
        one.load(state)
    same_bytes(clone(one.state()), before)


def test_a_frozen_model_is_the_given_state_itself_in_eval_mode() -> None:
    one, other = client(0, norm=True, dropout=0.5), client(1, norm=True, dropout=0.5)
    state = clone(other.state())
    one.model.train()
    anchor = one.frozen(state)
    assert not any(module.training for module in anchor.modules())
    assert not any(parameter.requires_grad for parameter in anchor.parameters())
    for name, tensor in anchor.state_dict().items():
        assert tensor.data_ptr() == state[name].data_ptr(), name  # no copy of a large model
    other.model.eval()
    batch = next(one.data.batches("train", 4, drop_last=False))
    assert torch.equal(anchor(batch).image, other.model(batch).image)
    assert one.model.training
    assert all(parameter.requires_grad for parameter in one.model.parameters())


def test_the_anchor_follows_the_state_that_is_asked_for() -> None:
    one = client()
    first, second = clone(client(1).state()), clone(client(2).state())
    batch = next(one.data.batches("train", 4, drop_last=False))
    before = one.anchor(first)(batch).image
    assert one.anchor(first) is one.anchor(first)
    assert not torch.equal(one.anchor(second)(batch).image, before)
    assert torch.equal(one.anchor(first)(batch).image, before)


def test_release_lets_the_tensors_go() -> None:
    one = client()
    one.anchor(clone(one.state()))
    anchor = one._anchor
    one.release()
    assert all(tensor.is_meta for tensor in anchor.state_dict().values())
    state = clone(one.state())
    assert torch.equal(one.anchor(state).text_head.bias, state["text_head.bias"])  # usable again
    client().release()  # nothing to let go


def test_a_skeleton_holds_no_memory_and_leaves_the_model_alone() -> None:
    model = Toy(norm=True)
    before = clone(model.state_dict())
    bones = skeleton(model)
    assert all(tensor.is_meta for tensor in bones.state_dict().values())
    assert bones.state_dict().keys() == before.keys()
    same_bytes(clone(model.state_dict()), before)


def test_set_trainable() -> None:
    one = client(norm=True)
    one.model.eval()
    one.set_trainable(lambda name: group(name) == "head")
    assert {group(name) for name, _ in one.trainable()} == {"head"}
    trains = {name: child.training for name, child in one.model.named_children()}
    assert {name for name, mode in trains.items() if mode} == {"image_head", "text_head"}
    assert not one.model.image_encoder[1].training
    one.set_trainable(lambda name: True)
    assert all(module.training for child in one.model.children() for module in child.modules())


def test_a_plain_module_has_the_defaults_of_a_trainee_and_a_trainee_speaks_for_itself() -> None:
    class Frozen(Trainee, nn.Linear):
        frozen_prefixes = ("weight",)

    plain, own = nn.Linear(1, 1), Frozen(1, 1)
    Trainee.of(plain).set_attention("sdpa")
    assert (Trainee.of(plain).frozen_prefixes, Trainee.of(plain).micro_batches) == ((), None)
    assert Trainee.of(own) is own
    assert named_state(own, nn.Identity()).keys() == {"bias"}


def test_named_state_shares_the_modules_tensors() -> None:
    model, objective = Toy(), ConVIRT()
    assert named_state(model, objective).keys() == model.state_dict().keys()
    named_state(model, objective)["text_head.bias"].zero_()
    assert not model.text_head.bias.any()
