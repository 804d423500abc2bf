"""Command lines and YAML files that a user may get wrong, by the hundred.

    world = BadWorld(tmp_path / "bad", tiny)
    for case in cases(world, count=300, seed=0):
        result = run(case.step, case.words(out))
        assert case.problem(result, out) is None        # one message, exit code 2, nothing written

Every mistake stands alone in a command line that would otherwise train. `seed` draws which mistakes are taken, and how
names are misspelt.
"""

import dataclasses
import itertools
import random
import shutil
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from scripts.harness.bad_world import BadWorld
from scripts.harness.programs import PROGRAMS, Result, command_line, snapshot

STALE = {
    "metrics.jsonl": '{"step": 1, "samples": 8}\n',
    "checkpoints/step_000001.partial/trainer_state.json": "{}",
    "run.json": '{"starts": [{}]}',
    "tensorboard/events": "x",
}  # what a run left that was killed at its first checkpoint

NO_NUMBERS = ("x", "1,5", "", " ", "0x10", "1e", "--", "ten")
NO_WHOLE_NUMBERS = (*NO_NUMBERS, "1.5", "nan", "inf", "1e3", "9" * 5000)
NO_TRUTHS = ("yes", "0", "", "maybe", "truee")
NO_NAMES = ("", " ", "x" * 300, "x/" * 3000)
ODD_NAMES = (
    "no such/model/at all",
    "..",
    "a:b",
    "ü.jsonl",
    "\U0001f600",
    "line\nbreak",
    "\x1b[31mred",
    "-x",
    "\udcff.jsonl",
    "*",
    "~no_such_user/x",
    "%s {0}",
)

# Lists of lists that share their parts: a few hundred bytes that would be written out as 9 ** 9 texts.
BOMB = (
    "["
    + ", ".join(
        [f"&a [{', '.join('x' * 9)}]"]
        + [f"&{after} [{', '.join([f'*{before}'] * 9)}]" for before, after in itertools.pairwise("abcdefghi")]
    )
    + "]"
)
YAML = (
    "seed",
    "seed: [1",
    "seed: 1\nseed: 2\n",
    "- seed\n- 1\n",
    "",
    "null",
    "3",
    "seed: {a: 1}",
    "seed: [1, 2]",
    "seed: [[1]]",
    "seed: x",
    "seed: 1.5",
    "seed: .nan",
    "seed: 2020-01-01",
    "seed: yes",
    "sed: 1",
    "config: other.yaml",
    "local_rank: 0",
    "3: 3",
    "null: 3",
    "? [a, b]\n: 3",
    "? {a: b}\n: 3",
    "true: 3",
    "&a seed: *b",
    "&a [*a]",
    "seed: &a [*a]",
    "seed: !!python/object:os.system x",
    "seed: !unknown x",
    "%YAML 9.9\n---\nseed: 1",
    "seed: 1\n---\nseed: 2\n",
    "\tseed: 1",
    "seed: 1\n  seed: 2",
    "dtype: fp8",
    "dtype: [fp32, fp16]",
    "offload: 3",
    "eval_data_path: []",
    "data_path: {a: b}",
    "data_path: [null]",
    "data_path: [--seed, x]",
    'eval_data_path: "\\0"',
    'eval_data_path: ["a\\0b"]',
    "eval_data_path: ''",
    'eval_data_path: "\\ud800"',
    'tensorboard_path: "\\0"',
    "tensorboard_path: ''",
    'tensorboard_path: "a\\nb"',
    'tensorboard_path: "\\e[31m"',
    "<<: {seed: x}",
    "<<: 3",
    "seed: " + "[" * 5000,
    "seed: " + "9" * 5000,
    "x" * 10_000,
    "dry_run: 'no'",
    "data_weights: [x]",
    "data_weights: [1, 2, 3]",
    "seed: '--dtype'",
    "seed: ''",
    "help: true",
    f"seed: {BOMB}",
    f"eval_data_path: {BOMB}",
    b"seed: \xff\n",
    b"\x00\x01\x02",
    "seed: 1\n".encode("utf-16")[:-1],
    b"\xef\xbb\xbfsed: 1\n",
    "seed: 1\0\n",
    b"\x1f\x8b\x08\x00garbage",
)

