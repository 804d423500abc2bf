"""What a run that goes on says of settings, sources and servers that have changed meanwhile; and what it refuses."""

import dataclasses
import hashlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine import distributed
from engine.algorithms import Dialect, get_dialect
from engine.errors import UserError
from scripts.harness.models import make_causal_lm
from tests.training.foreign_models import DATED, FILM, foreign_model, foreign_tokenizer
from training.checkpoints.conditions import (
    MAY_CHANGE,
    NOT_COMPARED,
    READING,
    Conditions,
    fingerprints,
    sources_fingerprint,
    state_file,
)
from training.config.algorithm import Resolved
from training.config.step3 import RLHFFlags
from training.config.supervised import RewardFlags, SFTFlags

DEFAULT = get_dialect("default")
HERE = Path("out/checkpoints/step_000002")
ACTOR, CRITIC, FUNCTION = "--actor_model_name_or_path", "--critic_model_name_or_path", "--reward_function"
REWARD = "--reward_model_name_or_path"


def conditions(dialect: Dialect = DEFAULT, data=("a", "b"), inputs=None, template=None, **flags) -> Conditions:
    required = {
        "output_dir": "out",
        "data_path": ["d"],
        "actor_model_name_or_path": "a",
        "critic_model_name_or_path": "b",
    }
    args = RLHFFlags(**(required | flags))
    args.resolved = Resolved(dialect, {})
    return Conditions.of(args, data, SimpleNamespace(chat_template=template), inputs or {})


def written(then: Conditions) -> Conditions:
    """Those conditions once they have stood in a state file."""
    return Conditions.read(json.loads(state_file({"steps_done": 2}, {}, then, with_ema=False)))


def test_the_list_names_flags_and_fields_that_are_there():
    classes = (RLHFFlags, RewardFlags, SFTFlags, Dialect)
    known = {spec.name for one in classes for spec in dataclasses.fields(one)} | {"ranks", "total_steps"}
    names = [*MAY_CHANGE.split(), *NOT_COMPARED]
    assert set(names) <= known and len(set(names)) == len(names)


def test_changed_settings_are_named_and_unchanged_ones_are_not():
    then = written(conditions())
    conditions().check(then, HERE)
    assert conditions().changes_since(then) == []
    now = conditions(DEFAULT.override(kl_coef=0.5, actor_lr=1e-6), max_steps=20, reward_url_timeout=9.0)
    now.check(then, HERE)
    assert now.changes_since(then) == [
        "changed since the checkpoint: --reward_url_timeout 180.0 -> 9.0",
        "changed since the checkpoint: --max_steps None -> 20",
        "changed since the checkpoint: kl_coef 0.1 -> 0.5",
        f"changed since the checkpoint: actor_lr {DEFAULT.actor_lr} -> 1e-06",
    ]
    steered = DEFAULT.override(kl_controller="adaptive")
    assert conditions(steered.override(kl_coef=0.5)).changes_since(written(conditions(steered))) == [
        "changed since the checkpoint: kl_coef 0.1 -> 0.5 (without effect: the adaptive coefficient goes on from "
        "where it was)"
    ]


