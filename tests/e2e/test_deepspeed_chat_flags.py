"""The command lines of DeepSpeed-Chat's scripts start a run here, with paths and sizes changed and nothing else.

The words are those of training/step*/training_scripts in DeepSpeedExamples: step 1's single_node/run_1.3b.sh,
run_13b.sh and run_llama2_7b.sh and single_gpu/run_6.7b_lora.sh, step 2's run_350m.sh and run_llama2_7b.sh, step 3's
opt/single_node/run_1.3b.sh and run_13b.sh, opt/single_gpu/run_6.7b_lora.sh, and llama2/run_llama2_7b.sh and
run_llama2_7b_lora.sh. The layers that get LoRA are `h.` instead, as GPT-2 calls them. The scripts of
opt/single_gpu, which leave most flags out, are run as docs/from_deepspeed_chat.md says.
"""

import json
import math
import shlex
from pathlib import Path

import pytest

from scripts.harness import ROOT
from scripts.harness.programs import Result, metric_lines, run_words, snapshot

STEP_1 = """--data_path local/jsonfile --data_split 2,4,4 --model_name_or_path {sft} --per_device_train_batch_size 4
    --per_device_eval_batch_size 4 --max_seq_len 24 --gradient_accumulation_steps 1 --lr_scheduler_type cosine
    --num_warmup_steps 0 --seed 1234 --deepspeed --output_dir {out} """
STEP_2 = (
    STEP_1
    + """--weight_decay 0.1 --num_train_epochs 1 --max_prompt_seq_len 8 --max_answer_seq_len 8
    --normalization_samples 8 """
)  # sizes, here: of the responses that normalise the scores
STEP_3 = """--data_path local/jsonfile --data_split 2,4,4 --actor_model_name_or_path {sft}
    --critic_model_name_or_path {reward} --num_padding_at_beginning 1 --generation_batches 1 --ppo_epochs 1
    --max_answer_seq_len 8 --max_prompt_seq_len 8 --critic_learning_rate 5e-6 --num_train_epochs 1
    --lr_scheduler_type cosine --gradient_accumulation_steps 1 --num_warmup_steps 100 --deepspeed --seed 1234
    --enable_hybrid_engine --output_dir {out} """
SCRIPTS = {
    "1 run_1.3b.sh": STEP_1 + "--learning_rate 9.65e-6 --weight_decay 0. --num_train_epochs 1 --zero_stage 2 "
    "--enable_tensorboard --tensorboard_path {out}",
    "1 run_13b.sh": STEP_1 + "--learning_rate 1e-4 --weight_decay 0.1 --num_train_epochs 2 --gradient_checkpointing "
    "--zero_stage 3",
    "1 run_llama2_7b.sh": STEP_1 + "--learning_rate 9.65e-6 --weight_decay 0. --num_train_epochs 4 "
    "--gradient_checkpointing --zero_stage 3",
    "1 run_6.7b_lora.sh": STEP_1 + "--learning_rate 1e-3 --weight_decay 0. --num_train_epochs 4 "
    "--gradient_checkpointing --zero_stage 0 --lora_dim 128 --lora_module_name h.",
    "2 run_350m.sh": STEP_2 + "--learning_rate 5e-5 --num_padding_at_beginning 1 --zero_stage 0",
    "2 run_llama2_7b.sh": STEP_2 + "--learning_rate 9.65e-6 --num_padding_at_beginning 0 --gradient_checkpointing "
    "--zero_stage 3 --offload",
    "3 run_1.3b.sh": STEP_3 + "--per_device_generation_batch_size 4 --per_device_training_batch_size 4 "
    "--actor_learning_rate 9.65e-6 --actor_dropout 0.0 --actor_zero_stage 2 "
    "--critic_zero_stage 2 --enable_ema --enable_tensorboard --tensorboard_path {out}",
    "3 run_13b.sh": STEP_3 + "--per_device_generation_batch_size 8 --per_device_training_batch_size 8 "
    "--actor_learning_rate 5e-4 --inference_tp_size 2 --tp_gather_partition_size 4 --actor_zero_stage 3 "
    "--critic_zero_stage 3 --actor_gradient_checkpointing --disable_actor_dropout",
    "3 run_6.7b_lora.sh": STEP_3 + "--per_device_generation_batch_size 4 --per_device_training_batch_size 4 "
    "--actor_learning_rate 5e-4 --actor_zero_stage 0 --critic_zero_stage 0 --actor_lora_dim 128 "
    "--actor_gradient_checkpointing --critic_gradient_checkpointing --disable_actor_dropout",
    "3 run_llama2_7b_lora.sh": STEP_3 + "--per_device_generation_batch_size 2 --per_device_training_batch_size 2 "
    "--actor_learning_rate 9.65e-6 --actor_weight_decay 0.1 --critic_weight_decay 0.1 --actor_gradient_checkpointing "
    "--critic_gradient_checkpointing --offload_reference_model --disable_actor_dropout --actor_zero_stage 3 "
    "--critic_zero_stage 3 --actor_lora_dim 64 --critic_lora_dim 64 --critic_lora_module_name h. "
    "--actor_lora_module_name h.",
    # There 1 on each of 8 GPUs; here on one process, and advantages are not whitened over a single response.
    "3 run_llama2_7b.sh": STEP_3 + "--per_device_generation_batch_size 2 --per_device_training_batch_size 2 "
    "--actor_learning_rate 9.65e-6 --actor_weight_decay 0.1 --critic_weight_decay 0.1 "
    "--actor_gradient_checkpointing --critic_gradient_checkpointing "
    "--offload_reference_model --disable_actor_dropout --actor_zero_stage 3 "
    "--critic_zero_stage 3",
}
SHORT = """--dtype fp32 --data_path local/jsonfile --per_device_train_batch_size 1 --per_device_eval_batch_size 4
    --max_seq_len 24 """  # what does not fit models and data of a few kilobytes
