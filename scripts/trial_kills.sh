#!/usr/bin/env bash
# 20 SIGKILLs at random instants of a run on two ranks, on the CPU: scripts/trial_kills.sh [--kills N] [--seed S]
set -euo pipefail
cd "$(dirname "$0")/.."
exec python scripts/trial_kills.py "$@"
