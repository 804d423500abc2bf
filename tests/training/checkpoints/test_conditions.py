"""What a run that goes on says of the settings that have changed meanwhile, and which of them it refuses."""

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine import distributed
from engine.algorithms import Dialect, get_dialect
from engine.errors import UserError
from training.checkpoints.conditions import Conditions, state_file
from training.config.algorithm import Resolved
from training.config.step3 import RLHFFlags

DEFAULT = get_dialect("default")
HERE = Path("out/checkpoints/step_000002")


def conditions(
    dialect: Dialect = DEFAULT, total_steps: int = 10, data=("a", "b"), inputs=None, template=None, **flags
) -> Conditions:
    tokenizer = SimpleNamespace(chat_template=template)
    required = {
        "output_dir": "out",
        "data_path": ["d"],
        "actor_model_name_or_path": "a",
        "critic_model_name_or_path": "b",
    }
    args = RLHFFlags(**(required | flags))
    args.resolved = Resolved(dialect, {})
    return Conditions.of(args, list(data), total_steps, tokenizer, inputs)


def written(then: Conditions) -> Conditions:
    """Those conditions once they have stood in a state file."""
    return Conditions.read(json.loads(state_file({"steps_done": 2}, {}, then, with_ema=False)))


def test_changed_settings_are_named_and_unchanged_ones_are_not():
    then = written(conditions())
    assert conditions().changes_since(then) == []
    now = conditions(DEFAULT.override(kl_coef=0.5, betas=(0.9, 0.99)), reward_model_name_or_path="c")
    now.check(then, HERE)
    assert now.changes_since(then) == [
        "changed since the checkpoint: kl_coef 0.1 -> 0.5",
        "changed since the checkpoint: betas [0.9, 0.95] -> [0.9, 0.99]",
        "changed since the checkpoint: --reward_model_name_or_path None -> c",
    ]
    steered = DEFAULT.override(kl_controller="adaptive")
    assert conditions(steered.override(kl_coef=0.5)).changes_since(written(conditions(steered))) == [
        "changed since the checkpoint: kl_coef 0.1 -> 0.5 (without effect: the adaptive coefficient goes on from "
        "where it was)"
    ]


def test_the_critics_pretraining_must_be_equal():
    then = written(conditions(critic_pretrain_steps=4))
    conditions(critic_pretrain_steps=4).check(then, HERE)
    for now, message in (
        (conditions(critic_pretrain_steps=5), "--critic_pretrain_steps was 4 when it was written and is 5 now"),
        (conditions(), "--critic_pretrain_steps was 4 when it was written and is 0 now"),
    ):
        with pytest.raises(UserError, match=message):
            now.check(then, HERE)


def test_a_point_of_another_version_is_refused_with_what_only_one_of_the_two_knows():
    now = conditions()
    older, newer = written(now), written(now)
    del older.identity["--overlong"]
    newer.identity["--added"] = None
    for then, name in ((older, "--overlong"), (newer, "--added")):
        with pytest.raises(UserError) as refusal:
            now.check(then, HERE)
        assert str(refusal.value) == (
            f"--resume {HERE}: it was written by another version of this program, or by another step of the three "
            f"(only one of the two has {name}). Go on with that version, or begin anew."
        )


def test_the_chat_template_must_be_equal():
    for then, now in (("a", "b"), (None, "a"), ("a", None)):
        conditions(template=then).check(written(conditions(template=then)), HERE)
        with pytest.raises(UserError, match=f"--resume {HERE}: the chat template is another than when it was written"):
            conditions(template=now).check(written(conditions(template=then)), HERE)


def test_another_number_of_steps_is_named_where_learning_rates_fall_by_it():
    changes = conditions(total_steps=20).changes_since(written(conditions()))
    assert changes == [
        "changed since the checkpoint: total steps 10 -> 20 (learning rates go on as in a run of so many steps)"
    ]
    for schedule in ("constant", "constant_with_warmup"):
        flat = DEFAULT.override(lr_schedule=schedule)
        assert conditions(flat, total_steps=20).changes_since(written(conditions(flat))) == []


@pytest.mark.parametrize(
    "field, value, counts",
    [
        ("loss_scope", "optimizer_step", False),
        ("loss_scope", "micro_batch", True),
        ("loss_scope", "micro_batch_sum", True),
        ("loss_scope", "response", False),
        ("loss_scope", "fixed_length", False),
        ("advantages_at", "mini_batch", False),
        ("advantages_at", "micro_batch", True),
    ],
)
def test_the_micro_batch_is_named_where_losses_or_advantages_are_its(field, value, counts):
    dialect = DEFAULT.override(**{field: value})
    then = written(conditions(dialect, per_device_training_batch_size=8))
    changes = conditions(dialect, per_device_training_batch_size=4).changes_since(then)
    assert (
        changes
        == [
            "changed since the checkpoint: --per_device_training_batch_size 8 -> 4 (losses or advantages of this "
            "dialect are a micro-batch's)"
        ]
        * counts
    )


