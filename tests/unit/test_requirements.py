"""The three requirements files against pyproject.toml and against each other, without the network."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = {"requirements.txt": (), "requirements-lab.txt": ("lab",), "requirements-dev.txt": ("lab", "dev")}
OLDEST_PYTHON = {"python_version": "3.11", "python_full_version": "3.11.0", "sys_platform": "linux"}
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}\b")


def project() -> dict[str, Any]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        loaded: dict[str, Any] = tomllib.load(file)["project"]
    return loaded


def blocks(name: str) -> dict[str, tuple[Requirement, str]]:
    """Pinned requirement and the whole text of its entry, by canonical name; entries for the oldest Python win."""
    found: dict[str, tuple[Requirement, str]] = {}
    for text in re.split(r"\n(?=[A-Za-z0-9])", (ROOT / name).read_text()):
        requirement = Requirement(text.split("\\")[0].strip())
        marker = requirement.marker
        if marker is None or Marker(str(marker)).evaluate(OLDEST_PYTHON):
            found[canonicalize_name(requirement.name)] = (requirement, text)
    return found


def pins(name: str) -> dict[str, Version]:
    return {
        key: Version(str(requirement.specifier).removeprefix("==")) for key, (requirement, _) in blocks(name).items()
    }


@pytest.mark.parametrize("name", EXTRAS)
def test_every_dependency_of_the_project_is_pinned_to_a_version_it_accepts(name: str) -> None:
    declared = list(project()["dependencies"])
    for extra in EXTRAS[name]:
        declared += project()["optional-dependencies"][extra]
    pinned = pins(name)
    wrong = []
    for requirement in map(Requirement, declared):
        version = pinned.get(canonicalize_name(requirement.name))
        if version is None or version not in requirement.specifier:
            wrong.append(f"{requirement}: {version}")
    assert not wrong, f"{name} is not in step with pyproject.toml (run `make requirements`): {wrong}"


@pytest.mark.parametrize("name", EXTRAS)
def test_no_direct_pin_is_left_of_a_dependency_that_was_dropped(name: str) -> None:
    declared = {canonicalize_name(Requirement(text).name) for text in project()["dependencies"]}
    for extra in EXTRAS[name]:
        declared |= {canonicalize_name(Requirement(text).name) for text in project()["optional-dependencies"][extra]}
    direct = {key for key, (_, text) in blocks(name).items() if "chargeonce (pyproject.toml)" in text}
    assert direct == declared, f"{name} is not in step with pyproject.toml: run `make requirements`"


@pytest.mark.parametrize("name", EXTRAS)
def test_every_pin_is_exact_and_hashed_and_names_no_address(name: str) -> None:
    entries = blocks(name)
    assert len(entries) > 40
    for requirement, text in entries.values():
        assert str(requirement.specifier).startswith("=="), text
        assert HASH.search(text), text
    assert not re.search(
        r"://|^\s*(-i|--index|--extra-index|--find-links|--trusted)", (ROOT / name).read_text(), re.MULTILINE
    )


def test_smaller_sets_are_parts_of_the_larger_ones() -> None:
    image, lab, dev = (pins(name).items() for name in EXTRAS)
    assert image < lab < dev
