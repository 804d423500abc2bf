# Sourced by the other scripts: makes or reuses the virtual environment .venv with the pinned versions.
#
#   PYTHON=/path/to/python3.12   which Python to use; by default the newest on the PATH that is 3.11 or newer
#   VENV=/path/to/folder         where the environment is; by default .venv in the repository
#   TORCH=2.10.0                 which torch, in place of the pinned one: V100 and old drivers want another (docs/gpus.md)
#   TORCH_INDEX=https://download.pytorch.org/whl/cu126    where torch is fetched from; by default PyPI

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${VENV:-$root/.venv}"

fail() {
    echo "error: $1" >&2
    exit 2
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.13 python3.12 python3.11 python3}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
}

python="$(find_python)"
[ -n "$python" ] || fail "Python 3.11 or newer is needed, ${PYTHON:-python3} is $(${PYTHON:-python3} --version 2>&1 || true). Install one (Debian, Ubuntu: apt install python3.11 python3.11-venv) or name it: PYTHON=/path/to/python3.11 $0"
[ -n "${CXX:-}" ] || command -v g++ >/dev/null || command -v c++ >/dev/null || command -v clang++ >/dev/null ||
    fail "no C++ compiler found, and DeepSpeed builds a small extension. Install one (Debian, Ubuntu: apt install g++) or name it: CXX=/path/to/c++ $0"

# Installed anew whenever what is pinned changes, or another torch is asked for.
wanted="$(cat "$root/setup.py" "$root/constraints.txt" | cksum)${TORCH:+ torch $TORCH}${TORCH_INDEX:+ from $TORCH_INDEX}"
if [ "$(cat "$venv/.installed" 2>/dev/null)" != "$wanted" ]; then
    echo "making the environment in $venv (once, 6 GB, about two minutes)"
    "$python" -m venv "$venv" || fail "$python cannot make virtual environments. Install its venv module (Debian, Ubuntu: apt install python3.11-venv)"
    sed "s/^torch==.*/torch==${TORCH:-$(sed -n 's/^torch==//p' "$root/constraints.txt")}/" "$root/constraints.txt" \
        > "$venv/constraints.txt"
    pip=("$venv/bin/python" -m pip install -qq --disable-pip-version-check -c "$venv/constraints.txt")
    # Beside PyPI, which has the pinned versions of what torch needs: 2.13.0+cu126 goes before PyPI's 2.13.0 (PEP 440).
    { [ -z "${TORCH_INDEX:-}" ] || "${pip[@]}" --upgrade torch --extra-index-url "$TORCH_INDEX"; } &&
        "${pip[@]}" -e "$root[dev]" ||
        fail "the installation failed; what pip says stands above"
    echo "$wanted" > "$venv/.installed"
fi
export PATH="$venv/bin:$PATH"

# Ranks share the cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# GPUs that torch can use; ends with a message where it cannot, rather than computing on the CPU.
gpus="$(PYTHONPATH="$root" python -m engine.zero.gpu_support)" || exit 2
[ "$gpus" -gt 0 ] || export DS_ACCELERATOR="${DS_ACCELERATOR:-cpu}"
