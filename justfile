# The commands of developers: `just` lists them. `pip install rust-just` installs it.

export ORT_DISABLE_TELEMETRY := "1"

[private]
default:
    @just --list

# Make the environment .venv, with all that the tests need.
setup:
    python3 -m venv .venv
    .venv/bin/pip install -q -e '.[cpu,dev]' -e plugins/onnxplace-learned

# Run the fast tests, or those in the given folders or files.
test *arguments:
    .venv/bin/python -m pytest -q -n auto {{ arguments }}

# Run all tests, or those in the given folders or files, with all examples of properties.
all *arguments:
    .venv/bin/python -m pytest -q -n auto -m '' --hypothesis-profile=thorough {{ arguments }}

# Check lint, format and types.
check:
    .venv/bin/ruff check .
    .venv/bin/ruff format --check .
    .venv/bin/mypy

# Format the code, and mend what lint can mend.
format:
    .venv/bin/ruff check --fix .
    .venv/bin/ruff format .

# Build the documentation site into build/site.
site:
    .ci/site

# Run everything that a change must pass.
ci:
    .ci/run
