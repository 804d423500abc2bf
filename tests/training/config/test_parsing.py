"""How a command line and a YAML file become a dataclass, and which words and values are refused; paths, chat templates,
values that a flag once had, and flags of other systems.
"""

import re
from dataclasses import fields
from operator import attrgetter
from pathlib import Path

import pytest

from engine.errors import UserError
from scripts.harness.models import make_causal_lm
from tests.training.config.command_lines import REQUIRED_FLAGS, Flags, dialect_refusal, parse, refusal
from training.config.flags import make_paths_absolute
from training.config.other_systems import HEADINGS, rows
from training.config.parsing import FIRST, STEPS, parse_flags
from training.config.step3 import RLHFFlags
from training.config.supervised import RewardFlags, SFTFlags
from training.runtime.nodes import named_files


def test_defaults_and_values():
    assert parse() == Flags(output_dir="out", size=3)
    args = parse("--size", "4", "--rate=0.5", "--color", "blue", "--quick", "--dry_run")
    assert args == Flags(output_dir="out", size=4, rate=0.5, color="blue", quick=True, dry_run=True)


def test_the_launchers_own_flag_is_accepted_and_not_kept():
    assert parse("--local_rank=1") == parse("--local_rank", "0") == parse()


def test_truth_values():
    assert parse("--checked", "false").checked is False and parse("--checked", "True").checked is True
    assert parse().center is None
    assert parse("--center", "true").center is True and parse("--center", "FALSE").center is False
    assert "'yes' is neither true nor false" in refusal("--center", "yes") and "--center" in refusal("--center", "yes")
    assert parse("--quick").quick is True and parse("--quick", "--quick", "false").quick is False
    assert "'maybe' is neither true nor false" in refusal("--quick", "maybe")


def test_lists():
    assert parse("--stop", "END", "a b", "--quick").stop == ["END", "a b"]
    assert parse("--stop", "---", "-->", "---END", "END", "--quick").stop == ["---", "-->", "---END", "END"]
    assert "--stop" in refusal("--stop")
    first = parse()
    first.stop.append("changed")
    assert parse().stop == [], "two runs share a default list"


@pytest.mark.parametrize("words", [["--rate", "-1e-5"], ["--rate=-1e-5"], ["--rate", "-.00001"], ["--rate", "-1E-05"]])
def test_negative_numbers_are_values(words):
    assert parse(*words).rate == -1e-5


def test_negative_numbers_may_begin_a_list():
    words = [*REQUIRED_FLAGS[RLHFFlags], "--reward_model_weight", "-1", "0.5", "-1e-5"]
    assert parse_flags(RLHFFlags, words, "", validate=False).reward_model_weight == [-1.0, 0.5, -1e-5]


@pytest.mark.parametrize(
    "words, told",
    [
        (["--colour", "blue"], "unknown flag --colour. Did you mean --color?"),
        (["--rates=3"], "unknown flag --rates. Did you mean --rate?"),
        (["--rat", "3"], "unknown flag --rat. Did you mean --rate?"),  # and not taken for an abbreviation
        (["--zzzzzz", "3"], "unknown flag --zzzzzz. --help all lists the flags."),
        (["--hel"], "unknown flag --hel. --help all lists the flags."),
        (["--locl_rank", "3"], "unknown flag --locl_rank. --help all lists the flags."),  # the launcher's
        (["--rat", "3", "--hel"], "unknown flag --rat. Did you mean --rate?\nunknown flag --hel. --help all lists"),
        (["stray"], "'stray' belongs to no flag. --help all lists the flags."),
        (["--size", "3", "4"], "'4' belongs to no flag. --help all lists the flags."),
        (["-s", "3"], "'-s' belongs to no flag. --help all lists the flags."),
        (["--size", "many"], "argument --size: invalid int value: 'many'. --help all lists the flags."),
        (["--size", "3.5"], "argument --size: invalid int value: '3.5'. --help all lists the flags."),
        (["--rate", "high"], "argument --rate: invalid float value: 'high'. --help all lists the flags."),
        (["--rate"], "argument --rate: expected one argument. --help all lists the flags."),
        (["--color", "green"], "argument --color: invalid choice: 'green'"),
        (["--seed", "-1"], "--seed -1: must be at least 0."),
    ],
)
def test_refusals(words, told):
    assert refusal(*words).startswith(told)


