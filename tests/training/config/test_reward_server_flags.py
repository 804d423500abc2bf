"""The flags of reward servers: what is refused, weights, and what takes the reward model's place."""

import pytest

from engine.errors import UserError, shown_command
from engine.reward.server import ServerSettings
from tests.training.config.command_lines import parse
from training.config.reward import score_parts
from training.config.step3 import RLHFFlags

URL = "http://10.0.0.7:8000/score"


def parsed(*words: str) -> RLHFFlags:
    return parse("--reward_url", URL, *words, flags_class=RLHFFlags)


def test_what_is_given_and_by_default():
    args = parsed("--reward_url_columns", "answer", "--reward_url_patience", "30")
    assert args.reward_server() == ServerSettings(urls=[URL], columns=["answer"], patience=30.0)
    assert args.other_rewards == [URL]
    assert parse(flags_class=RLHFFlags).reward_server() is None


@pytest.mark.parametrize(
    "words, parts",
    [
        ((), [("server", 1.0)]),
        (("--reward_function", "format", "--reward_weights", "0.2", "3"), [("format", 0.2), ("server", 3.0)]),
        (("--reward_url", URL, "http://b/", "--reward_weights", "0.5"), [("server", 0.5)]),
    ],
)
def test_the_servers_weight_comes_after_the_functions(words, parts):
    assert [(part.name, part.weight) for part in score_parts(parsed(*words))] == parts


def test_it_stands_in_for_the_reward_model_or_beside_one():
    assert parsed().reward_path is None
    assert parsed("--reward_model_name_or_path", "reward").reward_path == "reward"


@pytest.mark.parametrize(
    "words, message",
    [
        (("--reward_url", "10.0.0.7:8000"), "--reward_url 10.0.0.7:8000: is no URL of a server"),
        (("--reward_url", "ftp://a/"), "--reward_url ftp://a/: is no URL of a server"),
        (("--reward_url", "http://a:99999/"), "--reward_url http://a:99999/: is no URL of a server"),
        (("--reward_url", "http:///score"), "--reward_url http:///score: is no URL of a server"),
        (("--reward_url", "http://me:secret@a/"), "--reward_url http://.../: holds a user's name"),
        (("--reward_url", "http://me:secret@a:port/"), "--reward_url http://.../: is no URL"),
        (("--reward_url", URL, URL), f"--reward_url {URL} {URL}: http://10.0.0.7:8000/score is given twice"),
        (("--reward_url_batch_size", "0"), "--reward_url_batch_size 0: must be at least 1"),
        (("--reward_url_timeout", "0"), "--reward_url_timeout 0.0: must be greater than 0"),
        (("--reward_url_patience", "inf"), "--reward_url_patience inf: must be finite"),
        (("--reward_url_columns", "answer", "id"), "--reward_url_columns answer id: id is what something else"),
        (
            ("--reward_url_form", "openrlhf", "--reward_url_columns", "a", "b"),
            "--reward_url_columns a b: 2 columns, and the form openrlhf has room for 1",
        ),
        (("--reward_weights", "1", "2"), "--reward_weights 1.0 2.0: 2 weights. They belong to the reward server, in"),
        (
            ("--reward_function", "format", "--reward_weights", "1"),
            "1 weights. They belong to format, the reward server, in this order: give 2 or none.",
        ),
        (("--reward_model_weight", "2"), "--reward_model_weight 2.0: there is no reward model beside --reward_url"),
    ],
)
def test_what_cannot_work(words, message):
    with pytest.raises(UserError) as error:
        parsed(*words)
    assert message in str(error.value)


def test_a_key_in_a_url_is_neither_shown_nor_written():
    given = f"{URL}?key=SECRET"
    args = parse("--reward_url", given, "http://b/", flags_class=RLHFFlags)
    assert args.reward_server().urls == [given, "http://b/"]
    assert args.as_dict()["reward_url"] == [URL, "http://b/"]
    assert (
        shown_command(["a b", f"--reward_url={given}", "http://me:SECRET@b/"]) == f"'a b' --reward_url={URL} http://b/"
    )
    for words in (
        ("--reward_url", given, given),
        ("--reward_url_patience", given),
        ("--seed", "1", given),
        ("--reward_url", "h:1/p?key=SECRET"),
    ):
        with pytest.raises(UserError) as error:
            parse(*words, flags_class=RLHFFlags)
        assert "SECRET" not in str(error.value)


def test_what_says_nothing_without_a_server():
    with pytest.raises(UserError, match="--reward_url_columns answer needs --reward_url. Give that"):
        parse("--reward_url_columns", "answer", flags_class=RLHFFlags)
