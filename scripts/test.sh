#!/usr/bin/env bash
# Runs the tests, in an environment that it makes if there is none; in two processes (with --quick three), because many
# wait for what they have started. Arguments go to pytest:
#   scripts/test.sh                    everything, in 12 minutes
#   scripts/test.sh --quick            those of one process, in a minute and a half
#   scripts/test.sh tests/engine/algo -k gae  some
#   scripts/test.sh -n 0 --pdb         all in one process
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$root"
if [ "${1:-}" = --quick ]; then
    shift
    set -- -n 3 -m "not slow" --ignore=tests/distributed --ignore=tests/e2e "$@"  # all are slow: not even imported
fi
exec python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"  # in the order of files: many short ones come last