@pytest.mark.parametrize(
    "flags_class, word, told",
    [
        (RLHFFlags, "--held_out", "It is a flag of steps 1 and 2; here --num_eval_prompts says how many"),
        (SFTFlags, "--num_eval_prompts", "It is a flag of step 3; here --held_out says how many rows are held out."),
        (SFTFlags, "--max_answer_seq_len", "It is a flag of steps 2 and 3."),
        (
            RLHFFlags,
            "--per_device_batch_size",
            "Did you mean --per_device_training_batch_size or --per_device_generation_batch_size?",
        ),
    ],
)
def test_flags_of_other_steps_are_named(flags_class, word, told):
    assert refusal(word, "100", flags_class=flags_class).startswith(f"unknown flag {word}. {told}")


def test_a_missing_flag_is_named():
    with pytest.raises(UserError, match="required: --size. --help all lists the flags"):
        parse_flags(Flags, ["--output_dir", "out"], "a program")


@pytest.mark.parametrize("flags_class", REQUIRED_FLAGS)
def test_help_shows_first_flags_and_names_the_way_to_all(flags_class, capsys):
    with pytest.raises(SystemExit) as end:
        parse("--help", flags_class=flags_class)
    assert end.value.code == 0
    shown, known = capsys.readouterr().out, [spec.name for spec in fields(flags_class)]
    first = [name for names in FIRST.values() for name in names if name in known]
    assert re.findall(r"^  --(\w+)", shown, re.MULTILINE) == first and len(first) < len(known) / 2
    assert f"--help all lists all {len(known)} flags" in shown


def test_help_of_another_program_begins_with_its_own_flags(capsys):
    with pytest.raises(SystemExit):
        parse_flags(Flags, ["--help"], "")
    shown = re.findall(r"^  --(\w+)", capsys.readouterr().out, re.MULTILINE)
    assert shown == [
        "size",
        "rate",
        "color",
        "quick",
        "checked",
        "center",
        "output_dir",
        "config",
        "dry_run",
        "seed",
        "dtype",
    ]


@pytest.mark.parametrize("flags_class", REQUIRED_FLAGS)
def test_help_all_lists_every_flag(flags_class, capsys):
    with pytest.raises(SystemExit) as end:
        parse("--help", "all", flags_class=flags_class)
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert all(
        f"--{name} " in shown or f"--{name}\n" in shown
        for name in [*map(attrgetter("name"), fields(flags_class)), *flags_class.old_flags]
    )


def test_flags_without_effect_are_accepted_with_one_line():
    for flags_class in (SFTFlags, RLHFFlags):
        for name, kind in flags_class.old_flags.items():
            value, told = {bool: [], int: ["64"], float: ["0"], str: ["x"]}[kind], []
            words = [*REQUIRED_FLAGS[flags_class], f"--{name}", *value]
            assert parse_flags(flags_class, words, "a program", told.append) == parse(flags_class=flags_class)
            assert told == [f"--{name}: without effect here (docs/from_deepspeed_chat.md)"]


@pytest.fixture
def config(tmp_path):
    def write(text: str) -> str:
        (tmp_path / "run.yaml").write_text(text)
        return str(tmp_path / "run.yaml")

    return write


def test_a_yaml_file_says_what_flags_say(config):
    path = config(
        "size: 7\nrate: 1e-3\nquick: true\nchecked: false\ncolor: blue\nstop: [a b, END]\ncenter:\n"
        "output_dir: elsewhere\n"
    )
    args = parse_flags(Flags, ["--config", path], "a program")
    assert args == Flags(
        config=path,
        output_dir="elsewhere",
        size=7,
        rate=1e-3,
        quick=True,
        checked=False,
        color="blue",
        stop=["a b", "END"],
    )


def test_the_command_line_wins_over_the_file(config):
    path = config("size: 7\nquick: true\nstop: [a]\n")
    args = parse("--config", path, "--quick", "false", "--stop", "b", "c")
    assert (args.size, args.quick, args.stop) == (3, False, ["b", "c"])


