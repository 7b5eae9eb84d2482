"""Visual question answering on frozen or fine-tuned encoders (spec 10.6).

CreamFL's table 2 (https://arxiv.org/abs/2302.08888). The paper defines neither head nor metric. Here the head is
[image; question] -> Linear 1024 -> ReLU -> Linear answers, trained by binary cross-entropy on min(matches / 3, 1), as
is usual for VQA v2 (Teney et al., 2018, https://arxiv.org/abs/1708.02711). Two metrics: the accuracy of the answer as a
class, and VQA's official one.
Differs: features have mean 0 and variance 1 over the training split, since towers are of unlike scales. Fine-tuned
encoders are copies that train with the head, on images that are not augmented.
"""

from __future__ import annotations

import copy
import math
import re
import string
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedvlp.core.seeds import seed as seed_of
from fedvlp.core.seeds import seeded
from fedvlp.data.cohort import Cohort, Question
from fedvlp.data.loader import eval_batch
from fedvlp.data.report_text import clean_report
from fedvlp.evaluation.downstream import (
    Records,
    features,
    image_feature,
    records,
    refuse_schedule,
    train_head,
)
from fedvlp.evaluation.intervals import Figure, Interval, bootstrap, macro, mean_of
from fedvlp.evaluation.output import columns_of, write_table
from fedvlp.models.dual_encoder import masked_mean
from fedvlp.models.load import load_encoders
from fedvlp.run.evaluate import Choices, device_of, records_for, refuse_against, target_of, warn_of_initial
from fedvlp.run.folder import RunFolder

# Answers as VQA's authors compare them: normalised text, and agreement with ten people.
#
# Antol et al., 2015 (https://arxiv.org/abs/1505.00468); the steps of the normalisation are those of
# https://visualqa.org/evaluation. Differs: their program leaves answers as they are where all ten people agree to the
# letter; here every answer is normalised. Their list of contractions is longer by misspellings.

ARTICLES = frozenset(("a", "an", "the"))
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
NUMBERS = {word: str(value) for value, word in enumerate(DIGITS)} | {"none": "0"}
NEGATED = (
    "ain", "aren", "can", "couldn", "didn", "doesn", "don", "hadn", "hasn", "haven", "isn", "mightn", "mustn", "needn",
    "shouldn", "wasn", "weren", "won", "wouldn",
)  # fmt: skip
CONTRACTED = (
    "could've", "he's", "how'd", "how's", "i'm", "i've", "it'd", "it'll", "ma'am", "might've", "must've",
    "o'clock", "she's", "should've", "somebody's", "someone's", "something's", "that'd", "that'll", "that's",
    "there'd", "there's", "they'd", "they'll", "they're", "they've", "we've", "what'd", "what'll", "what're", "what's",
    "when's", "where'd", "where's", "who'd", "who'll", "who's", "who've", "why's", "would've", "y'all", "you'd",
    "you'll", "you're", "you've",
)  # fmt: skip
"""Only those that are no other word without their apostrophe, as "were", "well", "ill", "id" and "its" are."""

CONTRACTIONS = {f"{stem}t": f"{stem}'t" for stem in NEGATED} | {word.replace("'", ""): word for word in CONTRACTED}
"""Contraction without its apostrophe -> with it."""

_PERIOD = re.compile(r"\.(?!\d)")  # one that no digit follows is no decimal point
_COMMA = re.compile(r"(?<=\d),(?=\d)")
_PUNCTUATION = str.maketrans(dict.fromkeys(set(string.punctuation) - set("'.:"), " "))


@lru_cache(maxsize=2**18)  # people give the same answers to millions of questions
def normalised(answer: str) -> str:
    """The answer in lower case, without periods, articles and punctuation, numbers as digits, contractions whole.

    Apostrophes, colons and decimal points stay; a comma between digits goes without leaving a space.
    """
    text = _COMMA.sub("", _PERIOD.sub("", answer.lower())).translate(_PUNCTUATION)
    words = (NUMBERS.get(word, word) for word in text.split() if word not in ARTICLES)
    return " ".join(CONTRACTIONS.get(word, word) for word in words)


def soft_scores(matches: Tensor, people: Tensor) -> Tensor:
    """min(matches / 3, 1), what a head is trained on; of fewer than three people, the share that gave the answer."""
    return (matches.double() / people.clamp(max=3)).clamp(max=1)


