"""OneRoundCCA: the closed form by hand, pooled records in place of moments, and what the tower's own space keeps."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from support.toy import ADAMW, Pairs, Toy, World, aggregate, differs, pairs, same_bytes
from torch import Tensor, nn

from fedvlp.core.aggregation import bounded
from fedvlp.core.change import BESIDE, change_norms
from fedvlp.core.privacy import clip_and_noise
from fedvlp.core.server_state import Server
from fedvlp.core.site_error import SiteError
from fedvlp.core.types import State, Update
from fedvlp.federation.loop import Rounds
from fedvlp.methods import OneRoundCCA
from fedvlp.methods.one_round_cca import (
    BIAS,
    CROSS,
    IMAGE,
    IMAGE_LABELS,
    IMAGE_MEAN,
    KNOWN,
    LABEL_MEAN,
    MOMENTS,
    TEXT,
    TEXT_MEAN,
    WEIGHT,
    Pooled,
    finding_heads,
    heads,
    moments,
    moments_of_features,
    moments_of_labels,
    ridge_heads,
)
from fedvlp.run.presets import get

ONE = Rounds(rounds=1, evaluate_every=0)


def linear(dim: int, image: int, text: int) -> State:
    """Heads of this size, untrained."""
    layers = {"image_head.0": nn.Linear(image, dim), "text_head.0": nn.Linear(text, dim)}
    return {f"{name}.{k}": t.detach() for name, layer in layers.items() for k, t in layer.state_dict().items()}


def close(name: str, seen: Tensor, expected: Tensor, limit: float) -> None:
    torch.testing.assert_close(seen, expected, atol=limit, rtol=limit, msg=lambda text: f"{name}: {text}")


def solved(method: OneRoundCCA, image: Tensor, text: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """What the heads make of image [n, W] and text [n, V], of whose moments they were made."""
    x, t, n = image - image.mean(0), text - text.mean(0), len(image)
    mean = {IMAGE_MEAN: image.mean(0), TEXT_MEAN: text.mean(0), IMAGE: x.T @ x / n, TEXT: t.T @ t / n}
    state = heads(method, mean | {CROSS: x.T @ t / n}, linear(dim, image.shape[1], text.shape[1]))
    return tuple(
        features.float() @ state[f"{name}_head.0.weight"].T + state[f"{name}_head.0.bias"]
        for name, features in (("image", image), ("text", text))
    )  # type: ignore[return-value]


def test_two_numbers_by_hand() -> None:
    """x has variances 4 and 1, t 9 and 1; x_1 and t_1 have covariance 3, correlation 3 / (2 * 3) = 1/2; x_2 none.

    With r_x = 5 a and r_t = 10 a of a ridge a: rho = 3 / sqrt((4 + 5 a) (9 + 10 a)), and only direction 1 is left. One
    canonical variable: x_1 / sqrt(4) and t_1 / sqrt(9), whose root mean square is 1.
    """
    mean = {
        IMAGE_MEAN: torch.tensor([1.0, 2.0]), TEXT_MEAN: torch.tensor([5.0, 0.0]),
        IMAGE: torch.diag(torch.tensor([4.0, 1.0])), TEXT: torch.diag(torch.tensor([9.0, 1.0])),
        CROSS: torch.tensor([[3.0, 0.0], [0.0, 0.0]]),
    }  # fmt: skip
    state = heads(OneRoundCCA(image_ridge=0.1, text_ridge=0.1), mean, linear(1, 2, 2))
    sign = math.copysign(1, float(state["image_head.0.weight"][0, 0]))
    expected = {
        "image_head.0.weight": [[0.5, 0.0]], "image_head.0.bias": [-0.5],
        "text_head.0.weight": [[1 / 3, 0.0]], "text_head.0.bias": [-5 / 3],
    }  # fmt: skip
    for name, value in expected.items():
        torch.testing.assert_close(
            sign * state[name], torch.tensor(value), atol=1e-6, rtol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_canonical_variables_correlate_as_the_theory_says() -> None:
    """With hardly a ridge variables are uncorrelated but for those of one index; three of them are common to both."""
    draw = torch.Generator().manual_seed(3)
    common, noise = torch.randn(400, 3, generator=draw), torch.randn(400, 9, generator=draw)
    image = torch.cat([common, noise[:, :3]], 1) @ torch.randn(6, 6, generator=draw)
    text = torch.cat([common + noise[:, 3:6], noise[:, 6:8]], 1) @ torch.randn(5, 5, generator=draw)
    x, t = solved(OneRoundCCA(image_ridge=1e-9, text_ridge=1e-9), image.double(), text.double(), 5)
    both = torch.corrcoef(torch.cat([x, t], 1).T)
    own, across = both[:5, :5], both[:5, 5:]
    torch.testing.assert_close(own, torch.eye(5), atol=1e-3, rtol=0)
    correlations = across.diagonal()
    torch.testing.assert_close(across, torch.diag(correlations), atol=1e-3, rtol=0)
    assert (correlations[:3] > 0.6).all()
    assert (correlations[3:] < 0.2).all()


def test_moments_of_sites_give_what_all_their_records_give() -> None:
    """Of three sites with other means: the server's heads are those of all records, each site's mean taken out."""
    sites = {name: pairs(index, 8 + 4 * index) for index, name in enumerate("abc")}
    for index, site in enumerate(sites.values()):
        image, text = site.content["train"]
        site.content["train"] = image + 10 * index, text - 10 * index
    world = World(OneRoundCCA(), sites, rounds=ONE)
    server = world.run()
    toy, seen = Toy(0).eval(), []
    for name in "abc":
        image, text = sites[name].content["train"]
        x, t = toy.image_alignment(toy.image_encoder(image)), toy.text_alignment(toy.text_encoder(text))
        seen.append((x.mean(0), t.mean(0), x - x.mean(0), t - t.mean(0)))
    counts = torch.tensor([8.0, 12.0, 16.0])
    m_x, m_t = ((counts[:, None] * torch.stack([one[i] for one in seen])).sum(0) / 36 for i in (0, 1))
    x, t = (torch.cat([one[i] for one in seen]).double() for i in (2, 3))
    mean = {IMAGE_MEAN: m_x, TEXT_MEAN: m_t, IMAGE: x.T @ x / 36, TEXT: t.T @ t / 36, CROSS: x.T @ t / 36}
    expected = heads(OneRoundCCA(), {name: t.detach() for name, t in mean.items()}, server.state)
    for name, tensor in expected.items():  # rounding of float32 moments under a ridge of 1e-3: relative 6e-8 / 1e-3
        close(name, server.state[name], tensor, 1e-3)


def test_the_order_and_number_of_sites_that_hold_the_records_do_not_count() -> None:
    """One site's records cut in two have other site means, so only of equal means the same heads come out."""
    image, text = pairs(5, 16).content["train"]
    twice = Pairs(torch.cat([image, image]), torch.cat([text, text]))
    once = {"a": Pairs(image, text), "b": Pairs(image, text)}
    one, two = (World(OneRoundCCA(), sites, rounds=ONE).run().state for sites in ({"a": twice}, once))
    for name, tensor in one.items():
        close(name, two[name], tensor, 1e-3)


