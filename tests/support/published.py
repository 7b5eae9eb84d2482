"""Small fixtures of collections, each in the layout in which it is published."""

from __future__ import annotations

import csv
import gzip
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fedvlp.data.labels import CHEXPERT
from fedvlp.data.sources.mimic_cxr import MIMICSource
from fedvlp.data.sources.tabular import CandidPTXSource, RSNASource
from studies.collections.captions_and_classes import RECORD
from studies.collections.retina import BASES

REPORT = """                                 FINAL REPORT
 EXAMINATION:  CHEST (PA AND LAT)

 FINDINGS:

 Small left pleural
 effusion.  Heart: mildly enlarged heart.

 IMPRESSION:  Left effusion.  See above.
"""


def table(path: Path, columns: str, rows: list[tuple[object, ...]]) -> Path:
    """Writes a CSV, packed if its name ends so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w") as file:
        csv.writer(file).writerows([columns.split(","), *rows])
    return path


def film(path: Path, value: int) -> None:
    """Writes a grey film of one value in 0..240, which its decoded middle has: two diagonals are black and bright."""
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.full((20, 20), value, dtype=np.uint8)
    rows = np.arange(20)
    pixels[rows, (rows + 6) % 20], pixels[rows, (rows + 13) % 20] = 0, 240
    Image.fromarray(pixels).save(path)


def mimic(root: Path, report: str = REPORT) -> MIMICSource:
    """Six films of four studies of three patients: a lateral view, a study without impression or findings."""
    films = [
        ("a1", 10000032, 50000001, "PA"), ("a2", 10000032, 50000001, "LATERAL"), ("a3", 10000032, 50000002, "AP"),
        ("b1", 11000041, 50000003, "AP"), ("c1", 19000055, 50000004, "PA"), ("c2", 19000055, 50000004, "PA"),
    ]  # fmt: skip
    root.mkdir(exist_ok=True)
    table(root / "mimic-cxr-2.0.0-metadata.csv.gz", "dicom_id,subject_id,study_id,ViewPosition", films)
    splits = {10000032: "train", 11000041: "validate", 19000055: "test"}
    rows = [(film, study, patient, splits[patient]) for film, patient, study, _ in films]
    table(root / "mimic-cxr-2.0.0-split.csv", "dicom_id,study_id,subject_id,split", rows)
    blank = dict.fromkeys(sorted(CHEXPERT), "")  # the published order is alphabetical
    values = [{**blank, "Edema": "-1.0", "Pleural Effusion": "1.0"}, {**blank, "No Finding": "1.0", "Fracture": "0.0"}]
    rows = [(10000032, 50000001, *values[0].values()), (19000055, 50000004, *values[1].values())]
    table(root / "mimic-cxr-2.0.0-chexpert.csv", "subject_id,study_id," + ",".join(blank), rows)
    for name, patient, study, _ in films:
        folder = root / "files" / f"p{patient}"[:3] / f"p{patient}" / f"s{study}"
        film(folder / f"{name}.jpg", 10 * (ord(name[0]) - 96))
        text = "WET READ: no change since yesterday.\n" if study == 50000003 else report
        folder.with_suffix(".txt").write_text(text)
    return MIMICSource(str(root), str(root), image_size=32)


def candid(root: Path, report: str = "There is a small left apical pneumothorax.") -> CandidPTXSource:
    """Six rows of four films: two outlines of one film, two films without, one with a report of a word."""
    rows = [
        ("1.2.3", "100 2 300 4", report), ("1.2.3", "500 6", report), ("1.2.4", "-1", "No pneumothorax is seen."),
        ("1.2.5", "-1", "Normal."), ("1.2.6", "9 9", "Clear lungs and pleura."), ("1.2.6", "-1", "Clear lungs."),
    ]  # fmt: skip
    root.mkdir(exist_ok=True)
    for key in ("1.2.3", "1.2.4", "1.2.5", "1.2.6"):
        film(root / f"{key}.png", 10 * int(key[-1]))
    path = table(root / "Pneumothorax_reports.csv", "SOPInstanceUID,EncodedPixels,Report", rows)
    return CandidPTXSource(str(path), str(root), image_size=32, labels=("Edema", "Pneumothorax"))


BOX = "patientId,x,y,width,height,Target"


def rsna(root: Path, **settings: Any) -> RSNASource:
    """Six rows of four patients, one of them with three boxes."""
    rows: list[tuple[object, ...]] = [
        ("p1", "", "", "", "", 0), ("p2", 1, 2, 3, 4, 1), ("p2", 5, 6, 7, 8, 1), ("p2", 9, 1, 2, 3, 1),
        ("p3", "", "", "", "", 0), ("p4", 1, 1, 1, 1, 1),
    ]  # fmt: skip
    detail = [("p1", "Normal"), ("p2", "Lung Opacity"), ("p2", "Lung Opacity"), ("p3", "No Lung Opacity / Not Normal")]
    root.mkdir(exist_ok=True)
    path = table(root / "stage_2_train_labels.csv", BOX, rows)
    classes = table(root / "stage_2_detailed_class_info.csv", "patientId,class", detail)
    for place in range(1, 5):
        film(root / "stage_2_train_images" / f"p{place}.png", 10 * place)
        (root / "stage_2_train_images" / f"p{place}.png").rename(root / "stage_2_train_images" / f"p{place}.dcm")
    return RSNASource(str(path), str(root), classes=str(classes), image_size=32, **settings)


XML = """<eCitation><uId id="CXR{key}"/><MedlineCitation><Article><Abstract>
<AbstractText Label="FINDINGS">{findings}</AbstractText><AbstractText Label="IMPRESSION">{impression}</AbstractText>
</Abstract></Article></MedlineCitation><MeSH>{mesh}</MeSH><parentImage id="CXR{key}_IM-1"/></eCitation>"""


def openi_reports(folder: Path) -> Path:
    """Three reports: a pneumonia with an effusion, one that nobody indexed, one without text."""
    mesh = "<major>Pneumonia/lobe</major><major>Pleural Effusion/left</major>"
    texts = [
        XML.format(key=1, findings="Opacity in the left base.", impression="Left lower pneumonia.", mesh=mesh),
        XML.format(key=2, findings="", impression="No acute disease seen.", mesh="<major>no indexing</major>"),
        XML.format(key=3, findings="", impression="", mesh="<major>normal</major>"),
    ]
    folder.mkdir()
    for index, text in enumerate(texts):
        (folder / f"{index}.xml").write_text(text)
    return folder


def chexpert_row(path: str, view: str = "Frontal", **labels: str) -> dict[str, str]:
    return {"Path": path, "Frontal/Lateral": view, **dict.fromkeys(CHEXPERT, ""), **labels}


def chexpert(root: Path) -> None:
    """Six patients in train.csv and two in valid.csv, a frontal film each."""
    for name, patients in (("train", range(6)), ("valid", range(6, 8))):
        paths = [f"CheXpert-v1.0-small/{name}/patient0000{i}/study1/view1_frontal.jpg" for i in patients]
        for index, path in enumerate(paths):
            film(root / path, 10 * index)
        rows = [chexpert_row(path, Edema="1.0") for path in paths]
        table(root / "CheXpert-v1.0-small" / f"{name}.csv", ",".join(rows[0]), [tuple(row.values()) for row in rows])


def nih(root: Path) -> None:
    """Twelve films of six patients, one of them on the published test list."""
    columns = "Image Index,Finding Labels,Follow-up #,Patient ID"
    rows = [(f"{i}_{k}.png", "Effusion|Mass" if i % 2 else "No Finding", k, i) for i in range(6) for k in range(2)]
    for name, *_ in rows:
        film(root / "images_001" / "images" / str(name), 9)
    table(root / "Data_Entry_2017_v2020.csv", columns, rows)
    (root / "test_list.txt").write_text("3_0.png\n3_1.png\n")


def openi(root: Path) -> None:
    """The reports in their archive, and the film of each that has text."""
    root.mkdir(exist_ok=True)
    with tarfile.open(root / "NLMCXR_reports.tgz", "w:gz") as archive:
        archive.add(openi_reports(root / "unpacked"), "ecgen-radiology")
    for key in (1, 2):
        film(root / "NLMCXR_png" / f"CXR{key}_IM-1.png", 70 * key)


def covidx(root: Path) -> None:
    """Ten training films and one test film, of the patient 0 of a source that has a training film as well."""
    kinds = ("normal", "pneumonia", "COVID-19")
    train = [(str(i), f"t{i}.png", kinds[i % 3], "cohen") for i in range(9)] + [("0", "t9.png", "normal", "rsna")]
    for name, lines in (("train", train), ("test", [("0", "e0.png", "COVID-19", "cohen")])):
        for _, file, *_ in lines:
            film(root / name / file, 10 * (int(file[1]) + 1))
        (root / f"{name}_COVIDx9A.txt").write_text("".join(f"{' '.join(line)}\n" for line in lines))


def covid_radiography(root: Path) -> None:
    """Two films of each class, in the layout of the later releases (with masks) and of the first one."""
    for folder, prefix in (("COVID", "COVID"), ("Normal", "Normal"), ("Lung_Opacity", "Lung_Opacity")):
        for index in (1, 2):
            film(root / folder / "images" / f"{prefix}-{index}.png", 10 * index)
            film(root / folder / "masks" / f"{prefix}-{index}.png", 200)
    for index in (1, 2):
        film(root / "Viral Pneumonia" / f"Viral Pneumonia-{index}.png", 50)


def messidor(root: Path) -> None:
    """Two photographs in each of the twelve folders; one of Base11 and one of Base33 are in the errata."""
    special = {"Base11": "20051020_63045_0100_PP", "Base33": "20051202_55582_0400_PP"}
    for number, base in enumerate(BASES):
        names = [special.get(base, f"20050101_{number}0_0100_PP"), f"20050101_{number}1_0100_PP"]
        for name in names:
            film(root / base / f"{name}.tif", 5 * number + 5)
        rows = [(f"{name}.tif", "LaTIM", number % 4, number % 3) for name in names]
        columns = "Image name,Ophthalmologic department,Retinopathy grade,Risk of macular edema "
        table(root / base / f"Annotation_{base}.csv", columns, rows)


def brset(root: Path) -> None:
    """Twelve photographs of six patients, and a row without its photograph, as published."""
    rows = [(f"img{i:05d}", i // 2, "Canon CR", i % 5, i % 2) for i in range(13)]
    for name, *_ in rows[:12]:
        film(root / "fundus_photos" / f"{name}.jpg", 60)
    table(root / "labels_brset.csv", "image_id,patient_id,camera,DR_ICDR,macular_edema", rows)


def mbrset(root: Path) -> None:
    """Twelve photographs of six patients, two of them not graded."""
    rows: list[tuple[object, ...]] = [
        (i // 2, f"{i // 2}.{i % 2 + 1}.jpg", f"{i % 5}.0", "yes" if i % 2 else "no") for i in range(10)
    ]
    rows += [(5, "5.1.jpg", "", "no"), (5, "5.2.jpg", "2.0", "nan")]
    for _, name, *_ in rows:
        film(root / "images" / str(name), 60)
    table(root / "labels_mbrset.csv", "patient,file,final_icdr,final_edema", rows)


def siim(root: Path) -> None:
    """Ten films, five of them with an outline, one of these with two; a folder for each film, as published."""
    rows = [(f"1.2.{i}", " 1 2 3 4" if i % 2 else " -1") for i in range(10)] + [("1.2.1", " 9 9")]
    for key, _ in rows[:10]:
        folder = root / "dicom-images-train" / key
        film(folder / "series" / f"{key}.png", 60)
        (folder / "series" / f"{key}.png").rename(folder / "series" / f"{key}.dcm")
    table(root / "train-rle.csv", "ImageId, EncodedPixels", rows)


def graph(*regions: tuple[str, list[list[str]]]) -> str:
    """A scene graph of regions, each a sentence and the attributes that it states."""
    attributes = [{"bbox_name": "lung", "phrases": [said], "attributes": stated} for said, stated in regions]
    return json.dumps({"image_id": "x", "objects": [], "attributes": attributes, "relationships": []})


def chest_imagenome(root: Path) -> None:
    """Four films of three splits, of which one is to avoid and one has no sentence; one sentence in two regions."""
    said = "Left pleural effusion without pneumothorax."
    effusion = ["anatomicalfinding|yes|pleural effusion", "anatomicalfinding|no|pneumothorax"]
    left, right = (said, [effusion]), (said, [["anatomicalfinding|no|pleural effusion"]])
    enlarged = ("The heart is enlarged.", [["anatomicalfinding|yes|enlarged cardiac silhouette"], ["device|yes|x|y"]])
    graphs = {"a1": graph(left, right, enlarged), "a2": graph(left), "b1": graph(enlarged), "c1": graph()}
    rows = {"a1": (10000032, 50000001), "a2": (10000032, 50000002), "b1": (11000041, 50000003), "c1": (12, 5)}
    silver = root / "silver_dataset"
    (silver / "scene_graph").mkdir(parents=True)
    for key, content in graphs.items():
        (silver / "scene_graph" / f"{key}_SceneGraph.json").write_text(content)
        patient, study = rows[key]
        film(root / "files" / f"p{patient}"[:3] / f"p{patient}" / f"s{study}" / f"{key}.jpg", 50)
    for split, keys in (("train", "a1 a2"), ("valid", "b1"), ("test", "c1"), ("images_to_avoid", "a2")):
        lines = [(i, *rows[key], key, f"files/{key}.dcm", "PA") for i, key in enumerate(keys.split())]
        table(silver / "splits" / f"{split}.csv", ",subject_id,study_id,dicom_id,path,ViewPosition", lines)


def ehrxqa(root: Path) -> None:
    """Two questions about one film, one with two answers; one whose text is too short; one of each other split."""
    questions = {
        "train": [
            (1, 10000032, 50000001, "a1", "Is there a pleural effusion?", ["yes"]),
            (2, 10000032, 50000001, "a1", "List all findings of the left lung.", ["pleural effusion", "edema"]),
            (3, 10000032, 50000001, "a1", "Why?", []),
        ],
        "valid": [(1, 11000041, 50000003, "b1", "Is the heart enlarged?", "no")],
        "test": [(1, 19000055, 50000004, "c1", "Is this an AP view?", ["yes"])],
    }
    folder = root / "mimiccxrvqa" / "dataset"
    folder.mkdir(parents=True)
    names = ("idx", "subject_id", "study_id", "image_id", "question", "answer")
    for split, rows in questions.items():
        (folder / f"{split}.json").write_text(json.dumps([dict(zip(names, row, strict=True)) for row in rows]))
        for _, patient, study, key, *_ in rows:
            film(root / "files" / f"p{patient}"[:3] / f"p{patient}" / f"s{study}" / f"{key}.jpg", 50)


def vqa_answer(*answers: str) -> list[dict[str, object]]:
    """Ten answers as published: those given, the last of them repeated."""
    ten = [*answers, *(answers[-1:] * (10 - len(answers)))]
    return [{"answer": one, "answer_confidence": "yes", "answer_id": number} for number, one in enumerate(ten, 1)]


def vqa_v2(root: Path) -> None:
    """Twelve training images and six of val2014, two questions each: whether an image is bright, and how many."""
    for folder, first, count in (("train2014", 0, 12), ("val2014", 100, 6)):
        questions, annotations = [], []
        for image in range(first, first + count):
            grey = (200 if image % 2 else 10) + 2 * (image % 100) + first // 100  # no two are alike
            film(root / folder / f"COCO_{folder}_{image:012d}.jpg", grey)
            bright = "yes" if image % 2 else "no"
            for number, (text, kind, answers) in enumerate(
                [("Is the photo bright?", "yes/no", [bright]), ("How many?", "number", ["Two.", "2"])]
            ):
                key = {"question_id": 1000 * image + number, "image_id": image}
                questions.append({**key, "question": text})
                told = {"answers": vqa_answer(*answers), "multiple_choice_answer": answers[-1]}
                annotations.append({**key, **told, "answer_type": kind, "question_type": "is the"})
        for name, rows in (("OpenEnded_mscoco_{}_questions", questions), ("mscoco_{}_annotations", annotations)):
            entries = name.rpartition("_")[2]
            file = root / f"v2_{name.format(folder)}.json"
            file.write_text(json.dumps({"info": {}, "data_subtype": folder, entries: rows}))


def padchest(root: Path) -> None:
    """Ten films of five studies, lateral ones among them, in the folders of two archives; one that nobody labelled."""
    columns = (
        ",ImageID,ImageDir,StudyDate_DICOM,StudyID,PatientID,PatientBirth,PatientSex_DICOM,Projection,Report,Labels"
    )
    said = ("cambi pulmonar cronic sever .", "derram pleural izquierd . cardiomegali .")
    terms = ("['chronic changes', ' pneumothorax']", "['pleural effusion', 'cardiomegaly']", "['normal']", "", "[]")
    rows = [
        (i, f"{i}_1.png", i % 2, 20140915, f"s{i // 2}", f"p{i // 2}", "1950.0", "F", "PA" if i % 2 else "L",
         said[i // 2 % 2], terms[i // 2])
        for i in range(10)
    ]  # fmt: skip
    for row in rows:
        film(root / str(row[2]) / str(row[1]), 20 * int(row[0]))
    table(root / "PADCHEST_chest_x_ray_images_labels_160K_01.02.19.csv", columns, rows)


def chexpert_plus(root: Path) -> None:
    """Six films with reports, named .jpg in the table and published as PNG; one lateral, one of the valid split."""
    columns = (
        "path_to_image,path_to_dcm,frontal_lateral,ap_pa,deid_patient_id,patient_report_date_order,report,"
        "section_findings,section_impression,age,sex,split"
    )
    rows, labels = [], []
    for i in range(6):
        split = "valid" if i == 5 else "train"
        path = f"{split}/patient0000{i}/study1/view1_{'lateral' if i == 4 else 'frontal'}"
        film(root / "PNG" / f"{path}.png", 30 * i)
        view = ("Lateral", "") if i == 4 else ("Frontal", "AP")
        texts = ("NARRATIVE: all of it", "The lungs are clear." if i else "", "1. No acute disease.")
        rows.append((f"{path}.jpg", f"{path}.dcm", *view, f"patient0000{i}", 1, *texts, 60, "Female", split))
        labels.append({"path_to_image": f"{path}.jpg", **dict.fromkeys(CHEXPERT), "Edema": 1.0 if i % 2 else None})
    table(root / "df_chexpert_plus_240401.csv", columns, rows)
    (root / "chexbert_labels").mkdir()
    (root / "chexbert_labels" / "impression_fixed.json").write_text("\n".join(map(json.dumps, labels)) + "\n")


def vindr_cxr(root: Path) -> None:
    """Four films of which three radiologists label each, and two test films; a film's table has no suffix."""
    columns = "image_id,rad_id,Aortic enlargement,Cardiomegaly,Pneumonia,Other diseases,No finding"
    rows = [(f"f{i}", f"R{r}", int(r == i), int(i == 1), 0, 0, int(i == 3)) for i in range(4) for r in range(3)]
    table(root / "annotations" / "image_labels_train.csv", columns, rows)
    test = [(f"t{i}", 0, i, 1, 0, 0) for i in range(2)]
    table(root / "annotations" / "image_labels_test.csv", columns.replace(",rad_id", "").replace("s,No", ",No"), test)
    for split, key in [*(("train", f"f{i}") for i in range(4)), ("test", "t0"), ("test", "t1")]:
        film(root / split / f"{key}.png", 30 * int(key[1]))
        (root / split / f"{key}.png").rename(root / split / f"{key}.dicom")