BELOW_ZERO = (
    "unsup_coef",
    "kl_coef",
    "gamma",
    "lam",
    "max_grad_norm",
    "weight_decay",
    "actor_weight_decay",
    "critic_weight_decay",
    "learning_rate",
    "actor_learning_rate",
    "critic_learning_rate",
    "critic_pretrain_learning_rate",
    "lora_learning_rate",
    "actor_lora_learning_rate",
    "critic_lora_learning_rate",
    "ema_decay",
    "dropout",
    "lora_dropout",
)
NOT_ABOVE_ZERO = ("temperature", "lora_alpha", "clip_range", "value_clip_range", "score_clip", "held_out")
FINITE = (*BELOW_ZERO, "temperature", "lora_alpha", "held_out")
ANY_FINITE = ("reward_weights", "reward_model_weight", "length_penalty", "missing_eos_penalty")
SIZES = {
    1: ("per_device_train_batch_size", "gradient_accumulation_steps", "max_seq_len", "held_out"),
    2: (
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "max_seq_len",
        "held_out",
        "max_prompt_seq_len",
        "max_answer_seq_len",
    ),
    3: (
        "per_device_generation_batch_size",
        "generation_batches",
        "num_eval_prompts",
        "max_prompt_seq_len",
        "max_answer_seq_len",
        "profile_steps",
    ),
}
ROLES = ("actor", "critic", "reference", "reward")


@dataclass(frozen=True)
class Mistake:
    """One thing that is wrong, in a command line of `step` with these changed flags and words behind them."""

    kind: str
    step: int
    changes: dict = field(default_factory=dict)
    words: tuple[str, ...] = ()
    yaml: str | bytes | None = None


@dataclass(frozen=True)
class Case:
    """A mistake to be tried. occupied: whether the output folder holds a run that had just begun."""

    mistake: Mistake
    occupied: bool
    world: BadWorld

    @property
    def step(self) -> int:
        return self.mistake.step

    def words(self, output_dir: Path) -> list[str]:
        """The command line behind the program's name; the output folder is made what it has to be."""
        shutil.rmtree(output_dir, ignore_errors=True)
        flags = self.world.tiny.flags(self.step, **{"output_dir": output_dir, **self.mistake.changes})
        if self.occupied:
            flags.setdefault("resume", "auto")
            for name, text in STALE.items():
                (output_dir / name).parent.mkdir(parents=True, exist_ok=True)
                (output_dir / name).write_text(text)
        words = [*command_line(flags), *self.mistake.words]
        if self.mistake.yaml is not None:
            text = self.mistake.yaml
            self.world.settings.write_bytes(text if isinstance(text, bytes) else text.encode())
            words += ["--config", str(self.world.settings)]
        return words

    def problem(self, result: Result, output_dir: Path) -> str | None:
        """What is wrong with how the program ended, or None."""
        left = {name: text.decode(errors="replace") for name, text in snapshot(output_dir).items()}
        if output_dir.exists() != self.occupied or left != (STALE if self.occupied else {}):
            return f"something was written into the output folder (exit code {result.code}): {result.stderr[-300:]!r}"
        return message_problem(result)

    def __str__(self) -> str:
        wrong = command_line(self.mistake.changes) + list(self.mistake.words)
        text = " ".join(repr(word)[1:-1] for word in wrong) or repr(self.mistake.yaml)
        return f"{self.mistake.kind}, step {self.step}: {text if len(text) <= 120 else text[:117] + '...'}"


def message_problem(result: Result) -> str | None:
    """What is wrong with how a program ended that had one thing to say, or None."""
    printed = result.stdout + result.stderr
    if "Traceback" in printed:
        return f"a stack trace: {result.stderr.strip().splitlines()[-1][:300]!r}"
    if result.code != 2:
        return f"exit code {result.code}: {printed[-300:]!r}"
    messages = sum(line.startswith("error: ") for line in printed.splitlines())
    if messages != 1 or "error: " not in result.stderr:
        return f"{messages} messages: {printed[-300:]!r}"
    if result.stderr.count("\n") != 1 or not result.stderr.rstrip("\n").isprintable():
        return f"more than one clean line: {result.stderr[-300:]!r}"
    if result.stderr.rstrip()[-1] not in ".?":
        return f"no sentence that says what to do: {result.stderr[-300:]!r}"
    return None


def cases(world: BadWorld, count: int, seed: int) -> list[Case]:
    """So many cases, of every kind in turn while there are any."""
    rng = random.Random(seed)
    kinds: dict[str, list[Mistake]] = {}
    for mistake in every_mistake(world, rng):
        kinds.setdefault(mistake.kind, []).append(mistake)
    for found in kinds.values():
        rng.shuffle(found)
    turns = itertools.zip_longest(*kinds.values())
    taken = itertools.islice((mistake for turn in turns for mistake in turn if mistake is not None), count)
    return [Case(mistake, rng.random() < 0.5 and "output_dir" not in mistake.changes, world) for mistake in taken]


def every_mistake(world: BadWorld, rng: random.Random) -> Iterator[Mistake]:
    """All of them, step by step."""
    for step in PROGRAMS:
        yield from words_that_are_none(step, rng)
        yield from values_of_flags(step)
        yield from contradictions(step, world)
        yield from files(step, world)
        yield from models(step, world)
        for text in YAML:
            yield Mistake("YAML", step, yaml=text)


