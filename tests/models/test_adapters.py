"""Low-rank adapters: what is frozen, what travels, and the identities of LoRA on the shipped towers."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.towers import encoder, frozen_batch_norm
from torch import Tensor, nn
from torch.nn import functional as F

from fedvlp.core.client import Client, named_state
from fedvlp.core.seeds import seeded
from fedvlp.core.types import EVALUATE, Broadcast, group
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.federation.loop import Rounds
from fedvlp.federation.site_memory import SiteMemory
from fedvlp.methods import Centralized, FedAvg, FedDRA
from fedvlp.models.adapters import LAYERS, Adapted, Adapter, adapt, frozen, merge
from fedvlp.models.dual_encoder import ModelConfig
from fedvlp.models.initial import InitialWeightsError, load_initial, save_initial
from fedvlp.models.load import load_model
from fedvlp.models.multimodal import MultimodalConfig
from fedvlp.objectives import ConVIRTConfig
from fedvlp.run.assembly import Assembly
from fedvlp.run.config import override
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder
from fedvlp.run.presets import get
from fedvlp.run.simulate import simulate
from fedvlp.training.settings import Training
from studies.rivals import BYOLConfig

SHIPPED = ModelConfig(init="tiny-pool", head_norm="layer", adapters="lora", adapter_rank=4)
BATCH = {
    "image": torch.rand(6, 1, 64, 64, generator=torch.Generator().manual_seed(0)),
    "text": torch.randint(5, 4000, (6, 12), generator=torch.Generator().manual_seed(1)),
}


def vectors(model: Any) -> Tensor:
    output = model.eval()(BATCH)
    return torch.cat([output.image, output.text]).detach()


def trained_adapters(model: Any, scale: float = 0.1) -> Any:
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if "_adapter." in name:
            parameter.data.copy_(scale * torch.randn(parameter.shape, generator=generator))
    return model


def whole(config: ModelConfig) -> Any:
    """The same start without adapters."""
    model = replace(config, adapters="").build(0)
    load_initial(model, config.init)
    return model


@pytest.mark.parametrize("layers", LAYERS)
def test_new_adapters_change_nothing(layers: str) -> None:
    model = replace(SHIPPED, adapter_layers=layers).build(0)
    adapted = {name for name, module in model.named_modules() if isinstance(module, Adapted)}
    assert any(".qkv" in name for name in adapted)
    assert any(".expand" in name for name in adapted) == (layers != "attention")
    assert any(".words" in name for name in adapted) == (layers == "every")
    assert any(".stem" in name for name in adapted) == (layers == "every")
    assert torch.equal(vectors(model), vectors(whole(SHIPPED)))


@pytest.mark.parametrize("layers", LAYERS)
def test_merged_adapters_are_the_same_function(layers: str) -> None:
    model = trained_adapters(replace(SHIPPED, adapter_layers=layers).build(0))
    before = vectors(model)
    assert (before - vectors(whole(SHIPPED))).abs().max() > 0.01
    model.merge_adapters()
    assert not any(isinstance(module, Adapted | Adapter) for module in model.modules())
    assert model.state_dict().keys() == whole(SHIPPED).state_dict().keys()
    assert torch.allclose(vectors(model), before, atol=1e-5)


def test_full_rank_on_a_convolution_or_an_embedding_reaches_any_weight() -> None:
    """Kernels and words are the rows of a matrix of which B A of full rank is any; a group's kernels are rows too."""
    torch.manual_seed(0)
    images, words = torch.randn(2, 4, 9, 9), torch.randint(0, 7, (2, 5))
    convolution = nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2, padding_mode="reflect")
    for layer, inputs, columns in ((convolution, images, 2 * 3 * 3), (nn.Embedding(7, 3), words, 3)):
        tower: Any = nn.Sequential(layer)
        wanted = torch.randn(layer.weight.shape)
        before = layer.weight.detach().clone()
        adapter: Any = adapt(tower, rank=columns, alpha=columns, layers="every")["0"]
        adapter.down.data.copy_(torch.linalg.qr(torch.randn(columns, columns))[0])
        adapter.up.data.copy_((wanted - before).flatten(1) @ adapter.down.T)
        seen = tower(inputs)
        assert torch.equal(layer.weight, before), "the layer itself stays as it is"
        merge(tower)
        assert type(tower[0]) is type(layer)
        assert torch.allclose(tower[0].weight, wanted, atol=1e-5)
        assert torch.allclose(tower(inputs), seen, atol=1e-5)


