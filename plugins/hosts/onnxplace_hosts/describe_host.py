"""Describe the host that this module runs on, as one line of JSON: `python -m onnxplace_hosts.describe_host`."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version as find_package_version

from onnxplace import __version__
from onnxplace.errors import OnnxplaceError, TargetError
from onnxplace.utils.standard_output import keep_stdout

# Packages besides onnxplace that have to be equal on all hosts: they exchange messages and open the same segments.
PACKAGES = ("mpi4py", "mpich", "openmpi")


def describe_host(devices: str) -> dict[str, object]:
    """Return versions and devices of this host.

    Args:
        devices: Devices of this machine, such as `cpu:0,cpu:1`; empty for the default ones.
    """
    from onnxplace.machine.hardware import local_target
    from onnxplace.target.target_file import format_target

    return {"versions": list_versions(), "target": format_target(local_target(devices or None).with_all_links())}


def list_versions() -> dict[str, str]:
    """Return the versions of all that has to be equal on hosts that work together; empty for what is not installed."""
    from onnxplace.utils.ort import import_onnxruntime

    return {
        "onnxplace": __version__,
        "onnxruntime": import_onnxruntime().__version__,
        "python": platform.python_version(),
        **{name: _find_version(name) for name in PACKAGES},
    }


def require_versions(versions: Mapping[str, str], expected: Mapping[str, str], place: str, where: str = "") -> None:
    """Raise TargetError unless versions are those that `place` has, such as `as on host1`."""
    for name, version in versions.items():
        if version != expected[name]:
            message = f"expected {name} {expected[name] or 'none'}, {place}, got {version or 'none'}"
            raise TargetError("K005", message, where=where, hint="install the same versions on all hosts")


def describe_error(problem: OnnxplaceError) -> dict[str, str]:
    """Return an error as plain data."""
    parts = {name: getattr(problem, name) for name in ("code", "message", "where", "hint")}
    return {"class": type(problem).__name__, **parts}


def _find_version(package: str) -> str:
    """Return the version of a package; empty if it is not installed."""
    try:
        return find_package_version(package)
    except PackageNotFoundError:
        return ""


def main() -> None:
    """Print the description, or the error that prevents it."""
    keep_stdout()
    try:
        description = describe_host(sys.argv[1])
    except OnnxplaceError as problem:
        description = {"error": describe_error(problem)}
    sys.stdout.write(f"{json.dumps(description)}\n")


if __name__ == "__main__":
    main()
