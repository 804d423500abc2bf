"""DeepSpeed-Chat's defaults: those on the page, those of its programs, and those that --defaults restores.

The page lists those that are other ones here. It is checked against DeepSpeed-Chat's own files where the variable
DEEPSPEED_CHAT names a copy of DeepSpeedExamples' applications/DeepSpeed-Chat (83757d9c).
"""

import ast
import os
import re
from pathlib import Path

import pytest

from tests.training.config.command_lines import parse
from training.config.algorithm import DIALECT_FLAGS
from training.config.models import LEARNING_RATE
from training.config.other_systems import PAGES
from training.config.parsing import STEPS, parse_flags
from training.config.supervised import SFTFlags
from training.tools.audit.flags import AuditFlags

OLDER = {
    1: ("deepspeed", "disable_dropout"),
    2: ("deepspeed", "no_fused_kernels"),
    3: ("deepspeed", "disable_actor_dropout", "disable_critic_dropout"),
}  # DeepSpeed's own flag, and those of scripts that are older than the three main.py
REFUSED = {"enable_mixed_precision_lora"}
FOLDERS = {1: "step1_supervised_finetuning", 2: "step2_reward_model_finetuning", 3: "step3_rlhf_finetuning"}
MODELS = {1: ["model_name_or_path"], 2: ["model_name_or_path"]} | {
    3: ["actor_model_name_or_path", "critic_model_name_or_path"]
}


def page_table(step: int) -> dict[str, tuple[str, str]]:
    """{flag: (DeepSpeed-Chat's default, what the page says of ours)} of a step."""
    text = (PAGES / "from_deepspeed_chat.md").read_text(encoding="utf-8")
    found = {}
    for line in text.partition("| flag | step 1 |")[2].partition("\n\n")[0].splitlines()[2:]:
        cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if cells[step]:
            found |= dict.fromkeys(re.findall(r"--(\w+)", cells[0]), (cells[step], cells[4]))
    return found


def shown(value) -> str:
    """A default as the page shows it."""
    if value is None or value == []:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return " ".join(value) if isinstance(value, list) else str(value)


def defaults_of(program: Path) -> dict[str, str]:
    """{flag: default} of one of DeepSpeed-Chat's main.py, which is read, not run."""
    found = {}
    for node in ast.walk(ast.parse(program.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            given = {word.arg: word.value for word in node.keywords}
            default = ast.literal_eval(given["default"]) if "default" in given else False if "action" in given else None
            found[ast.literal_eval(node.args[0])[2:]] = "required" if "required" in given else shown(default)
    return found


def value_of(args, name: str, step: int) -> str:
    """A flag's value as the page shows it, in parsed arguments of a step."""
    value = getattr(args, name)
    if value is None and step == 3 and name in DIALECT_FLAGS:
        value = getattr(args.resolved.dialect, DIALECT_FLAGS[name])
    if value is None and name.endswith(("_dropout", "lora_learning_rate")):
        value = LEARNING_RATE if name.endswith("rate") else 0.0
    return shown(value)


def needed(step: int) -> list[str]:
    return ["--output_dir", "out", *(word for name in MODELS[step] for word in (f"--{name}", "m"))]


@pytest.mark.skipif("DEEPSPEED_CHAT" not in os.environ, reason="DEEPSPEED_CHAT names no applications/DeepSpeed-Chat")
@pytest.mark.parametrize("flags_class, step", STEPS.items())
def test_what_the_page_does_not_list_is_deepspeed_chats(flags_class, step):
    theirs = defaults_of(Path(os.environ["DEEPSPEED_CHAT"], "training", FOLDERS[step], "main.py"))
    listed = {name: default for name, (default, _) in page_table(step).items()}
    assert listed.items() <= theirs.items()
    assert theirs.keys() - {*flags_class.__dataclass_fields__, *flags_class.old_flags, "local_rank"} <= REFUSED
    own = parse_flags(flags_class, [*needed(step), "--data_path", "d"], "")
    for name in (theirs.keys() & flags_class.__dataclass_fields__.keys()) - listed.keys() - set(MODELS[step]):
        assert value_of(own, name, step) == theirs[name], name


@pytest.mark.parametrize("flags_class, step", STEPS.items())
def test_every_older_flag_of_deepspeed_chat_is_known(flags_class, step):
    ours = {*flags_class.__dataclass_fields__, *flags_class.old_flags}
    assert {*page_table(step), *OLDER[step]} - ours <= REFUSED


@pytest.mark.parametrize("flags_class, step", STEPS.items())
def test_what_the_page_lists_differs_and_is_restored_or_not_as_it_says(flags_class, step):
    own = parse_flags(flags_class, [*needed(step), "--data_path", "d"], "")
    restored = parse_flags(flags_class, [*needed(step), "--defaults", "deepspeed_chat"], "")
    for name, (default, here) in page_table(step).items():
        if default == "required" or name not in flags_class.__dataclass_fields__:
            continue
        if here.startswith("step "):
            here = here.partition(": ")[2] if here.startswith(f"step {step}: ") else ""
        assert (value_of(own, name, step) != default) == (here != ""), name
        assert (value_of(restored, name, step) != default) == here.startswith("always"), name


def test_given_flags_win_over_named_defaults(tmp_path):
    (tmp_path / "run.yaml").write_text("defaults: deepspeed_chat\ndata_split: 6,2,2\n")
    told = []
    words = ["--output_dir", "o", "--model_name_or_path", "m", "--data_path", "a", "b", "--learning_rate", "1e-4"]
    args = parse_flags(SFTFlags, [*words, "--config", str(tmp_path / "run.yaml")], "", told.append)
    assert (args.data_path, args.data_split, args.learning_rate) == (["a", "b"], "6,2,2", 1e-4)
    assert told == [
        "--defaults deepspeed_chat: --dtype fp16 --overlong cut_answer --lr_scheduler_type cosine --loss_on all"
    ]


def test_a_field_that_is_set_wins_over_named_defaults():
    step3 = next(one for one, step in STEPS.items() if step == 3)
    args = parse("--defaults", "deepspeed_chat", "--set", "mini_batches=4", flags_class=step3)
    assert args.resolved.changed == {"mini_batches": (1, 4)}


def test_a_tool_takes_the_defaults_that_it_has_flags_for():
    """The held-out prompts of a run with --defaults are found with the same flag."""
    words = "--output_dir o --sft_model_name_or_path m --reward_model_name_or_path r --defaults deepspeed_chat"
    args = parse_flags(AuditFlags, words.split(), "")
    assert (args.data_path, args.data_split, args.overlong) == (["Dahoas/rm-static"], "2,4,4", "cut_answer")
