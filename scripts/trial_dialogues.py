"""Trains steps 1 and 2 on dialogues of 2 to 40 turns, of which a third does not fit, and judges the reward model.

    python scripts/trial_dialogues.py OUTPUT_DIR --overlong cut_answer cut_prompt
    python scripts/trial_dialogues.py OUTPUT_DIR --rows 500

The dialogues have the form of Anthropic/hh-rlhf, and are compressed as it is. Somebody asks for one thing after the
other, a tool, a fruit, and is told one of two; only the last answer is judged, by which of the two it names (the
hammer, the apple), and nothing before it tells which is better. As in talk, later questions come to other subjects than
first ones (--same_subjects: they do not): who was shown short dialogues alone has not seen what long ones end with.

Each choice of --overlong is a line of the table that is printed: what each step cut and dropped by its own words (step
3 by a dry run), and on held-out pairs the share in which the better answer has the higher score, for dialogues that fit
into 256 tokens and for those that do not. Scored is what step 3 would show the reward model: of the prompt the last
exchanges, up to 128 tokens, and the whole answer. About 4 minutes on two CPU cores.
"""

import argparse
import gzip
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

PROMPT, ANSWER = 128, 128  # tokens
SUBJECTS = {  # two things of each, the better one first
    "tool": "hammer saw",
    "fruit": "apple pear",
    "bird": "robin hawk",
    "colour": "green red",
    "metal": "iron copper",
    "game": "chess poker",
    "drink": "tea coffee",
    "fish": "trout salmon",
    "city": "rome paris",
    "tree": "oak birch",
    "dance": "waltz tango",
    "cheese": "brie cheddar",
    "stone": "granite marble",
    "boat": "canoe ferry",
    "herb": "basil thyme",
    "planet": "mars venus",
    "fabric": "cotton silk",
    "insect": "ant wasp",
    "river": "nile danube",
    "flower": "tulip rose",
    "grain": "wheat barley",
    "hat": "beret bonnet",
    "dwelling": "cottage castle",
    "instrument": "violin flute",
}
QUESTIONS = ("can you name one {} ?", "this time i would like to read about some {} ?", "and a {} ?", "which {} ?")
ANSWERS = (" {} .", " {} , i would say .", " {} , if that is of any help to you at all .", " {} comes to mind .")
WINDOW = 5  # how many subjects a question may be about; with each further question they are those one further down


def main() -> int:
    """Make the data and the model, run the steps with each choice, print the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output_dir", type=Path, help="must not be there")
    parser.add_argument("--overlong", nargs="+", default=["cut_answer", "cut_prompt"], help="(default: both)")
    parser.add_argument("--same_subjects", action="store_true", help="every question may be about all subjects")
    parser.add_argument(
        "--rows", type=int, default=1500, help="dialogues; a fifth as many are held out (default: 1500)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of dialogues, weights and order (default: 0)")
    parser.add_argument("--ranks", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--master_port", type=int, default=29500, help="(default: 29500)")
    options = parser.parse_args()
    if options.output_dir.exists():
        parser.error(f"{options.output_dir} is there already; name another folder")
    from training.program.startup import quiet_libraries

    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    options.output_dir.mkdir(parents=True)
    quiet_libraries()
    write_data(options.output_dir / "data", options)
    write_model(options.output_dir)
    print("| --overlong | step 1 | step 2 | step 3 | accuracy by step 2 | of those that fit | of those that do not |")
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for overlong in options.overlong:
        print(table_row(overlong, options), flush=True)
    return 0


def write_data(folder: Path, options: argparse.Namespace) -> None:
    """train.jsonl.gz and test.jsonl.gz, pairs of dialogues from their beginning, which all three steps read."""
    folder.mkdir()
    rng = random.Random(options.seed)
    for name, count in (("train", options.rows), ("test", options.rows // 5)):
        with gzip.open(folder / f"{name}.jsonl.gz", "wt", encoding="utf-8") as file:
            for _ in range(count):
                file.write(json.dumps(dialogue(rng, options.same_subjects)) + "\n")


def dialogue(rng: random.Random, same_subjects: bool) -> dict[str, str]:
    """A pair of 1 to 20 exchanges that differs in what the last answer names."""
    count = rng.randint(1, 20)
    shared, subjects = "", list(SUBJECTS)
    for number in range(count):
        asked = rng.choice(subjects if same_subjects else subjects[number : number + WINDOW])
        shared += f"\n\nHuman: {rng.choice(QUESTIONS).format(asked)}\n\nAssistant:"
        words = rng.choice(ANSWERS)
        answers = [words.format(thing) for thing in SUBJECTS[asked].split()]
        if number < count - 1:
            shared += rng.choice(answers)  # so that only the last answer is judged
    return {side: shared + answer for side, answer in zip(("chosen", "rejected"), answers)}


def read_pairs(path: Path) -> list[dict[str, str]]:
    """The pairs of a file of `write_data`."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def write_model(folder: Path) -> None:
    """The quickstart's small Llama with random weights, of the dialogues' words."""
    from training.toy.model import make_model, train_tokenizer

    tokenizer = train_tokenizer(pair["chosen"] for pair in read_pairs(folder / "data" / "train.jsonl.gz"))
    model = make_model(tokenizer, hidden_size=64, num_layers=3, num_heads=4, seed=0)
    for part in (tokenizer, model):
        part.save_pretrained(folder / "base")


