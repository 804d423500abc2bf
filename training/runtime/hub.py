"""Writes model cards, and uploads the trained model to the Hugging Face Hub at the end of a run.

    add_card(folder, output_dir, "actor")                # when the model is saved
    renew_cards(output_dir, {"actor": folder})           # at the run's end, with its last evaluation
    push(args, {"actor": folder})

A model card is the README.md of a saved model. It is made from run.json and metrics.jsonl. Since it may be published,
it names only models and data that are on the Hub; it calls all others local. It has no paths, file names, commands,
host names or names of the user's functions; these are in run.json only. A card ends with the hash of the text above it.
If the hash does not match, the user has edited the card, and it is kept.

If the upload fails, the model is still saved on the disk. The run's exit code stays 0 then, since code 1 would make
schedulers run the whole command again. A warning contains the command that repeats the upload.
"""

import contextlib
import hashlib
import json
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

from engine import distributed
from engine.algorithms import get_dialect
from engine.errors import UserError
from engine.files import read_text
from engine.models.places import ADAPTER_CONFIG, base_of, is_adapter, one_line
from engine.whole_files import write_whole
from training.config.flags import HubFlags
from training.data.sources import DEEPSPEED_CHAT_FILES, is_path, name_and_split
from training.reporting.health import FINE
from training.reporting.records import METRICS_FILE, RUN_FILE, git_state, read_metrics, read_run_record, versions
from training.reporting.standard_errors import ENDINGS, with_error
from training.reporting.summary import EVALUATED, RunSummary
from training.runtime.models import kept_settings
from training.runtime.output_folder import model_files
from training.runtime.processes import phase
from training.runtime.stopping import note_unwritten

CARD = "README.md"
TEMPLATE = """\
---
{front}
---

# {title}

{about}

## Made from

{origins}

## How

{how}

## Held out

{held_out}

## How to load it

{loading}

## Limits

{limits}

## Made with

{made_with}
"""


class Role(NamedTuple):
    """The description of a kind of model: the card's title, a sentence or two, and its tags and task on the Hub."""

    title: str
    about: str
    tags: tuple[str, ...]
    task: str | None = "text-generation"


ROLES = {
    "sft": Role(
        "A supervised fine-tuned language model",
        "Fine-tuned on texts, or on prompts and their responses: step 1 of RLHF.",
        ("sft",),
    ),
    "reward": Role(
        "A reward model",
        "Scores a prompt with a response by one number; trained on pairs of responses, of which one was preferred: "
        "step 2 of RLHF. The score is the classifier's plus `score_offset` of config.json.",
        ("reward-model",),
        "text-classification",
    ),
    "actor": Role(
        "A language model trained by PPO",
        "The policy of a PPO run, which maximised a reward and was held to its SFT model by a KL penalty.",
        ("ppo",),
    ),
    "actor_ema": Role(
        "A language model trained by PPO: the moving average of its weights",
        "The exponential moving average over the training of a PPO run's policy.",
        ("ppo",),
    ),
    "critic": Role(
        "A critic of PPO",
        "Estimates what reward is still to come at each token. It gives no scores: it is no reward model.",
        ("ppo", "critic"),
        None,
    ),
    "critic_pretrained": Role(
        "A critic, pretrained before the first step of PPO",
        "Estimates what reward is still to come at each token, of the SFT model's own responses.",
        ("ppo", "critic"),
        None,
    ),
    "merged": Role(
        "A language model on the line through its SFT model and what was trained from it",
        "Merged from the weights of other models, not trained.",
        ("merge",),
    ),
}

