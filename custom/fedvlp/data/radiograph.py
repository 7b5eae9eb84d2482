"""Reads one radiograph or photograph (PNG, JPEG, TIFF or DICOM), of a large JPEG no more than a size needs."""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")

MAX_PIXELS = 64_000_000  # images with more are refused by their header, before decoding (decompression bombs)
MAX_BYTES = 512 * 1024 * 1024  # larger files are not read
BLACK, BRIGHT = 0.1, 99  # percentiles of an image's pixels that become grey levels 0 and ...
BRIGHT_LEVEL = 240  # ..., so that little of what is brighter is cut off; a marker is, so that it moves nothing else
REFERENCE = 256  # pixels: these percentiles are those of the image at this longer side, whatever size is asked for
EVEN = 0.02  # of the image's range: rows and columns within it are a border, whatever the file calls padding
LUMINANCE = (0.299, 0.587, 0.114)  # of red, green and blue, by ITU-R 601, as PIL
COLOURS = ("RGB", "RGBA", "LA")  # modes of Pillow that have 8 bits whatever the file has
FORMATS = ("PNG", "JPEG", "TIFF")  # that Pillow reads here
ORIENTATION = 0x0112  # of EXIF; 1 is upright
SIDEWAYS = (5, 6, 7, 8)
PHOTOMETRIC, WHITE_IS_ZERO = 0x0106, 0  # of TIFF
PREAMBLE = bytes(128) + b"DICM"  # that a DICOM file begins with
JPEG_EXTENDED = "1.2.840.10008.1.2.4.51"  # of 8 bits it can be decoded here, of 12 it cannot
META = b"\x02\0"  # group of the tags of its meta header
DATASET = (b"\x08\0", b"\0\x08")  # group of the first tag after it, in either byte order
SYNTAX = b"\x02\0\x10\0UI"  # tag and type of the transfer syntax

DICOM_TAGS = (
    "Rows", "Columns", "NumberOfFrames", "SamplesPerPixel", "PlanarConfiguration", "PhotometricInterpretation",
    "BitsAllocated", "BitsStored", "HighBit", "PixelRepresentation", "RescaleSlope", "RescaleIntercept",
    "ModalityLUTSequence", "WindowCenter", "WindowWidth", "VOILUTFunction", "VOILUTSequence", "BurnedInAnnotation",
    "ExtendedOffsetTable", "ExtendedOffsetTableLengths", "PixelPaddingValue", "PixelPaddingRangeLimit",
    "PixelAspectRatio", "PixelSpacing", "ImagerPixelSpacing", "NominalScannedPixelSpacing", "PresentationLUTShape",
)  # fmt: skip
"""The tags that pixels depend on. No other tag of a DICOM file is read, so nothing about the patient is."""

RESCALE = ("ModalityLUTSequence", "RescaleSlope", "RescaleIntercept")  # from stored values to the detector's
WINDOW = ("VOILUTSequence", "WindowCenter", "WindowWidth", "VOILUTFunction")  # from these to what a screen shows
CARRY = 0.06  # of the lower bits' range; measured: 0.1 to 1 where bits are lacking, within 0.04 of 0 elsewhere
SPACINGS = ("PixelSpacing", "ImagerPixelSpacing", "NominalScannedPixelSpacing", "PixelAspectRatio")  # height, width
SQUARE = 0.02  # a pixel whose sides differ by less is square; measured spacings are rounded
MOST_OBLONG = 5  # sides of a pixel that differ by more are a mistake in the header
LOST = 1 / 3  # of an image: so much of one value at its lower end alone is what a transfer that broke off left
FILL_ORDER, LOW_BIT_FIRST = 0x010A, 2  # of TIFF
BITS_PER_SAMPLE = 0x0102  # of TIFF
UNUSABLE = ", with a window or rescale that cannot be applied"