def test_the_towers_neither_travel_nor_train() -> None:
    """Of a whole federated run every byte of both towers is the one that ships; alignment, heads, adapters moved."""
    model, objective = SHIPPED.build(0), ConVIRTConfig().build(None, 0)
    names = named_state(model, objective)
    assert not any(name.startswith(("image_encoder.", "text_encoder.")) for name in names)
    assert {group(name) for name in names if "_adapter." in name} == {"encoder"}
    client = Client("a", 0, model, objective, None)  # type: ignore[arg-type]
    client.set_trainable(lambda name: True)
    assert {name.partition(".")[0] for name, _ in client.trainable()} == {
        "image_adapter", "text_adapter", "image_alignment", "text_alignment", "image_head", "text_head",
    }  # fmt: skip


def test_with_every_layer_adapted_all_that_is_no_matrix_is_trained(tmp_path: Path) -> None:
    """Norms, biases and positions travel and move; every matrix of the towers is the one that ships."""
    experiment = small(FedAvg(local_steps=2), adapter_layers="every")
    run = RunFolder.create(tmp_path, experiment)
    simulate(experiment, run)
    saved = run.server()
    assert saved is not None
    state, start = saved[0].state, whole(SHIPPED).state_dict()
    towers = {name: tensor for name, tensor in start.items() if "_encoder." in name}
    travels = towers.keys() & state.keys()
    assert {"image_encoder.position", "image_encoder.summary", "text_encoder.position"} <= travels
    assert all(towers[name].ndim == 1 or not name.endswith("weight") for name in travels)
    assert all(towers[name].ndim > 1 for name in towers.keys() - travels)
    assert sum(not torch.equal(towers[name], state[name]) for name in travels) > 0.9 * len(travels)
    assert 0 < sum(towers[name].numel() for name in travels) < 0.05 * sum(map(torch.numel, towers.values()))
    model: Any = load_model(run.path)
    client = Assembly(experiment, run.path).client("a", None)
    client.load(state)
    assert torch.allclose(vectors(client.model), vectors(model), atol=1e-5)


def test_a_tower_that_normalises_by_the_batch_is_frozen_beside_its_adapters() -> None:
    """Trained, it would take the batch's statistics; the adapters on its convolutions are trained all the same."""
    tower = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    assert frozen(tower, 2, "every") == ("",)
    assert len(adapt(tower, rank=2, alpha=2, layers="every")) == 1
    tower = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4))
    assert frozen(tower, 2, "every") == ("0.weight",)
    assert frozen(tower, 2, "all") == frozen(tower, 0, "every") == ("",)


def test_an_anchor_has_the_frozen_towers() -> None:
    """B3 with adapters: the anchor of a state is the model with it."""
    model = trained_adapters(SHIPPED.build(0))
    client = Client("a", 0, model, ConVIRTConfig().build(None, 0), None)  # type: ignore[arg-type]
    state = {name: tensor.clone() for name, tensor in client.state().items()}
    anchor = client.anchor(state)
    assert torch.equal(vectors(anchor), vectors(model))
    trained_adapters(model, 0.3)
    assert not torch.equal(vectors(client.anchor(state)), vectors(model))
    client.load(state)
    assert torch.equal(vectors(client.anchor(state)), vectors(model))


def small(method: Any, **changes: Any) -> Experiment:
    return Experiment(
        "small", method, replace(SHIPPED, **changes), data=SyntheticCohort(sites=2, size=80, image_size=64),
        training=Training(batch_size=8, warmup_steps=0), rounds=Rounds(rounds=2, evaluate_every=0),
    )  # fmt: skip


@pytest.mark.parametrize("rank", [0, 4])
def test_a_run_ends_with_a_plain_model(tmp_path: Path, rank: int) -> None:
    """The saved model is without adapters; the towers' weights that no adapter touched are those that ship.

    At rank 0 all are: the towers are frozen.
    """
    experiment = small(FedDRA(local_steps=2, align_steps=1), adapter_rank=rank)
    run = RunFolder.create(tmp_path, experiment)
    simulate(experiment, run)
    model: Any = load_model(run.path)
    assert model.config.adapters == ""
    start, end = whole(SHIPPED).state_dict(), model.state_dict()
    moved = {name for name in start if not torch.equal(start[name], end[name])}
    of_towers = {name for name in moved if "_encoder." in name}
    assert any(name.startswith("image_head") for name in moved)
    assert any(name.startswith("text_alignment") for name in moved)
    assert bool(of_towers) == (rank > 0)
    assert all(name.endswith((".qkv.weight", ".out.weight", ".expand.weight", ".contract.weight", "project.weight"))
               for name in of_towers), sorted(of_towers)  # fmt: skip
    saved = run.server()
    assert saved is not None
    client = Assembly(experiment, run.path).client("a", None)
    client.load(experiment.method.finish(saved[0]))
    assert torch.allclose(vectors(client.model), vectors(model), atol=1e-5)


