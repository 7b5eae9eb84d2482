"""A hospital's own filters, for its ``local/privacy.json``: FLARE applies them whatever the job says, before the job's.

Whatever is not an update of fedvlp is refused, and what leaves is put together anew from its checked parts. A refusal
is an error reply that says why.
``RememberReceived`` must be among the ``components`` of the same file: the site's filters come before the job's, so
only the task that reaches the executor is sure to be the decoded one.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from nvflare.apis.dxo import DataKind, from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.filter import Filter
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from torch import Tensor

from fedvlp.core.metric_keys import SITE_EPSILON
from fedvlp.core.privacy import PrivacyError, allowed_metrics, clip_and_noise, is_mistake, is_named, refuse_named
from fedvlp.core.site_error import one_line
from fedvlp.core.types import MODALITIES, FailureKind, State, Update, subject
from fedvlp.core.validate import require
from fedvlp.deploy.envelope import Behind
from fedvlp.deploy.site_config import envelope_at
from fedvlp.evaluation.audit.one_update import standing_out
from fedvlp.federation.site import failure
from fedvlp.flare import messages
from fedvlp.flare.messages import BEHIND
from fedvlp.flare.privacy_budget import Ledger

RECEIVED = "fedvlp_received"


class RememberReceived(FLComponent):
    """Keeps a copy of the state that a task brings until the reply has left (in the task's own context)."""

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.BEFORE_TASK_EXECUTION:
            message, _ = messages.receive_broadcast(fl_ctx.get_prop(FLContextKey.TASK_DATA))
            copy = {name: tensor.detach().clone() for name, tensor in message.state.items()}
            fl_ctx.set_prop(RECEIVED, copy, private=True, sticky=False)


def received(fl_ctx: FLContext) -> State:
    """The state that this task brought. Raises PrivacyError where nobody remembers it."""
    state = fl_ctx.get_prop(RECEIVED)
    if not isinstance(state, dict):
        raise PrivacyError(
            public=(
                'this site\'s privacy.json lacks the component "fedvlp.flare.RememberReceived", or the task '
                "held no state; nothing is sent"
            )
        )
    return state


class UpdateFilter(Filter):
    """A task_result filter over updates. Any error, foreseen or not, is a refusal."""

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        code = shareable.get_return_code(ReturnCode.OK)
        if code != ReturnCode.OK:
            return _bare_failure(code, shareable)
        try:
            update = _within(_checked(shareable, fl_ctx.get_identity_name()), fl_ctx)
            return messages.send_update(self.filtered(update, fl_ctx))
        except Exception as error:
            refusal = failure(error)
            self.log_error(fl_ctx, f"not sent: {refusal.text}")
            return messages.send_failure(refusal)

    @abstractmethod
    def filtered(self, update: Update, fl_ctx: FLContext) -> Update:
        """What may leave. Raises PrivacyError when nothing may."""


def _bare_failure(code: str, shareable: Shareable) -> Shareable:
    """The error reply without anything else that rides on it."""
    reply = make_reply(str(code))
    kind, said = shareable.get_header(messages.KIND), shareable.get_header(messages.REASON)
    if kind in [known.value for known in FailureKind]:
        reply.set_header(messages.KIND, kind)
    if said is not None:
        reply.set_header(messages.REASON, one_line(said))
    return reply


def _checked(shareable: Shareable, site: str) -> Update:
    """The update in a reply. Raises PrivacyError for any other content."""
    try:
        kind = from_shareable(shareable).data_kind
        update = messages.receive_update(shareable, site)
    except Exception:
        raise PrivacyError(public="the reply is not an update of fedvlp") from None
    numbers = all(type(value) is int for value in (update.round, update.num_samples, update.public_id))
    words = type(update.phase) is str and set(update.modalities) <= set(MODALITIES)
    tensors = all(isinstance(t, Tensor) for t in (*update.state.values(), *update.aux.values()))
    figures = all(type(values) is dict for values in (update.scalars, update.metrics))
    if not (kind == DataKind.WEIGHTS and numbers and words and tensors and figures):
        raise PrivacyError(public="the reply is not an update of fedvlp: a part has another type")
    return update


def _within(update: Update, fl_ctx: FLContext) -> Update:
    """The update as far as the site's envelope lets it go, whatever the executor did. Raises EnvelopeError."""
    envelope = envelope_at(Path(fl_ctx.get_engine().get_workspace().get_root_dir()))
    if envelope is None:
        return update
    behind = fl_ctx.get_prop(BEHIND)
    return envelope.passed(update, behind if isinstance(behind, Behind) else Behind())  # uncounted: none


class ClipAndNoise(UpdateFilter):
    """Differential privacy for a site's tensors: clips what training changed, adds noise, and keeps to a budget.

    ``clip``: largest L2 norm of the change. ``noise_multiplier``: the noise's standard deviation in units of ``clip``.
    ``epsilon``, ``delta``: the budget of ``dataset`` over all rounds, restarts and jobs, kept in ``ledger`` (default:
    ``privacy/ledger.json`` in the site's kit) with a ``marker`` elsewhere that tells whether the ledger is whole
    (default: ``local/privacy-ledger-marker.json``; a folder outside of the kit is better). The protected unit is the
    site's whole data set; numbers beside the tensors (metrics, num_samples) are not covered. Updates with ``aux``
    tensors, or with scalars, which would be exact, are refused.
    """

    def __init__(
        self,
        clip: float,
        noise_multiplier: float,
        epsilon: float,
        delta: float,
        dataset: str,
        ledger: str = "",
        marker: str = "",
    ) -> None:
        super().__init__()
        for name, value in {"clip": clip, "noise_multiplier": noise_multiplier, "epsilon": epsilon}.items():
            require(0 < value < math.inf, f"ClipAndNoise: {name} is {value}; it must be positive and finite")
        require(0 < delta < 1, f"ClipAndNoise: delta is {delta}; it must be in (0, 1)")
        require(bool(dataset), "ClipAndNoise: dataset names what the budget belongs to")
        self.clip = clip
        self.noise_multiplier = noise_multiplier
        self.epsilon = epsilon
        self.delta = delta
        self.dataset = dataset
        self.ledger = ledger
        self.marker = marker

    def filtered(self, update: Update, fl_ctx: FLContext) -> Update:
        self._refuse_uncovered(update)
        if not update.state:
            return update
        released = clip_and_noise(update.state, received(fl_ctx), self.clip, self.noise_multiplier)
        return replace(update, state=released, metrics={**update.metrics, SITE_EPSILON: self._booked(fl_ctx)})

    def _refuse_uncovered(self, update: Update) -> None:
        if update.aux:
            raise PrivacyError(public="the method sends tensors beside the model, which noise does not cover here")
        if update.scalars:
            named = ", ".join(sorted(map(str, update.scalars)))
            raise PrivacyError(
                f"the method sends exact figures of this site's records ({named}); take one without, e.g. FedAvg",
                public="the method sends exact figures of this site's records; take one without, e.g. FedAvg",
            )

    def _booked(self, fl_ctx: FLContext) -> float:
        """Books a release; returns the epsilon of all, which follows from the settings and their number alone."""
        kit = Path(fl_ctx.get_engine().get_workspace().get_root_dir())
        marker = Path(self.marker or kit / "local" / "privacy-ledger-marker.json")
        ledger = Ledger(Path(self.ledger or kit / "privacy" / "ledger.json"), marker)
        count, spent = ledger.spend(self.dataset, self.noise_multiplier, self.epsilon, self.delta)
        self.log_info(
            fl_ctx,
            f"privacy of {self.dataset!r}: release {count}, epsilon {spent:.3f} of {self.epsilon:g} at delta "
            f"{self.delta:g}; the unit is the whole data set of this site",
        )
        return spent


class FilterOfNames(UpdateFilter):
    """A filter of the tensors named in ``names`` (exactly, or with ``*``, ``?``, ``[ab]``)."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        require(bool(names) and not isinstance(names, str), f"{type(self).__name__}: names is a list of tensor names")
        self.names = list(names)


class ExcludeVariables(FilterOfNames):
    """Refuses an update that holds a tensor named in ``names`` (exactly, or with ``*``, ``?``, ``[ab]``).

    It is not dropped silently: the server refuses an update without it, so what stays at home is for the job to say
    (its method's ``shares``). A name that matches nothing of the model is refused too.
    """

    def filtered(self, update: Update, fl_ctx: FLContext) -> Update:
        if update.state or update.aux:
            refuse_named({**update.state, **update.aux}, received(fl_ctx), self.names)
        return update


class SendAsReceived(FilterOfNames):
    """Sends the tensors named in ``names`` (exactly, or with ``*``, ``?``, ``[ab]``) as they came.

    For tensors of which a few rows tell which records were seen, word embeddings above all: only the rows of words that
    occurred have a gradient. To the server the site has frozen them. A name that matches nothing is refused, and so is
    an update with another tensor of theirs (SCAFFOLD's ``change/<name>``, a mean gradient), which tells the same.
    """

    def filtered(self, update: Update, fl_ctx: FLContext) -> Update:
        if not update.state:
            return update
        before = received(fl_ctx)
        for pattern in self.names if before else ():  # a method that sends no model has its sites send representations
            if is_mistake(pattern, before):
                raise PrivacyError(
                    f"the name {pattern!r} matches no tensor of this model; correct the site's list",
                    public="a name on this site's list matches no tensor of this model; its engineer corrects the list",
                )
        state = dict(update.state)
        for name in state:
            if any(is_named(name, pattern) for pattern in self.names):
                if name not in before:
                    raise PrivacyError(
                        f"{name} was not received, so it cannot be sent as it came",
                        public="a tensor was not received, so it cannot be sent as it came",
                    )
                state[name] = before[name]
        return replace(update, state=state)


class AuditOutgoing(FilterOfNames):
    """Attacks the update that is about to leave, as its receiver could, and refuses one that tells more than ``most``.

    Of the two-dimensional tensors named in ``names`` (exactly, or with ``*``, ``?``, ``[ab]``), word embeddings above
    all, the rows that changed otherwise than all do tell which words occurred (evaluation/audit/one_update.py). How
    many these are is in the site's own log. Where none or every row stands out, as under noise, nothing is told. List
    it after the filters that protect: it then sees what leaves. ``most`` below 0 refuses nothing. A name that matches
    nothing is a mistake.
    """

    def __init__(self, names: Sequence[str], most: int = 0) -> None:
        super().__init__(names)
        self.most = most

    def filtered(self, update: Update, fl_ctx: FLContext) -> Update:
        if not update.state:
            return update
        before = received(fl_ctx)
        for pattern in self.names if before else ():
            if is_mistake(pattern, before):
                raise PrivacyError(
                    f"the name {pattern!r} matches no tensor of this model; correct the site's list",
                    public="a name on this site's list matches no tensor of this model; its engineer corrects the list",
                )
        for name, tensor in {**update.state, **update.aux}.items():
            own = subject(name)
            if not any(is_named(name, pattern) for pattern in self.names):
                continue
            start = before.get(own)
            if start is None or tensor.ndim != 2 or start.shape != tensor.shape:
                raise PrivacyError(
                    f"{name} is not an embedding of the received model, so what it tells cannot be measured",
                    public="a tensor on this site's audit list is not an embedding of the received model",
                )
            after = tensor if own == name else start.cpu() + tensor.cpu()  # a change travels beside the tensor
            out = int(standing_out(start.cpu(), after.cpu()).sum())
            told = out if out < len(tensor) else 0
            self.log_info(fl_ctx, f"outgoing: {told} of {len(tensor)} rows of {name} stand out")
            if 0 <= self.most < told:
                raise PrivacyError(
                    f"{told} rows of {name} stand out, so words of this site's reports can be read off; at most "
                    f"{self.most} may. Add SendAsReceived for it, or noise",
                    public=(
                        "words of this site's reports can be read off the update; its engineer lists SendAsReceived, "
                        "or noise, before AuditOutgoing"
                    ),
                )
        return update


class AllowMetrics(UpdateFilter):
    """Lets go only the numbers whose names match ``names``; with ``drop`` the others stay, else the update is refused.

    ``digits`` significant digits of each leave, 0: all, and so of the method's scalars. List it last: it then sees the
    metrics that other filters add.
    """

    def __init__(self, names: Sequence[str], drop: bool = False, digits: int = 0) -> None:
        super().__init__()
        require(not isinstance(names, str), "AllowMetrics: names is a list of metric names")
        require(digits >= 0, f"AllowMetrics: digits is {digits}; 0 = as they are")
        self.names = list(names)
        self.drop = drop
        self.digits = digits

    def filtered(self, update: Update, fl_ctx: FLContext) -> Update:
        metrics = allowed_metrics(update.metrics, self.names, self.drop)
        return replace(update, metrics=self._rounded(metrics), scalars=self._rounded(update.scalars))

    def _rounded(self, figures: dict[str, float]) -> dict[str, float]:
        if not self.digits:
            return figures
        return {name: float(f"{value:.{self.digits}g}") for name, value in figures.items()}
