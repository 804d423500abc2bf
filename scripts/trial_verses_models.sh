#!/usr/bin/env bash
# Data, SFT and reward model of the trial on Bible verses, in the environment that is active: a byte-level BPE, a GPT-2
# of 0.6 million parameters, and a reward model that prefers the New Testament.
# scripts/compare_dialects.py goes on from here.
#
#   scripts/trial_verses_models.sh TEXT OUTPUT_DIR      in the repository; writes data/, base/, sft/ and reward/
#
# TEXT: what `printf 'gen1:1-rev22:21\n' | bible -f` prints (Debian's package bible-kjv).
set -euo pipefail
[ $# -eq 2 ] || { echo "usage: $0 TEXT OUTPUT_DIR" >&2; exit 2; }
text="$1" out="$2"

[ -e "$out/base/config.json" ] || python -m scripts.comparison.verses "$text" "$out"
scripts/trial_models.sh "$out/base" "$out/data" "$out" 2
