# Sourced by the launchers, one for each model size: how a step is started.
#
#   HARDWARE=1xv100-32g how many GPUs of which kind, as the launcher's first lines list them; by default the first there
#   HOSTFILE=hosts      lines `name slots=8`, one for each node; without it, this machine alone
#   NUM_NODES, NUM_GPUS how many nodes, and GPUs on each; by default as HARDWARE has them, 8 on a node
#   DTYPE=fp16          by default fp16 on V100, and bf16, which A100 and newer have, on others
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

# What differs between kinds of hardware, for each step; and adapters in steps 1 and 2, of the actor, and of both.
sft=() reward=() ppo=()
lora=(--lora_dim 64 --only_optimize_lora)
actor_lora=(--actor_lora_dim 64 --only_optimize_lora)
both_lora=(--critic_lora_dim 64 "${actor_lora[@]}")

# hardware NAMES...: what HARDWARE may be; without it, the first. Settles NUM_NODES, NUM_GPUS and DTYPE.
hardware() {
    HARDWARE="${HARDWARE:-$1}"
    if [[ " $* " != *" $HARDWARE "* ]]; then
        echo "error: HARDWARE=$HARDWARE: $0 has settings for $*. For other GPUs take the nearest, with NUM_NODES," \
            "NUM_GPUS and flags of your own." >&2
        exit 2
    fi
    local count="${HARDWARE%%x*}"
    if [ "$count" -gt 8 ]; then
        NUM_NODES="${NUM_NODES:-$((count / 8))}"
        count=8
    fi
    NUM_GPUS="${NUM_GPUS:-$count}"
    case "$HARDWARE" in
    *v100*) DTYPE="${DTYPE:-fp16}" ;;
    *) DTYPE="${DTYPE:-bf16}" ;;
    esac
}

# launch PROGRAM FLAGS...: with --dry_run among the flags nothing is started.
launch() {
    local program="$root/training/$1" word command=(deepspeed)
    shift
    if [ -n "${HOSTFILE:-}" ]; then
        command+=(--hostfile "$HOSTFILE")
        # ssh alone would wait for hours for a node that is cut off, and with it the launcher, when the ranks have ended.
        export PDSH_SSH_ARGS_APPEND="${PDSH_SSH_ARGS_APPEND:--o ServerAliveInterval=10 -o ServerAliveCountMax=3}"
    fi
    [ -z "${NUM_NODES:-}" ] || command+=(--num_nodes "$NUM_NODES")
    [ -z "${NUM_GPUS:-}" ] || command+=(--num_gpus "$NUM_GPUS")
    for word in "$@"; do
        [ "$word" != --dry_run ] || exec python -m training.program.dry_run "${command[@]}" "$program" "$@"
    done
    exec "${command[@]}" --log_level critical "$program" "$@"  # or it repeats the whole command after a message
}

step="${1:-}"
[ $# -eq 0 ] || shift