class UnreadableImageError(ValueError):
    """A file is no usable radiograph. ``reason`` is a short category to count by, without path or tag value."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class ImageAccessError(ValueError):
    """A file could not be read now, which says nothing of the image in it. The message holds neither path nor name."""


@dataclass(frozen=True, eq=False)
class _Values:
    """The decoded values of an image, in any unit: their percentiles make its grey levels."""

    values: np.ndarray  # [h, w], or [h, w, 3] of an image in colour
    shape: tuple[int, int]  # [H, W] of the file; more than [h, w] where it was decoded at reduced size
    invert: bool = False  # the least is white (MONOCHROME1)
    padding: np.ndarray | None = None  # bool [h, w]: pixels that are no part of the image; None: there are none
    aspect: float = 1.0  # height of a pixel over its width
    stored: str = ""  # how the file holds the image, in words without any of its own


def read_radiograph(
    path: Path, longest: int | None = None, burned_in: bool = False, colour: bool = False
) -> np.ndarray:
    """Grey float32 [H, W] in 0..255, bright = dense (MONOCHROME1 is inverted).

    Whatever the file and its bits, the percentiles ``BLACK`` and ``BRIGHT`` of the image without padding and border
    become the grey levels 0 and ``BRIGHT_LEVEL``, after the modality LUT and the first VOI window; what lies beyond
    0..255 is cut off. So an image's levels are the same in other units, offsets and byte orders, and neither hot pixels
    nor a bright marker move them. With ``longest`` the longer side is resized to that many pixels, each the mean of the
    area that it covers. A JPEG is then decoded at the smallest of 1, 1/2, 1/4 and 1/8 of its size that is not below
    this or ``REFERENCE``. Pixels that are not square by the file's header are made so. ``burned_in`` reads an image
    whose header says that text is burned into its pixels, too. The Presentation LUT Shape INVERSE inverts MONOCHROME2.
    ``colour`` gives red, green and blue, [H, W, 3], which are equal where the file is grey. Raises
    ``UnreadableImageError``; size and frame count are checked before decoding. Raises ``ImageAccessError`` where not
    the file is to blame but its disk, its rights or the memory of this machine.
    """
    return read_stored(path, longest, burned_in, colour)[0]


def read_stored(
    path: Path, longest: int | None = None, burned_in: bool = False, colour: bool = False
) -> tuple[np.ndarray, str]:
    """As ``read_radiograph``, and how the file holds the image: its container, bits and photometric interpretation.

    Of a DICOM file also whether a window or rescale of it is of no use, and was left out.
    """

    def read() -> tuple[np.ndarray, str]:
        image = _read_file(path, longest, burned_in, colour)
        return _finished(image, longest, colour), image.stored

    return _guarded(read)


def shape_of_file(path: Path) -> tuple[int, int]:
    """Return [H, W] of the upright image in a file with square pixels. Raises as ``read_radiograph`` does."""
    shape, aspect = _guarded(lambda: _shape(path))
    return _with_square_pixels(shape, aspect)


def grid_of_file(path: Path) -> tuple[int, int]:
    """Return [H, W] of the upright image in a file, in its own pixels. Raises as ``read_radiograph`` does."""
    return _guarded(lambda: _shape(path))[0]


def read_film(film: Any, longest: int | None = None, colour: bool = False) -> np.ndarray:
    """As ``read_radiograph``, of an image that somebody holds in memory, or of the path of a file.

    That is a pydicom ``Dataset``, a PIL image, or an array [H, W] (grey, any numbers) or [H, W, 3] (RGB, uint8). A
    header that says that text is burned into the pixels refuses nothing here: whoever holds an image may look at it.
    Raises as ``read_radiograph`` does.
    """
    if isinstance(film, (str, os.PathLike)):
        return read_radiograph(Path(film), longest, burned_in=True, colour=colour)
    return _guarded(lambda: _finished(_of_memory(film, colour), longest, colour))


def _guarded(read: Callable[[], T]) -> T:
    """What ``read`` gives. Errors quote nothing of the file.

    Raises ``UnreadableImageError``, ``ImageAccessError``, and ImportError for a broken installation.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # decoders quote the values of tags in warnings
            return read()
    except UnreadableImageError:
        raise
    except ImportError as error:
        if error.name != "pydicom":  # which is an extra
            raise
        raise UnreadableImageError("needs the package pydicom") from None
    except MemoryError:
        raise ImageAccessError(
            "an image could not be decoded for lack of memory; decode with fewer workers, or on a larger machine"
        ) from None
    except Exception as error:  # decoders raise anything on damaged bytes, and quote paths and tags in it
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise _no_access(error) from None
        raise UnreadableImageError("corrupt image") from None


def _no_access(error: OSError) -> ImageAccessError:
    """Of an error of the operating system. Decoders' own have no number; EINVAL is of offsets in a damaged file."""
    why = os.strerror(error.errno or 0)
    return ImageAccessError(
        f"an image could not be read ({why}); see that its disk or share is there and that this account may read its "
        "files, and run again"
    )


def _read_file(path: Path, longest: int | None, burned_in: bool, colour: bool) -> _Values:
    dicom = _as_dicom(path)
    return _read_pil(path, longest, colour) if dicom is None else _read_dicom(dicom, burned_in, colour)


def _as_dicom(path: Path) -> Path | BytesIO | None:
    """A DICOM file as pydicom reads it, in memory where preamble or meta header are missing; None for another file."""
    if not path.is_file():
        raise UnreadableImageError("missing image")
    if not path.stat().st_size:
        raise UnreadableImageError("empty file")
    if path.stat().st_size > MAX_BYTES:
        raise UnreadableImageError("image too large", f"more than {MAX_BYTES} bytes")
    with path.open("rb") as file:
        start = file.read(1024)
    preamble = len(PREAMBLE) if start[128:132] == b"DICM" else 0
    begins = start[preamble : preamble + 2]
    if begins not in (META, *DATASET) or (preamble and SYNTAX in start):
        return path if preamble else None
    return _with_header(path.read_bytes()[preamble:])


def _with_header(content: bytes) -> BytesIO:
    """A DICOM file in memory: ``content`` begins at its meta header, or without one at its first tag.

    Where no transfer syntax is named, the first tag shows it: after a tag comes its type, two capitals, in explicit
    syntaxes alone.
    """
    from pydicom.filereader import read_dataset
    from pydicom.uid import ExplicitVRBigEndian, ExplicitVRLittleEndian, ImplicitVRLittleEndian

    rest = BytesIO(content)
    if content[:2] == META:
        meta = read_dataset(rest, False, True, stop_when=lambda tag, *_: tag >> 16 != 2)
        if meta.get("TransferSyntaxUID"):
            return BytesIO(PREAMBLE + content)
    data = content[rest.tell() :]
    explicit = data[4:6].isalpha() and data[4:6].isupper()
    little = ExplicitVRLittleEndian if explicit else ImplicitVRLittleEndian
    uid = (ExplicitVRBigEndian if data[:2] == DATASET[1] else little).encode()
    uid += bytes(len(uid) % 2)
    return BytesIO(PREAMBLE + SYNTAX + len(uid).to_bytes(2, "little") + uid + data)


