"""What a person does with a trained model: images and phrases to vectors, and findings by their prompts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from fedvlp.models.dual_encoder import DualEncoder

BATCH = 64
"""Images or phrases that the towers see at once."""


class Preparation(Protocol):
    """Prepares images and phrases as the records of the model's run were (data/preprocessing.py)."""

    def films(self, films: Sequence[Any]) -> Tensor:
        """float32 [N, C, S, S] of N images."""
        ...

    def samples(self, folder: Path) -> list[Path]:
        """Writes an image in files of every kind that is read into ``folder``, and returns them."""
        ...

    def text(self, phrase: str) -> str:
        """The phrase as the reports were written."""
        ...


class Usable:
    """Base class of ``DualEncoder``: what one calls on the model that ``fedvlp.load_model`` gives.

    An image is a path, a pydicom ``Dataset``, a PIL image or an array ([H, W], or uint8 [H, W, 3]); one or a list.
    A tensor is taken for images that ``preprocess`` has prepared. All run in evaluation mode, without gradients,
    on the model's device, and leave the model's mode as it was.
    """

    prepare: Preparation | None = None  # ``fedvlp.load_model`` sets it, from what the model's folder says
    contrastive: ClassVar[bool] = True  # whether images and texts were trained to lie near each other

    @property
    def device(self: DualEncoder) -> torch.device:  # type: ignore[misc]
        """Where the model is; ``to`` moves it."""
        return next(self.parameters()).device

    def preprocess(self, film: Any) -> Tensor:
        """float32 [1, S, S] of an image, or [N, 1, S, S] of a list of N images, as ``encode_image`` takes it.

        Three channels in place of one, where the model was trained on images in colour.

        Raises ValueError for an image that cannot be read, and where the model's folder says nothing of preparation.
        """
        many = isinstance(film, (list, tuple))
        prepared = self._preparation().films(film if many else [film])
        return prepared if many else prepared[0]

    def _preparation(self) -> Preparation:
        if self.prepare is None:
            raise ValueError(
                "this model's folder does not say how images are prepared, and one that is prepared in another way "
                "gets a wrong vector; load it with fedvlp.load_model from the folder of its run, or set model.prepare "
                "to a fedvlp.data.preprocessing.Preprocessing of the sizes that it was trained with"
            )
        return self.prepare

    @torch.no_grad()
    def encode_image(self: DualEncoder, film: Any, batch_size: int = BATCH) -> Tensor:  # type: ignore[misc]
        """Unit vector [d] of an image, or [N, d] of a list of N images. Raises ValueError as ``preprocess`` does."""
        if isinstance(film, Tensor):
            return _of_prepared(self, film, batch_size)
        many = isinstance(film, (list, tuple))
        films = film if many else [film]
        with evaluating(self):
            vectors = [self({"image": self._preparation().films(some)}).image for some in _chunks(films, batch_size)]
        return _joined(self, vectors, many)

    @torch.no_grad()
    def encode_text(self: DualEncoder, text: str | Sequence[str], batch_size: int = BATCH) -> Tensor:  # type: ignore[misc]
        """Unit vector [d] of a phrase or report, or [N, d] of a list of N. Raises ValueError for what is no text."""
        many = not isinstance(text, str)
        texts = [text] if isinstance(text, str) else list(text)
        if any(not isinstance(one, str) for one in texts):
            raise ValueError("encode_text: expected a text or a list of texts")
        said = [self.prepare.text(one) if self.prepare else one for one in texts]
        vectors = []
        with evaluating(self):
            for some in _chunks(said, batch_size):
                ids, mask = self.tokenizer(some)
                vectors.append(self({"text": ids, "text_mask": mask}).text)
        return _joined(self, vectors, many)

    def require_comparable(self: DualEncoder, what: str) -> None:  # type: ignore[misc]
        """Raises ValueError, which names the command, where images and texts were not trained to be compared."""
        if not self.contrastive:
            raise ValueError(
                f"{what}: a {type(self).__name__} compares no images with texts, it has logits of its labels; give a "
                "model that was trained by a contrastive objective, a DualEncoder"
            )
        if len(towers := self.start.get("towers", ("image", "text"))) < 2:
            raise ValueError(
                f"{what}: this is {self.start['family']}, an {towers[0]} tower alone, whose other tower is random; "
                "train it with image-report pairs first (--start), or evaluate a linear probe of its images"
            )

    def zero_shot(  # type: ignore[misc]
        self: DualEncoder,
        film: Any,
        classes: Sequence[str] | Mapping[str, str | Sequence[str]] | None = None,
    ) -> Any:
        """By class the mean cosine, -1..1, of an image with the class's prompts: a dict, or of a list of images a list.

        ``classes``: names, or sentences by name; None: those of ``prompts``, the model's own. A name that is none of
        these is its own prompt. Of one class, an image with a higher figure is more likely to show it; they are no
        probabilities, and those of different classes cannot be compared (spec 10.4 measures areas under the ROC curve
        of just these). Raises ValueError as ``preprocess`` does, without classes, and for a classifier.
        """
        self.require_comparable("zero_shot")
        named = sentences_of(classes, self.prompts)
        vectors = self.encode_image(film)
        scores = {name: cosines.tolist() for name, cosines in class_cosines(self, vectors, named).items()}
        if vectors.ndim == 1:
            return scores
        return [{name: column[row] for name, column in scores.items()} for row in range(len(vectors))]