def official_accuracy(matches: Tensor, people: Tensor) -> Tensor:
    """Mean over all subsets with one person less of min(matches among them / 3, 1), 0..1.

    ``matches``: how many of the ``people`` gave the answer; shapes that broadcast. With m of n, m subsets have lost one
    that matches. A single person tells the truth: 1 or 0.
    """
    m, n = matches.double(), people.double()
    fewer = soft_scores((m - 1).clamp(min=0), n - 1)
    mean = (m * fewer + (n - m) * soft_scores(m, n - 1)) / n
    return mean.where(n > 1, m)


@torch.no_grad()
def text_features(model: Any, texts: Sequence[str], aligned: bool = False, batch_size: int = 256) -> Tensor:
    """The frozen text tower's feature of each text, [N, W] float32 on the CPU, pooled as the model pools a report.

    Texts are cleaned as reports are. Sets the model to eval mode. ``aligned`` takes the feature after the alignment
    block. Neither way is it projected.
    """
    model.eval()
    chunks = (texts[start : start + batch_size] for start in range(0, len(texts), batch_size))
    return torch.cat([text_feature(model, chunk, aligned) for chunk in chunks]).float().cpu()


def text_feature(model: Any, texts: Sequence[str], aligned: bool = False) -> Tensor:
    """The text tower's feature of each of B texts, [B, W], in the model's mode."""
    ids, mask = model.tokenizer([clean_report(text, 1) for text in texts])
    encoded = model.encode({"text": ids, "text_mask": mask})
    feature: Tensor
    if aligned:
        feature = model.align(encoded).text
    elif model.config.text_pooling == "mean":
        feature = masked_mean(encoded.text, encoded.text_mask)
    else:
        feature = encoded.text[:, 0]
    return feature


MODULE = 10  # number of the head's random stream (core/seeds.py)
EVERY = "all"
"""In place of a kind: all questions."""


@dataclass(frozen=True)
class VQA:
    """The protocol. Raises ValueError for fewer than 2 answers, a width below 1, no seed, or a negative rate."""

    answers: int = 3000  # at most: those most frequent among the training questions
    hidden: int = 1024  # width of the head
    seeds: tuple[int, ...] = (42,)  # of the head; figures are means over them
    lr: float = 1e-3  # of AdamW
    weight_decay: float = 1e-4  # of AdamW
    batch_size: int = 256  # questions a step
    epochs: int = 30  # at most
    patience: int = 5  # training stops after so many epochs without a lower validation loss
    aligned: bool = False  # features after the alignment blocks
    finetune: bool = False  # the encoders train with the head: in a copy, the model stays as it is
    encoder_lr: float = 1e-5  # of AdamW, for encoders that are fine-tuned
    resamples: int = 1000  # of the test patients, for the intervals; 0: none

    def __post_init__(self) -> None:
        if self.answers < 2 or self.hidden < 1:
            raise ValueError(f"vqa: answers {self.answers}, hidden {self.hidden}; expected at least 2 and at least 1")
        if not self.seeds:
            raise ValueError("vqa: no seeds; expected at least one")
        refuse_schedule(self, self.resamples, "vqa")
        if not 0 <= self.encoder_lr < math.inf:
            raise ValueError(f"vqa: encoder_lr is {self.encoder_lr}; expected 0 or more, and finite")


@dataclass(frozen=True, eq=False)
class Targets:
    """Q questions about the images of n rows. An answer is its index in the vocabulary of A answers; A: not in it."""

    image: Tensor  # [Q] int64, position of its row among the n
    text: Tensor  # [Q] int64, position of its wording among all different ones
    answer: Tensor  # [Q, K] int64, the different answers that people gave
    matches: Tensor  # [Q, K] int64, how many gave each
    people: Tensor  # [Q] int64, how many gave an answer
    common: Tensor  # [Q] int64, the most common answer
    kinds: tuple[str, ...]  # of each question

    def __len__(self) -> int:
        return len(self.image)

    def scores(self, rows: Tensor, answers: int) -> Tensor:
        """Soft scores [b, A] of the questions at positions ``rows`` [b]."""
        score = soft_scores(self.matches[rows], self.people[rows, None]).float()
        dense = torch.zeros(len(rows), answers + 1).scatter_(1, self.answer[rows], score)
        return dense[:, :answers]

    def official(self, predicted: Tensor) -> Tensor:
        """Official accuracy [Q] in percent of the answers ``predicted`` [Q], of the vocabulary."""
        matches = torch.where(self.answer == predicted[:, None], self.matches, 0).sum(dim=1)
        return 100 * official_accuracy(matches, self.people)

    def right(self, predicted: Tensor) -> Tensor:
        """100 [Q] where ``predicted`` [Q] is the most common answer, else 0."""
        return 100.0 * (predicted == self.common).double()