class _StoppedError(Exception):
    """A run was stopped on purpose."""


@pytest.mark.parametrize(
    "changes",
    [pytest.param({}, marks=pytest.mark.slow(seconds=3)), {"adapter_layers": "every", "adapter_private": True}],
    ids=["all", "every"],
)
def test_a_run_that_was_stopped_ends_with_the_same_bytes(changes: dict[str, object], tmp_path: Path) -> None:
    """In one process, and stopped after a phase and gone on with in two worker processes, each with its own towers."""
    experiment = small(FedDRA(local_steps=2, align_steps=1), **changes)
    one, other = (RunFolder.create(tmp_path / name, experiment) for name in ("one", "other"))
    simulate(experiment, one)

    def stop(record: object) -> None:
        raise _StoppedError

    with pytest.raises(_StoppedError):
        simulate(experiment, other, report=stop)
    simulate(experiment, other, workers=2)
    ends = [load_model(run.path).state_dict() for run in (one, other)]
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_full_rank_on_one_layer_is_full_training_of_it() -> None:
    """With A orthonormal and kept, B A goes where SGD takes W itself: to 1e-5 after 20 steps."""
    torch.manual_seed(0)
    inputs, targets = torch.randn(32, 6), torch.randn(32, 5)
    plain = nn.Sequential(nn.Linear(6, 5))
    tower = nn.Sequential(nn.Linear(6, 5))
    tower.load_state_dict(plain.state_dict())
    adapter: Any = adapt(tower, rank=6, alpha=6.0, layers="all")["0"]
    adapter.down.data.copy_(torch.linalg.qr(torch.randn(6, 6))[0])
    plain[0].bias.requires_grad_(False)
    for model, weights in ((plain, [plain[0].weight]), (tower, [adapter.up])):
        optimizer = torch.optim.SGD(weights, lr=0.1)
        for _ in range(20):
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    assert adapter.up.abs().max() > 0.05
    merge(tower)
    assert type(tower[0]) is nn.Linear
    assert torch.allclose(tower[0].weight, plain[0].weight, atol=1e-5)


def test_the_towers_must_be_those_that_the_experiment_was_made_with(tmp_path: Path) -> None:
    """Other weights below the same name are refused, whether they come from a folder or are published ones."""
    save_initial(encoder(), tmp_path, {})
    config = replace(encoder().config, init=str(tmp_path), adapters="lora").pinned()
    config.build()
    other = encoder()
    next(other.parameters()).data += 1
    save_initial(other, tmp_path, {})
    with pytest.raises(InitialWeightsError, match="restore those weights"):
        config.build()
    digest = SHIPPED.build().towers_digest()
    assert replace(SHIPPED, adapters=f"lora@{digest}").build().towers_digest() == digest
    with pytest.raises(InitialWeightsError, match="the frozen towers have the SHA-256"):
        replace(SHIPPED, adapters=f"lora@{'0' * 64}").build()


