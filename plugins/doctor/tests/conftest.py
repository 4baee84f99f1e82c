"""The plugin with a faulty kind of devices, installed for the test and the processes that it starts."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from onnxplace_doctor.check_context import CheckContext
from tests.support.faulty_plugin import install_faulty_kind


@pytest.fixture
def faulty_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with install_faulty_kind(tmp_path, monkeypatch):
        yield


@pytest.fixture
def make_context(tmp_path: Path):
    """Return a function that makes the context of a check on some devices."""

    def make(*devices: str, seconds: float = 0.2) -> CheckContext:
        folder = tmp_path / f"checks-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        return CheckContext(devices, seconds, folder)

    return make
