"""Collections in their published layout, with enough records to train a step on and to be judged by."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from pathlib import Path

from fedvlp.data.labels import CHEXPERT
from studies.collections.retina import BASES
from support.published import BOX, XML, ag_news, chexpert_row, cifar100, film, karpathy, table

SPLITS = ("train", "validate", "test")
REPORT = "FINDINGS:\n There is {finding} on film {number}.\n\nIMPRESSION:  Findings of number {number}.\n"


def mimic(root: Path, counts: tuple[int, int, int] = (120, 70, 300)) -> None:
    """A film of each patient; so many patients of each split. Findings take turns, the others are absent."""
    films, splits, labels = [], [], []
    owner = [split for split, count in zip(SPLITS, counts, strict=True) for _ in range(count)]
    for number, split in enumerate(owner):
        patient, study, name = 10000000 + number, 50000000 + number, f"d{number:04d}"
        films.append((name, patient, study, "PA"))
        splits.append((name, study, patient, split))
        finding = CHEXPERT[number % len(CHEXPERT)]
        labels.append((patient, study, *("1.0" if one == finding else "0.0" for one in sorted(CHEXPERT))))
        folder = root / "files" / f"p{patient}"[:3] / f"p{patient}" / f"s{study}"
        film(folder / f"{name}.jpg", number % 240)
        folder.with_suffix(".txt").write_text(REPORT.format(finding=finding.lower(), number=number))
    table(root / "mimic-cxr-2.0.0-metadata.csv", "dicom_id,subject_id,study_id,ViewPosition", films)
    table(root / "mimic-cxr-2.0.0-split.csv", "dicom_id,study_id,subject_id,split", splits)
    table(root / "mimic-cxr-2.0.0-chexpert.csv", "subject_id,study_id," + ",".join(sorted(CHEXPERT)), labels)


def chexpert(root: Path, count: int = 60) -> None:
    """A film of each patient of train.csv, and eight of valid.csv."""
    for name, patients in (("train", range(count)), ("valid", range(count, count + 8))):
        rows = []
        for number in patients:
            path = f"CheXpert-v1.0-small/{name}/patient{number:05d}/study1/view1_frontal.jpg"
            rows.append(chexpert_row(path, **{CHEXPERT[number % len(CHEXPERT)]: "1.0"}))
            film(root / path, number)
        table(root / "CheXpert-v1.0-small" / f"{name}.csv", ",".join(rows[0]), [tuple(row.values()) for row in rows])


def nih(root: Path, count: int = 40) -> None:
    """A film of each patient, the last ten of them on the published test list."""
    kinds = ("Atelectasis", "Cardiomegaly", "Consolidation", "Edema", "Effusion")
    rows = [(f"{number:08d}_000.png", kinds[number % 5], 0, number) for number in range(count)]
    for name, _, _, number in rows:
        film(root / "images_001" / "images" / name, number)
    table(root / "Data_Entry_2017_v2020.csv", "Image Index,Finding Labels,Follow-up #,Patient ID", list(rows))
    (root / "test_list.txt").write_text("".join(f"{name}\n" for name, *_ in rows[-10:]))


def candid(root: Path, count: int = 40) -> None:
    """Every other film has an outline."""
    rows = [(f"1.2.{n}", "9 9" if n % 2 else "-1", f"Pneumothorax is seen on number {n}.") for n in range(count)]
    for number, (key, *_) in enumerate(rows):
        film(root / "dataset" / f"{key}.png", number)
    table(root / "Pneumothorax_reports.csv", "SOPInstanceUID,EncodedPixels,Report", list(rows))


def openi(root: Path, count: int = 40) -> None:
    """A film and a report of every number."""
    folder = root / "unpacked"
    folder.mkdir(parents=True)
    for number in range(count):
        mesh = f"<major>{('Pneumonia', 'normal')[number % 2]}</major>"
        text = XML.format(key=number, findings=f"Opacity of number {number}.", impression="Left pneumonia.", mesh=mesh)
        (folder / f"{number}.xml").write_text(text)
        film(root / "NLMCXR_png" / f"CXR{number}_IM-1.png", number)
    with tarfile.open(root / "NLMCXR_reports.tgz", "w:gz") as archive:
        archive.add(folder, "ecgen-radiology")


def rsna(root: Path, count: int = 40) -> None:
    """Every other film has a box."""
    boxed = [(f"p{n}", *((100, 200, 300, 400, 1) if n % 2 else ("", "", "", "", 0))) for n in range(count)]
    detail = [(f"p{n}", "Lung Opacity" if n % 2 else "Normal") for n in range(count)]
    table(root / "stage_2_train_labels.csv", BOX, list(boxed))
    table(root / "stage_2_detailed_class_info.csv", "patientId,class", list(detail))
    for number in range(count):
        film(root / "stage_2_train_images" / f"p{number}.png", number)
        (root / "stage_2_train_images" / f"p{number}.png").rename(root / "stage_2_train_images" / f"p{number}.dcm")


def covidx(root: Path, train: int = 30, test: int = 9) -> None:
    """The three classes take turns."""
    kinds = ("normal", "pneumonia", "COVID-19")
    for split, first, count in (("train", 0, train), ("test", train, test)):
        numbers = range(first, first + count)
        for number in numbers:
            film(root / split / f"{number}.png", number)
        lines = "".join(f"{number} {number}.png {kinds[number % 3]} cohen\n" for number in numbers)
        (root / f"{split}_COVIDx9A.txt").write_text(lines)


def covid_radiography(root: Path, each: int = 12) -> None:
    """So many films of each class."""
    for place, name in enumerate(("COVID", "Normal", "Lung_Opacity", "Viral Pneumonia")):
        for number in range(each):
            film(root / name / "images" / f"{name}-{number}.png", place * each + number)


def messidor(root: Path, each: int = 20) -> None:
    """So many photographs in each of the twelve folders."""
    columns = "Image name,Ophthalmologic department,Retinopathy grade,Risk of macular edema "
    for place, base in enumerate(BASES):
        names = [f"20050101_{place:02d}{number:02d}_0100_PP.tif" for number in range(each)]
        for number, name in enumerate(names):
            film(root / base / name, place * each + number)
        rows = [(name, "LaTIM", number % 4, number % 3) for number, name in enumerate(names)]
        table(root / base / f"Annotation_{base}.csv", columns, list(rows))


def brset(root: Path, patients: int = 120) -> None:
    """Two photographs of each patient."""
    rows = [(f"img{number:05d}", number // 2, "Canon CR", number % 5, number % 2) for number in range(2 * patients)]
    for number, (name, *_) in enumerate(rows):
        film(root / "fundus_photos" / f"{name}.jpg", number)
    table(root / "labels_brset.csv", "image_id,patient_id,camera,DR_ICDR,macular_edema", list(rows))


def mbrset(root: Path, patients: int = 30) -> None:
    """Two photographs of each patient."""
    rows = [(n // 2, f"{n // 2}.{n % 2 + 1}.jpg", f"{n % 5}.0", ("no", "yes")[n % 3 == 0]) for n in range(2 * patients)]
    for number, (_, name, *_) in enumerate(rows):
        film(root / "images" / name, number)
    table(root / "labels_mbrset.csv", "patient,file,final_icdr,final_edema", list(rows))


def creamfl(root: Path) -> None:
    """A folder each for COCO's captions, Flickr30k, CIFAR-100 (four classes) and AG News."""
    karpathy(root / "coco_captions", "coco", count=30)  # ten test images, five folds
    karpathy(root / "flickr30k", "flickr30k", count=36, root="flickr30k-images")
    cifar100(root / "cifar100", train=80, test=40, classes=4)
    ag_news(root / "ag_news", train=80, test=40)


LARGER: dict[str, Callable[[Path], None]] = {
    "mimic_cxr": mimic, "chexpert": chexpert, "nih_cxr14": nih, "candid_ptx": candid, "openi": openi, "rsna": rsna,
    "covidx": covidx, "covid_radiography": covid_radiography, "messidor": messidor, "brset": brset, "mbrset": mbrset,
}  # fmt: skip
"""Name of a source: what writes its collection into a folder."""
