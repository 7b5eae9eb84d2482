"""The report's section on the audit: what attacks on the trained model learn of the records."""

from __future__ import annotations

from fedvlp.report.html import table, text
from fedvlp.report.run import Run
from fedvlp.run.audit import BOUNDS, COLUMNS, TITLES, bound_cells, row_cells

EXPLANATION = (
    "Membership: can an attacker who has the model and a record say whether it was trained on? Training records are "
    "compared with held-out ones of other patients of the same site, as many findings, and reports of like length. "
    "Area under the ROC curve in percent, 50 is a coin; then the share of training records that are found while "
    "so many of the others are taken for some. In brackets: 95 % intervals over patients. A stronger attack may exist, "
    "and a low figure is no guarantee; only differential privacy gives a bound."
)
UNIT = "What epsilon leaves to any attack at most, on a record or on whether the whole data set of a site took part."
READ_OFF = {
    TITLES["words"]: (
        "Words that the server, who sees every update, reads off one: the rows of the word embedding that changed "
        "otherwise than all do. Recovered: of the words in the reports that the update was trained on. Right: of the "
        "words that are named. The shipped policy (SendAsReceived) sends these rows as they came; under "
        "privacy-he.json the server sees no update."
    ),
    TITLES["canaries"]: (
        "Canaries: reports of random words, on held-out films. Exposure is log2 of the number of candidates less log2 "
        "of the rank of the true phrase among them; it is about 1.44 bits by chance, and the most where the model has "
        "the phrase by heart."
    ),
    TITLES["sites"]: (
        "Whose update is it? Told by how far it goes against the gradient of held-out records of each site. The area "
        "is of a site's own batches against the others'; by chance: the same with updates and sites in every order, "
        "their own among them (200 where there are more): the mean, and where at least 95 % of these are. Fewer than "
        "five sites have so few orders that no area can lie above."
    ),
    TITLES["inversion"]: (
        "Films drawn from the gradient of one step on two records whose reports are known, compared with their film "
        "and with the most alike of others: found where a reconstruction is more like its own."
    ),
}


def section(run: Run) -> str:
    """The attacks, their controls and the bound of epsilon, as HTML; "" where no audit was run."""
    audit = run.audit
    if audit is None:
        return ""
    out = f"<p>{text(EXPLANATION)}</p>" + "".join(f"<p>{text(sentence)}</p>" for sentence in audit.controls())
    out += table(COLUMNS, [row_cells(row) for row in audit.rows])
    if audit.bounds:
        out += f"<p>{text(UNIT)}</p>{table(BOUNDS, [bound_cells(one) for one in audit.bounds])}"
    for title, head, lines in audit.updates():
        out += f"<p>{text(READ_OFF[title])}</p>{table(head, lines)}"
    return out
