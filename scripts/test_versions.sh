#!/usr/bin/env bash
# Runs the tests with the lowest or the newest versions of DeepSpeed, torch and transformers that setup.py admits:
#
#   scripts/test_versions.sh lowest                          the whole suite
#   scripts/test_versions.sh newest tests/engine/zero -x     anything that pytest takes
#
#   PYTHON=/path/to/python3.12   which Python to use; by default python3
#   VENV=/path/to/folder         where the environment is; by default .venv_lowest or .venv_newest in the repository
#
# The environment is made once, and again whenever the bounds change. Other packages are those of constraints.txt.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
which="${1:-}"
case "$which" in
    lowest | newest) shift ;;
    *)
        echo "error: $0 $which: give lowest or newest, and after it what pytest takes" >&2
        exit 2
        ;;
esac
venv="${VENV:-$root/.venv_$which}"

# For the lowest "torch>=2.9,<2.16" becomes "torch==2.9"; for the newest it stays, and pip takes the newest. What all
# need has a line of its own there; extras, which narrow it, have not.
bounds="$(grep -oE '^ +"(torch|deepspeed|transformers)[>=<][^"]*"' "$root/setup.py" | tr -d '" ')"
wanted="$which $(cat "$root/setup.py" "$root/constraints.txt" | cksum)"
if [ "$(cat "$venv/.installed" 2>/dev/null)" != "$wanted" ]; then
    "${PYTHON:-python3}" -m venv --clear "$venv"
    # What these three need in versions of their own is theirs to say.
    grep -vE '^(torch|deepspeed|transformers|tokenizers|huggingface_hub)==' "$root/constraints.txt" > "$venv/constraints.txt"
    if [ "$which" = lowest ]; then
        bounds="$(echo "$bounds" | sed -E 's/>=([0-9.]+).*/==\1/')"
    fi
    # shellcheck disable=SC2086  # one word each
    "$venv/bin/python" -m pip install -qq --disable-pip-version-check -e "$root[test]" $bounds -c "$venv/constraints.txt"
    echo "$wanted" > "$venv/.installed"
fi
export PATH="$venv/bin:$PATH" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
gpus="$(PYTHONPATH="$root" python -m engine.zero.gpu_support)"
[ "$gpus" -gt 0 ] || export DS_ACCELERATOR="${DS_ACCELERATOR:-cpu}"
cd "$root"
python -m pip list --disable-pip-version-check 2>/dev/null | grep -E '^(torch|deepspeed|transformers) '
exec python -m pytest "$@"
