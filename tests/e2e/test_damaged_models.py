"""Every damage of scripts/damage_models.py is refused by what step 3 looks at before anything is loaded, or in loading
where it is of numbers."""

import shutil
from pathlib import Path

import pytest
import torch

from engine.errors import UserError
from engine.models.loading import load_policy, load_scorer
from scripts.harness import adapter_damages, model_damages
from scripts.harness.model_damages import CONFIGURATIONS, HEADERS, OF_ACTORS, RAN
from scripts.harness.models import make_adapter, make_causal_lm, make_scorer
from training.config.step3 import RLHFFlags
from training.runtime.plan import check_models

NOT_IN_HEADERS = ("NaN in a tensor", "infinity in a tensor")  # found once weights are loaded: test_fit.py
NUMBERS = ("NaN in A", "infinity in B", "NaN in a .bin", "NaN in the head", "NaN in the base")
OF_THE_OTHER = ("another tokenizer's ids",)  # told of the model whose tokenizer is the right one


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("sound")
    return {"actor": Path(make_causal_lm(root / "actor")), "critic": Path(make_scorer(root / "critic"))}


def check(actor: Path, critic: Path) -> None:
    """Step 3's look at these models."""
    args = RLHFFlags(
        output_dir="out",
        data_path=["d"],
        actor_model_name_or_path=str(actor),
        critic_model_name_or_path=str(critic),
        max_prompt_seq_len=6,
        max_answer_seq_len=8,
    )
    check_models(args, args.resolved.dialect)


def test_the_numbers_of_damages_and_that_the_sound_models_pass(sound):
    assert (len(CONFIGURATIONS), len(HEADERS)) == (28, 9)
    check(**sound)


@pytest.mark.parametrize("kind", ["WEIGHTS", "HEADERS", "CONFIGURATIONS", "CODE"])
@pytest.mark.parametrize("role", ["actor", "critic"])
def test_every_damage_is_refused_in_one_line(sound, tmp_path, role, kind):
    for name, damage in getattr(model_damages, kind).items():
        if name in NOT_IN_HEADERS or (role == "critic" and name in OF_ACTORS):
            continue
        shutil.rmtree(tmp_path / "model", ignore_errors=True)
        shutil.copytree(sound[role], tmp_path / "model")
        damage(tmp_path / "model", sound["critic" if role == "actor" else "actor"])
        with pytest.raises(UserError) as refused:
            check(**(sound | {role: tmp_path / "model"}))
            pytest.fail(f"{name} was passed over")
        message = str(refused.value)
        assert "\n" not in message and message.endswith("."), message
        assert str(tmp_path / "model") in message or name in OF_THE_OTHER, message
        assert not (tmp_path / RAN).exists(), name


@pytest.fixture(scope="module")
def adapters(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    base, found = make_causal_lm(root / "base_of_both"), {}
    for role in ("actor", "critic"):
        found[role] = Path(make_adapter(root / role, base, scorer=role == "critic"))
        adapter_damages.edit_json(found[role] / "adapter_config.json", base_model_name_or_path="../base_of_both")
    return found


@pytest.mark.parametrize(("role", "kind"), [("actor", "ADAPTERS"), ("critic", "OF_SCORERS")])
def test_every_damage_of_an_adapter_is_refused_in_one_line(adapters, tmp_path, role, kind):
    check(**adapters)
    load = load_policy if role == "actor" else load_scorer
    for name, damage in getattr(adapter_damages, kind).items():
        for folder in ("model", "base_of_both"):
            shutil.rmtree(tmp_path / folder, ignore_errors=True)
            shutil.copytree(
                adapters[role] if folder == "model" else adapters[role].with_name("base_of_both"), tmp_path / folder
            )
        damage(tmp_path / "model", adapters["critic" if role == "actor" else "actor"])
        with pytest.raises(UserError) as refused:
            check(**(adapters | {role: tmp_path / "model"}))
            assert name in NUMBERS, f"{name} was passed over"
            load(str(tmp_path / "model"), torch.float32)
        message = str(refused.value)
        assert "\n" not in message and message.endswith("."), message
        assert str(tmp_path) in message, message