def _shape(path: Path) -> tuple[tuple[int, int], float]:
    """[H, W] of a file's upright image, and the height of its pixels over their width; its header alone is read."""
    from PIL import Image

    dicom = _as_dicom(path)
    if dicom is None:
        with Image.open(path, formats=FORMATS) as image:  # Pillow says of TIFFs what they are once they are turned
            turned = image.getexif().get(ORIENTATION, 1) in SIDEWAYS and image.format != "TIFF"
            aspect = _aspect_of_pil(image)
            return ((image.width, image.height), 1 / aspect) if turned else ((image.height, image.width), aspect)
    header = _header(dicom)
    return (int(header.Rows), int(header.Columns)), _aspect_of_dicom(header)


def _of_memory(film: Any, colour: bool) -> _Values:
    if isinstance(film, np.ndarray):
        return _of_array(film, colour)
    kind = type(film).__mro__
    if any(base.__module__.startswith("pydicom.") for base in kind):
        return _read_dicom(_as_file(film), True, colour)
    if any(base.__module__.startswith("PIL.") for base in kind):
        _check_header(film.width, film.height, _frames(film))
        return _of_pil(_upright(film), colour, invert=_white_is_zero(film))
    raise UnreadableImageError("unsupported kind of image", f"{type(film).__name__}")


def _of_array(pixels: np.ndarray, colour: bool) -> _Values:
    coloured = pixels.ndim == 3 and pixels.shape[2] == 3 and pixels.dtype == np.uint8
    if not (coloured or pixels.ndim == 2) or pixels.dtype.kind not in "uif":
        seen = f"{pixels.dtype} {list(pixels.shape)}, expected numbers [H, W], or uint8 [H, W, 3]"
        raise UnreadableImageError("unsupported kind of array", seen)
    _check_header(pixels.shape[1], pixels.shape[0], 1)
    pixels = _in_order(pixels)
    if coloured:
        from PIL import Image

        return _of_pil(Image.fromarray(pixels), colour)
    return _Values(pixels, pixels.shape)


def _as_file(dataset: Any) -> BytesIO:
    """A DICOM file in memory with the tags that pixels depend on, and nothing about the patient."""
    from pydicom import Dataset, dcmwrite
    from pydicom.dataset import FileMetaDataset

    film, buffer = Dataset(), BytesIO()
    unreadable = _unreadable(dataset)
    for tag in (*DICOM_TAGS, "PixelData"):
        if tag in dataset and tag not in unreadable:
            film[tag] = dataset.get_item(tag)  # as it was read: a value that is no number is still to be told
    film.preamble, film.file_meta = bytes(128), FileMetaDataset()
    film.file_meta.TransferSyntaxUID = _syntax_of(dataset)
    dcmwrite(buffer, film)
    return buffer


def _syntax_of(dataset: Any) -> Any:
    """A dataset's transfer syntax; of one without a meta header, how pydicom read it."""
    from pydicom.uid import ExplicitVRBigEndian, ExplicitVRLittleEndian, ImplicitVRLittleEndian

    named = getattr(dataset, "file_meta", {}).get("TransferSyntaxUID")
    implicit, little = dataset.original_encoding
    if named or implicit:
        return named or ImplicitVRLittleEndian
    return ExplicitVRBigEndian if little is False else ExplicitVRLittleEndian


def _finished(image: _Values, longest: int | None, colour: bool) -> np.ndarray:
    """float32 [h, w], or [h, w, 3], in 0..255: the values' grey levels, resized.

    Grey ones that are wanted in ``colour`` come three times.
    """
    values = image.values
    if _is_cut_off(values):
        raise UnreadableImageError("incomplete image")
    if values.itemsize > 2:  # float32 has no room for a large offset
        values = values.astype(np.float64) - values.min()
    pixels = np.array(values, dtype=np.float32, order="C")
    black, bright = _ends(pixels, image)
    pixels -= np.float32(black)
    pixels *= np.float32(BRIGHT_LEVEL / (bright - black))
    np.clip(pixels, 0, 255, out=pixels)
    if image.padding is not None:
        pixels[image.padding] = 0
    whole = _with_square_pixels(image.shape, image.aspect)
    if longest is not None or whole != image.shape:
        pixels = _by_area(pixels, image.shape, whole if longest is None else _fitted(whole, longest))
    return np.repeat(pixels[:, :, None], 3, axis=2) if colour and pixels.ndim == 2 else pixels


def _is_cut_off(values: np.ndarray) -> bool:
    """Whether ``LOST`` of the rows, the last ones, hold one value, and not half as many of the first ones do.

    A transfer that broke off leaves that: rows are stored from above. Shutters are on both sides, a margin is smaller.
    """
    plane = values if values.ndim == 2 else values[..., 0]
    below, above = _even_rows(plane[::-1]), _even_rows(plane)
    return LOST * len(plane) <= below < len(plane) and above <= below / 2


def _even_rows(rows: np.ndarray) -> int:
    """Return how many rows from the first one on hold the value of the first pixel alone."""
    if rows[0].min() != rows[0].max():
        return 0
    return int(np.argmin(np.append((rows == rows[0, 0]).all(axis=1), False)))


