"""Make a release: changelog, version, sdist, wheel, checks, a bill of materials, checksums, a commit and a tag.

`.ci/release` calls this in an environment with the tools. Everything is built and checked in a clone first, so a step
that fails leaves the checkout as it was.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parents[1]
VERSION_FILE = "onnxplace/_version.py"
CHANGELOG = "CHANGELOG.md"
# The plugin of this repository is released with the same version.
PLUGIN = "plugins/onnxplace-learned"
PLUGIN_FILE = f"{PLUGIN}/pyproject.toml"
PLUGIN_VERSION = re.compile(r'^version = "[^"]+"$', re.MULTILINE)
# The section of the first release has its number from the start.
UNRELEASED = re.compile(r"^## (?:Unreleased|\S+ \(unreleased\))\n", re.MULTILINE)
# What a user of the wheel does first, without measuring.
FIRST_USE = """
import numpy, onnx, onnxplace
text = '<ir_version: 8, opset_import: ["": 17]> g (float[2] x) => (float[2] y) { y = Relu(x) }'
pipeline = "optimize,profile{estimate=true},single,split,emit"
bundle = onnxplace.compile(onnx.parser.parse_model(text), "first.bundle", devices="cpu:0", pipeline=pipeline)
with onnxplace.InferenceSession(bundle) as session:
    (y,) = session.run(None, {"x": numpy.array([-1, 1], numpy.float32)})
assert y.tolist() == [0, 1], y
"""
# The first use of the plugin: a placer with the policy that its wheel holds.
FIRST_PLACEMENT = """
from pathlib import Path
from onnxplace.cost_graph import GENERATORS, write_cost_graph
write_cost_graph(Path("graph.graphml"), GENERATORS["layered"](8, 0))
"""


class ReleaseError(Exception):
    """A release that cannot be made, with what to do about it."""


def read_version(text: str) -> Version:
    """Return the version in the text of `_version.py`; raises ReleaseError if there is none."""
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if not found:
        raise ReleaseError(f'{VERSION_FILE}: expected a line __version__ = "..."')
    return Version(found[1])


def parse_version(text: str, current: Version) -> Version:
    """Return the version to release; raises ReleaseError unless it is a newer one."""
    try:
        version = Version(text)
    except InvalidVersion:
        raise ReleaseError(f"expected a version such as {next_version(current)}, got {text!r}") from None
    if version < current or version.local:
        raise ReleaseError(f"expected a version from {current} on, without a local part, got {version}")
    return version


def next_version(current: Version) -> Version:
    """Return the version after the current one."""
    return Version(f"{current.major}.{current.minor}.{current.micro + 1}")


def release_notes(changelog: str) -> str:
    """Return what is under the unreleased heading of the changelog; raises ReleaseError if there is nothing."""
    rest = "".join(UNRELEASED.split(changelog, maxsplit=1)[1:])
    notes = re.split(r"^## ", rest, maxsplit=1, flags=re.MULTILINE)[0].strip()
    if not notes:
        raise ReleaseError(f'{CHANGELOG}: expected notes under "## Unreleased": write a sentence for each change')
    return notes


def date_changelog(changelog: str, version: Version, day: datetime.date) -> str:
    """Return the changelog with its unreleased notes under the version, and an empty section above it.

    Raises ReleaseError if there are no notes, or the version has a section already.
    """
    release_notes(changelog)
    if re.search(rf"^## {re.escape(str(version))}(?!\S| \(unreleased\))", changelog, re.MULTILINE):
        raise ReleaseError(f"{CHANGELOG}: {version} has a section already: release a newer version")
    return UNRELEASED.sub(f"## Unreleased\n\n## {version} ({day.isoformat()})\n", changelog, count=1)


def apply_release(folder: Path, version: Version, day: datetime.date) -> None:
    """Write the version and the changelog of a release into a checkout; raises ReleaseError."""
    changelog, version_file, plugin_file = folder / CHANGELOG, folder / VERSION_FILE, folder / PLUGIN_FILE
    dated = date_changelog(changelog.read_text(encoding="utf-8"), version, day)
    text = version_file.read_text(encoding="utf-8")
    changelog.write_text(dated, encoding="utf-8")
    version_file.write_text(text.replace(f'"{read_version(text)}"', f'"{version}"'), encoding="utf-8")
    plugin = PLUGIN_VERSION.sub(f'version = "{version}"', plugin_file.read_text(encoding="utf-8"), count=1)
    plugin_file.write_text(plugin, encoding="utf-8")


def run(*command: str | Path, folder: Path = ROOT) -> str:
    """Run a command and return what it prints; raises ReleaseError with its output if it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise ReleaseError(f"{' '.join(map(str, command))} failed:\n{done.stdout}")
    return done.stdout


def require_clean(folder: Path) -> None:
    """Raise ReleaseError if a checkout has changes that are not committed."""
    if changes := run("git", "status", "--porcelain", folder=folder).strip():
        raise ReleaseError(f"commit or remove these changes first:\n{changes}")


def build_packages(source: Path, target: Path, package: str, version: Version) -> tuple[Path, Path]:
    """Build the sdist of a package, and the wheel from it, and check both; returns their paths."""
    run(sys.executable, "-m", "build", "--outdir", target, source, folder=source)
    (sdist,), (wheel,) = target.glob(f"{package}-{version}.tar.gz"), target.glob(f"{package}-{version}-*.whl")
    run(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel)
    plugins = [path.name for path in source.glob("plugins/*/onnxplace_*")]
    parts = [name for name in plugins if f'"{name}",' in (source / "pyproject.toml").read_text(encoding="utf-8")]
    run(Path(sys.executable).with_name("check-wheel-contents"), "--toplevel", ",".join([package, *parts]), wheel)
    return sdist, wheel