@pytest.mark.parametrize(
    "now, message",
    [
        (conditions(seed=2), "--seed was 1234 when it was written and is 2 now. Give what the run began with."),
        (conditions(max_answer_seq_len=8), "--max_answer_seq_len was 256 when it was written and is 8 now"),
        (conditions(max_answer_seq_len=8, data=("c", "d")), "--max_answer_seq_len was 256 when"),  # not the data
        (conditions(stop=["END"]), "--stop was not given when it was written and is ['END'] now"),
        (conditions(critic_pretrain_steps=5), "--critic_pretrain_steps was 0 when it was written and is 5 now"),
        (conditions(share_trunk=True), "--share_trunk was not given when it was written and is True now"),
        (conditions(DEFAULT.override(ppo_epochs=2)), "ppo_epochs was 4 when it was written and is 2 now"),
        (conditions(DEFAULT.override(gamma=0.9)), "gamma was 1.0 when it was written and is 0.9 now"),
        (conditions(generation_batches=2), "rows a step was 16 when it was written and is 32 now"),
        (conditions(actor_lora_dim=4), "--actor_lora_dim was 0 when it was written and is 4 now"),
        (conditions(reward_url=["http://a/"]), "a reward server was not given when it was written and is True now"),
        (conditions(data=("a", "c")), "the data changed after it was written"),
        (conditions(template="b"), "the chat template changed after it was written"),
    ],
)
def test_what_must_be_equal_is_refused_by_name(now, message):
    with pytest.raises(UserError) as refusal:
        now.check(written(conditions()), HERE)
    assert str(refusal.value).startswith(f"--resume {HERE}: {message}")


def test_a_point_of_another_version_is_refused_with_what_only_one_of_the_two_knows():
    now = conditions(DEFAULT.override(dual_clip=3.0, ppo_epochs=2), raw_reward_scores=True)
    for name, known in (("dual_clip", False), ("--raw_reward_scores", False), ("--added", True)):
        then = written(now)
        then.settings.pop(name, None)
        then.settings.update({name: None} if known else {})
        with pytest.raises(UserError) as refusal:
            now.check(then, HERE)
        assert str(refusal.value) == (
            f"--resume {HERE}: it was written by another version of this program, or by another step of the three "
            f"(only one of the two has {name}). Go on with that version, or begin anew."
        )


def test_a_point_of_an_earlier_version_without_options_that_have_their_defaults_is_resumed():
    now = conditions(get_dialect("openai"), inputs={READING: ["1"]})
    then = written(now)
    for name in ("--raw_reward_scores", "--stop", "dual_clip"):  # a truth, a list and a field of the dialect
        del then.settings[name]
    del then.contents[READING]
    now.check(then, HERE)
    assert now.changes_since(then) == []
    del then.settings["score_clip"]  # the default of a field is that of the class, not that of the named dialect
    assert now.settings["score_clip"] != DEFAULT.score_clip
    with pytest.raises(UserError, match=r"only one of the two has score_clip\)"):
        now.check(then, HERE)


def test_ranks_and_stages_may_change_where_a_step_has_as_many_responses(monkeypatch):
    then = written(conditions(per_device_generation_batch_size=16, actor_zero_stage=3))
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    now = conditions(per_device_generation_batch_size=8, actor_zero_stage=0)
    now.check(then, HERE)
    assert now.changes_since(then) == [
        "changed since the checkpoint: --per_device_generation_batch_size 16 -> 8",
        "changed since the checkpoint: --actor_zero_stage 3 -> 0",
        "changed since the checkpoint: ranks 1 -> 2",
    ]
    with pytest.raises(UserError, match="rows a step was 16 when it was written and is 32 now"):
        conditions(per_device_generation_batch_size=16).check(then, HERE)


def test_a_model_may_move_and_not_change():
    known = {ACTOR: "1", CRITIC: "2"}
    then = written(conditions(inputs=known))
    moved = conditions(inputs=known, actor_model_name_or_path="moved")
    moved.check(then, HERE)
    assert moved.changes_since(then) == [f"changed since the checkpoint: {ACTOR} a -> moved"]
    with pytest.raises(UserError, match=f"the model of {ACTOR} changed after it was written"):
        conditions(inputs=known | {ACTOR: "9"}).check(then, HERE)
    for inputs in (known | {ACTOR: "9"}, {CRITIC: "2"}):  # other weights, and a name on the Hub that was not fetched
        with pytest.raises(UserError, match=f"{ACTOR} was 'a' when it was written and is 'b' now"):
            conditions(inputs=inputs, actor_model_name_or_path="b").check(then, HERE)
    conditions().check(then, HERE)  # the same names, of which nothing is here yet