SINGLE_GPU = {  # opt/single_gpu: run_1.3b.sh and run_350m.sh; step 3's run_1.3b.sh stands on the page
    1: "--gradient_accumulation_steps 8 --lora_dim 128 --zero_stage 0 " + SHORT,
    2: "--num_padding_at_beginning 1 --weight_decay 0.1 --dropout 0.0 --gradient_accumulation_steps 4 --zero_stage 0 "
    + SHORT,
}
SCRIPTS |= {
    f"{step} single_gpu": "--defaults deepspeed_chat --model_name_or_path {sft} --enable_tensorboard "
    "--tensorboard_path {out} --deepspeed --output_dir {out} " + words
    for step, words in SINGLE_GPU.items()
}
PAGE = (ROOT / "docs" / "from_deepspeed_chat.md").read_text(encoding="utf-8")
BEFORE, AFTER = (block.partition("```")[0] for block in PAGE.split("```bash\n")[1:3])
SCRIPTS["3 single_gpu"] = (
    (
        AFTER.partition("step3_rlhf.py")[2]
        .partition("&>")[0]
        .replace("\\\n", " ")
        .replace("$ACTOR_MODEL_PATH", "{sft}")
        .replace("$CRITIC_MODEL_PATH", "{reward}")
        .replace("$ACTOR_ZERO_STAGE", "0")  # as the script has it if no other is given
        .replace("$CRITIC_ZERO_STAGE", "0")
        .replace("$OUTPUT", "{out}")
    )
    + """--dtype fp32 --data_path local/jsonfile --per_device_generation_batch_size 4 --per_device_training_batch_size 4
    --max_prompt_seq_len 8 --max_answer_seq_len 8"""
)
TRAINED = {"1 run_1.3b.sh": 2, "2 run_350m.sh": 4, "3 run_1.3b.sh": 4}  # steps: 20, 40, 40 % of 40 rows in fours
TOLD = {
    1: ["deepspeed"],
    2: ["deepspeed", "num_padding_at_beginning"],
    3: ["deepspeed", "num_padding_at_beginning", "enable_hybrid_engine"],
}  # what has nothing left to do
OF_SOME = ("disable_actor_dropout", "actor_dropout", "tp_gather_partition_size")  # nor has this, of some scripts


@pytest.fixture
def started(tiny, tmp_path, monkeypatch, capfd):
    """Run a script's words (and more) in a folder with data/train.json and data/eval.json, and out/training.log."""
    monkeypatch.chdir(tmp_path)
    rows = [json.loads(line) for line in (tiny.folder / "pairs.jsonl").read_text().splitlines()]
    Path("data").mkdir()
    Path("data/train.json").write_text(json.dumps(rows))
    Path("data/eval.json").write_text(json.dumps(rows[:20]))
    Path("out").mkdir()
    Path("out/training.log").write_text("what the shell has redirected\n")

    def run(script: str, *more: str) -> Result:
        words = shlex.split(SCRIPTS[script].format(sft=tiny.folder / "sft", reward=tiny.folder / "reward", out="out"))
        capfd.readouterr()
        return Result(run_words(int(script[0]), [*words, *more]), *capfd.readouterr())

    return run


