"""The phases of the demo, in order. Each returns when what it shows has happened; DemoFailedError when it cannot."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from chargeonce.audit import Audit
from chargeonce.demo.board import Board
from chargeonce.demo.load import DemoFailedError, Load
from chargeonce.demo.measure import InFlight, Observer
from chargeonce.demo.poison import poison
from chargeonce.demo.story import Kill, Outage, Story
from chargeonce.ledgers import Ledgers
from chargeonce.system import System
from shared.kafka.replay import read_topic, send_copies
from shared.kafka.settings import KafkaSettings

TOPIC = "order-service.order.confirmed"
COPY_EVERY = 5
LOST_ANSWERS_PERCENT = 2

_LOAD_DEADLINE_SECONDS = 120.0
_IN_FLIGHT_DEADLINE_SECONDS = 30.0
_STALL_SECONDS = 45.0
# A kill waits this long for so much in flight, then takes what there is.
_SOON_ENOUGH = 5
_PATIENCE_SECONDS = 1.5


@dataclass(slots=True)
class Stage:
    """What every phase acts with and on."""

    system: System
    load: Load
    observer: Observer
    board: Board
    story: Story

    def release(self, percent: int) -> int:
        """Let clients create this share of all orders, at least one; return how many that are."""
        return self.load.release(max(1, self.load.total * percent // 100))

    async def drained(self) -> None:
        """Return when every released order has been accepted."""
        await self.load.until(self.load.released, _LOAD_DEADLINE_SECONDS)


@dataclass(frozen=True, slots=True)
class Phase:
    """A numbered part of the demo: what it is called, and what it does."""

    title: str
    act: Callable[[Stage], Awaitable[None]]


# ------------------------------------------------------------------------------------------------- undisturbed


async def create_orders(stage: Stage) -> None:
    """Orders come in and are charged, with nothing in the way."""
    count = stage.release(20)
    stage.board.say(f"{count} orders of {stage.load.total} over HTTP from concurrent clients, in 4 currencies")
    await stage.drained()


# ------------------------------------------------------------------------------------------------------- kills


async def kill_consumer(stage: Stage) -> None:
    """SIGKILL the billing consumer in the middle of a batch: the events come again, the charges do not."""
    await _kill(stage, "billing-consumer", stage.observer.unconsumed)


async def kill_executor(stage: Stage) -> None:
    """SIGKILL the executor during its calls: the same key goes out again when the leases have ended."""
    await stage.observer.order_faults({"kind": "slow", "delay_seconds": 0.4})
    try:
        await _kill(stage, "billing-executor", stage.observer.being_called)
    finally:
        await stage.observer.order_faults()


async def kill_relay(stage: Stage) -> None:
    """SIGKILL the order relay with events in its hands: they are still in the outbox."""
    await _kill(stage, "order-relay", stage.observer.unpublished, frozen_first=True)


# What the kills may not use up: the later phases need orders too.
_RESERVED = 0.5


async def _kill(
    stage: Stage, name: str, measure: Callable[[], Awaitable[InFlight]], *, frozen_first: bool = False
) -> None:
    """Kill a process while something is in flight in it. It is frozen while that is measured, so the number is true.

    `frozen_first` freezes it before the orders come in: what waits for it then is there by construction.
    """
    if frozen_first:
        stage.system.signal(name, signal.SIGSTOP)
    count = stage.release(12)
    stage.board.say(f"{count} more orders come in meanwhile")
    if frozen_first:
        await stage.load.until(stage.load.accepted + min(count, _SOON_ENOUGH), _IN_FLIGHT_DEADLINE_SECONDS)
    try:
        async with asyncio.timeout(_IN_FLIGHT_DEADLINE_SECONDS):
            pid, in_flight = await _kill_in_flight(stage, name, measure)
    except TimeoutError:
        raise DemoFailedError(
            f"nothing was in flight in {name} for {_IN_FLIGHT_DEADLINE_SECONDS:g} s, so killing it would prove nothing"
        ) from None
    killed_at = stage.observer.now_seconds
    stage.board.say(f"SIGKILL {name} (pid {pid}): {in_flight.words}", "red")
    stage.board.show(kills=len(stage.story.kills) + 1)
    await stage.system.wait_ready([name])
    back_after = stage.observer.now_seconds - killed_at
    stage.board.say(f"{name} is back after {back_after:.1f} s")
    stage.story.kills.append(Kill(name, pid, killed_at, in_flight.count, in_flight.words, round(back_after, 2)))
    await stage.drained()


async def _kill_in_flight(stage: Stage, name: str, measure: Callable[[], Awaitable[InFlight]]) -> tuple[int, InFlight]:
    loop = asyncio.get_running_loop()
    patient_until = loop.time() + _PATIENCE_SECONDS
    while True:
        stage.load.check()
        stage.system.signal(name, signal.SIGSTOP)
        try:
            # What comes in while it is frozen waits for it: a relay is caught with that, others begin with it at once.
            if not stage.load.running and stage.load.left > _RESERVED * stage.load.total:
                await stage.load.until(stage.load.accepted + stage.load.release(5), _IN_FLIGHT_DEADLINE_SECONDS)
            in_flight = await measure()
            if in_flight.count >= (_SOON_ENOUGH if loop.time() < patient_until else 1):
                return await stage.system.kill(name), in_flight
        finally:
            with contextlib.suppress(KeyError):
                stage.system.signal(name, signal.SIGCONT)
        await asyncio.sleep(0.01)


# ------------------------------------------------------------------------------------------- bad and repeated


async def send_duplicates_and_poison(stage: Stage) -> None:
    """Send events a second time, byte for byte, and messages that nobody can process."""
    stage.release(5)
    kafka = KafkaSettings(stage.system.stack.kafka.bootstrap_servers, client_id="chargeonce-demo")
    published = await read_topic(kafka, TOPIC)
    copies = published[::COPY_EVERY]
    if not copies:
        raise DemoFailedError(f"{TOPIC} is empty, so there is nothing to send twice")
    bad = poison(copies[0], partitions=1 + max(record.partition for record in published))
    middle = len(copies) // 2
    await send_copies(kafka, [*copies[:middle], *bad, *copies[middle:]])
    stage.story.copies_sent += len(copies)
    stage.story.poison_sent += len(bad)
    stage.board.say(
        f"{len(copies)} of {len(published)} published events sent again, {len(bad)} poisonous messages among them"
    )
    await stage.drained()


# ------------------------------------------------------------------------------------------------------ broker


async def restart_broker(stage: Stage) -> None:
    """Stop Kafka, go on taking orders, start it again."""
    began = stage.observer.now_seconds
    await stage.system.stack.kafka.stop()
    accepted_before = stage.load.accepted
    stage.board.show(broker="down")
    share = stage.release(8)  # only now: these cannot have been published before Kafka was gone
    await stage.load.until(accepted_before + share, _LOAD_DEADLINE_SECONDS)
    accepted = stage.load.accepted - accepted_before
    waiting = await stage.observer.unpublished()
    if not accepted or not waiting.count:
        raise DemoFailedError("no order was accepted while Kafka was down, so the outage proves nothing")
    stage.board.say(f"Kafka is down: {accepted} orders accepted meanwhile, {waiting.count} events wait", "red")
    await stage.system.stack.kafka.start()
    ended = stage.observer.now_seconds
    stage.story.outages.append(Outage(began, ended, accepted, waiting.count))
    stage.board.show(broker="up")
    stage.board.say(f"Kafka is back after {ended - began:.1f} s")
    await stage.drained()


# ---------------------------------------------------------------------------------------------------- provider


async def lose_answers(stage: Stage) -> None:
    """The provider moves the money and its answers get lost, by timeouts and by broken connections."""
    lost = max(2, stage.load.total * LOST_ANSWERS_PERCENT // 200)
    await stage.observer.order_faults(
        {"kind": "timeout_after_capture", "probability": 0.3, "remaining": lost, "delay_seconds": 30},
        {"kind": "reset_after_capture", "probability": 0.3, "remaining": lost},
    )
    count = stage.load.release(stage.load.total)
    stage.board.say(f"the last {count} orders come in; up to {2 * lost} answers get lost after the money has moved")
    await stage.drained()


# ------------------------------------------------------------------------------------------------------- proof


async def settle(stage: Stage) -> None:
    """Wait until every order has its result and every duplicate and poisonous message has been dealt with."""
    story, loop = stage.story, asyncio.get_running_loop()
    seen = await stage.observer.snapshot()
    stage.board.say(f"{seen.orders - seen.returned} of {seen.orders} orders wait for their result")
    progress_at, before = loop.time(), seen
    while not (
        seen.returned >= seen.orders >= stage.load.accepted
        and seen.duplicates >= story.copies_sent
        and seen.dead_letters >= story.poison_sent
    ):
        if (seen.returned, seen.charged, seen.duplicates, seen.dead_letters) != (
            before.returned,
            before.charged,
            before.duplicates,
            before.dead_letters,
        ):
            progress_at, before = loop.time(), seen
        elif loop.time() - progress_at > _STALL_SECONDS:
            story.failures.append(f"nothing moved for {_STALL_SECONDS:g} s before all was settled")
            break
        await asyncio.sleep(0.1)
        seen = await stage.observer.snapshot()
    story.answers_lost = await stage.observer.fired_faults()
    story.answers_repeated = await stage.observer.repeated_answers()
    stage.board.say(f"{story.answers_lost} answers were lost; {story.answers_repeated} came again under the same key")


async def prove(stage: Stage) -> None:
    """Compare orders, charges and the provider's payments."""
    system = stage.system
    async with Ledgers(system.orders_url, system.billing_url, system.provider_url) as ledgers:
        result = await Audit(ledgers, recheck_seconds=0.3).run(settled=True)
    stage.story.audit = result
    stage.board.say(
        f"{result.orders_confirmed} orders, {result.charges_captured} charges, {result.payments_captured} payments "
        f"compared in {result.seconds:.1f} s"
    )


PHASES = (
    Phase("Create orders", create_orders),
    Phase("Kill the billing consumer", kill_consumer),
    Phase("Kill the charge executor", kill_executor),
    Phase("Kill the order relay", kill_relay),
    Phase("Send duplicates and poison", send_duplicates_and_poison),
    Phase("Stop and start Kafka", restart_broker),
    Phase("Lose the provider's answers", lose_answers),
    Phase("Let everything settle", settle),
    Phase("Audit", prove),
)
