"""Flags that describe a new adapter are refused where training goes on with one that is there."""

import re

import pytest

from engine.errors import UserError
from scripts.harness.models import make_causal_lm, make_tokenizer
from tests.engine.models.test_adapter_folders import write_adapter
from tests.training.config.command_lines import parse
from training.config.step3 import RLHFFlags
from training.config.supervised import SFTFlags
from training.runtime.models import adapted_model, adapted_roles


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """`base`, and `actor` and `critic`, adapters of it with alphas of 8 and 6."""
    folder = tmp_path_factory.mktemp("models")
    base = make_causal_lm(folder / "base")
    make_tokenizer().save_pretrained(base)
    write_adapter(folder / "actor", base)
    write_adapter(folder / "critic", base, kind="SEQ_CLS", lora_alpha=6, target_modules=["k_proj"])
    return folder


def roles(folder, *words: str, actor: str = "actor", critic: str = "critic"):
    paths = ["--actor_model_name_or_path", str(folder / actor), "--critic_model_name_or_path", str(folder / critic)]
    args = parse(*paths, "--actor_lora_dim", "4", *words, flags_class=RLHFFlags)
    return adapted_roles(args, args.resolved.dialect)


BOTH = ("--critic_lora_dim", "4")


@pytest.mark.parametrize(
    "words, flag, path, own",
    [
        (("--actor_lora_module_name", "q_proj"), "actor", "actor", r"factors in q_proj, up_proj\."),
        ((*BOTH, "--critic_lora_module_name", "k_proj"), "critic", "critic", r"factors in k_proj\."),
        ((*BOTH, "--lora_target_modules", "v_proj"), "actor", "actor", r"factors in q_proj, up_proj\."),
        (("--lora_alpha", "7"), "actor", "actor", r"alpha 8\."),
        ((*BOTH, "--lora_alpha", "7"), "actor", "actor", r"alpha 8; --critic.*/critic, which has alpha 6\."),
    ],
)
def test_step_3_refuses_what_says_nothing_of_its_adapters(words, flag, path, own, folder):
    given = " ".join(words[-2:])
    with pytest.raises(UserError) as caught:
        roles(folder, *words)
    found = rf"{given}: .*--{flag}_model_name_or_path: training goes on with the adapter in {folder / path}, which has "
    assert re.match(found + own, str(caught.value)), str(caught.value)


def test_what_is_true_of_an_adapter_or_meant_for_a_new_one_is_taken(folder):
    assert roles(folder, *BOTH).keys() == {"actor", "critic"}
    for alpha in ("8", "6"):  # the actor's and the critic's own
        roles(folder, *BOTH, "--lora_alpha", alpha)
    new = roles(folder, *BOTH, "--lora_alpha", "7", "--lora_target_modules", "v_proj", actor="base")
    assert (new["actor"].spec.alpha, len(new["actor"].layers)) == (7, 2)
    assert new["critic"].spec.alpha == 6 and all(name.endswith("k_proj") for name in new["critic"].layers)


def test_a_new_critic_on_a_shared_trunk_has_nothing_of_the_actors_adapter(folder):
    """Its rank may be another, its alpha is the flag's default, and its layers are all linear ones of two layers."""
    words = ("--share_trunk", "--only_optimize_lora", "--actor_lora_dim", "4", "--critic_lora_dim", "8")
    args = parse(*words, "--reward_function", "scores.py:score", flags_class=RLHFFlags)
    args.actor_model_name_or_path, args.critic_model_name_or_path = str(folder / "actor"), None
    found = adapted_roles(args, args.resolved.dialect)
    assert (found["actor"].spec.alpha, len(found["actor"].layers)) == (8, 4)
    assert (found["critic"].spec.dim, found["critic"].spec.alpha, len(found["critic"].layers)) == (8, 1, 14)


def test_steps_1_and_2_refuse_it_too(folder):
    def asked(*words: str):
        words = ("--model_name_or_path", str(folder / "actor"), "--lora_dim", "4", *words)
        return adapted_model(parse(*words, flags_class=SFTFlags), scorer=False)

    assert asked("--lora_alpha", "8")["model"].spec.alpha == 8
    with pytest.raises(UserError, match=r"--lora_alpha 1: --model.*which has alpha 8\. Leave the flag out"):
        asked("--lora_alpha", "1")
    for words in (("--lora_module_name", "q_proj"), ("--lora_target_modules", "q_proj")):
        with pytest.raises(UserError, match=rf"{' '.join(words)}: --model.*which has factors in q_proj, up_proj\."):
            asked(*words)
