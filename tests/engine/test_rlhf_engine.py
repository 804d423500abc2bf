"""Models that do not fit their roles are refused before one is loaded, from Python as by step 3."""

import pytest

from engine.errors import UserError
from engine.models.checking import PRETRAINING_RECORD
from engine.rlhf_engine import EngineSpec, RLHFEngine
from scripts.harness.models import make_causal_lm, make_scorer
from tests.training.config.command_lines import step3
from training.runtime.plan import check_models


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    found = {"sft": make_causal_lm(root / "sft")}
    found |= {name: make_scorer(root / name) for name in ("reward", "critic", "others")}
    (root / "critic" / PRETRAINING_RECORD).write_text("{}")
    tokenizer = root / "others" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"w10": 10', '"w10": 11').replace('"w11": 11', '"w11": 10'))
    return found


@pytest.mark.parametrize(
    "actor, critic, message",
    [
        ("sft", "critic", "critic.*: .* is a pretrained critic, .* it gives no scores"),
        ("sft", "others", "critic.*: the tokenizer in .* gives other ids than the actor's"),
    ],
)
def test_models_that_do_not_fit_their_roles(folders, actor, critic, message, monkeypatch):
    monkeypatch.setattr("engine.rlhf_engine._loaded", lambda *given: pytest.fail("a model was loaded"))
    paths = folders[actor], folders[critic]
    with pytest.raises(UserError, match=f"^{message}"):
        RLHFEngine.from_pretrained(EngineSpec(actor_path=paths[0], critic_path=paths[1]))
    args = step3(actor_model_name_or_path=paths[0], critic_model_name_or_path=paths[1])
    with pytest.raises(UserError, match=f"^--{message}"):
        check_models(args, args.resolved.dialect)


def test_a_pretrained_critic_may_start_the_critic(folders):
    args = step3(
        actor_model_name_or_path=folders["sft"],
        critic_model_name_or_path=folders["critic"],
        reward_model_name_or_path=folders["reward"],
        max_prompt_seq_len=8,
        max_answer_seq_len=8,
    )
    check_models(args, args.resolved.dialect)
