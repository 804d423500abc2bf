# What the launchers share, one for each model size: flags, and what they are told from outside. They source it.
#
#   HARDWARE=1xv100-32g how many GPUs of which kind, as the launcher's first lines list them; by default the first there
#   HOSTFILE=hosts      lines `name slots=8`, one for each node; without it, this machine alone
#   NUM_NODES           how many nodes; by default all in HOSTFILE, which needs at least as many as HARDWARE
#   NUM_GPUS            how many GPUs of each node; by default HARDWARE's number, at most 8
#   MASTER_ADDR, MASTER_PORT where the nodes meet, if not at the first one's first address and at 29500
#   DTYPE=fp16          by default fp16 on V100, and bf16, which A100 and newer have, on others
#   OUT=out/opt-1.3b    where the three steps write, and step 3 finds what steps 1 and 2 made; by default by the size
#   DATA=...            data sets, separated by spaces; by default DeepSpeed-Chat's, from the Hub
#   LAUNCHER=srun       this process is a rank that srun has started; slurm.sh says so, and sbatch how many there are
#
# Runs in the environment that is active, or in .venv where scripts/test.sh or scripts/quickstart.sh made it.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
if ! command -v deepspeed >/dev/null && [ -x "$root/.venv/bin/deepspeed" ]; then
    export PATH="$root/.venv/bin:$PATH"
fi
read -ra data <<< "${DATA:-Dahoas/rm-static}"
name="${0##*/}" name="${name%.sh}"
out="${OUT:-out/${name//_/-}}"

fail() {
    echo "error: $1" >&2
    exit 2
}

# What a script's first lines say.
first_lines() {
    sed -n '/^#!/d; /^#/!q; s/^# \{0,1\}//p' "$1"
}

usage() {
    echo "usage: $0 STEP [flags]     STEP: 1 (SFT), 2 (reward model), 3 (PPO); flags override the script's" \
        "(all of them: $0 STEP --help all). HARDWARE is $(sed -n 's/^hardware \([^ ]*\).*/\1/p' "$0") by default."
    printf '\n%s\n' "$(first_lines "$0")" "$(first_lines "${BASH_SOURCE[0]}")"
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    first_lines "$0" >&2
    fail "this is what the launchers share: start one of them (scripts/opt_1.3b.sh, scripts/llama2_7b.sh, ...)"
fi

# The adapters that launchers speak of: those of steps 1 and 2; of the actor; of actor and critic.
lora=(--lora_dim 64 --only_optimize_lora)
actor_lora=(--actor_lora_dim 64 --only_optimize_lora)
both_lora=(--critic_lora_dim 64 "${actor_lora[@]}")

# models SFT REWARD: what steps 1 and 2 start from.
models() {
    sft_model="$1" reward_model="$2"
}

# hardware NAMES...: what HARDWARE may be; without it, the first. Settles NUM_NODES, NUM_GPUS and DTYPE.
hardware() {
    HARDWARE="${HARDWARE:-$1}"
    [[ " $* " = *" $HARDWARE "* ]] ||
        fail "HARDWARE=$HARDWARE: $0 has settings for $*. For other GPUs take the nearest, with NUM_NODES, NUM_GPUS and flags of your own."
    local count="${HARDWARE%%x*}" nodes
    nodes=$(((count + 7) / 8))
    NUM_GPUS="${NUM_GPUS:-$((count < 8 ? count : 8))}"
    if [ -n "${HOSTFILE:-}" ]; then
        check_hostfile "${NUM_NODES:-$nodes}"
    elif [ "$nodes" -gt 1 ]; then
        NUM_NODES="${NUM_NODES:-$nodes}"
    fi
    case "$HARDWARE" in
    *v100*) DTYPE="${DTYPE:-fp16}" ;;
    *) DTYPE="${DTYPE:-bf16}" ;;
    esac
}

