"""The closed list of sentences in which a site may tell the server why it could not answer.

An error's text is written for the site's own log: it may name files, data sets, columns, findings. What leaves is a
sentence of this list with its numbers, or the kind of the error alone. The server repeats nothing else either.
"""

from __future__ import annotations

import builtins
import re
from dataclasses import dataclass
from functools import cache

FIELDS = {
    "number": r"-?(?:[0-9][0-9,]{0,20}(?:\.[0-9]{1,12})?(?:e[+-]?[0-9]{1,3})?|nan|inf)",
    "hash": r"[0-9a-f]{1,16}",
    "version": r"[0-9]{1,4}(?:\.[0-9]{1,4}){0,3}",
}
"""What may stand in a field, by the beginning of its name: ``{number}``, ``{number2}``, ``{hash}``, ``{version}``."""

IN_THE_LOG = "the log of the site says why"
UNKNOWN = "an error"

PYTHONS = {name for name, kind in vars(builtins).items() if isinstance(kind, type) and issubclass(kind, BaseException)}
LIBRARIES = ("JSONDecodeError", "OutOfMemoryError", "SafetensorError")
OWN = (
    "Aborted", "CheckpointError", "CodecError", "DeviceError", "EnvelopeError", "FolderInUseError",
    "ImageAccessError", "InitialWeightsError", "MemoryGoneError", "NoLossError", "NoRecordsError", "NoWeightsError",
    "NormalisationError", "NotHeldError", "PHIError", "PathError", "PluginError", "PrivacyError",
    "PublicSetError", "RecordKeyError", "RecordPrivacyError", "RefusedError", "SelectorError", "SiteConfigError",
    "StateMismatchError", "UnmeasuredError", "UnreadableImageError", "UnreadableRunError",
)  # fmt: skip
KINDS = frozenset({*PYTHONS, *LIBRARIES, *OWN})
"""The kinds of errors that may be named: Python's, of libraries that read files, and fedvlp's own."""


@dataclass(frozen=True)
class Reason:
    """One sentence: how the error has it, and how it leaves. ``*`` stands for any text, none of which leaves."""

    kinds: str  # of errors that say so, with spaces between; "": no kind is named
    said: str
    leaves: str = ""  # "": as it is said, which then has no ``*``

    @property
    def told(self) -> str:
        """The sentence as it leaves."""
        return self.leaves or self.said


NO_TOWER = (
    "the weights of a tower that the job names are not on this machine; they belong into models/ of its kit, under the "
    "tower's name"
)