@pytest.mark.parametrize(
    "text, told",
    [
        ("sise: 3", "run.yaml: unknown key sise. Did you mean size?"),
        ("zzzzzz: 3", "run.yaml: unknown key zzzzzz. --help all lists the flags."),
        ("3: 3", "run.yaml: unknown key 3."),
        ("config: x", "run.yaml: unknown key config."),
        ("local_rank: 3", "run.yaml: unknown key local_rank."),
        ("size: many", "run.yaml, key size: argument --size: invalid int value: 'many'"),
        ("size: [3, 4]", "run.yaml, key size: [3, 4] is more than one value."),
        ("size: {a: 1}", "run.yaml, key size: {'a': 1} is not a text, number, truth value or list of these."),
        ("stop: [a, null]", "run.yaml, key stop: ['a', None] is not a text"),
        ("stop: [a, --quick]", "run.yaml, key stop: a value that begins with -- cannot be in a list."),
        ("color: green", "run.yaml, key color: argument --color: invalid choice: 'green'"),
        ("size: 3\nsize: 4", "run.yaml, line 2: no valid YAML (the key size occurs twice)."),
        ("size: [3", "run.yaml, line 1: no valid YAML"),
        ("just words", "run.yaml: found 'just words'; needed lines like"),
        ("", "run.yaml: found nothing; needed lines like"),
    ],
)
def test_mistakes_in_the_file(config, text, told):
    assert told in refusal("--config", config(text))


def test_a_file_that_cannot_be_read(tmp_path):
    assert refusal("--config", str(tmp_path / "none.yaml")).endswith("cannot be read (No such file or directory).")
    (tmp_path / "bad.yaml").write_bytes(b"size: \xff")
    assert "bad.yaml: cannot be read" in refusal("--config", str(tmp_path / "bad.yaml"))


REQUIRED = {"data_path": ["p"], "actor_model_name_or_path": "a", "critic_model_name_or_path": "c"}


def test_paths_and_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("sft").mkdir()
    Path("auto").mkdir()
    Path("prompts.jsonl").touch()
    Path("judge.py").touch()
    Path("reward").symlink_to("sft")
    args = RLHFFlags(
        output_dir="new/out",
        tensorboard_path="curves",
        actor_model_name_or_path="sft",
        critic_model_name_or_path="reward",
        reward_model_name_or_path="owner/reward",
        data_path=["prompts.jsonl", "Dahoas/rm-static", "local/jsonfile"],
        reward_function=["judge.py:score", "math_verify"],
        resume="auto",
    )
    make_paths_absolute(args)
    assert args.output_dir == f"{tmp_path}/new/out" and args.tensorboard_path == f"{tmp_path}/curves"
    assert args.actor_model_name_or_path == f"{tmp_path}/sft"
    assert args.critic_model_name_or_path == f"{tmp_path}/reward"
    assert args.reward_model_name_or_path == "owner/reward"
    assert args.data_path == [f"{tmp_path}/prompts.jsonl", "Dahoas/rm-static", "local/jsonfile"]
    assert args.reward_function == [f"{tmp_path}/judge.py:score", "math_verify"]
    assert args.resume == "auto" and args.data_output_path is None and args.actor_ds_config is None
    args.reward_function = ["judge:score"]
    make_paths_absolute(args)
    assert args.reward_function == ["judge:score"]


def test_up_from_a_folder_that_is_not_there(tmp_path, monkeypatch):
    """Made later, it would lead to files that were not found before."""
    monkeypatch.chdir(tmp_path)
    Path("disk/runs").mkdir(parents=True)
    Path("link").symlink_to("disk/runs")
    args = RLHFFlags(output_dir="new/./dot/../out", tensorboard_path="link/../curves", **REQUIRED)
    make_paths_absolute(args)
    assert args.output_dir == f"{tmp_path}/new/out"
    assert args.tensorboard_path == f"{tmp_path}/disk/curves", "up from where a link leads to"
    args = RLHFFlags(output_dir="link/out", **REQUIRED)
    make_paths_absolute(args)
    assert args.output_dir == f"{tmp_path}/link/out"


OWN = "own {% for m in messages %}{{ m.content }}{% endfor %}"
GIVEN = "given {% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "cannot be read .No such file or directory.. Give a text file"),
        (b" \n", "the file is empty"),
        (b"\xff\xfe{\x00", "cannot be read .*utf-8"),
        (b"{% for m in messages %}\n{{ m.content }\n{% endfor %}", "line 2: no valid Jinja .unexpected"),
        (b"{{ messages | no_such }}", "line 1: no valid Jinja .No filter named"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    ],
)
def test_a_file_without_a_template_is_refused_by_one_message(tmp_path, content, message):
    path = tmp_path / "chat.jinja"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=f"^--chat_template {path}.*{message}"):
        parse("--chat_template", str(path), flags_class=SFTFlags)


def test_a_folder_and_a_name_that_is_none():
    assert "Is a directory" in refusal("--chat_template", str(Path(__file__).parent))
    assert "this is blank" in refusal("--chat_template", " ")


