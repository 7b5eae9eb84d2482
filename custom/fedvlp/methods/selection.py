"""Model selection (Xu et al., 2022, FedSM, https://arxiv.org/abs/2203.10144): which site's model fits a study.

The part that FedSM and PMS-FM share beside SoftPull: the training of one selector for all sites.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fedvlp.core.aggregation import Aggregator
from fedvlp.core.client import EXTRA, Client, embedded_texts
from fedvlp.core.optimizers import Adam
from fedvlp.core.server_state import Server
from fedvlp.core.types import GRADIENT, Batch, Broadcast, Expected, State, Update
from fedvlp.core.validate import require
from fedvlp.methods.softpull import SoftPull

FUSION = EXTRA + "text."
STEP, FIRST, SECOND = "selector/step", "selector/exp_avg/", "selector/exp_avg_sq/"  # Adam's memory
BATCH = 64  # records at a time in the pass over all of them


@dataclass(frozen=True)
class Selection(SoftPull):
    """SoftPull and, in ``train``, one step of the selector (``Experiment.extra``); without a selector just SoftPull.

    A site knows one class alone, its own: local training would answer "always me". So each site sends the gradient
    over all its records at the received weights, and the server takes one Adam step on their n_k/n mean: one
    full-batch step on the pooled records. Differs: FLARE's FedSM has every site take the step and averages weights
    and Adam moments; Adam is not linear in the gradient, so that is another step. The frozen encoders under the
    selector are the global ones that the round starts from, so that no third pair of encoders travels.
    """

    threshold: float = 0.9  # a site's model is used where its probability is above this, else the global model
    selector_lr: float = 1e-3  # of Adam

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.threshold >= 0, f"threshold is {self.threshold}; a probability, above 1: always the global model")
        require(self.selector_lr >= 0, f"selector_lr is {self.selector_lr}; it must not be negative")

    # Server half
    def start(self, server: Server) -> None:
        super().start(server)
        server.memory[STEP] = torch.zeros(())
        for prefix in (FIRST, SECOND):
            server.memory |= {prefix + name: torch.zeros_like(t) for name, t in _selector(server.state).items()}

    def personal(self, server: Server, site: str) -> State:
        own = super().personal(server, site)
        fusion = {name: t for name, t in server.state.items() if name.startswith(FUSION)}
        return (
            fusion | own if own else own
        )  # a run that began when fusions were not personal continues from the global one

    def broadcast(self, server: Server, site: str) -> Broadcast:
        message = super().broadcast(server, site)
        return replace(message, scalars=message.scalars | {"site": float(server.sites.index(site))})

    def expects(self, server: Server, site: str) -> Expected:
        expected = super().expects(server, site)
        if server.phase != "train":
            return expected
        return replace(expected, state=expected.state | _selector(server.state, GRADIENT))

    def aggregator(self, server: Server, phase: str) -> Aggregator:
        inner = super().aggregator(server, phase)
        return SelectorStep(self, server, inner) if phase == "train" else inner

    def step(self, server: Server, gradient: State) -> None:
        """One Adam step on the selector; the moments stay in the server's memory."""
        memory = server.memory
        weights = {}
        for name in (prefixed.removeprefix(GRADIENT) for prefixed in gradient):
            weights[name] = nn.Parameter(server.state[name].clone())
        if not weights:
            return
        # torch's own Adam, made anew each round from the moments that the server remembers.
        adam = Adam(weights.values(), lr=self.selector_lr)
        for name, weight in weights.items():
            weight.grad = gradient[GRADIENT + name]
            moments = {"exp_avg": memory[FIRST + name].clone(), "exp_avg_sq": memory[SECOND + name].clone()}
            adam.state[weight] = {"step": memory[STEP].clone(), **moments}
        adam.step()
        server.replace({name: weight.detach() for name, weight in weights.items()})
        for prefix, moment in ((FIRST, "exp_avg"), (SECOND, "exp_avg_sq")):
            memory |= {prefix + name: adam.state[weight][moment] for name, weight in weights.items()}
        memory[STEP] = memory[STEP] + 1

    # Site half
    def trains(self, name: str, phase: str) -> bool:
        """A site's own model has a text fusion of its own (M^TF_k); the selector itself is the server's to train."""
        return super().trains(name, phase) or (phase == "personal" and name.startswith(FUSION))

    def losses(self, client: Client, batch: Batch, message: Broadcast) -> dict[str, Tensor]:
        selector: Any = client.extra
        if message.phase != "personal" or selector is None or not selector.config.fuses_text:
            return super().losses(client, batch, message)
        output = client.model(batch)
        return {**client.objective(output, batch), "fusion": self.fusion_loss(client, message, output.text, batch)}

    def fusion_loss(self, client: Client, message: Broadcast, report: Tensor | None, batch: Batch) -> Tensor:
        """L_emb of the site's own fusion, of its own words as the phase begins; no encoder gets a gradient of it."""
        selector: Any = client.extra
        frozen, labels = client.frozen(message.state), batch.get("labels")
        words = embedded_texts(client, selector.words, frozen)
        if selector.sentences:
            report = embedded_texts(client, selector.sentences, frozen)
            labels = selector.template_labels.to(words.device)
        if report is None:
            return words.new_zeros(())
        return selector.embedding_loss(report, words, selector.present(labels))

    def upload(self, client: Client, message: Broadcast) -> State:
        selector: Any = client.extra
        learns = selector is not None and message.phase == "train"
        return super().upload(client, message) | (self.gradient(client, selector, message) if learns else {})

    def gradient(self, client: Client, selector: Any, message: Broadcast) -> State:
        """Mean over all training records of the gradient of the selector's loss, at the received weights."""
        frozen, site = client.frozen(message.state), int(message.scalars["site"])
        words = embedded_texts(client, selector.words, frozen)  # [C, d]
        templates = embedded_texts(client, selector.sentences, frozen) if selector.sentences else None  # [T, d]
        parameters = dict(selector.requires_grad_(True).named_parameters())
        total = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
        for batch in client.data.batches("train", BATCH, drop_last=False):
            output = frozen(batch)
            if templates is None:
                loss = selector.loss(output.image, output.text, words, batch.get("labels"), site)
            else:
                loss = selector.loss_on_templates(output.image, templates, words, site)
            gradients: tuple[Tensor, ...] = torch.autograd.grad(loss, list(parameters.values()))
            for mean, gradient in zip(total.values(), gradients, strict=True):
                # A batch counts by its records, so the sum is the mean over all records of the site.
                mean.add_(gradient, alpha=len(batch["row"]) / client.data.num_train)
        return {GRADIENT + EXTRA + name: gradient for name, gradient in total.items()}


class SelectorStep:
    """Averages as FedAvg does, then takes one step of the selector on the mean of the sites' gradients."""

    def __init__(self, method: Selection, server: Server, mean: Aggregator) -> None:
        self._method = method
        self._server = server
        self._mean = mean
        self._gradient = server.mean(_selector(server.state, GRADIENT))

    def add(self, update: Update) -> None:
        self._gradient.add(update.state, self._method.weight(self._server, update))
        self._mean.add(update)

    def commit(self) -> None:
        self._mean.commit()
        self._method.step(self._server, self._gradient.result())


def _selector(state: Mapping[str, Tensor], prefix: str = "") -> State:
    """The selector's tensors, their names with a prefix."""
    return {prefix + name: tensor for name, tensor in state.items() if name.startswith(EXTRA)}
