"""What pages say of flags is there: ours in the programs, fields in the dialects."""

import dataclasses
import re
from pathlib import Path

import pytest

from engine.algorithms import Dialect
from training.config import other_systems
from training.config.other_systems import HEADINGS, rows
from training.config.parsing import STEPS, parse_flags
from training.config.step3 import MemoryFlags, RLHFFlags
from training.config.supervised import RewardFlags, SFTFlags
from training.tools.compare.flags import CompareFlags
from training.tools.merge.flags import MergeFlags
from training.tools.serve.flags import ServeFlags

DOCS = Path(__file__).parents[1] / "docs"
PAGES = (
    *("guide", "sharing", "compare", "serve", "reward_server"),
    *("from_deepspeed_chat", "from_llamafactory", "from_trl", "from_trlx", "from_openrlhf"),
)
OTHERS = {  # of launchers, and of the program of checkpoints/export
    *("num_gpus", "log_level", "module", "hostfile", "master_port", "output"),
    *("algo.kl.init_coef", "init_kl_coef", "remote_rm_url"),  # OpenRLHF's own, as examples
    "local",  # hf download --local-dir
}


def flags() -> set[str]:
    """All that some program of ours takes."""
    classes = (SFTFlags, RewardFlags, RLHFFlags, MergeFlags, CompareFlags, ServeFlags, MemoryFlags)
    named = {spec.name for one in classes for spec in dataclasses.fields(one)}
    return named | other_systems.STEP3.keys() | other_systems.SUPERVISED.keys()


@pytest.mark.parametrize("page", PAGES)
def test_flags_and_fields_are_there(page):
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    named = set(re.findall(r"--([a-z][\w.]+\w)", text))
    assert len(named) > 2 and named - flags() - OTHERS == set()
    fields = {name for given in re.findall(r"--set ([\w=.,` -]+)", text) for name in re.findall(r"(\w+)=", given)}
    assert fields <= {spec.name for spec in dataclasses.fields(Dialect)}


def test_openrlhfs_defaults_are_a_command_line_that_step_3_takes():
    text = (DOCS / "from_openrlhf.md").read_text(encoding="utf-8")
    words = text.partition("training/step3_rlhf.py")[2].partition("```")[0].replace("\\\n", " ").split()
    dialect = parse_flags(RLHFFlags, words, "").resolved.dialect
    assert (dialect.kl_coef, dialect.kl_in, dialect.kl_estimator) == (0.01, "reward", "k1")
    assert (dialect.advantage_estimator, dialect.lam, dialect.gamma) == ("gae", 1.0, 1.0)
    assert (dialect.ratio, dialect.loss_scope, dialect.clip_range, dialect.value_clip_range) == (
        *("token", "optimizer_step"),
        *(0.2, 0.5),
    )
    assert (dialect.score_clip, dialect.missing_end, dialect.min_response_tokens) == (10, "none", 0)
    assert dialect.old_logprobs == "forward" and dialect.actor_lr == 1e-6 and dialect.critic_lr == 9e-6


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row.system}-{row.names[:1]}-{row.heading}")
def test_what_a_row_names_is_of_its_steps(row):
    classes = [one for one, step in STEPS.items() if step in HEADINGS[row.heading]]
    known = {spec.name for one in classes for spec in dataclasses.fields(one)}
    assert set(re.findall(r"--([a-z]\w+)", f"{row.here} {row.remark}")) <= known | {"dry_run"}
    said = row.here == "the same"
    assert not said or set(row.names) <= known | {spec.name for spec in dataclasses.fields(Dialect)}