def openi_of_kaggle(root: Path) -> None:
    """Kaggle's copy of Open-I: two reports with an image of each view, one of them not indexed."""
    reports = [
        (1, "Pneumonia/lobe;Pleural Effusion/left", "pneumonia", "Xray", "", "", "Opacity left.", "Left pneumonia."),
        (2, "no indexing", "", "Xray", "", "", "", "No acute disease seen."),
    ]  # fmt: skip
    films = [
        (uid, f"{uid}_IM-000{uid}-{n}001.dcm.png", "Lateral" if n == 3 else "Frontal") for uid in (1, 2) for n in (3, 4)
    ]
    table(root / "indiana_reports.csv", "uid,MeSH,Problems,image,indication,comparison,findings,impression", reports)
    table(root / "indiana_projections.csv", "uid,filename,projection", films)
    for uid, name, _ in films:
        film(root / "images" / "images_normalized" / str(name), 70 * uid)


def photograph(file: Path, seed: int) -> None:
    """Writes 40 x 48 pixels of noise in colour below three white rows."""
    from PIL import Image

    file.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 255, (40, 48, 3), dtype=np.uint8)
    pixels[:3] = 255
    Image.fromarray(pixels).save(file)


CAPTIONED = ("train", "restval", "train", "val", "test", "test")
"""The splits of six images in turn."""


