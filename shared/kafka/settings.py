"""How to reach Kafka. Every client default that can lose or reorder data is set explicitly (field report F17)."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class KafkaSettings:
    """Address, identity and security of a process's Kafka clients."""

    bootstrap_servers: str
    client_id: str
    security_protocol: str = "PLAINTEXT"
    sasl_mechanism: str = "PLAIN"
    sasl_username: str | None = None
    sasl_password: str | None = field(default=None, repr=False)
    request_timeout_seconds: float = 30.0

    def connection_options(self) -> dict[str, Any]:
        """Return the options that every aiokafka client takes."""
        options: dict[str, Any] = {
            "bootstrap_servers": self.bootstrap_servers,
            "client_id": self.client_id,
            "security_protocol": self.security_protocol,
            "request_timeout_ms": int(self.request_timeout_seconds * 1000),
        }
        if self.security_protocol in ("SSL", "SASL_SSL"):
            options["ssl_context"] = ssl.create_default_context()
        if self.security_protocol.startswith("SASL_"):
            options["sasl_mechanism"] = self.sasl_mechanism
            options["sasl_plain_username"] = self.sasl_username
            options["sasl_plain_password"] = self.sasl_password
        return options
