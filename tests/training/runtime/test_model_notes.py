"""What first lines say of settings in a config.json that a run takes otherwise than the program that wrote it."""

import json
from types import SimpleNamespace

from scripts.harness.models import make_config
from training.runtime.models import model_notes


def test_one_line_for_each_setting_names_the_flags(tmp_path):
    scores = {"mean": 0.5, "std": 2.0, "normalize_reward": False}
    for name, settings in (("actor", {}), ("critic", scores), ("reward", scores | {"normalize_reward": True})):
        make_config("llama").save_pretrained(tmp_path / name)
        path = tmp_path / name / "config.json"
        routed = {"output_router_logits": name != "reward"}
        path.write_text(json.dumps(json.loads(path.read_text()) | routed | settings))
    paths = {name: str(tmp_path / name) for name in ("actor", "critic", "reward")}
    args = SimpleNamespace(**paths, none=None, looks_at=lambda path: True, trust_remote_code=False)
    assert model_notes(args, "none", *paths) == [
        "--actor, --critic: no balancing loss is trained with, which config.json asks for (output_router_logits)",
        "--critic: scores stay without mean and std of config.json (OpenRLHF's normalize_reward is false)",
        "--reward: scores are (score - mean) / std of config.json (OpenRLHF's normalize_reward is true)",
    ]
    args.looks_at = lambda path: False
    assert model_notes(args, *paths) == []
