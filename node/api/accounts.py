"""What each API key has, and has had. Pure: time is a parameter."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, final

from ..web.keys import KeyLimits

MAX_ACCOUNTS: Final = 1024  # of peers whose requests other nodes carry here
MINUTE_S: Final = 60.0


class OverLimit(Exception):
    """A key has had what it may have. The text is a line for its owner; `retry_after_s`: when there is more."""

    def __init__(self, text: str, retry_after_s: float) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


@dataclass(slots=True)
class KeyUsage:
    """What a key has had since the node started."""

    requests: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    kv_bytes: int = 0
    usd: float = 0.0


@dataclass(slots=True)
class _Bucket:
    """Fills at `rate` a second up to `most`; what is taken beyond is waited for."""

    rate: float
    most: float
    level: float
    at: float

    def wait_s(self, wanted: float, now: float) -> float:
        """How long until so much, or all that it ever holds, is there."""
        self.level = min(self.most, self.level + self.rate * (now - self.at))
        self.at = now
        return max(0.0, (min(wanted, self.most) - self.level) / self.rate)


@final
class _KeyAccount:
    """One key."""

    def __init__(self, limits: KeyLimits, now: float) -> None:
        self.usage = KeyUsage()
        self.limits = limits
        self.running: Counter[str] = Counter()  # requests of each exchange
        rate = limits.requests_s
        self.requests = _Bucket(rate, max(1.0, rate), max(1.0, rate), now) if rate is not None else None
        tokens = limits.tokens_min
        self.tokens = _Bucket(tokens / MINUTE_S, tokens, tokens, now) if tokens is not None else None


@final
class KeyAccounts:
    """What each key has, and has had. An exchange is one HTTP request; it may be several requests to the network."""

    def __init__(self, limits: Mapping[str, KeyLimits]) -> None:
        self._limits = dict(limits)
        self._accounts: OrderedDict[str, _KeyAccount] = OrderedDict()

    def __repr__(self) -> str:
        return f"<KeyAccounts {len(self._accounts)} keys>"

    @property
    def usage(self) -> dict[str, KeyUsage]:
        """By name of the key; without a key, the name is empty."""
        return {name: account.usage for name, account in self._accounts.items()}

    def cost_by_key(self) -> dict[str, float]:
        """US dollars, of each key of the owner's from the start; those without a key have the empty name. What peers
        carry here costs under the keys of their own fronts."""
        named = {name: self._accounts[name].usage.usd if name in self._accounts else 0.0 for name in self._limits}
        keyless = self._accounts.get("")
        return named if keyless is None else {**named, "": keyless.usage.usd}

    def begin(self, key: str, exchange: str, tokens: int, now: float) -> None:
        """A request of so many tokens at most begins. Raises OverLimit; nothing has changed then, but the count of
        refusals."""
        account = self._account(key, now)
        is_new = not account.running[exchange]
        if is_new:
            self._check(account, key, now)
        if account.tokens is not None and (wait_s := account.tokens.wait_s(float(tokens), now)) > 0:
            self._refuse(account, f"{_of(key)} has had its {account.limits.tokens_min} tokens a minute", wait_s)
        if account.tokens is not None:
            account.tokens.level -= tokens
        if is_new and account.requests is not None:
            account.requests.level -= 1.0
        account.running[exchange] += 1
        account.usage.requests += is_new

    def end(self, key: str, exchange: str, asked: int, had: KeyUsage, now: float) -> None:
        """A request is over, which was to have `asked` tokens at most: those that it did not have are given back."""
        account = self._account(key, now)
        account.running[exchange] -= 1
        if account.running[exchange] <= 0:
            del account.running[exchange]
        usage = account.usage
        usage.prompt_tokens += had.prompt_tokens
        usage.completion_tokens += had.completion_tokens
        usage.kv_bytes += had.kv_bytes
        usage.usd += had.usd
        if account.tokens is not None:
            account.tokens.level += max(0, asked - had.prompt_tokens - had.completion_tokens)

    def _check(self, account: _KeyAccount, key: str, now: float) -> None:
        most = account.limits.concurrent
        if most is not None and len(+account.running) >= most:
            self._refuse(account, f"{_of(key)} has {most} requests under way, the most that it may have", 1.0)
        if account.requests is not None and (wait_s := account.requests.wait_s(1.0, now)) > 0:
            self._refuse(account, f"{_of(key)} may ask {account.limits.requests_s:g} times a second", wait_s)

    def _refuse(self, account: _KeyAccount, text: str, wait_s: float) -> None:
        account.usage.refused += 1
        raise OverLimit(text, wait_s)

    def _account(self, key: str, now: float) -> _KeyAccount:
        account = self._accounts.get(key)
        if account is None:
            account = self._accounts[key] = _KeyAccount(self._limits.get(key, KeyLimits()), now)
            self._forget_idle()
        self._accounts.move_to_end(key)
        return account

    def _forget_idle(self) -> None:
        if len(self._accounts) > MAX_ACCOUNTS + len(self._limits):
            idle = (name for name, one in self._accounts.items() if not +one.running and name not in self._limits)
            if (oldest := next(idle, None)) is not None:
                del self._accounts[oldest]


def _of(key: str) -> str:
    return f"the key {key}" if key else "whoever asks without a key"