def test_another_source_of_the_reward_function_is_told():
    then = written(conditions(inputs={FUNCTION: "1"}, reward_function=["folder/rules.py:score"]))
    now = conditions(inputs={FUNCTION: "2"}, reward_function=["rules.py:score"])
    now.check(then, HERE)
    assert now.scores_changed_since(then) and now.changes_since(then) == [
        "changed since the checkpoint: the source of --reward_function rules.py:score (later scores are its own)"
    ]
    unknown = conditions(reward_function=["rules.py:score"])
    assert not unknown.scores_changed_since(then) and unknown.changes_since(then) == []
    with pytest.raises(UserError, match="--reward_function was 'rules.py:score' when it was written and is 'rules.py"):
        conditions(reward_function=["rules.py:other"]).check(then, HERE)


ENVIRONMENT = "--environment"


@pytest.mark.parametrize(
    "now, told",
    [
        (
            {"environment": "b/talk.py:Other"},
            "--environment was 'talk.py:Talk' when it was written and is 'talk.py:Other'",
        ),
        (
            {"environment": None, "max_turns": 8},
            "--environment was 'talk.py:Talk' when it was written and is not given",
        ),
        ({"max_turns": 8}, "--max_turns was 4 when it was written and is 8 now"),
        ({"max_turn_tokens": 9}, "--max_turn_tokens was not given when it was written and is 9 now"),
    ],
)
def test_an_environment_and_its_limits_are_those_that_the_run_began_with(now, told):
    began = {"environment": "a/talk.py:Talk", "max_turns": 4}
    then = written(conditions(**began))
    moved = conditions(**(began | {"environment": "b/talk.py:Talk", "environment_timeout": 5.0}))
    moved.check(then, HERE)
    assert moved.changes_since(then) == ["changed since the checkpoint: --environment_timeout 60.0 -> 5.0"]
    with pytest.raises(UserError, match=told):
        conditions(**(began | now)).check(then, HERE)


def test_another_source_of_the_environment_is_told():
    given = {"environment": "talk.py:Talk"}
    then, now = (conditions(inputs={ENVIRONMENT: source}, **given) for source in ("a", "b"))
    now.check(written(then), HERE)
    assert now.scores_changed_since(written(then)) and not now.scores_changed_since(written(now))
    (line,) = now.changes_since(written(then))
    assert "the source of --environment talk.py:Talk (later scores" in line


def test_a_point_of_a_version_without_environments_is_resumed():
    names = ("environment", "max_turns", "max_turn_tokens", "response_template")
    now = conditions()
    then = written(now)
    for name in names:
        del then.settings[f"--{name}"]
    now.check(then, HERE)
    with pytest.raises(UserError, match=r"only one of the two has --environment, --max_turns\)"):
        conditions(environment="talk.py:Talk", max_turns=4).check(then, HERE)


def test_it_is_the_source_of_the_file_and_of_where_the_class_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = "class Score:\n    def __call__(self, prompts, responses):\n        return [{}] * len(prompts)\n"
    (tmp_path / "fp_written.py").write_text(base.format(1))
    (tmp_path / "fp_named.py").write_text("from fp_written import Score\nscore = Score()\n")
    (tmp_path / "fp_plain.py").write_text("def score(prompts, responses):\n    return [0] * len(prompts)\n")
    named, plain = sources_fingerprint(["fp_named.py:score"]), sources_fingerprint(["fp_plain.py:score"])
    assert len({named, plain}) == 2
    assert sources_fingerprint(["fp_plain:score"]) == plain  # by the module's name
    (tmp_path / "fp_written.py").write_text(base.format(2))
    assert sources_fingerprint(["fp_named.py:score"]) != named
    assert sources_fingerprint(["fp_plain.py:score"]) == plain
    (tmp_path / "fp_plain.py").write_text("def score(prompts, responses):\n    return [1] * len(prompts)\n")
    assert sources_fingerprint(["fp_plain.py:score"]) != plain


