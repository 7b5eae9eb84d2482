"""``fedvlp prepare``: a data set by name and folder, decoded once, summed up without a word of a patient."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support import programs
from typer.testing import CliRunner

from fedvlp.cli import app
from fedvlp.deploy.prepare import prepared, source_of

FEDVLP = Path(sys.executable).parent / "fedvlp"
Image = pytest.importorskip("PIL.Image")


def hospital(root: Path) -> Path:
    """A table of six images of canary patients, one of them broken."""
    root.mkdir()
    rng = np.random.default_rng(0)
    with (root / "export.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("image", "report", "patient_id", "Edema"))
        for i in range(6):
            Image.fromarray(rng.integers(0, 256, (40, 30), dtype=np.uint8)).save(root / f"canary-{i}.png")
            writer.writerow((f"canary-{i}.png", "canary edema in both lungs", f"canary^{i}", i % 2))
    (root / "canary-5.png").write_bytes(b"broken")
    return root


def test_the_command_says_what_is_there_and_writes_cache_and_sheet(tmp_path: Path) -> None:
    """Six rows, five used; the second time nothing is decoded. No report, name or path of a patient is printed."""
    root, out = hospital(tmp_path / "export"), tmp_path / "out"
    command = ["fedvlp", "prepare", "table", "--root", root, "--path", "export.csv", "--out", out, "--image-size", "32"]
    command += ["--workers", "2", "--set", "label_columns=Edema"]
    command = [str(word) for word in command]
    done = programs.forked(command, tmp_path, os.environ)
    assert done.returncode == 0, done.stderr
    again = CliRunner().invoke(app, command[1:], catch_exceptions=False)
    words = [" ".join(run.stdout.split()) for run in (done, again)]
    for said in (
        "rows │ 6",
        "used │ 5",
        "skipped: unsupported image format │ 1",
        "Edema │ 2 │ 3 │ 0 │ 0",
        "5 samples in",
    ):
        assert said in words[0], done.stdout
    assert "5%" in words[0]
    assert "6 now" in words[0]
    assert "nothing, the cache was there" in words[1]
    for run in (done, again):
        assert "canary" not in run.stdout + run.stderr
        assert "edema in" not in run.stdout + run.stderr
    assert Image.open(out / "contact-sheet.png").size == (5 * 160, 204)
    page = (out / "data.html").read_text(encoding="utf-8")
    assert "Not used, of 6 rows: unsupported image format (1)." in page
    assert "canary" not in page
    assert f"page {out / 'data.html'}".replace(" ", "") in done.stdout.replace("\n", "").replace(" ", "")


def named(root: Path) -> list[str]:
    """``fedvlp prepare`` of a table of six, whose second report names a doctor and whose fourth film is the first."""
    table = hospital(root) / "export.csv"
    with table.open(newline="") as file:
        rows = list(csv.reader(file))
    rows[2][1] = f"Seen by Dr. Ferreira on 03/11/2019, {rows[2][1]}"
    rows[4][0] = rows[1][0]
    with table.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    command = f"prepare table --root {root} --path export.csv --out {root.parent / 'out'} --image-size 32 --workers 1"
    return f"{command} --set label_columns=Edema --set max_skipped=0.9".split()


def test_nothing_is_decoded_until_the_findings_are_accepted_kind_by_kind(tmp_path: Path) -> None:
    """The refusal counts; a kind that is not accepted refuses; a misspelt kind is answered with all that there are."""
    command, out = named(tmp_path / "export"), tmp_path / "out"
    for accepted, said in (
        ([], "date in 1, name with title in 1"),
        (["--accept-phi-kind", "date"], "name with title in 1)"),
        (["--accept-phi-kind", "dates"], "there are: name-with-title, labelled-name, record-number"),
        (["--show-findings"], "on a terminal alone"),
    ):
        refused = CliRunner().invoke(app, [*command, *accepted])
        assert isinstance(refused.exception, ValueError)
        assert said in str(refused.exception)
        assert "Ferreira" not in str(refused.exception) + refused.output
        assert not out.exists()
    kinds = ["--accept-phi-kind", "date", "--accept-phi-kind", "name-with-title"]
    done = CliRunner().invoke(app, [*command, *kinds], catch_exceptions=False)
    assert done.exit_code == 0
    assert "Ferreira" not in done.output
    assert (out / "contact-sheet.png").exists()


def test_findings_and_unused_rows_are_shown_on_the_owners_terminal(tmp_path: Path) -> None:
    """With the numbers of their rows (row 1 is below the header), before the refusal; nothing of it is in a file."""
    command = named(tmp_path / "export")
    near, far = os.openpty()
    with subprocess.Popen(
        [FEDVLP, *command, "--show-findings"], stdout=far, stderr=far, env=os.environ | {"COLUMNS": "200"}
    ) as process:
        os.close(far)
        shown = b""
        while True:
            try:
                read = os.read(near, 65536)
            except OSError:  # how the end of a terminal reads
                break
            if not read:
                break
            shown += read
    os.close(near)
    assert process.returncode == 2
    words = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", shown.decode())
    assert "2  name with title  ...Seen by Dr. Ferreira on 03/11/2019" in words
    assert "2  date  ...Seen by Dr. Ferreira on 03/11/2019, canary edema" in words
    assert "duplicate image: row 4" in words
    assert words.index("Seen by") < words.index("seem to identify people, so nothing")
    assert not (tmp_path / "out").exists()


def test_prepare_takes_what_simulate_takes(tmp_path: Path) -> None:
    """A table with its settings, as after --data, decodes into the same cache as a name with --root and --path."""
    root = hospital(tmp_path / "export")
    for words in (f"table:{root}/export.csv,min_report_words=1", f"table --root {root} --path export.csv"):
        command = ["prepare", *words.split(), "--out", str(tmp_path / "out"), "--image-size", "32", "--workers", "1"]
        said = CliRunner().invoke(app, [*command, "--accept-phi-risk"], catch_exceptions=False).output
        assert "used" in said
    assert "nothing, the cache was there" in said


def test_a_source_is_found_by_name_with_its_usual_table(tmp_path: Path) -> None:
    for name in ("stage_2_train_labels.csv", "stage_2_detailed_class_info.csv"):
        (tmp_path / name).touch()
    (tmp_path / "stage_2_train_images").mkdir()
    source = source_of("rsna", tmp_path, tmp_path / "out", None, 128, ["labels=Edema,Pneumonia", "seed=3"])
    assert source.path == str(tmp_path / "stage_2_train_labels.csv")
    assert (source.image_size, source.labels, source.seed) == (128, "Edema,Pneumonia", 3)  # type: ignore[union-attr]
    assert source.cache == str(tmp_path / "out")
    assert source.classes == str(tmp_path / "stage_2_detailed_class_info.csv")  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("rnsa", [], "did you mean 'rsna'"),
        ("table", [], "has no usual table; give it with --path"),
        ("rsna", [], "lacks 2 of 2 published items: stage_2_train_labels.csv, stage_2_train_images"),
        ("mimic_cxr", [], "lacks 4 of 4 published items: mimic-cxr-2.0.0-metadata.csv"),
    ],
)
def test_mistakes_are_named(name: str, settings: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        source_of(name, tmp_path, tmp_path, None, 64, settings)
    with pytest.raises(ValueError, match="--root is not a folder"):
        source_of("rsna", tmp_path / "absent", tmp_path, None, 64, [])


def test_speed_and_size_are_of_what_was_decoded(tmp_path: Path) -> None:
    """Six rows of 32 x 32 bytes are 0.000006 GB; progress is told from 0 to 6."""
    told: list[tuple[int, int]] = []
    source = source_of("table", hospital(tmp_path / "export"), tmp_path / "out", "export.csv", 32, [])
    found = prepared(source, 1, lambda ready, rows: told.append((ready, rows)))
    assert told == [(0, 6), (6, 6)]
    assert found.built["decoded"] == "6 now"
    assert found.built["speed"].endswith("images per second")
    assert found.summary["used"] == len(found.cohort) == 5
