"""Bundles that the core's tests of exports use, too."""

from tests.export.conftest import decoder_bundle, sums_bundle  # noqa: F401 - fixtures
