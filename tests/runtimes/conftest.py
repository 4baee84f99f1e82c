"""Fixtures of the runtime tests: an endless bundle, a session on it, and reported errors."""

import threading

import pytest

import onnxplace
from tests.support.endless import endless_bundle


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return endless_bundle(tmp_path_factory.mktemp("endless"))


@pytest.fixture
def session(bundle):
    with onnxplace.InferenceSession(bundle) as session:
        yield session
        session.close(timeout=0)


@pytest.fixture
def hook_errors(monkeypatch):
    """Errors passed to `threading.excepthook`, which prints them for users."""
    errors = []
    monkeypatch.setattr(threading, "excepthook", lambda arguments: errors.append(arguments.exc_value))
    return errors