def _with_square_pixels(shape: tuple[int, int], aspect: float) -> tuple[int, int]:
    """[H, W] of pixels ``aspect`` times as high as wide, when the longer side of a pixel becomes that of both."""
    height, width = shape
    return (round(height * aspect), width) if aspect > 1 else (height, round(width / aspect))


def _aspect(height: Any, width: Any) -> float:
    """Return height / width of a pixel, 1 where they are as good as equal, unusable or far apart."""
    try:
        aspect = float(height) / float(width)
    except (TypeError, ValueError, ZeroDivisionError):
        return 1.0
    odd = not 1 / MOST_OBLONG <= aspect <= MOST_OBLONG
    return 1.0 if odd or abs(aspect - 1) < SQUARE else aspect


def _aspect_of_dicom(header: Any) -> float:
    """Of the first spacing that a header has: each is the height of a pixel, then its width."""
    sides = next((np.atleast_1d(header[tag].value) for tag in SPACINGS if header.get(tag)), (1, 1))
    return _aspect(*sides) if len(sides) == 2 else 1.0


def _aspect_of_pil(image: Any) -> float:
    """Of the pixels in an inch to the right and downwards; a JPEG may name their ratio alone."""
    unit_free = image.info.get("jfif_density") if image.info.get("jfif_unit") == 0 else None
    return _aspect(*(image.info.get("dpi") or unit_free or (1, 1))[:2])


def _ends(pixels: np.ndarray, image: _Values) -> tuple[float, float]:
    """The values of the image that become 0 and ``BRIGHT_LEVEL``, in colour of its luminance.

    They are its percentiles ``BLACK`` and ``BRIGHT`` without padding and border; where these are equal, of all but
    padding, or the range. Refuses an image whose pixels are all equal, and one with pixels that are no numbers.
    """
    reference = _fitted(image.shape, min(REFERENCE, max(image.shape)))
    seen = _by_area(pixels, image.shape, reference)
    if not np.isfinite(seen).all():
        raise UnreadableImageError("corrupt image")
    if seen.ndim == 3:
        seen = seen @ np.array(LUMINANCE, dtype=np.float32)
    inside = np.ones(reference, dtype=bool)
    if image.padding is not None:
        inside = _by_area(image.padding.astype(np.float32), image.shape, reference) == 0
    film, ends = seen[inside], (BLACK, BRIGHT)
    for chosen, shares in ((seen[inside & ~_border(seen, inside)], ends), (film, ends), (film, (0, 100))):
        percentiles = np.subtract(100, shares) if image.invert else shares
        black, bright = np.percentile(chosen, percentiles).tolist() if chosen.size else (0, 0)
        if black != bright:
            return black, bright
    raise UnreadableImageError("constant image")


def _border(seen: np.ndarray, inside: np.ndarray) -> np.ndarray:
    """Bool [h, w]: rows and columns of one value, but for a few pixels, and those beside them, which are part border.

    "One value" is within ``EVEN`` of the range of the pixels ``inside`` (bool [h, w]), as a JPEG's are; only these
    pixels count.
    """
    border, percentile = np.zeros(seen.shape, dtype=bool), np.percentile if inside.all() else np.nanpercentile
    film = np.where(inside, seen, np.nan)
    even = EVEN * np.ptp(percentile(film, (1, 99)))
    for lines, of_lines in ((film, border), (film.T, border.T)):
        flat = np.ptp(percentile(lines, (2, 98), axis=1), axis=0) <= even
        of_lines[flat | np.append(flat[1:], False) | np.insert(flat[:-1], 0, False)] = True
    return border


def _in_order(values: np.ndarray) -> np.ndarray:
    """The same numbers in this machine's byte order: OpenCV reads the bytes of others as if they were in it."""
    return values.astype(values.dtype.newbyteorder("="), copy=False)


def _range(values: np.ndarray, padding: np.ndarray | None = None) -> tuple[float, float]:
    """The least and the greatest value, but for ``padding`` (bool, of one shape with it); nan where any value is nan.

    Both are 0 where all is padding.
    """
    import cv2

    if values.dtype.kind == "f":
        return float(values.min()), float(values.max())
    within = None if padding is None else (~padding).view(np.uint8)
    return cv2.minMaxLoc(np.asarray(values).reshape(len(values), -1), within)[:2]  # one pass


def _fitted(shape: tuple[int, int], longest: int) -> tuple[int, int]:
    """[h, w] of the same proportions whose longer side is ``longest``."""
    return tuple(max(1, round(side * longest / max(shape))) for side in shape)  # type: ignore[return-value]


def _by_area(pixels: np.ndarray, full: tuple[int, int], shape: tuple[int, int]) -> np.ndarray:
    """Resized to ``shape`` [h, w]: each pixel is the mean of the area that it covers, in fractions of pixels.

    ``full`` is the size of the file, of which ``pixels`` may be a reduction by 2, 4 or 8. The last row and column of a
    reduction may reach beyond the edges of the file; that area is left out, so that nothing is displaced.
    """
    import cv2

    factor = 2 ** round(np.log2(max(full) / max(pixels.shape[:2])))
    if full == tuple(factor * side for side in pixels.shape[:2]):
        whole = pixels if factor == 1 else pixels.astype(np.float32)
        return cv2.resize(whole, shape[::-1], interpolation=cv2.INTER_AREA)
    sums = cv2.integral(
        pixels, sdepth=cv2.CV_64F
    )  # [h + 1, w + 1, ...]; between whole pixels it is linear in each side
    for axis in (0, 1):
        sums = _between(sums, np.linspace(0, full[axis] / factor, shape[axis] + 1), axis)
    area = (full[0] / factor / shape[0]) * (full[1] / factor / shape[1])
    return (np.diff(np.diff(sums, axis=0), axis=1) / area).astype(np.float32)


