"""What this node shows of its join token, and what the owner's orders make of it."""

from ..trust.keys import PeerId
from ..trust.tokens import Credential, JoinToken, Role, check_network
from .admission import Admission


class OwnCertificate:
    """The certificate of one node in its network."""

    def __init__(self, token: JoinToken, peer: PeerId, admission: Admission) -> None:
        self._token = token
        self._peer = peer
        self._admission = admission
        self._heeded = 0  # the number of the orders that were looked at last

    def asks_as(self, role: Role) -> Role:
        """As what others answer this node, which is in the network in this role."""
        return self._token.grant.asks_as(role)

    def check(self, role: Role, now: float, *, has_joined: bool) -> None:
        """Refuse here what others would refuse. Raises TokenError. Whoever ``has_joined`` in an earlier run is a
        member beyond the end of its certificate, as far as the others know: they are asked."""
        token, grant = self._token, self._token.grant
        check_network(token.network, self._admission.network)
        grant.check_role(role, f"start as {grant.role.value!r} or use another token")
        self._admission.check_revoked(grant)
        if not has_joined:
            self._admission.check_end(self._peer, grant, now)

    def heed_orders(self) -> bool:
        """Look at the owner's orders; returns whether they have brought a later certificate. Raises TokenSpent when
        this node is to go."""
        orders = self._admission.orders
        if self._heeded == orders.number:
            return False
        self._heeded = orders.number
        grant = self._token.grant
        self._admission.check_revoked(grant)
        renewal = orders.renewed.get(grant.certificate)
        renewed = renewal.grant() if renewal is not None and renewal.is_for(self._peer) else None
        if renewal is None or renewed is None or renewed.expires_at <= grant.expires_at:
            return False
        self._token = self._token.renewed(renewal.certificate, renewal.signature)
        return True

    def credential(self) -> Credential:
        """What to show to others."""
        return self._token.credential(self._peer)

    def __repr__(self) -> str:
        return f"OwnCertificate({self._token.grant})"