def test_what_is_refused() -> None:
    for changes, sentence in [
        ({"adapters": "ia3"}, "adapters: 'ia3', expected lora"),
        ({"adapter_rank": -1}, "adapter_rank: -1"),
        ({"adapter_alpha": 0.0}, "adapter_alpha: 0.0"),
        ({"adapter_layers": "mlp"}, "adapter_layers: 'mlp', expected one of all, attention, every"),
        ({"init": ""}, "frozen towers must have learned"),
        ({"adapter_private": True, "adapter_rank": 0}, "no adapters beside which a site could have its own"),
        ({"adapter_private": True, "adapters": ""}, "no adapters beside which a site could have its own"),
        ({"adapter_private": 1}, "adapter_private: 1, expected true or false"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            replace(SHIPPED, **changes)


def test_what_has_no_meaning_with_adapters_is_refused() -> None:
    with pytest.raises(ValueError, match="BYOL: its target network"):
        BYOLConfig().build(SHIPPED.build(0), 0)
    with pytest.raises(ValueError, match="no layers to adapt"):
        adapt(nn.Sequential(nn.Conv2d(1, 2, 3)), 4, 8.0, "all")


def test_a_classifier_has_adapters_too() -> None:
    labels = ("Edema", "Pneumonia")
    config = MultimodalConfig(init="tiny-pool", labels=labels, adapters="lora", adapter_rank=2)
    model = config.build(0)
    assert {name.partition(".")[0] for name in named_state(model, nn.Module())} >= {"classifier", "image_adapter"}


def test_a_preset_takes_adapters_by_setting() -> None:
    experiment = override(get("feddra"), "model.adapters", "lora")
    full, part = (
        sum(tensor.numel() for tensor in named_state(one.model.build(0), nn.Module()).values())
        for one in (get("feddra"), experiment)
    )
    assert part < 0.4 * full
    assert experiment.method.trains("image_adapter.blocks/0/qkv.up", "joint")
    assert not experiment.method.trains("image_adapter.blocks/0/qkv.up", "align")


PRIVATE = replace(SHIPPED, adapter_private=True)


def private(names: Any) -> set[str]:
    return {name for name in names if "_private." in name}


@pytest.mark.parametrize("layers", ["all", "every"])
def test_new_private_adapters_change_nothing_and_merge_with_the_shared_ones(layers: str) -> None:
    """Every adapted layer has two, of the same shapes; merged they are the same function."""
    model, shared = (replace(config, adapter_layers=layers).build(0) for config in (PRIVATE, SHIPPED))
    assert torch.equal(vectors(model), vectors(shared))
    names = {name for name, _ in model.named_parameters()}
    assert private(names) == {name.replace("_adapter.", "_private.") for name in names if "_adapter." in name} != set()
    assert {group(name) for name in private(names)} == {"encoder"}
    for name, parameter in trained_adapters(model).named_parameters():
        if name in private(names):
            parameter.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(len(name)))
    before = vectors(model)
    model.merge_adapters()
    assert model.state_dict().keys() == whole(SHIPPED).state_dict().keys()
    assert torch.allclose(vectors(model), before, atol=1e-5)
    assert not torch.allclose(before, vectors(trained_adapters(shared)), atol=1e-3)


@pytest.fixture(scope="module")
def privately(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Two rounds at two sites, each with private adapters, and an evaluation at the end."""
    experiment = small(FedAvg(local_steps=2), adapter_private=True)
    experiment = replace(experiment, rounds=Rounds(rounds=2, evaluate_every=2))
    run = RunFolder.create(tmp_path_factory.mktemp("runs"), experiment)
    simulate(experiment, run)
    return run


def remembered(run: RunFolder, site: str) -> dict[str, Tensor]:
    memory = SiteMemory(run.path / "sites" / site).newest()
    return {name: memory[name] for name in private(memory)}


def test_private_adapters_never_leave_their_site(privately: RunFolder) -> None:
    """Each site has its own, and they have learned; no checkpoint, snapshot or message spool of the server has any."""
    memories = {site: remembered(privately, site) for site in ("site-1", "site-2")}
    for memory in memories.values():
        assert max(float(t.abs().max()) for name, t in memory.items() if name.endswith(".up")) > 0
    one, other = memories.values()
    assert one.keys() == other.keys() != set()
    assert any(not torch.equal(one[name], other[name]) for name in one)
    saved = privately.server()
    assert saved is not None
    assert not private({*saved[0].state, *saved[0].memory})
    assert any("_adapter." in name for name in saved[0].state)
    files = [file for file in privately.path.rglob("*") if file.is_file() and "sites" not in file.parts]
    assert not [file for file in files if b"image_private." in file.read_bytes()]
    method = privately.experiment().method
    assert not Assembly(privately.experiment()).server(("a",)).state.keys() & private(one)
    assert method.shares("image_adapter.x", "train")


def test_the_model_of_a_run_has_the_shared_adapters_and_a_sites_own_can_be_added(privately: RunFolder) -> None:
    assembly = Assembly(privately.experiment(), privately.path)
    saved = privately.server()
    assert saved is not None
    client = assembly.client("site-1", None)
    own = {
        name.rpartition("/served/")[2]: t for name, t in remembered(privately, "site-1").items() if "/served/" in name
    }
    shared = assembly.initial() | saved[0].state
    for tensors, statistics in (({}, None), (own, "site-1")):
        client.load(shared | tensors)
        model: Any = load_model(privately.path, statistics)
        assert torch.allclose(vectors(client.model), vectors(model), atol=1e-5)
    assert own
    assert not torch.allclose(vectors(load_model(privately.path)), vectors(client.model), atol=1e-6)


def test_a_stopped_run_goes_on_with_its_sites_private_adapters(privately: RunFolder, tmp_path: Path) -> None:
    """Stopped after the first round, gone on with elsewhere in two workers: the same bytes, of the sites' own too."""
    experiment = privately.experiment()
    other = RunFolder.create(tmp_path, experiment)

    def stop(record: object) -> None:
        raise _StoppedError

    with pytest.raises(_StoppedError):
        simulate(experiment, other, report=stop)
    simulate(experiment, other, workers=2)
    for site in ("site-1", "site-2"):
        mine, theirs = remembered(privately, site), remembered(other, site)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    ends = [load_model(run.path).state_dict() for run in (privately, other)]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


@pytest.mark.parametrize(
    ("statistics", "changes"),
    [("site", {"adapter_rank": 0}), ("site", {}), ("averaged", {"adapter_private": True})],
    ids=["frozen", "adapted", "private"],
)
@pytest.mark.parametrize("method", [FedAvg, Centralized], ids=["fedavg", "centralized"])
def test_no_task_changes_a_frozen_tower(statistics: str, changes: dict[str, Any], method: Any, tmp_path: Path) -> None:
    """Its running statistics are what it has learned, also where those of the heads are each site's own."""
    experiment = replace(
        small(method(local_steps=1)), model=replace(frozen_batch_norm(tmp_path), **changes), norm_statistics=statistics
    )
    assembly = Assembly(experiment)
    site = assembly.site(assembly.sites()[0])
    before, state = site.client.model.towers_digest(), assembly.server(assembly.sites()).state
    for phase in ("train", EVALUATE):
        site.handle(Broadcast(0, phase, state, evaluate=1))
        assert site.client.model.towers_digest() == before, phase
    if statistics == "site":
        kept = site.memory.newest()["norm/served/image_head.1.running_mean"]
        assert float(kept.abs().max()) > 0, "the heads' are estimated"


def test_a_saved_model_says_which_statistics_were_frozen(tmp_path: Path) -> None:
    """Records of a new site then change those of the heads alone; a second save still says so."""
    experiment = replace(
        small(FedAvg(local_steps=1)), model=frozen_batch_norm(tmp_path / "init"), norm_statistics="site"
    )
    run = RunFolder.create(tmp_path / "run", experiment)
    simulate(experiment, run)
    start, one = whole(experiment.model).state_dict(), load_model(run.path, [BATCH])
    frozen = [name for name in start if name.startswith("image_encoder.") and name.endswith(("_mean", "_var"))]
    assert frozen
    assert all(torch.equal(start[name], one.state_dict()[name]) for name in frozen)
    assert not torch.equal(start["image_head.1.running_mean"], one.state_dict()["image_head.1.running_mean"])
    one.save(tmp_path / "again")
    assert load_model(tmp_path / "again").frozen_statistics == ("image_encoder",)


def test_a_model_with_adapters_is_not_saved(tmp_path: Path) -> None:
    """It would be a folder that nothing reads."""
    model = SHIPPED.build(0)
    with pytest.raises(ValueError, match="call merge_adapters first"):
        model.save(tmp_path / "model")
    assert not (tmp_path / "model").exists()
    model.merge_adapters()
    model.save(tmp_path / "model")
    assert torch.equal(vectors(load_model(tmp_path / "model")), vectors(model))


def test_adapters_have_random_streams_of_their_own() -> None:
    """No two modules of a run, and none of the next seed's, begin with the same draws."""
    streams = []
    for seed in (0, 1):
        model = replace(PRIVATE, adapter_layers="every").build(seed)
        for name in ("image_adapter", "text_adapter", "image_private", "text_private"):
            first = next(one for one in model.get_submodule(name).values())
            streams.append(first.down.detach().flatten()[:8] * first.down.shape[1] ** 0.5)  # uniform in -1..1
        for stream in range(8):
            drawn = seeded(seed, stream, lambda: nn.Linear(8, 1)).weight.detach().flatten() * 8**0.5
            streams.append(drawn)
    close = [torch.allclose(one, other, atol=1e-5) for one, other in itertools.combinations(streams, 2)]
    assert not any(close)
