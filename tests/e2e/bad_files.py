"""Mistakes in what flags name: data, folders, files, functions, models."""

import itertools
from collections.abc import Iterator

from tests.e2e.bad_values import ODD_NAMES
from tests.e2e.bad_world import BadWorld
from tests.e2e.mistake import Mistake

ROLES = ("actor", "critic", "reference", "reward")


def files(step: int, world: BadWorld) -> Iterator[Mistake]:
    """Data, output folders, restart points, DeepSpeed JSON, reward functions, and names that are none."""
    good = world.tiny.flags(step)["data_path"]
    data_flags = [
        "data_path",
        "eval_data_path",
        *{1: ["sft_only_data_path"], 2: ["normalization_data_path"], 3: ["unsupervised_dataset_name"]}[step],
    ]
    few_are_enough = {"blank.jsonl", "rows.txt", "three.jsonl", "texts_folder"}
    for path in world.data:
        yield Mistake("data", step, {"data_path": path})
        yield Mistake(
            "data",
            step,
            {"data_path": [good, path]}
            if path.name not in few_are_enough
            else {"data_path": [path, path], "held_out" if step < 3 else "num_eval_prompts": 8},
        )
    for name, path in itertools.product(
        data_flags[1:],
        (
            "absent.jsonl",
            "empty.jsonl",
            "broken.jsonl",
            "numbers.jsonl",
            "garbage.parquet",
            "empty_folder",
            "quote.csv",
        ),
    ):
        yield Mistake("data", step, {name: world.folder / path, **({"num_eval_prompts": 100} if step == 3 else {})})
    for name in ODD_NAMES:
        yield Mistake("odd name", step, words=(f"--data_path={name}",))
        yield Mistake("odd name", step, words=(f"--{'actor_' * (step == 3)}model_name_or_path={name}",))
        yield Mistake("odd name", step, words=(f"--config={name}",))
    for path in (
        world.folder / "empty.jsonl",
        world.folder / "empty.jsonl" / "out",
        world.tiny.folder,
        "/dev/null",
        "/dev/null/out",
        "/proc/out",
        "/",
        world.folder / "loop.jsonl",
        world.folder / "loop.jsonl" / "out",
    ):
        yield Mistake("output folder", step, {"output_dir": path})
    for path in (world.folder / "empty.jsonl", "/dev/null/boards", "/proc/boards"):
        yield Mistake("output folder", step, {"tensorboard_path": path})
    names = [f"{role}_ds_config" for role in ROLES] if step == 3 else ["ds_config"]
    for path, name in itertools.product(world.ds_configs, names):
        yield Mistake("DeepSpeed JSON", step, {name: path, "dtype": "fp32"})
    if step == 3:
        for path in (*world.states, world.folder / "nowhere", world.folder / "empty.jsonl", world.tiny.folder):
            yield Mistake("restart point", step, {"resume": path})
        for function in (
            *world.reward_functions,
            "score",
            ":score",
            "rules:",
            "no_such_module:score",
            "os:no_such",
            "os:sep",
            str(world.folder / "absent.py:score"),
            str(world.folder / "empty.jsonl:score"),
            "os.path.py:join",
            "json:",
            "a b:c",
            "..:x",
            "builtins:print:x",
            "x" * 300 + ":f",
            "\udcff:f",
            "os:getcwd",
            ".py:f",
        ):
            yield Mistake("reward function", step, {"reward_function": function})


def models(step: int, world: BadWorld) -> Iterator[Mistake]:
    """Folders that hold no model, or a broken one, or one of another role."""
    language = {
        1: ["model_name_or_path"],
        2: ["model_name_or_path", "sft_model_name_or_path"],
        3: ["actor_model_name_or_path"],
    }[step]
    scorers = ["critic_model_name_or_path", "reward_model_name_or_path"] if step == 3 else []
    for name, path in itertools.product(language + scorers, world.no_models):
        yield Mistake("no model", step, {name: path})
    for name, path in itertools.product(language, [*world.language_models, world.tiny.folder / "reward"]):
        yield Mistake("broken model", step, {name: path})
    for name, path in itertools.product(scorers, [*world.reward_models, world.tiny.folder / "sft"]):
        yield Mistake("broken model", step, {name: path})
    if step > 1:
        yield Mistake("broken model", step, {language[-1]: world.other_words})