def class_cosines(model: DualEncoder, vectors: Tensor, sentences: Mapping[str, Sequence[str]]) -> dict[str, Tensor]:
    """By class the mean cosine, float64 [] or [N], of images' unit vectors [d] or [N, d] with the class's sentences."""
    return {
        name: (vectors.double() @ model.encode_text(list(said)).double().to(vectors.device).T).mean(dim=-1)
        for name, said in sentences.items()
    }


def sentences_of(
    classes: Sequence[str] | Mapping[str, str | Sequence[str]] | None, own: Mapping[str, Sequence[str]]
) -> dict[str, list[str]]:
    """Prompts by class, of names (in any case) or sentences by name; ``own`` are the model's. Raises ValueError."""
    if classes is None:
        if not own:
            raise ValueError("zero_shot: this model has no classes of its own; give classes, a list of names")
        classes = own
    if isinstance(classes, str) or not classes:
        raise ValueError("zero_shot: classes is a list of at least one name, or sentences by name; give one")
    if isinstance(classes, Mapping):
        return {name: [said] if isinstance(said, str) else list(said) for name, said in classes.items()}
    known = {name.casefold(): list(sentences) for name, sentences in own.items()}
    return {name: known.get(name.casefold(), [name]) for name in classes}


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode within a ``with``; afterwards the mode of each module is as it was."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _chunks(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _joined(model: DualEncoder, vectors: list[Tensor], many: bool) -> Tensor:
    """[N, d] of the vectors [n, d] of all chunks, or [d] of the only one."""
    if not vectors:
        return torch.empty(0, model.config.embedding_dim, device=model.device)
    return torch.cat(vectors) if many else vectors[0][0]


def _of_prepared(model: DualEncoder, films: Tensor, batch_size: int) -> Tensor:
    """[N, d] of prepared images [N, C, S, S], [d] of one [C, S, S]. Raises ValueError for another shape or kind."""
    size = model.config.image_size
    channels = {1, int(getattr(model.image_encoder, "in_channels", 1))}
    fits = films.ndim in (3, 4) and films.shape[-3] in channels and films.shape[-2:] == (size, size)
    if not fits or not films.is_floating_point():
        raise ValueError(
            f"encode_image: a tensor {films.dtype} {list(films.shape)}; expected images that preprocess has prepared, "
            f"float32 [N, 1, {size}, {size}] or [1, {size}, {size}]"
        )
    many = films.ndim == 4
    with evaluating(model):
        vectors = [model({"image": some}).image for some in (films if many else films[None]).split(batch_size)]
    return _joined(model, vectors if len(films) else [], many)
