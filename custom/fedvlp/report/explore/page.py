"""The page itself, in Gradio: three tabs, for a phrase, an image, and the space of the vectors.

Gradio stores what a person drops. The image is read at once, its file removed, and only its vector and what the model
sees of it are held, in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedvlp.data.radiograph import MAX_BYTES
from fedvlp.report.explore import pictures
from fedvlp.report.explore.content import FILMS, REPORTS, Explorer, Film
from fedvlp.report.html import text

TITLE = "fedvlp explore"
NOTE = 160  # letters of a report that a point of the projection says
MOST = 48
"""Records that can be shown at once."""

HINT = "Drop an image: its findings, a saliency map, similar images and the nearest reports are shown here."

CLICKS = """
element.addEventListener("click", event => {
    const point = event.target.closest("[data-index]");
    if (point) trigger("click", {index: Number(point.dataset.index)});
});
element.addEventListener("keydown", event => {
    if (event.target.matches("[tabindex]") && ["Enter", " "].includes(event.key)) {
        event.preventDefault();
        event.target.click();
    }
});
"""
"""In the browser: a click on a card, or on a point of the projection, tells the index of its record; so does Enter."""

TO_IMAGE = """() => {
    const shown = [...document.querySelectorAll(".fx img.large")].find(image => image.checkVisibility());
    if (shown) shown.parentElement.scrollIntoView({block: "nearest"});
}"""
"""In the browser: the image that was clicked comes into view, wherever on the page its card is."""

Dropped = tuple[Film, str]
"""An image, and the class that comes first for it, "" where there is none."""


class Answers:
    """What each control of the page is answered with: HTML, and what the next question needs."""

    def __init__(self, explorer: Explorer, names: bool = False) -> None:
        self.explorer = explorer
        self.names = names  # whether names of files are shown: to the owner of the records alone
        if names:
            keys = (explorer.name_of(index) or key for index, key in enumerate(explorer.keys))
            self.explorer = replace(explorer, keys=tuple(keys))

    def head(self) -> str:
        """What the page is about."""
        explorer = self.explorer
        films, reports = (int((~vectors[:, 0].isnan()).sum()) for vectors in (explorer.films, explorer.reports))
        return (
            f'<div class="fx"><h1>{text(TITLE)}</h1><p class="note">{len(explorer):,} records: {films:,} images, '
            f"{reports:,} reports. Research software, and no medical device.</p></div>"
        )

    def phrase(self, phrase: str, top: float) -> str:
        """The images nearest to a phrase."""
        return pictures.cards(self.explorer.near_phrase(phrase, int(top)), "no image")

    def clicked(self, event: Any) -> int:
        """The index of the record of a card or point that was clicked."""
        return int(event.index)

    def viewed(self, index: int | None, level: float, width: float) -> str:
        """The image of a record as its file has it, in a window of grey levels; "" before one was clicked."""
        if index is None:
            return ""
        record = self.explorer.record(index)
        name = self.explorer.name_of(index) if self.names else ""
        said = ", ".join(filter(None, (name, record.site, record.split, *record.labels)))
        return pictures.windowed(self.explorer.original(index), level, width, said)

    def looked_at(self, index: int | None, phrase: str) -> str:
        """Where the model looks for a phrase in the image that was clicked."""
        if index is None:
            raise ValueError("click an image first")
        return pictures.looked(self.explorer.looked(self.explorer.film_of(index), phrase), phrase)

    def drop(self, file: str | None) -> Film:
        """The image in a file, which is removed."""
        if file is None:
            raise ValueError("drop an image: PNG, JPEG, TIFF or DICOM")
        try:
            return self.explorer.film(Path(file))
        finally:
            remove(Path(file))

    def film(self, film: Film | None, classes: str, top: float) -> tuple[Dropped, str, str, str, str]:
        """The image itself, findings, similar images, and the reports nearest to it."""
        if film is None:
            raise ValueError("drop an image first")
        named = [name.strip() for name in classes.split(",") if name.strip()] or None
        first, table = "", "<p>This model has no classes of its own: give some, with commas between them.</p>"
        if named or self.explorer.model.prompts:
            findings = self.explorer.findings(film, named)
            films = int((~self.explorer.films[:, 0].isnan()).sum())
            first, table = findings[0].name, pictures.findings(findings, films, self.explorer.zero_shot_at_chance)
        if not named and (stated := self.explorer.stated(film)):
            first, table = stated[0][0], pictures.stated(stated) + table
        return (
            (film, first),
            pictures.seen(film.prepared),
            table,
            pictures.cards(self.explorer.near(film.vector, int(top)), "no image"),
            pictures.cards(self.explorer.near(film.vector, int(top), REPORTS), "no record there has a report"),
        )

    def looked(self, dropped: Dropped | None, phrase: str) -> str:
        """Where in the dropped image the model looks for a phrase, or, if that is empty, for the first class."""
        if dropped is None:
            raise ValueError("drop an image first")
        film, first = dropped
        said = phrase.strip() or first.lower()
        return pictures.looked(self.explorer.looked(film, said), said) if said else ""

    def space(self, among: str, colour: str) -> str:
        """The vectors in the plane."""
        plane = self.explorer.projection(among, colour)
        reports = [self.explorer.report(row) for row in self.explorer.rows]
        notes = [f"{key}: {report[:NOTE]}" for key, report in zip(self.explorer.keys, reports, strict=True)]
        return pictures.projection(plane, notes, among, colour)

    def point(self, clicked: Any) -> str:
        """The record of a point that was clicked."""
        return pictures.card(self.explorer.record(int(clicked.index)))


def remove(file: Path) -> None:
    """Removes a file that Gradio stored, with the folder of its own in which it lies."""
    file.unlink(missing_ok=True)
    with suppress(OSError):  # another file lies there too
        file.parent.rmdir()


def page(explorer: Explorer, names: bool = False) -> Any:
    """The page as an ASGI application. Call it within ``serve.own_folder``. ``names``: shows names of files."""
    import gradio as gr
    from fastapi import FastAPI

    theme = gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])
    with gr.Blocks(title=TITLE, analytics_enabled=False) as blocks:
        answers = Answers(explorer, names)
        _shown(gr, answers.head())
        with gr.Tab("A phrase"):
            _phrase_tab(gr, answers)
        with gr.Tab("An image"):
            _film_tab(gr, answers)
        with gr.Tab("Embeddings") as space:
            _space_tab(gr, answers, space)
    blocks.queue(default_concurrency_limit=1)
    bare = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    return gr.mount_gradio_app(
        bare,
        blocks,
        path="/",
        theme=theme,
        css=pictures.CSS,
        footer_links=[],
        run_history=False,  # it would store images and reports in the browser
        max_file_size=MAX_BYTES,
        ssr_mode=False,
        mcp_server=False,
        pwa=False,
    )


def _shown(gr: Any, html: str = "") -> Any:
    """A component that shows HTML and runs nothing."""
    return gr.HTML(html, js_on_load=None)


def _section(gr: Any, heading: str, script: str | None = None) -> Any:
    """A component that shows HTML, below a heading; ``script``: what the browser runs for it, of this module's own."""
    _shown(gr, f'<div class="fx"><h2>{text(heading)}</h2></div>')
    return gr.HTML(js_on_load=script)


