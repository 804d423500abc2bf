"""What pages say of flags is there: ours in the programs, fields in the dialects, other systems' in the tables."""

import dataclasses
import re
from pathlib import Path

import pytest

from engine.algorithms import Dialect
from training.compare.flags import CompareFlags
from training.convert.openrlhf_table import RENAMED
from training.convert.openrlhf_table import TABLE as OPENRLHF
from training.convert.trl_table import TABLE as TRL
from training.flags import deepspeed_chat
from training.flags.memory_flags import MemoryFlags
from training.flags.other_steps import STEPS
from training.flags.other_systems import HEADINGS, rows
from training.flags.rlhf_arguments import RLHFFlags
from training.flags.supervised_arguments import RewardFlags, SFTFlags
from training.merge.flags import MergeFlags
from training.serve.flags import ServeFlags

DOCS = Path(__file__).parents[1] / "docs"
PAGES = (
    *("guide", "sharing", "compare", "serve", "reward_server"),
    *("from_deepspeed_chat", "from_trl", "from_trlx", "from_openrlhf"),
)
OTHERS = {  # of launchers, and of the programs of training/convert, restarts/export and engine/speed/scaling
    *("num_gpus", "log_level", "module", "hostfile", "master_port", "output", "ranks", "skip_unknown"),
    *("algo.kl.init_coef", "init_kl_coef", "remote_rm_url"),  # OpenRLHF's own, as examples
    "local",  # hf download --local-dir
}


def flags() -> set[str]:
    """All that some program of ours takes."""
    classes = (SFTFlags, RewardFlags, RLHFFlags, MergeFlags, CompareFlags, ServeFlags, MemoryFlags)
    named = {spec.name for one in classes for spec in dataclasses.fields(one)}
    return named | deepspeed_chat.STEP3.keys() | deepspeed_chat.SUPERVISED.keys()


@pytest.mark.parametrize("page", PAGES)
def test_flags_and_fields_are_there(page):
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    named = set(re.findall(r"--([a-z][\w.]+\w)", text))
    assert len(named) > 2 and named - flags() - OTHERS == set()
    fields = {name for given in re.findall(r"--set ([\w=.,` -]+)", text) for name in re.findall(r"(\w+)=", given)}
    assert fields <= {spec.name for spec in dataclasses.fields(Dialect)}


def test_names_of_other_systems_are_in_the_converters_tables():
    named = {system: set() for system in ("TRL", "OpenRLHF", "trlX")}
    for row in rows():
        named[row.system] |= set(row.names) if "steps" not in row.heading else set()
    assert named["TRL"] - TRL.keys() == set()
    named["OpenRLHF"] = {re.sub(r"^critic\.(?=adam|lr|max)", "actor.", name) for name in named["OpenRLHF"]}
    assert named["OpenRLHF"] - OPENRLHF.keys() - RENAMED.keys() == {"algo.advantage.is_correction_threshold"}  # a pair


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row.system}-{row.names[:1]}-{row.heading}")
def test_what_a_row_names_is_of_its_steps(row):
    classes = [one for one, step in STEPS.items() if step in HEADINGS[row.heading]]
    known = {spec.name for one in classes for spec in dataclasses.fields(one)}
    assert set(re.findall(r"--([a-z]\w+)", f"{row.here} {row.remark}")) <= known | {"dry_run"}
    said = row.here == "the same"
    assert not said or set(row.names) <= known | {spec.name for spec in dataclasses.fields(Dialect)}