@pytest.mark.parametrize(
    "now, message",
    [
        (conditions(seed=2), "seed was 1234 when it was written and is 2 now. Give the same flags"),
        (conditions(max_answer_seq_len=8), "--max_answer_seq_len was 256 when it was written and is 8 now"),
        (conditions(stop=["END"]), "--stop was not given when it was written and is ['END'] now"),
        (conditions(DEFAULT.override(ppo_epochs=2)), "ppo_epochs was 4 when it was written and is 2 now"),
        (conditions(DEFAULT.override(missing_end="subtract")), "missing_end was 'none' when it was written"),
        (
            conditions(data=("a", "c")),
            "the data, those held out included, are others than when it was written",
        ),
        (
            conditions(generation_batches=2),
            "responses a step was 16 when it was written and is 32 now. Ranks times batch",
        ),
    ],
)
def test_what_must_be_equal_is_refused_by_name(now, message):
    with pytest.raises(UserError) as refusal:
        now.check(written(conditions()), HERE)
    assert str(refusal.value).startswith(f"--resume {HERE}: {message}")


def test_ranks_and_stages_may_change_where_a_step_has_as_many_responses(monkeypatch):
    then = written(conditions(per_device_generation_batch_size=16, actor_zero_stage=3))
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    now = conditions(per_device_generation_batch_size=8, actor_zero_stage=0)
    now.check(then, HERE)
    rounding = " (the state is the same to the last bit; from here on sums are rounded otherwise)"
    assert now.changes_since(then) == [
        f"changed since the checkpoint: ranks 1 -> 2{rounding}",
        f"changed since the checkpoint: --actor_zero_stage 3 -> 0{rounding}",
    ]
    with pytest.raises(UserError, match="responses a step was 16 when it was written and is 32 now"):
        conditions(per_device_generation_batch_size=16).check(then, HERE)

    by_rank = DEFAULT.override(whiten_over="rank")
    monkeypatch.setattr(distributed, "world_size", lambda: 1)
    then = written(conditions(by_rank, per_device_generation_batch_size=16))
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    assert conditions(by_rank, per_device_generation_batch_size=8).changes_since(then) == [
        "changed since the checkpoint: ranks 1 -> 2 (the state is the same to the last bit; this dialect computes "
        "by rank, and goes on otherwise)"
    ]


ACTOR, REWARD, FUNCTION = "--actor_model_name_or_path", "--reward_model_name_or_path", "--reward_function"


def test_other_weights_at_the_same_path_are_refused_and_at_another_path_told():
    then = written(conditions(inputs={ACTOR: "1", REWARD: "2"}, reward_model_name_or_path="r"))
    same = conditions(inputs={ACTOR: "1", REWARD: "2"}, reward_model_name_or_path="r")
    same.check(then, HERE)
    assert same.changes_since(then) == []
    for inputs, flag, path in (({ACTOR: "9", REWARD: "2"}, ACTOR, "a"), ({ACTOR: "1", REWARD: "9"}, REWARD, "r")):
        with pytest.raises(UserError, match=rf"^--resume out/.*: {flag} {path} holds another model than when it was"):
            conditions(inputs=inputs, reward_model_name_or_path="r").check(then, HERE)
    for print_now, note in (("1", "the same weights"), ("9", "other weights")):
        moved = conditions(inputs={ACTOR: print_now, REWARD: "2"}, reward_model_name_or_path="r")
        moved.settings[ACTOR] = "b"
        moved.check(then, HERE)
        assert moved.changes_since(then) == [f"changed since the checkpoint: {ACTOR} a -> b ({note})"]


def test_another_source_of_the_reward_function_is_told():
    then = written(conditions(inputs={FUNCTION: "1"}, reward_function=["rules.py:score"]))
    now = conditions(inputs={FUNCTION: "2"}, reward_function=["rules.py:score"])
    now.check(then, HERE)
    assert now.changes_since(then) == [
        "changed since the checkpoint: the source of --reward_function rules.py:score (scores are its own from here on)"
    ]


