"""Files and folders that do not work: data, models, DeepSpeed JSON, reward functions, checkpoints.

    world = BadWorld(tmp_path / "bad", tiny)
    world.folder / "broken.jsonl"

`world.data` and its like say what each thing is for; what a message says of some of them, test_bad_input.py knows.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow
from pyarrow import parquet
from safetensors.torch import load_file, save_file

from scripts.harness.programs import Tiny

ROW = {"prompt": "w04", "response": "w05", "chosen": "w06", "rejected": "w07"}
LINE = json.dumps(ROW) + "\n"
OTHER = json.dumps({"question": "w04", "answer": "w05"}) + "\n"
MANY = 24  # rows: enough to hold some out

DATA: dict[str, str | bytes] = {
    "empty.jsonl": "",
    "blank.jsonl": "\n \n\t\n",
    "broken.jsonl": LINE * 2 + "prompt: 3\n" + LINE * MANY,
    "other_column.jsonl": LINE + OTHER + LINE * MANY,
    "three.jsonl": LINE * 3,
    "number.jsonl": "".join(json.dumps({**ROW, "prompt": 7, "chosen": 7}) + "\n" for _ in range(MANY)),
    "null.jsonl": json.dumps(dict.fromkeys(ROW)) + "\n" + LINE * MANY,
    "lists.jsonl": "[1, 2]\n" * MANY,
    "numbers.jsonl": "3\n" * MANY,
    "cut.jsonl": LINE * MANY + LINE[:20],
    "latin1.jsonl": (LINE * MANY + '{"prompt": "caf\xe9"}\n').encode("latin-1"),
    "utf16.jsonl": (LINE * MANY).encode("utf-16"),
    "nul.jsonl": LINE * MANY + "\0\n",
    "half_a_pair.jsonl": LINE * MANY + LINE.replace("w0", "\\ud800"),
    "blank_texts.jsonl": LINE * MANY + json.dumps(dict.fromkeys(ROW, " ")) + "\n",
    "deep.jsonl": LINE * MANY + "[" * 200_000 + "\n",
    "digits.jsonl": LINE * MANY + "9" * 5000 + "\n",
    "messages.jsonl": json.dumps(
        {"messages": [{"role": "user", "content": "w04"}, {"role": "assistant", "content": "w05"}]}
    )
    + "\n",
    "object.json": '{"rows": []}',
    "broken.json": "[" + LINE,
    "number.json": "3",
    "numbers.json": "[1, 2, 3]",
    "no_rows.json": "[]",
    "empty.json": "",
    "empty.csv": "",
    "header.csv": "prompt,response,chosen,rejected\n",
    "twice.csv": "prompt,prompt\na,b\n",
    "cells.csv": "prompt,response,chosen,rejected\n" + "a,b,c,d\n" * MANY + "a,b,c,d,e\n",
    "quote.csv": 'prompt,response,chosen,rejected\n"a,b,c,d\n' * MANY,
    "other.csv": "question,answer\n" + "a,b\n" * MANY,
    "empty.parquet": "",
    "garbage.parquet": b"PAR1" + bytes(range(256)) + b"PAR1",
    "rows.txt": LINE * MANY,
    "rows": LINE * MANY,
    "rows.jsonl.gz": b"\x1f\x8b\x08garbage",
    "rows.JSONLX": LINE * MANY,
}
DS_CONFIGS = {
    "unknown_key": '{"zero_optimisation": {"stage": 2}}',
    "stage2": '{"zero_optimization": {"stage": 2}}',
    "clipping": '{"gradient_clipping": 5}',
    "empty": "",
    "cut": '{"zero_optimization": {',
    "a_list": "[]",
    "text": '"x"',
    "unknown_zero_key": '{"zero_optimization": {"stages": 2}}',
    "stage_text": '{"zero_optimization": {"stage": "two"}}',
    "stage7": '{"zero_optimization": {"stage": 7}}',
    "stage_half": '{"zero_optimization": {"stage": 1.5}}',
    "stage_list": '{"zero_optimization": {"stage": [2]}}',
    "zero_list": '{"zero_optimization": []}',
    "zero_number": '{"zero_optimization": 3}',
    "batch": '{"train_batch_size": 3}',
    "micro_batch": '{"train_micro_batch_size_per_gpu": 3}',
    "accumulation": '{"gradient_accumulation_steps": 3}',
    "fp16": '{"fp16": {"enabled": true}}',
    "bf16": '{"bf16": {"enabled": true}}',
    "fp16_list": '{"fp16": []}',
    "fp16_key": '{"fp16": {"loss_scales": 1}}',
    "optimizer": '{"optimizer": {"type": "Adam"}}',
    "scheduler": '{"scheduler": {"type": "WarmupLR"}}',
    "no_grad_norm": '{"zero_optimization": {"compute_grad_norm": false}}',
    "bucket_text": '{"zero_optimization": {"stage": 0, "reduce_bucket_size": "big"}}',
    "bucket_negative": '{"zero_optimization": {"stage": 0, "reduce_bucket_size": -5}}',
    "offload_device": '{"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "moon"}}}',
    "offload_list": '{"zero_optimization": {"stage": 0, "offload_param": [1]}}',
    "nan": '{"gradient_clipping": NaN}',
    "utf16": '{"zero_optimization": {}}',
}
REWARD_FUNCTIONS = {
    "raises": "raise RuntimeError('on import')\n",
    "exits": "import sys\nsys.exit(0)\n",
    "no_syntax": "def score(:\n",
    "imports": "import no_such_module\n",
    "number": "score = 3\n",
    "one_argument": "def score(prompts):\n    return 0\n",
    "three_arguments": "def score(prompts, responses, more):\n    return 0\n",
    "nothing": "",
}
STATES = {
    "state_alone": '{"steps_done": 2, "models": {}, "ema": false, "identity": {}, "settings": {}}',
    "state_broken": '{"steps_done": 2',
    "state_list": "[]",
    "state_empty": "{}",
}


class BadWorld:
    """A folder of things that do not work, beside a `Tiny` of things that do."""

    def __init__(self, folder: Path, tiny: Tiny):
        self.folder, self.tiny = folder, tiny
        self.settings = folder.with_name(f"{folder.name}_settings.yaml")  # to be written again and again
        folder.mkdir(parents=True, exist_ok=True)
        self.data = [*self._files(DATA), *self._odd_data(), folder / "absent.jsonl", folder / "empty.jsonl" / "x.jsonl"]
        files = self._files({f"{name}.json": text for name, text in DS_CONFIGS.items()})
        self.stage2 = folder / "stage2.json"  # a mistake beside a flag that says another stage
        self.ds_configs = [
            *(path for path in files if path != self.stage2),
            folder / "absent.json",
            folder / "empty_folder",
        ]
        (folder / "utf16.json").write_bytes(DS_CONFIGS["utf16"].encode("utf-16"))
        self.reward_functions = [
            f"{path}:score"
            for path in self._files({f"reward_{name}.py": text for name, text in REWARD_FUNCTIONS.items()})
        ]
        self.states = [self._state(name, text) for name, text in STATES.items()]
        self.no_models = [
            folder / "absent",
            folder / "empty_folder",
            folder / "state_alone",
            folder / "broken.jsonl",
            folder / "empty.jsonl",
            folder / "garbage.parquet",
            folder / "unknown_key.json",
        ]
        self.language_models = [self._broken("sft", name) for name in (*MODEL_BREAKS, *TOKENIZER_BREAKS)]
        self.reward_models = [self._broken("reward", name) for name in (*MODEL_BREAKS, *REWARD_BREAKS)]
        self.other_words = self._broken("sft", "other_tokenizer")  # a good model, but not beside tiny's reward model

    def _files(self, texts: dict[str, str | bytes]) -> list[Path]:
        for name, text in texts.items():
            (self.folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        return [self.folder / name for name in texts]

    def _odd_data(self) -> list[Path]:
        """Parquet files of other columns and types, folders of many kinds, links into nothing."""
        folder = self.folder
        parquet.write_table(pyarrow.table({"question": ["w04"] * MANY}), folder / "other.parquet")
        parquet.write_table(pyarrow.table({name: [1] * MANY for name in ROW}), folder / "integers.parquet")
        parquet.write_table(
            pyarrow.table({name: pyarrow.array([], pyarrow.string()) for name in ROW}), folder / "no_rows.parquet"
        )
        folders = {
            "empty_folder": {},
            "texts_folder": {"readme.txt": "w04"},
            "saved": {"dataset_dict.json": "{"},
            "saved_state": {"state.json": "{}"},
            "mixed": {"train.jsonl": LINE * MANY, "more.csv": "a,b\n"},
            "other_folder": {"train.jsonl": OTHER * MANY},
            "broken_folder": {"train.jsonl": LINE[:9]},
            "splits": {"one.jsonl": "", "two.jsonl": ""},
            "named.jsonl": {"train.jsonl": OTHER},
        }
        for name, files in folders.items():
            (folder / name).mkdir()
            for file, text in files.items():
                (folder / name / file).write_text(text)
        (folder / "loop.jsonl").symlink_to("loop.jsonl")
        (folder / "dangling.jsonl").symlink_to("nowhere.jsonl")
        return [
            folder / name
            for name in (
                *folders,
                "other.parquet",
                "integers.parquet",
                "no_rows.parquet",
                "loop.jsonl",
                "dangling.jsonl",
            )
        ]

    def _state(self, name: str, text: str) -> Path:
        (self.folder / name).mkdir()
        (self.folder / name / "trainer_state.json").write_text(text)
        return self.folder / name

    def _broken(self, model: str, name: str) -> Path:
        folder = self.folder / f"{model}_{name}"
        shutil.copytree(self.tiny.folder / model, folder)
        {**MODEL_BREAKS, **TOKENIZER_BREAKS, **REWARD_BREAKS}[name](folder)
        return folder


def _cut(file: str) -> Callable[[Path], None]:
    """Leaves the first half of a file."""

    def cut(folder: Path) -> None:
        content = (folder / file).read_bytes()
        (folder / file).write_bytes(content[: len(content) // 2])

    return cut


def _removed(*files: str) -> Callable[[Path], None]:
    return lambda folder: [(folder / file).unlink(missing_ok=True) for file in files]


def _replaced(file: str, content: str) -> Callable[[Path], None]:
    return lambda folder: (folder / file).write_text(content)


def _changed(file: str, **values) -> Callable[[Path], None]:
    """Sets keys of a JSON file."""
    return lambda folder: (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | values))


def _fewer_words(folder: Path) -> None:
    """A whole model, with 48 embeddings."""
    _changed("config.json", vocab_size=48)(folder)
    weights = load_file(folder / "model.safetensors")
    weights["transformer.wte.weight"] = weights["transformer.wte.weight"][:48].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _two_labels(folder: Path) -> None:
    """A whole classifier, whose head has two rows."""
    _changed("config.json", num_labels=2)(folder)
    weights = load_file(folder / "model.safetensors")
    weights["score.weight"] = weights["score.weight"].repeat(2, 1)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _other_words(folder: Path) -> None:
    words = folder / "tokenizer.json"
    words.write_text(words.read_text().replace("w63", "w64"))


TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
MODEL_BREAKS = {
    "no_config": _removed("config.json"),
    "cut_config": _cut("config.json"),
    "empty_config": _replaced("config.json", "{}"),
    "list_config": _replaced("config.json", "[]"),
    "unknown_type": _changed("config.json", model_type="parrot"),
    "encoder": _changed("config.json", model_type="bert"),
    "pairs": _changed("config.json", model_type="t5"),
    "number_type": _changed("config.json", model_type=3),
    "text_size": _changed("config.json", n_layer="two"),
    "no_weights": _removed("model.safetensors"),
    "cut_weights": _cut("model.safetensors"),
    "empty_weights": _replaced("model.safetensors", ""),
    "text_weights": _replaced("model.safetensors", "w04 w05 w06" * 9),
    "wide": _changed("config.json", n_embd=64),
    "no_heads": _changed("config.json", n_head=0),
    "few_tokens": _changed("config.json", vocab_size=48),
    "cut_words": _cut("tokenizer.json"),
    "no_words": _replaced("tokenizer.json", "{}"),
    "list_words": _replaced("tokenizer.json", "[]"),
}
TOKENIZER_BREAKS = {
    "no_tokenizer": _removed(*TOKENIZER_FILES),
    "cut_tokenizer_config": _cut("tokenizer_config.json"),
    "list_tokenizer_config": _replaced("tokenizer_config.json", "[]"),
    "no_end": _changed("tokenizer_config.json", eos_token=None, pad_token=None),
}
REWARD_BREAKS = {
    "two_labels": _two_labels,
    "other_tokenizer": _other_words,
    "few_words": _fewer_words,
}