def test_the_towers_own_space_is_kept_beside_the_canonical_variables() -> None:
    """Image vectors hold the tower's features beside the canonical variables, and one constant; reports have zeros."""
    draw = torch.Generator().manual_seed(1)
    image, text = torch.randn(30, 6, generator=draw).double(), torch.randn(30, 4, generator=draw).double()
    x, t = solved(OneRoundCCA(tower=2.0), image, text, 6 + 1 + 3)
    assert not t[:, 3:].any()
    own = x[:, 3:-1]
    torch.testing.assert_close(own.square().sum(1).mean().sqrt(), torch.tensor(2.0), atol=1e-5, rtol=0)
    centred = (image - image.mean(0)).float()
    torch.testing.assert_close(own, centred * (own.norm() / centred.norm()), atol=1e-5, rtol=0)
    assert torch.unique(x[:, -1]).tolist() == [6.0]


def test_later_rounds_train_from_the_closed_form() -> None:
    closed = World(OneRoundCCA(local_steps=0), training=ADAMW, rounds=ONE).run().state
    still = World(OneRoundCCA(local_steps=0), training=ADAMW, rounds=Rounds(rounds=3, evaluate_every=0)).run().state
    same_bytes(still, closed)
    trained = World(OneRoundCCA(local_steps=2), training=ADAMW, rounds=Rounds(rounds=2, evaluate_every=0)).run().state
    assert differs(trained, closed)


