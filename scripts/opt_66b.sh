#!/usr/bin/env bash
# OPT 66B with a 350M reward model.
#
#   HARDWARE     what trains in step 3                planned: needed of a GPU (highest phase), a node's host
#   64xa100-80g  all weights                          78 GB (train), 24 GB
#   8xa100-80g   adapters                             78 GB (experience), 8 GB
#
#   scripts/opt_66b.sh 1        supervised fine-tuning
#   scripts/opt_66b.sh 2        reward model
#   scripts/opt_66b.sh 3        PPO, from what 1 and 2 wrote
#   HARDWARE=8xa100-80g scripts/opt_66b.sh 3 --dry_run     another row; any flag overrides; --dry_run only looks
#
# Settings from outside (hardware, hosts, data, folders): launch.sh.
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
hardware 64xa100-80g 8xa100-80g
out="${OUT:-out/opt-66b}"
common=(--data_path "${data[@]}" --data_split 2,4,4 --dtype "$DTYPE" --seed 1234 --save_steps 50 --keep_checkpoints 2)

case "$HARDWARE" in  # what differs from the flags below
64xa100-80g)
    ppo=(--offload_reference_model)
    ;;
8xa100-80g)
    sft=(--gradient_accumulation_steps 8 "${lora[@]}")
    reward=(--gradient_accumulation_steps 8)
    ppo=(--generation_batches 2 "${actor_lora[@]}")
    ;;
esac

case "$step" in
1) launch step1_sft.py "${common[@]}" --output_dir "$out/sft" \
    --model_name_or_path facebook/opt-66b --max_seq_len 512 --num_train_epochs 4 \
    --per_device_train_batch_size 2 --per_device_eval_batch_size 2 --gradient_accumulation_steps 1 \
    --learning_rate 9.65e-6 --lr_scheduler_type cosine --zero_stage 3 --gradient_checkpointing "${sft[@]}" "$@" ;;
2) launch step2_reward.py "${common[@]}" --output_dir "$out/reward" \
    --model_name_or_path facebook/opt-350m --sft_model_name_or_path "$out/sft" \
    --max_seq_len 512 --num_train_epochs 1 \
    --per_device_train_batch_size 2 --per_device_eval_batch_size 2 --gradient_accumulation_steps 1 \
    --learning_rate 5e-5 --weight_decay 0.1 --zero_stage 3 "${reward[@]}" "$@" ;;
3) launch step3_rlhf.py "${common[@]}" --output_dir "$out/ppo" \
    --actor_model_name_or_path "$out/sft" --critic_model_name_or_path "$out/reward" \
    --max_prompt_seq_len 256 --max_answer_seq_len 256 \
    --per_device_generation_batch_size 8 --generation_batches 1 --per_device_training_batch_size 4 \
    --actor_learning_rate 9.65e-6 --critic_learning_rate 5e-6 \
    --actor_zero_stage 3 --critic_zero_stage 2 --actor_gradient_checkpointing \
    --eval_steps 20 --save_steps 10 "${ppo[@]}" "$@" ;;
esac
