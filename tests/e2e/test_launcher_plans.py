"""What stands in the launchers' first lines of memory: the planner's figures for these settings, and that they fit."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from engine.memory import Cluster, MemoryPlan, plan
from engine.memory.gpus import gpu_bytes
from scripts.harness import ROOT
from scripts.simulation.scaling import configuration
from training import memory_plan
from training.config.parsing import parse_flags
from training.config.step3 import MemoryFlags
from training.runtime.memory_lines import workload

PAGE = ROOT / "docs" / "memory.md"
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]  # a Llama's, as step 2 has them
ROW = re.compile(r"^#   (\d+)x(\S+) +(\S.*?) {2,}(\d+) GB \((\w+)\), (\d+) GB$", re.MULTILINE)


def rows() -> dict[tuple[str, str], re.Match]:
    """The rows of all launchers' first lines: by launcher and HARDWARE."""
    texts = {path.stem: path.read_text() for path in sorted((ROOT / "scripts").glob("*.sh"))}
    return {
        (name, f"{row[1]}x{row[2]}"): row
        for name, text in texts.items()
        if "launch.sh" in text
        for row in ROW.finditer(text)
    }


def planned(launcher: str, hardware: str, folder: Path) -> MemoryPlan:
    """The plan of its step 3, on the models that its steps 1 and 2 make; `folder` is where they stand."""
    family, _, size = launcher.partition("_")
    name, scorer = (f"opt-{size}", "opt-350m") if family == "opt" else (f"llama-2-{size}", "llama-2-7b")
    models = {"sft": configuration(name), "reward": configuration(scorer)}
    for name, content in models.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(content))
    base = {"base_model_name_or_path": str(folder / "sft"), "peft_type": "LORA", "task_type": "SEQ_CLS"}
    base |= {"r": 64, "target_modules": LINEAR}
    (folder / "reward" / "adapter").mkdir(exist_ok=True)
    (folder / "reward" / "adapter" / "adapter_config.json").write_text(json.dumps(base))
    return plan_of(words_of(launcher, 3, hardware, folder), hardware)


def words_of(launcher: str, step: int, hardware: str, folder: Path) -> list[str]:
    """The flags that a launcher gives to a step's program."""
    for name in ("python", "deepspeed"):  # without deepspeed in PATH, a launcher takes the .venv that tests may run in
        (folder / name).write_text("#!/bin/sh\nprintf '%s\\0' \"$@\"\n")
        (folder / name).chmod(0o755)
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "HARDWARE": hardware, "OUT": str(folder), "LAUNCHER": "srun"}
    script = [str(ROOT / "scripts" / f"{launcher}.sh"), str(step)]
    ended = subprocess.run(script, env=environment, text=True, capture_output=True, timeout=60, check=True)
    words = ended.stdout.split("\0")[:-1]
    program = next(
        place for place, word in enumerate(words) if word.startswith(str(ROOT / "training" / f"step{step}_"))
    )
    return words[program + 1 :]


