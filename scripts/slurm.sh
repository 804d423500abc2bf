#!/usr/bin/env bash
# A step as a SLURM job that survives the end of its time and pre-emption: two minutes before, SLURM sends USR1 to the
# ranks, which finish their step, write a restart point and end with code 75; the job is then put back into the queue and
# goes on from there. One task a GPU, without a launcher between SLURM and the ranks, which read from SLURM's variables who
# they are and meet on the first node (set MASTER_ADDR and MASTER_PORT to have them meet elsewhere). Nodes, GPUs and hours
# are given to sbatch, the step and its flags to this script:
#
#   sbatch --nodes 4 --gpus-per-node 8 --ntasks-per-node 8 --time 12:00:00 scripts/slurm.sh training/step3_rlhf.py \
#       --output_dir /shared/out --save_steps 50 ...
#
# --output_dir has to be on a file system that all nodes see. --resume auto is added to the flags. If a rank dies, the
# job begins again from the newest point at most MAX_RESTARTS times (3 by default, counted over the whole job).
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -uo pipefail
program="${1:?give a step: sbatch ... scripts/slurm.sh training/step3_rlhf.py --output_dir DIR ...}"
shift
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

srun --kill-on-bad-exit=1 --wait=60 python -u "$program" --resume auto "$@"
code=$?

if [ "$code" -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"        # asked to end, everything saved
elif [ "$code" -ne 0 ] && [ "$code" -ne 2 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt "${MAX_RESTARTS:-3}" ]; then
    scontrol requeue "$SLURM_JOB_ID"        # a rank died
fi
exit "$code"
