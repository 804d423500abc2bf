"""An adapter that this program saved knows the weights that it was trained on."""

import functools
import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from engine.errors import UserError
from engine.models.checking import check_policy, check_scorer, check_trunk
from engine.models.loading import load_policy, load_scorer, new_scorer
from engine.models.lora import LoraSpec, adapt
from engine.models.saving import adapter_files, save_adapter
from engine.models.trunk import make_trunk
from scripts.harness.models import make_adapter, make_causal_lm, make_tokenizer

SPEC = LoraSpec(dim=2, only=True)


def saved(module, folder) -> str:
    """The folder of the module's adapter, which changes nothing."""
    adapt(module, SPEC, "model")
    state = {
        f"{name}.lora_{ab}.weight": f for name, two in module.adapters.factors().items() for ab, f in zip("AB", two)
    }
    if hasattr(module.model, "score"):
        state["score.weight"] = module.model.score.weight.detach()
    save_adapter(module, state, make_tokenizer(), folder)
    return str(folder)


def pointed_at(folder: str, base) -> None:
    file = Path(folder) / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": str(base)}))


def test_other_weights_of_the_same_shapes_are_refused_as_the_base(tmp_path):
    base = make_causal_lm(tmp_path / "base")
    policy = saved(load_policy(base, torch.float32), tmp_path / "policy")
    scorer = saved(new_scorer(base, torch.float32, None, 0), tmp_path / "scorer")
    looks = [(check_policy, policy), (check_trunk, policy), (check_scorer, scorer)]
    looks += [
        (functools.partial(load, dtype=torch.float32), path)
        for load, path in ((load_policy, policy), (load_scorer, scorer))
    ]
    shutil.copytree(base, tmp_path / "moved")
    for folder in (policy, scorer):
        pointed_at(folder, tmp_path / "moved")
    for look, folder in looks:  # of equal content
        look(folder, what="--flag")
    for new_base in (tmp_path / "other", tmp_path / "moved"):  # another model; one that was trained on where it stood
        make_causal_lm(new_base, seed=5)
        for look, folder in looks:
            pointed_at(folder, new_base)
            with pytest.raises(
                UserError,
                match=re.escape(
                    f"--flag: the adapter in {folder} is not of the weights in its base {new_base}: it was trained on "
                    f"those that stood in {base}, and weights or config.json are others now. Put that model there"
                ),
            ):
                look(folder, what="--flag")
    (tmp_path / "policy" / "base.json").write_text("{")
    with pytest.raises(UserError, match="--flag: .*base.json is broken"):
        check_policy(policy, "--flag")
    (tmp_path / "policy" / "base.json").unlink()
    check_policy(policy, "--flag")  # as one of peft's, which has no such file


def test_it_is_of_the_weights_that_were_loaded_and_not_of_those_at_saving(tmp_path):
    base = make_causal_lm(tmp_path / "base")
    policy, trunk = load_policy(base, torch.float32), make_trunk(load_policy(base, torch.float32), SPEC, {})
    adapt(policy, SPEC, "actor")
    make_causal_lm(tmp_path / "base", seed=5)
    folder = saved(load_policy(base, torch.float32), tmp_path / "later")
    now = (tmp_path / "later" / "base.json").read_text()
    assert adapter_files(policy)["base.json"] == adapter_files(trunk)["base.json"] != now
    check_policy(folder, "--flag")


def test_a_new_score_head_takes_no_adapter_of_the_output_head(tmp_path):
    """Tied to the embedding or not; the policy with that adapter is whole."""
    for tied in (False, True):
        base = make_causal_lm(tmp_path / f"base_{tied}", tied=tied)
        adapter = make_adapter(tmp_path / f"policy_{tied}", base, targets=("all-linear", "lm_head"))
        check_policy(adapter, "--flag")
        with pytest.raises(
            UserError, match=r"--flag: the adapter in .* changes the output head too \(lm_head\), of wh"
        ):
            check_trunk(adapter, "--flag")
        check_trunk(make_adapter(tmp_path / f"layers_{tied}", base), "--flag")
