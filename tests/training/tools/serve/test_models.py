"""Where models may come from: folders, adapters, checkpoints; and what they have in common."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.errors import UserError
from engine.models.loading import load_policy
from engine.zero.training_state import Shard
from scripts.harness.models import EOS, FAMILIES, make_adapter, make_causal_lm, make_family, make_scorer
from tests.training.checkpoints.tiny_checkpoints import TinyRun, flip_bit
from tests.training.tools.serve.conftest import flags
from training.tools.serve.models import load_models
from training.tools.serve.requests import Comparison


def response(served, prompt: list[int]) -> list[int]:
    sampling = Comparison(temperature=0).sampling(0, len(prompt), 64, 12, **served.settings())
    *_, last = served.drawn(prompt, sampling)
    return last.tokens


def greedy(model, prompt: list[int]) -> list[int]:
    return model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12)[0, len(prompt) :].tolist()


class Weights:
    """A model's weights as a checkpoint takes them."""

    def __init__(self, path: str):
        self.state = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()

    def shards(self) -> list[Shard]:
        return [
            Shard(f"weights/model.{name}", tuple(tensor.shape), 0, tensor.flatten())
            for name, tensor in self.state.items()
        ]

    def scalars(self) -> dict:
        return {"adam_steps": 0, "loss_scale": {}}


def make_checkpoint(folder: Path, model: str) -> Path:
    run = TinyRun(folder)
    run.model, run.step = Weights(model), 3
    run.checkpoints.models = {"actor": run.model}
    run.checkpoints.config_files = {f"actor/{file.name}": file.read_bytes() for file in Path(model).glob("*.json")}
    return run.checkpoints.save(3, wait=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_response_is_what_the_model_gives_without_a_cache(tmp_path, family):
    make_family(family, tmp_path)
    found = load_models(flags(f"one={tmp_path / 'actor'}", dtype="fp32")).by_name["one"]
    ids = [5, 9, 33]
    for token in response(found, ids):
        with torch.no_grad():
            assert token == found.model(torch.tensor([ids])).logits[0, -1, : len(found.tokenizer)].argmax()
        ids = [*ids, token]


def test_a_folder_an_adapter_and_a_restart_point(tmp_path):
    base = make_causal_lm(tmp_path / "base", seed=3)
    adapter = make_adapter(tmp_path / "made", base)
    point = make_checkpoint(tmp_path / "run", make_causal_lm(tmp_path / "trained", seed=5))
    found = load_models(flags(f"base={base}", f"adapter={adapter}", f"point={point}", dtype="fp32"))
    expected = {
        "base": AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        "adapter": load_policy(adapter, torch.float32).model,
        "point": AutoModelForCausalLM.from_pretrained(tmp_path / "trained", dtype=torch.float32),
    }
    responses = {name: response(served, [5, 9, 33]) for name, served in found.by_name.items()}
    assert responses == {name: greedy(model, [5, 9, 33]) for name, model in expected.items()}
    assert len({tuple(tokens) for tokens in responses.values()}) == 3
    assert found.scorer is None and found.context == 64 and found.by_name["base"].ends == (EOS,)
    assert point.is_dir()  # what it was exported to is gone, and it is not


def test_a_damaged_point_is_refused(tmp_path):
    point = make_checkpoint(tmp_path / "run", make_causal_lm(tmp_path / "trained"))
    flip_bit(next((point / "actor").iterdir()))
    with pytest.raises(UserError, match=f"--models point: .*{point} is damaged"):
        load_models(flags(f"point={point}"))


def test_a_mistake_about_another_model_does_not_name_the_point(tmp_path):
    point = make_checkpoint(tmp_path / "run", make_causal_lm(tmp_path / "trained"))
    with pytest.raises(UserError, match=f"^--models other: there is no folder {tmp_path}/nowhere"):
        load_models(flags(f"point={point}", f"other={tmp_path}/nowhere"))


def test_the_context_is_that_of_the_model_with_the_fewest_positions(tmp_path):
    base, reward = make_causal_lm(tmp_path / "bloom", "bloom"), make_scorer(tmp_path / "reward")
    assert load_models(flags(f"base={base}", max_seq_len=100)).context == 100
    both = load_models(flags(f"base={base}", max_seq_len=100, reward_model_name_or_path=reward))
    assert both.context == 64


def test_all_models_get_the_chat_template_that_is_given(tmp_path):
    """The reward model's tokenizer, too, as in step 2: it says what ends a turn."""
    base, own, reward = (
        make_causal_lm(tmp_path / "base"),
        make_causal_lm(tmp_path / "own"),
        make_scorer(tmp_path / "r"),
    )
    (tmp_path / "own" / "chat_template.jinja").write_text("own {{ messages[0].content }} {{ messages[-1].content }}")
    given = tmp_path / "given.jinja"
    given.write_text("given {{ messages[0].content }} {{ messages[-1].content }}")
    args = flags(f"base={base}", f"own={own}", chat_template=str(given), reward_model_name_or_path=reward)
    found = load_models(args)
    tokenizers = [*(model.tokenizer for model in found.by_name.values()), found.scorer.reader.tokenizer]
    assert [tokenizer.chat_template.split()[0] for tokenizer in tokenizers] == ["given"] * 3
