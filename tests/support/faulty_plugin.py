"""The plugin with a faulty kind of devices, installed for a test and the processes that it starts."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from onnxplace.plugins import list_entries
from onnxplace.target import kind_table
from tests.pipeline.test_plugins import install

SOURCE = Path(__file__).parent / "faulty_device.py"


def _forget_plugins() -> None:
    list_entries.cache_clear()
    kind_table.find_kind.cache_clear()


@contextmanager
def install_faulty_kind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    site = folder / "site"
    entries = {"onnxplace.device_kinds": {"faulty": "faulty_device:Faulty"}}
    install(site, "onnxplace-faulty", entries, {"faulty_device": SOURCE.read_text()})
    monkeypatch.syspath_prepend(str(site))
    _forget_plugins()
    yield
    _forget_plugins()
