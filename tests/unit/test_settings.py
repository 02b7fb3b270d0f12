"""Settings that are misspelt, out of range or secret."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from billing_service.settings import BillingServiceSettings
from order_service.settings import OrderServiceSettings
from shared.cli import check_roles, refuse_unknown_settings
from shared.errors import Refused
from shared.settings import ServiceSettings

both = pytest.mark.parametrize("settings_class", [OrderServiceSettings, BillingServiceSettings])


@both
def test_a_misspelt_setting_is_refused_with_what_was_meant(settings_class: type[ServiceSettings]) -> None:
    prefix = settings_class.model_config["env_prefix"]
    with pytest.raises(Refused, match=f"did you mean {prefix}DATABASE_URL"):
        refuse_unknown_settings(settings_class, {f"{prefix}DATABASE_ULR": "x", "PATH": "x"})
    refuse_unknown_settings(settings_class, {f"{prefix}DATABASE_URL": "x", "OTHER_SERVICE_PORT": "1"})


@both
def test_passwords_stay_out_of_the_representation(settings_class: type[ServiceSettings]) -> None:
    settings = settings_class(database_url="postgresql://u:hunter2@h/d", kafka_sasl_password="hunter2")
    shown = f"{settings!r} {settings.database('x')!r} {settings.kafka('x')!r}"
    assert "hunter2" not in shown


@pytest.mark.parametrize(
    ("variable", "value", "names"),
    [
        ("ORDER_SERVICE_PORT", "99999", "ORDER_SERVICE_PORT"),
        ("ORDER_SERVICE_DATABASE_POOL_SIZE", "0", "ORDER_SERVICE_DATABASE_POOL_SIZE"),
        ("ORDER_SERVICE_TOPIC_PARTITIONS", "7", "ORDER_SERVICE_TOPIC_PARTITIONS"),
        ("ORDER_SERVICE_LOG_JSON", "true", "did not answer within 0.1 s"),
        ("ORDER_SERVICE_LOG_LEVLE", "INFO", "ORDER_SERVICE_LOG_LEVEL"),
    ],
)
def test_a_bad_setting_ends_the_command_with_one_readable_line(variable: str, value: str, names: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", "from order_service.cli import main; main()", "migrate", "--wait-seconds", "0.1"],
        env={**os.environ, variable: value, "ORDER_SERVICE_DATABASE_URL": "postgresql://127.0.0.1:1/x"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 2
    complaint = [line for line in ran.stderr.splitlines() if line.startswith("order-service: ")]
    assert len(complaint) == 1
    assert names in complaint[0]
    assert "Traceback" not in ran.stderr


def test_roles_default_to_all_and_unknown_ones_are_refused() -> None:
    assert check_roles("s", (), ("api", "relay")) == ("api", "relay")
    assert check_roles("s", ("relay",), ("api", "relay")) == ("relay",)
    with pytest.raises(Refused, match="api relay"):
        check_roles("s", ("boss",), ("api", "relay"))
