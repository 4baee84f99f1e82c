"""Sharding is a house of four floors: each folder of `passes/sharding` imports only from itself and those below it."""

import pytest

from tests.architecture.test_code_lines import count_code_lines
from tests.architecture.test_rooms import MODULES, read_imports

HOME = "passes.sharding"
FLOORS = ("rules", "space", "choose", "apply")
MAX_FILE_LINES = 400

FILES = {name: path for name, path in MODULES.items() if name.startswith(f"{HOME}.")}


def find_floor(name: str) -> int:
    """Return the number of the folder that a module lies in; raises ValueError for one outside of all."""
    return FLOORS.index(name.removeprefix(f"{HOME}.").partition(".")[0])


def find_climbs(importer: str, imported: list[str]) -> list[str]:
    """Return the modules of sharding that a module imports from above itself, or through the package's face."""
    inside = [name for name in imported if name == HOME or name.startswith(f"{HOME}.")]
    return [name for name in inside if name == HOME or find_floor(name) > find_floor(importer)]


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_folder_of_sharding_imports_only_from_those_below(name):
    assert find_climbs(name, [module for module, _ in read_imports(FILES[name])]) == []


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_file_of_sharding_can_be_read_at_one_sitting(name):
    assert count_code_lines(FILES[name].read_text(encoding="utf-8")) <= MAX_FILE_LINES


def test_an_import_upwards_is_found():
    imported = [f"{HOME}.rules.layouts", f"{HOME}.choose.layout_choice", f"{HOME}.apply.exchanges", HOME, "errors"]
    assert find_climbs(f"{HOME}.choose.elimination", imported) == [f"{HOME}.apply.exchanges", HOME]
