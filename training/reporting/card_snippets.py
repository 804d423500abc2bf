"""How a saved model is loaded, as Markdown for its card: Python that runs as it stands, in the model's folder."""

LANGUAGE_MODEL = """from transformers import pipeline

generate = pipeline("text-generation", FOLDER)
print(generate("PROMPT", max_new_tokens=64, do_sample=True)[0]["generated_text"])"""
ADAPTER = """from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(FOLDER)
model = AutoPeftModelForCausalLM.from_pretrained(FOLDER)
inputs = tokenizer("PROMPT", return_tensors="pt", return_token_type_ids=False)
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=64, do_sample=True)[0]))"""
_SCORES = """texts = ["PROMPT" + "RESPONSE" + tokenizer.eos_token]  # or several
inputs = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt", return_token_type_ids=False)
last = inputs["attention_mask"].sum(1) - 1
with torch.no_grad():
    by_token = model.score(model.base_model(**inputs)[0])[:, :, 0]
scores = by_token[torch.arange(len(texts)), last] + offset
print(scores.tolist())"""
SCORER = f"""import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(FOLDER)
model = AutoModelForSequenceClassification.from_pretrained(FOLDER)
offset = model.config.score_offset
{_SCORES}"""
SCORING_ADAPTER = f"""import json
from pathlib import Path

import torch
from peft import AutoPeftModelForSequenceClassification
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(FOLDER)
model = AutoPeftModelForSequenceClassification.from_pretrained(FOLDER, num_labels=1).get_base_model()
offset = json.loads((Path(FOLDER) / "score.json").read_text())["score_offset"]
{_SCORES}"""
PADDING = """The score stands at the last token that is not padding, EOS included: this code reads it there, of any
number of texts. The model's own `logits` (the score without its offset) are right for one text at a time. For several
they are right only where the tokenizer does not pad with EOS. Where it does, `pad_token_id` is null on purpose: with
EOS there, `logits` would be read one token before EOS, without a word."""
CRITIC = """It is what `--critic_model_name_or_path` of another run's step 3 takes, from this folder on a disk."""


def snippet(role: str, adapter: bool) -> str:
    """For a model of this role, whole or an adapter alone."""
    if role.startswith("critic"):
        return CRITIC
    scores = role == "reward"
    code = (SCORING_ADAPTER if adapter else SCORER) if scores else (ADAPTER if adapter else LANGUAGE_MODEL)
    text = f'```python\nFOLDER = "."  # this folder, or its name on the Hub\n{code}\n```'
    return f"{text}\n\n{PADDING}" if scores else text
