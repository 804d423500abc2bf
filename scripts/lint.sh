#!/usr/bin/env bash
# Looks at form and types, by the settings in pyproject.toml, in an environment that it makes if there is none.
#   scripts/lint.sh          says what is wrong
#   scripts/lint.sh --fix    mends what can be mended by itself
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$root"
if [ "${1:-}" = --fix ]; then
    ruff check --quiet --fix-only .
    ruff format --quiet .
fi
ruff check .
ruff format --check .
mypy