def test_the_tokenizer_gets_it_in_place_of_its_own_and_is_saved_with_it(tmp_path):
    base, path = make_causal_lm(tmp_path / "base"), tmp_path / "chat.jinja"
    path.write_text(GIVEN)
    (tmp_path / "base" / "chat_template.jinja").write_text(OWN)
    for value, expected in (([], OWN), (["--chat_template", str(path)], GIVEN)):
        args = parse(*value, flags_class=SFTFlags)
        args.read_tokenizer(base, "--model_name_or_path").save_pretrained(tmp_path / "saved")
        assert (tmp_path / "saved" / "chat_template.jinja").read_text() == expected
    config = tmp_path / "run.yaml"
    config.write_text(f"chat_template: {path}\n")
    args = parse("--config", str(config), flags_class=RLHFFlags)
    assert args.spec.chat_template == str(path)
    assert ("chat_template", str(path)) in named_files(args)


@pytest.mark.parametrize(
    "flags_class, word, message",
    [
        (
            RLHFFlags,
            "--cliprange",
            "TRL's cliprange: in step 3 --clip_range.",
        ),
        (
            RLHFFlags,
            "--vf_coef=0.1",
            "TRL's vf_coef: in step 3 --set value_factor= (the critic has an optimizer of its own)",
        ),
        (RLHFFlags, "--init_kl_coef", "OpenRLHF's init_kl_coef: in step 3 --kl_coef."),
        (RLHFFlags, "--use_dora", "TRL's use_dora: no counterpart; instead LoRA as docs/lora.md has it."),
        (SFTFlags, "--lora_r", "TRL's lora_r: in steps 1 and 2 --lora_dim (16 there); the rate is --lora_l"),
        (RewardFlags, "--adam.lr", "OpenRLHF's adam.lr: in steps 1 and 2 --learning_rate (5e-6 for SFT, 9e-6 for"),
    ],
)
def test_what_is_said(tmp_path, flags_class, word, message):
    name = word.partition("=")[0]
    assert refusal(word, flags_class=flags_class).startswith(f"unknown flag {name}. {message}")
    (tmp_path / "run.yaml").write_text(f"{name[2:]}: 1\n")
    told = refusal("--config", str(tmp_path / "run.yaml"), flags_class=flags_class)
    assert f"run.yaml: unknown key {name[2:]}. {message}" in told


@pytest.mark.parametrize(
    "word, message",
    [
        ("critic.ppo_max_token_len_per_gpu=3", "verl's ppo_max_token_len_per_gpu: no counterpart; instead batches"),
        ("--ref.num_nodes", "OpenRLHF's num_nodes: no counterpart; instead the launcher has the number of GPUs"),
        ("--rlhf_type", "ms-swift's rlhf_type: in step 3 --dialect trl_ppo for ppo; rm is step 2, grpo a dialect"),
        ("--reward_model", "LLaMA-Factory's reward_model: in step 3 --critic_model_name_or_path. ms-swift's "),
    ],
)
def test_a_flag_without_dashes_one_found_by_its_end_and_a_link(word, message):
    told = refusal(word, flags_class=RLHFFlags)
    assert told.startswith(f"unknown flag {word.partition('=')[0]}. {message}")


def test_another_systems_value_of_a_flag_without_effect():
    told = refusal("--deepspeed", "zero3", flags_class=RLHFFlags)
    assert told.startswith("argument --deepspeed: 'zero3' is neither true nor false. LLaMA-Factory's deepspeed: in ")
    assert "ms-swift's deepspeed: in step 3 --actor_zero_stage, --critic_zero_stage" in told


def test_a_field_that_the_dialect_does_not_have():
    assert dialect_refusal("--critic_model_name_or_path", "c", "--set", "cliprange_value=0.1").startswith(
        "--set cliprange_value=0.1: the dialect has no field cliprange_value. TRL's cliprange_value: in step 3 "
        "--value_clip_range."
    )


def test_a_name_that_two_systems_have_with_two_meanings():
    told = refusal("--per_device_train_batch_size", "8", "--output_dir", "o", flags_class=RLHFFlags)
    assert "--per_device_generation_batch_size" in told and "--per_device_training_batch_size" in told


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row.system}-{row.names[:1]}-{row.heading}")
def test_each_name_that_is_none_of_ours_is_answered(row):
    for flags_class, step in STEPS.items():
        for name in row.names if step in HEADINGS[row.heading] else ():
            if name not in (*flags_class.__dataclass_fields__, *flags_class.old_flags):
                told = refusal(f"--{name}", "1", flags_class=flags_class)
                assert "Did you mean" not in told and "--help all lists" not in told, told