# check_hostfile NODES: deepspeed would go on without a file that is not there, and with fewer nodes than it is to take.
check_hostfile() {
    [ -f "$HOSTFILE" ] || fail "HOSTFILE=$HOSTFILE: there is no such file. Write lines like \`node1 slots=8\`."
    local named
    named="$(grep -cE '^[[:space:]]*[^#[:space:]]+[[:space:]]+slots=' "$HOSTFILE" || true)"
    [ "$named" -ge "$1" ] ||
        fail "HOSTFILE=$HOSTFILE names $named nodes, and $1 are asked for (HARDWARE=$HARDWARE${NUM_NODES:+, NUM_NODES=$NUM_NODES}). Name more, take other HARDWARE, or say NUM_NODES=$named and what makes it fit (--dry_run)."
    taken="${NUM_NODES:-$named}"
}

# launch PROGRAM FLAGS...: with --dry_run among the flags nothing is started.
launch() {
    local program="$root/training/$1" word command=(deepspeed)
    shift
    if [ "${LAUNCHER:-}" = srun ]; then
        PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec python -u "$program" "$@"
    fi
    if [ -n "${HOSTFILE:-}" ]; then
        command+=(--hostfile "$HOSTFILE")
        [ -z "${MASTER_ADDR:-}" ] || command+=(--master_addr "$MASTER_ADDR")
        # ssh alone would wait for hours for a node that is cut off, and with it the launcher, when the ranks have ended.
        export PDSH_SSH_ARGS_APPEND="${PDSH_SSH_ARGS_APPEND:--o ServerAliveInterval=10 -o ServerAliveCountMax=3}"
    fi
    [ -z "${MASTER_PORT:-}" ] || command+=(--master_port "$MASTER_PORT")  # two runs on one machine need two
    [ -z "${NUM_NODES:-}" ] || command+=(--num_nodes "$NUM_NODES")
    [ -z "${NUM_GPUS:-}" ] || command+=(--num_gpus "$NUM_GPUS")
    for word in "$@"; do
        case "$word" in
        --dry_run) exec python -m training.tools.dry_run "${command[@]}" "$program" "$@" ;;
        -h | --help) exec python "$program" "$@" ;;
        esac
    done
    [ "${NUM_NODES:-1}" -eq 1 ] || [ -n "${HOSTFILE:-}" ] ||
        fail "HARDWARE=$HARDWARE is $NUM_NODES nodes: name them, HOSTFILE=hosts, in a file with lines like \`node1 slots=8\` (docs/many_nodes.md)."
    [ "${taken:-1}" -eq 1 ] || command -v pdsh >/dev/null ||
        fail "there is no pdsh here, by which deepspeed reaches other nodes (Debian, Ubuntu: apt install pdsh). Or start by torchrun or SLURM (docs/many_nodes.md)."
    exec "${command[@]}" --log_level critical "$program" "$@"  # or it repeats the whole command after a message
}

# start FLAGS...: the step, with what all sizes have, then the launcher's own flags for it (sft, reward, ppo), then FLAGS.
start() {
    local common=(--data_path "${data[@]}" --data_split 2,4,4 --dtype "$DTYPE" --seed 1234 --save_steps 50 --keep_checkpoints 2)
    case "$step" in
    1) launch step1_sft.py "${common[@]}" --output_dir "$out/sft" --model_name_or_path "$sft_model" \
        --max_seq_len 512 --num_train_epochs 4 --learning_rate 9.65e-6 --lr_scheduler_type cosine \
        --gradient_checkpointing "${sft[@]}" "$@" ;;
    2) launch step2_reward.py "${common[@]}" --output_dir "$out/reward" --model_name_or_path "$reward_model" \
        --sft_model_name_or_path "$out/sft" --max_seq_len 512 --num_train_epochs 1 --weight_decay 0.1 \
        "${reward[@]}" "$@" ;;
    3) launch step3_rlhf.py "${common[@]}" --output_dir "$out/ppo" \
        --actor_model_name_or_path "$out/sft" --critic_model_name_or_path "$out/reward" \
        --max_prompt_seq_len 256 --max_answer_seq_len 256 --actor_learning_rate 9.65e-6 --critic_learning_rate 5e-6 \
        --actor_gradient_checkpointing --eval_steps 50 "${ppo[@]}" "$@" ;;
    esac
}

step="${1:-}"
[ $# -eq 0 ] || shift
case "$step" in
[123]) ;;
-h | --help) usage && exit 0 ;;
*) usage >&2 && exit 2 ;;
esac
