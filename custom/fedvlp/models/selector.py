"""Model selector of PMS-FM (Wang et al., 2025, https://openreview.net/forum?id=zfLHmnU1fs): which site's model fits.

The selector predicts a study's site from its embeddings: e_i of the image, e_r of the report and e_t of the words that
name its findings, [B, d] each, from frozen encoders. Attention runs over the embeddings of one study, never over the
batch, and nothing is random. So the gradient over all records is the mean of the gradients over batches of equal size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedvlp.core.seeds import seeded
from fedvlp.core.site_error import SiteError
from fedvlp.models.dual_encoder import ModelConfig
from fedvlp.models.tiny import heads_for

EMBEDDINGS = ("image", "report", "token")
FUSIONS = ("mlp", "attention", "self")
NO_FINDING = "No Finding"


class SelectorError(SiteError, ValueError):
    """The selector does not fit the records or the sites. The message names the setting to change."""


@dataclass(frozen=True)
class SelectorConfig:
    """Configuration of ``Selector``. Raises ValueError for a value outside of what is stated here."""

    sites: int = 4  # K, at least 1; as many as the run has
    classes: tuple[str, ...] = ()  # names of the findings in the order of the data's label columns
    embeddings: tuple[str, ...] = EMBEDDINGS  # inputs: some of image (e_i), report (e_r) and token (e_t)
    fusion: str = "mlp"  # "mlp" (the paper's MLP), "attention" (its CA) or "self" (its SA)
    enhanced: bool | None = None  # whether zero-shot compares images with e_f, not e_r; None: where token is an input
    hidden: int = 512  # width of the hidden layers, at least 1
    layers: int = 2  # of either attention, at least 1; the released code has 6
    report_weight: float = 0.8  # lambda_a, weight of e_r
    token_weight: float = 0.2  # lambda_b, weight of e_a
    templates: tuple[tuple[str, ...], ...] = ()  # sentences by class: what it is trained on; none: a study's own report

    def __post_init__(self) -> None:
        for name in ("classes", "embeddings"):
            object.__setattr__(self, name, tuple(getattr(self, name)))  # JSON knows lists only
        object.__setattr__(self, "templates", tuple(tuple(sentences) for sentences in self.templates))
        if self.templates and (len(self.templates) != len(self.classes) or not all(self.templates)):
            raise ValueError(
                f"selector: templates of {len(self.templates)} classes, expected some for each of {len(self.classes)}"
            )
        unknown = [name for name in self.embeddings if name not in EMBEDDINGS]
        if unknown or not self.embeddings or len(set(self.embeddings)) < len(self.embeddings):
            raise ValueError(f"selector: embeddings {self.embeddings}, expected some of {', '.join(EMBEDDINGS)}, once")
        if self.fusion not in FUSIONS:
            raise ValueError(f"selector: fusion {self.fusion!r}, expected one of {', '.join(FUSIONS)}")
        for name in ("sites", "hidden", "layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"selector: {name} {getattr(self, name)}, expected at least 1")
        if self.fuses_text and not self.classes:
            raise ValueError("selector: no classes, but the token embedding is made of their names; give them")

    @property
    def fuses_text(self) -> bool:
        """Whether there is a text fusion: the selector sees the words of the findings, or zero-shot compares e_f."""
        return "token" in self.embeddings or bool(self.enhanced)

    def build(self, model: ModelConfig, seed: int) -> Selector:
        """A selector for the embeddings [B, d] of ``model``; the same weights for the same seed."""
        return seeded(seed, 6, lambda: Selector(self, model.embedding_dim))


class TextFusion(nn.Module):
    """e_f = lambda_a e_r + lambda_b e_a, with e_a = h(attention of a learned prompt over the words of the findings)."""

    def __init__(self, dim: int, report_weight: float, token_weight: float) -> None:
        super().__init__()
        self.report_weight, self.token_weight = report_weight, token_weight
        self.prompt = nn.Parameter(torch.randn(1, 1, dim) * dim**-0.5)
        self.attention = nn.MultiheadAttention(dim, heads_for(dim), batch_first=True)
        self.project = nn.Linear(dim, dim)

    def augment(self, words: Tensor, present: Tensor) -> Tensor:
        """e_a [B, d] from embeddings ``words`` [C, d] of all class names; ``present`` [B, C] bool marks a row's own."""
        rows = len(present)
        tokens = words.expand(rows, -1, -1)  # [B, C, d]
        query = self.prompt.expand(rows, -1, -1)
        mixed, _ = self.attention(query, tokens, tokens, key_padding_mask=~present, need_weights=False)
        return self.project(mixed[:, 0])

    def fuse(self, report: Tensor, augmented: Tensor) -> Tensor:
        """e_f [B, d] from ``report`` e_r [B, d] and ``augmented`` e_a [B, d]."""
        return self.report_weight * report + self.token_weight * augmented