# Examples of how a saved model is loaded. The Python code runs in the model's folder as it is.
GENERATE = """from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(FOLDER)
model = AutoModelForCausalLM.from_pretrained(FOLDER)
prompt = tokenizer("PROMPT", return_tensors="pt", return_token_type_ids=False)
answer = model.generate(**prompt, max_new_tokens=64, do_sample=True)
# Decoded together: some tokenizers lose the space before the answer where it is decoded alone, as pipeline() does.
print(tokenizer.decode(answer[0], skip_special_tokens=True))"""
_SCORES = """texts = ["PROMPT" + "RESPONSE" + tokenizer.eos_token]  # or several
inputs = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt", return_token_type_ids=False)
last = inputs["attention_mask"].sum(1) - 1
with torch.no_grad():
    by_token = model.score(model.base_model(**inputs)[0])[:, :, 0]
scores = by_token[torch.arange(len(texts)), last] + offset
print(scores.tolist())"""
SCORE = f"""import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(FOLDER)
model = AutoModelForSequenceClassification.from_pretrained(FOLDER)
offset = model.config.score_offset
{_SCORES}"""
SCORE_BY_ADAPTER = f"""import json
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
CRITIC = "It is what `--critic_model_name_or_path` of another run's step 3 takes, from this folder on a disk."

MODEL_FLAGS = {
    "model_name_or_path": "started from",
    "actor_model_name_or_path": "SFT model",
    "critic_model_name_or_path": "critic began as",
    "reward_model_name_or_path": "reward model",
}
DATA_FLAGS = {"data_path": "data", "unsupervised_dataset_name": "texts for mixed pretraining"}
SHOWN_FLAGS = (
    *("max_seq_len", "max_prompt_seq_len", "max_answer_seq_len", "per_device_train_batch_size"),
    *("per_device_generation_batch_size", "generation_batches", "per_device_training_batch_size"),
    *("gradient_accumulation_steps", "num_train_epochs", "learning_rate", "lr_scheduler_type", "num_warmup_steps"),
    *("weight_decay", "zero_stage", "actor_zero_stage", "critic_zero_stage", "enable_ema", "lora_dim"),
    *("actor_lora_dim", "critic_lora_dim", "only_optimize_lora", "critic_pretrain_steps", "pairwise_loss"),
    *("normalization_samples", "dtype", "seed"),
)
"""The flags that a card lists, if they were given and are not 0."""
HELD_OUT = {
    "sft": (("loss, nats a token", "loss"), ("perplexity", "perplexity")),
    "reward": (("accuracy on pairs", "accuracy"), ("loss, nats a pair", "pair_loss"), ("margin", "margin")),
    "ppo": EVALUATED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """The facts from which a card is made.

    start: the last entry of run.json. rows: the rows of metrics.jsonl. steps: number of steps for which the model was
        trained.
    known: {path: Hub name of the model from which it was trained} of models on the disk, as far as this is known.
    """

    start: Mapping
    rows: Sequence[Mapping] = ()
    steps: int | None = None
    known: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, output_dir: Path, steps: int | None = None) -> "RunFacts | None":
        """The facts about the run in this folder; None if it has no run.json. steps: the last step that counts; None
        for the whole run.

        Raises: OSError; UserError if run.json is not a record of a run.
        """
        if not (output_dir / RUN_FILE).is_file():
            return None
        start, metrics = read_run_record(output_dir / RUN_FILE)[-1], output_dir / METRICS_FILE
        rows = read_metrics(metrics) if metrics.is_file() else []
        rows = [row for row in rows if steps is None or row["step"] <= steps]
        known = known_names([start["flags"].get(name) for name in MODEL_FLAGS])
        return cls(start=start, rows=rows, steps=steps, known=known)

    @property
    def kind(self) -> str:
        """The kind of the run: sft, reward or ppo."""
        if "actor_model_name_or_path" in self.start["flags"]:
            return "ppo"
        return "reward" if "pairwise_loss" in self.start["flags"] else "sft"


def model_card(run: RunFacts, name: str, kept: str = "") -> str:
    """The text of the card of the model that the run saves in the folder `name` ("." for the output folder itself).
    kept: its `kept_settings`."""
    role, adapter = name.removesuffix("_adapter") if run.kind == "ppo" else run.kind, name.endswith("adapter")
    flags = run.start["flags"]
    data = hub_names(name_and_split(path)[0] for flag in DATA_FLAGS for path in _listed(flags.get(flag)))
    start = flags.get("model_name_or_path") or flags["actor_model_name_or_path"]
    base = [] if role.startswith("critic") else hub_names([start], run.known)
    about = ROLES[role].about + (" This folder holds the adapter alone; peft loads its base with it." * adapter)
    return TEMPLATE.format(
        front=_front_matter(ROLES[role], base[0] if base else None, "finetune", adapter, data),
        title=ROLES[role].title + ", LoRA adapter" * adapter,
        about=about,
        origins="\n".join(_origins(run)),
        how="\n".join(_how(run)),
        held_out="\n".join(_held_out(run, averaged=role == "actor_ema")),
        loading=loading(ROLES[role].task, adapter),
        limits="\n".join(f"- {text}" for text in _limits(run, role, kept)),
        made_with=_made_with(run.start.get("versions") or {}, run.start.get("git")),
    )


def merge_card(
    source: Mapping, versions: Mapping[str, str | None], git: Mapping | None, known: Mapping[str, str] | None = None
) -> str:
    """The card of a merged model.

    source: the content of merged_from.json, which training.merge writes. versions, git: as in run.json. known: as in
    RunFacts.
    """
    sft, trained, measured = source["sft"], source["trained"], source.get("measured")
    held_out = "Not measured."
    if measured:
        score, kl = (with_error(measured[name], measured.get(f"{name}_se")) for name in ("score", "kl"))
        held_out = (
            f"| | |\n| --- | --- |\n| score | {score} |\n| KL to the SFT model, nats a response | {kl} |\n\n"
            "± is one standard error. Scores are of the reward that chose it, in its own units."
        )
    base = hub_names([sft, *trained], known) or None
    origins = [("SFT model", sft), *(("trained from it", path) for path in trained)]
    return TEMPLATE.format(
        front=_front_matter(ROLES["merged"], base, "merge"),
        title=ROLES["merged"].title,
        about=ROLES["merged"].about,
        origins="\n".join(f"- {label}: {publicly(path, 'model', known)}" for label, path in origins),
        how=f"SFT model + {source['scale']:g} x the {source['method']} change of {len(trained)}.",
        held_out=held_out,
        loading=loading(ROLES["merged"].task, adapter=False),
        limits="- The licence and the limits of the models that it was made from are its own, too. None is given here.",
        made_with=_made_with(versions, git),
    )


def _front_matter(
    role: Role, base: str | list[str] | None, relation: str, adapter: bool = False, data: Sequence[str] = ()
) -> str:
    found: dict[str, Any] = {"library_name": "peft" if adapter else "transformers"}
    found["tags"] = ["rlhf", *role.tags, *(["lora"] if adapter else [])]
    if role.task:
        found["pipeline_tag"] = role.task
    if base:
        found |= {"base_model": base, "base_model_relation": "adapter" if adapter else relation}
    if data:
        found["datasets"] = list(data)
    return huggingface_hub.ModelCardData(**found).to_yaml()


def _origins(run: RunFacts) -> Iterator[str]:
    flags = run.start["flags"]
    for name, label in MODEL_FLAGS.items():
        if flags.get(name) is not None:
            yield f"- {label}: {publicly(flags[name], 'model', run.known)}"
    if flags.get("reward_function"):
        yield "- reward: by a function, alone or beside the model"
    for name, label in DATA_FLAGS.items():
        for path in _listed(flags.get(name)):
            yield f"- {label}: {publicly(path, 'data')}"


def _how(run: RunFacts) -> Iterator[str]:
    dialect = run.start["dialect"] if run.kind == "ppo" else None
    if dialect:
        yield f"Dialect `{dialect['name']}`{_departures(dialect)}.\n"
    last = run.rows[-1] if run.rows else {}
    machine = run.start["machine"]
    yield "| | |\n| --- | --- |"
    yield f"| steps | {last.get('step', 0) if run.steps is None else run.steps} |"
    yield f"| {'responses' if dialect else 'examples'} learned from | {last.get('samples', 0)} |"
    yield f"| ranks | {machine['world_size']}, {machine['accelerator']} |"
    for name in SHOWN_FLAGS:
        value = run.start["flags"].get(name)
        if value not in (None, False) and (value or not name.endswith("lora_dim")):
            yield f"| `{name}` | {value} |"
    if dialect:
        trained = [row for row in run.rows if "objective/kl_coef" in row]
        for label, name in (("KL coefficient", "kl_coef"), ("KL of a step's responses, nats a response", "kl")):
            values = [row[f"objective/{name}"] for row in trained if f"objective/{name}" in row]
            if values:
                yield f"| {label}, first and last | {values[0]:.4g}, {values[-1]:.4g} |"
        for name in ("actor_lr", "critic_lr", "ppo_epochs", "mini_batches", "samples_per_prompt"):
            yield f"| {name} | {dialect[name]} |"


def _departures(resolved: Mapping) -> str:
    """Text that lists the fields in which the run's dialect differs from the dialect of that name."""
    try:
        named = get_dialect(resolved["name"])
    except UserError:
        return ", one of the run's own"

    def plain(value: object) -> object:
        return list(value) if isinstance(value, tuple) else value  # the form that JSON gives it

    changed = [
        f"`{name}={value}` ({getattr(named, name)})"
        for name, value in resolved.items()
        if hasattr(named, name) and plain(getattr(named, name)) != plain(value)
    ]
    return f", but (the dialect's in brackets) {', '.join(changed)}" if changed else ", as it is"


