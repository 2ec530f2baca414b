"""Profiles and rooms for tests of engine processes that are shared."""

from p2pserve.coordinator.plan import Phase
from p2pserve.coordinator.sharing.service_profile import ExpectedMoments, ExpectedService, ServiceProfile
from p2pserve.coordinator.sharing.turn_queue import TurnQueue
from p2pserve.coordinator.sharing.values import SharedRequest, Turn


def expected(mean: float, deviation: float = 0.0, prefill_token_s: float = 1e-3) -> ExpectedService:
    return ExpectedService(
        execution=ExpectedMoments(mean, deviation),
        prompt_tokens=ExpectedMoments(100.0, 0.0),
        output_tokens=ExpectedMoments(10.0, 0.0),
        prefill_token=ExpectedMoments(prefill_token_s, 0.0),
        decode_step=ExpectedMoments(0.1, 0.0),
    )


def profiles_of(**means: tuple[float, float]) -> dict[str, ServiceProfile]:
    """By service: L_s and sd_s."""
    return {service: ServiceProfile(expected(*moments)) for service, moments in means.items()}


class Room:
    """So many requests in a turn, and none of `full`."""

    def __init__(self, requests: int = 100, full: frozenset[object] = frozenset()) -> None:
        self.requests = requests
        self.full = full

    def take(self, request: SharedRequest) -> bool:
        if not self.requests or request.key in self.full:
            return False
        self.requests -= 1
        return True


def step(queue: TurnQueue, now: float, seconds: float, room: Room | None = None) -> Turn | None:
    """Choose, charge, and let prompts that have been computed decode; returns the turn."""
    turn = queue.choose(now, room or Room())
    if turn is not None:
        queue.charge(turn, seconds, now + seconds, tokens=1)
        for request in turn.requests:
            queue.hold_kv(request)
            if turn.phase is Phase.PREFILL:
                queue.begin_decode(request)
    return turn


def keys(turn: Turn | None) -> tuple[str, str, list[object]] | None:
    if turn is None:
        return None
    return turn.service, turn.phase.value, [request.key for request in turn.requests]
