"""The files and commands of docs/extending.md."""

from __future__ import annotations

import json
import re
from pathlib import Path

from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.data.synthetic.files import write

PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text(encoding="utf-8")
FILE = re.compile(r"^\*\*`(\w+\.py)`\*\*\n\n```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
FILES: dict[str, str] = dict(FILE.findall(PAGE))
COMMANDS = [
    line.removeprefix("$ ")
    for block in re.findall(r"^```console\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    for line in block.splitlines()
]


def prepare(folder: Path, studies: int = 300) -> None:
    """What the page's commands find in ``folder``: its files (but those that a command writes), and some films."""
    for name, text in FILES.items():
        if name != "my_method.py":
            (folder / name).write_text(text, encoding="utf-8")
    cohort = SyntheticCohort(sites=2, size=studies, image_size=72).build()
    films = folder / "films"
    for image in (write(cohort, films).parent / "images").iterdir():
        image.rename(films / image.name)
    with (films / "records.jsonl").open("w", encoding="utf-8") as lines:
        for row, (report, patient) in enumerate(zip(cohort.reports, cohort.patients, strict=True)):
            lines.write(json.dumps({"image": f"{row:06d}.png", "report": report, "patient": patient}) + "\n")
