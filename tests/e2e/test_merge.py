"""The merge program from its command line: what it writes, what it chooses, and its messages."""

import json
import shlex
import shutil
import statistics
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from scripts.harness.programs import Result, assert_one_message, command_line, metric_lines, run_here, snapshot
from tests.training.foreign_models import foreign_model
from training.runtime.launch import run
from training.tools.merge import __main__ as merge
from training.tools.merge.frontier import Point, best_within, table


@pytest.fixture(scope="module")
def trained(tiny) -> str:
    """A model that is some way off the SFT model."""
    folder = tiny.folder / "trained"
    shutil.copytree(tiny.folder / "sft", folder)
    generator, state = torch.Generator().manual_seed(3), load_file(folder / "model.safetensors")
    moved = {name: tensor + 0.1 * torch.randn(tensor.shape, generator=generator) for name, tensor in state.items()}
    save_file(moved, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


def merged(flags: dict, capfd) -> Result:
    """Run the program in this process."""
    capfd.readouterr()
    with mock.patch("engine.distributed.shutdown"):
        code = run(merge.main, merge.MergeFlags, merge.__doc__, command_line(flags))
    return Result(code, *capfd.readouterr())


def flags_of(tiny, trained, **changes) -> dict:
    """Flags of a short run, with these changes."""
    measured = {
        "data_path": tiny.folder / "prompts.jsonl",
        "reward_model_name_or_path": tiny.folder / "reward",
        "num_eval_prompts": 8,
        "max_prompt_seq_len": 6,
        "max_answer_seq_len": 8,
    }
    return {"sft_model_name_or_path": tiny.folder / "sft", "trained_model_name_or_path": trained, **measured, **changes}


def test_several_reward_models_are_weighted_and_made_comparable_by_the_sft_models_responses(
    tiny, trained, tmp_path, capfd
):
    """The native one's folder normalises its scores already; of the other, mean and deviation by hand."""
    native = shutil.copytree(tiny.folder / "reward", tmp_path / "native")
    config = json.loads((native / "config.json").read_text())
    (native / "config.json").write_text(json.dumps(config | {"score_offset": 0.25}))
    rewards, out = [native, foreign_model(tmp_path / "film")], tmp_path / "out"
    given = {"reward_model_name_or_path": rewards, "reward_model_weight": [0.25, 3]}
    rows = {}
    for name, more in {"raw": {"raw_reward_scores": True}, "made": {}}.items():
        result = merged(flags_of(tiny, trained, scales=[1.0], output_dir=out / name, **given, **more), capfd)
        assert result.code == 0, result.stderr
        read = ((out / name / "samples" / f"scale_{scale}.jsonl").read_text().splitlines() for scale in (0, 1))
        rows[name] = [json.loads(line) for lines in read for line in lines]
    first = [row["reward_film"] for row in rows["raw"][:8]]
    mean, deviation = statistics.mean(first), statistics.stdev(first)
    for raw, made in zip(rows["raw"], rows["made"], strict=True):
        expected = raw["reward_native"], (raw["reward_film"] - mean) / deviation
        assert (made["reward_native"], made["reward_film"]) == pytest.approx(expected, abs=1e-5)
        assert made["score"] == pytest.approx(0.25 * expected[0] + 3 * expected[1], abs=1e-5)
    point = json.loads((out / "made" / "frontier.json").read_text())["points"][1]
    assert point["rewards"]["film"] == pytest.approx(statistics.mean(row["reward_film"] for row in rows["made"][8:]))


def test_scales_in_an_environment(tiny, trained, tmp_path, capfd):
    """It says a word after the first turn, and pays for each token."""
    (tmp_path / "talks.py").write_text(
        "from engine.rollout import Reply\n"
        "class Word:\n"
        "    def __init__(self, row): pass\n"
        "    def step(self, turn): return Reply(text='w05', reward=float(len(turn.tokens)), done=turn.number > 0)\n"
    )
    talks = {"environment": f"{tmp_path / 'talks.py'}:Word", "stop": ["w1", "w2"], "scales": [1.0]}
    parts = []
    for name, more in {"both": {}, "alone": {"reward_model_name_or_path": None}}.items():
        result = merged(flags_of(tiny, trained, output_dir=tmp_path / name, **talks, **more), capfd)
        assert result.code == 0, result.stderr
        found = json.loads((tmp_path / name / "frontier.json").read_text())
        assert found["environment"] == talks["environment"]
        for point in found["points"]:
            lines = (tmp_path / name / "samples" / f"scale_{point['scale']:g}.jsonl").read_text().splitlines()
            rows = [json.loads(line) for line in lines]
            assert any(len(row["turns"]) > 1 for row in rows)
            for row in rows:
                said = [turn["text"].strip() for turn in row["turns"] if turn["by"] == "environment"]
                assert said == ["w05"] * (len(row["turns"]) // 2) and "failed" not in result.stdout
                paid = sum(turn.get("reward", 0.0) for turn in row["turns"])
                assert paid == row["tokens"] == row.get("reward_environment", row["score"])
            assert point["tokens"] == pytest.approx(statistics.mean(row["tokens"] for row in rows))
            parts.append((point["score"], point["rewards"], point["tokens"]))
    (score, rewards, _), (moved, _, _), (paid, none, tokens), _ = parts
    assert set(rewards) == {"model", "environment"} and score == pytest.approx(
        rewards["model"] + rewards["environment"]
    )
    assert (paid, none) == (pytest.approx(tokens), {}) and moved != score


def test_the_best_within_a_kl_is_saved_and_the_frontier_written(tiny, trained, tmp_path, capfd):
    out = tmp_path / "out"
    flags = flags_of(tiny, trained, scales=[0.5, 1.0, 3.0], output_dir=out)
    result = merged(flags, capfd)
    assert result.code == 0 and "nothing is saved" in result.stdout, result.stderr
    found = json.loads((out / "frontier.json").read_text())
    points = {point["scale"]: point for point in found["points"]}
    assert list(points) == [0.0, 0.5, 1.0, 3.0] and found["trained"] == [trained]
    assert points[0.0]["kl"] == pytest.approx(0.0, abs=1e-5) and 0.0 < points[0.5]["kl"] < points[3.0]["kl"]
    assert not (out / "model").exists()
    assert len((out / "samples" / "scale_0.5.jsonl").read_text().splitlines()) == 8

    within = points[3.0]["kl"] - 1e-6
    best = max((points[scale] for scale in (0.5, 1.0)), key=lambda point: point["score"])["scale"]
    chosen = tmp_path / "chosen"
    result = merged({**flags, "output_dir": chosen, "max_kl": within}, capfd)
    assert result.code == 0 and f"SFT + {best:g} x the linear change of 1" in result.stdout, result.stderr
    note = json.loads((chosen / "model" / "merged_from.json").read_text())
    assert note["scale"] == best and note["measured"]["kl"] == pytest.approx(points[best]["kl"], abs=1e-5)
    card = (chosen / "model" / "README.md").read_text()
    assert f"score {note['measured']['score']:.3f} ± " in card and str(tiny.folder) not in card
    one, other = (load_file(f"{path}/model.safetensors") for path in (tiny.folder / "sft", trained))
    model = AutoModelForCausalLM.from_pretrained(chosen / "model").state_dict()
    for name, tensor in one.items():
        assert torch.allclose(model[name], tensor + best * (other[name] - tensor), atol=1e-6), name


def test_the_best_within_a_kl_is_chosen_and_never_the_sft_model():
    points = [Point(scale, 0.0, 0.0, kl, 0.0, 8.0, 0.5, by) for scale, by, kl in ((0, 9, 0), (1, 1, 4), (2, 2, 5))]
    found = [best_within(points, limit) for limit in (3.0, 4.0, 99.0, None)]
    assert found == [None, points[1], points[2], points[2]]


def test_a_judge_chooses_that_is_no_part_of_the_score(tiny, trained, tmp_path, capfd):
    """It counts words; the number that chooses is its mean less 0.25 for each nat."""
    (tmp_path / "judge.py").write_text(
        "def words(prompts, responses): return [float(len(response.split())) for response in responses]\n"
    )
    judge = {"reward_function": f"{tmp_path / 'judge.py'}:words", "reward_weights": 0.0}
    flags = flags_of(tiny, trained, scales=[0.5, 1.0, 3.0], **judge)
    chosen = {"choose_by": "eval/reward_words", "kl_coef": 0.25}
    result = merged({**flags, **chosen, "output_dir": tmp_path / "by_judge"}, capfd)
    assert result.code == 0, result.stderr
    alone = merged(flags_of(tiny, trained, scales=[0.5, 1.0, 3.0], output_dir=tmp_path / "alone"), capfd)
    assert alone.code == 0, alone.stderr
    points, scores = {}, {}
    for name in ("by_judge", "alone"):
        found = json.loads((tmp_path / name / "frontier.json").read_text())
        points[name], scores[name] = found["points"], [point["score"] for point in found["points"]]
    assert scores["by_judge"] == scores["alone"], "the judge has no part in the score"
    numbers = {}
    for point in points["by_judge"]:
        lines = (tmp_path / "by_judge" / "samples" / f"scale_{point['scale']:g}.jsonl").read_text().splitlines()
        counts = [len(json.loads(line)["response"].split()) for line in lines]
        assert point["rewards"]["words"] == pytest.approx(statistics.mean(counts))
        assert point["rewards_se"]["words"] == pytest.approx(statistics.stdev(counts) / 8**0.5)
        numbers[point["scale"]] = statistics.mean(counts) - 0.25 * point["kl"]
        assert point["chosen_by"] == pytest.approx(numbers[point["scale"]], abs=1e-6)
    best = max((scale for scale in numbers if scale != 0.0), key=numbers.get)
    assert f"SFT + {best:g} x the linear change of 1" in result.stdout
    assert ("eval/reward_words is highest for the SFT model itself" in result.stdout) == (numbers[0.0] > numbers[best])
    note = json.loads((tmp_path / "by_judge" / "model" / "merged_from.json").read_text())
    assert (note["scale"], note["choose_by"], note["kl_coef"]) == (best, "eval/reward_words", 0.25)


@pytest.mark.parametrize("judge", [True, False])
def test_the_command_that_a_run_prints_merges(tiny, tmp_path, capfd, judge):
    """With the run's prompts, rewards, weights and lengths; and the trained model at scale 1 has the run's numbers."""
    (tmp_path / "re ward.py").write_text(
        "def words(prompts, responses, prompt): return [float(len(response.split())) for response in responses]\n"
    )
    rewards = {
        "reward_model_name_or_path": tiny.folder / "reward",
        "reward_model_weight": 0.5,
        "reward_function": f"{tmp_path / 're ward.py'}:words",
        "reward_weights": 0.0 if judge else -0.25,
    }
    stop = {"stop=-w1": True} if judge else {"stop": ["w1", "w 2"]}  # a value with a dash needs its "="
    more = {**stop, "temperature": 0.75, "seed": 7, "num_eval_prompts": 6, "actor_learning_rate": 1e-3}
    result = run_here(3, tiny.flags(3, output_dir=tmp_path / "out", **rewards, **more), capfd)
    assert result.code == 0, result.stderr
    (command,) = [line for line in result.stdout.splitlines() if line.startswith("four-engine-rlhf merge ")]
    words = shlex.split(command)[2:]
    by = {"--choose_by": "eval/reward_words"} if judge else {"--choose_by": "eval/score", "--kl_coef": "0.1"}
    assert all(words[words.index(flag) + 1] == value for flag, value in by.items())
    with mock.patch("engine.distributed.shutdown"):
        code = run(merge.main, merge.MergeFlags, merge.__doc__, words)
    assert code == 0, capfd.readouterr().err
    found = json.loads((tmp_path / "out" / "merged" / "frontier.json").read_text())
    ended = metric_lines(tmp_path / "out")[-1]
    (point,) = [point for point in found["points"] if point["scale"] == 1.0]
    for name, number in {"score": point["score"], "kl": point["kl"], "reward_words": point["rewards"]["words"]}.items():
        assert number == pytest.approx(ended[f"eval/{name}"], abs=1e-4), name
    assert (tmp_path / "out" / "merged" / "model" / "model.safetensors").is_file()


def test_the_table_prints_one_standard_error():
    point = Point(0.5, 1.25, 0.068, 3.5, 0.21, 8.0, 0.5, 1.25, {"judge": 0.5}, {"judge": 0.03})
    head, line, _ = table([point]).splitlines()
    assert head.split() == ["scale", "score", "judge", "KL", "tokens", "bigrams"]
    expected = ["0.5", "1.250", "±", "0.068", "0.500", "±", "0.030", "3.50", "±", "0.21", "8.0", "0.500"]
    assert line.split() == expected


def test_without_prompts_a_scale_is_merged_and_nothing_is_measured(tiny, trained, tmp_path, capfd):
    out = tmp_path / "out"
    paths = {"sft_model_name_or_path": tiny.folder / "sft", "trained_model_name_or_path": trained, "output_dir": out}
    result = merged({**paths, "scale": 1.0}, capfd)
    assert result.code == 0 and "saved: " in result.stdout, result.stderr
    assert sorted(path.name for path in out.iterdir() if path.suffix != ".lock") == ["model"]
    before = snapshot(out / "model")
    result = merged({**paths, "scale": 0.5}, capfd)
    assert_one_message(result, [f"--output_dir {out} is not empty. Choose another folder."])
    assert snapshot(out / "model") == before


BAD = {
    "nothing to do": (
        {"data_path": None, "reward_model_name_or_path": None},
        "nothing to do",
    ),
    "two choices": ({"scale": 1.0, "max_kl": 3.0}, "--scale 1 and --max_kl 3.0 both choose a model"),
    "no data for a KL": ({"data_path": None, "max_kl": 3.0}, "needs --data_path"),
    "no such number": (
        {"choose_by": "eval/reward_judge"},
        "--choose_by eval/reward_judge: no held-out number here has this name. Of scores there are eval/score;",
    ),
    "no likelihood in merging": ({"choose_by": "eval/likelihood"}, "no held-out number here has this name"),
    "one model twice": ({"trained_model_name_or_path": ["/", "/."]}, "/. is given twice. Give it once"),
    "no such model": ({"trained_model_name_or_path": "/nowhere"}, "--trained_model_name_or_path: there is no folder"),
}


@pytest.mark.parametrize("changes, message", BAD.values(), ids=BAD)
def test_mistakes_have_one_message(tiny, trained, tmp_path, capfd, changes, message):
    flags = flags_of(tiny, trained, output_dir=tmp_path / "out", **changes)
    assert_one_message(merged(flags, capfd), [message])
    assert not list(tmp_path.glob("out/[!r]*"))


def test_the_output_lies_apart_from_the_models(tiny, trained, capfd):
    flags = flags_of(tiny, trained, output_dir=trained, scale=1.0)
    assert_one_message(merged(flags, capfd), [f"--output_dir {trained}"])
