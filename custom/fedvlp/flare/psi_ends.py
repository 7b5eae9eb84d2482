"""The two ends of FLARE's Diffie-Hellman private set intersection, which learn how many items they share, not which.

FLARE's own ends (nvflare.app_opt.psi) hand the intersection to the site; here both are made without that power, so that
no process ever holds it. And they send the blinded items themselves, where FLARE's send a Bloom filter of them: asked
for false positives of 1e-9, that one (openmined-psi 2.0.6) counted a patient too many in 11 of 400 pairs of 80.
Needs the package openmined-psi; imported by the function that needs it.
"""

from __future__ import annotations

from nvflare.app_opt.psi.dh_psi.dh_psi_client import PSIClient
from nvflare.app_opt.psi.dh_psi.dh_psi_server import PSIServer
from private_set_intersection.python import DataStructure, Request, Response, client, server


class CountingServer(PSIServer):
    """The end that blinds its items first. Each pair of sites gets a new one in each job, with a new secret."""

    def __init__(self, items: list[str]) -> None:
        super().__init__(items)
        self.reveal_intersection = False
        self.psi_server = server.CreateWithNewKey(self.reveal_intersection)

    def setup(self, client_items_size: int) -> bytes:
        """This end's items, blinded and sorted, for an end with so many; no filter, so nothing is counted falsely."""
        message = self.psi_server.CreateSetupMessage(self.fpr, client_items_size, self.items, DataStructure.RAW)
        blinded: bytes = message.SerializeToString()
        return blinded

    def respond(self, request: bytes, expected: int) -> bytes:
        """The other end's items, blinded once more and sorted. Raises ValueError for another number of them."""
        asked = Request()
        asked.ParseFromString(request)
        if len(asked.encrypted_elements) != expected:
            raise ValueError("the request has another number of items than it says")
        response: bytes = self.process_request(request)
        return response


class CountingClient(PSIClient):
    """The end that asks, and counts."""

    def __init__(self, items: list[str]) -> None:
        super().__init__(items)
        self.reveal_intersection = False
        self.psi_client = client.CreateWithNewKey(self.reveal_intersection)

    def request(self) -> bytes:
        """This end's items, blinded and sorted."""
        blinded: bytes = self.get_request(self.items)
        return blinded

    def count(self, response: bytes) -> int:
        """How many items both ends have. Raises ValueError for an answer to another number of items."""
        answered = Response()
        answered.ParseFromString(response)
        if len(answered.encrypted_elements) != len(self.items):
            raise ValueError("the response is to another number of items")
        return int(self.psi_client.GetIntersectionSize(self.setup, answered))
