"""Learning rates that destroy a model: it is saved, and the run does not end with "done"."""

import json

from scripts.harness.programs import Tiny, forked, metric_lines, run_here


def ended(result, code: int, *parts: str) -> None:
    assert result.code == code, result.stdout + result.stderr
    assert "Traceback" not in result.stdout + result.stderr
    assert "done: " not in result.stdout
    for part in parts:
        assert part in result.stdout + result.stderr, f"{part!r} is missing in {result.stdout + result.stderr!r}"


def test_step_1_that_is_worse_than_a_uniform_guess(tiny, tmp_path, capfd):
    flags = tiny.flags(1, output_dir=tmp_path / "out", learning_rate=30.0)
    result = run_here(1, flags, capfd)
    ended(result, 1, "stopped: training has broken the model. Do not use it; it is saved in", "a uniform guess", "Try")
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_step_1_that_learned_says_done(tiny, tmp_path, capfd):
    """Records of one text are learned by heart; the trainer's loss falls, on those held out, too."""
    Tiny.write(tiny, "same", [{"prompt": "w05 w06", "response": "w07 w08 w09"}] * 40)
    flags = tiny.flags(1, data_path=tiny.folder / "same.jsonl", output_dir=tmp_path / "out", learning_rate=1e-3)
    result = run_here(1, flags, capfd)
    assert result.code == 0
    assert result.stdout.splitlines()[-1] == f"done: saved in {tmp_path / 'out'}"


def test_step_2_on_two_ranks(tiny, tmp_path):
    """Both ranks end alike, with the loss over that of a coin."""
    result = forked(2, tiny.flags(2, output_dir=tmp_path / "out", learning_rate=1e3, max_steps=3, zero_stage=3))
    lines = metric_lines(tmp_path / "out")
    assert lines[-1]["eval/pair_loss"] > 100 > lines[0]["eval/pair_loss"]
    words = ["WARNING: "] if result.code == 0 else ["broken the model"]  # as the eight pairs fall
    if "nothing can be normalised" not in result.stderr:
        ended(result, int(lines[-1]["eval/accuracy"] <= lines[0]["eval/accuracy"]), *words, "a coin: 0.6931")
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_step_3_whose_responses_became_all_the_same(tiny, tmp_path, capfd):
    """A reward for one token alone, and a learning rate that makes the actor say nothing else."""
    (tmp_path / "rules.py").write_text("def score(prompts, responses):\n    return [-len(set(r)) for r in responses]\n")
    flags = tiny.flags(
        3,
        output_dir=tmp_path / "out",
        reward_function=f"{tmp_path / 'rules.py'}:score",
        reward_model_name_or_path=None,
        actor_learning_rate=0.3,
        num_warmup_steps=0,
        max_steps=2,
    )
    result = run_here(3, flags, capfd)
    after = [json.loads(row) for row in (tmp_path / "out" / "samples" / "after.jsonl").read_text().splitlines()]
    assert len({row["response"] for row in after}) == 1
    ended(
        result, result.code, "all the same" if after[0]["tokens"] > 1 else "are empty", "Try a lower --actor_learning"
    )
    assert (tmp_path / "out" / "actor" / "model.safetensors").is_file()
