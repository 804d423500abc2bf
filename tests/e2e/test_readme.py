"""The README's Python example runs as it stands there."""

import re
import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer

from engine.models.loading import new_scorer
from engine.models.saving import save_model
from scripts.harness.weights import full_state
from training.tools.toy import model as builtin_model
from training.tools.toy import reviews as builtin_reviews

README = Path(__file__).parents[2] / "README.md"


def test_the_python_example_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = ("--sft", "50", "--pairs", "20", "--prompts", "20", "--eval_prompts", "20")
    assert builtin_reviews.main(["make", "--output_dir", "data", *sizes]) == 0
    assert builtin_model.main(["--data", "data/sft.jsonl", "--output_dir", "sft", "--hidden_size", "32"]) == 0
    scorer = new_scorer("sft", torch.float32, pad_token_id=0, seed=0)
    save_model(scorer, full_state(scorer.model), AutoTokenizer.from_pretrained("sft"), "reward")

    example = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL).group(1)
    Path("example.py").write_text(example)
    ended = subprocess.run([sys.executable, "example.py"], capture_output=True, text=True, timeout=300)

    assert ended.returncode == 0, ended.stderr
    scores = [float(line.split()[-1]) for line in ended.stdout.splitlines() if line.startswith("score")]
    assert len(scores) == 3 and all(score == score for score in scores), ended.stdout
