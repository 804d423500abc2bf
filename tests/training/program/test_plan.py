"""What a run that goes on says of the choices that have changed meanwhile."""

import json

from engine.algorithms import get_dialect
from training.flags.rlhf_arguments import RLHFFlags
from training.program.plan import changes_since, choices


def test_changed_choices_are_named_and_unchanged_ones_are_not():
    dialect = get_dialect("default")
    args = RLHFFlags(output_dir="out", data_path=["d"], actor_model_name_or_path="a", critic_model_name_or_path="b")
    written = json.loads(json.dumps({"choices": choices(args, dialect)}))
    assert changes_since(written, choices(args, dialect)) == []
    args.reward_model_name_or_path = "c"
    assert changes_since(written, choices(args, dialect.override(kl_coef=0.5, betas=(0.9, 0.99)))) == [
        "changed since the restart point: kl_coef 0.1 -> 0.5",
        "changed since the restart point: betas [0.9, 0.95] -> [0.9, 0.99]",
        "changed since the restart point: --reward_model_name_or_path None -> c",
    ]
    steered = dialect.override(kl_controller="adaptive")
    written = {"choices": choices(args, steered)}
    assert changes_since(written, choices(args, steered.override(kl_coef=0.5))) == [
        "changed since the restart point: kl_coef 0.1 -> 0.5 (without effect: the adaptive coefficient goes on from "
        "where it was)"
    ]
    assert changes_since({}, choices(args, dialect)) == [], "a restart point that does not say"
