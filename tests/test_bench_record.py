"""Which commit a row was measured at: a checkout knows, so does an archive of it; a copy inside another checkout must not ask that one."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from chunkwise.bench import record

SOURCE = Path(record.__file__)
PLACE = "chunkwise/bench/record.py"


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    return subprocess.run(["git", "-C", str(folder), *who, *arguments], capture_output=True, text=True, check=True).stdout.strip()


def commit_of(folder: Path) -> str:
    """What the copy of the package in a folder takes for its commit."""
    spec = importlib.util.spec_from_file_location("chunkwise.bench.copied", folder / PLACE)
    copied = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copied)
    return copied.commit()


@pytest.fixture
def checkout(tmp_path):
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    folder = (tmp_path / "checkout").resolve()
    (folder / PLACE).parent.mkdir(parents=True)
    shutil.copy(SOURCE, folder / PLACE)
    (folder / ".gitattributes").write_text((SOURCE.parents[2] / ".gitattributes").read_text())
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "all")
    return folder


def test_a_checkout_says_its_commit_and_whether_files_differ(checkout):
    head = git(checkout, "rev-parse", "HEAD")[:10]
    assert commit_of(checkout) == head
    with (checkout / PLACE).open("a") as file:
        file.write("\n")
    assert commit_of(checkout) == head + "+"


def test_an_archive_says_its_commit_even_inside_another_checkout(checkout, tmp_path):
    git(checkout, "archive", "-o", str(tmp_path / "all.zip"), "HEAD")
    inside = checkout / "unpacked"
    with zipfile.ZipFile(tmp_path / "all.zip") as archive:
        archive.extractall(inside)
    assert commit_of(inside) == git(checkout, "rev-parse", "HEAD")[:10]


def test_a_copy_inside_another_checkout_has_no_commit(checkout):
    shutil.copytree(checkout / "chunkwise", checkout / "copy" / "chunkwise")
    assert commit_of(checkout / "copy") == ""
