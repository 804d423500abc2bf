"""What a checkpoint asks of a run with a reward server."""

import pytest

from engine.errors import UserError
from tests.training.checkpoints.test_conditions import HERE, conditions, written


def test_a_key_in_a_servers_url_is_not_kept_and_may_change():
    then = written(conditions(reward_url=["http://a/?key=SECRET", "http://b/"]))
    assert "SECRET" not in str(then.settings) + str(then.identity)
    now = conditions(reward_url=["http://a/?key=OTHER", "http://b/"])
    now.check(then, HERE)
    assert now.changes_since(then) == []
    then.settings["--reward_url"] = "http://a/?key=SECRET http://b/"  # of a checkpoint that was written with it
    assert now.changes_since(then) == []


def test_a_reward_server_may_move_and_not_go():
    then = written(conditions(reward_url=["http://a/", "http://b/"]))
    moved = conditions(reward_url=["http://c/"])
    moved.check(then, HERE)
    assert moved.changes_since(then) == [
        "changed since the checkpoint: --reward_url http://a/ http://b/ -> http://c/ (taken for the same server at "
        "another address)"
    ]
    assert not moved.scores_changed_since(then)
    with pytest.raises(UserError, match="the reward server was 'given' when it was written and is not given now"):
        conditions().check(then, HERE)
    with pytest.raises(UserError, match="--reward_url_columns was not given when it was written and is .'answer'. now"):
        conditions(reward_url=["http://a/"], reward_url_columns=["answer"]).check(then, HERE)