def words_that_are_none(step: int, rng: random.Random) -> Iterator[Mistake]:
    """Unknown and misspelt flags, words without a flag, flags without a value, flags left out."""
    names = [spec.name for spec in dataclasses.fields(PROGRAMS[step][1])]
    for name in names:
        spelt = _misspelt(name, rng)
        if spelt not in [*names, *PROGRAMS[step][1].old_flags]:
            yield Mistake("misspelt flag", step, words=(f"--{spelt}", "1"))
            yield Mistake("misspelt YAML key", step, yaml=f"{spelt}: 1\n")
    for words in (
        ("--",),
        ("---",),
        ("-",),
        ("stray",),
        ("-s", "1"),
        ("--", "x"),
        ("--seed", "1", "2"),
        ("=",),
        ("",),
        ("--=3",),
        ("--seed=",),
        ("--no-such-flag",),
        ("@file",),
        ("--seed", "--dtype"),
        ("--ünknown", "1"),
        ("--" + "x" * 5000,),
        ("--seed\n", "1"),
        ("--SEED", "1"),
        ("--see", "1"),
        ("-seed", "1"),
        ("--config",),
    ):
        yield Mistake("words", step, words=words)
    for name, hint in _flags(step):
        if hint is not bool:
            yield Mistake("no value", step, words=(f"--{name}",))
    models = ("actor_model_name_or_path", "critic_model_name_or_path") if step == 3 else ("model_name_or_path",)
    for name in ("output_dir", "data_path", *models):
        yield Mistake("left out", step, {name: None})


def values_of_flags(step: int) -> Iterator[Mistake]:
    """Values of a wrong type, and numbers out of range."""
    for name, hint in _flags(step):
        wrong = {int: NO_WHOLE_NUMBERS, float: NO_NUMBERS, bool: NO_TRUTHS, str: NO_NAMES}[hint]
        spec = PROGRAMS[step][1].__dataclass_fields__[name]
        if spec.metadata["choices"]:
            wrong = ("x", "", next(iter(spec.metadata["choices"])).upper() + " ")
        if name == "stop":  # these are texts, of any length
            wrong = ("",)
        for value in wrong:
            yield Mistake(f"no {hint.__name__}", step, words=(f"--{name}={value}",))
        numbers = [] if hint is not int else ["-1"]
        numbers += ["-1", "-1e-9", "-inf"] if name in BELOW_ZERO else []
        numbers += ["0", "-0.0", "-1", "-inf"] if name in NOT_ABOVE_ZERO else []
        numbers += ["inf"] if name in (*FINITE, *ANY_FINITE) else []
        numbers += ["nan", "-nan"] if hint is float else []
        for value in numbers:
            yield Mistake("out of range", step, words=(f"--{name}={value}",))
    for name in SIZES[step]:
        for value in ("1000000", "1" + "0" * 12, "1" + "0" * 40):
            yield Mistake("huge", step, {name: value})
    stages = ("actor_zero_stage", "critic_zero_stage") if step == 3 else ("zero_stage",)
    for name, value in itertools.product(stages, (4, -1, 33)):
        yield Mistake("out of range", step, {name: value})
    for value in (2**31, 2**63, 10**30):
        yield Mistake("out of range", step, {"seed": value})


