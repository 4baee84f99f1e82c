"""Print the lowest versions that pyproject.toml allows to those who install onnxplace[cpu], as constraints for pip."""

import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

from packaging.requirements import Requirement

EXTRAS = ("cpu",)


def read_requirements(pyproject: Path, extras: Iterable[str] = EXTRAS) -> list[Requirement]:
    """Return what a project and some of its extras require here; packages for other machines are left out."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    optional = project.get("optional-dependencies", {})
    texts = [*project["dependencies"], *(text for extra in extras for text in optional[extra])]
    requirements = [Requirement(text) for text in texts]
    return [item for item in requirements if item.marker is None or item.marker.evaluate()]


def lower_bound(requirement: Requirement) -> str:
    """Return the lowest version that a requirement allows; raises ValueError unless it has one `>=`."""
    versions = [item.version for item in requirement.specifier if item.operator == ">="]
    if len(versions) != 1:
        raise ValueError(f"pyproject.toml: {requirement}: expected one lower bound, such as {requirement.name}>=1.0")
    return versions[0]


def constraints(requirements: Iterable[Requirement]) -> Iterator[str]:
    """Yield a line `name==version` for each requirement, in their order."""
    for requirement in requirements:
        yield f"{requirement.name}=={lower_bound(requirement)}"


if __name__ == "__main__":
    try:
        print("\n".join(constraints(read_requirements(Path(__file__).parents[1] / "pyproject.toml"))))
    except ValueError as problem:
        sys.exit(str(problem))
