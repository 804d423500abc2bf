#!/usr/bin/env bash
# Step 3 on two hosts, which are network namespaces of this machine: by `deepspeed --hostfile`, torchrun and a stand-in
# of SLURM, healthy and with a fault on one host; prints tables, and ends with code 0 only if all of it is as it should
# be. On two CPU cores about half an hour. Needs Linux with root (or user namespaces, then without deepspeed, whose sshd
# needs root), iproute2, util-linux, openssh-server and pdsh.
#
#   scripts/trial_two_hosts.sh                                      all of it
#   scripts/trial_two_hosts.sh --launchers torchrun --only healthy  some
#   scripts/trial_two_hosts.sh --only "link cut" --keep FOLDER      one fault, and what each host printed
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$root"
exec python -m scripts.two_hosts.trial "$@"
