# Sourced by the other scripts: makes or reuses the virtual environment .venv with the pinned versions.
#
#   PYTHON=/path/to/python3.12   which Python to use; by default the newest on the PATH that is 3.11 or newer
#   VENV=/path/to/folder         where the environment is; by default .venv in the repository

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

# Installed anew whenever what is pinned changes.
wanted="$(cat "$root/setup.py" "$root/constraints.txt" | cksum)"
if [ "$(cat "$venv/.installed" 2>/dev/null)" != "$wanted" ]; then
    echo "making the environment in $venv (once, about two minutes)"
    "$python" -m venv "$venv" || fail "$python cannot make virtual environments. Install its venv module (Debian, Ubuntu: apt install python3.11-venv)"
    "$venv/bin/python" -m pip install -qq --disable-pip-version-check -e "$root[dev]" -c "$root/constraints.txt" ||
        fail "the installation failed; what pip says stands above"
    echo "$wanted" > "$venv/.installed"
fi
export PATH="$venv/bin:$PATH"

# Ranks share the cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# GPUs that torch can use: one that nvidia-smi lists may be hidden, or too old for the pinned torch.
gpus="$(python -c '
import torch
n = torch.cuda.device_count()
n and torch.ones(1, device="cuda").add(1).item()
print(n)' 2>/dev/null || echo 0)"
[ "$gpus" -gt 0 ] || export DS_ACCELERATOR="${DS_ACCELERATOR:-cpu}"
