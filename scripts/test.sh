#!/usr/bin/env bash
# Runs the tests, in an environment that it makes if there is none. Arguments go to pytest:
#   scripts/test.sh                    everything
#   scripts/test.sh --quick            those of one process, in under two minutes
#   scripts/test.sh tests/algo -k gae  some
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$root"
if [ "${1:-}" = --quick ]; then
    shift
    set -- -m "not slow" "$@"
fi
exec python -m pytest "$@"
