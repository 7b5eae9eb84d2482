"""Image-text retrieval: exact ranks of large sets in tiles, Recall@K in batches, over a set and over folds, per site.

Protocols (FedDRA, FedRGB: Recall@K within batches of 32 in fixed order; CreamFL: whole set and 1K folds, 5 captions an
image). A score is the dot product of an image and a text embedding: give L2-normalised ones. A query's rank is the
position, 0 the best, of its best positive among the candidates sorted by falling score. **Ties** go to the lower index,
as in a stable sort: rank = #(greater score) + #(equal score at a lower index). So embeddings that collapsed to one
point score chance (rank i for pair i), never 100.

Exactness: a positive's score is read from the tile that is counted. Computed separately its last bits may differ, and a
Recall@1 of 100 has been seen as 58. A matrix product's order of summation may depend on its shape, so two tile sizes,
or a whole and a border tile, may order candidates a float32 rounding apart differently; exact scores never.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedvlp.core.types import IMAGE_TOKENS, Batch
from fedvlp.data.cohort import Cohort
from fedvlp.data.loader import SiteData
from fedvlp.evaluation import metric_names
from fedvlp.evaluation import metric_names as names
from fedvlp.evaluation.downstream import TEST, VAL
from fedvlp.evaluation.intervals import Interval, bootstrap, mean_of
from fedvlp.evaluation.output import write_csv

Metrics = dict[str, float]
"""Name -> figure."""

Groups = Sequence[Hashable] | Tensor | None
"""Study or report of each of N pairs; None: every pair is its own."""

STORED = 2**24  # scores of tiles with positives that are stored between reading and counting: 64 MB


@torch.no_grad()
def ranks(
    image: Tensor, text: Tensor, *, image_of_text: Tensor | None = None, tile: tuple[int, int] = (1024, 1024)
) -> tuple[Tensor, Tensor]:
    """Rank of every query's best positive in both directions, in one pass over the score matrix.

    Args:
        image: [N, d] and ``text`` [M, d], L2-normalised embeddings.
        image_of_text: [M] int64, index of the image that each text describes; None pairs by position (M = N). Every
            image needs a text. Fastest when texts stand in the order of their images.
        tile: images, texts per tile; memory beside the embeddings is at most 8 bytes a score of one tile and 64 MB.

    Returns:
        image to text int64 [N] (among M texts), text to image int64 [M] (among N images); 0 is the best.

    Raises:
        ValueError: shapes do not fit, an embedding is not finite, or an image has no text.
    """
    image, text = _embeddings(image, text, "ranks")
    owner = _owner(image, text, image_of_text, "ranks")
    if min(tile) < 1 or max(tile) > 2**24:
        raise ValueError(f"ranks: tile is {tile}; expected two sizes in [1, 2^24]; use the default.")
    tiles = _Tiles(image, text, tile)
    score = _positive_scores(tiles, owner)  # [M]
    of_image = _Best.of(*_best_text(score, owner, image.shape[0]))  # [N]
    of_text = _Best.of(score, owner)  # [M]
    image_rank, text_rank = (torch.zeros(len(x), dtype=torch.int64, device=x.device) for x in (image, text))
    for rows, columns in tiles:
        scores = tiles.scores(rows, columns)  # [R, C]
        row, column = _positives(owner, rows, columns)
        mixed = bool(len(column))  # the best positive of some query lies within the tile
        if mixed:
            scores[row, column] = score[columns][column]  # never ahead of itself, whatever the device's product does
        image_rank[rows] += tiles.count(scores, of_image.select(rows), columns, mixed, dim=1)
        text_rank[columns] += tiles.count(scores, of_text.select(columns), rows, mixed, dim=0)
    return image_rank, text_rank


def recall(ranks: Tensor, k: int) -> float:
    """Recall@k in percent: the share of queries whose rank (``ranks`` [Q]) is below ``k``.

    Raises ValueError without a query or for k < 1.
    """
    if ranks.numel() == 0 or k < 1:
        raise ValueError(f"recall: {ranks.numel()} ranks, k = {k}; expected at least one rank and k >= 1; check both.")
    return 100.0 * float((ranks < k).double().mean())


def retrieval(
    image: Tensor, text: Tensor, ks: Sequence[int] = (1, 5, 10), image_of_text: Tensor | None = None
) -> Metrics:
    """Recall@k over the whole set, in percent, for every k: keys ``i2t/r1``, ``t2i/r1`` and their mean ``mean/r1``.

    Arguments and errors as in :func:`ranks`.
    """
    return _recalls(*ranks(image, text, image_of_text=image_of_text), ks)


def folded_retrieval(
    image: Tensor, text: Tensor, image_of_text: Tensor | None = None, folds: int = 5, ks: Sequence[int] = (1, 5, 10)
) -> Metrics:
    """Mean of :func:`retrieval` over folds of images, contiguous in their order (CreamFL 1K: 5 folds of 1,000).

    Raises ValueError unless the number of images is a multiple of ``folds``.
    """
    image, text = _embeddings(image, text, "folded_retrieval")
    owner = _owner(image, text, image_of_text, "folded_retrieval")
    size, left = divmod(image.shape[0], max(folds, 1))
    if folds < 1 or size == 0 or left:
        seen = f"{image.shape[0]} images, {folds} folds; expected folds of equal size"
        raise ValueError(f"folded_retrieval: {seen}; choose a divisor of the number of images.")
    results = []
    for fold in range(folds):
        member = owner // size == fold  # [M]
        rows = image[fold * size : (fold + 1) * size]
        results.append(retrieval(rows, text[member], ks, owner[member] - fold * size))
    return {key: sum(result[key] for result in results) / folds for key in results[0]}


@torch.no_grad()
def in_batch_ranks(image: Tensor, text: Tensor, batch_size: int = 32, groups: Groups = None) -> tuple[Tensor, Tensor]:
    """Rank of each query's best positive within consecutive batches, the short last one dropped; 0 is the best.

    Arguments and errors as in :func:`in_batch_retrieval`. Returns image to text and text to image, int64 [n * B] each
    for n batches of B.
    """
    image, text = _embeddings(image, text, "in_batch_retrieval")
    _owner(image, text, None, "in_batch_retrieval")
    batches = image.shape[0] // batch_size if batch_size >= 1 else 0
    if batches == 0:
        seen = f"{image.shape[0]} pairs, batch_size {batch_size}; expected at least one full batch"
        raise ValueError(f"in_batch_retrieval: {seen}; evaluate more pairs or lower batch_size (chance then rises).")
    group = _group_indices(groups, image.shape[0]).to(image.device)[: batches * batch_size].view(batches, batch_size)
    images, texts = (x[: batches * batch_size].reshape(batches, batch_size, -1) for x in (image, text))
    step = max(1, 2**20 // batch_size**2)  # batches at a time: 4 MB of scores
    image_ranks: list[Tensor] = []
    text_ranks: list[Tensor] = []
    for start in range(0, batches, step):
        chunk = slice(start, start + step)
        scores = torch.bmm(images[chunk], texts[chunk].transpose(1, 2))  # [b, B, B]
        positive = group[chunk, :, None] == group[chunk, None, :]  # [b, B, B], symmetric
        image_ranks.append(_ranks_of_best(scores, positive))
        text_ranks.append(_ranks_of_best(scores.transpose(1, 2), positive))
    return torch.cat(image_ranks).flatten(), torch.cat(text_ranks).flatten()


def in_batch_retrieval(
    image: Tensor, text: Tensor, batch_size: int = 32, ks: Sequence[int] = (1, 5, 10), groups: Groups = None
) -> Metrics:
    """Recall@k within consecutive batches, the short last one dropped, mean over batches; keys as :func:`retrieval`.

    FedDRA and FedRGB's protocol: batches of 32, so chance is 100 k / 32. The order given is part of the result: keep
    the index list.

    Args:
        image: [N, d] and ``text`` [N, d], L2-normalised embeddings, pairs by position.
        batch_size: candidates of every query; ``ks``: cut-offs.
        groups: [N] study or report of every pair. Images of one study share their report, so the plain protocol counts
            false negatives; with ``groups`` every pair of the query's group is a positive (variant ``dedup_study``).

    Raises:
        ValueError: there are fewer than ``batch_size`` pairs, or shapes do not fit.
    """
    return _recalls(*in_batch_ranks(image, text, batch_size, groups), ks)


def across_sites(per_site: dict[str, Metrics]) -> Metrics:
    """Average (unweighted mean), worst (minimum) and disparity over sites of every figure; ``metric_names.over_sites``.

    The papers do not define disparity; their values fit a standard deviation. Here: sqrt(mean((x - mean(x))^2)).
    Raises ValueError without a site, or unless all sites have the same figures, all finite.
    """
    if not per_site:
        raise ValueError("across_sites: no site; expected at least one; evaluate a site first.")
    keys = next(iter(per_site.values())).keys()
    for site, metrics in per_site.items():
        bad = sorted(keys ^ metrics.keys()) or sorted(key for key, value in metrics.items() if not math.isfinite(value))
        if bad:
            seen = f"site {site} has missing, extra or non-finite metrics {bad[:3]}"
            raise ValueError(f"across_sites: {seen}; expected the same at every site; leave the site or metric out.")
    result: Metrics = {}
    for key in keys:
        values = [metrics[key] for metrics in per_site.values()]
        average = math.fsum(values) / len(values)
        variance = math.fsum((value - average) ** 2 for value in values) / len(values)
        result[metric_names.over_sites(key, metric_names.AVERAGE)] = average
        result[metric_names.over_sites(key, metric_names.WORST)] = min(values)
        result[metric_names.over_sites(key, metric_names.DISPARITY)] = math.sqrt(variance)
    return result


class _Best(NamedTuple):
    """The best positive of each of Q queries, [Q] each."""

    score: Tensor
    lower: Tensor  # the next smaller float: "> lower" is ">= score", the limit in tiles of lower indices only
    position: Tensor  # index among the candidates

    @classmethod
    def of(cls, score: Tensor, position: Tensor) -> _Best:
        return cls(score, torch.nextafter(score, torch.full_like(score, -math.inf)), position)

    def select(self, queries: slice) -> _Best:
        return _Best(*(column[queries] for column in self))


class _Tiles:
    """The score matrix, one tile at a time, in buffers that all tiles share."""

    def __init__(self, image: Tensor, text: Tensor, tile: tuple[int, int]) -> None:
        self.image, self.text = image, text
        self.size = min(tile[0], image.shape[0]), min(tile[1], text.shape[0])
        self._stored: dict[tuple[int, int], Tensor] = {}
        self._scores, self._greater = (image.new_empty(self.size[0] * self.size[1]) for _ in range(2))

    def __iter__(self) -> Iterator[tuple[slice, slice]]:
        images, texts = self.image.shape[0], self.text.shape[0]
        for row in range(0, images, self.size[0]):
            for column in range(0, texts, self.size[1]):
                yield slice(row, min(row + self.size[0], images)), slice(column, min(column + self.size[1], texts))

    def scores(self, rows: slice, columns: slice, store: bool = False) -> Tensor:
        """Scores [R, C] of a tile, valid until the next call; the same tile has the same bits every time.

        ``store`` saves them, while memory allows, for the next request of this tile.
        """
        key, shape = (rows.start, columns.start), (rows.stop - rows.start, columns.stop - columns.start)
        if key in self._stored:
            return self._stored.pop(key)
        out = self._scores[: shape[0] * shape[1]].view(shape)
        if store and (len(self._stored) + 1) * self._scores.numel() <= STORED:
            out = self._stored[key] = torch.empty_like(out)
        return torch.mm(self.image[rows], self.text[columns].t(), out=out)

    def count(self, scores: Tensor, best: _Best, candidates: slice, mixed: bool, dim: int) -> Tensor:
        """Candidates ahead of each query's best positive, [Q] int64: greater, or equal and at a lower index."""
        beyond = best.position >= candidates.stop
        limit = torch.where(beyond, best.lower, best.score).unsqueeze(dim)
        # a comparison into float and its sum run vectorised, into bool they do not: 4x faster on a CPU
        greater = torch.gt(scores, limit, out=self._greater[: scores.numel()].view_as(scores))
        ahead = greater.sum(dim).long()
        if mixed:
            index = torch.arange(candidates.start, candidates.stop, device=scores.device).unsqueeze(1 - dim)
            position = best.position.masked_fill(beyond, -1).unsqueeze(dim)  # those have counted their equals already
            ahead += (scores == limit).logical_and_(index < position).sum(dim)
        return ahead