@dataclass(frozen=True)
class Vocabulary:
    """The answers that a head chooses from, most frequent first, and the wordings of all questions."""

    answers: dict[str, int]  # normalised answer -> index
    texts: dict[str, int]  # wording -> index

    @classmethod
    def of(cls, train: Sequence[Sequence[Question]], others: Sequence[Sequence[Question]], most: int) -> Vocabulary:
        """``most`` answers: the commonest of each training question, counted; of equally frequent ones by spelling.

        Raises ValueError where training has fewer than 2 different ones.
        """
        counts = Counter(normalised(question.common) for of_image in train for question in of_image)
        ranked = sorted(counts, key=lambda answer: (-counts[answer], answer))[:most]
        if len(ranked) < 2:
            raise ValueError(
                f"vqa: the training questions have {len(ranked)} different answers; expected at least 2. Give data "
                "whose training images are asked about"
            )
        texts = dict.fromkeys(question.text for of_image in (*train, *others) for question in of_image)
        return cls(
            {answer: index for index, answer in enumerate(ranked)}, {text: index for index, text in enumerate(texts)}
        )

    def targets(self, questions: Sequence[Sequence[Question]]) -> Targets:
        """The questions of n rows. Raises ValueError where there is none."""
        flat = [(position, question) for position, of_image in enumerate(questions) for question in of_image]
        if not flat:
            raise ValueError("vqa: a split has images and no questions; expected at least one. Choose other data")
        outside = len(self.answers)
        told = [
            Counter(self.answers.get(normalised(answer), outside) for answer in question.answers)
            for _, question in flat
        ]
        widest = max(map(len, told))
        # an empty place is an answer outside of the vocabulary that nobody gave
        answer = torch.full((len(flat), widest), outside)
        matches = torch.zeros(len(flat), widest, dtype=torch.int64)
        for row, counts in enumerate(told):
            answer[row, : len(counts)] = torch.tensor(list(counts))
            matches[row, : len(counts)] = torch.tensor(list(counts.values()))
        return Targets(
            image=torch.tensor([position for position, _ in flat]),
            text=torch.tensor([self.texts[question.text] for _, question in flat]),
            answer=answer,
            matches=matches,
            people=torch.tensor([len(question.answers) for _, question in flat]),
            common=torch.tensor([self.answers.get(normalised(question.common), outside) for _, question in flat]),
            kinds=tuple(question.kind for _, question in flat),
        )


@dataclass(frozen=True, eq=False)
class Scale:
    """Moves and scales columns [W]."""

    mean: Tensor
    deviation: Tensor  # 1 for columns that are constant

    @classmethod
    def of(cls, table: Tensor) -> Scale:
        """That by which the rows of ``table`` [m, W] have mean 0 and variance 1."""
        deviation = table.std(dim=0, correction=0)
        return cls(table.mean(dim=0), torch.where(deviation > 1e-6, deviation, 1.0))

    def __call__(self, table: Tensor) -> Tensor:
        """``table`` [n, W], moved and scaled."""
        return (table - self.mean.to(table.device)) / self.deviation.to(table.device)


@dataclass(frozen=True, eq=False)
class QuestionSample:
    """The questions of a split with the features of their images and wordings, of the encoders as they came."""

    rows: np.ndarray  # [n], of the cohort: the images that are asked about
    images: Tensor  # [n, W] float32
    texts: Tensor  # [T, V] float32, of all wordings
    targets: Targets

    def inputs(self, rows: Tensor) -> Tensor:
        """[image; question], [b, W + V], of the questions at positions ``rows`` [b]."""
        return torch.cat([self.images[self.targets.image[rows]], self.texts[self.targets.text[rows]]], dim=1)

    def batches(self, size: int) -> Iterator[Tensor]:
        """Positions of all questions, ``size`` at a time."""
        yield from torch.arange(len(self.targets)).split(size)


