"""compose.yaml for real: what the containers may do, and that each order is charged once while they are killed."""

from __future__ import annotations

import asyncio
import json
import sys

import aiohttp
import pytest

from tests.compose.project import JOBS, PROCESSES, ROOT, SERVERS, ComposeProject, health, run
from tests.compose.traffic import Shop

LARGEST_INSTALLATION_KIB = 135 * 1024  # what the image adds to python:3.13-slim; a tenth is debug information in wheels


async def test_each_order_is_charged_once_while_containers_are_killed_and_restarted(
    project: ComposeProject, client: aiohttp.ClientSession
) -> None:
    await project.until_healthy()
    shop = Shop(project, client)
    await shop.faults({"kind": "slow", "delay_seconds": 0.4})  # so that calls are in flight when the executor dies
    async with shop.open():
        await shop.more(40)
        await project.crash("billing-consumer")

        await shop.more(40)
        async with asyncio.timeout(30):
            while await shop.charges_running() < 2:
                await asyncio.sleep(0.02)
        await project.crash("billing-executor")
        await shop.more(40)

        await project.compose("stop", "kafka")
        refused = shop.refused
        await shop.more(40)
        assert shop.refused == refused, "the API refused orders because Kafka was away"
        assert (await shop.get(f"{project.orders_url}/livez"))["status"] == "ok"
        await project.compose("start", "kafka")
        await project.until_healthy(["kafka"])

        await project.compose("restart", "order-db")
        await shop.more(40)
        await project.compose("restart", "billing-db")
        await shop.more(40)
    await shop.faults()

    orders = await shop.settled()
    containers = await project.until_healthy()
    assert shop.acknowledged <= orders.keys(), "an acknowledged order is lost"
    assert containers["billing-consumer"]["RestartCount"] >= 1
    assert containers["billing-executor"]["RestartCount"] >= 1
    assert any(charge["attempts"] > 1 for charge in await shop.charges()), "the executor died with nothing in flight"
    await assert_each_is_charged_once(shop)


async def test_data_outlives_its_containers(project: ComposeProject, client: aiohttp.ClientSession) -> None:
    await project.until_healthy()
    shop = Shop(project, client)
    before = await shop.order()
    assert before is not None
    await shop.settled()
    await project.compose(
        *("up", "--wait", "--force-recreate", "--no-deps", *SERVERS, "payment-provider"), deadline_seconds=180
    )
    await project.until_healthy()
    async with asyncio.timeout(60):
        while (after := await shop.order()) is None:
            await asyncio.sleep(0.2)
    assert {before, after} <= (await shop.settled()).keys()
    await assert_each_is_charged_once(shop)


async def assert_each_is_charged_once(shop: Shop) -> None:
    """By the provider's own ledger first, then by the audit over all three."""
    project = shop.project
    orders, captured = await shop.orders(), await shop.captured()
    assert {key: len(payments) for key, payments in captured.items()} == dict.fromkeys(orders, 1)
    assert all(
        (payments[0]["amount"], payments[0]["idempotency_key"])
        == (orders[key]["total_amount"], orders[key]["event_id"])
        for key, payments in captured.items()
    )
    addresses = ("--orders-url", project.orders_url, "--billing-url", project.billing_url)
    audited = json.loads(
        await run(
            *(sys.executable, "-m", "chargeonce", "audit", "--json", "--settled"),
            *(*addresses, "--provider-url", project.provider_url),
            deadline_seconds=60,
        )
    )
    assert audited["clean"], audited
    assert audited["results_pending"] == audited["dead_letters"] == 0, audited
    counted = {audited[key] for key in ("orders_confirmed", "charges_captured", "payments_captured")}
    assert counted == {len(orders)}, audited


async def test_a_second_up_changes_nothing(project: ComposeProject) -> None:
    await project.until_healthy()
    before = await project.containers()
    await project.up()
    after = await project.containers()
    for name in SERVERS + PROCESSES:
        assert after[name]["Id"] == before[name]["Id"], name
        assert after[name]["State"]["StartedAt"] == before[name]["State"]["StartedAt"], name
    for name in JOBS:
        assert after[name]["Id"] == before[name]["Id"], name
        assert after[name]["State"]["ExitCode"] == 0, name


async def test_every_process_ends_with_status_0_when_it_is_told_to_stop(project: ComposeProject) -> None:
    await project.until_healthy()
    try:
        await project.compose("stop", *PROCESSES)
        stopped = await project.containers()
        assert {name: stopped[name]["State"]["ExitCode"] for name in PROCESSES} == dict.fromkeys(PROCESSES, 0)
    finally:
        await project.up()


