"""The flags of a reference that moves: what they make of the engines, and what does not go together."""

import pytest

from engine.errors import UserError
from tests.training.config.command_lines import refusal, step3
from training.config.step3 import RLHFFlags


def spec_of(**values):
    """What engines these flags ask for."""
    args = step3(dtype="fp32", **values)
    return args.spec


def test_the_average_is_kept_and_is_the_reference():
    spec = spec_of(reference="ema", ema_decay=0.9)
    assert (spec.ema_decay, spec.reference_is_ema, spec.reference_moves) == (0.9, True, True)
    assert "reference" not in [config.role for config in spec.engine_configs]
    assert "moving average" in spec.shared["reference"]
    assert step3(reference="ema").keeps_average and not step3().keeps_average
    assert step3(reference="ema").spec.ema_decay == 0.992  # the dialect's


def test_a_refresh_has_its_steps_and_share():
    spec = spec_of(reference_refresh_steps=20, reference_mixup_alpha=0.6, ema_device="cpu")
    assert (spec.reference_refresh_steps, spec.reference_mixup_alpha, spec.ema_decay) == (20, 0.6, None)
    assert spec.hosts == {"reference": "actor"} and spec.plays == {}


def test_a_point_is_gone_on_with_under_the_same_reference_alone():
    assert set(step3().moving_reference().values()) == {None}  # as in points from before there were these flags
    assert step3(reference_refresh_steps=20).moving_reference() == {
        "--reference": None,
        "--reference_refresh_steps": 20,
        "--reference_mixup_alpha": 1.0,
    }


@pytest.mark.parametrize(
    "words, message",
    [
        (("--reference", "ema", "--reference_refresh_steps", "5"), "moves after every optimizer step by itself"),
        (("--reference_mixup_alpha", "0.5"), "--reference_mixup_alpha 0.5 needs --reference_refresh_steps"),
        (("--reference_refresh_steps", "0"), "--reference_refresh_steps 0: must be at least 1."),
        (("--reference_refresh_steps", "5", "--reference_mixup_alpha", "0"), "must be greater than 0"),
        (("--reference_refresh_steps", "5", "--reference_mixup_alpha", "1.5"), "must be at most 1"),
        (
            ("--ema_device", "cpu"),
            "--ema_device cpu needs --enable_ema or --reference ema or --reference_refresh_steps.",
        ),
    ],
)
def test_mistakes(words, message):
    assert message in refusal(*words, flags_class=RLHFFlags)


@pytest.mark.parametrize("engine", [{"offload_reference_model": True}, {"reference_ds_config": "own.json"}])
def test_flags_of_an_engine_that_does_not_exist(engine):
    with pytest.raises(UserError, match=r"with --reference_refresh_steps 5: .*train without --reference_refresh_steps"):
        spec_of(reference_refresh_steps=5, **engine)