class Encoders(nn.Module):
    """A copy of a DualEncoder that trains with the head. Its features are scaled as those that it had at first."""

    def __init__(
        self, model: Any, cohort: Cohort, wordings: Sequence[str], scales: tuple[Scale, Scale], aligned: bool
    ) -> None:
        super().__init__()
        self.model = copy.deepcopy(model)
        self.cohort, self.wordings, self.aligned = cohort, wordings, aligned
        self.of_images, self.of_texts = scales

    def forward(self, sample: QuestionSample, rows: Tensor) -> Tensor:
        """[image; question], [b, W + V], as ``Sample.inputs``; an image asked about twice is encoded once."""
        images, image = sample.targets.image[rows].unique(return_inverse=True)
        texts, text = sample.targets.text[rows].unique(return_inverse=True)
        pixels = torch.from_numpy(np.ascontiguousarray(self.cohort.images(sample.rows[images.numpy()])))
        shown = image_feature(self.model, eval_batch(pixels, self.model.config.image_size), self.aligned)
        asked = text_feature(self.model, [self.wordings[one] for one in texts.tolist()], self.aligned)
        return torch.cat([self.of_images(shown.float())[image], self.of_texts(asked.float())[text]], dim=1)


AT_ONCE = 2048  # questions at once where no gradient is needed and features are at hand


class Answerer(nn.Module):
    """A head W + V -> A on the features of a sample, or on those of ``encoders`` where these are fine-tuned."""

    def __init__(self, head: nn.Module, encoders: Encoders | None, batch_size: int) -> None:
        super().__init__()
        self.head, self.encoders = head, encoders
        self.at_once = AT_ONCE if encoders is None else batch_size

    def forward(self, sample: QuestionSample, rows: Tensor) -> Tensor:
        """A score [b, A] of every answer to the questions at positions ``rows`` [b]."""
        inputs = sample.inputs(rows) if self.encoders is None else self.encoders(sample, rows)
        scores: Tensor = self.head(inputs.to(next(self.head.parameters()).device))
        return scores


def fit(
    settings: VQA,
    train: QuestionSample,
    val: QuestionSample,
    answers: int,
    seed: int,
    steps: int | None = None,
    device: Any = "cpu",
    encoders: Encoders | None = None,
) -> Answerer:
    """A head for ``answers``, and ``encoders`` trained with it, as after the epoch with the least validation loss.

    ``steps``: of the optimiser at most.
    """
    width = train.images.shape[1] + train.texts.shape[1]
    layers = seeded(
        seed,
        MODULE,
        lambda: nn.Sequential(nn.Linear(width, settings.hidden), nn.ReLU(), nn.Linear(settings.hidden, answers)),
    )
    answerer = Answerer(layers.to(device), encoders, settings.batch_size)

    def summed(sample: QuestionSample, rows: Tensor) -> Tensor:
        scores = answerer(sample, rows)
        wanted = sample.targets.scores(rows, answers).to(scores.device)
        return F.binary_cross_entropy_with_logits(scores, wanted, reduction="sum")

    @torch.no_grad()
    def held_out() -> float:
        answerer.eval()
        return math.fsum(float(summed(val, rows)) for rows in val.batches(answerer.at_once))

    groups: list[dict[str, Any]] = [{"params": list(layers.parameters())}]
    if encoders is not None:
        groups.append({"params": list(encoders.parameters()), "lr": settings.encoder_lr})
    generator = torch.Generator().manual_seed(seed_of(seed, "vqa"))
    train_head(
        answerer,
        settings,
        len(train.targets),
        lambda rows: summed(train, rows) / len(rows),
        held_out,
        generator,
        steps,
        groups,
    )
    return answerer


@torch.no_grad()
def predict(answerer: Answerer, sample: QuestionSample) -> Tensor:
    """The answer [Q] that is most probable for each question."""
    answerer.eval()
    batches = sample.batches(answerer.at_once)
    return torch.cat([answerer(sample, rows).argmax(dim=1).cpu() for rows in batches])


@dataclass(frozen=True)
class AnswerResult:
    """The head's answers to the test questions of one kind; figures in percent, means over the seeds."""

    kind: str  # or ``EVERY``
    questions: int
    known: int  # whose most common answer is one that the head can give
    accuracy: Interval  # of the known: how often the answer is the most common one; nan where none is known
    official: Interval  # of all: VQA's accuracy; an answer that the head cannot give counts 0
    majority: float  # ``accuracy`` of the commonest training answer, whatever the image and the question
    majority_official: float
    by_question: float  # ``accuracy`` of the commonest training answer to the same wording, whatever the image
    by_question_official: float


@dataclass(frozen=True)
class AnswersAtSite:
    """The same heads on the test questions of one site."""

    site: str
    questions: int
    accuracy: float
    official: float


