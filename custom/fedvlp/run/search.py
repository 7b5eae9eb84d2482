"""Vectors of a data set's images and reports by a trained model, and the records that are nearest to a query."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedvlp.core.checkpoint import save_bytes
from fedvlp.data.cohort import Cohort, NoRecordsError
from fedvlp.data.loader import eval_batch
from fedvlp.data.preprocessing import Preprocessing
from fedvlp.data.record_ids import as_written
from fedvlp.models.dual_encoder import DualEncoder

NPZ, PARQUET = SUFFIXES = (".npz", ".parquet")
"""Of the files that vectors are written to."""

BATCH = 64
"""Images or reports embedded at once."""


@dataclass(frozen=True)
class Nearest:
    """One of the records that are nearest to a query."""

    row: int  # of the cohort
    key: str  # of the record, as a file may have it (data/record_ids.py)
    similarity: float  # cosine of the query and the record's image, -1..1


def decoded_size(model: DualEncoder) -> int:
    """Pixels that the images of a data set are to be decoded to for ``model``.

    Raises ValueError where the model's folder does not say how images are prepared.
    """
    if not isinstance(model.prepare, Preprocessing):
        raise ValueError("this model's folder does not say how images are prepared; give the folder of its run")
    return model.prepare.longest_side


def rows_of(cohort: Cohort, split: str | None) -> np.ndarray:
    """Row numbers [n] of a split, or of all records (None). Raises ValueError for an unknown split, or no row."""
    rows = np.arange(len(cohort)) if split is None else cohort.rows(split)
    if not len(rows):
        raise NoRecordsError(f"the data set has no record{f' in the split {split}' if split else ''}; choose another")
    return rows


def image_vectors(model: DualEncoder, cohort: Cohort, rows: np.ndarray) -> Tensor:
    """Unit vectors [n, d] of the images of ``rows`` [n], on the CPU; nan where a row has no image.

    ``cohort``: its images are decoded to ``decoded_size`` pixels.
    """
    vectors = torch.full((len(rows), model.config.embedding_dim), torch.nan)
    imaged = torch.from_numpy(np.flatnonzero(cohort.has_image()[rows]))
    for some in imaged.split(BATCH):
        pixels = np.ascontiguousarray(cohort.images(rows[some.numpy()]))
        films = eval_batch(torch.from_numpy(pixels), model.config.image_size)
        vectors[some] = model.encode_image(films).float().cpu()
    return vectors


def text_vectors(model: DualEncoder, cohort: Cohort, rows: np.ndarray) -> Tensor:
    """Unit vectors [n, d] of the reports of ``rows`` [n], on the CPU; nan where a row has no report."""
    vectors = torch.full((len(rows), model.config.embedding_dim), torch.nan)
    reported = torch.from_numpy(np.flatnonzero(cohort.has_report()[rows]))
    for some in reported.split(BATCH):
        reports = [cohort.reports[row] for row in rows[some.numpy()].tolist()]
        vectors[some] = model.encode_text(reports).float().cpu()
    return vectors


def search(model: DualEncoder, cohort: Cohort, query: Tensor, split: str | None = None, top: int = 10) -> list[Nearest]:
    """The ``top`` records whose images are nearest to ``query`` [d], a unit vector, the nearest first.

    Of equal similarities the earlier row is first; records without an image are left out. Raises ValueError for a model
    that was not trained to compare, a ``top`` below 1, and where no record has an image.
    """
    model.require_comparable("search")
    if top < 1:
        raise ValueError(f"search: {top} records are asked for; expected at least 1")
    rows = rows_of(cohort, split)
    rows = rows[cohort.has_image()[rows]]
    if not len(rows):
        raise NoRecordsError("search: no record there has an image; give data with images, or another split")
    similar = ranked(image_vectors(model, cohort, rows), query, top)
    shown = as_written(cohort)
    return [Nearest(int(rows[i]), shown[cohort.ids[rows[i]]], similarity) for i, similarity in similar]


def ranked(vectors: Tensor, query: Tensor, top: int) -> list[tuple[int, float]]:
    """(index, cosine) of the ``top`` of ``vectors`` [n, d] that are nearest to ``query`` [d], the nearest first.

    All are unit vectors. Of equal cosines the smaller index is first; vectors that are nan are left out.
    """
    cosines = (vectors.double() @ query.double().cpu()).numpy()  # [n]
    order = np.argsort(-cosines, kind="stable")  # nan last
    return [(int(i), float(cosines[i])) for i in order[:top] if not np.isnan(cosines[i])]


def refuse_other_suffix(out: Path) -> None:
    """Raises ValueError unless vectors can be written as ``out``, before they are computed."""
    suffix = out.suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(
            f"--out {out.name}: vectors are written as FILE.npz, which numpy reads, or FILE.parquet; name it so"
        )
    if suffix == PARQUET and find_spec("pyarrow") is None:
        raise ValueError(f"--out {out.name}: Parquet needs a package: pip install 'fedvlp[parquet]'; or write FILE.npz")
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise ValueError(f"--out {out.name}: its folder does not exist, or a folder has that name; choose another")


def write_vectors(model: DualEncoder, cohort: Cohort, out: Path, split: str | None = None) -> dict[str, int]:
    """Writes ``out``, and returns how many records, images and reports are in it.

    Arrays, or columns of a Parquet file: ``key`` [N], ``split`` [N], ``site`` [N] ("" where there is none), ``image``
    and ``text`` [N, d] float32; nan (Parquet: null) where a record has no image or no report. Raises ValueError as
    ``refuse_other_suffix`` does.
    """
    refuse_other_suffix(out)
    rows = rows_of(cohort, split)
    image, text = image_vectors(model, cohort, rows), text_vectors(model, cohort, rows)
    shown = as_written(cohort)
    texts = {
        "key": [shown[cohort.ids[row]] for row in rows],
        "split": [str(cohort.splits[row]) for row in rows],
        "site": ["" if cohort.sites is None else cohort.sites[row] for row in rows],
    }
    vectors = {"image": image.numpy(), "text": text.numpy()}
    save_bytes(out, _parquet(texts, vectors) if out.suffix.lower() == PARQUET else _npz(texts, vectors))
    films, reports = (int((~one[:, 0].isnan()).sum()) for one in (image, text))
    return {"records": len(rows), "films": films, "reports": reports}


def _npz(texts: Mapping[str, Sequence[str]], vectors: Mapping[str, np.ndarray]) -> bytes:
    content = io.BytesIO()
    columns: dict[str, Any] = {**{name: _column(values) for name, values in texts.items()}, **vectors}
    np.savez(content, **columns)
    return content.getvalue()


def _parquet(texts: Mapping[str, Sequence[str]], vectors: Mapping[str, np.ndarray]) -> bytes:
    """A row for each record; a vector is a list of numbers, or null where it is nan."""
    import pyarrow
    from pyarrow import parquet

    columns: dict[str, Any] = {name: pyarrow.array(values, pyarrow.string()) for name, values in texts.items()}
    for name, values in vectors.items():
        rows = [None if np.isnan(vector[0]) else vector for vector in values]
        columns[name] = pyarrow.array(rows, pyarrow.list_(pyarrow.float32()))
    content = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), content)
    return content.getvalue()


def _column(values: Sequence[str]) -> np.ndarray:
    """Texts as an array that is read without unpickling."""
    return np.array(values, dtype=np.str_)
