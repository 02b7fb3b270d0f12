"""Which charge requests meet which ordered fault."""

import random
from decimal import Decimal

from payment_provider.charges import ChargeRequest
from payment_provider.faults import FaultPlan, FaultRule, Faults


def request_for(order_id: int, amount: str = "10.00") -> ChargeRequest:
    return ChargeRequest(order_id=order_id, amount=amount, currency="EUR")


def hits(faults: Faults, order_ids: list[int]) -> set[tuple[int, int]]:
    """(order, nth request of that order) of every request that a rule hit."""
    seen: dict[int, int] = {}
    hit = set()
    for order_id in order_ids:
        seen[order_id] = seen.get(order_id, 0) + 1
        if faults.draw(request_for(order_id)) is not None:
            hit.add((order_id, seen[order_id]))
    return hit


def test_with_a_seed_the_same_requests_fail_in_whatever_order_they_arrive() -> None:
    plan = FaultPlan(rules=[FaultRule(kind="error_500", probability=0.3)], seed=7)
    first, second, other = Faults(), Faults(), Faults()
    first.install(plan)
    second.install(plan)
    other.install(plan.model_copy(update={"seed": 8}))
    orders = [order_id for order_id in range(1, 301) for _ in range(3)]
    shuffled = orders.copy()
    random.Random(1).shuffle(shuffled)

    expected = hits(first, orders)

    assert hits(second, shuffled) == expected
    assert hits(other, orders) != expected
    assert 0.2 < len(expected) / len(orders) < 0.4


def test_a_plan_without_seed_tells_the_seed_that_repeats_it() -> None:
    rules = [FaultRule(kind="error_500", probability=0.5)]
    first, again = Faults(), Faults()
    first.install(FaultPlan(rules=rules))
    again.install(FaultPlan(rules=rules, seed=first.installed().seed))
    orders = list(range(1, 101))
    assert hits(first, orders) == hits(again, orders)


def test_remaining_runs_out_and_the_next_rule_takes_over() -> None:
    faults = Faults()
    faults.install(
        FaultPlan(rules=[FaultRule(kind="error_500", remaining=2), FaultRule(kind="unavailable_503", remaining=1)])
    )
    drawn = [faults.draw(request_for(1)) for _ in range(4)]
    assert [rule and rule.kind for rule in drawn] == ["error_500", "error_500", "unavailable_503", None]
    assert [(rule.remaining, rule.fired) for rule in faults.installed().rules] == [(0, 2), (0, 1)]


def test_order_and_amount_conditions_both_have_to_hold() -> None:
    faults = Faults()
    faults.install(FaultPlan(rules=[FaultRule(kind="declined", order_ids=[2, 3], amount_at_least=Decimal("100.00"))]))
    assert faults.draw(request_for(1, "500.00")) is None
    assert faults.draw(request_for(2, "99.99")) is None
    assert faults.draw(request_for(2, "100")) is not None


def test_probability_zero_never_and_one_always_hits() -> None:
    faults = Faults()
    faults.install(FaultPlan(rules=[FaultRule(kind="slow", probability=0), FaultRule(kind="error_500")]))
    kinds = {rule.kind for order_id in range(1, 500) if (rule := faults.draw(request_for(order_id)))}
    assert kinds == {"error_500"}