def karpathy(folder: Path, name: str, count: int = 6, captions: int = 5, root: str = "") -> Path:
    """Karpathy's JSON of ``count`` images with ``captions`` each, and the images in COCO's folders, or in ``root``."""
    images = []
    for index in range(count):
        split = CAPTIONED[index % 6]
        filepath = "train2014" if split == "train" else "val2014"
        sentences = [
            {
                "raw": f"A photo of thing {index}.\n It is number {c}",
                "sentid": 100 * index + c,
                "imgid": index,
                "tokens": [],
            }
            for c in range(captions)
        ]
        images.append({"filename": f"{name}_{index:03d}.jpg", "split": split, "imgid": index, "sentences": sentences,
                       "sentids": [s["sentid"] for s in sentences], "filepath": filepath, "cocoid": index})  # fmt: skip
        photograph(folder / (root or filepath) / f"{name}_{index:03d}.jpg", index)
    file = folder / f"dataset_{name}.json"
    file.write_text(json.dumps({"images": images, "dataset": name}))
    return file


def cifar100(folder: Path, train: int = 6, test: int = 6, classes: int = 100) -> Path:
    """cifar-100-binary: record i of each file is of class i % classes, red alone, but for its last row, which is white.

    The red is 10 times i % 25.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", train), ("test", test)):
        records = np.zeros((count, RECORD), dtype=np.uint8)
        records[:, 1] = np.arange(count) % classes
        planes = records[:, 2:].reshape(count, 3, 32, 32)
        planes[:, 0] = 10 * (np.arange(count)[:, None, None] % 25)
        planes[:, :, -1] = 255
        (folder / f"{name}.bin").write_bytes(records.tobytes())
    (folder / "fine_label_names.txt").write_text("".join(f"class_{index}\n" for index in range(classes)))
    return folder


def ag_news(folder: Path, train: int = 6, test: int = 6) -> Path:
    """Both tables, whose row i is of class i % 4."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", train), ("test", test)):
        rows = [f'"{1 + i % 4}","Title {i}, said","He said ""{i}"" again"' for i in range(count)]
        (folder / f"{name}.csv").write_text("\n".join(rows) + "\n")
    return folder


def coco_captions(root: Path) -> None:
    """Six images with five captions each."""
    karpathy(root, "coco")


def flickr30k(root: Path) -> None:
    """Six images with five captions each."""
    karpathy(root, "flickr30k", root="flickr30k-images")


COLLECTIONS: dict[str, Callable[[Path], Any]] = {
    "mimic_cxr": mimic, "chexpert": chexpert, "nih_cxr14": nih, "candid_ptx": candid, "openi": openi, "rsna": rsna,
    "covidx": covidx, "covid_radiography": covid_radiography, "messidor": messidor, "brset": brset, "mbrset": mbrset,
    "siim": siim, "chest_imagenome": chest_imagenome, "ehrxqa": ehrxqa, "padchest": padchest,
    "chexpert_plus": chexpert_plus, "vindr_cxr": vindr_cxr,
    "vqa_v2": vqa_v2, "coco_captions": coco_captions, "flickr30k": flickr30k, "cifar100": cifar100, "ag_news": ag_news,
}  # fmt: skip
"""Name of a source: what writes its fixture into a folder."""