async def test_every_service_is_there_and_healthy(project: ComposeProject) -> None:
    containers = await project.until_healthy()
    assert set(containers) == {*SERVERS, *PROCESSES, *JOBS}
    assert {health(containers[name]) for name in JOBS} == {"exited"}
    for name in SERVERS + PROCESSES:
        assert containers[name]["HostConfig"]["RestartPolicy"]["Name"] == "unless-stopped", name
        assert containers[name]["HostConfig"]["Memory"] > 0, name


@pytest.mark.parametrize("service", SERVERS + PROCESSES)
async def test_no_container_runs_as_root_or_with_capabilities(project: ComposeProject, service: str) -> None:
    await project.until_healthy([service])
    status = dict(
        line.split(":\t", 1) for line in (await project.execute(service, "cat", "/proc/1/status")).splitlines()
    )
    assert "0" not in status["Uid"].split()
    assert "0" not in status["Gid"].split()
    assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0
    assert status["NoNewPrivs"] == "1"


async def test_root_file_systems_are_read_only_except_that_of_kafka(project: ComposeProject) -> None:
    containers = await project.until_healthy()
    writable = {name for name, each in containers.items() if not each["HostConfig"]["ReadonlyRootfs"]}
    assert writable == {"kafka"}


async def test_all_data_lies_in_volumes_of_the_project(project: ComposeProject) -> None:
    volumes = {
        (name, mount["Name"], mount["Destination"])
        for name, each in (await project.until_healthy()).items()
        for mount in each["Mounts"]
    }
    places = {
        "order-db": "/var/lib/postgresql",
        "billing-db": "/var/lib/postgresql",
        "kafka": "/var/lib/kafka/data",
        "payment-provider": "/var/lib/payment-provider",
    }
    assert volumes == {(name, f"{project.name}_{name}", place) for name, place in places.items()}


async def test_only_the_three_apis_are_published_and_only_to_this_machine(project: ComposeProject) -> None:
    published = {
        (name, binding["HostIp"], int(binding["HostPort"]))
        for name, each in (await project.until_healthy()).items()
        for bindings in (each["NetworkSettings"]["Ports"] or {}).values()
        for binding in bindings or ()
    }
    apis = zip(("order-api", "billing-api", "payment-provider"), project.ports, strict=True)
    assert published == {(name, "127.0.0.1", port) for name, port in apis}


async def test_image_is_small_and_carries_three_commands_and_no_tools_to_build_with(project: ComposeProject) -> None:
    commands = await project.execute("order-api", "ls", "/opt/chargeonce/bin")
    assert {"order-service", "billing-service", "payment-provider"} <= set(commands.split())
    assert "chargeonce" not in commands.split()
    installed = await project.execute("order-api", "du", "-sk", "/opt/chargeonce")
    assert int(installed.split()[0]) < LARGEST_INSTALLATION_KIB
    found = await project.execute(
        *("order-api", "python", "-c"),
        "import importlib.util as u, shutil; print([n for n in ('pip', 'hatchling', 'pytest') if u.find_spec(n)]"
        " + [n for n in ('gcc', 'cc', 'make', 'git') if shutil.which(n)])",
    )
    assert found.strip() == "[]"


async def test_image_says_what_it_is_and_holds_no_secret(project: ComposeProject) -> None:
    await project.until_healthy(["order-api"])
    (image,) = json.loads(await run("docker", "image", "inspect", project.image))
    config = image["Config"]
    assert (config["User"], config["StopSignal"]) == ("10001:10001", "SIGTERM")
    assert config["Labels"]["org.opencontainers.image.title"] == "chargeonce"
    assert config["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"
    history = await run("docker", "history", "--no-trunc", "--format", "{{.CreatedBy}}", project.image)
    words = f"{config['Env']} {history}".lower()
    assert not [word for word in ("password", "secret", "token", "api_key", "postgresql://") if word in words]


async def test_every_password_can_be_replaced(engine: None) -> None:
    chosen = {"ORDER_DB_PASSWORD": "orders-own", "BILLING_DB_PASSWORD": "billings-own"}
    configuration = await ComposeProject().compose("config", environment=chosen)
    assert "development-only" not in configuration
    for password in chosen.values():
        assert f"POSTGRES_PASSWORD: {password}" in configuration
        assert f":{password}@" in configuration


def test_the_builder_is_sent_nothing_but_what_the_image_is_made_of() -> None:
    allowed = {
        line[1:].rstrip("/") for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")
    }
    copied = {
        source.rstrip("/")
        for line in (ROOT / "Dockerfile").read_text().splitlines()
        if line.startswith("COPY ") and "--from" not in line
        for source in line.split()[1:-1]
    }
    assert copied == allowed