def table_row(overlong: str, options: argparse.Namespace) -> str:
    """Run the three steps with this choice; what they said of the data, and how the reward model judges."""
    folder, started = options.output_dir / overlong, time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    common = ["--data_path", options.output_dir / "data", "--overlong", overlong, "--dtype", "fp32"]
    common += ["--seed", options.seed, "--data_output_path", folder / "cache"]
    trained = [*common, "--max_seq_len", PROMPT + ANSWER, "--per_device_train_batch_size", 32 // options.ranks]
    trained += ["--per_device_eval_batch_size", 50, "--lr_scheduler_type", "cosine", "--num_warmup_steps", 5]
    one, _ = launch(
        options, folder, 1, *trained, "--model_name_or_path", options.output_dir / "base", "--output_dir",
        folder / "sft", "--learning_rate", 5e-3,
    )  # fmt: skip
    two, told = launch(
        options, folder, 2, *trained, "--model_name_or_path", folder / "sft", "--output_dir", folder / "reward",
        "--learning_rate", 3e-3, "--normalization_samples", 0,
    )  # fmt: skip
    three, _ = launch(
        options, folder, 3, *common, "--actor_model_name_or_path", folder / "sft", "--critic_model_name_or_path",
        folder / "reward", "--max_prompt_seq_len", PROMPT, "--max_answer_seq_len", ANSWER, "--num_eval_prompts", 64,
        "--output_dir", folder / "ppo", "--dry_run",
    )  # fmt: skip
    print(f"{overlong}: {time.monotonic() - started:.0f} s", file=sys.stderr)
    cells = [overlong, one, two, three, told, *judged(folder / "reward", options.output_dir / "data" / "test.jsonl.gz")]
    return f"| {' | '.join(cells)} |"


def launch(options: argparse.Namespace, folder: Path, step: int, *words: object) -> tuple[str, str]:
    """Run a step, its output in a file; returns (what it says of cut and dropped rows, its held-out pair accuracy)."""
    program = {1: "step1_sft", 2: "step2_reward", 3: "step3_rlhf"}[step]
    ranks = ["--num_gpus", options.ranks, "--master_port", options.master_port]
    dry = "--dry_run" in words
    starter = [sys.executable] if dry else [shutil.which("deepspeed"), "--quiet", *ranks]
    command = [*starter, Path(__file__).resolve().parents[1] / "training" / f"{program}.py", *words]
    log = folder / f"{program}.log"
    with log.open("w") as file:
        subprocess.run(list(map(str, command)), stdout=file, stderr=subprocess.STDOUT, check=True)
    text = log.read_text()
    counts = re.search(r"(?:texts|pairs|prompts) \(([^)]*)\)", text)
    accuracy = re.search(r"held-out pair accuracy ([\d.]+)", text)
    return counts[1] if counts else "?", accuracy[1] if accuracy else ""


def judged(model: Path, pairs: Path) -> list[str]:
    """The accuracy of a reward model on held-out pairs that fit and on those that do not, each with standard error."""
    import torch

    from engine.experience import position_ids
    from engine.models.loading import load_scorer
    from engine.models.reading import read_tokenizer
    from training.data.pair_examples import Pair, collate_pairs

    tokenizer, scorer = read_tokenizer(str(model), "model"), load_scorer(str(model), torch.float32).eval()
    right = {True: [], False: []}  # by whether the whole pair fits
    for row in read_pairs(pairs):
        sides = {side: shown(row[side], tokenizer) for side in ("chosen", "rejected")}
        fits = max(len(tokenizer(row[side]).input_ids) for side in sides) < PROMPT + ANSWER  # an EOS follows
        batch = collate_pairs([Pair(**sides)], tokenizer.pad_token_id)
        with torch.no_grad():
            scores = scorer(batch.sequences, batch.attention_mask, position_ids(batch.attention_mask))
            better, worse = scorer.sequence_scores(scores, batch.sequences, batch.attention_mask).tolist()
        right[fits].append(better > worse)
    return [_share(right[fits]) for fits in (True, False)]


def shown(text: str, tokenizer) -> list[int]:
    """The last exchanges of a dialogue whose prompt has at most PROMPT tokens, with the answer and EOS."""
    turns = text.split("\n\nHuman:")[1:]
    for first in range(len(turns)):
        prompt, mark, answer = "".join(f"\n\nHuman:{turn}" for turn in turns[first:]).rpartition("\n\nAssistant:")
        ids = tokenizer(prompt + mark).input_ids
        if len(ids) <= PROMPT:
            break
    return ids + tokenizer(answer).input_ids + [tokenizer.eos_token_id]


def _share(right: list[bool]) -> str:
    share = sum(right) / len(right)
    return f"{share:.3f} ± {(share * (1 - share) / len(right)) ** 0.5:.3f} ({len(right)})"


if __name__ == "__main__":
    sys.exit(main())
