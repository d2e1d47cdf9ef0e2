#!/usr/bin/env bash
# Format, lint, types and tests, with all of their set-up. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
bash .ci/setup .venv test-all
bash .ci/chromium
.venv/bin/ruff format --check .
.venv/bin/ruff check .
.venv/bin/pyright --pythonpath .venv/bin/python
.venv/bin/python -m pytest -n 2 --dist worksteal "$@"  # two processes, as tests take one thread each
