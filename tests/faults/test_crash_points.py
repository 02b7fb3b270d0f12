"""A SIGKILL at each crash point of docs/guarantees.md ends in the same audit: every order exactly one charge."""

from __future__ import annotations

import asyncio
import signal

import pytest

from shared.failpoints import POINTS
from tests.faults.conftest import Shop

PROCESS_OF = {"O": "order-api", "R": "order-relay", "B": "billing-consumer", "C": "billing-executor"}

# The same kit runs on the way back; its points are the same and its processes others.
KILLS = [(point, PROCESS_OF[point[0]]) for point in POINTS if point[0] in PROCESS_OF]
KILLS += [("R2", "billing-relay"), ("R3", "billing-relay"), ("B2", "order-consumer"), ("B4", "order-consumer")]


@pytest.mark.parametrize(("point", "name"), KILLS, ids=[f"{point}-{name}" for point, name in KILLS])
async def test_a_sigkill_at_each_point_ends_in_a_clean_audit(shop: Shop, point: str, name: str) -> None:
    duplicates = await shop.duplicates()
    await shop.orders(3)
    await shop.system.stop_process(name)
    await shop.system.start_process(name, failpoints=f"{point}@2")

    ended = asyncio.create_task(shop.system.wait_ended(name, deadline_seconds=60))
    await shop.order_until(ended)
    assert await ended == -signal.SIGKILL, "the point was not reached"

    await shop.system.start_process(name)
    if name == "order-api":
        await shop.system.wait_ready([name])
    await shop.orders(3)
    await shop.audit_is_clean()

    if (point, name) == ("B4", "billing-consumer"):
        assert await shop.duplicates() > duplicates, "what was committed and not acknowledged comes again"
