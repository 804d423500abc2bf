#!/usr/bin/env bash
# Tries on GPUs what no CPU can, in the environment that is active: installs nothing, fetches nothing, ends within nine
# minutes. Prints and keeps what it finds at once, and writes one page: what to act on, and what to change.
#
#   scripts/check_gpu.sh                            into gpu_checks/DATE_TIME in the repository
#   scripts/check_gpu.sh --output FOLDER --budget 290 --only machine attention decoding ppo      the first five minutes
#   DRY=1 scripts/check_gpu.sh                      the same without a GPU, with tiny models: its logic, and no more
#
#   PYTHON=/path/to/python3.12   which Python; by default python3
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
if [ "${DRY:-}" = 1 ]; then
    export DS_ACCELERATOR=cpu OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
fi
exec "${PYTHON:-python3}" -m scripts.gpu_checks "$@"