REASONS = (
    Reason("MemoryError OutOfMemoryError", "this site's memory is too small; lower training.batch_size"),
    Reason(
        "",
        "the training process ended or fell silent before it answered (killed for lack of memory, crashed or hung); "
        "this site's log has its last lines. A smaller training.batch_size needs less memory",
    ),
    Reason(
        "DeviceError",
        "training.device is cuda, and torch finds no GPU on this machine; set it to auto or cpu, or fix the driver "
        "(nvidia-smi shows what it sees)",
    ),
    Reason(
        "FloatingPointError",
        "*: loss term * is * at step {number} of round {number2} phase *. Lower training.lr or look at this site's "
        "data; the server drops this update.",
        "a loss is no finite number at step {number} of round {number2}. Lower training.lr or look at this site's data",
    ),
    Reason(
        "FloatingPointError",
        "* has values that are NaN or infinite after training",
        "a tensor has values that are NaN or infinite after training",
    ),
    Reason(
        "NoLossError",
        "*: the objective has no term for a batch of *: a modality is missing that this method does not complete; "
        "choose another method or objective for this site",
        "the objective has no loss for this site's records: a modality is missing that this method does not complete; "
        "choose another method or objective for this site",
    ),
    Reason(
        "NoLossError",
        "the terms of the objective for this site's records are: *; FedDRA and FedRGB need a contrastive one. Give "
        "them sites with images and reports and an objective that contrasts the two, or choose another method",
        "the objective has no contrastive loss for this site's records, and FedDRA and FedRGB need one. Give them "
        "sites with images and reports and an objective that contrasts the two, or choose another method",
    ),
    # The site's envelope
    Reason(
        "EnvelopeError",
        "records that the update was trained on can be told from others with an area of * (* at least); this site lets "
        "none go above {number}: *",
        "records that the update was trained on can be told from others; this site lets none go above an area of "
        "{number}: fewer local steps, larger batches, or training.dp_noise",
    ),
    Reason(
        "EnvelopeError",
        "rounds.quorum is {number}; this site takes part only where a round needs the updates of at least {number2} "
        "sites, by number",
    ),
    Reason("UnmeasuredError", "the update holds no tensors of the model"),
    Reason("UnmeasuredError", "there are too few held-out records to compare with"),
    Reason("UnmeasuredError", "records lack a film or a report"),
    Reason("UnmeasuredError", "no held-out record is like one that was trained on"),
    Reason(
        "EnvelopeError",
        "the update rests in effect on {number} distinct records; this site sends none of fewer than {number2}: more "
        "local steps, larger batches, a smaller learning rate, or more data",
    ),
    Reason(
        "EnvelopeError",
        "the experiment {hash} is none that this site accepted; its engineer reads the job and runs `fedvlp site "
        "accept`",
    ),
    Reason(
        "EnvelopeError",
        "the method of experiment {hash} sends something of single records beside weights, and this site's engineer "
        "has not accepted it with `fedvlp site accept`: *",
        "the method of experiment {hash} sends something of single records beside weights, and this site's engineer "
        "has not accepted it with `fedvlp site accept`; choose settings that send none",
    ),
    Reason("EnvelopeError", "training.threads is {number}; this site lets a job have at most {number2}"),
    Reason(
        "EnvelopeError",
        "training needs an estimated * GB of memory in each process; this site has, or gives a job, * GB: *",
        "training needs more memory than this site has, or gives a job: a smaller model, batch_size or image_size, or "
        "micro_batch",
    ),
    Reason("EnvelopeError", "the task took longer than the {number} hours that this site gives one"),
    Reason(
        "EnvelopeError",
        "* is a *, which the setting does not take",
        "a setting of the job has a value of a type that it does not take",
    ),
    Reason(
        "EnvelopeError",
        "* is beyond {number}; this site runs no job with such a number",
        "a setting of the job is beyond {number}; this site runs no job with such a number",
    ),
    # The site's data and its file
    Reason("NoRecordsError", "site data: training needs at least {number} records, this site has {number2}"),
    Reason(
        "NoRecordsError",
        "site * has no records in this experiment; there are: *",
        "this site has no records in this experiment",
    ),
    Reason(
        "PHIError",
        "the reports seem to identify people, so nothing is trained on them ({number} records: *). *",
        "the reports seem to identify people, so nothing is trained on them ({number} records)",
    ),
    Reason(
        "PublicSetError",
        "*: the ids of this site's public set have the hash {hash}, the server's {hash2}; both must hold the same "
        "records in the same order",
        "the ids of this site's public set have the hash {hash}, the server's {hash2}; both must hold the same records "
        "in the same order",
    ),
    Reason(
        "SiteConfigError",
        "this machine has no local/fedvlp.json; *",
        "this site has no local/fedvlp.json",
    ),
    Reason(
        "SiteConfigError",
        "local/fedvlp.json is not JSON: line {number}, *",
        "local/fedvlp.json is not JSON: line {number}",
    ),
    Reason("SiteConfigError", "local/fedvlp.json: *", "local/fedvlp.json has a mistake in it"),
    Reason(
        "SiteConfigError",
        "the job brings *; a site opens only what its own local/fedvlp.json names",
        "the job brings a source of its own; a site opens only what its own local/fedvlp.json names",
    ),
    Reason(
        "SiteConfigError",
        "* is no name of a model; a job names towers and gives no path",
        "a tower is no name of a model; a job names towers and gives no path",
    ),
    Reason(
        "SiteConfigError",
        "* is no folder of this site's models/ and no name of a model",
        "a tower is no folder of this site's models/ and no name of a model",
    ),
    Reason(
        "SiteConfigError",
        "site * offers no data set *; its engineer adds one to local/fedvlp.json",
        "this site offers no data set of that name; its engineer adds one to local/fedvlp.json",
    ),
    # The task, and what the site keeps of the run
    Reason(
        "RefusedError",
        "the server's fingerprint is *, this site's is {hash}: server and site must run the same job",
        "the server's fingerprint is not this site's, {hash}: server and site must run the same job",
    ),
    Reason(
        "RefusedError",
        "the server writes wire version {number} (fedvlp {version}), this site reads {number2} to {number3} "
        "(fedvlp {version2}): install one fedvlp at both",
        "the server writes wire version {number} (fedvlp {version}), this site reads {number2} to {number3} "
        "(fedvlp {version2}): install one fedvlp at both",
    ),
    Reason(
        "RefusedError",
        "the server writes wire version *, this site reads {number} to {number2} (fedvlp {version}): install "
        "one fedvlp at both",
        "the server writes another wire version, this site reads {number} to {number2} (fedvlp {version}): install "
        "one fedvlp at both",
    ),
    Reason("RefusedError", "the task is none of this experiment: *", "the task is none of this experiment"),
    Reason(
        "RefusedError",
        "* does not train the received model: *. Ask who runs the server what it sent",
        "this site does not train the received model: it looks made to single out records. Ask who runs the server "
        "what it sent",
    ),
    Reason("PathError", "the server names a run folder outside this site's own; the task is refused"),
    Reason("NotHeldError", "this site's copy of the model is not the one that the server knows of"),
    Reason(
        "MemoryGoneError",
        "this site no longer has its memory from before round {number}: put the run back by at most {number2} rounds, "
        "or to round 0",
    ),
    Reason(
        "StateMismatchError",
        "*: the received state does not fit this model: {number} tensors missing or of another shape (e.g. *), "
        "{number2} unknown (e.g. *). Server and site must run the same experiment.",
        "the received state does not fit this model: {number} tensors missing or of another shape, {number2} unknown. "
        "Server and site must run the same experiment",
    ),
    Reason(
        "CheckpointError",
        "cannot write *: the disk is full; it needs {number} bytes there. *",
        "cannot write a file of the run: the disk is full; it needs {number} bytes",
    ),
    Reason("CheckpointError", "cannot write *", "cannot write a file of the run"),
    Reason("CheckpointError", "cannot read *", "a file of the run is damaged, or gone"),
    Reason(
        "SelectorError",
        "selector: records have {number} labels, the selector knows {number2} classes; extra.classes must name the "
        "data's label columns",
    ),
    Reason(
        "SelectorError",
        "selector: this is site {number} of {number2}; set extra.sites to how many there are",
    ),
    Reason(
        "SelectorError",
        "selector: no * embedding of these records; *",
        "selector: an embedding is missing for these records; leave it out of extra.embeddings, or let the sites "
        "without reports retrieve some (partition.retrieve)",
    ),
    Reason("NoWeightsError", "image_tower *: pretrained weights could not be loaded *", NO_TOWER),
    Reason("NoWeightsError", "text_tower *", NO_TOWER),
    Reason("NoWeightsError", "* has not been fetched on this machine; *", NO_TOWER),
    Reason(
        "InitialWeightsError",
        "model.init * has the SHA-256 *, but the experiment was made with *",
        "the weights to start from are not those that the experiment was made with",
    ),
    Reason(
        "InitialWeightsError",
        "model.init * lacks the checksum of the weights; export the job again, with NAME@SHA256",
        "model.init lacks the checksum of the weights; export the job again, with NAME@SHA256",
    ),
    Reason(
        "InitialWeightsError",
        "model.init * does not fit this model: *",
        "the weights to start from do not fit this model",
    ),
    Reason("InitialWeightsError", "model.init *", "the weights to start from are not there, or damaged"),
    Reason(
        "NormalisationError",
        "*: the server sent {number} tensors of batch normalisation or private adapters, e.g. *; under these settings "
        "it has none. Server and site must run the same experiment",
        "the server sent {number} tensors of batch normalisation or private adapters; under these settings it has "
        "none. Server and site must run the same experiment",
    ),
    # What a site's own filters refuse
    Reason("PrivacyError", "the reply is not an update of fedvlp"),
    Reason("PrivacyError", "the reply is not an update of fedvlp: a part has another type"),
    Reason(
        "PrivacyError",
        'this site\'s privacy.json lacks the component "fedvlp.flare.RememberReceived", or the task held no state; '
        "nothing is sent",
    ),
    Reason("PrivacyError", "the update holds NaN or infinite values; lower training.lr or look at the data"),
    Reason(
        "PrivacyError",
        "metric {number} of {number2} is not on this site's list of names; its engineer adds the name to AllowMetrics "
        "in local/privacy.json, or sets drop there",
    ),
    Reason("PrivacyError", "metric * is no finite number", "a metric is no finite number"),
    Reason(
        "PrivacyError",
        "* is a batch statistic of this site's data; use a model without batch norm (model.head_norm=layer)",
        "a tensor is a batch statistic of this site's data; use a model without batch norm (model.head_norm=layer)",
    ),
    Reason(
        "PrivacyError",
        "* is *; noise protects float32 and float64 alone",
        "a tensor has another type than float32 and float64, which alone noise protects",
    ),
    Reason(
        "PrivacyError",
        "* was not received in this shape and type, so there is no difference to clip*",
        "a tensor was not received in this shape and type, so there is no difference to clip",
    ),
    Reason(
        "PrivacyError",
        "* was not received, so it cannot be sent as it came",
        "a tensor was not received, so it cannot be sent as it came",
    ),
    Reason(
        "PrivacyError",
        "the forbidden name * matches no tensor of this model; correct the site's list",
        "a name that the site forbids matches no tensor of this model; it corrects its list",
    ),
    Reason(
        "PrivacyError",
        "the name * matches no tensor of this model; correct the site's list",
        "a name on the site's list matches no tensor of this model; it corrects its list",
    ),
    Reason(
        "PrivacyError",
        "this site does not let * go ({number} tensors match *); agree on a method that does not share them",
        "this site does not let {number} of the tensors go; agree on a method that does not share them",
    ),
    Reason(
        "PrivacyError",
        "{number} rows of * stand out, so words of this site's reports can be read off; *",
        "words of this site's reports can be read off the update; its engineer lists SendAsReceived, or noise, before "
        "AuditOutgoing",
    ),
    Reason(
        "PrivacyError",
        "* is no embedding that was received, so what it tells cannot be measured",
        "a tensor that the site audits is no embedding that was received",
    ),
    Reason("PrivacyError", "the method sends tensors beside the model, which noise does not cover here"),
    Reason("PrivacyError", "the method sends tensors beside the model, which are not encrypted here"),
    Reason(
        "PrivacyError",
        "the method sends exact figures of this site's records (*); take one without, e.g. FedAvg",
        "the method sends exact figures of this site's records; take one without, e.g. FedAvg",
    ),
    # Its privacy budget
    Reason("PrivacyError", "the accountant is missing at this site: pip install 'fedvlp[privacy]'"),
    Reason(
        "PrivacyError",
        "the privacy budget of * is used up: epsilon {number} of {number2} at delta {number3}, and one more release "
        "would make it {number4}; nothing was sent",
        "the privacy budget is used up: epsilon {number} of {number2} at delta {number3}, and one more release would "
        "make it {number4}; nothing was sent",
    ),
    Reason(
        "PrivacyError",
        "the marker of this site's privacy ledger is gone, so nobody can tell whether the ledger is whole; restore it "
        "from a copy, nothing is sent before",
    ),
    Reason("PrivacyError", "the marker of this site's privacy ledger is damaged; restore it from a copy"),
    Reason(
        "PrivacyError",
        "the privacy ledger of this site is gone, and its marker says that {number} releases were made; restore it "
        "from a copy, nothing is sent before",
    ),
    Reason(
        "PrivacyError",
        "the privacy ledger of this site was altered, or is another site's; restore it from a copy, nothing is sent "
        "before",
    ),
    Reason(
        "PrivacyError",
        "the privacy ledger of this site is cut or an older copy: it holds {number} releases and its marker says "
        "{number2}; restore the newest copy, nothing is sent before",
    ),
    Reason(
        "PrivacyError",
        "the privacy ledger of this site is damaged; restore it from a copy, nothing is sent before",
    ),
    # Encryption
    Reason("PrivacyError", "homomorphic encryption is not installed here: pip install 'fedvlp[he]'"),
    Reason(
        "PrivacyError",
        "this kit has no startup/*: provision with HEBuilder",
        "this kit has no key for encryption: provision with HEBuilder",
    ),
    Reason(
        "PrivacyError",
        "* is *; of floating-point tensors only float32 ones are encrypted",
        "of floating-point tensors only float32 ones are encrypted, and the model has others",
    ),
    Reason(
        "PrivacyError",
        "* has {number} training records; with weights as large as this model's, the parameters of the encryption hold "
        "the sum of at most {number2}: provision with a smaller scale_bits or larger coeff_mod_bit_sizes (HEBuilder in "
        "project.yml), or offer the job fewer records",
        "this site has {number} training records; with weights as large as this model's, the parameters of the "
        "encryption hold the sum of at most {number2}: provision with a smaller scale_bits or larger "
        "coeff_mod_bit_sizes (HEBuilder in project.yml), or offer the job fewer records",
    ),
    Reason(
        "PrivacyError",
        "a weight times num_samples is *; the encryption's parameters hold {number}: *",
        "a weight times num_samples is beyond the {number} that the encryption's parameters hold: provision with a "
        "smaller scale_bits",
    ),
    Reason(
        "PrivacyError",
        "training moved the weights by a norm of *, one of them by *; this site encrypts changes of up to {number} and "
        "{number2}: *",
        "training moved the weights by more than this site encrypts: a norm of {number}, one of them by {number2}",
    ),
    Reason("PrivacyError", "the update has other tensors than the task brought, so its change is unknown"),
    Reason(
        "PrivacyError",
        "this site has {number} training records, and the noise is made for 1 to {number2} at each site; all sites "
        "agree on another samples of NoiseAndEncrypt",
    ),
    Reason(
        "PrivacyError",
        "the noise counts on {number} shares beside the reader's, so a round must need more updates than that; this "
        "site's envelope.least_quorum is {number2}",
    ),
)
"""Whoever words a new error for the server's eyes adds it here; any other crosses as its kind."""

