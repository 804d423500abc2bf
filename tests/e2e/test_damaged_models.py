"""Every damage of scripts/damage_models.py is refused by what step 3 looks at before anything is loaded."""

import shutil
from pathlib import Path

import pytest

from engine.errors import UserError
from tests.engine.models import model_damages
from tests.engine.models.model_damages import CONFIGURATIONS, HEADERS, OF_ACTORS, RAN
from tests.tiny_models import make_causal_lm, make_scorer
from training.flags.rlhf_arguments import RLHFFlags
from training.program.checks import check_models

NOT_IN_HEADERS = ("NaN in a tensor", "infinity in a tensor")  # found once weights are loaded: test_fit.py
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
    check_models(args, args.resolved_dialect()[0])


def test_the_numbers_of_damages_and_that_the_sound_models_pass(sound):
    assert (len(CONFIGURATIONS), len(HEADERS)) == (29, 9)
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