@pytest.mark.parametrize(
    "weights, now, message",
    [
        ([], [1.0], None),
        ([0.5], [0.5], None),
        ([1.0, 0.2], [1.0, 0.5], r"--reward_weights was \[1.0, 0.2\] when it was written and is \[1.0, 0.5\] now"),
        ([2.0], [], r"--reward_weights was \[2.0\] when it was written and is not given now"),
    ],
)
def test_weights_of_functions_must_be_equal(weights, now, message):
    given = {"reward_function": ["a.py:f", "folder/b.py:g"][: max(len(weights), len(now))]}
    then = written(conditions(**given, reward_weights=weights))
    assert then.identity["--reward_function"] == " ".join(["a.py:f", "b.py:g"][: len(given["reward_function"])])
    with pytest.raises(UserError, match=message) if message else contextlib.nullcontext():
        conditions(**given, reward_weights=now).check(then, HERE)


def test_a_point_without_fingerprints_is_taken_as_it_is():
    inputs = {ACTOR: "1", FUNCTION: "2"}
    now, then = conditions(inputs=inputs), written(conditions())
    now.check(then, HERE)
    assert now.changes_since(then) == []
    conditions().check(written(now), HERE)
    assert conditions().changes_since(written(now)) == []


@pytest.mark.parametrize(
    "flag, then, now", [("overlong", "drop", "cut_prompt"), ("max_prompt_seq_len", 8, 9), ("seed", 1, 2)]
)
def test_of_a_flag_that_changes_which_rows_are_read_the_data_are_not_blamed(flag, then, now):
    old = written(conditions(data=("a", "b"), **{flag: then}))
    with pytest.raises(UserError, match=f"{flag} was {then!r} when it was written and is {now!r} now"):
        conditions(data=("c", "d"), **{flag: now}).check(old, HERE)


@pytest.mark.parametrize(
    "then, now, changed",
    [
        ({}, {}, False),
        ({"reward_function": ["f.py:f"]}, {"reward_function": ["f.py:f"]}, True),  # its contents below
        ({}, {"reward_model_name_or_path": "c"}, False),  # a copy of b
        ({}, {"reward_model_name_or_path": "d"}, True),
        ({}, {"critic_model_name_or_path": "d"}, True),  # which the reward model is, too
        (
            {"reward_model_name_or_path": "c"},
            {"reward_model_name_or_path": "c", "critic_model_name_or_path": "d"},
            False,
        ),
        ({"reward_model_name_or_path": "unknown"}, {"reward_model_name_or_path": "other"}, True),
    ],
)
def test_scores_change_with_the_function_or_the_reward_model(then, now, changed):
    contents = {"b": "B", "c": "B", "d": "D"}

    def inputs(flags: dict, source: str) -> dict:
        paths = {"critic_model_name_or_path": "b"} | {name: path for name, path in flags.items() if "model" in name}
        found = {f"--{name}": contents[path] for name, path in paths.items() if path in contents}
        return found | ({"--reward_function": source} if "reward_function" in flags else {})

    before = conditions(inputs=inputs(then, "one"), **then)
    assert conditions(inputs=inputs(now, "two"), **now).scores_changed_since(written(before)) == changed
    assert not conditions(inputs=inputs(then, "one"), **then).scores_changed_since(written(before))
    assert not conditions(inputs=inputs(now, "two"), **then).scores_changed_since(written(conditions(**then)))


def test_frozen_weights_under_factors_must_be_equal_and_may_stand_elsewhere():
    base = "base of --actor_model_name_or_path"
    lora = {"actor_lora_dim": 4, "only_optimize_lora": True}
    then = written(conditions(inputs={base: "one"}, **lora))
    conditions(inputs={base: "one"}, **lora, actor_model_name_or_path="moved").check(then, HERE)
    conditions(**lora).check(then, HERE)  # a name on the Hub, of which nothing is here yet
    with pytest.raises(UserError, match="step_000002: the frozen weights of the actor are others than when"):
        conditions(inputs={base: "other"}, **lora).check(then, HERE)
    with pytest.raises(UserError, match="actor_lora_dim"):
        conditions(inputs={base: "one"}, **(lora | {"actor_lora_dim": 8})).check(then, HERE)
    with pytest.raises(UserError, match="actor_lora_dim"):
        conditions().check(then, HERE)
    conditions(inputs={base: "other"}).check(written(conditions(inputs={base: "one"})), HERE)  # all weights train


@pytest.mark.parametrize("shared_then", [True, False])
def test_a_point_of_one_trunk_is_gone_on_from_on_one_trunk(shared_then):
    """Also where the critic's adapter has the rank of its start, and no flag says so."""
    lora = {"actor_lora_dim": 4, "only_optimize_lora": True}
    then, now = (conditions(**lora, share_trunk=shared) for shared in (shared_then, not shared_then))
    then.check(written(then), HERE)
    words = ("True", "not given") if shared_then else ("not given", "True")
    message = "--share_trunk was {} when it was written and is {} now. Give the same flags".format(*words)
    with pytest.raises(UserError, match=message):
        now.check(written(then), HERE)