def _held_out(run: RunFacts, averaged: bool) -> Iterator[str]:
    """The lines of a table of held-out metrics before the first step and after the last one. averaged: whether the
    metrics of the averaged weights are shown."""
    measured = [row for row in run.rows if any(n.startswith("eval/") and not n.endswith(ENDINGS) for n in row)]
    first = next((row for row in measured if row["step"] == 0), {})
    last = next((row for row in reversed(measured) if row["step"] > 0), {})
    if not measured:
        yield "Not measured."
        return

    def number(row: Mapping, name: str) -> str:
        sign = "+" if name.endswith("_change") else ""
        return with_error(row[name], row.get(f"{name}_se"), sign=sign) if name in row else ""

    other_reward = RunSummary.from_metrics(run.rows).other_reward
    yield "| | before | after | change |\n| --- | --- | --- | --- |"
    for label, key in HELD_OUT[run.kind]:
        before = "" if other_reward and key == "score" else number(first, f"eval/{key}")
        after = number(last, f"eval/{'ema_' * averaged}{key}")
        change = "" if averaged else number(last, f"eval/{key}_change")
        if before or after or change:
            yield f"| {label} | {before} | {after} | {change} |"
    yield "\n± is one standard error; a change's is paired, of the differences example by example."
    if not last:
        yield "After training nothing was measured yet when this was written."