def install_wheel(wheel: Path, folder: Path, version: Version) -> Path:
    """Install a wheel with the extra [cpu] into a new environment, and use it; returns the environment's Python."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", f"{wheel}[cpu]")
    run(python, "-m", "pip", "check")
    printed = run(folder / "bin" / "onnxplace", "--version", folder=folder)
    if str(version) not in printed.split():
        raise ReleaseError(f"the installed command says {printed.strip()!r}, expected version {version}")
    run(python, "-c", FIRST_USE, folder=folder)
    return python


def install_plugin(python: Path, wheel: Path, folder: Path) -> None:
    """Install the plugin's wheel into an environment that has onnxplace, and place with one of its placers."""
    run(python, "-m", "pip", "install", "-q", wheel)
    run(python, "-m", "pip", "check")
    run(python, "-c", FIRST_PLACEMENT, folder=folder)
    command = python.with_name("onnxplace")
    run(command, "place", "graph.graphml", "--placer", "guided", "--json", folder=folder)
    run(command, "learn", "families", folder=folder)


def write_bill_of_materials(python: Path, version: Version, target: Path) -> int:
    """Write what the environment of a wheel holds as CycloneDX, and return the number of components."""
    path = target / f"onnxplace-{version}.cdx.json"
    tool = Path(sys.executable).with_name("cyclonedx-py")
    run(tool, "environment", "--pyproject", ROOT / "pyproject.toml", "--mc-type", "library", "-o", path, python)
    materials = json.loads(path.read_text(encoding="utf-8"))
    # pip and setuptools belong to the environment, and the version of the project is dynamic in pyproject.toml.
    ours = [item for item in materials["components"] if item["name"].lower() not in ("pip", "setuptools", "onnxplace")]
    references = {item["bom-ref"] for item in ours} | {materials["metadata"]["component"]["bom-ref"]}
    materials["components"] = ours
    materials["dependencies"] = [item for item in materials["dependencies"] if item["ref"] in references]
    materials["metadata"]["component"]["version"] = str(version)
    if missing := {"numpy", "onnx", "onnxruntime"} - {item["name"].lower() for item in ours}:
        raise ReleaseError(f"the bill of materials lacks {', '.join(sorted(missing))}")
    path.write_text(json.dumps(materials, indent=1) + "\n", encoding="utf-8")
    return len(ours)


def write_checksums(folder: Path) -> None:
    """Write the SHA-256 of each file of a folder to SHA256SUMS, which `sha256sum -c` reads."""
    files = sorted(path for path in folder.iterdir() if path.name != "SHA256SUMS")
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (folder / "SHA256SUMS").write_text("".join(lines), encoding="utf-8")


def make_release(version: Version, day: datetime.date, dry_run: bool) -> None:
    """Build and check a release in a clone; commit and tag it unless `dry_run`; raises ReleaseError."""
    target = ROOT / "build" / "release"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "onnxplace"
        run("git", "clone", "-q", ROOT, clone)
        apply_release(clone, version, day)
        notes = release_notes((ROOT / CHANGELOG).read_text(encoding="utf-8"))
        (target / "NOTES.md").write_text(f"# onnxplace {version}\n\n{notes}\n", encoding="utf-8")
        sdist, wheel = build_packages(clone, target, "onnxplace", version)
        print(f"built and checked {sdist.name}, {wheel.name}")
        plugin_sdist, plugin_wheel = build_packages(clone / PLUGIN, target, "onnxplace_learned", version)
        print(f"built and checked {plugin_sdist.name}, {plugin_wheel.name}")
        python = install_wheel(wheel, Path(folder) / "environment", version)
        print("the wheel installs, and its command works")
        print(f"bill of materials: {write_bill_of_materials(python, version, target)} components")
        # After the bill of materials, which is of the core alone.
        install_plugin(python, plugin_wheel, Path(folder))
        print("the wheel of the plugin installs, and its placer works")
    write_checksums(target)
    if dry_run:
        print(f"dry run: no commit, no tag; see {target.relative_to(ROOT)}")
        return
    apply_release(ROOT, version, day)
    run("git", "commit", "-q", "-m", f"Release {version}", CHANGELOG, VERSION_FILE, PLUGIN_FILE)
    run("git", "tag", "-a", f"v{version}", "-m", f"onnxplace {version}")
    print(
        f"committed and tagged v{version}; next: git push --follow-tags, and twine upload build/release/*.whl *.tar.gz"
    )


def main(arguments: Sequence[str]) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog=".ci/release", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("version", nargs="?", help="such as 0.2.0; with --dry-run, by default the next one")
    parser.add_argument("--dry-run", action="store_true", help="make everything except the commit and the tag")
    options = parser.parse_args(arguments)
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    try:
        current = read_version((ROOT / VERSION_FILE).read_text(encoding="utf-8"))
        if not (options.version or options.dry_run):
            raise ReleaseError(f"give a version, such as {next_version(current)}, or --dry-run")
        version = parse_version(options.version or str(next_version(current)), current)
        if not options.dry_run:
            require_clean(ROOT)
        make_release(version, datetime.datetime.now(datetime.UTC).date(), options.dry_run)
    except ReleaseError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
