"""From --environment to conversations: parts of the score, refusals, which row a prompt's environment gets."""

import json

import pytest

from engine.algorithms import DIALECTS
from engine.errors import UserError
from engine.reward.base import CombinedReward, EnvironmentReward
from engine.rollout import Conversations
from tests.training.config.command_lines import parse
from tests.training.data.tiny_tokenizers import word_tokenizer
from training.config.flags import make_paths_absolute
from training.config.reward import build_reward, score_parts
from training.config.step3 import RLHFFlags
from training.data.examples import Prompts
from training.environments import conversations, environments_of, load_environment, prompts_for

TALK = """
class Talk:
    def __init__(self, row):
        self.place = row["place"]
    def step(self, turn):
        return None

class Told:
    reward = 0.0
    def reset(self, place, prompt, **row):
        return f" b{place}"

number = 3
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "talk.py").write_text(TALK)
    return "talk.py"


def parsed(*words: str) -> RLHFFlags:
    return parse("--environment", "talk.py:Talk", *words, flags_class=RLHFFlags)


def parts(args: RLHFFlags) -> list[tuple[str, float]]:
    return [(part.name, part.weight) for part in score_parts(args)]


def test_it_stands_in_for_a_reward_model_or_beside_one():
    args = parsed()
    assert args.reward_paths == [] and parts(args) == [("environment", 1.0)]
    assert isinstance(build_reward(args, {}, [], None, []), EnvironmentReward)
    args = parsed("--reward_weights", "0")  # it only answers: the model that the critic starts from scores
    assert args.reward_paths == [args.critic_path] and parts(args) == [("model", 1.0), ("environment", 0.0)]
    args = parsed("--reward_model_name_or_path", "reward", "--reward_weights", "0.5")
    assert parts(args) == [("model", 1.0), ("environment", 0.5)]
    reward = build_reward(args, {}, [EnvironmentReward()], None, [])
    assert isinstance(reward, CombinedReward)
    assert reward.weights() == {"scores_model": 1.0, "scores_environment": 0.5}


def test_its_weight_comes_last_and_its_name_is_its_own():
    words = ("--reward_function", "m:environment", "--reward_url", "http://a/", "--reward_weights", "1", "2", "3")
    assert parts(parsed(*words)) == [("environment_2", 1.0), ("server", 2.0), ("environment", 3.0)]
    without = parse("--reward_function", "m:environment", "m:f", flags_class=RLHFFlags)
    assert parts(without) == [("environment", 1.0), ("f", 1.0)]


@pytest.mark.parametrize(
    "words, told",
    [
        (("--reward_function", "m:f", "--overlap_rewards"), "--overlap_rewards with --environment: .* Leave it out"),
        (("--reward_weights", "1", "2"), "2 weights. They belong to the environment, in this order: give 1 or none"),
        (("--offload_reward_model",), "there is no reward model beside --environment"),
        (("--dialect", "trl_ppo"), "the dialect trl_ppo has .*Give --set .* or another --dialect"),
        (("--set", "sampling=fixed"), "has sampling 'fixed'.* Give --set sampling=until_eos"),
    ],
)
def test_what_does_not_go_with_it(words, told):
    with pytest.raises(UserError, match=told):
        parsed(*words)


@pytest.mark.parametrize("name", [name for name, dialect in DIALECTS.items() if dialect.length_rule != "sampled"])
def test_dialects_that_count_other_positions_are_refused(name):
    with pytest.raises(UserError, match=f"the dialect {name} has .*length_rule"):
        parsed("--dialect", name)


def test_its_flags_need_it():
    with pytest.raises(UserError, match="--max_turns 4 needs --environment"):
        parse("--max_turns", "4", flags_class=RLHFFlags)


@pytest.mark.parametrize(
    "given, told",
    [
        ("Talk", "--environment Talk: give module:class or path/to/file.py:class."),
        ("none.py:Talk", "--environment none.py:Talk: there is no file none.py"),
        ("talk.py:Talks", "talk.py has no Talks. Give the name of a class in it"),
        ("talk.py:number", "number in .*talk.py is 3, which cannot be called. Give the name of a class"),
    ],
)
def test_what_cannot_be_loaded(file, given, told):
    with pytest.raises(UserError, match=told):
        load_environment(parsed("--environment", given))


def test_reward_models_that_read_texts_are_refused(file):
    with pytest.raises(UserError, match="--reward_model_name_or_path film: that model reads texts .* Leave"):
        load_environment(parsed(), ["film"])


def test_a_file_is_found_after_the_folder_changes_and_a_template_s_name_stays(file, tmp_path):
    (tmp_path / "qwen").mkdir()  # a model's folder, say
    args = parsed("--response_template", "qwen")
    make_paths_absolute(args)
    assert args.environment == f"{tmp_path}/talk.py:Talk" and args.response_template == "qwen"


def made(args, counts=(2, 2)):
    """(environments, tokenizer) of training and held-out rows that are numbered in one."""
    tokenizer, (_, with_dialogues) = word_tokenizer(words="b0 b1 b2 b3"), prompts_for(args)
    rows = [{"prompt": "a", "place": place} for place in range(sum(counts))]
    split = rows[: counts[0]], rows[counts[0] :]
    both = [Prompts(one, tokenizer, 8, with_dialogues=with_dialogues) if one else None for one in split]
    return environments_of(args, tokenizer, both), tokenizer


def test_held_out_rows_come_after_training_rows(file):
    environments, _ = made(parsed())
    assert [environments.episode(index, [0]).environment.made.place for index in (0, 1, 2, 3)] == [0, 1, 2, 3]


def test_what_reset_says_is_put_behind_the_prompt_of_its_row(file):
    environments, tokenizer = made(parsed("--environment", "talk.py:Told"))
    for index in range(4):
        assert environments.episode(index, [0]).opening == tokenizer.encode(f"a b{index}")


def test_a_class_that_fails_with_the_first_row_is_told(file, tmp_path):
    (tmp_path / "fails.py").write_text(
        "class Fails:\n    def __init__(self, row):\n        row['answer']\n    def step(self, turn): ...\n"
    )
    with pytest.raises(UserError, match="--environment fails.py:Fails: .*first row of the data.*KeyError: 'answer'"):
        made(parsed("--environment", "fails.py:Fails"))


def test_without_it_nothing_changes():
    args, backend = parse(flags_class=RLHFFlags), object()
    assert load_environment(args) is None and environments_of(args, None, []) is None
    assert conversations(args, backend, None) is backend
    assert json.dumps(args.as_dict()["environment"]) == "null"


def test_limits_reach_the_conversations(file):
    class Backend:
        why, computes_as_actor = "", True

    words = ["--max_turns", "3", "--max_turn_tokens", "5", "--environment_timeout", "2", "--environment_threads", "4"]
    args = parsed(*words)
    environments, _ = made(args)
    found = conversations(args, Backend(), environments)
    assert isinstance(found, Conversations)
    assert (found.turns, found.turn_tokens, found.seconds, found.threads) == (3, 5, 2.0, 4)