def test_records_that_are_all_equal_align_nothing_and_stay_finite() -> None:
    ones = Pairs(torch.ones(4, 6), torch.ones(4, 5))
    state = World(OneRoundCCA(), {"a": ones}, rounds=ONE).run().state
    assert all(torch.isfinite(tensor).all() for tensor in state.values())


def test_several_reports_of_a_record_share_its_weight() -> None:
    """Images 1 and 3, m_x = 2. Texts 0 and 4 of the first, 2 of the second: each record's mean is 2, so is m_t.

    S_xx = ((-1)^2 + 1^2) / 2 = 1; S_tt = ((4 + 4) / 2 + 0) / 2 = 2; S_xt = (-1 * 0 + 1 * 0) / 2 = 0.
    """
    image, text = torch.tensor([[1.0], [3.0]]).double(), torch.tensor([[0.0], [2.0], [4.0]]).double()
    found = moments_of_features(image, text, torch.tensor([0, 1, 0]))
    assert {name: float(tensor) for name, tensor in found.items()} == {
        IMAGE_MEAN: 2.0, TEXT_MEAN: 2.0, IMAGE: 1.0, TEXT: 2.0, CROSS: 0.0,
    }  # fmt: skip


def test_a_site_sends_the_moments_of_all_its_reports() -> None:
    """Records with two reports each, given one after the other or twice as records: the same moments."""
    one, other = pairs(3, 8).content["train"], pairs(4, 8).content["train"]
    site = Pairs(*one)
    site.several = torch.cat([one[1], other[1]]), torch.arange(8).repeat(2)
    twice = Pairs(torch.cat([one[0], one[0]]), torch.cat([one[1], other[1]]))
    seen, expected = (moments(World(OneRoundCCA(), {"a": data}).site("a").client) for data in (site, twice))
    for name, tensor in expected.items():
        close(name, seen[name], tensor, 1e-6)


def test_standardised_heads_do_not_depend_on_the_features_scale() -> None:
    """A feature in other units gives other heads and the same vectors; without, the larger feature counts more."""
    draw = torch.Generator().manual_seed(2)
    image, text = torch.randn(40, 5, generator=draw).double(), torch.randn(40, 4, generator=draw).double()
    units = torch.tensor([1.0, 10.0, 0.1, 3.0, 1.0]).double()
    plain = OneRoundCCA(image_ridge=0.1, text_ridge=0.1)
    alike = OneRoundCCA(image_ridge=0.1, text_ridge=0.1, standardised=True)
    one, other = (solved(alike, image * unit, text, 3)[0].abs() for unit in (1, units))
    torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    one, other = (solved(plain, image * unit, text, 3)[0].abs() for unit in (1, units))
    assert not torch.allclose(one, other, atol=0.1)


def test_site_means_in_gives_what_the_pooled_records_give() -> None:
    """Two sites that differ in their means: the server's heads are those of one site with all records."""
    sites = {name: pairs(index, 8 + 4 * index) for index, name in enumerate("ab")}
    image, text = sites["b"].content["train"]
    sites["b"].content["train"] = image + 2, text - 1
    joined = Pairs(*(torch.cat([sites[name].content["train"][which] for name in "ab"]) for which in (0, 1)))
    own, pooled, without = (
        World(OneRoundCCA(site_means=means), of_sites, rounds=ONE).run().state
        for means, of_sites in ((True, sites), (False, {"a": joined}), (False, sites))
    )
    for name, tensor in pooled.items():
        close(name, own[name], tensor, 1e-3)
    assert any(not torch.allclose(without[name], tensor, atol=1e-2) for name, tensor in pooled.items())


def labelled(seed: int, count: int, width: int = 6, findings: int = 3) -> tuple[Tensor, Tensor]:
    """Images [n, W] around another mean each seed, and labels [n, L] that hang on them."""
    draw = torch.Generator().manual_seed(seed)
    image = torch.randn(count, width, generator=draw).double() + seed
    noise = torch.randn(count, findings, generator=draw)
    return image, ((image - seed)[:, :findings] + noise > 0.3).double()