def plan_of(words: list[str], hardware: str) -> MemoryPlan:
    """The plan of step 3 with these flags, on "8xa100-40g" and its like."""
    args = parse_flags(MemoryFlags, words, "")
    dialect, _ = args.resolved_dialect()
    args.engine_configs(dialect)  # what DeepSpeed cannot do is refused
    count, _, gpu = hardware.partition("x")
    cluster = Cluster(gpus=min(8, int(count)), nodes=max(1, int(count) // 8), gpu=gpu_bytes(gpu))
    return plan(args.engine_spec(dialect), workload(args, dialect), cluster)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """One folder for each launcher's models: what is planned of a model is planned once."""
    return tmp_path_factory.mktemp("launchers")


@pytest.mark.parametrize("launcher, hardware", sorted(rows()))
def test_a_launcher_needs_what_it_says(launcher, hardware, folders):
    found, row = planned(launcher, hardware, folders / launcher), rows()[launcher, hardware]
    needed, host = round(found.needed / 1e9), round(found.host_peak / 1e9)
    said = f"#   {hardware} ... {needed} GB ({found.peak.phase}), {host} GB"
    assert row[5] == found.peak.phase and abs(int(row[4]) - needed) <= 1, said
    assert abs(int(row[6]) - host) <= max(1, 0.03 * host), said
    assert found.fits


def test_every_launcher_has_rows_for_all_its_hardware():
    for path in (ROOT / "scripts").glob("*.sh"):
        known = re.search(r"^hardware (.*)$", path.read_text(), re.MULTILINE)
        assert known is None or {(path.stem, name) for name in known[1].split()} <= rows().keys()


# Of step 3's training_scripts in DeepSpeedExamples, as they run without arguments: the flags that both have.
PUBLISHED = """--data_path Dahoas/rm-static --data_split 2,4,4 --num_padding_at_beginning 1 --generation_batches 1
    --ppo_epochs 1 --max_answer_seq_len 256 --max_prompt_seq_len 256 --actor_learning_rate 5e-4
    --critic_learning_rate 5e-6 --num_train_epochs 1 --lr_scheduler_type cosine --gradient_accumulation_steps 1
    --num_warmup_steps 100 --deepspeed --seed 1234 --enable_hybrid_engine --actor_zero_stage 3 --critic_zero_stage 3
    --actor_gradient_checkpointing --disable_actor_dropout --actor_lora_dim 128
    --actor_lora_module_name decoder.layers. """


PUBLISHED_FOR = {
    # opt/single_node/run_13b.sh
    ("13b", "8xa100-40g"): "--per_device_generation_batch_size 16 --per_device_training_batch_size 16 "
    "--inference_tp_size 2",
    # opt/multi_node/run_66b.sh; batches by the names that main.py has had since
    ("66b", "64xa100-80g"): "--per_device_generation_batch_size 4 --per_device_training_batch_size 4 "
    "--tp_gather_partition_size 4 --actor_weight_decay 0.1 --critic_weight_decay 0.1",
}


@pytest.mark.parametrize("size, hardware", PUBLISHED_FOR)
def test_what_deepspeed_chat_has_published_fits(size, hardware, folders):
    for name in (size, "350m"):
        (folders / name).mkdir(exist_ok=True)
        (folders / name / "config.json").write_text(json.dumps(configuration(f"opt-{name}")))
    models = ["--actor_model_name_or_path", str(folders / size), "--critic_model_name_or_path", str(folders / "350m")]
    words = (PUBLISHED + PUBLISHED_FOR[size, hardware]).split()
    found = plan_of([*models, *words, "--dtype", "fp16"], hardware)  # the default there
    shape = configuration(f"opt-{size}")
    width, ffn, layers = shape["hidden_size"], shape["ffn_dim"], shape["num_hidden_layers"]
    matrices = layers * (4 * width**2 + 2 * width * ffn)
    others = layers * (9 * width + ffn) + 2 * width + (50272 + 2050) * width  # biases, norms; embeddings
    factors = 128 * layers * (4 * 2 * width + 2 * (width + ffn))
    ranks = int(hardware.partition("x")[0])
    rest = found.phases["generate"]
    assert rest["actor"]["weights"] == pytest.approx(2 * (matrices + others + factors) / ranks, rel=1e-3)
    assert rest["actor"]["optimizer"] == pytest.approx(12 * (others + factors) / ranks, rel=1e-3)
    assert rest["reference"]["weights"] == pytest.approx(2 * (matrices + others) / ranks, rel=1e-3)
    assert found.fits, found.needed
    figures = f"{found.needed / 1e9:.1f} of {gpu_bytes(hardware.partition('x')[2]) / 1e9:.1f} GB"
    assert figures in PAGE.read_text(), f"{PAGE} should say {figures}"


def test_the_page_shows_what_the_planner_prints(folders, capsys):
    """The table of its command; a line that ends with " ..." goes on."""
    in_blocks = r"```bash\n(python training/memory_plan\.py .*?)\n```.*?```\n(memory plan: .*?)```"
    command, shown = re.search(in_blocks, PAGE.read_text(), re.DOTALL).groups()
    for name, size in (("facebook/opt-13b", "13b"), ("opt-350m-reward", "350m")):
        (folders / size).mkdir(exist_ok=True)
        (folders / size / "config.json").write_text(json.dumps(configuration(f"opt-{size}")))
        command = command.replace(name, str(folders / size))
    assert memory_plan.main(command.replace("\\\n", " ").split()[2:]) == 0
    for line, said in zip(capsys.readouterr().out.splitlines(), shown.splitlines(), strict=True):
        assert line == said or (said.endswith(" ...") and line.startswith(said[:-4])), line