@dataclass(frozen=True, eq=False)
class Answered:
    """All that an evaluation found."""

    rows: Records
    patients: tuple[str, ...]  # of the test rows
    answers: int  # of the vocabulary
    train_questions: int
    val_questions: int
    results: list[AnswerResult]
    sites: list[AnswersAtSite]


def vqa(settings: VQA, model: Any, cohort: Cohort, steps: int | None = None) -> Answered:
    """Trains heads on the towers of ``model``, a DualEncoder, or on a copy of them, and judges the test questions.

    No tensor of the model changes: a copy of the towers does, for each seed, where they are fine-tuned. Raises
    ValueError for data without questions, or a split without them.
    """
    if cohort.questions is None:
        raise ValueError(
            "vqa: the data have no questions; expected those of the synthetic cohort (a single one, not joined) or of "
            "vqa_v2. Give --data vqa_v2:FOLDER or --data synthetic"
        )
    about = cohort.questions(np.arange(len(cohort)))
    rows = records(cohort, np.array([bool(of_image) for of_image in about], dtype=bool))
    train_of, val_of, test_of = ([about[row] for row in chosen] for chosen in (rows.train, rows.val, rows.test))
    vocabulary = Vocabulary.of(train_of, (*val_of, *test_of), settings.answers)
    (train, val, test), scales = _samples(settings, model, cohort, rows, vocabulary, (train_of, val_of, test_of))
    device, count = next(model.parameters()).device, len(vocabulary.answers)

    def predicted(seed: int) -> Tensor:
        tuned = Encoders(model, cohort, list(vocabulary.texts), scales, settings.aligned) if settings.finetune else None
        return predict(fit(settings, train, val, count, seed, steps, device, tuned), test)

    by_seed = [predicted(seed) for seed in settings.seeds]
    patients = tuple(cohort.patients[row] for row in rows.test)
    by_question = commonest(train.targets, len(vocabulary.texts), count)[test.targets.text]
    judge = _Judge(test.targets, count, by_seed, by_question, patients, settings.resamples)
    kinds = sorted(set(test.targets.kinds))
    results = [judge.result(EVERY, torch.ones(len(test.targets), dtype=torch.bool))]
    results += [judge.result(kind, _where(test.targets.kinds, kind)) for kind in kinds if len(kinds) > 1]
    sites: list[AnswersAtSite] = []
    if cohort.sites is not None:
        of_rows = [cohort.sites[row] for row in rows.test]
        asked_at = [of_rows[position] for position in test.targets.image.tolist()]
        sites = [judge.at_site(site, _where(asked_at, site)) for site in sorted(set(asked_at))]
    return Answered(rows, patients, count, len(train.targets), len(val.targets), results, sites)


def _where(names: Sequence[str], name: str) -> Tensor:
    """[Q] bool: which of the ``names`` [Q] is ``name``."""
    return torch.tensor([one == name for one in names])


def _samples(
    settings: VQA,
    model: Any,
    cohort: Cohort,
    rows: Records,
    vocabulary: Vocabulary,
    questions: tuple[Sequence[Sequence[Question]], ...],
) -> tuple[list[QuestionSample], tuple[Scale, Scale]]:
    """The samples of the training, validation and test split, and the scales of their images and of their texts."""
    chosen = (rows.train, rows.val, rows.test)
    images = [features(model, cohort, of_split, settings.aligned) for of_split in chosen]
    texts = text_features(model, list(vocabulary.texts), settings.aligned)
    targets = [vocabulary.targets(of_split) for of_split in questions]
    scales = Scale.of(images[0]), Scale.of(texts[targets[0].text.unique()])
    samples = [
        QuestionSample(of_split, scales[0](of_images), scales[1](texts), asked)
        for of_split, of_images, asked in zip(chosen, images, targets, strict=True)
    ]
    return samples, scales


def commonest(train: Targets, texts: int, answers: int) -> Tensor:
    """The commonest training answer to each of the ``texts`` wordings, [T]; of equally common ones the first.

    0, the commonest of all, where a wording has none.
    """
    pairs = zip(train.text.tolist(), train.common.tolist(), strict=True)
    counts = Counter((text, common) for text, common in pairs if common < answers)
    best = torch.zeros(texts, dtype=torch.int64)
    for text, answer in sorted(counts, key=lambda pair: (counts[pair], -pair[1])):
        best[text] = answer  # a commoner answer comes later
    return best


