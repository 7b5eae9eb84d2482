"""Noise that the sites of an encrypted run share: each adds a part, and nobody sees anything but the sum.

Distributed noise (Dwork et al., 2006, doi:10.1007/11761679_29) under the encryption of flare/encryption.py. For the
same epsilon the noise of the mean is about sqrt(N) times smaller than where each of N sites adds all of it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from nvflare.apis.fl_context import FLContext

from fedvlp.core.metric_keys import SITE_EPSILON
from fedvlp.core.privacy import PrivacyError, clip_and_noise, share_of
from fedvlp.core.types import Update
from fedvlp.core.validate import require
from fedvlp.deploy.site_config import envelope_at
from fedvlp.flare.encryption import CIPHERTEXT, Cipher, flatten
from fedvlp.flare.privacy_filters import ClipAndNoise, received


class NoiseAndEncrypt(ClipAndNoise):
    """task_result filter of a site, in the place of ``Encrypt``: clips, adds a share of the noise, and encrypts.

    Site k sends ``n_k (w + d_k min(1, clip / |d_k|)) + N(0, (noise_multiplier clip samples)^2 / honest)`` encrypted;
    of such sums nobody sees anything but the total. ``samples``: training records of the largest site, the same number
    at all sites, so that one site changes the total by at most ``2 clip samples``. ``honest``: shares that are sure to
    be in every total and that its reader does not know. A round needs the updates of a quorum, and a site that reads
    the total knows its own share, so ``honest`` must be below the site's ``envelope.least_quorum``, and lower by one
    for each site that may work together with it. Epsilon is booked for ``honest`` shares: sites that drop out, down to
    the quorum, do not raise it, and those that answer beyond it lower it. Its unit is the whole data set of a site.

    Whoever has a single ciphertext and the sites' common key reads that update under its share of the noise alone.
    """

    def __init__(
        self,
        clip: float,
        noise_multiplier: float,
        honest: int,
        samples: int,
        epsilon: float,
        delta: float,
        dataset: str,
        ledger: str = "",
        marker: str = "",
        context: str = "client_context.tenseal",
    ) -> None:
        super().__init__(clip, noise_multiplier, epsilon, delta, dataset, ledger, marker)
        require(honest >= 1, f"NoiseAndEncrypt: honest is {honest}; at least this site's own share")
        require(samples >= 1, f"NoiseAndEncrypt: samples is {samples}; the training records of the largest site")
        self.honest = honest
        self.samples = samples
        self.context = context

    def filtered(self, update: Update, fl_ctx: FLContext) -> Update:
        self._refuse_uncovered(update)
        if not update.state:
            return update
        self._refuse_small_quorum(fl_ctx)
        own = update.num_samples
        if not 1 <= own <= self.samples:
            raise PrivacyError(
                public=(
                    "this site has {own} training records, and the noise is made for 1 to {samples} at each site;"
                    " all sites agree on another samples of NoiseAndEncrypt"
                ),
                own=own,
                samples=self.samples,
            )
        cipher = Cipher.load(self.context, fl_ctx)
        share = share_of(self.noise_multiplier, self.honest) * self.samples / own  # it is multiplied by own below
        released = clip_and_noise(update.state, received(fl_ctx), self.clip, share)
        rows = cipher.encrypt(flatten(released) * own)
        metrics = {**update.metrics, SITE_EPSILON: self._booked(fl_ctx)}
        return replace(update, state={}, aux={CIPHERTEXT: rows}, metrics=metrics)

    def _refuse_small_quorum(self, fl_ctx: FLContext) -> None:
        """Raises PrivacyError unless ``least_quorum`` guarantees ``honest`` noise shares in every sum."""
        envelope = envelope_at(Path(fl_ctx.get_engine().get_workspace().get_root_dir()))
        least = envelope.least_quorum if envelope else 0
        if least <= self.honest:
            raise PrivacyError(
                public=(
                    "the noise counts on {honest} shares beside the reader's, so a round must need more updates "
                    "than that; this site's envelope.least_quorum is {least}"
                ),
                honest=self.honest,
                least=least,
            )
