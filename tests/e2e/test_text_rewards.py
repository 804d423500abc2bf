"""Step 3 with a reward model that has its own tokenizer and template: each score is transformers' own, from the
messages in the data; data and models that do not fit are refused before a model is loaded.
"""

import json

import pytest

from scripts.harness.programs import Tiny, assert_one_message, forked, run_here
from tests.training.foreign_models import FILM, foreign_model, foreign_tokenizer, scores_alone

HELD_OUT, MOST = 16, 8  # prompts, and tokens of a response
SYSTEM = {"role": "system", "content": "w08"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Tiny:
    return Tiny(tmp_path_factory.mktemp("tiny"))


def dialogue(number: int) -> list[dict]:
    """A question that no other dialogue asks; every other one begins with a system message."""
    question = {"role": "user", "content": f"w{10 + number % 50} w{10 + number // 50} w09"}
    return [SYSTEM, question] if number % 2 else [question]


def flags(tiny: Tiny, folder, records: list, **changes) -> dict:
    (folder / "data.jsonl").write_text("".join(json.dumps({"prompt": record}) + "\n" for record in records))
    (folder / "chat.jinja").write_text("{% for m in messages %}{{ m['content'] }} w04 {% endfor %}")
    given = {"data_path": folder / "data.jsonl", "chat_template": folder / "chat.jinja", "output_dir": folder / "out"}
    given |= {
        "max_steps": 1,
        "num_eval_prompts": HELD_OUT,
        "max_answer_seq_len": MOST,
        "dtype": "fp32",
        "critic_model_name_or_path": None,
    }
    return tiny.flags(3, **{**given, **changes})


def test_scores_are_transformers_own_from_the_messages(tiny, tmp_path):
    reward = foreign_model(tmp_path / "reward", FILM, pad_is_eos=True)
    records = [dialogue(number) for number in range(100)]
    ended = forked(3, flags(tiny, tmp_path, records, reward_model_name_or_path=reward, actor_zero_stage=3))
    assert ended.code == 0, ended.stderr
    line = next(line for line in ended.stdout.splitlines() if line.startswith(f"--reward_model_name_or_path {reward}:"))
    assert line.endswith("messages by its own chat template")
    tokenizer, ids, scores = foreign_tokenizer(FILM), [], []
    for line in (tmp_path / "out/samples/before.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["tokens"] - len(row["response"].split()) != (row["tokens"] < MOST):
            continue  # it has a special token beside its end, which the table leaves out
        asked = next(record for record in records if record[-1]["content"] in row["prompt"])
        answer = {"role": "assistant", "content": row["response"]}
        ids.append(tokenizer.apply_chat_template([*asked, answer], return_dict=False))
        scores.append(row["score"])
    assert len(scores) >= HELD_OUT // 2
    assert scores == pytest.approx(scores_alone(reward, ids), abs=2e-6)


def test_prompts_that_it_cannot_read_are_refused(tiny, tmp_path, capfd):
    reward = foreign_model(tmp_path / "reward")
    given = flags(tiny, tmp_path, [dialogue(1)] * 50, reward_model_name_or_path=reward)
    assert_one_message(run_here(3, given, capfd), [reward, "has no chat template, and the prompts are messages"])


def test_a_run_says_that_texts_are_read_without_the_template(tiny, tmp_path, capfd):
    reward = foreign_model(tmp_path / "reward", FILM)
    given = flags(tiny, tmp_path, ["w05 w06"] * 50, reward_model_name_or_path=reward, dry_run=True)
    assert "EOS, without a chat template, since the prompts are texts" in run_here(3, given, capfd).stdout