def loading(task: str | None, adapter: bool) -> str:
    """Markdown that shows how a model for this task is loaded. adapter: whether the folder holds an adapter alone."""
    if task is None:
        return CRITIC
    scores = task == "text-classification"
    code = (SCORE_BY_ADAPTER if adapter else SCORE) if scores else GENERATE
    text = f'```python\nFOLDER = "."  # this folder, or its name on the Hub\n{code}\n```'
    return f"{text}\n\n{PADDING}" if scores else text


def _limits(run: RunFacts, role: str, kept: str) -> Iterator[str]:
    if kept:
        yield f"`generate()` follows its generation_config.json, which nothing in its training drew with: {kept}."
    if run.kind == "ppo":
        yield (
            "Scores are of this run's own reward, in its own units: they compare with this table alone, and a policy "
            "that is trained on a reward finds what the reward is wrong about."
        )
        for finding in RunSummary.from_metrics(run.rows).findings:
            if finding.severity != FINE:
                yield f"The run's health report: {finding.seen}."
    if role == "reward":
        yield "It was trained and judged on one kind of pairs; how it scores other texts was not measured."
    yield "Held-out rows are of the same source as the training data."
    yield "The licence and the limits of the model and data that it began with are its own, too. None is given here."


def _made_with(versions: Mapping[str, str | None], git: Mapping | None) -> str:
    versions = dict(versions)
    own = f"four-engine-rlhf {versions.pop('four-engine-rlhf', None) or 'not installed'}"
    commit = f", commit {git['commit']}{' with changes of its own' if git['dirty'] else ''}" if git else ""
    return f"{own}{commit}; {', '.join(f'{name} {version}' for name, version in versions.items() if version)}"