def sent(image: Tensor, labels: Tensor) -> State:
    return moments_of_features(image, image[:, :1]) | moments_of_labels(image, labels)


def test_finding_heads_are_scikit_learns_ridge_on_the_pooled_features() -> None:
    """Three sites' sums; alpha is n r tr(S_xx), S_xx over all records. The head is that regression, scaled."""
    from sklearn.linear_model import Ridge

    sites = [labelled(seed, 20 + 7 * seed) for seed in range(3)]
    sums = Pooled()
    for image, labels in sites:
        sums.add(sent(image, labels), len(image))
    image, labels = (torch.cat([one[which] for one in sites]) for which in (0, 1))
    ridge = 0.05
    alpha = float(ridge * image.var(dim=0, correction=0).sum() * len(image))
    expected = Ridge(alpha=alpha).fit(image.numpy(), labels.numpy())
    weight, bias = finding_heads({(True,) * 3: sums}, ridge)
    for finding in range(3):
        scale = float(weight[finding, 0] / expected.coef_[finding, 0])
        assert scale > 0
        seen = weight[finding] / scale
        torch.testing.assert_close(seen, torch.from_numpy(expected.coef_[finding]), atol=1e-6, rtol=1e-6)
    # The probability at the midpoint of two Gaussian classes is the finding's share.
    scores = image @ torch.from_numpy(expected.coef_).T
    for finding in range(3):
        truth = labels[:, finding] == 1
        midpoint = (scores[truth, finding].mean() + scores[~truth, finding].mean()) / 2
        at = (
            weight[finding]
            @ (torch.from_numpy(expected.coef_[finding]) / (expected.coef_[finding] @ expected.coef_[finding]))
            * midpoint
        )
        share = float(truth.double().mean())
        assert float((at + bias[finding]).sigmoid()) == pytest.approx(share, abs=1e-6)


def test_a_finding_is_learned_from_the_sites_that_know_it() -> None:
    """Site b does not know finding 1: its head is site a's alone; findings 0 and 2 are of both; 3 is nobody's: 0."""
    (image, labels), (other, theirs) = labelled(0, 30), labelled(1, 40)
    nobody = torch.full((30, 1), math.nan, dtype=torch.float64)
    labels, theirs = torch.cat([labels, nobody], 1), torch.cat([theirs, nobody[:1].expand(40, 1)], 1)
    theirs[:, 1] = math.nan
    first, second = sent(image, labels), sent(other, theirs)
    assert second[KNOWN].tolist() == [1, 0, 1, 0]
    a, b, both = Pooled(), Pooled(), Pooled()
    a.add(first, 30)
    b.add(second, 40)
    both.add(first, 30)
    both.add(second, 40)
    weight, bias = finding_heads({(True, True, True, False): a, (True, False, True, False): b}, 0.1)
    for finding, of in ((0, both), (1, a), (2, both)):
        own_weight, own_bias = ridge_heads(of.moments(), [finding], 0.1)
        torch.testing.assert_close(weight[finding], own_weight[0])
        torch.testing.assert_close(bias[finding], own_bias[0])
    assert not weight[3].any()


def test_labels_by_hand() -> None:
    """1, 0, uncertain and not mentioned are 1, 0, 1/2 and 0: mean 3/8; x of 0, 0, 4, 4 and mean 2.

    S_xy = (-2 * 5/8 - 2 * -3/8 + 2 * 1/8 + 2 * -3/8) / 4 = -1/4.
    """
    image = torch.tensor([[0.0], [0.0], [4.0], [4.0]]).double()
    found = moments_of_labels(image, torch.tensor([[1.0], [0.0], [-1.0], [math.nan]]).double())
    assert {name: tensor.flatten().tolist() for name, tensor in found.items()} == {
        KNOWN: [1.0], LABEL_MEAN: [0.375], IMAGE_LABELS: [-0.25],
    }  # fmt: skip