def contradictions(step: int, world: BadWorld) -> Iterator[Mistake]:
    """Flags that do not go together."""
    none_for_this_step = ",".join("0" if number == step else "1" for number in (1, 2, 3))
    changes = [
        {"data_split": "2,4"},
        {"data_split": "a,b,c"},
        {"data_split": "0,0,0"},
        {"data_split": "1,-1,1"},
        {"data_split": "nan,1,1"},
        {"data_split": none_for_this_step},
        {"data_split": ["2,4,4", "1"]},
        {"data_split": "1,1,1", "data_path": world.folder / "three.jsonl"},
        {"data_weights": [1, 2]},
        {"data_weights": 0},
        {"data_weights": -1},
        {"data_weights": "nan"},
        {"data_weights": 1e-9},
        {"data_weights": "inf"},
        {"data_weights": [1, 1, 1]},
        {"report_to": "tensorbord"},
    ]
    if step == 3:
        changes += [
            {"ema_decay": 0.5},
            {"ema_device": "cpu"},
            {"enable_ema": True, "ema_decay": 1.5},
            {"test_stop_step": 3},
            {"enable_test_mode": True},
            {"offload": True},
            {"offload": True, "actor_zero_stage": 2},
            {"reward_weights": 2},
            {"reward_url": "10.0.0.7:8000"},
            {"reward_url_columns": "answer"},
            {"unsupervised_dataset_config_name": "x"},
            {"actor_dropout": 0.1},
            {"critic_dropout": 0.5},
            {"only_optimize_lora": True},
            {"only_optimize_lora": True, "actor_lora_dim": 0},
            {"actor_lora_module_name": "layers."},
            {"critic_lora_learning_rate": 1e-4},
            {"lora_alpha": 2},
            {"actor_lora_dim": 8, "actor_lora_module_name": "layrs."},
            {"critic_lora_dim": 8, "critic_lora_module_name": "decoder.layers."},
            {"actor_lora_dim": 8, "lora_target_modules": ["q_prjo", "w"]},
            {"actor_lora_dim": 8, "lora_target_modules": ["all-linear", "lm_haed"]},
            {"actor_lora_dim": 8, "actor_lora_module_name": "q_proj", "lora_target_modules": "q_proj"},
            {"actor_lora_dim": 8, "lora_dropout": 0.1},
            {"actor_lora_dim": 8, "actor_learning_rate": 0},
            {"actor_lora_dim": 8, "set": "hydra_layers=1"},
            {"critic_lora_dim": 8, "dialect": "trl_rloo", "critic_lora_module_name": "layers."},
            {"share_trunk": True},
            {"enable_mixed_precision_lora": True},
            {"inference_tp_size": 0},
            {"inference_tp_size": 2, "rollout_backend": "zero3"},
            {"deepspeed_config": "x.json"},
            {"per_device_training_batch_size": 3, "gradient_accumulation_steps": 1},
            {"per_device_training_batch_size": 8, "gradient_accumulation_steps": 1},
            {"gradient_accumulation_steps": 3},
            {"per_device_train_batch_size": 4},
            {"generation_batch_numbers": 1},
            {"per_device_mini_train_batch_size": 4},
            {"max_prompt_seq_len": 60, "max_answer_seq_len": 5},
            {"per_device_generation_batch_size": 33},
            {"dialect": "default", "reward_model_weight": 2, "critic_model_name_or_path": None},
            {"actor_ds_config": world.stage2, "actor_zero_stage": 3},
            {"actor_ds_config": world.stage2, "offload": True},
            {"reference_ds_config": world.stage2},
            {"reward_ds_config": world.stage2},
            {"critic_ds_config": world.stage2, "critic_zero_stage": 0},
            {"num_eval_prompts": 40},
        ]
    else:
        changes += [
            {"offload": True},
            {"offload": True, "ds_config": world.stage2},
            {"zero_stage": 3, "ds_config": world.stage2},
            {"per_device_train_batch_size": 33},
            {"gradient_accumulation_steps": 9},
            {"max_seq_len": 65},
            {"max_seq_len": 1},
            {"held_out": 40},
            {"held_out": 1.5},
            {"held_out": 0.001},
            {"only_optimize_lora": True},
            {"lora_module_name": "layers."},
            {"lora_dim": 8, "lora_module_name": "layrs."},
            {"lora_dim": 8, "lora_target_modules": "w"},
            {"lora_dim": 8, "lora_dropout": 1},
            {"lora_dim": 8, "learning_rate": 0},
            {"dropout": 1},
            {"no_bf16_to_fp32_loss": True},
            {"deepspeed_config": "x.json"},
        ]
    for change in changes:
        yield Mistake("contradiction", step, change)


def _flags(step: int) -> list[tuple[str, type]]:
    """(name, kind of its value) of every flag."""
    hints = typing.get_type_hints(PROGRAMS[step][1])
    return [(spec.name, _kind(hints[spec.name])) for spec in dataclasses.fields(PROGRAMS[step][1])]


def _kind(hint) -> type:
    if isinstance(hint, types.UnionType):
        hint = next(kind for kind in typing.get_args(hint) if kind is not types.NoneType)
    return typing.get_args(hint)[0] if typing.get_origin(hint) is list else hint


def _misspelt(name: str, rng: random.Random) -> str:
    place = rng.randrange(len(name))
    return rng.choice(
        [
            name[:place] + name[place + 1 :],
            name[:place] + name[place] + name[place:],
            name.replace("_", "-"),
            name + "s",
            name[:place] + "q" + name[place:],
        ]
    )


def files(step: int, world: BadWorld) -> Iterator[Mistake]:
    """Data, output folders, checkpoints, DeepSpeed JSON, reward functions, and names that are none."""
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
    for path in (world.folder / "empty.jsonl", world.folder / "loop.jsonl", "/dev/null/boards", "/proc/boards"):
        yield Mistake("output folder", step, {"tensorboard_path": path})
    names = [f"{role}_ds_config" for role in ROLES] if step == 3 else ["ds_config"]
    for path, name in itertools.product(world.ds_configs, names):
        yield Mistake("DeepSpeed JSON", step, {name: path, "dtype": "fp32"})
    if step == 3:
        for path in (*world.states, world.folder / "nowhere", world.folder / "empty.jsonl", world.tiny.folder):
            yield Mistake("checkpoint", step, {"resume": path})
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
