"""What may not be in the repository, whoever puts it there."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REGISTRY = re.compile(
    r"(?:https?://|//)[A-Za-z0-9.-]*(?:pypi|pythonhosted|maven|npmjs|golang|crates|debian)[A-Za-z0-9.-]*"
)
MACHINE_PATH = re.compile(r"(?:^|[^A-Za-z0-9_.])/(?:work|farm|root)/", re.MULTILINE)
OUTSIDE_PATH = re.compile(r"(?:^|[^A-Za-z0-9_.$}])/home/[a-z]", re.MULTILINE)
PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----")
FORBIDDEN = {
    "a package registry": REGISTRY,
    "a machine's path": MACHINE_PATH,
    "a user's home": OUTSIDE_PATH,
    "a key": PRIVATE_KEY,
}


def tracked_files() -> list[Path]:
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        pytest.skip("not a git checkout")
    listed = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def violations(text: str) -> list[str]:
    return [f"{what}: {found.group()!r}" for what, pattern in FORBIDDEN.items() if (found := pattern.search(text))]


def test_no_tracked_file_names_a_registry_or_a_path_of_one_machine() -> None:
    files = tracked_files()
    assert files
    found = {}
    for path in files:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a picture
        if wrong := violations(text):
            found[str(path.relative_to(ROOT))] = wrong
    assert not found


@pytest.mark.parametrize(
    "text",
    [
        "--index-url https:/" + "/py" + "pi.example/simple",
        "https:/" + "/files.python" + "hosted.org/x.whl",
        "path = '/wo" + "rk/main'",
        "/ro" + "ot/.cache",
        "cd /ho" + "me/jo",
        "-----BEGIN RSA PRIV" + "ATE KEY-----",
    ],
)
def test_each_forbidden_kind_is_recognised(text: str) -> None:
    assert violations(text)


def test_working_files_are_ignored_by_git() -> None:
    tracked_files()
    for name in (".venv/x", "var/x", ".mypy_cache/x"):
        done = subprocess.run(["git", "-c", "safe.directory=*", "check-ignore", "-q", name], cwd=ROOT, check=False)
        assert done.returncode == 0, name