def _phrase_tab(gr: Any, answers: Answers) -> None:
    with gr.Row():
        phrase = gr.Textbox(label="What to look for", placeholder="left basal effusion", scale=4)
        top = gr.Slider(1, MOST, value=12, step=1, label="How many studies", scale=2)
        button = gr.Button("Search", variant="primary", scale=1, elem_classes="fx-beside")
    films = gr.HTML(js_on_load=CLICKS)
    index = _viewer(gr, answers, films)
    where = gr.Button("Where does the model look for the phrase?")
    seen = _shown(gr)
    for event in (phrase.submit, button.click):
        told = event(_told(gr, answers.phrase), [phrase, top], films, api_visibility="private")
        told.success(lambda: "", None, seen, api_visibility="private")
    where.click(_told(gr, answers.looked_at), [index, phrase], seen, api_visibility="private")


def _viewer(gr: Any, answers: Answers, *clickable: Any) -> Any:
    """The image of the card or point that is clicked, large, with level and window; returns the state of its index."""
    index = gr.State(None)
    with gr.Row(visible=False) as window:
        level = gr.Slider(0, 255, value=128, step=1, label="Level")
        width = gr.Slider(1, 255, value=255, step=1, label="Window")
    large = _shown(gr)
    for component in clickable:
        told = component.click(_of_event(gr, answers.clicked), None, index, api_visibility="private")
        told.success(None, js=TO_IMAGE, api_visibility="private")  # the card of the image that is shown already
    shown = _told(gr, lambda *given: (answers.viewed(*given), gr.Row(visible=given[0] is not None)))
    for event in (index.change, level.change, width.change):
        told = event(shown, [index, level, width], [large, window], api_visibility="private")
        if event == index.change:
            told.success(None, js=TO_IMAGE, api_visibility="private")
    return index