LONGEST = 2000
"""Characters of a text that is looked at; none of fedvlp's own is nearly as long."""


def for_the_server(text: object) -> str:
    """``text``, the words of an error that begin with its kind, as far as the list lets them leave a site: one line.

    What has passed once passes again as it is.
    """
    words = text if isinstance(text, str) else ""
    kind, _, said = words.partition(": ")
    for candidate, begins in ((said, kind), (words, "")):
        for pattern, told in _patterns(begins) if len(words) <= LONGEST else ():
            match = pattern.fullmatch(candidate)
            if match:
                return (f"{begins}: " if begins else "") + told.format(**match.groupdict())
    return f"{kind if kind in KINDS else UNKNOWN}: {IN_THE_LOG}"


@cache
def _by_kind() -> dict[str, list[tuple[re.Pattern[str], str]]]:
    """Kind -> the forms in which its sentences arrive (as told already, or as said), and how they leave."""
    forms: dict[str, list[tuple[re.Pattern[str], str]]] = {}
    for reason in REASONS:
        for kind in reason.kinds.split() or [""]:
            known = forms.setdefault(kind, [])
            known += [(pattern_of(form), reason.told) for form in dict.fromkeys((reason.told, reason.said))]
    return forms


def _patterns(kind: str) -> list[tuple[re.Pattern[str], str]]:
    return _by_kind().get(kind, [])


def pattern_of(form: str) -> re.Pattern[str]:
    """What a sentence with fields and ``*`` matches."""
    made = ""
    for token in re.split(r"(\*|\{\w+\})", form):
        if token == "*":
            made += ".*?"
        elif token.startswith("{"):
            name = token[1:-1]
            made += f"(?P<{name}>{FIELDS[name.rstrip('0123456789')]})"
        else:
            made += re.escape(token)
    return re.compile(made, re.DOTALL)
