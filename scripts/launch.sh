# Sourced by the launchers, one for each model size: how a step is started.
#
#   HOSTFILE=hosts      lines `name slots=8`, one for each node; without it, this machine alone
#   NUM_NODES, NUM_GPUS how many nodes, and GPUs on each; by default the launcher's own
#   DTYPE=fp16          for V100; A100 and newer have bf16
#   OUT=out/opt-1.3b    where the three steps write, and step 3 finds what steps 1 and 2 made
#   DATA=...            data sets, separated by spaces; by default DeepSpeed-Chat's, from the Hub
#
# Runs in the environment that is active, or in .venv where scripts/test.sh or scripts/quickstart.sh made it.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
if ! command -v deepspeed >/dev/null && [ -x "$root/.venv/bin/deepspeed" ]; then
    export PATH="$root/.venv/bin:$PATH"
fi
read -ra data <<< "${DATA:-Dahoas/rm-static}"

usage() {
    echo "usage: $0 STEP [flags]     STEP: 1 (SFT), 2 (reward model), 3 (PPO); flags override the script's" >&2
    exit 2
}

# launch PROGRAM FLAGS...: with --dry_run among the flags nothing is started.
launch() {
    local program="$root/training/$1" word command=(deepspeed)
    shift
    [ -z "${HOSTFILE:-}" ] || command+=(--hostfile "$HOSTFILE")
    [ -z "${NUM_NODES:-}" ] || command+=(--num_nodes "$NUM_NODES")
    [ -z "${NUM_GPUS:-}" ] || command+=(--num_gpus "$NUM_GPUS")
    for word in "$@"; do
        [ "$word" != --dry_run ] || exec python -m training.program.dry_run "${command[@]}" "$program" "$@"
    done
    exec "${command[@]}" --log_level critical "$program" "$@"  # or it repeats the whole command after a message
}

step="${1:-}"
[ $# -eq 0 ] || shift