def _of_event(gr: Any, answer: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The answer to an event, which Gradio gives by the annotation of its argument."""

    def told(clicked: Any) -> Any:
        return _told(gr, answer)(clicked)

    told.__annotations__["clicked"] = gr.EventData
    return told


def _film_tab(gr: Any, answers: Answers) -> None:
    film, dropped = gr.State(None), gr.State(None)
    with gr.Row():
        with gr.Column(scale=2):
            file = gr.File(label="An image: PNG, JPEG, TIFF or DICOM", height=150)
            shown = _shown(gr)
            phrase = gr.Textbox(label="Where to look for (empty: the first class)", placeholder="left basal effusion")
            classes = gr.Textbox(label="Classes (empty: the model's own)", placeholder="edema, rib fracture")
            top = gr.Slider(1, MOST, value=4, step=1, label="How many studies")
            ask = gr.Button("Ask", variant="primary")
        with gr.Column(scale=5):
            hint = _shown(gr, f'<div class="fx"><p class="note">{text(HINT)}</p></div>')
            with gr.Column(visible=False) as results:
                findings, seen = _section(gr, "Findings"), _section(gr, "Where the model looked")
                similar, reports = _section(gr, "Similar images", CLICKS), _section(gr, "Nearest reports", CLICKS)
                _viewer(gr, answers, similar, reports)
    answered = [dropped, shown, findings, similar, reports]
    read = file.upload(_told(gr, answers.drop), file, film, api_visibility="private")
    for after in (read.success, read.failure):
        after(lambda: None, None, file, api_visibility="private")  # its file is gone, whether it could be read or not
    for event in (read.success, ask.click, classes.submit):
        told = event(_told(gr, answers.film), [film, classes, top], answered, api_visibility="private")
        opened = told.success(
            lambda: (gr.HTML(visible=False), gr.Column(visible=True)), None, [hint, results], api_visibility="private"
        )
        opened.success(_told(gr, answers.looked), [dropped, phrase], seen, api_visibility="private")
    phrase.submit(_told(gr, answers.looked), [dropped, phrase], seen, api_visibility="private")


def _space_tab(gr: Any, answers: Answers, tab: Any) -> None:
    colours = answers.explorer.colourings
    with gr.Row():
        among = gr.Radio([FILMS, REPORTS], value=FILMS, label="Vectors of")
        colour = gr.Dropdown(colours, value=colours[0], label="Coloured by")
    with gr.Row():
        with gr.Column(scale=4):
            plane = gr.HTML(js_on_load=CLICKS)
        with gr.Column(scale=2, min_width=240):
            record = _shown(gr)
            _viewer(gr, answers, plane)
    for event in (tab.select, among.change, colour.change):
        event(_told(gr, answers.space), [among, colour], plane, api_visibility="private")
    plane.click(_of_event(gr, answers.point), None, record, api_visibility="private")


def _told(gr: Any, answer: Callable[..., Any]) -> Callable[..., Any]:
    """The answer, whose errors are a sentence in the page, with neither a path nor a text of a patient."""

    def told(*given: Any) -> Any:
        try:
            return answer(*given)
        except ValueError as error:
            raise gr.Error(str(error), print_exception=False) from None
        except Exception as error:  # its text may have a path
            kind = type(error).__name__
            raise gr.Error(
                f"this cannot be done ({kind}); try another image or phrase", print_exception=False
            ) from None

    return told