@pytest.mark.parametrize(
    "script, steps, rates",  # 8 rows in one step of 8; 16 rows in steps of 4; 16 prompts in steps of 8
    [
        ("1 single_gpu", 1, {"train/lr": [1e-3]}),
        ("2 single_gpu", 4, {"train/lr": [5e-5 * (1 + math.cos(math.pi * done / 4)) / 2 for done in range(4)]}),
        ("3 single_gpu", 2, {"policy/lr": [0, 9.65e-8], "value/lr": [0, 5e-8]}),  # warm-up of 100 steps
    ],
)
def test_a_script_without_learning_rates_has_deepspeed_chats(script, steps, rates, started, tmp_path):
    result = started(script, *narrow(script))
    assert result.code == 0, result.stderr
    lines = metric_lines(tmp_path / "out")
    assert [line["step"] for line in lines] == list(range(steps + 1))
    for name, expected in rates.items():
        assert [line[name] for line in lines[1:]] == pytest.approx(expected, rel=1e-9)


def test_the_page_changes_two_words_of_a_script_and_adds_generation_batches(started):
    assert AFTER == BEFORE.replace("main.py", "training/step3_rlhf.py --defaults deepspeed_chat --generation_batches 2")
    refused = started("3 single_gpu", "--generation_batches", "1")
    assert refused.code == 2 and "Change one of them: --generation_batches 2 makes them divide." in refused.stderr


def narrow(script: str) -> list[str]:
    """Ranks of adapters that fit: models here are narrower than the script's ranks."""
    return [word for name in SCRIPTS[script].split() if name.endswith("lora_dim") for word in (name, "8")]


def told(result: Result) -> list[str]:
    """The flags that a line says have nothing left to do."""
    lines = [line for line in result.stdout.splitlines() if line.startswith("--") and "--defaults" not in line]
    return [line.split(":")[0].split()[0] for line in lines]


@pytest.mark.parametrize("script", TRAINED)
def test_a_script_trains(script, started, tmp_path):
    result = started(script)
    assert result.code == 0, result.stderr
    assert set(told(result)) >= {f"--{name}" for name in TOLD[int(script[0])]}
    assert [line["step"] for line in metric_lines(tmp_path / "out")] == list(range(TRAINED[script] + 1))
    assert Path("out/training.log").read_text() == "what the shell has redirected\n"
    assert Path("out/tensorboard").is_dir()
    models = [Path("out/actor"), Path("out/critic"), Path("out/actor_ema")] if script[0] == "3" else [Path("out")]
    assert all((model / "model.safetensors").is_file() for model in models)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_is_understood(script, started, tmp_path):
    before = snapshot(tmp_path)
    result = started(script, "--dry_run", *narrow(script))
    assert (result.code, result.stderr) == (0, "")
    step = int(script[0])
    others = [name for name in OF_SOME if f"--{name} " in f"{SCRIPTS[script]} "]
    assert sorted(told(result)) == sorted(f"--{name}" for name in TOLD[step] + others)
    assert "not looked at" not in result.stdout and "steps" in result.stdout
    assert result.stdout.count("LoRA of the ") == SCRIPTS[script].count("lora_dim")
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    "script, words, message",
    [
        (
            "3 run_13b.sh",
            ["--enable_mixed_precision_lora"],
            "error: unknown flag --enable_mixed_precision_lora. DeepSpeed-Chat's enable_mixed_precision_lora: no coun",
        ),
        (
            "3 run_13b.sh",  # whose module name is OPT's
            ["--actor_lora_dim", "128", "--actor_lora_module_name", "decoder.layers."],
            "error: --actor_lora_module_name decoder.layers.: --actor_model_name_or_path",
        ),
    ],
)
def test_what_is_not_built_is_refused(script, words, message, started, tmp_path):
    before = snapshot(tmp_path)
    result = started(script, *words)
    assert result.code == 2 and result.stderr.startswith(message) and result.stderr.count("\n") == 1
    assert snapshot(tmp_path) == before


def test_a_folder_with_more_than_a_log_is_refused(started):
    Path("out/model.bin").write_text("")
    result = started("1 run_1.3b.sh")
    assert result.code == 2 and f"--output_dir {Path('out').absolute()} is not empty" in result.stderr
