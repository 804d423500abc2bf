"""--chat_template: one flag of all programs that read texts, whose file is looked at before anything is loaded."""

import dataclasses
from pathlib import Path

import pytest

from engine.errors import UserError
from scripts.harness.models import make_causal_lm
from tests.training.config.command_lines import REQUIRED_FLAGS, parse, refusal
from training.config.flags import TokenizerFlags
from training.config.step3 import RLHFFlags
from training.config.supervised import RewardFlags, SFTFlags
from training.tools.compare.flags import CompareFlags
from training.tools.merge.flags import MergeFlags
from training.tools.preflight.facts import inputs_of
from training.tools.serve.flags import ServeFlags

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
@pytest.mark.parametrize("flags_class", REQUIRED_FLAGS)
def test_a_file_without_a_template_is_refused_by_one_message(tmp_path, flags_class, content, message):
    path = tmp_path / "chat.jinja"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=f"^--chat_template {path}.*{message}"):
        parse("--chat_template", str(path), flags_class=flags_class)


def test_a_folder_and_a_name_that_is_none():
    assert "Is a directory" in refusal("--chat_template", str(Path(__file__).parent))
    assert "no name of anything" in refusal("--chat_template", " ")


def test_it_is_the_same_flag_everywhere():
    programs = (SFTFlags, RewardFlags, RLHFFlags, CompareFlags, MergeFlags, ServeFlags)
    found = {id(next(spec for spec in dataclasses.fields(each) if spec.name == "chat_template")) for each in programs}
    assert len(found) == 1 and all(issubclass(each, TokenizerFlags) for each in programs)


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
    assert not inputs_of(args)[f"--chat_template {path}"].problem
