"""Reading radiographs: what is shown, what is refused and why, and the crops of a batch."""

from __future__ import annotations

import errno
import os
import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.film_files import dicom

from fedvlp.data import radiograph
from fedvlp.data.images import decode, decoding, square
from fedvlp.data.loader import eval_batch, train_batch
from fedvlp.data.radiograph import ImageAccessError, UnreadableImageError, read_film, read_radiograph

Image = pytest.importorskip("PIL.Image")
DICOMS = Path(__file__).parents[2].parent / "shared" / "data" / "real-tables" / "dicom"


def ramp(height: int = 40, width: int = 40, top: int = 255, dtype: type = np.uint8) -> np.ndarray:
    """Brighter to the right and downwards."""
    return (top * np.add.outer(np.linspace(0, 0.5, height), np.linspace(0, 0.5, width))).astype(dtype)


def png(path: Path, pixels: np.ndarray) -> Path:
    Image.fromarray(pixels).save(path)
    return path


def levels(values: np.ndarray, seen: np.ndarray | None = None) -> np.ndarray:
    """Grey levels of ``values``, by percentiles of those ``seen`` within a border, at no more than 256 pixels."""
    seen = np.asarray(values if seen is None else seen, dtype=np.float64)
    if seen.ndim == 2 and max(seen.shape) > 256:
        seen = by_area(seen, *(round(side * 256 / max(seen.shape)) for side in seen.shape))
    if seen.ndim == 2:
        film = seen[~radiograph._border(seen, np.ones(seen.shape, dtype=bool))]
        seen = film if film.size else seen
    low, high = np.percentile(seen, [0.1, 99])
    return np.clip((np.asarray(values, dtype=np.float64) - low) / (high - low) * 240, 0, 255)


def refusal(path: Path) -> str:
    with pytest.raises(UnreadableImageError) as caught:
        decode(path, 16)
    message = str(caught.value)
    assert path.name not in message
    assert str(path.parent) not in message
    assert "anary" not in message.lower()
    return caught.value.reason


def test_decode_resizes_the_longer_side_by_area_and_pads_the_shorter(tmp_path: Path) -> None:
    """40 x 20 pixels to 16: 16 x 8 pixels, each the mean of 2.5 x 2.5, with 4 columns of zeros on either side."""
    image = np.full((40, 20), 200, dtype=np.uint8)
    image[:20], image[0, 0], image[39, 0] = 100, 0, 0
    out = decode(png(tmp_path / "a.png", image), 16)
    assert out.shape == (16, 16)
    assert out.dtype == np.uint8
    assert not out[:, :4].any()
    assert not out[:, 12:].any()
    low = np.percentile(image, 0.1)  # of which the two dark pixels are a part
    assert (out[1:8, 4:12] == round(240 * (100 - low) / (200 - low))).all()
    assert (out[8:15, 4:12] == 240).all()


@pytest.mark.parametrize("kind", ["png", "jpeg", "reduced", "grey", "dicom", "deep"])
def test_in_colour_each_channel_is_what_it_would_be_alone(kind: str, tmp_path: Path) -> None:
    """Sides 157 x 131 to 40 or, of a JPEG that is decoded at an eighth of its size, to 12. Grey is three times grey."""
    grey = np.random.default_rng(0).integers(0, 256, (157, 131), dtype=np.uint8)
    if kind in ("jpeg", "reduced"):  # whose compression loses noise
        grey = ramp(157, 131)
    pixels = np.stack([grey, grey[::-1], 255 - grey], axis=2)
    path, longest = tmp_path / "a.png", 12 if kind == "reduced" else 40
    match kind:
        case "png":
            png(path, pixels)
        case "jpeg" | "reduced":
            path = path.with_suffix(".jpg")
            Image.fromarray(pixels).save(path, quality=95, subsampling=0)
        case "grey":
            png(path, grey)
        case "dicom":
            dicom(path, pixels.transpose(2, 0, 1).copy(), "RGB", SamplesPerPixel=3, PlanarConfiguration=1)
        case "deep":
            png(path, 257 * grey.astype(np.uint16))
    small = read_radiograph(path, longest, colour=True)
    assert small.shape == (longest, round(131 * longest / 157), 3)
    if kind in ("grey", "deep"):
        assert np.array_equal(small, np.repeat(read_radiograph(path, longest)[..., None], 3, axis=2))
        return
    full = read_radiograph(path, colour=True)
    off = 2 if kind in ("jpeg", "reduced") else 0.1
    for channel in range(3):
        assert np.abs(small[..., channel] - by_area(full[..., channel], *small.shape[:2])).max() < off
    luminance = pixels @ np.array([0.299, 0.587, 0.114])
    if kind in ("png", "dicom"):
        assert np.abs(full - levels(pixels, luminance)).max() < 0.01
    assert np.abs(levels(luminance) - read_radiograph(path)).max() < (12 if off == 2 else 2), "grey is its luminance"


def test_a_photograph_is_padded_and_cropped_with_its_channels(tmp_path: Path) -> None:
    """40 x 20 pixels of orange to 16: 8 columns of it between zeros, and 8 x 8 of it in the middle."""
    orange = np.broadcast_to(np.array([255, 128, 0], dtype=np.uint8), (40, 20, 3)).copy()
    orange[:2], orange[2:4], orange[39, 0] = 0, 255, 0
    photo = png(tmp_path / "a.png", orange)
    out = decode(photo, 16, False, True)
    assert out.shape == (16, 16, 3)
    assert out[8, 4].tolist() == [240, 120, 0], "in the range of its luminance, 0 to 255"
    assert not out[:, [0, 3, 12, 15]].any()
    for batch in (eval_batch, lambda x, size: train_batch(x, size, torch.Generator().manual_seed(0))):
        assert batch(torch.from_numpy(out)[None], 8).shape == (1, 3, 8, 8)
    middle = eval_batch(torch.from_numpy(out)[None], 8)
    assert middle[0, :, 0, 0].tolist() == pytest.approx([240 / 127.5 - 1, 120 / 127.5 - 1, -1], abs=1e-6)
    with pytest.raises(ValueError, match=r"expected uint8 \[B, S, S\] images, or \[B, S, S, 3\]"):
        eval_batch(torch.zeros(1, 16, 16, 4, dtype=torch.uint8), 8)