def _between(values: np.ndarray, positions: np.ndarray, axis: int) -> np.ndarray:
    """``values`` [H, W] or [H, W, 3] at fractional ``positions`` along an axis, linear between neighbours."""
    below = np.minimum(positions.astype(int), values.shape[axis] - 2)
    fraction = (positions - below).reshape([-1 if of == axis else 1 for of in range(values.ndim)])
    lower = values.take(below, axis)
    return lower + fraction * (values.take(below + 1, axis) - lower)


def _check_header(width: int, height: int, frames: int) -> None:
    """Refuses several frames, too many pixels, sides below 8 pixels and sides of more than 8 to 1."""
    if frames > 1:
        raise UnreadableImageError("multi-frame image", f"{frames} frames")
    if width * height > MAX_PIXELS:
        raise UnreadableImageError("image too large", f"{width} x {height} pixels, at most {MAX_PIXELS}")
    if min(width, height) < 8 or max(width, height) > 8 * min(width, height):
        raise UnreadableImageError("unsupported image shape", f"{width} x {height} pixels")


def _read_pil(path: Path, longest: int | None, colour: bool) -> _Values:
    from PIL import Image, UnidentifiedImageError

    _know_deep_tiffs()
    try:
        # an open file, and no path, which Pillow maps: of a TIFF that lies on its side it takes the wrong rows then
        with path.open("rb") as file, Image.open(file, formats=FORMATS) as image:
            shape = (image.height, image.width)
            _check_header(image.width, image.height, _frames(image))
            stored = f"{image.format}, {_bits_and_colours(image)}"  # before a draft, which may be grey
            aspect = _aspect_of_pil(image)
            if _needs_opencv(image):
                return replace(_of_opencv(path, image, colour), aspect=aspect, stored=stored)
            upright = _upright(image)
            if upright is image and longest is not None:
                mode = "RGB" if colour else "L"
                image.draft(mode, _fitted(shape, max(longest, REFERENCE))[::-1])  # a JPEG is reduced by its inverse DCT
            else:
                shape = (upright.height, upright.width)
                aspect = 1 / aspect if image.getexif().get(ORIENTATION, 1) in SIDEWAYS else aspect
            return replace(_of_pil(upright, colour, shape, _white_is_zero(image)), aspect=aspect, stored=stored)
    except Image.DecompressionBombError:
        raise UnreadableImageError("image too large") from None
    except UnidentifiedImageError:
        raise UnreadableImageError("unsupported image format") from None


def _needs_opencv(image: Any) -> bool:
    """Whether Pillow reads an image wrongly: it cuts colours of 16 bits to 8, and some TIFFs' bits are reversed."""
    return _is_deep_colour(image) or (image.format == "TIFF" and _low_bit_is_first(image))


def _is_deep_colour(image: Any) -> bool:
    """Whether a PIL image has more than 8 bits a colour, of which Pillow keeps 8."""
    if image.format == "PNG":
        return image.mode in COLOURS and any(str(tile[3]).endswith(";16B") for tile in image.tile)
    return image.format == "TIFF" and image.mode in COLOURS and max(image.tag_v2.get(BITS_PER_SAMPLE, (8,))) > 8


def _low_bit_is_first(image: Any) -> bool:
    """Whether a PIL image of a TIFF says so of pixels of whole bytes, of which nobody knows what it means."""
    return image.tag_v2.get(FILL_ORDER) == LOW_BIT_FIRST and max(image.tag_v2.get(BITS_PER_SAMPLE, (1,))) >= 8


def _of_opencv(path: Path, image: Any, colour: bool) -> _Values:
    """The values of a file that Pillow would read wrongly; ``image`` is what Pillow knows of its header."""
    import cv2

    read = cv2.imdecode(np.fromfile(path, dtype=np.uint8), cv2.IMREAD_UNCHANGED | cv2.IMREAD_IGNORE_ORIENTATION)
    if read is None or read.shape[:2] != (image.height, image.width):
        raise UnreadableImageError("needs another decoder")
    if image.format == "TIFF" and _low_bit_is_first(image):
        read = _smoother(read, _BITS_REVERSED[np.ascontiguousarray(read).view(np.uint8)].view(read.dtype))
    if read.ndim == 3:
        read = read[..., 2::-1].astype(np.float32)  # OpenCV has blue first, and transparency last
        read = read if colour else read @ np.array(LUMINANCE, dtype=np.float32)
    return _Values(read, read.shape[:2], _white_is_zero(image))


_BITS_REVERSED = np.packbits(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)[:, ::-1], axis=1)[:, 0]


