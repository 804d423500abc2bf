"""Values of flags and texts of YAML files that are none, for tests/e2e/bad_input.py."""

import itertools

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
    "~nobody/x",
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
    "overwrite_output_dir: 'no'",
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