def by_area(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """Mean over the area that each of [height, width] pixels covers, parts of pixels as parts; float64."""

    def weights(n: int, m: int) -> np.ndarray:
        edge = np.arange(m + 1) * n / m
        left, right = np.maximum(edge[:-1, None], np.arange(n)), np.minimum(edge[1:, None], np.arange(1, n + 1))
        return np.clip(right - left, 0, None) * m / n  # [m, n], rows sum to 1

    return weights(pixels.shape[0], height) @ pixels.astype(np.float64) @ weights(pixels.shape[1], width).T


@pytest.mark.parametrize("kind", ["8-bit png", "16-bit png", "12-bit dicom", "signed", "10-bit", "window", "inverted"])
def test_a_resized_image_is_the_area_mean_of_the_full_one(kind: str, tmp_path: Path) -> None:
    """Sides 157 x 131 to 40: no whole ratio."""
    noise = np.random.default_rng(0).integers(0, 4096, (157, 131)).astype(np.uint16)
    noise[0, 0], noise[0, 1] = 0, 4095
    path, window = tmp_path / "a", {"WindowCenter": 2000, "WindowWidth": 1001, "RescaleIntercept": -100}
    match kind:
        case "8-bit png":
            path = png(tmp_path / "a.png", (noise >> 4).astype(np.uint8))
        case "16-bit png":
            path = png(tmp_path / "a.png", noise)
        case "12-bit dicom":
            dicom(path, noise, bits=12)
        case "signed":
            dicom(
                path,
                (noise.astype(np.int16) - 2048),
                bits=16,
                PixelRepresentation=1,
                RescaleIntercept=1,
                RescaleSlope=2,
            )
        case "10-bit":
            dicom(path, noise >> 2, bits=10)
        case "window":
            dicom(path, noise, bits=12, RescaleSlope=1, **window)
        case "inverted":
            dicom(path, noise, "MONOCHROME1", bits=12)
    full = read_radiograph(path)
    assert full.min() == 0
    assert 239 < full.max() < 243
    small = read_radiograph(path, 40)
    assert small.shape == (40, 33)
    assert np.abs(small - by_area(full, 40, 33)).max() < 0.1 + 1e-3


def pydicom_says(path: Path) -> np.ndarray:
    """Grey levels of what pydicom's own decoding and look-up of every pixel give: the long way."""
    pydicom = pytest.importorskip("pydicom")
    from pydicom.pixels import apply_modality_lut, apply_voi_lut

    data = pydicom.dcmread(path)
    values = np.asarray(apply_voi_lut(apply_modality_lut(data.pixel_array, data), data), dtype=np.float64)
    return levels(-values if data.PhotometricInterpretation == "MONOCHROME1" else values)


def test_values_are_looked_up_as_pydicom_does_pixel_by_pixel(tmp_path: Path) -> None:
    """A modality table, a falling VOI table, a sigmoid, unused high bits that are set, negative values, big-endian."""
    pydicom = pytest.importorskip("pydicom")
    noise = np.random.default_rng(1).integers(0, 1024, (41, 37)).astype(np.uint16)
    noise[0, 0], noise[0, 1] = 0, 1023

    def lut(values: np.ndarray) -> pydicom.Sequence:
        item = pydicom.Dataset()
        item.LUTDescriptor, item.LUTData = [len(values), 0, 16], values.astype(np.uint16).tolist()
        item["LUTDescriptor"].VR, item["LUTData"].VR = "US", "US"
        return pydicom.Sequence([item])

    tables = np.sqrt(np.arange(1024)) * 2000, np.arange(1024)[::-1] * 60
    sigmoid = {"WindowCenter": 500, "WindowWidth": 300, "VOILUTFunction": "SIGMOID"}
    signed = {"RescaleIntercept": 3, "RescaleSlope": 2, "WindowCenter": 0, "WindowWidth": 400}
    files = [
        dicom(tmp_path / "modality", noise, bits=10, ModalityLUTSequence=lut(tables[0])),
        dicom(tmp_path / "voi", noise, bits=10, VOILUTSequence=lut(tables[1])),
        dicom(tmp_path / "sigmoid", noise, bits=10, **sigmoid),
        dicom(tmp_path / "inverted", noise, "MONOCHROME1", bits=10, **sigmoid),
        dicom(tmp_path / "high", noise | (noise[::-1] << 15), bits=10),
        dicom(tmp_path / "signed", noise.astype(np.int16) - 512, bits=10, PixelRepresentation=1, **signed),
        dicom(tmp_path / "eight", (noise >> 2).astype(np.uint8)),
    ]
    files.append(dicom(tmp_path / "big", noise.byteswap(), bits=10, syntax=pydicom.uid.ExplicitVRBigEndian, **sigmoid))
    for file in files:
        assert np.abs(read_radiograph(file) - pydicom_says(file)).max() < 0.02, file.name


def test_every_readable_file_of_pydicom_is_as_pydicom_says() -> None:
    """Its bundled test files: what we read is what the long way gives; nothing but our refusal is raised."""
    data = pytest.importorskip("pydicom.data")
    read = 0
    for name in sorted(map(str, Path(data.__file__).with_name("test_files").glob("*.dcm"))):
        try:
            ours = read_radiograph(Path(name))
        except UnreadableImageError:
            continue
        if ours.ndim == 2 and not name.endswith(("color3d.dcm",)) and "rgb" not in name.lower():
            theirs = pydicom_says(Path(name))
            if theirs.shape == ours.shape:
                read += 1
                assert np.abs(ours - theirs).max() <= 0.5, Path(name).name
    assert read >= 10


def test_the_real_dicom_files_are_as_pydicom_says() -> None:
    files = sorted(DICOMS.glob("*.dcm"))
    if len(files) < 2:
        pytest.skip("../shared/data/real-tables/dicom is absent")
    for file in files:
        assert np.abs(read_radiograph(file) - pydicom_says(file)).max() <= 0.5
        full = read_radiograph(file)
        small = read_radiograph(file, 64)
        assert np.abs(small - by_area(full, *small.shape)).max() <= 1


@pytest.mark.parametrize("orientation", [1, 6])
def test_a_jpeg_is_decoded_at_reduced_size_with_nearly_the_same_result(orientation: int, tmp_path: Path) -> None:
    """A smooth film of 1031 x 853 to 100 (reduced 8 times): within 3 grey levels of the mean over the full image."""
    y, x = np.mgrid[:1031, :853] / 100
    film = (128 + 60 * np.sin(3 * x) * np.cos(2 * y) + 40 * np.sin(x + 4 * y)).astype(np.uint8)
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(film).save(tmp_path / "a.jpg", quality=95, exif=exif)
    full, small = read_radiograph(tmp_path / "a.jpg"), read_radiograph(tmp_path / "a.jpg", 100)
    assert small.shape == ((100, 83) if orientation == 1 else (83, 100))
    assert np.abs(small - by_area(full, *small.shape)).max() < 3
    assert np.abs(small - by_area(full, *small.shape)).mean() < 1


def test_no_more_of_a_jpeg_is_decoded_than_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest eighth, quarter or half that is not below the size asked for, nor that of the percentiles."""
    sizes = []
    seen = radiograph._finished
    monkeypatch.setattr(
        radiograph, "_finished", lambda image, *how: sizes.append(image.values.shape) or seen(image, *how)
    )
    Image.fromarray(ramp(2400, 1600)).convert("RGB").save(tmp_path / "a.jpg")
    for longest in (100, 256, 301, 601, 1201, 2500, None):
        read_radiograph(tmp_path / "a.jpg", longest)
    assert [height for height, _ in sizes] == [300, 300, 600, 1200, 2400, 2400, 2400]


def test_a_jpeg_cut_short_is_refused_at_reduced_size_too(tmp_path: Path) -> None:
    """Bytes behind its end, as some archives leave them, do no harm."""
    Image.fromarray(ramp(800, 640)).save(tmp_path / "a.jpg")
    whole = (tmp_path / "a.jpg").read_bytes()
    (tmp_path / "padded.jpg").write_bytes(whole + b"\0\0archive")
    (tmp_path / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    expected = read_radiograph(tmp_path / "a.jpg", 100)
    assert np.array_equal(read_radiograph(tmp_path / "padded.jpg", 100), expected)
    with pytest.raises(UnreadableImageError, match="corrupt image"):
        read_radiograph(tmp_path / "cut.jpg", 100)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = dicom(tmp_path / "a.dcm", ramp())
    monkeypatch.setitem(__import__("sys").modules, "pydicom", None)
    with pytest.raises(UnreadableImageError, match="needs the package pydicom"):
        read_radiograph(path)


def test_a_broken_installation_is_no_property_of_a_film(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cv2", None)
    with pytest.raises(ModuleNotFoundError, match="cv2"):
        read_radiograph(png(tmp_path / "a.png", ramp()))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.EIO, "x", "canary.png"), rf"could not be read \({os.strerror(errno.EIO)}\); see that its disk"),
        (PermissionError(errno.EACCES, "x", "canary.png"), "this account may read its files"),
        (MemoryError("canary"), "for lack of memory; decode with fewer workers"),
    ],
)
def test_what_the_machine_is_to_blame_for_is_not_said_of_the_film(
    error: Exception, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decoder's own OSError has no number, and seeking where a damaged file points to is EINVAL."""
    path = png(tmp_path / "canary.png", ramp())

    def fails(kind: Exception) -> None:
        def of(*given: object) -> None:
            raise kind

        monkeypatch.setattr(radiograph, "_of_pil", of)

    fails(error)
    with pytest.raises(ImageAccessError, match=said) as caught:
        decode(path, 16)
    assert "canary" not in str(caught.value)
    for other in (OSError("broken data stream"), OSError(-2), OSError(errno.EINVAL, "Invalid argument")):
        fails(other)
        assert refusal(path) == "corrupt image"


def padded_films(kind: str, photometric: str, folder: Path) -> tuple[Path, Path]:
    """A film of 40 x 40, and the same between stripes of 5 columns that its header calls padding."""
    film = np.random.default_rng(3).integers(1500, 2500, (40, 40)).astype(np.uint16)
    limits = {}
    match kind:
        case "12 bits":
            tags, value, bits = {}, 0, 12
        case "window":
            tags, value, bits = {"WindowCenter": 2000, "WindowWidth": 501}, 0, 12
        case "16 bits":
            tags, value, bits = {}, 65535, 16
        case "range":
            tags, value, bits = {}, 3000, 12
            limits = {"PixelPaddingRangeLimit": 2900}
        case "beyond the bits":
            tags, value, bits = {}, 0xF830, 12
        case "signed":
            film = (film.astype(np.int32) - 2000).astype(np.int16)
            tags, value, bits = {"PixelRepresentation": 1}, -32768, 16
        case "8 bits":
            film = (film // 8 - 100).astype(np.uint8)
            tags, value, bits = {}, 255, 8
        case "8-bit window":
            film = (film // 8 - 100).astype(np.uint8)
            tags, value, bits = {"WindowCenter": 150, "WindowWidth": 81}, 255, 8
    stripes = np.full((40, 5), value).astype(film.dtype)
    if limits:
        stripes[::2] = 2950
    padded = np.hstack([stripes, film, stripes])
    plain = dicom(folder / "plain.dcm", film, photometric, bits=bits, **tags)
    return plain, dicom(
        folder / "padded.dcm", padded, photometric, bits=bits, PixelPaddingValue=value, **limits, **tags
    )


@pytest.mark.parametrize("photometric", ["MONOCHROME1", "MONOCHROME2"])
@pytest.mark.parametrize(
    "kind", ["12 bits", "window", "16 bits", "range", "beyond the bits", "signed", "8 bits", "8-bit window"]
)
def test_padding_is_black_and_changes_nothing_within_the_film(kind: str, photometric: str, tmp_path: Path) -> None:
    plain, padded = padded_films(kind, photometric, tmp_path)
    expected, seen = read_radiograph(plain), read_radiograph(padded)
    assert np.abs(seen[:, 5:-5] - expected).max() < 1e-3
    assert np.abs(np.hstack([seen[:, :5], seen[:, -5:]])).max() < 1e-3
    assert expected.std() > 20
    small = read_radiograph(padded, 25)
    assert np.abs(small - by_area(seen, *small.shape)).max() < 0.1 + 1e-3
    import pydicom

    assert np.array_equal(read_film(pydicom.dcmread(padded)), seen)


def test_a_film_that_is_padding_alone_is_constant_and_one_without_is_as_it_was(tmp_path: Path) -> None:
    image = ramp(top=4000, dtype=np.uint16)
    whole = read_radiograph(dicom(tmp_path / "a.dcm", image, bits=12))
    assert np.array_equal(read_radiograph(dicom(tmp_path / "b.dcm", image, bits=12, PixelPaddingValue=4095)), whole)
    empty = {"PixelPaddingValue": 0, "PixelPaddingRangeLimit": 4095}
    assert refusal(dicom(tmp_path / "c.dcm", image, bits=12, **empty)) == "constant image"


def tiff(path: Path, pixels: np.ndarray, photometric: int = 1, order: str = "<") -> Path:
    """A TIFF of one strip: Pillow writes none whose least value is white, and none in the other byte ``order``."""
    pixels = pixels.astype(pixels.dtype.newbyteorder(order))
    height, width = pixels.shape
    entries = [
        (256, 4, width), (257, 4, height), (258, 3, 8 * pixels.itemsize), (259, 3, 1), (262, 3, photometric),
        (273, 4, 8), (277, 3, 1), (278, 4, height), (279, 4, pixels.nbytes),
        (339, 3, "uif".index(pixels.dtype.kind) + 1),
    ]  # fmt: skip
    table = b"".join(
        struct.pack(f"{order}HHI", tag, kind, 1) + struct.pack(f"{order}{'HI'[kind - 3]}", value).ljust(4, b"\0")
        for tag, kind, value in entries
    )
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}I", 8 + pixels.nbytes)
    path.write_bytes(head + pixels.tobytes() + struct.pack(f"{order}H", len(entries)) + table + bytes(4))
    return path


def test_a_dicom_file_without_its_preamble_is_read(tmp_path: Path) -> None:
    """Not if it is deflated: its header would inflate without bound."""
    pydicom = pytest.importorskip("pydicom")
    whole = dicom(tmp_path / "whole.dcm", ramp(top=4095, dtype=np.uint16), bits=12)
    (tmp_path / "bare.dcm").write_bytes(whole.read_bytes()[132:])
    assert np.array_equal(read_radiograph(tmp_path / "bare.dcm"), read_radiograph(whole))
    data = pydicom.dcmread(whole)
    data.file_meta.TransferSyntaxUID = pydicom.uid.DeflatedExplicitVRLittleEndian
    data.save_as(tmp_path / "deflated.dcm", enforce_file_format=True)
    (tmp_path / "canary.dcm").write_bytes((tmp_path / "deflated.dcm").read_bytes()[132:])
    assert refusal(tmp_path / "canary.dcm") == "unsupported transfer syntax"


@pytest.mark.parametrize("syntax", ["ImplicitVRLittleEndian", "ExplicitVRLittleEndian", "ExplicitVRBigEndian"])
def test_a_dicom_file_without_its_meta_header_is_read(syntax: str, tmp_path: Path) -> None:
    """Or with one that names no transfer syntax; with and without a preamble, and in memory as pydicom reads it."""
    pydicom = pytest.importorskip("pydicom")
    image = ramp(top=4095, dtype=np.uint16)
    stored = image.byteswap() if syntax == "ExplicitVRBigEndian" else image
    whole = dicom(tmp_path / "whole.dcm", stored, bits=12, syntax=pydicom.uid.UID(getattr(pydicom.uid, syntax)))
    expected = read_radiograph(whole)
    assert np.abs(expected - levels(image)).max() < 0.01
    content = whole.read_bytes()
    data = content[132 + 12 + int.from_bytes(content[140:144], "little") :]  # after a header of the length it names
    version = b"\2\0\1\0OB\0\0\2\0\0\0\0\1"  # a meta header of one tag, without its own length
    for before in (b"", radiograph.PREAMBLE, version, radiograph.PREAMBLE + version):
        (tmp_path / "canary.dcm").write_bytes(before + data)
        assert np.array_equal(read_radiograph(tmp_path / "canary.dcm"), expected)
        assert radiograph.shape_of_file(tmp_path / "canary.dcm") == image.shape
    (tmp_path / "canary.dcm").write_bytes(data)
    assert np.array_equal(read_film(pydicom.dcmread(tmp_path / "canary.dcm", force=True)), expected)
    (tmp_path / "canary.dcm").write_bytes(data[:-500])
    assert refusal(tmp_path / "canary.dcm") == "corrupt image"


def test_the_first_image_of_a_phones_jpeg_is_the_film(tmp_path: Path) -> None:
    """Several frames of another format are refused."""
    first, second = Image.fromarray(ramp(80, 64)), Image.fromarray(ramp(80, 64)[::-1].copy())
    first.save(tmp_path / "one.jpg", quality=95)
    first.save(tmp_path / "phone.mpo", format="MPO", save_all=True, append_images=[second], quality=95)
    (tmp_path / "phone.mpo").rename(tmp_path / "phone.jpg")
    with Image.open(tmp_path / "phone.jpg") as opened:
        assert opened.n_frames == 2
        assert np.array_equal(read_film(opened), read_radiograph(tmp_path / "one.jpg"))
    for longest in (None, 20):
        one, phone = (read_radiograph(tmp_path / name, longest) for name in ("one.jpg", "phone.jpg"))
        assert np.array_equal(one, phone)
    Image.fromarray(ramp()).save(tmp_path / "pages.tif", save_all=True, append_images=[Image.fromarray(ramp())])
    assert refusal(tmp_path / "pages.tif") == "multi-frame image"


@pytest.mark.slow(seconds=3)
def test_a_monai_pipeline_begins_with_decoding(tmp_path: Path) -> None:
    """What it returns is what `decode` returns, and another transform follows; making it warns of nothing."""
    from monai.transforms import Compose, ScaleIntensity

    path = png(tmp_path / "a.png", ramp())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipeline = decoding(16)
    assert isinstance(pipeline, Compose)
    assert np.array_equal(pipeline(str(path)), decode(path, 16))
    scaled = np.asarray(Compose([pipeline, ScaleIntensity()])(path))
    assert (scaled.min(), scaled.max()) == (0, 1)


@pytest.mark.slow(seconds=3)  # MONAI takes seconds to import
@pytest.mark.parametrize("shape", [(16, 16), (16, 9), (10, 16), (16, 15), (1, 16), (16, 11, 3)])
def test_a_film_is_padded_as_monai_pads_it(shape: tuple[int, ...]) -> None:
    """Zeros on both sides; of an odd number, the larger half after the film."""
    from monai.transforms import SpatialPad

    image = np.random.default_rng(1).integers(1, 256, shape).astype(np.float32)
    planes = torch.from_numpy(image)[None] if image.ndim == 2 else torch.from_numpy(image).permute(2, 0, 1)
    padded = np.asarray(SpatialPad((16, 16))(planes))
    expected = padded[0] if image.ndim == 2 else np.moveaxis(padded, 0, 2)
    assert np.array_equal(square(image, 16), expected)


TYPES = {"png": "u1 u2", "tiff": "u1 u2 i2 i4 f4", "dicom": "u1 u2 i2", "memory": "u1 u2 u4 i2 i4 f4 f8"}
"""Container -> types of numbers that are read from it."""


@settings(max_examples=50, deadline=None)
@given(
    st.sampled_from([(container, kind) for container, kinds in TYPES.items() for kind in kinds.split()]),
    st.sampled_from("<>"),
    st.booleans(),
    st.sampled_from([None, 280, 64]),
    st.sampled_from([1, 2]),
    st.floats(0, 1),
    st.floats(0, 1),
)
@example(("tiff", "u2"), ">", True, None, 1, 0, 0)  # which Pillow does not know by itself
def test_the_same_numbers_have_the_same_grey_levels_in_every_file(
    tmp_path_factory: pytest.TempPathFactory,
    form: tuple[str, str],
    order: str,
    white: bool,
    longest: int | None,
    times: int,
    share: float,
    place: float,
) -> None:
    """Of any type, unit, offset and byte order; ``white``: the least is, as in MONOCHROME1."""
    container, kind = form
    path, dtype = tmp_path_factory.mktemp("film") / "film", np.dtype(kind)
    film = np.add.outer(np.arange(150), np.arange(120)) ** 2 // 60 % 201
    film = np.kron(film, np.ones((times, times), dtype=np.int64))
    least, most = (-60000, 60000) if dtype.kind == "f" else (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
    unit = max(1, int(share * ((most - least) // 200)))
    offset = least + int(place * (most - least - 200 * unit))
    white = white and container in ("tiff", "dicom")
    stored = (offset + unit * (200 - film if white else film)).astype(dtype)
    match container:
        case "png":
            png(path.with_suffix(".png"), stored).rename(path)
        case "tiff":
            tiff(path, stored, 0 if white else 1, order)
        case "dicom":
            syntax = ("ExplicitVRLittleEndian", "ExplicitVRBigEndian")[order == ">"]
            signed = {"PixelRepresentation": int(dtype.kind == "i")}
            raw, bits = stored if order == "<" else stored.byteswap(), 8 * dtype.itemsize
            uid = getattr(pytest.importorskip("pydicom").uid, syntax)
            dicom(path, raw, "MONOCHROME1" if white else "MONOCHROME2", bits, uid, **signed)
    seen = path if container != "memory" else stored.astype(dtype.newbyteorder(order))
    assert np.abs(read_film(seen, longest) - read_film(film.astype(np.uint8), longest)).max() <= 1
    assert np.abs(read_film(seen) - levels(film)).max() <= 1


@pytest.mark.parametrize("hot", [0, 65535])
@pytest.mark.parametrize("side", [40, 700])
def test_one_hot_or_dead_pixel_moves_no_other_grey_level(side: int, hot: int, tmp_path: Path) -> None:
    image = 1000 + ramp(side, side, top=3000, dtype=np.uint16)
    spoilt = image.copy()
    spoilt[side // 3, side // 2] = hot
    clean, seen = (read_radiograph(png(tmp_path / "a.png", pixels)) for pixels in (image, spoilt))
    assert seen[side // 3, side // 2] == (255 if hot else 0)
    seen[side // 3, side // 2] = clean[side // 3, side // 2]
    assert np.abs(seen - clean).max() < 1.5


def test_colour_becomes_grey_and_few_bright_pixels_are_enough(tmp_path: Path) -> None:
    """0.299 * 255 of red. Where both percentiles are equal, least and greatest are shown."""
    red = np.zeros((20, 20, 3), dtype=np.uint8)
    red[:10, :, 0] = 255
    assert set(np.unique(read_radiograph(png(tmp_path / "c.png", red)).round())) == {0.0, 240.0}
    few = np.zeros((100, 100), dtype=np.uint8)
    few[50, 50:54] = 9
    assert set(np.unique(read_radiograph(png(tmp_path / "few.png", few)).round())) == {0.0, 240.0}


def lut_of(entries: int, declared: int, bits: int = 16):
    """A falling table whose descriptor says that it has ``declared`` entries."""
    pydicom = pytest.importorskip("pydicom")
    item = pydicom.Dataset()
    item.LUTDescriptor = [declared, 0, bits]
    item.add_new("LUTData", "OW", (65535 - 15 * np.arange(entries, dtype=np.uint16)).astype("<u2").tobytes())
    item["LUTDescriptor"].VR = "US"
    return pydicom.Sequence([item])


UNUSABLE = {
    "empty rescale": {"RescaleSlope": None, "RescaleIntercept": None},
    "slope alone": {"RescaleSlope": 2},
    "slope 0": {"RescaleSlope": 0, "RescaleIntercept": 5, "WindowCenter": 100, "WindowWidth": 50},
    "slopes": {"RescaleSlope": [1, 2, 3], "RescaleIntercept": 0},
    "slope nan": {"RescaleSlope": b"nan ", "RescaleIntercept": 0},
    "slope comma": {"RescaleSlope": b"1,0 ", "RescaleIntercept": 0, "WindowCenter": 100, "WindowWidth": 50},
    "slope damaged": {"RescaleSlope": ("FL", b"ab"), "RescaleIntercept": 0, "WindowCenter": 100, "WindowWidth": 50},
    "slope words": {"RescaleSlope": b"NONE", "RescaleIntercept": b"NONE"},
    "width 0": {"WindowCenter": 0, "WindowWidth": 0},
    "width negative": {"WindowCenter": 2000, "WindowWidth": -400},
    "width nan": {"WindowCenter": 2000, "WindowWidth": b"nan "},
    "width inf": {"WindowCenter": 2000, "WindowWidth": b"inf "},
    "width comma": {"WindowCenter": b"2000,5", "WindowWidth": b"400,5 "},
    "width alone": {"WindowWidth": 400},
    "unlike counts": {"WindowCenter": [2000, 1], "WindowWidth": None},
    "beyond": {"WindowCenter": 9000, "WindowWidth": 2},
    "function": {"WindowCenter": 2048, "WindowWidth": 4096, "VOILUTFunction": "CUBIC"},
    "function empty": {"WindowCenter": 2048, "WindowWidth": 4096, "VOILUTFunction": None},
    "voi table short": lambda: {"VOILUTSequence": lut_of(4095, 4096)},
    "voi table bits": lambda: {"VOILUTSequence": lut_of(4096, 4096, 12345)},
    "voi table and window": lambda: {
        "VOILUTSequence": lut_of(4095, 4096), "WindowCenter": 2048, "WindowWidth": 4096,
    },
    "voi table empty": lambda: {"VOILUTSequence": lut_of(0, 4096)},
    "modality table short": lambda: {"ModalityLUTSequence": lut_of(4095, 4096)},
    "samples": {"SamplesPerPixel": None},
    "representation": {"PixelRepresentation": None},
    "bits": {"BitsStored": None, "HighBit": None},
    "allocated": {"BitsAllocated": None},
    "photometric": {"PhotometricInterpretation": None},
}  # fmt: skip


OVERLAY = (np.arange(40) // 10 % 2).astype(np.uint16)
"""In every second ten columns."""

BITS = {
    "upper bits": lambda film: (film << 4, 12, {"HighBit": 15, "WindowCenter": 2048, "WindowWidth": 4096}),
    "13 for 12": lambda film: (2 * film, 12, {}),
    "16 for 12": lambda film: (16 * film, 12, {}),
    "12 for 10": lambda film: (film, 10, {}),
    "overlay": lambda film: (film | OVERLAY << 12, 12, {}),
    "overlay in the sign": lambda film: (film | OVERLAY << 15, 12, {}),
    "no sign": lambda film: ((film.astype(np.int16) - 2048) & 0xFFF, 12, {"PixelRepresentation": 1}),
    "capitals": lambda film: (film, 12, {"PhotometricInterpretation": "Monochrome2"}),
}


def test_a_film_is_the_same_whatever_its_header_says_of_its_bits(tmp_path: Path) -> None:
    """In memory, too. What was wrong: bits above those that are said to be stored were always cut off."""
    for kind in BITS:
        for noise in [0, 40]:
            pydicom = pytest.importorskip("pydicom")
            film = ramp(top=3800, dtype=np.uint16) + np.random.default_rng(0).integers(0, noise + 1, (40, 40)).astype(
                np.uint16
            )
            stored, bits, tags = BITS[kind](film)
            path = dicom(tmp_path / "canary.dcm", stored, bits=bits, **tags)
            assert np.abs(read_radiograph(path) - levels(film)).max() < 0.1
            assert np.array_equal(read_film(pydicom.dcmread(path)), read_radiograph(path))


@pytest.mark.parametrize("packed", [False, True])
def test_a_window_that_is_a_table_of_bytes_is_applied(packed: bool, tmp_path: Path) -> None:
    """With a byte or two for each entry, of which there are more than 256."""
    tables = lut_of(4096, 4096, 8)
    entries = (255 - np.arange(4096) // 16).astype(np.uint8 if packed else "<u2")
    tables[0].add_new("LUTData", "OW", entries.tobytes())
    image = ramp(top=4095, dtype=np.uint16)
    shown = read_radiograph(dicom(tmp_path / "a.dcm", image, bits=12, VOILUTSequence=tables))
    assert np.abs(shown - levels(255 - image // 16)).max() < 0.1


def test_a_tiff_is_turned_as_its_tag_says(tmp_path: Path) -> None:
    film, way = ramp(40, 60), Image.Transpose
    ways = [
        None, way.FLIP_LEFT_RIGHT, way.ROTATE_180, way.FLIP_TOP_BOTTOM, way.TRANSPOSE, way.ROTATE_90, way.TRANSVERSE,
        way.ROTATE_270,
    ]  # fmt: skip
    expected = read_radiograph(png(tmp_path / "a.png", film))
    for orientation, turned in enumerate(ways, start=1):
        lies, exif = Image.fromarray(film), Image.Exif()
        exif[0x0112] = orientation
        lies = lies if turned is None else lies.transpose(turned)
        for compression in (None, "tiff_lzw"):
            lies.save(tmp_path / "a.tif", exif=exif, compression=compression)
            assert np.array_equal(read_radiograph(tmp_path / "a.tif"), expected), orientation
            assert radiograph.shape_of_file(tmp_path / "a.tif") == film.shape


def test_a_display_tag_that_cannot_be_applied_is_left_out(tmp_path: Path) -> None:
    """And a missing one has its usual value, whether it is empty or absent. In memory as in a file."""
    pydicom = pytest.importorskip("pydicom")
    image = ramp(top=4095, dtype=np.uint16)
    for kind, given_tags in UNUSABLE.items():
        tags = given_tags() if callable(given_tags) else given_tags
        for absent in {False, None in tags.values()}:
            path = dicom(tmp_path / "canary.dcm", image, bits=12)
            data = pydicom.dcmread(path)
            for name, value in tags.items():
                if value is None and absent:
                    data.pop(name, None)
                elif isinstance(value, (bytes, tuple)):
                    tag = pydicom.tag.Tag(name)
                    kind_of, raw = value if isinstance(value, tuple) else ("DS", value)
                    data._dict[tag] = pydicom.dataelem.RawDataElement(tag, kind_of, len(raw), raw, 0, False, True)
                else:
                    setattr(data, name, value)
            data.save_as(path, enforce_file_format=True)
            expected = levels(image)
            assert np.abs(read_radiograph(path) - expected).max() < 0.05, kind
            assert np.abs(read_film(pydicom.dcmread(path)) - expected).max() < 0.05, kind
            assert radiograph.shape_of_file(path) == image.shape


def test_dicom_refusals(tmp_path: Path) -> None:
    for name, tags, reason in [
        ("frames", {"NumberOfFrames": 2}, "multi-frame image"),
        ("bomb", {"Rows": 60000, "Columns": 60000}, "image too large"),
        ("short", {"PixelData": b"\0\1" * 100}, "corrupt image"),
        ("burned", {"BurnedInAnnotation": "YES"}, "burned-in annotation"),
        ("burned y", {"BurnedInAnnotation": "y"}, "burned-in annotation"),
        ("palette", {"PhotometricInterpretation": "PALETTE COLOR"}, "unsupported image format"),
    ]:
        stored = ramp(top=4095, dtype=np.uint16)
        stored = np.stack([stored, stored]) if name == "frames" else stored
        assert refusal(dicom(tmp_path / f"canary-{name}.dcm", stored, bits=12, **tags)) == reason


def document(path: Path, kind: str) -> Path:
    """A DICOM file without an image, or with less than one, as archives keep them beside films."""
    pydicom = pytest.importorskip("pydicom")
    film = pydicom.dcmread(dicom(path, ramp(top=4095, dtype=np.uint16), bits=12))
    absent = ["Rows", "Columns", "PixelData"]
    match kind:
        case "report":
            film.ConceptNameCodeSequence = pydicom.Sequence([pydicom.Dataset()])
        case "presentation state":
            film.PresentationLUTShape, film.WindowCenter, film.WindowWidth = "INVERSE", 1, 2
        case "pdf":
            film.EncapsulatedDocument, film.MIMETypeOfEncapsulatedDocument = b"%PDF-1.4 canary ", "application/pdf"
        case "pixels without rows":
            absent = ["Rows"]
        case "header alone" | "compressed header alone":
            absent = ["PixelData"]
        case "empty pixels":
            film["PixelData"].value, absent = b"", []
    if kind == "compressed header alone":
        film.file_meta.TransferSyntaxUID = pydicom.uid.RLELossless
    for tag in absent:
        del film[tag]
    film.save_as(path, enforce_file_format=True)
    return path


def test_a_dicom_file_without_an_image_is_called_so(tmp_path: Path) -> None:
    for kind, reason in [
        ("report", "no image"),
        ("presentation state", "no image"),
        ("pdf", "no image"),
        ("pixels without rows", "corrupt image"),
        ("header alone", "no pixel data"),
        ("compressed header alone", "no pixel data"),
        ("empty pixels", "no pixel data"),
    ]:
        assert refusal(document(tmp_path / "canary.dcm", kind)) == reason, kind


def test_a_film_whose_decoder_is_not_installed_is_called_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pydicom = pytest.importorskip("pydicom")
    path = document(tmp_path / "canary.dcm", "compressed header alone")
    decoder = pydicom.pixels.get_decoder(pydicom.uid.RLELossless)
    monkeypatch.setattr(type(decoder), "is_available", property(lambda self: False))
    assert refusal(path) == "needs another decoder"


def test_transfer_syntaxes_that_cannot_be_judged_or_decoded_are_refused(tmp_path: Path) -> None:
    """Deflated (inflates without bound before its header can be read), MPEG-2, unknown."""
    pydicom = pytest.importorskip("pydicom")
    for uid in ("1.2.840.10008.1.2.1.99", "1.2.840.10008.1.2.4.100", "1.2.3"):
        meta = pydicom.dcmread(dicom(tmp_path / "a.dcm", ramp())).file_meta
        meta.TransferSyntaxUID = uid
        with (tmp_path / "b.dcm").open("wb") as file:
            file.write(b"\0" * 128 + b"DICM")
            pydicom.filewriter.write_file_meta_info(file, meta)
        assert refusal(tmp_path / "b.dcm") == "unsupported transfer syntax"


def test_jpeg_lossless_is_read_with_the_extra_and_else_named_with_its_remedy() -> None:
    """A file that pydicom comes with."""
    pytest.importorskip("pydicom")
    from importlib.util import find_spec

    from pydicom.data import get_testdata_file

    from fedvlp.data.preprocessing import Preprocessing

    file = get_testdata_file("SC_rgb_jpeg_gdcm.dcm", download=False)
    if find_spec("gdcm"):
        assert read_radiograph(Path(str(file)), 32).std() > 20
        return
    with pytest.raises(ValueError, match=r"pip install 'fedvlp\[dicom\]' reads JPEG Lossless too"):
        Preprocessing(32, 32).films([str(file)])


def test_truncated_empty_foreign_missing_and_constant_files(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64), dtype=np.uint8)
    for suffix in ("png", "jpg"):
        whole = tmp_path / f"whole.{suffix}"
        Image.fromarray(noise).save(whole)
        cut = tmp_path / f"canary.{suffix}"
        cut.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
        assert refusal(cut) == "corrupt image"
    whole = dicom(tmp_path / "whole.dcm", noise)
    (tmp_path / "cut.dcm").write_bytes(whole.read_bytes()[:-1000])
    assert refusal(tmp_path / "cut.dcm") == "corrupt image"
    (tmp_path / "text.png").write_text("canary")
    assert refusal(tmp_path / "text.png") == "unsupported image format"
    (tmp_path / "empty.png").write_bytes(b"")
    assert refusal(tmp_path / "empty.png") == "empty file"
    assert refusal(tmp_path / "absent.png") == "missing image"
    assert refusal(png(tmp_path / "grey.png", np.full((40, 40), 7, dtype=np.uint8))) == "constant image"
    assert refusal(png(tmp_path / "line.png", ramp(4, 40))) == "unsupported image shape"
    Image.fromarray(noise).save(tmp_path / "other.bmp")
    assert refusal(tmp_path / "other.bmp") == "unsupported image format"


@pytest.mark.parametrize("side", [9_000, 100_000])
def test_a_bomb_is_refused_from_its_header(tmp_path: Path, side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    path = tmp_path / "bomb.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b""))
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda self: pytest.fail("decoded"))
    assert refusal(path) == "image too large"


def test_train_batch_crops_by_the_generator_alone() -> None:
    images = torch.randint(0, 256, (64, 12, 12), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    first = train_batch(images, 8, torch.Generator().manual_seed(5))
    torch.manual_seed(99)
    torch.rand(7)
    again = train_batch(images, 8, torch.Generator().manual_seed(5))
    other = train_batch(images, 8, torch.Generator().manual_seed(6))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.shape == (64, 1, 8, 8)
    assert first.dtype == torch.float32


def test_every_crop_is_a_window_and_never_mirrored() -> None:
    """Pixels rise from left to right and from top to bottom: so they do in every crop, and all 25 corners occur."""
    images = (torch.arange(12)[:, None] * 16 + torch.arange(12)).to(torch.uint8).expand(600, 12, 12)
    out = train_batch(images, 8, torch.Generator().manual_seed(0))
    assert (out.diff(dim=-1) > 0).all()
    assert (out.diff(dim=-2) > 0).all()
    corner = ((out[:, 0, 0, 0] / 2 + 0.5) * 255).round().long()
    assert {(c // 16, c % 16) for c in corner.tolist()} == {(top, left) for top in range(5) for left in range(5)}


def test_values_and_the_centre_crop() -> None:
    """0 is -1, 255 is 1, 51 = 0.2 * 255 is (0.2 - 0.5) / 0.5 = -0.6."""
    images = torch.zeros(1, 6, 6, dtype=torch.uint8)
    images[0, 1, 1], images[0, 4, 4] = 255, 51
    out = eval_batch(images, 4)
    assert out.shape == (1, 1, 4, 4)
    torch.testing.assert_close(out[0, 0, 0, 0], torch.tensor(1.0))
    torch.testing.assert_close(out[0, 0, 3, 3], torch.tensor(-0.6))
    assert out[0, 0, 1, 1] == -1
    assert images[0, 1, 1] == 255, "the cached pixels are not written to"


def test_no_crop_makes_no_draw_and_bad_shapes_are_refused() -> None:
    images = torch.randint(0, 256, (3, 8, 8), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()
    assert torch.equal(train_batch(images, 8, generator), eval_batch(images, 8))
    assert torch.equal(generator.get_state(), before)
    with pytest.raises(ValueError, match="cannot crop 9 pixels from images of 8"):
        eval_batch(images, 9)
    with pytest.raises(ValueError, match="uint8"):
        train_batch(images.float(), 8, generator)


def blobs(height: int = 96, width: int = 80, top: int = 255, dtype: type = np.uint8) -> np.ndarray:
    """Smooth and unlike on all sides: turned, inverted or stretched it is another image."""
    y, x = np.mgrid[0 : 1 : height * 1j, 0 : 1 : width * 1j]
    wave = np.sin(5 * x + 1) + np.cos(7 * y * y) + x * y + 1.0 * (x > 0.6) * (y < 0.3)
    return ((wave - wave.min()) / np.ptp(wave) * top).astype(dtype)


def likeness(path: Path, truth: np.ndarray, size: int = 48) -> float:
    seen, expected = decode(path, size).astype(float), decode(png(path.with_name("truth.png"), truth), size)
    return float(np.corrcoef(seen.ravel(), expected.ravel())[0, 1])


@pytest.mark.parametrize("fill", [0, 128, 255])
@pytest.mark.parametrize("kind", ["dicom", "deep dicom", "png", "tiff"])
def test_what_a_broken_transfer_left_is_refused(kind: str, fill: int, tmp_path: Path) -> None:
    """From the middle on one value: refused. Above and below alike, as shutters are, a fifth, or at a side: read."""
    image, path = blobs(), tmp_path / "film"
    image[: 20 if kind == "tiff" else 0] = 7

    def written() -> Path:
        if "dicom" in kind:
            deep = kind.startswith("deep")
            return dicom(path, 257 * image.astype(np.uint16) if deep else image, bits=16 if deep else 8)
        Image.fromarray(image).save(path, format=kind)
        return path

    whole = image.copy()
    image[77:] = fill
    assert decode(written(), 16).any(), "a fifth"
    image[48:] = fill
    assert refusal(written()) == "incomplete image"
    image[:40] = fill
    assert decode(written(), 16).any(), "above and below"
    image[:], image[:, :30] = whole, fill
    assert decode(written(), 16).any(), "rows are stored from above: a margin that made the image square"


def test_pixels_that_are_not_square_are_made_so(tmp_path: Path) -> None:
    """Every second row left out: a pixel is twice as high as wide, whatever tag says so, and of whatever file."""
    truth = blobs(96, 80)
    for tags in (
        {"PixelSpacing": [0.4, 0.2]},
        {"ImagerPixelSpacing": [0.4, 0.2]},
        {"NominalScannedPixelSpacing": [0.4, 0.2]},
        {"PixelAspectRatio": [2, 1]},
    ):
        path = dicom(tmp_path / "a.dcm", truth[::2].copy(), **tags)
        assert likeness(path, truth) > 0.99, tags
        assert read_radiograph(path).shape == radiograph.shape_of_file(path) == (96, 80)
        assert radiograph.grid_of_file(path) == (48, 80)
    wide = dicom(tmp_path / "b.dcm", truth[:, ::2].copy(), PixelSpacing=[0.2, 0.4])
    assert likeness(wide, truth) > 0.99
    for name, dpi in (("a.tif", (200, 100)), ("a.png", (200, 100)), ("a.jpg", (200, 100))):
        Image.fromarray(truth[::2]).save(tmp_path / name, dpi=dpi)
        assert likeness(tmp_path / name, truth) > 0.99, name
    for spacing in ([0.4, 0.399], [4, 0.2], [0, 0.2], [0.2]):
        path = dicom(tmp_path / "c.dcm", truth, PixelSpacing=spacing)
        assert read_radiograph(path).shape == (96, 80), "equal, or no spacing"
    turned = Image.Exif()
    turned[radiograph.ORIENTATION] = 6  # the file's left is below
    Image.fromarray(np.rot90(truth[::2])).save(tmp_path / "t.jpg", exif=turned, dpi=(100, 200))
    assert radiograph.shape_of_file(tmp_path / "t.jpg") == read_radiograph(tmp_path / "t.jpg").shape == (96, 80)
    assert likeness(tmp_path / "t.jpg", truth) > 0.98


def test_samples_decide_whether_a_dicom_is_grey(tmp_path: Path) -> None:
    truth = blobs()
    three = np.stack([truth] * 3, axis=2)
    for photometric in ("MONOCHROME2", "MONOCHROME1"):
        path = dicom(tmp_path / "a.dcm", truth, photometric, SamplesPerPixel=3, PlanarConfiguration=0)
        path = dicom(path, truth, photometric, SamplesPerPixel=3, PlanarConfiguration=0, PixelData=three.tobytes())
        assert read_radiograph(path).shape == truth.shape
        assert likeness(path, truth) > 0.999
    assert likeness(dicom(tmp_path / "b.dcm", truth, "RGB"), truth) > 0.999


def test_an_inverse_presentation_shape_inverts_once(tmp_path: Path) -> None:
    truth = blobs()
    for photometric, shape, sign in (
        ("MONOCHROME2", "IDENTITY", 1),
        ("MONOCHROME2", "INVERSE", -1),
        ("MONOCHROME1", "INVERSE", -1),
        ("MONOCHROME1", "IDENTITY", -1),
    ):
        path = dicom(tmp_path / "a.dcm", truth, photometric, PresentationLUTShape=shape)
        seen = read_radiograph(path)
        assert np.corrcoef(seen.ravel(), truth.ravel())[0, 1] * sign > 0.99, (photometric, shape)


@pytest.mark.parametrize("kind", ["png RGB", "png RGBA", "png LA", "tiff RGB"])
def test_colours_of_16_bits_keep_their_levels(kind: str, tmp_path: Path) -> None:
    """Values of 12 bits in 16: 8 of the 16 would leave 16 levels."""
    cv2 = pytest.importorskip("cv2")
    truth = blobs(top=4095, dtype=np.uint16)
    path = tmp_path / f"a.{kind[:3]}"
    planes = {"RGB": [truth] * 3, "RGBA": [truth] * 3 + [np.full_like(truth, 65535)]}
    if kind == "png LA":
        raw = b"".join(b"\0" + np.stack([row, row * 0 + 65535], axis=1).astype(">u2").tobytes() for row in truth)
        header = struct.pack(">IIBBBBB", *truth.shape[::-1], 16, 4, 0, 0, 0)
        chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(raw)), (b"IEND", b"")]
        path.write_bytes(
            b"\x89PNG\r\n\x1a\n"
            + b"".join(struct.pack(">I", len(d)) + n + d + struct.pack(">I", zlib.crc32(n + d)) for n, d in chunks)
        )
    else:
        cv2.imwrite(str(path), np.stack(planes[kind.split()[1]], axis=2))
    for colour in (False, True):
        seen = read_radiograph(path, colour=colour)
        assert len(np.unique(seen.round(3))) > 1000
        assert np.corrcoef(seen.reshape(*truth.shape, -1)[..., 0].ravel(), truth.ravel())[0, 1] > 0.999
    assert radiograph.read_stored(path)[1].startswith(("PNG, 16", "TIFF, 16"))


@pytest.mark.parametrize("reversed_bits", [False, True])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_low_bit_first_is_read_as_the_writer_meant_it(dtype: type, reversed_bits: bool, tmp_path: Path) -> None:
    from PIL.TiffImagePlugin import ImageFileDirectory_v2

    truth = blobs(top=200 if dtype == np.uint8 else 4000, dtype=dtype)
    stored = truth
    if reversed_bits:
        stored = radiograph._BITS_REVERSED[truth.view(np.uint8)].view(dtype)
    tags = ImageFileDirectory_v2()
    tags[radiograph.FILL_ORDER] = radiograph.LOW_BIT_FIRST
    Image.fromarray(stored).save(tmp_path / "a.tif", tiffinfo=tags)
    with Image.open(tmp_path / "a.tif") as image:
        assert image.tag_v2[radiograph.FILL_ORDER] == radiograph.LOW_BIT_FIRST
    assert np.corrcoef(read_radiograph(tmp_path / "a.tif").ravel(), truth.ravel())[0, 1] > 0.99


def test_jpeg_extended_of_12_bits_asks_for_another_decoder(tmp_path: Path) -> None:
    path = dicom(tmp_path / "film.dcm", blobs(top=4095, dtype=np.uint16), bits=12)
    from pydicom import dcmread
    from pydicom.encaps import encapsulate

    data = dcmread(path)
    data.PixelData = encapsulate([bytes(64)])
    data["PixelData"].is_undefined_length = True
    data.file_meta.TransferSyntaxUID = radiograph.JPEG_EXTENDED
    data.save_as(path)
    assert refusal(path) == "needs another decoder"
