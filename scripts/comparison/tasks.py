"""On what dialects are compared: models, prompts, budget, learning rates to choose from, KLs to be read at.

A further task is one more entry of TASKS.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from scripts.comparison import judged
from scripts.comparison.folders import make, write_lines

HELD_OUT = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """All runs of a task learn from equally many responses, in steps of equally many, and are judged alike.

    what: for the page. flags: step 3's, with `models` for the folder of models and data. fixed_positions: of dialects
    that learn what follows an end, too: about as many as a response has tokens. responses: in a step; steps: of a run;
    every: steps between evaluations. rates: what the search chooses from, each the peak of actor and critic. search_kl:
    the search takes the best score at no more than this KL, in nats a response. kls: where scores are read. least_rise:
    of the score, by which an entry has learned. texts: files under `models` whose words are known. prepare: makes what
    is missing of `models`. needs: variables that name what this machine has to have. judge: a reward function that no
    run learns from (judges.py); where there is one, it is what entries are chosen and ordered by.
    """

    name: str
    what: str
    flags: tuple[str, ...]
    fixed_positions: int
    responses: int
    steps: int
    every: int
    rates: tuple[float, ...]
    search_kl: float
    kls: tuple[float, ...]
    least_rise: float
    texts: tuple[str, ...]
    prepare: Callable[[Path], None]
    needs: tuple[str, ...] = ()
    judge: str = ""

    @property
    def measure(self) -> str:
        """What is compared, a name of Result's measures."""
        return "judge" if self.judge else "score"

    @property
    def judge_name(self) -> str:
        """The judge's name among a run's rewards; "" without a judge."""
        return self.judge.rpartition(":")[2]

    @property
    def has_reward_model(self) -> bool:
        """Whether scores come from a model, as TRL's PPO needs them, and not from a function."""
        return "--reward_function" not in self.flags

    def why_not(self, environment: Mapping[str, str] = os.environ) -> str | None:
        """Why this task cannot be run here, in a sentence; None where it can."""
        for name in self.needs:
            kind, content = VARIABLES[name]
            if not environment.get(name):
                return f"{self.name} is left out: the variable {name} is not set (a {kind} with {content})."
            path = Path(environment[name])
            if not (path.is_dir() if kind == "folder" else path.is_file()):
                return f"{self.name} is left out: {name}={path} is no {kind} (with {content})."
        return None

    def sized(self, steps: int | None, responses: int | None, rates: Sequence[float] | None) -> "Task":
        """The task at another budget: steps of a run, responses of a step, and rates."""
        steps = steps or self.steps
        most = min(self.every, max(1, steps // 2))  # two evaluations at least
        every = max(number for number in range(1, most + 1) if steps % number == 0)
        responses, rates = responses or self.responses, tuple(rates or self.rates)
        return replace(self, steps=steps, every=every, responses=responses, rates=rates)

    def words(self, models: Path) -> list[str]:
        """The flags, with the folder in them."""
        return [word.format(models=models) for word in self.flags]


VARIABLES = {
    "REVIEWS_MODEL": ("folder", "a small pretrained language model and tokenizer, as for scripts/trial_reviews.sh"),
    "REVIEWS_DATA": ("folder", "sft.jsonl, pairs.jsonl and prompts.jsonl, as for scripts/trial_reviews.sh"),
    "VERSES_TEXT": ("file", "what bible -f prints, as for scripts/trial_verses_models.sh"),
}
"""By variable whether it names a folder or a file, and what is in it."""


def _flags(longest_prompt: int, longest_response: int, *reward: str) -> tuple[str, ...]:
    """Where models and prompts stand, and how long texts are; reward: what scores responses."""
    return (
        "--actor_model_name_or_path",
        "{models}/sft",
        *reward,
        "--data_path",
        "{models}/data/prompts.jsonl",
        "--eval_data_path",
        "{models}/data/eval_prompts.jsonl",
        "--max_prompt_seq_len",
        str(longest_prompt),
        "--max_answer_seq_len",
        str(longest_response),
    )


REWARD_MODEL = ("--critic_model_name_or_path", "{models}/reward")
REWARD = "reward/config.json"  # what the scripts of most tasks write last


def make_quickstart(models: Path) -> None:
    """The quickstart's corpus, SFT and reward model."""
    make(models, "scripts/quickstart_models.sh", models, "1", last=REWARD)


def make_reviews(models: Path) -> None:
    """SFT and reward model on the reviews, and their prompts in two parts."""
    model, data = (Path(os.environ[name]).resolve() for name in ("REVIEWS_MODEL", "REVIEWS_DATA"))
    make(models, "scripts/trial_models.sh", model, data, models, last=REWARD)
    lines = (data / "prompts.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    held_out = list(dict.fromkeys(lines))[-HELD_OUT:]
    parts = {"prompts.jsonl": [line for line in lines if line not in held_out], "eval_prompts.jsonl": held_out}
    parts["sft.jsonl"] = (data / "sft.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    for name, part in parts.items():
        write_lines(models / "data" / name, part)


def make_verses(models: Path) -> None:
    """Verses, SFT and reward model."""
    make(models, "scripts/trial_verses_models.sh", Path(os.environ["VERSES_TEXT"]).resolve(), models, last=REWARD)


def make_sums(models: Path) -> None:
    """Two-digit sums and a model that is right about half of the time."""
    make(models, "scripts/sums_models.sh", models, "1", last="sft/config.json")


def known_words(files: list[Path]) -> frozenset[str]:
    """What stands between spaces in the texts of these files of JSON lines."""
    found: set[str] = set()
    for path in files:
        for line in path.read_text(encoding="utf-8").splitlines():
            texts = [text for text in json.loads(line).values() if isinstance(text, str)]
            for text in (*texts, "".join(texts)):  # a response may go on from the prompt's last word
                found.update(text.split())
    return frozenset(found)


REVIEWS = Task(
    name="reviews",
    what="positive film reviews by a pretrained Llama of 260,000 parameters (docs/guide.md)",
    flags=_flags(32, 48, *REWARD_MODEL),
    fixed_positions=40,
    responses=64,
    steps=24,
    every=3,
    rates=(1.5e-4, 4e-4, 1e-3),
    search_kl=8.0,
    kls=(5.0, 8.0, 12.0, 16.0),
    least_rise=1.0,  # its standard deviation over the SFT model's responses
    texts=("data/sft.jsonl",),
    prepare=make_reviews,
    needs=("REVIEWS_MODEL", "REVIEWS_DATA"),
)

QUICKSTART = Task(
    name="quickstart",
    what="positive film reviews from a grammar, a model of 0.2 million parameters",
    flags=_flags(12, 32, *REWARD_MODEL),
    fixed_positions=16,
    responses=128,
    steps=30,
    every=5,
    # The model learns at rates that would break a large one.
    rates=(5e-4, 1.5e-3, 4.5e-3),
    search_kl=4.0,
    kls=(1.0, 2.0, 4.0, 8.0),
    least_rise=1.0,  # its standard deviation over the SFT model's responses
    texts=("data/sft.jsonl",),
    prepare=make_quickstart,
)

JUDGED_KLS = (3.0, 5.0, 8.0, 12.0, 16.0)

TASKS = {
    task.name: task
    for task in (
        replace(
            REVIEWS,
            name="judged_reviews",
            what="film reviews by a Llama of 260,000 parameters; a reward model of 600 pairs",
            prepare=judged.make_reviews,
            rates=(1.5e-4, 4e-4),
            kls=JUDGED_KLS,
            judge="scripts.comparison.judges:sentences",
        ),
        replace(
            QUICKSTART,
            name="judged_quickstart",
            what="film reviews from a grammar, 0.2 million parameters; a reward model of 700 pairs, 15 % swapped",
            prepare=judged.make_quickstart,
            rates=(5e-4, 1.5e-3),
            search_kl=8.0,
            kls=JUDGED_KLS,
            judge="scripts.comparison.judges:grammar",
        ),
        replace(
            QUICKSTART,
            name="judged_long",
            what="three sentences of the grammar, 1.9 million parameters; a reward model of 1,500 pairs, 10 % swapped",
            flags=_flags(12, 80, *REWARD_MODEL),
            fixed_positions=45,
            responses=64,
            steps=24,
            every=3,
            rates=(2e-4, 6e-4),
            search_kl=8.0,
            kls=JUDGED_KLS,
            prepare=judged.make_long,
            judge="scripts.comparison.judges:three",
        ),
        QUICKSTART,
        REVIEWS,
        replace(
            REVIEWS,
            name="verses",
            what="Bible verses as in the New Testament, a GPT-2 of 0.6 million parameters",
            prepare=make_verses,
            needs=("VERSES_TEXT",),
        ),
        Task(
            name="sums",
            what="right answers to two-digit sums, by a checker (docs/verifiable.md); the score is the share of them",
            flags=_flags(8, 4, "--reward_function", "training.tools.toy.sums:right"),
            fixed_positions=4,
            responses=256,
            steps=60,
            every=10,
            rates=(1e-4, 3e-4, 1e-3, 3e-3),
            search_kl=2.0,
            kls=(0.5, 1.0, 1.5, 2.0),
            least_rise=0.1,
            texts=("data/sft.jsonl",),
            prepare=make_sums,
        ),
    )
}