@pytest.mark.parametrize("link", [False, True])
@pytest.mark.parametrize("name", ["rules.v2.py", "rules.d/v2"])
def test_a_file_of_any_name_and_a_link_are_known_by_their_content(tmp_path, monkeypatch, name, link):
    source = b"import beside_it\n\ndef score(prompts, responses):\n    return [0] * len(prompts)\n"
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    written = tmp_path / "store" / "content" if link else file
    written.parent.mkdir(exist_ok=True)
    written.write_bytes(source)
    (written.parent / "beside_it.py").write_text("")
    if link:
        file.symlink_to(written)
    assert sources_fingerprint([f"{name}:score"]) == hashlib.sha256(source).hexdigest()
    assert sources_fingerprint([f"{file}:score"]) == hashlib.sha256(source).hexdigest()


def test_a_reward_server_may_move_and_no_key_in_its_url_is_kept():
    then = written(conditions(reward_url=["http://a/?key=SECRET", "http://b/"]))
    assert "SECRET" not in str(then.settings)
    assert conditions(reward_url=["http://a/?key=OTHER", "http://b/"]).changes_since(then) == []
    moved = conditions(reward_url=["http://c/"])
    moved.check(then, HERE)
    assert moved.changes_since(then) == [
        "changed since the checkpoint: --reward_url ['http://a/', 'http://b/'] -> ['http://c/']"
    ]


def judged(paths: list[str], inputs: list[str | None]) -> Conditions:
    """The conditions of a run with these reward models."""
    given = {"critic_model_name_or_path": None, "reward_model_name_or_path": paths}
    return conditions(inputs={REWARD: inputs}, **given)


@pytest.mark.parametrize(
    "paths, inputs, message",
    [
        (["x", "y"], ["1", "3"], f"the model of {REWARD} changed after it was written"),
        (["y", "x"], ["2", "1"], f"{REWARD} was ['x', 'y'] when it was written and is ['y', 'x'] now"),
        (["x"], ["1"], f"{REWARD} was ['x', 'y'] when it was written and is ['x'] now"),
        (["x", "y", "z"], ["1", "2", "3"], f"{REWARD} was ['x', 'y'] when it was written and is ['x', 'y', 'z'] now"),
        ([], [], f"{REWARD} was ['x', 'y'] when it was written and is not given now"),
        (["x", "moved"], ["1", None], f"{REWARD} was ['x', 'y'] when it was written and is ['x', 'moved'] now"),
    ],
)
def test_other_reward_models_are_refused(paths, inputs, message):
    with pytest.raises(UserError) as refusal:
        judged(paths, inputs).check(written(judged(["x", "y"], ["1", "2"])), HERE)
    assert str(refusal.value).startswith(f"--resume {HERE}: {message}")
    with pytest.raises(UserError):
        judged(["x", "y"], ["1", "2"]).check(written(judged(paths, inputs)), HERE)


def test_a_reward_model_may_move_and_be_unknown():
    then = written(judged(["x", "y"], ["1", "2"]))
    judged(["x", "moved"], ["1", "2"]).check(then, HERE)
    judged(["x", "y"], ["1", None]).check(then, HERE)


def test_another_template_or_tokenizer_of_a_reward_model_is_refused(tmp_path):
    film = foreign_model(tmp_path / "film", FILM)
    flags = {"actor_model_name_or_path": make_causal_lm(tmp_path / "actor"), "reward_model_name_or_path": [film]}

    def now() -> Conditions:
        args = RLHFFlags(**flags, output_dir="out", data_path=["d"])
        args.resolved = Resolved(DEFAULT, {})
        return conditions(inputs=fingerprints(args), **flags)

    then = written(now())
    now().check(then, HERE)
    for other in (foreign_tokenizer(DATED), foreign_tokenizer(FILM, words=4)):
        other.save_pretrained(film)
        with pytest.raises(UserError, match="the chat template or the tokenizer of a reward model changed after"):
            now().check(then, HERE)
