"""Which processes the system consists of, where they listen, and what each is told of its neighbours."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import chargeonce
from shared.failpoints import VARIABLE as FAILPOINTS_VARIABLE

POSTGRES_PORT_OFFSET = 20
KAFKA_PORT_OFFSET = 21


@dataclass(frozen=True, slots=True)
class Process:
    """One process: its name, the program behind it, the role it runs, and its port's distance from the port base."""

    name: str
    program: str
    role: str
    port_offset: int


BY_NAME = {
    process.name: process
    for process in (
        Process("payment-provider", "payment_provider.app", "", 2),
        Process("order-api", "order_service.cli", "api", 0),
        Process("order-relay", "order_service.cli", "relay", 10),
        Process("order-consumer", "order_service.cli", "consumer", 11),
        Process("billing-api", "billing_service.cli", "api", 1),
        Process("billing-consumer", "billing_service.cli", "consumer", 12),
        Process("billing-executor", "billing_service.cli", "executor", 13),
        Process("billing-relay", "billing_service.cli", "relay", 14),
    )
}
PROCESSES = tuple(BY_NAME)
"""The names of all processes, in the order they are started."""

PREPARATIONS = {"order-prepare": "order_service.cli", "billing-prepare": "billing_service.cli"}
"""What runs once before the processes, migrations and then topics: the name of each, and the program behind it."""


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where a process finds its data and its neighbours."""

    directory: Path
    postgres_port: int
    kafka_bootstrap_servers: str
    provider_url: str


def database_dsn(service: str, postgres_port: int) -> str:
    """The `postgresql://` address of a service's database, as its own user with the documented development password."""
    return f"postgresql://{service}:{service}@127.0.0.1:{postgres_port}/{service}"


def environment(name: str, addresses: Addresses) -> dict[str, str]:
    """This process's environment, without crash points, with what the named process or command needs to know."""
    variables = {key: value for key, value in os.environ.items() if key != FAILPOINTS_VARIABLE}
    code = str(Path(chargeonce.__file__).parent.parent)
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, (code, variables.get("PYTHONPATH"))))
    service = name.split("-", 1)[0]
    if service == "payment":
        variables["PAYMENT_PROVIDER_LEDGER"] = str(addresses.directory / "payment-provider" / "ledger.sqlite3")
        return variables
    prefix = f"{service.upper()}_SERVICE_"
    variables[f"{prefix}DATABASE_URL"] = database_dsn(f"{service}_service", addresses.postgres_port)
    variables[f"{prefix}KAFKA_BOOTSTRAP_SERVERS"] = addresses.kafka_bootstrap_servers
    variables[f"{prefix}HOST"] = "127.0.0.1"
    if name.endswith("-consumer"):
        variables[f"{prefix}CONSUMER_INSTANCE_ID"] = f"{name}-1"
    if service == "billing":
        variables["BILLING_SERVICE_PAYMENT_PROVIDER_URL"] = addresses.provider_url
    return variables


def run_command(process: Process, port: int) -> Sequence[str]:
    """What runs a process with this interpreter, under its name."""
    arguments = ["run", process.role] if process.role else []
    return [*_python(f"from {process.program} import main; main()", process.name), *arguments, "--port", str(port)]


def preparation_command(name: str) -> Sequence[str]:
    """What runs `migrate` and then `topics` of a service, in one interpreter: starting one costs a second of CPU."""
    steps = "; ".join(f"app([{step!r}], standalone_mode=False)" for step in ("migrate", "topics"))
    return _python(f"from {PREPARATIONS[name]} import app; {steps}", name)


def _python(code: str, name: str) -> list[str]:
    return [sys.executable, "-P", "-c", f"import sys; sys.argv[0] = {name!r}; {code}"]