def test_the_same_round_gives_the_classifier() -> None:
    """In a run: heads in the server's memory, by the method's names, whatever else the site's labels are."""
    sites = {name: pairs(index, 12) for index, name in enumerate("ab")}
    for index, site in enumerate(sites.values()):
        site.labels = (torch.randn(12, 2, generator=torch.Generator().manual_seed(index)) > 0).float()
        site.label_names = ("Edema", "Pneumonia")
    server = World(OneRoundCCA(findings="Pneumonia, Hernia"), sites, rounds=ONE).run()
    assert server.memory[WEIGHT].shape == (2, server.state["image_alignment.weight"].shape[0])
    assert server.memory[WEIGHT][0].any()
    assert server.memory[BIAS].isfinite().all()
    assert not server.memory[WEIGHT][1].any(), "no site has a label Hernia"


def test_records_of_one_kind_give_no_direction() -> None:
    image, _ = labelled(0, 10)
    sums = Pooled()
    sums.add(sent(image, torch.ones(10, 1).double()), 10)
    weight, bias = finding_heads({(True,): sums}, 0.1)
    assert not weight.any()
    assert float(bias.sigmoid()) > 0.99


def test_a_finding_that_is_named_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="named twice"):
        OneRoundCCA(findings="Edema,Edema")


def test_a_site_without_reports_says_that_it_has_no_pairs() -> None:
    site = World(OneRoundCCA()).site("a")
    site.client.data.modalities = ("image",)  # type: ignore[misc]
    with pytest.raises(SiteError, match="a: its records lack images or reports"):
        moments(site.client)


def test_a_site_without_training_records_weighs_nothing() -> None:
    server = Server(("a", "b"), Toy(0).state_dict(), phase=MOMENTS)
    sent = moments(World(OneRoundCCA()).site("a").client)
    nothing = {name: torch.zeros_like(tensor) for name, tensor in sent.items()}
    stream = [Update("a", 0, MOMENTS, 8, sent), Update("b", 0, MOMENTS, 0, nothing)]
    aggregate(OneRoundCCA(), server, stream, MOMENTS)
    alone = Server(("a",), Toy(0).state_dict(), phase=MOMENTS)
    aggregate(OneRoundCCA(), alone, stream[:1], MOMENTS)
    same_bytes(server.state, alone.state)


def test_heads_that_are_not_linear_are_refused() -> None:
    experiment = get("one-round-cca-real")
    with pytest.raises(ValueError, match="head_hidden is 256"):
        replace(experiment, model=replace(experiment.model, head_hidden=256))


def test_a_classifier_beside_alignment_modules_is_refused() -> None:
    """Its heads would read what an alignment module makes, and whoever uses them reads the tower."""
    experiment = get("one-round-reports-real")
    with pytest.raises(ValueError, match=r"set model\.alignment to false"):
        replace(experiment, model=replace(experiment.model, alignment=True))


def test_noised_moments_are_clipped_as_one_and_still_give_heads() -> None:
    """The Gaussian mechanism of a site covers all five; noise that leaves covariances indefinite breaks nothing."""
    sent = moments(World(OneRoundCCA()).site("a").client)
    length = change_norms(sent, {})[BESIDE]
    shortened = clip_and_noise(sent, {}, clip=length / 2, noise_multiplier=1e-9)
    noised = heads(OneRoundCCA(), clip_and_noise(sent, {}, clip=length, noise_multiplier=1.0), linear(2, 4, 4))
    assert change_norms(shortened, {})[BESIDE] == pytest.approx(length / 2, rel=1e-5)
    assert all(tensor.isfinite().all() for tensor in noised.values())


def test_moments_of_a_site_that_sends_too_much_are_shortened() -> None:
    """Three sites are honest; the moments of a fourth, times a million, weigh no more than five of an honest one."""
    honest = [moments(World(OneRoundCCA()).site(name).client) for name in "abc"]
    sent = [*honest, {name: 1e6 * tensor for name, tensor in honest[0].items()}]
    stream = [Update(site, 0, MOMENTS, 8, state) for site, state in zip("abcd", sent, strict=True)]
    lengths = [change_norms(update.state, {})[BESIDE] for update in bounded(stream, lambda site: {}, times=5)]
    assert lengths[:3] == [change_norms(state, {})[BESIDE] for state in honest]
    assert lengths[3] == pytest.approx(5 * sorted(lengths[:3])[1], rel=1e-5)