@dataclass(frozen=True, eq=False)
class _Judge:
    """Figures of predictions on the test questions. A resample of the patients is the same for all of them."""

    test: Targets
    answers: int  # of the vocabulary
    by_seed: list[Tensor]  # predicted answers [Q] of each head
    by_question: Tensor  # [Q], the commonest training answer to the same wording
    patients: Sequence[str]  # of each row
    resamples: int

    def _known(self, chosen: Tensor) -> Tensor:
        """Those of ``chosen`` [Q] bool whose most common answer is in the vocabulary."""
        return chosen & (self.test.common < self.answers)

    def _mean(self, values: Tensor, over: Tensor) -> Figure:
        """The mean of ``values`` [Q] over the questions ``over`` [Q] bool, for resamples of the rows."""
        rows = len(self.patients)
        asked, total = (
            torch.zeros(rows, dtype=torch.float64).index_add(0, self.test.image, one * over)
            for one in (torch.ones_like(values), values)
        )
        return mean_of(total / asked.clamp(min=1), asked)

    def _figures(self, predicted: Tensor, chosen: Tensor) -> tuple[Figure, Figure]:
        """Accuracy over the known of ``chosen`` [Q], and official accuracy over all of them."""
        accuracy = self._mean(self.test.right(predicted), self._known(chosen))
        return accuracy, self._mean(self.test.official(predicted), chosen)

    def _values(self, predicted: Tensor, chosen: Tensor) -> list[float]:
        """The same as measured."""
        whole = torch.ones(1, len(self.patients), dtype=torch.float64)
        return [float(figure(whole)) for figure in self._figures(predicted, chosen)]

    def result(self, kind: str, chosen: Tensor) -> AnswerResult:
        """The figures over the questions ``chosen`` [Q] bool."""
        accuracies, officials = zip(*(self._figures(one, chosen) for one in self.by_seed), strict=True)
        majority = torch.zeros_like(self.test.common)  # answer 0 is the most frequent one
        return AnswerResult(
            kind,
            int(chosen.sum()),
            int(self._known(chosen).sum()),
            bootstrap(macro(accuracies), self.patients, self.resamples),
            bootstrap(macro(officials), self.patients, self.resamples),
            *self._values(majority, chosen),
            *self._values(self.by_question, chosen),
        )

    def at_site(self, site: str, chosen: Tensor) -> AnswersAtSite:
        """The figures over the questions ``chosen`` [Q] bool of a site, means over the seeds."""
        accuracies, officials = zip(*(self._values(one, chosen) for one in self.by_seed), strict=True)
        return AnswersAtSite(site, int(chosen.sum()), fmean(accuracies), fmean(officials))


def write_vqa(answered: Answered, path: Path) -> list[Path]:
    """Writes ``<path>.csv`` and, where there are sites, ``<path>-sites.csv``."""
    rows = answered.rows
    lines = [
        {
            "kind": one.kind,
            "questions": one.questions,
            "accuracy_questions": one.known,
            **columns_of(one.accuracy, "accuracy", "accuracy_"),
            **columns_of(one.official, "official_accuracy", "official_"),
            "majority_accuracy": one.majority,
            "majority_official": one.majority_official,
            "majority_by_question_accuracy": one.by_question,
            "majority_by_question_official": one.by_question_official,
            "answers": answered.answers,
            "train_questions": answered.train_questions,
            "val_questions": answered.val_questions,
            "test_images": len(rows.test),
            "test_patients": len(set(answered.patients)),
            "left_out_as_test_pixels": rows.left_out,
        }
        for one in answered.results
    ]
    by_site = [
        {
            "site": one.site,
            "questions": one.questions,
            "accuracy": one.accuracy,
            "official_accuracy": one.official,
        }
        for one in answered.sites
    ]
    files = [write_table(path, lines)]
    if by_site:
        files.append(write_table(path.with_name(f"{path.name}-sites"), by_site))
    return files


@dataclass(frozen=True)
class Asked(Choices):
    """Options of the evaluation ``vqa``."""

    reads: ClassVar[frozenset[str] | None] = frozenset({"steps", "data", "out"})

    vqa: VQA = field(default_factory=VQA)


def answer(folder: RunFolder, choices: Asked) -> list[Path]:
    """Answers of heads on both frozen towers to questions about images (spec 10.6). Returns the files written."""
    refuse_against(choices)
    warn_of_initial(folder.path)
    cohort, model = records_for(folder, choices), load_encoders(folder.path).to(device_of(folder))
    answered = vqa(choices.vqa, model, cohort, choices.steps)
    return write_vqa(answered, target_of(folder, choices, "vqa", cohort))
