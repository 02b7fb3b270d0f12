"""The repository's compose.yaml as a project of its own: own name, own ports, own image tag, own volumes."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chargeonce.stack.processes import free_ports

ROOT = Path(__file__).resolve().parents[2]
SERVERS = ("order-db", "billing-db", "kafka")
PROCESSES = (
    "order-api",
    "order-relay",
    "order-consumer",
    "billing-api",
    "billing-consumer",
    "billing-executor",
    "billing-relay",
    "payment-provider",
)
JOBS = ("order-migrate", "billing-migrate", "order-topics", "billing-topics")
# The first run fetches packages and images.
_UP_DEADLINE_SECONDS = 420.0

Container = Mapping[str, Any]


class CommandFailedError(Exception):
    """A command ended with another status than 0, or not in time; the message has what it printed."""


async def run(*command: str, deadline_seconds: float = 30.0, environment: Mapping[str, str] | None = None) -> str:
    """Return what a command printed. Raises CommandFailedError, and FileNotFoundError when there is no such command."""
    process = await asyncio.create_subprocess_exec(
        *command, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    said = f"`{' '.join(command)}`"
    try:
        async with asyncio.timeout(deadline_seconds):
            output, errors = await process.communicate()
    except TimeoutError:
        raise CommandFailedError(f"{said} did not end within {deadline_seconds:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise CommandFailedError(f"{said} ended with {process.returncode}:\n{errors.decode()}{output.decode()}")
    return output.decode()


@dataclass(frozen=True)
class ComposeProject:
    """One project; `up` and `down` bracket its life. Everything else raises CommandFailedError when Docker refuses."""

    name: str = field(default_factory=lambda: f"chargeonce-test-{secrets.token_hex(4)}")
    ports: tuple[int, ...] = field(default_factory=lambda: tuple(free_ports(3)))

    @property
    def image(self) -> str:
        """The tag of the one image, removed by `down`."""
        return f"{self.name}:test"

    @property
    def orders_url(self) -> str:
        """The order service's API."""
        return f"http://127.0.0.1:{self.ports[0]}"

    @property
    def billing_url(self) -> str:
        """The billing service's API."""
        return f"http://127.0.0.1:{self.ports[1]}"

    @property
    def provider_url(self) -> str:
        """The payment provider's API."""
        return f"http://127.0.0.1:{self.ports[2]}"

    async def up(self, *options: str) -> None:
        """Build, start what is down, and return once every service is healthy."""
        await self.compose("up", "--build", "--wait", *options, deadline_seconds=_UP_DEADLINE_SECONDS)

    async def down(self) -> None:
        """Remove containers, networks, volumes and the image, whatever state they are in."""
        try:
            await self.compose("down", "--volumes", "--remove-orphans", "--timeout", "5", deadline_seconds=120)
        finally:
            await run("docker", "image", "rm", "--force", self.image, deadline_seconds=60)

    async def left_behind(self) -> str:
        """What the engine still has of the project, empty after `down`."""
        label = f"label=com.docker.compose.project={self.name}"
        return "".join(
            [
                await run("docker", "ps", "--all", "--filter", label, "--format", "container {{.Names}} "),
                *[
                    await run("docker", kind, "ls", "--filter", label, "--format", f"{kind} {{{{.Name}}}} ")
                    for kind in ("volume", "network")
                ],
            ]
        )

    async def compose(
        self, *arguments: str, deadline_seconds: float = 90.0, environment: Mapping[str, str] | None = None
    ) -> str:
        """Run `docker compose` on this project and return what it printed."""
        variables = dict(zip(("ORDER_PORT", "BILLING_PORT", "PROVIDER_PORT"), map(str, self.ports), strict=True))
        return await run(
            *("docker", "compose", "--ansi", "never", "--project-name", self.name, "--project-directory", str(ROOT)),
            *("--file", str(ROOT / "compose.yaml"), *arguments),
            deadline_seconds=deadline_seconds,
            environment={**os.environ, **variables, "CHARGEONCE_IMAGE": self.image, **(environment or {})},
        )

    async def containers(self) -> dict[str, Container]:
        """What the engine knows of each container, stopped ones too, by service."""
        ids = (await self.compose("ps", "--all", "--quiet")).split()
        inspected = json.loads(await run("docker", "inspect", *ids)) if ids else []
        return {each["Config"]["Labels"]["com.docker.compose.service"]: each for each in inspected}

    async def execute(self, service: str, *command: str, user: str | None = None) -> str:
        """Return what a command printed inside a running container."""
        options = ("--user", user) if user else ()
        return await self.compose("exec", "--no-TTY", *options, service, *command)

    async def crash(self, service: str) -> None:
        """SIGKILL a container's first process from outside of it, and return once the engine has restarted it.

        Not `docker kill`, which tells the engine not to restart; and inside its own namespace no signal kills it. So a
        container that sees the engine's processes does it, which also works where the engine runs in a machine of
        its own.
        """
        before = (await self.containers())[service]
        await run(
            *("docker", "run", "--rm", "--pid=host", "--userns=host", "--user=0", "--network=none", "--cap-drop=ALL"),
            *("--cap-add=KILL", self.image, "python", "-ISc", f"import os; os.kill({before['State']['Pid']}, 9)"),
        )
        async with asyncio.timeout(60):
            while True:
                now = (await self.containers())[service]
                restarted = now["RestartCount"] > before["RestartCount"]
                if restarted and now["State"]["Running"] and now["State"]["Pid"] != before["State"]["Pid"]:
                    return
                await asyncio.sleep(0.1)

    async def until_healthy(self, services: Collection[str] = SERVERS + PROCESSES) -> dict[str, Container]:
        """Wait until each of the services runs and calls itself healthy; return all containers."""
        waiting: list[str] = []
        try:
            async with asyncio.timeout(120):
                while True:
                    containers = await self.containers()
                    waiting = [name for name in services if health(containers[name]) != "healthy"]
                    if not waiting:
                        return containers
                    await asyncio.sleep(0.25)
        except TimeoutError:
            raise AssertionError(f"not healthy after 120 s: {', '.join(waiting)}") from None

    async def report(self) -> str:
        """States and the ends of all logs, for a person who looks for the cause of a failure."""
        states = await self.compose("ps", "--all")
        return f"{states}\n{await self.compose('logs', '--no-color', '--tail', '60')}"


def health(container: Container) -> str:
    """`healthy`, or what stands in the way."""
    state = container["State"]
    return str(state["Health"]["Status"]) if state["Running"] and "Health" in state else str(state["Status"])
