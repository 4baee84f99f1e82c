"""The plugin with a faulty kind of devices, installed for the test and the processes that it starts."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from onnxplace.devices import kind_table
from onnxplace.doctor.check_context import CheckContext
from tests.pipeline.test_plugins import install

SOURCE = Path(__file__).parents[1] / "support" / "faulty_device.py"


def _forget_plugins() -> None:
    kind_table._list_plugins.cache_clear()
    kind_table.find_kind.cache_clear()


@pytest.fixture
def faulty_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    site = tmp_path / "site"
    entries = {"onnxplace.device_kinds": {"faulty": "faulty_device:Faulty"}}
    install(site, "onnxplace-faulty", entries, {"faulty_device": SOURCE.read_text()})
    monkeypatch.syspath_prepend(str(site))
    _forget_plugins()
    yield
    _forget_plugins()


@pytest.fixture
def make_context(tmp_path: Path):
    """Return a function that makes the context of a check on some devices."""

    def make(*devices: str, seconds: float = 0.2) -> CheckContext:
        folder = tmp_path / f"checks-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        return CheckContext(devices, seconds, folder)

    return make
