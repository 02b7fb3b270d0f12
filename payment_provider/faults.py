"""Faults on demand: rules that say which charge requests meet which failure. They live in memory only."""

import hashlib
import secrets
from collections import Counter
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from payment_provider.charges import LARGEST_ID, ChargeRequest

FaultKind = Literal[
    "timeout_after_capture",
    "reset_after_capture",
    "reset_before_capture",
    "slow",
    "error_500",
    "unavailable_503",
    "rate_limited_429",
    "declined",
    "conflict_409",
    "wrong_body",
]

_DEFAULT_DELAY_SECONDS: dict[FaultKind, float] = {"timeout_after_capture": 30.0, "slow": 1.0}


class FaultRule(BaseModel):
    """Which requests fail, how, and how often. Conditions that are null hold for every request."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Annotated[
        FaultKind,
        Field(
            description="timeout_after_capture: the money moves, the answer is held back until the client is gone, at"
            " most delay_seconds. reset_*: the TCP connection is reset without an answer. slow: delay_seconds pass"
            " before the money moves, meanwhile the key is in use. declined: a new payment is refused (402) and kept."
            " wrong_body: the money moves, the 201 carries a body that is not the contract's. The others answer with"
            " their status, and no money moves."
        ),
    ]
    probability: Annotated[float, Field(ge=0, le=1)] = 1.0
    remaining: Annotated[int | None, Field(ge=0, description="how many more requests this rule may hit; null: any")] = (
        None
    )
    delay_seconds: Annotated[
        float | None, Field(ge=0, le=600, description="null: 30 for timeout_after_capture, 1 for slow")
    ] = None
    retry_after_seconds: Annotated[int, Field(ge=0, le=3600)] = 1
    order_ids: Annotated[list[Annotated[int, Field(ge=1, le=LARGEST_ID)]] | None, Field(max_length=100_000)] = None
    amount_at_least: Annotated[
        Decimal | None, Field(gt=0, allow_inf_nan=False, description="decimal string, compared whatever the currency")
    ] = None
    decline_reason: Annotated[str, Field(pattern=r"^[a-z0-9_]{1,64}$")] = "card_declined"

    @property
    def bounded_delay_seconds(self) -> float:
        return _DEFAULT_DELAY_SECONDS.get(self.kind, 0.0) if self.delay_seconds is None else self.delay_seconds


class FaultPlan(BaseModel):
    """Body of `PUT /faults`. For each request the first rule that hits is the one that happens.

    With a seed, whether a rule hits the n-th request of an order depends on seed, rule, order and n alone, not on the
    order in which concurrent requests arrive (`remaining` is taken in order of arrival).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    rules: Annotated[list[FaultRule], Field(max_length=100)] = []
    seed: Annotated[int | None, Field(ge=0, le=LARGEST_ID)] = None


class InstalledRule(FaultRule):
    """A rule as `GET /faults` shows it: `remaining` counts down, `fired` up."""

    fired: int


class InstalledPlan(BaseModel):
    """What `GET /faults` answers. A seed that was not given was chosen at random: give it again to repeat a run."""

    rules: list[InstalledRule]
    seed: int


@dataclass(slots=True)
class _Armed:
    rule: FaultRule
    orders: frozenset[int] | None
    remaining: int | None
    fired: int = 0
    seen: Counter[int] = field(default_factory=Counter)

    def concerns(self, request: ChargeRequest) -> bool:
        if self.remaining == 0:
            return False
        if self.orders is not None and request.order_id not in self.orders:
            return False
        at_least = self.rule.amount_at_least
        return at_least is None or request.amount_decimal >= at_least


class Faults:
    """The rules in force."""

    def __init__(self) -> None:
        self.install(FaultPlan())

    def install(self, plan: FaultPlan) -> None:
        """Replace all rules and start counting afresh. An empty plan clears them."""
        self._seed = secrets.randbelow(LARGEST_ID) if plan.seed is None else plan.seed
        self._armed = [
            _Armed(rule, None if rule.order_ids is None else frozenset(rule.order_ids), rule.remaining)
            for rule in plan.rules
        ]

    def installed(self) -> InstalledPlan:
        rules = [
            InstalledRule(**(dict(armed.rule) | {"remaining": armed.remaining, "fired": armed.fired}))
            for armed in self._armed
        ]
        return InstalledPlan(rules=rules, seed=self._seed)

    def draw(self, request: ChargeRequest) -> FaultRule | None:
        """The rule that hits this request, counted as fired; None if it is to be served well."""
        for index, armed in enumerate(self._armed):
            if not armed.concerns(request):
                continue
            armed.seen[request.order_id] += 1
            if self._chance(index, request.order_id, armed.seen[request.order_id]) >= armed.rule.probability:
                continue
            armed.fired += 1
            if armed.remaining is not None:
                armed.remaining -= 1
            return armed.rule
        return None

    def _chance(self, index: int, order_id: int, nth: int) -> float:
        """A number in [0, 1), the same for the same arguments and seed."""
        text = f"{self._seed} {index} {order_id} {nth}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=6).digest(), "big") / 2**48
