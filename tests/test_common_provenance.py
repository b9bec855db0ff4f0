"""The revision that results name."""

import subprocess

import pytest

from common.base import provenance
from common.base.provenance import git_revision, last_change


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    for name in ("code.py", "results/paper/table.json", "common/base/provenance.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("1\n", encoding="utf-8")
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    for command in (("init", "-q"), ("add", "-A"), (*identity, "commit", "-q", "-m", "first")):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    return tmp_path


def test_a_clean_checkout_is_named_by_its_commit_and_a_changed_one_says_so(checkout):
    head = subprocess.run(["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True).stdout
    (checkout / "notes.txt").write_text("new\n", encoding="utf-8")
    (checkout / "results/paper/table.json").write_text("2\n", encoding="utf-8")
    assert git_revision() == head[:12]  # new files, and results written again, are no changes
    assert head.startswith(last_change(["code.py"]))
    (checkout / "code.py").write_text("2\n", encoding="utf-8")
    assert git_revision() == f"{head[:12]}+changes"
    assert last_change(["code.py"]) == "uncommitted changes"


def test_a_copy_inside_another_repository_has_no_revision_of_it(checkout, monkeypatch):
    (checkout / "third_party/common/base").mkdir(parents=True)
    (checkout / "third_party/common/base/provenance.py").touch()
    monkeypatch.setattr(provenance, "ROOT", checkout / "third_party")
    assert git_revision() == "unknown"


def test_without_git_the_revision_is_unknown(tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_revision() == "unknown"
