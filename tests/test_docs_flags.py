"""What pages say of flags is there: ours in the programs, fields in the dialects."""

import dataclasses
import math
import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest

from engine.algorithms import Dialect
from training.config import other_systems
from training.config.other_systems import HEADINGS, rows
from training.config.parsing import IN_STEP_3, STEPS, parse_flags
from training.config.step3 import RLHFFlags
from training.config.supervised import RewardFlags, SFTFlags
from training.tools.audit.flags import AuditFlags
from training.tools.compare.flags import CompareFlags
from training.tools.memory.flags import MemoryFlags
from training.tools.merge.flags import MergeFlags
from training.tools.serve.flags import ServeFlags

DOCS = Path(__file__).parents[1] / "docs"
PAGES = (
    *("guide", "sharing", "audit", "compare", "serve", "reward_server"),
    *("from_deepspeed_chat", "from_llamafactory", "from_ms_swift", "from_openrlhf", "from_trl", "from_trlx"),
    *("from_verl", "port_trl_ppo"),
)
OTHERS = {  # of launchers, and of the program of tools/export
    *("num_gpus", "log_level", "module", "hostfile", "master_port", "output", "local_rank"),
    *("algo.kl.init_coef", "init_kl_coef", "reward.remote_url"),  # OpenRLHF's own, as examples
    "local",  # hf download --local-dir
}


def flags() -> set[str]:
    """All that some program of ours takes."""
    classes = (SFTFlags, RewardFlags, RLHFFlags, MergeFlags, CompareFlags, AuditFlags, ServeFlags, MemoryFlags)
    named = {spec.name for one in classes for spec in dataclasses.fields(one)}
    return named | other_systems.STEP3.keys() | other_systems.SUPERVISED.keys()


@pytest.mark.parametrize("page", PAGES)
def test_flags_and_fields_are_there(page):
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    text = re.sub("```text.*?```", "", text, flags=re.DOTALL)  # commands of other systems
    named = set(re.findall(r"--([a-z][\w.]+\w)", text))
    assert len(named) > 2 and named - flags() - OTHERS == set()
    fields = {name for given in re.findall(r"--set ([\w=.,` -]+)", text) for name in re.findall(r"(\w+)=", given)}
    assert fields <= {spec.name for spec in dataclasses.fields(Dialect)}


def commands(page: str) -> tuple[list[list[str]], list[list[str]]]:
    """The words of the page's commands: (those of the other system, those of step 3)."""
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    blocks = re.findall("```(text|bash)\n(.*?)```", text, flags=re.DOTALL)
    parts = [(kind, block.partition("training/step3_rlhf.py")[2] or block) for kind, block in blocks]
    words = [(kind, shlex.split(part.replace("\\\n", " "))) for kind, part in parts]
    return [each for kind, each in words if kind == "text"], [each for kind, each in words if kind == "bash"]


def test_openrlhfs_script_and_defaults_are_a_command_line_that_step_3_takes():
    (theirs,), (words,) = commands("from_openrlhf")
    args = parse_flags(RLHFFlags, words, "")
    dialect = args.resolved.dialect
    assert (dialect.kl_coef, dialect.kl_in, dialect.kl_estimator) == (0.01, "reward", "k1")
    assert (dialect.advantage_estimator, dialect.lam, dialect.gamma) == ("gae", 1.0, 1.0)
    assert (dialect.ratio, dialect.loss_scope, dialect.clip_range, dialect.value_clip_range) == (
        *("token", "optimizer_step"),
        *(0.2, 0.5),
    )
    assert (dialect.score_clip, dialect.missing_end, dialect.min_response_tokens) == (10, "none", 0)
    assert dialect.old_logprobs == "forward" and dialect.actor_lr == 5e-7 and dialect.critic_lr == 9e-6
    sizes = {word: int(after) for word, after in pairwise(theirs) if after.isdigit()}
    assert args.rows_per_rank * 8 == sizes["--rollout.batch_size"]
    assert dialect.mini_batches == sizes["--rollout.batch_size"] / sizes["--train.batch_size"]
    assert args.max_steps == sizes["--data.max_samples"] // sizes["--rollout.batch_size"]
    assert dialect.warmup_steps == math.ceil(sizes["--data.max_samples"] // sizes["--train.batch_size"] * 0.03)
    assert args.max_prompt_seq_len + args.max_answer_seq_len == sizes["--data.max_len"]


@pytest.mark.parametrize("page, ranks", [("from_trl", 8), ("port_trl_ppo", 1)])
def test_a_command_of_trl_keeps_its_sizes(page, ranks):
    (theirs,), (ours, *_) = commands(page)
    given = {word.lstrip("-"): after for word, after in pairwise(theirs)}
    passes, rows = int(given["gradient_accumulation_steps"]), int(given["per_device_train_batch_size"])
    args = parse_flags(RLHFFlags, ours, "")
    dialect = args.resolved.dialect
    assert args.rows_per_rank == passes * rows
    assert (args.per_device_training_batch_size, dialect.mini_batches) == (rows, 1)  # one mini-batch: one step an epoch
    assert args.max_steps == math.ceil(int(given["total_episodes"]) / (passes * rows * ranks))
    assert args.per_device_generation_batch_size == int(given.get("local_rollout_forward_batch_size", 64))
    assert dialect.ppo_epochs == int(given.get("num_ppo_epochs", 4))
    assert (dialect.missing_end, dialect.missing_end_value) == ("subtract", float(given["missing_eos_penalty"]))
    assert dialect.truncate_token == given.get("stop_token", "")
    by_deepspeed = f"deepspeed_zero{args.actor_zero_stage}.yaml" in " ".join(theirs)  # without it TRL clips nothing
    assert args.max_answer_seq_len == 53 and dialect.max_grad_norm == (1 if by_deepspeed else 0)


@pytest.mark.parametrize("page", ["from_ms_swift", "from_openrlhf", "from_trl", "port_trl_ppo"])
def test_each_flag_of_their_script_is_ours_or_has_a_row(page):
    words = [word.removeprefix("--") for script in commands(page)[0] for word in script if word.startswith("--")]
    ours = flags() | IN_STEP_3.keys()
    assert words and all(word in ours or other_systems.flag_of_other_systems(word, 3) for word in words)


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row.system}-{row.names[:1]}-{row.heading}")
def test_what_a_row_names_is_of_its_steps(row):
    classes = [one for one, step in STEPS.items() if step in HEADINGS[row.heading]]
    known = {spec.name for one in classes for spec in dataclasses.fields(one)}
    assert set(re.findall(r"--([a-z]\w+)", f"{row.here} {row.remark}")) <= known | {"dry_run"}
    said = row.here.startswith("the same")
    assert not said or set(row.names) <= known | {spec.name for spec in dataclasses.fields(Dialect)}
