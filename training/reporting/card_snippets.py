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
SCORER = """import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(FOLDER)
model = AutoModelForSequenceClassification.from_pretrained(FOLDER)
text = "PROMPT" + "RESPONSE" + tokenizer.eos_token
inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
with torch.no_grad():
    score = model(**inputs).logits[0, 0].item() + model.config.score_offset
print(score)"""
SCORING_ADAPTER = """import json
from pathlib import Path

import torch
from peft import AutoPeftModelForSequenceClassification
from transformers import AutoTokenizer

settings = json.loads((Path(FOLDER) / "score.json").read_text())
tokenizer = AutoTokenizer.from_pretrained(FOLDER)
model = AutoPeftModelForSequenceClassification.from_pretrained(FOLDER, num_labels=1)
model.config.pad_token_id = settings["pad_token_id"]
text = "PROMPT" + "RESPONSE" + tokenizer.eos_token
inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
with torch.no_grad():
    score = model(**inputs).logits[0, 0].item() + settings["score_offset"]
print(score)"""
CRITIC = """It is what `--critic_model_name_or_path` of another run's step 3 takes, from this folder on a disk."""


def snippet(role: str, adapter: bool) -> str:
    """For a model of this role, whole or an adapter alone."""
    if role.startswith("critic"):
        return CRITIC
    scores = role == "reward"
    code = (SCORING_ADAPTER if adapter else SCORER) if scores else (ADAPTER if adapter else LANGUAGE_MODEL)
    return f'```python\nFOLDER = "."  # this folder, or its name on the Hub\n{code}\n```'