def _smoother(values: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return the one of two readings whose neighbouring pixels differ less.

    Of pixels of 8 bits and more some writers mean by "low bit first" that the bits of each byte are in that order, and
    others nothing. In the wrong one neighbours are as unlike as any two pixels.
    """
    return min(values, others, key=lambda read: float(np.abs(np.diff(read.astype(np.float64), axis=1)).sum()))


def _bits_and_colours(image: Any) -> str:
    """Of a PIL image."""
    bits = {"1": 1, "I": 32, "F": 32}.get(
        image.mode, 16 if image.mode.startswith("I;16") or _is_deep_colour(image) else 8
    )
    kinds = {"P": "palette", "CMYK": "CMYK", "LA": "grey with alpha", "RGBA": "colour with alpha"}
    kind = kinds.get(image.mode, "grey" if image.mode[0] in "1LIF" else "colour")
    return f"{bits} bits, {'white is 0' if _white_is_zero(image) else kind}"


def _know_deep_tiffs() -> None:
    """Pillow has some TIFFs of more than 8 bits only where black is zero. Where white is, the bytes are alike."""
    from PIL.TiffImagePlugin import OPEN_INFO

    for (order, photometric, form, fill, bits, extra), mode in list(OPEN_INFO.items()):
        if photometric == 1 - WHITE_IS_ZERO and bits in ((12,), (16,), (32,)):
            OPEN_INFO.setdefault((order, WHITE_IS_ZERO, form, fill, bits, extra), mode)


def _frames(image: Any) -> int:
    """How many there are of a PIL image. The second one in a JPEG of a phone (MPO) is a preview, or another lens's."""
    return 1 if image.format == "MPO" else getattr(image, "n_frames", 1)


def _white_is_zero(image: Any) -> bool:
    """Whether a PIL image is of a TIFF whose least value is white. PIL itself inverts those of at most 8 bits."""
    return getattr(image, "tag_v2", {}).get(PHOTOMETRIC) == WHITE_IS_ZERO


def _upright(image: Any) -> Any:
    """A PIL image turned as its EXIF tag says; the very same one where it is upright."""
    from PIL import ImageOps

    return ImageOps.exif_transpose(image) if image.getexif().get(ORIENTATION, 1) != 1 else image


def _of_pil(image: Any, colour: bool, shape: tuple[int, int] | None = None, invert: bool = False) -> _Values:
    """The values of a PIL image; ``shape`` is that of its file, where it was decoded at reduced size.

    ``invert``: those of more than 8 bits are stored with white as 0.
    """
    shape = shape or (image.height, image.width)
    if image.mode[0] in "IF":  # more than 8 bits
        return _Values(_in_order(np.asarray(image)), shape, invert)
    return _Values(np.asarray(image.convert("RGB" if colour else "L")), shape)


def _read_dicom(source: Path | BytesIO, burned_in: bool, colour: bool) -> _Values:
    header = _header(source)
    _check_header(int(header.Columns), int(header.Rows), int(header.get("NumberOfFrames") or 1))
    if not burned_in and str(header.get("BurnedInAnnotation", "")).upper().startswith("Y"):
        raise UnreadableImageError("burned-in annotation")
    coloured = header.PhotometricInterpretation not in ("MONOCHROME1", "MONOCHROME2")
    if int(header.BitsAllocated) not in (8, 16) or (coloured and header.PhotometricInterpretation == "PALETTE COLOR"):
        raise UnreadableImageError("unsupported image format")
    shape = (int(header.Rows), int(header.Columns))
    aspect = _aspect_of_dicom(header)
    kind = f"DICOM, {header.BitsStored} bits, {'colour' if coloured else header.PhotometricInterpretation}"
    if coloured:
        stored = _decoded(source)  # RGB [H, W, 3]
        if stored.dtype != np.uint8 or stored.ndim != 3:
            raise UnreadableImageError("unsupported image format")
        if colour:
            return _Values(stored, shape, aspect=aspect, stored=kind)
        grey = stored.astype(np.float32) @ np.array(LUMINANCE, dtype=np.float32)
        return _Values(grey, shape, aspect=aspect, stored=kind)
    if header.file_meta.TransferSyntaxUID == JPEG_EXTENDED and int(header.BitsStored) > 8:
        raise UnreadableImageError("needs another decoder", "JPEG Extended of 12 bits")
    native = _native(source, header)
    stored = _decoded(source) if native is None else native
    padding = _padding(stored, header)
    limits = _range(stored, padding)
    if native is not None and not _fits_bits(limits, header):
        stored = _of_bits(native, _decoded(source), header)
        limits = _range(stored, padding)
    # MONOCHROME1 has to come with the shape INVERSE, and means the same: together they invert once
    inverse = str(header.get("PresentationLUTShape", "")).strip().upper() == "INVERSE"
    inverted = header.PhotometricInterpretation == "MONOCHROME1" or inverse
    values = _presented(stored, limits, header)
    return _Values(values, shape, inverted, padding, aspect, kind + UNUSABLE * header.unusable)


def _header(source: Path | BytesIO) -> Any:
    """The tags that pixels depend on, completed. Refuses what is no image, before anything is decoded."""
    from pydicom import dcmread

    _check_syntax(_syntax(source))
    header = dcmread(_from_start(source), stop_before_pixels=True, specific_tags=list(DICOM_TAGS))
    if header.get("Rows") and header.get("Columns"):
        return _completed(header)
    pixels = dcmread(_from_start(source), defer_size=1024, specific_tags=["PixelData"])
    raise UnreadableImageError("corrupt image" if "PixelData" in pixels else "no image")


def _completed(header: Any) -> Any:
    """``header`` without values that cannot be read, and with those that devices leave out because one is usual."""
    unreadable = _unreadable(header)
    header.unusable = not unreadable.isdisjoint((*RESCALE, *WINDOW))  # an attribute of ours, and no tag
    for tag in unreadable.intersection(header.dir()):
        del header[tag]

    def missing(tag: str, usual: Any) -> None:
        if header.get(tag) is None or header.get(tag) == "":
            setattr(header, tag, usual)

    if header.get("PhotometricInterpretation"):
        header.PhotometricInterpretation = str(header.PhotometricInterpretation).strip().upper()
    missing("SamplesPerPixel", 3 if str(header.get("PhotometricInterpretation"))[:3] in ("RGB", "YBR") else 1)
    missing("PhotometricInterpretation", "MONOCHROME2" if header.SamplesPerPixel == 1 else "RGB")
    # some devices name one kind of image and store the other; how many samples there are decides
    grey = header.PhotometricInterpretation in ("MONOCHROME1", "MONOCHROME2")
    if header.SamplesPerPixel == 3 and grey:
        header.PhotometricInterpretation = "RGB"
    elif header.SamplesPerPixel == 1 and not grey and header.PhotometricInterpretation != "PALETTE COLOR":
        header.PhotometricInterpretation = "MONOCHROME2"
    missing("PlanarConfiguration", 0)
    missing("BitsAllocated", 8 if (header.get("BitsStored") or 16) <= 8 else 16)
    missing("BitsStored", header.BitsAllocated)
    missing("HighBit", header.BitsStored - 1)
    missing("PixelRepresentation", 0)
    missing("RescaleSlope", 1)
    missing("RescaleIntercept", 0)
    return header


def _unreadable(header: Any) -> set[str]:
    """Tags to go without: those that cannot be read, and with a rescale the window, which is in its units."""
    unreadable = {tag for tag in DICOM_TAGS if not _is_readable(header, tag)}
    if unreadable.intersection(RESCALE):
        unreadable.update(WINDOW)
    return unreadable


def _is_readable(header: Any, tag: str) -> bool:
    """Whether pydicom makes something of a tag's bytes: not of a decimal comma, for one."""
    try:
        header.get(tag)
    except Exception:  # any, of damaged values
        return False
    return True


def _padding(stored: np.ndarray, header: Any) -> np.ndarray | None:
    """Bool [H, W]: pixels that are no part of the image, as the header says; None where there are none.

    They have PixelPaddingValue, or a value from there to PixelPaddingRangeLimit.
    """
    if header.get("PixelPaddingValue") is None:
        return None
    ends = [header.PixelPaddingValue, header.get("PixelPaddingRangeLimit")]
    given = [end for end in ends if end is not None]
    low, high = np.sort(np.array(given).astype(stored.dtype))[[0, -1]]  # signed or not, as the pixels are
    padding = (stored >= low) & (stored <= high)
    return padding if padding.any() else None


def _from_start(source: Path | BytesIO) -> Path | BytesIO:
    if isinstance(source, BytesIO):
        source.seek(0)
    return source


def _syntax(source: Path | BytesIO) -> Any:
    """The transfer syntax, before anything else is read: a deflated file inflates while its header is read."""
    from pydicom.filereader import read_dataset, read_file_meta_info

    if isinstance(source, Path):
        return read_file_meta_info(source).get("TransferSyntaxUID")
    source.seek(132)
    return read_dataset(source, False, True, stop_when=lambda tag, *_: tag >> 16 != 2).get("TransferSyntaxUID")


def _decoded(source: Path | BytesIO) -> np.ndarray:
    """Stored values [H, W], or [H, W, 3], as pydicom decodes them."""
    from pydicom import dcmread
    from pydicom.pixels import pixel_array

    data = dcmread(_from_start(source), specific_tags=[*DICOM_TAGS, "PixelData"])
    if not data.get("PixelData"):
        raise UnreadableImageError("no pixel data")
    stored = pixel_array(_completed(data))
    return _in_order(stored)


def _native(source: Path | BytesIO, header: Any) -> np.ndarray | None:
    """Stored values [H, W] of an uncompressed little-endian file, mapped and not read; None for any other file."""
    from pydicom import dcmread
    from pydicom.uid import ExplicitVRLittleEndian, ImplicitVRLittleEndian

    native = header.file_meta.TransferSyntaxUID in (ExplicitVRLittleEndian, ImplicitVRLittleEndian)
    if not native or header.SamplesPerPixel != 1:
        return None
    data = dcmread(_from_start(source), defer_size=1024, specific_tags=["PixelData"]).get_item(
        "PixelData", keep_deferred=True
    )
    if data is None or not data.length:
        raise UnreadableImageError("no pixel data")
    signed, size = header.PixelRepresentation == 1, int(header.BitsAllocated) // 8
    length = int(header.Rows) * int(header.Columns) * size
    if data.length != length + length % 2:
        return None
    shape = (int(header.Rows), int(header.Columns))
    kind = np.dtype(f"<{'i' if signed else 'u'}{size}")
    if isinstance(source, BytesIO):
        return np.frombuffer(source.getbuffer(), kind, shape[0] * shape[1], data.value_tell).reshape(shape)
    return np.memmap(source, kind, "r", data.value_tell, shape)


def _fits_bits(limits: tuple[float, float], header: Any) -> bool:
    """Whether values from ``limits[0]`` to ``limits[1]`` fit into BitsStored; values that do not have to be masked."""
    least = -(2 ** (header.BitsStored - 1)) if header.PixelRepresentation == 1 else 0
    return least <= limits[0] and limits[1] < least + 2**header.BitsStored


def _of_bits(native: np.ndarray, masked: np.ndarray, header: Any) -> np.ndarray:
    """The pixels of an image whose values need more bits than the header says that they have; ``masked`` has no more.

    Those are right where the others hold an overlay, or no sign. Where they carry, the header is wrong: from a pixel to
    the next the lower bits begin anew when the upper ones go up by one. By HighBit the values are the upper bits then.
    """
    bits = int(header.BitsStored)
    upper, lower = np.diff(native.astype(np.int32) >> bits), np.diff(masked.astype(np.int32))
    step = np.abs(upper) == 1
    carried = -float((lower * upper)[step].mean()) / 2**bits if step.any() else 0.0
    if header.PixelRepresentation == 1 or carried < CARRY:
        return masked
    return _in_order(np.asarray(native)) >> max(0, int(header.HighBit) + 1 - bits)


def _presented(stored: np.ndarray, limits: tuple[float, float], header: Any) -> np.ndarray:
    """Values [H, W] after modality LUT and VOI window, up to scale; ``stored`` itself where these change nothing.

    Both depend on a pixel's stored value alone, so they are applied once to every value of the range and then looked
    up. The result uses 16 bits from its least to its greatest value.
    """
    import cv2

    low, high = map(int, limits)
    levels = np.arange(low, high + 1).astype(stored.dtype)
    shown = _shown(levels, header)
    if np.allclose(shown, levels, atol=0.5 if stored.dtype == np.uint8 else 0, rtol=0):
        return stored
    bits = f"u{stored.itemsize}"  # signed values are looked up by their bits
    table = np.zeros(2 ** (8 * stored.itemsize), dtype=np.uint16)
    table[levels.view(bits)] = np.round((shown - shown.min()) * (65535 / (shown.max() - shown.min())))
    return cv2.LUT(np.asarray(stored).view(bits), table)


def _shown(levels: np.ndarray, header: Any) -> np.ndarray:
    """What a screen shows of each of the stored values ``levels``. A step that cannot be applied is left out."""
    from pydicom.pixels import apply_modality_lut

    sensed = _applied(apply_modality_lut, levels, header, ("ModalityLUTSequence",))
    if sensed is None:
        return levels  # and no window, which is in the units of the rescale
    shown = _applied(_voi_applied, sensed, header, ("VOILUTSequence", "VOILUTFunction"))
    return sensed if shown is None else shown


def _voi_applied(values: np.ndarray, header: Any) -> np.ndarray:
    """pydicom's ``apply_voi_lut``, which numbers the entries of a table with as many bits as an entry has.

    So entries of 8 bits, whether each has a byte or two, get 16.
    """
    from pydicom.pixels import apply_voi_lut

    for item in header.get("VOILUTSequence") or ():
        count, first, bits = item.LUTDescriptor
        if bits == 8:
            item.LUTDescriptor = [count, first, 16]
            if isinstance(item.LUTData, bytes) and len(item.LUTData) < 2 * (count or 2**16):
                item.add_new("LUTData", "US", list(item.LUTData))
    return apply_voi_lut(values, header)


def _applied(
    step: Callable[[np.ndarray, Any], np.ndarray], values: np.ndarray, header: Any, first: tuple[str, ...]
) -> np.ndarray | None:
    """``values`` after a ``step`` of pydicom; while that fails, or makes all equal, without the tags ``first``.

    None where it fails without them, too: its numbers are missing, unlike in count, not finite or out of range.
    """
    for tag in (*first, None):
        try:
            shown = np.asarray(step(values, header), dtype=np.float64)
        except Exception:  # any, of tags that nobody has checked
            shown = np.full_like(values, np.nan, dtype=np.float64)
        if shown.shape == values.shape and np.isfinite(shown).all() and (np.ptp(shown) > 0 or np.ptp(values) == 0):
            return shown
        header.unusable = True
        if tag is not None and tag in header:
            del header[tag]
    return None


def decoders() -> list[str]:
    """Which DICOM files can be decoded here, and by what."""
    try:
        from pydicom.pixels import get_decoder
        from pydicom.uid import AllTransferSyntaxes
    except ImportError:
        return []
    known = ["pydicom"]
    for uid in AllTransferSyntaxes:
        try:
            known += [f"{uid} {name}" for name in get_decoder(uid).available_plugins]
        except NotImplementedError:
            continue
    return known


def _check_syntax(uid: Any) -> None:
    """Refuses a transfer syntax that cannot be decoded, or not here, and deflated files."""
    from pydicom.pixels import get_decoder
    from pydicom.uid import DeflatedExplicitVRLittleEndian, ExplicitVRBigEndian, ExplicitVRLittleEndian
    from pydicom.uid import ImplicitVRLittleEndian as ImplicitVR

    if uid in (ExplicitVRLittleEndian, ExplicitVRBigEndian, ImplicitVR):
        return
    try:
        if uid is not None and uid != DeflatedExplicitVRLittleEndian:
            if get_decoder(uid).is_available:
                return
            raise UnreadableImageError("needs another decoder")
    except NotImplementedError:
        pass
    raise UnreadableImageError("unsupported transfer syntax")  # deflated ones inflate without bound, header and all
