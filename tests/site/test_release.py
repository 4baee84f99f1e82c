"""Releases: version, changelog, checksums and audits; `.ci/run` makes a whole release without a tag."""

import datetime
import hashlib
import json
import subprocess
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

import onnxplace

ROOT = Path(__file__).parents[2]
DAY = datetime.date(2026, 11, 23)
CHANGES = "# Changelog\n\n## Unreleased\n\n- New.\n\n## 0.1.0 (2026-01-01)\n\n- Old.\n"


def load(name: str) -> ModuleType:
    spec = spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def release() -> ModuleType:
    return load("release")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A clone with a version, a changelog and a plugin."""
    (tmp_path / "onnxplace").mkdir()
    (tmp_path / "plugins/onnxplace-learned").mkdir(parents=True)
    (tmp_path / "plugins/onnxplace-learned/pyproject.toml").write_text('name = "learned"\nversion = "0.1.0"\n')
    (tmp_path / "onnxplace/_version.py").write_text('"""Doc."""\n\n__version__ = "0.1.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(CHANGES)
    return tmp_path


def test_a_release_dates_the_notes_and_writes_the_version(release, checkout):
    release.apply_release(checkout, release.Version("0.2.0"), DAY)
    assert (checkout / "onnxplace/_version.py").read_text() == '"""Doc."""\n\n__version__ = "0.2.0"\n'
    plugin = (checkout / "plugins/onnxplace-learned/pyproject.toml").read_text()
    assert plugin == 'name = "learned"\nversion = "0.2.0"\n'
    text = (checkout / "CHANGELOG.md").read_text()
    assert text.startswith("# Changelog\n\n## Unreleased\n\n## 0.2.0 (2026-11-23)\n\n- New.\n\n## 0.1.0")
    with pytest.raises(release.ReleaseError, match="expected notes"):
        release.release_notes(text)


def test_the_first_release_dates_the_section_that_has_its_number(release, checkout):
    (checkout / "CHANGELOG.md").write_text("# Changelog\n\n## 0.1.0 (unreleased)\n\n- New.\n")
    release.apply_release(checkout, release.Version("0.1.0"), DAY)
    text = (checkout / "CHANGELOG.md").read_text()
    assert text == "# Changelog\n\n## Unreleased\n\n## 0.1.0 (2026-11-23)\n\n- New.\n"
    with pytest.raises(release.ReleaseError, match="expected notes"):
        release.apply_release(checkout, release.Version("0.1.0"), DAY)


@pytest.mark.parametrize("changelog", ["# Changelog\n", "## Unreleased\n\n## 0.1.0\n\n- Old.\n"])
def test_a_release_without_notes_is_refused_and_changes_nothing(release, checkout, changelog):
    (checkout / "CHANGELOG.md").write_text(changelog)
    with pytest.raises(release.ReleaseError, match="write a sentence for each change"):
        release.apply_release(checkout, release.Version("0.2.0"), DAY)
    assert '"0.1.0"' in (checkout / "onnxplace/_version.py").read_text()


def test_a_version_is_released_once(release, checkout):
    with pytest.raises(release.ReleaseError, match=r"0\.1\.0 has a section already"):
        release.apply_release(checkout, release.Version("0.1.0"), DAY)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0.0.9", "expected a version from 0.1.0 on"),
        ("0.2.0+mine", "without a local part"),
        ("two", "such as 0.1.1, got 'two'"),
    ],
)
def test_versions_that_cannot_follow_are_refused(release, text, message):
    with pytest.raises(release.ReleaseError, match=message.replace(".", r"\.")):
        release.parse_version(text, release.Version("0.1.0"))


def test_a_checkout_with_changes_is_refused_by_name(release, checkout):
    subprocess.run(["git", "init", "-q", checkout], check=True)
    with pytest.raises(release.ReleaseError, match=r"CHANGELOG\.md"):
        release.require_clean(checkout)


def test_a_step_that_fails_shows_what_it_printed(release, tmp_path):
    with pytest.raises(release.ReleaseError, match=r"(?s)failed:.*no such thing"):
        release.run("bash", "-c", "echo no such thing; exit 3", folder=tmp_path)


def test_the_command_without_a_version_says_what_to_give(release, capsys):
    assert release.main([]) == 1
    assert "error: give a version, such as 0." in capsys.readouterr().err


def test_checksums_are_those_that_sha256sum_reads(release, tmp_path):
    (tmp_path / "a.whl").write_bytes(b"wheel")
    (tmp_path / "b.json").write_bytes(b"{}")
    release.write_checksums(tmp_path)
    lines = (tmp_path / "SHA256SUMS").read_text().splitlines()
    assert lines == [
        f"{hashlib.sha256(b'wheel').hexdigest()}  a.whl",
        f"{hashlib.sha256(b'{}').hexdigest()}  b.json",
    ]
    subprocess.run(["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=tmp_path, check=True)


def test_the_project_can_be_released_now(release):
    assert release.release_notes((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    version = release.read_version((ROOT / "onnxplace/_version.py").read_text(encoding="utf-8"))
    assert version == release.Version(onnxplace.__version__)
    assert f'version = "{version}"' in (ROOT / release.PLUGIN_FILE).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("report", "code", "words"),
    [
        ("", 0, "cannot be reached: packages were NOT audited"),
        ({"dependencies": [{"name": "a", "skip_reason": "not found"}]}, 0, "they were NOT audited"),
        ({"dependencies": [{"name": "a", "version": "1", "vulns": []}]}, 0, "1 of 1 packages audited"),
        (
            {"dependencies": [{"name": "a", "version": "1", "vulns": [{"id": "PYSEC-1", "fix_versions": ["2"]}]}]},
            1,
            "a 1: PYSEC-1, fixed by 2",
        ),
        (
            {"dependencies": [{"name": "a", "version": "1", "vulns": [{"id": "PYSEC-1", "fix_versions": []}]}]},
            1,
            "fixed by no version yet",
        ),
    ],
)
def test_an_audit_fails_for_vulnerabilities_only(report, code, words):
    text = report if isinstance(report, str) else json.dumps(report)
    result, message = load("audit").judge(text)
    assert result == code
    assert words in message
