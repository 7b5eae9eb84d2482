"""What the limit on an update's membership (``envelope.most_membership``) would measure: `fedvlp audit RUN --outgoing`.

A rehearsal, by which a site chooses its limit: every site of a simulated run trains once more, from the trained model.
"""

from __future__ import annotations

from collections.abc import Iterator

from fedvlp.core.types import State
from fedvlp.deploy.envelope import Watched
from fedvlp.evaluation.audit.membership import Membership
from fedvlp.evaluation.audit.one_update import UnmeasuredError, strongest
from fedvlp.federation.site import Site
from fedvlp.federation.site_memory import SiteMemory
from fedvlp.run.assembly import Assembly
from fedvlp.run.evaluate import last_server
from fedvlp.run.folder import RunFolder


def rehearsed(folder: RunFolder) -> Iterator[tuple[str, Membership | str]]:
    """Each site, and the strongest attack on its next update; or why it cannot be measured. The run stays as it is."""
    experiment = folder.experiment()
    assembly = Assembly(experiment)  # whose sites write nothing
    server = assembly.equip(last_server(folder))
    method = experiment.method
    server.phase = method.phases(server.round)[-1]
    for name in assembly.sites():
        site = assembly.site(name)
        site.memory.after((server.round - 1, 0), SiteMemory(folder.path / "sites" / name).newest())
        message = method.broadcast(server, name)
        data = site.client.data = Watched(site.client.data)
        sent = {tensor: value.clone() for tensor, value in site.handle(message).state.items()}
        site.client.data = data.unwatched
        yield name, _measured(site, message.state, sent, data.trained)


def _measured(site: Site, received: State, sent: State, trained: frozenset[int]) -> Membership | str:
    here = {name: tensor.detach().clone() for name, tensor in site.client.state().items()}
    before = here | {name: tensor for name, tensor in site.client.here(received).items() if name in here}
    try:
        return strongest(site.client, before, sent, trained)
    except UnmeasuredError as error:
        return str(error)