def _positive_scores(tiles: _Tiles, owner: Tensor) -> Tensor:
    """Score [M] of each text with its own image, read from the tile that will be counted; others are not computed."""
    score = torch.empty(len(owner), dtype=tiles.image.dtype, device=owner.device)
    for rows, columns in tiles:
        row, column = _positives(owner, rows, columns)
        if len(column):
            score[columns][column] = tiles.scores(rows, columns, store=True)[row, column]
    return score


def _positives(owner: Tensor, rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
    """Row and column within a tile of each pair (image, its text) in it, [P] each."""
    row = owner[columns] - rows.start
    (column,) = torch.where((row >= 0) & (row < rows.stop - rows.start))
    return row[column], column


def _best_text(score: Tensor, owner: Tensor, images: int) -> tuple[Tensor, Tensor]:
    """Score of each image's best text [N], and the index of that text [N], the lowest among equals."""
    best = torch.full((images,), -math.inf, dtype=score.dtype, device=score.device)
    best.scatter_reduce_(0, owner, score, "amax")
    (is_best,) = torch.where(score == best[owner])
    first = torch.full((images,), len(score), dtype=torch.int64, device=score.device)
    first.scatter_reduce_(0, owner[is_best], is_best, "amin")
    return best, first


def _ranks_of_best(scores: Tensor, positive: Tensor) -> Tensor:
    """[b, B] rank of the best positive candidate of each query, from scores and mask [b, query, candidate]."""
    best = scores.masked_fill(~positive, -math.inf).amax(dim=2, keepdim=True)
    index = torch.arange(scores.shape[2], device=scores.device)
    position = torch.where((scores == best) & positive, index, scores.shape[2]).amin(dim=2, keepdim=True)
    return ((scores > best) | ((scores == best) & (index < position))).sum(dim=2)


def _recalls(image_rank: Tensor, text_rank: Tensor, ks: Sequence[int]) -> Metrics:
    """Recall@k in both directions and their mean, in percent, from ranks [N] and [M]."""
    result: Metrics = {}
    for k in ks:
        forward, backward = recall(image_rank, k), recall(text_rank, k)
        result[metric_names.recall_at(k, metric_names.I2T)] = forward
        result[metric_names.recall_at(k, metric_names.T2I)] = backward
        result[metric_names.recall_at(k, metric_names.BOTH)] = (forward + backward) / 2
    return result


def _embeddings(image: Tensor, text: Tensor, who: str) -> tuple[Tensor, Tensor]:
    """Both as matrices of one float dtype, at least float32. Raises ValueError where a score is not finite."""
    if image.ndim != 2 or text.ndim != 2 or image.shape[1] != text.shape[1] or 0 in (*image.shape, *text.shape):
        seen = f"image {tuple(image.shape)} and text {tuple(text.shape)}; expected [N, d] and [M, d], not empty"
        raise ValueError(f"{who}: {seen}; pass the embeddings of both towers after their projection heads.")
    dtype = torch.promote_types(torch.promote_types(image.dtype, text.dtype), torch.float32)
    image, text = image.to(dtype), text.to(dtype)
    largest = 1.0
    for name, matrix in (("image", image), ("text", text)):
        low, high = (float(value) for value in torch.aminmax(matrix))  # nan if one is nan; no copy of the matrix
        if not (math.isfinite(low) and math.isfinite(high)):
            rows = int((~torch.isfinite(matrix)).any(dim=1).sum())
            seen = f"{rows} of {matrix.shape[0]} {name} embeddings are not finite; expected all"
            raise ValueError(f"{who}: {seen}; look for a diverged model or an empty input.")
        largest *= max(-low, high)
    if largest * image.shape[1] > torch.finfo(dtype).max:
        raise ValueError(f"{who}: scores up to {largest:.3g} overflow {dtype}; expected unit rows; normalise them.")
    return image, text


def _owner(image: Tensor, text: Tensor, image_of_text: Tensor | None, who: str) -> Tensor:
    """Image of each text, [M] int64, checked."""
    images, texts = image.shape[0], text.shape[0]
    if image_of_text is None:
        if images != texts:
            seen = f"{images} images and {texts} texts; expected pairs by position"
            raise ValueError(f"{who}: {seen}; pass image_of_text otherwise.")
        return torch.arange(images, device=image.device)
    owner = torch.as_tensor(image_of_text)
    if owner.shape != (texts,) or owner.is_floating_point() or owner.dtype == torch.bool:
        seen = f"image_of_text is {owner.dtype} {tuple(owner.shape)}; expected int64 ({texts},)"
        raise ValueError(f"{who}: {seen}; pass one image index a text.")
    owner = owner.to(image.device, torch.int64)
    low, high = int(owner.min()), int(owner.max())
    without = images if low < 0 or high >= images else int((torch.bincount(owner, minlength=images) == 0).sum())
    if without:
        seen = f"image_of_text lies in [{low}, {high}] and {without} of {images} images have no text"
        raise ValueError(f"{who}: {seen}; expected [0, {images - 1}] and a text for each; drop images without text.")
    return owner


def _group_indices(groups: Groups, pairs: int) -> Tensor:
    """Number of each pair's group, [N] int64; without groups every pair is its own."""
    if groups is None:
        return torch.arange(pairs)
    names = groups.tolist() if isinstance(groups, Tensor) else list(groups)
    if len(names) != pairs:
        seen = f"{len(names)} groups for {pairs} pairs; expected one a pair"
        raise ValueError(f"in_batch_retrieval: {seen}; pass the study of each.")
    numbers: dict[Hashable, int] = {}
    return torch.tensor([numbers.setdefault(name, len(numbers)) for name in names])


# Whole-set retrieval beside what knowing the source alone would give (spec 0 Z11): chance, oracle, within sources.
#
# Where records come from several sources, telling the sources apart already finds some pairs. The **source oracle**
# knows only which source an image and a text come from and guesses within it: a query of a source with n candidates is
# found among its first k with probability min(1, k / n). A recall below the oracle's shows nothing but sources.

EVERYTHING, WITHIN = "all", "within sources"
KS = (1, 5, 10)


@dataclass(frozen=True)
class RecallRow:
    """Recall@k of one set of candidates, percent, mean of both directions."""

    scope: str  # "all" candidates, those "within sources" (each query's own), or "within NAME" for the queries of one
    k: int
    queries: int  # images, and as many texts
    recall: Interval  # over resamples of the patients; the candidates stay
    chance: float  # of a random order
    oracle: float  # the source oracle's; within sources it is chance


def by_chance(k: int, candidates: Tensor) -> float:
    """Recall@k in percent of a random order, for queries with ``candidates`` [Q] each."""
    return 100 * float((k / candidates.double()).clamp(max=1).mean())


def recall_rows(
    image: Tensor,
    text: Tensor,
    sources: Sequence[str],
    patients: Sequence[Hashable],
    ks: Sequence[int] = KS,
    resamples: int = 1000,
) -> list[RecallRow]:
    """The rows of pairs image [N, d] and text [N, d], unit vectors; ``sources`` and ``patients`` [N] of each.

    Raises ValueError as ``ranks`` does.
    """
    names = sorted(set(sources))
    member = {name: torch.tensor([source == name for source in sources]) for name in names}
    count = torch.zeros(len(image), dtype=torch.int64)  # candidates of each query's own source
    inner = torch.zeros(2, len(image), dtype=torch.int64)  # rank of both directions within it
    for here in member.values():
        count[here] = int(here.sum())
        inner[:, here] = torch.stack(ranks(image[here], text[here]))
    outer = torch.stack(ranks(image, text))  # [2, N]
    every = torch.ones(len(image), dtype=torch.bool)
    scopes = [(EVERYTHING, outer, every, torch.full_like(count, len(image))), (WITHIN, inner, every, count)]
    scopes += [(f"within {name}", inner, here, count) for name, here in member.items() if len(names) > 1]
    rows = []
    for scope, rank, asked, candidates in scopes:
        for k in ks:
            hits = 50 * (rank < k).double().sum(dim=0)  # [N] percent
            whose = [patient for patient, one in zip(patients, asked.tolist(), strict=True) if one]
            recall = bootstrap(mean_of(hits[asked]), whose, resamples)
            chance, oracle = by_chance(k, candidates[asked]), by_chance(k, count[asked])
            rows.append(RecallRow(scope, k, int(asked.sum()), recall, chance, oracle))
    return rows


def source_retrieval(model: Any, cohort: Cohort, resamples: int = 1000) -> tuple[str, list[RecallRow]]:
    """The split that was measured (test, or val where that has no pairs) and the rows of ``model``, a DualEncoder.

    A record's source is its site. Raises ValueError where neither split has 2 pairs.
    """
    paired = cohort.has_image() & cohort.has_report()
    for split in (TEST, VAL):
        rows = cohort.rows(split)
        rows = rows[paired[rows]]
        if len(rows) < 2:
            continue
        data = SiteData(cohort, {split: rows}, model.tokenizer, model.config.image_size)
        image, text = embed(model, data.batches(split, 32, drop_last=False))
        sources, patients = (
            [""] * len(rows) if column is None else [column[row] for row in rows]
            for column in (cohort.sites, cohort.patients)
        )
        return split, recall_rows(image, text, sources, patients, resamples=resamples)
    raise ValueError("retrieval: neither test nor val holds 2 images with reports; choose data that have both")


def write_retrieval(split: str, rows: Sequence[RecallRow], path: Path) -> list[Path]:
    """Writes ``<path>.csv``."""
    header = ["split", "scope", "k", "queries", "recall", "recall_low", "recall_high", "chance", "source_oracle"]
    lines = [[split, r.scope, r.k, r.queries, *vars(r.recall).values(), r.chance, r.oracle] for r in rows]
    return [write_csv(path, [header, *lines])]


# Retrieval on one site's held-out records: a callable that a Site is given to evaluate with.


@torch.no_grad()
def embed(model: nn.Module, batches: Iterator[Batch]) -> tuple[Tensor, Tensor]:
    """Unit vectors of all pairs of ``batches`` in order: images [N, d], texts [N, d], on the CPU. Sets eval mode."""
    model.eval()
    outputs = [model(batch) for batch in batches]
    return torch.cat([o.image for o in outputs]).cpu(), torch.cat([o.text for o in outputs]).cpu()


def embed_images(model: nn.Module, batches: Iterator[Batch]) -> Iterator[Tensor]:
    """L2-normalised image embeddings [B, d] of each batch, from cached features where ``cache_features`` is set."""
    for batch in batches:
        yield model({name: batch[name] for name in ("image", IMAGE_TOKENS) if name in batch}).image


def paired_similarity(image: Tensor, text: Tensor) -> float:
    """Mean cosine, -1..1, of the paired unit vectors image [N, d] and text [N, d] (FedRGB's measure of alignment)."""
    return float((image.double() * text.double()).sum(1).mean())


@dataclass(frozen=True)
class Retrieval:
    """Image-text retrieval (spec 10.1): in batches of ``batch_size`` in fixed order, and over the whole split.

    The names of the figures are in ``metric_names``. Records with an image or a report alone are left out. A
    split of fewer pairs than one batch has no in-batch figure, a split of one pair none at all.
    """

    batch_size: int = 32  # candidates of a query in batch
    ks: tuple[int, ...] = (1, 5, 10)  # the K of Recall@K
    captions: bool = (
        False  # rows with equal pixels are captions of one image, all of them right (CreamFL); none in batch
    )
    folds: int = 0  # also the mean over so many contiguous folds of the images, if that divides their number; 0: none

    def __call__(self, client: Any, splits: tuple[str, ...]) -> dict[str, float]:
        """Name -> figure on ``splits`` of ``client.data`` for ``client.model``."""
        metrics: dict[str, float] = {}
        for split in splits:
            if len(client.data.having(split)) >= 2:
                metrics |= self.measure(client.model, client.data, split)
        return metrics

    def measure(self, model: nn.Module, data: Any, split: str) -> dict[str, float]:
        """Name -> figure of ``model`` on the pairs of one split of ``data`` (a SiteData), at least 2."""
        pairs = data.having(split)
        image, text = embed(model, data.batches(split, self.batch_size, drop_last=False, rows=pairs))
        figures = {names.similarity(split): paired_similarity(image, text)}
        in_batch: dict[str, float] = {}
        if len(image) >= self.batch_size:
            in_batch = in_batch_retrieval(image, text, self.batch_size, self.ks)
        owner = None
        if self.captions:
            first, owner = data.shared_images(split)
            if len(first) < len(image):
                in_batch = {}  # a batch would hold an image twice
            image = image[first]
        scopes = {names.IN_BATCH: in_batch, names.WHOLE_SET: retrieval(image, text, self.ks, owner)}
        if self.folds and len(image) % self.folds == 0:
            scopes[names.FOLDS] = folded_retrieval(image, text, owner, self.folds, self.ks)
        for scope, recalls in scopes.items():
            figures |= {names.on_split(split, scope, name): value for name, value in recalls.items()}
        return figures
