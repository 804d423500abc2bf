#!/usr/bin/env bash
# A step as a SLURM job that survives the end of its time and pre-emption. Two minutes before, SLURM sends USR1 to the
# ranks. They finish their step, write a checkpoint and end with code 75. The job then goes back into the queue, and goes
# on from the checkpoint.
#
# SLURM starts one task a GPU. Each reads its rank from SLURM's variables; all meet on the first node, or at MASTER_ADDR
# and MASTER_PORT. sbatch gets nodes, GPUs, cores and hours, in the environment that is active. This script gets a step
# and its flags, or a launcher, its step and flags; the launcher's HARDWARE then only chooses flags:
#
#   sbatch --nodes 4 --gpus-per-node 8 --ntasks-per-node 8 --cpus-per-task 8 --mem 0 --time 12:00:00 \
#       scripts/slurm.sh training/step3_rlhf.py --output_dir /shared/out --save_steps 50 ...
#   HARDWARE=16xv100-32g OUT=/shared/out sbatch --nodes 4 ... scripts/slurm.sh scripts/llama2_7b.sh 3
#
# One core a task, which is SLURM's default, is too few for --offload and for tokenising. The output folder has to be on
# a file system that all nodes see. --resume auto is added to the flags. If a rank dies, the job begins again from the
# newest point at most MAX_RESTARTS times (3 by default, counted over the whole job). With --preflight among the flags
# the nodes are compared, and the job ends.
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -uo pipefail
program="${1:?give a step: sbatch ... scripts/slurm.sh training/step3_rlhf.py --output_dir DIR ...}"
shift
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"  # srun takes no other since 22.05

case "$program" in
*.sh) command=(env LAUNCHER=srun "$program" "${1:?give the step of $program: 1, 2 or 3}") && shift ;;
*) command=(python -u "$program") ;;
esac
srun --kill-on-bad-exit=1 --wait=60 "${command[@]}" --resume auto "$@"
code=$?

if [ "$code" -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"        # asked to end, everything saved
elif [ "$code" -ne 0 ] && [ "$code" -ne 2 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt "${MAX_RESTARTS:-3}" ]; then
    scontrol requeue "$SLURM_JOB_ID"        # a rank died
fi
exit "$code"
