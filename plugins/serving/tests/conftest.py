"""What tests of the core share."""

from tests.conftest import (  # noqa: F401 - fixtures
    branches_bytes,
    bundle_copy,
    compiled,
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