class Selector(nn.Module):
    """Logits [B, K] over the K sites: which one a study resembles most.

    Differs from the released code: the MLP has a non-linearity between all its layers; the cross attention's keys are
    the embeddings of one study (there, the other studies of the batch); the true site is no input; L_emb's target is
    the report's embedding, without gradient (the paper prints the fused one, which contains e_a itself). Differs from
    the paper: its cross attention has e_i as the only key, which attention passes on whatever the query is, so here
    e_r and e_a are keys too; a learned prompt is the query over e_t, as released (the paper: self-attention of e_t).
    """

    def __init__(self, config: SelectorConfig, dim: int) -> None:
        super().__init__()
        self.config = config
        if config.fuses_text:
            self.text = TextFusion(dim, config.report_weight, config.token_weight)
        self.attention: nn.Module
        width = dim
        if config.fusion == "attention":
            layer = nn.TransformerDecoderLayer(dim, heads_for(dim, 16), config.hidden, dropout=0.0, batch_first=True)
            self.attention = nn.TransformerDecoder(layer, config.layers)
        elif config.fusion == "self":
            block = nn.TransformerEncoderLayer(dim, heads_for(dim, 16), config.hidden, dropout=0.0, batch_first=True)
            self.attention = nn.TransformerEncoder(block, config.layers, enable_nested_tensor=False)
        else:
            width = dim * (self.uses("image") + (self.uses("report") or self.uses("token")))
        self.out = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, config.hidden),
            nn.ReLU(),
            nn.Linear(config.hidden, config.hidden),
            nn.ReLU(),
            nn.Linear(config.hidden, config.sites),
        )

    @property
    def words(self) -> tuple[str, ...]:
        """The C = L + 1 class names whose embeddings are e_t; the last one stands for a study without findings."""
        return (*self.config.classes, NO_FINDING)

    def uses(self, embedding: str) -> bool:
        """Whether "image", "report" or "token" is an input of the selector."""
        return embedding in self.config.embeddings

    def present(self, labels: Tensor | None) -> Tensor | None:
        """Which of ``words`` name a study's findings: [B, L + 1] bool from labels [B, L].

        Those that are present; where none is, those that are uncertain; where none is either, "No Finding".
        None where there is no text fusion. Raises SelectorError for another number of labels.
        """
        if not self.config.fuses_text:
            return None
        seen = "no" if labels is None else labels.shape[1]  # for the message
        if labels is None or seen != len(self.config.classes):
            raise SelectorError(
                public=(
                    "selector: records have {seen} labels, the selector knows {count} classes; extra.classes must"
                    " name the data's label columns"
                ),
                seen=seen,
                count=len(self.config.classes),
            )
        named = labels == 1
        named |= (labels == -1) & ~named.any(dim=1, keepdim=True)
        return torch.cat([named, ~named.any(dim=1, keepdim=True)], dim=1)

    def fused(self, report: Tensor, words: Tensor, present: Tensor | None) -> Tensor:
        """e_f [B, d], which zero-shot compares with images; e_r itself where ``enhanced`` says so."""
        augmented = self._augmented(words, present) if self.config.enhanced is not False else None
        return report if augmented is None else self.text.fuse(report, augmented)

    def forward(self, image: Tensor | None, report: Tensor | None, words: Tensor, present: Tensor | None) -> Tensor:
        """Logits [B, K] from e_i [B, d], e_r [B, d], the embeddings [C, d] of ``words`` and ``present`` [B, C] bool.

        Raises SelectorError where an embedding that is an input is None.
        """
        return self._logits(image, report, self._augmented(words, present))

    def loss(
        self, image: Tensor | None, report: Tensor | None, words: Tensor, labels: Tensor | None, site: int
    ) -> Tensor:
        """L_CS, the cross entropy with the number of the own ``site`` (0..K-1), + L_emb = |e_r - e_a|^2 (eq. 10).

        A scalar in nats, mean over the batch. Raises SelectorError for a site outside of the range.
        """
        if not 0 <= site < self.config.sites:
            raise SelectorError(
                public="selector: this is site {number} of {sites}; set extra.sites to how many there are",
                number=site + 1,
                sites=self.config.sites,
            )
        present = self.present(labels)
        logits = self._logits(image, report, self._augmented(words, present))
        loss = F.cross_entropy(logits, torch.full((len(logits),), site, device=logits.device))
        return loss if report is None else loss + self.embedding_loss(report, words, present)

    def loss_on_templates(self, image: Tensor | None, templates: Tensor, words: Tensor, site: int) -> Tensor:
        """The same, of every image [B, d] with each of the ``templates`` [T, d], as at inference, mean over all B T.

        At inference a study has no report: beside its image the selector sees sentences of every class in turn (spec
        7.3). Trained on reports alone it was right for 93 % of studies with theirs, and for 48 % with sentences.
        """
        present = self.present(self.template_labels.to(templates.device))  # [T, C]
        rows = 1 if image is None else len(image)
        images = None if image is None else image.repeat_interleave(len(templates), dim=0)
        report, shown = templates.repeat(rows, 1), None if present is None else present.repeat(rows, 1)
        logits = self._logits(images, report, self._augmented(words, shown))
        loss = F.cross_entropy(logits, torch.full((len(logits),), site, device=logits.device))
        return loss + self.embedding_loss(templates, words, present)

    def embedding_loss(self, report: Tensor, words: Tensor, present: Tensor | None) -> Tensor:
        """L_emb = |e_r - e_a|^2 (eq. 10), mean over e_r [B, d], which gets no gradient; 0 where no word is an input."""
        augmented = self._augmented(words, present)
        if augmented is None:
            return report.new_zeros(())
        return (report.detach() - augmented).square().sum(dim=1).mean()

    @property
    def sentences(self) -> tuple[str, ...]:
        """All templates [T], class by class."""
        return tuple(sentence for sentences in self.config.templates for sentence in sentences)

    @property
    def template_labels(self) -> Tensor:
        """Labels [T, L] of studies with just the finding that each template names."""
        counts = torch.tensor([len(sentences) for sentences in self.config.templates])
        return torch.eye(len(counts)).repeat_interleave(counts, dim=0)

    def _augmented(self, words: Tensor, present: Tensor | None) -> Tensor | None:
        return None if present is None else self.text.augment(words, present)

    def _logits(self, image: Tensor | None, report: Tensor | None, augmented: Tensor | None) -> Tensor:
        seen = {"image": image, "report": report, "token": augmented}
        inputs: dict[str, Tensor] = {}  # in the order of the configuration
        for name in self.config.embeddings:
            embedding = seen[name]
            if embedding is None:
                raise SelectorError(
                    f"selector: no {name} embedding of these records; leave it out of extra.embeddings, or let the "
                    "sites without reports retrieve some (partition.retrieve)",
                    public=(
                        "selector: an embedding is missing for these records; leave it out of extra.embeddings, or "
                        "let the sites without reports retrieve some (partition.retrieve)"
                    ),
                )
            inputs[name] = embedding
        weights = {"report": self.config.report_weight, "token": self.config.token_weight}
        texts = [weights[name] * embedding for name, embedding in inputs.items() if name in weights]
        fused: list[Tensor] = []  # e_i, e_f as far as they are inputs
        if self.uses("image"):
            fused.append(inputs["image"])
        if texts:
            fused.append(torch.stack(texts).sum(dim=0))
        if self.config.fusion == "mlp":
            return self.out(torch.cat(fused, dim=1))
        keys = torch.stack(list(inputs.values()), dim=1)  # [B, up to 3, d]
        if self.config.fusion == "self":
            return self.out(self.attention(keys).mean(dim=1))
        return self.out(self.attention(fused[-1][:, None], keys)[:, 0])
