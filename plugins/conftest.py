"""Fixtures of the core's tests, which those of plugins share."""

from tests.conftest import (  # noqa: F401 - fixtures
    branches_bytes,
    bundle_copy,
    compiled,
    fast_pipeline,
    good_enough,
    local_comparisons,
    model_file,
    no_gpus,
    no_progress_lines,
    own_cost_cache,
    own_temporary_folder,
    pytest_configure,
    run_cli,
)