def _listed(value: str | Sequence[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else list(value or [])


# Names on the Hub. In a run's flags the path of anything that is on the disk is absolute (training/config/flags.py).
# Therefore a value that could be a name on the Hub is one.
_NAME = re.compile(r"\w[\w.-]{0,95}(/\w[\w.-]{0,95})?")


def is_hub_name(given: str) -> bool:
    """Whether the value of a flag for a model or data set, as run.json has it, is a name on the Hub."""
    found = _NAME.fullmatch(given) is not None and given != DEEPSPEED_CHAT_FILES
    return found and not is_path(given)


def hub_names(given: Iterable[str], known: Mapping[str, str] | None = None) -> list[str]:
    """The names on the Hub among the given values, without repetition. A folder that is a key of `known` is replaced by
    its name on the Hub."""
    names = [(known or {}).get(path, path) for path in given]
    return list(dict.fromkeys(name for name in names if is_hub_name(name)))


def publicly(given: str, what: str, known: Mapping[str, str] | None = None) -> str:
    """Markdown with what may be published about a model or a data set. what: "data" for a data set."""
    if is_hub_name(name := name_and_split(given)[0]):
        return f"[{given}](https://huggingface.co/{'datasets/' if what == 'data' else ''}{name})"
    if known and given in known:
        name = known[given]
        return f"a local {what}, not on the Hub, which began as [{name}](https://huggingface.co/{name})"
    return f"{'local files' if what == 'data' else f'a local {what}'}, not on the Hub"


def known_names(paths: Iterable[str | None]) -> dict[str, str]:
    """{path: Hub name of the model from which the model at this path was trained}, for the paths where this is known
    from an adapter's base, or from a card that this program wrote."""
    found = {}
    for path in paths:
        if path is None or is_hub_name(path):
            continue
        with contextlib.suppress(OSError, UserError, ValueError):
            name = base_of(path, "model")
            if name == path and _SIGNED.search(text := read_text(Path(path) / CARD)):
                name = huggingface_hub.ModelCard(text).data.to_dict().get("base_model")
            if isinstance(name, str) and is_hub_name(name):
                found[path] = name
    return found


# Cards beside saved models.
_SIGNED = re.compile(r"<!-- card of four-engine-rlhf ([0-9a-f]{64}): .* -->\n\Z")


def signed(text: str) -> str:
    """The card's text, followed by the line that marks the text as written by this program."""
    return f"{text}\n<!-- card of four-engine-rlhf {_digest(text)}: a later save replaces it, if nobody edits it -->\n"


def is_edited(path: Path) -> bool:
    """Whether the README.md at this path exists and was not written by this program, or was edited later. Raises:
    OSError."""
    if not path.is_file():
        return False
    text = path.read_bytes().decode(errors="replace")
    found = _SIGNED.search(text)
    return found is None or found[1] != _digest(text[: found.start() - 1])


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()


def add_card(folder: Path, output_dir: Path, name: str, steps: int | None = None) -> None:
    """Write a card into `folder`. The folder holds the model that the run in `output_dir` saves as `name`.

    steps: for a model that is exported from a checkpoint, the checkpoint's step. If there is no run.json, for example
    because the checkpoint was moved, no card is written, and a line says so.
    """
    with _failures_noted(folder if steps is not None else output_dir / name):
        if (run := RunFacts.read(output_dir, steps)) is not None:
            kept = kept_settings(str(folder)) if (folder / "generation_config.json").is_file() else ""
            write_whole(folder / CARD, signed(model_card(run, name, kept)))
        elif steps is not None:
            print(f"no model card: {output_dir / RUN_FILE}, which tells of the run, is not there", file=sys.stderr)


def add_merge_card(folder: Path, source: Mapping) -> None:
    """Write a card into `folder`, which holds a merged model. source: the content of its merged_from.json."""
    with _failures_noted(folder):
        known = known_names([source["sft"], *source["trained"]])
        text = merge_card(source, versions(), git_state(Path(__file__).parent), known)
        write_whole(folder / CARD, signed(text))


def renew_cards(output_dir: Path, saved: Mapping[str, Path]) -> None:
    """Write the cards of saved models again, because there are later measurements. Edited cards are kept (one process
    calls this)."""
    for name, folder in saved.items():
        with _failures_noted(folder):
            if (folder / CARD).is_file() and not is_edited(folder / CARD):
                add_card(folder, output_dir, name)


@contextlib.contextmanager
def _failures_noted(model: Path) -> Iterator[None]:
    """If a card cannot be made within this block, note this and go on: a missing card must not end a run."""
    try:
        yield
    except Exception as error:  # also an error in the content of a file
        note_unwritten(f"the model card {model / CARD}", error)


# The upload.

UPLOADED = ("actor", "actor_adapter", ".", "adapter")
"""Names of saved models. The first of them that was saved is uploaded: a whole model rather than an adapter."""
LONGEST = timedelta(days=7)  # longest time of an upload, during which the other ranks wait
REFUSED = (401, 403)  # HTTP statuses for a token that is invalid or lacks rights; other errors are the Hub's
LOG_IN = "Log in with `hf auth login` or set HF_TOKEN, or leave --push_to_hub out."


class NotUploaded(Exception):
    """Raised if something prevents an upload, and this is found before the Hub is asked."""


def check_hub(args: HubFlags) -> None:
    """Check, before the run and in one process, whether an upload will be possible: the Hub must know the token, and
    the repository must not be public if --hub_private is true. Without a network, only the presence of a token is
    checked.

    Raises: UserError.
    """
    if not args.push_to_hub or args.dry_run:
        return
    given = f"--push_to_hub to {args.hub_model_id}"
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        raise UserError(f"{given}: HF_HUB_OFFLINE is set. Unset it, or leave --push_to_hub out.")
    if huggingface_hub.get_token() is None:
        raise UserError(f"{given}: there is no token of the Hub on this machine. {LOG_IN}")
    api = huggingface_hub.HfApi(endpoint=huggingface_hub.constants.ENDPOINT)
    try:
        user = api.whoami()["name"]
        with contextlib.suppress(RepositoryNotFoundError):
            if _is_public(api, args):
                raise UserError(f"{given}: {_public_refusal(args)}")
    except UserError:
        raise
    except Exception as error:  # also errors of the HTTP library, which may be one of several
        if isinstance(error, HfHubHTTPError) and error.response.status_code in REFUSED:
            raise UserError(f"{given}: the Hub does not take the token ({one_line(error)}). {LOG_IN}") from None
        _say(f"{given}: the Hub cannot be asked now ({one_line(error)}); it is tried when the run has ended")
    else:
        _say(f"the trained model will be uploaded to {args.hub_model_id} by {user}")


def push(args: HubFlags, saved: Mapping[str, Path]) -> None:
    """Upload the trained model if --push_to_hub is given. Prints the model's address, or why it was not uploaded (all
    ranks call this).

    saved: {name: folder} of the run's models. Only the model's own files are uploaded: other files in the folder, such
    as run.json beside an SFT model, contain this machine's paths and names.
    """
    if not args.push_to_hub:
        return
    with phase("uploading"), distributed.waiting(LONGEST):
        if distributed.is_main():
            name = next(name for name in UPLOADED if name in saved)
            folder, again = saved[name], ""
            try:
                files = model_files[folder]
                again = f" To try again:\n  {upload_command(args, folder, files)}"
                print(f"uploaded: {upload(args, folder, files)}", flush=True)
            except Exception as error:  # the HTTP library's own kinds, the Hub's, a file that cannot be read
                _say(f"WARNING: the model was not uploaded ({one_line(error)}). It is saved in {folder}.{again}")


def upload(args: HubFlags, folder: Path, files: list[str]) -> str:
    """Upload these files of the folder; returns the model's address. Errors of any kind are raised."""
    if is_adapter(folder):
        base = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))["base_model_name_or_path"]
        if not is_hub_name(base):
            raise NotUploaded(
                "the adapter's model is a folder on this machine, which nobody else has: upload that, write its name "
                f"into {ADAPTER_CONFIG}, and try again; or have the run save merged models, --save_merged true"
            )
    api = huggingface_hub.HfApi(endpoint=huggingface_hub.constants.ENDPOINT)
    address = api.create_repo(str(args.hub_model_id), private=args.hub_private, exist_ok=True)
    if _is_public(api, args):
        raise NotUploaded(_public_refusal(args))
    api.upload_folder(
        repo_id=str(args.hub_model_id),
        folder_path=folder,
        allow_patterns=files,
        commit_message="Upload the trained model",
    )
    return str(address)


def _is_public(api: huggingface_hub.HfApi, args: HubFlags) -> bool:
    return args.hub_private and not api.model_info(str(args.hub_model_id)).private


def _public_refusal(args: HubFlags) -> str:
    return f"{args.hub_model_id} is there and public. Give another name, or --hub_private false."


def upload_command(args: HubFlags, folder: Path, files: list[str]) -> str:
    """The command that makes the same upload with the Hub's own program, `hf`."""
    words = ["hf", "upload", str(args.hub_model_id), str(folder), "."]
    words += ["--private" if args.hub_private else "--no-private"]
    return shlex.join(words + [word for file in files for word in ("--include", file)])


def _say(text: str) -> None:
    print(text, flush=True)
