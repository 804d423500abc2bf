"""Model cards, and the upload to the Hugging Face Hub, as callbacks of the three programs.

    program(callbacks=(Cards(), Upload()))               # cards first: the upload has the card with the run's result

A model card is the README.md of a saved model. It is made from run.json and metrics.jsonl. Since it may be published,
it names only models and data that are on the Hub; it calls all others local. It has no paths, file names, commands,
host names or names of the user's functions; these are in run.json only. A card ends with the hash of the text above it.
If the hash does not match, the user has edited the card, and it is kept.

If the upload fails, the model is still saved on the disk. The run's exit code stays 0 then, since code 1 would make
schedulers run the whole command again. A warning contains the command that repeats the upload.
"""

import contextlib
import hashlib
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import (
    HfHubHTTPError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from engine import distributed
from engine.atomic_files import write_whole
from engine.errors import UserError
from engine.files import parsed_json, read_text
from engine.models.model_paths import base_of, is_adapter, one_line
from training.config.flags import HubFlags
from training.data.row_selection import listed
from training.data.sources import DEEPSPEED_CHAT_FILES, is_path, name_and_split
from training.reporting.guards import Kind
from training.reporting.run_record import METRICS_FILE, RUN_FILE, git_state, read_metrics, read_run_record, versions
from training.reporting.standard_errors import cell, evaluations, scored_otherwise
from training.reporting.summary import EVALUATED
from training.runtime.callbacks import Callback
from training.runtime.output_folder import model_files
from training.runtime.processes import phase
from training.runtime.ranks import checked
from training.runtime.stopping import note_unwritten

CARD = "README.md"
ROLES = {  # {model: (title, tags, task on the Hub)}
    "sft": ("A supervised fine-tuned language model", ["sft"], "text-generation"),
    "reward": (
        "A reward model; its score is the output plus `score_offset`",
        ["reward-model"],
        "text-classification",
    ),
    "process": ("A process reward model; label 1 says that a step is good", ["reward-model"], "token-classification"),
    "actor": ("A language model trained by PPO", ["ppo"], "text-generation"),
    "actor_ema": ("A language model trained by PPO: the moving average of its weights", ["ppo"], "text-generation"),
    "critic": ("A critic of PPO, which gives no scores: it is not a reward model", ["ppo", "critic"], None),
    "critic_pretrained": ("A critic, pretrained before the first step of PPO", ["ppo", "critic"], None),
    "merged": ("A merge of a language model with what was trained from it", ["merge"], "text-generation"),
}
LIMITS = (
    "Scores are of the reward of its own training. The licence and the limits of the models and data that it was made "
    "from are its own, too."
)
PART = "The language model of a {} model, without its towers: it reads texts alone, and no images or sound."
OF_AN_ADAPTER = (
    " The adapter fits the language model's own class. On the whole model, whose layers have other names, peft loads "
    "nothing of it and only warns."
)
MODEL_FLAGS = {
    "model_name_or_path": "started from",
    "actor_model_name_or_path": "SFT model",
    "critic_model_name_or_path": "critic began as",
    "reward_model_name_or_path": "reward model",
}
DATA_FLAGS = {"data_path": "data", "unsupervised_dataset_name": "texts for mixed pretraining"}
SHOWN = (
    *("kl_coef", "actor_lr", "critic_lr", "ppo_epochs", "samples_per_prompt", "learning_rate", "num_train_epochs"),
    *("max_seq_len", "max_prompt_seq_len", "max_answer_seq_len", "lora_dim", "actor_lora_dim", "dtype", "seed"),
)
"""The flags and fields of the dialect that a card lists, if they were given."""
HELD_OUT = {
    "sft": (("loss, nats a token", "loss"), ("perplexity", "perplexity")),
    "reward": (("accuracy on pairs", "accuracy"), ("loss, nats a pair", "pair_loss"), ("margin", "margin")),
    "process": (("accuracy on steps", "accuracy"), ("share of bad steps found", "bad_found"), ("share good", "good")),
    "ppo": EVALUATED,
}


def model_card(start: Mapping, rows: Sequence[Mapping], name: str, part_of: str | None = None) -> str:
    """The text of the card of the model that a run saves in the folder `name` ("." for the output folder itself).

    start: the last entry of run.json. rows: the rows of metrics.jsonl, up to the last step that counts. part_of: the
    type of the composite model of which this is the language model alone; None for other models.
    """
    flags = start["flags"]
    dialect = start.get("dialect") or {}
    machine = start["machine"]
    kind = "ppo" if "actor_model_name_or_path" in flags else "reward" if "pairwise_loss" in flags else "sft"
    kind = "process" if flags.get("step_end") else kind
    role = name.removesuffix("_adapter") if kind == "ppo" else kind
    models, data = (
        [(label, path) for flag, label in named.items() for path in listed(flags.get(flag))]
        for named in (MODEL_FLAGS, DATA_FLAGS)
    )
    last, settings = rows[-1] if rows else {}, {**flags, **dialect}
    made_from = Counter(f"- {label}: {_public(path)}" for label, path in [*models, *data])
    how = {"dialect": f"`{dialect['name']}`"} if dialect else {}
    how |= {"steps": max(last.get("step", 0), 0), "responses" if dialect else "examples": last.get("samples", 0)}
    how |= {"ranks": f"{machine['world_size']}, {machine['accelerator']}"}
    how |= {f"`{name}`": settings[name] for name in SHOWN if settings.get(name) not in (None, 0)}
    told = PART.format(part_of) + OF_AN_ADAPTER * ("adapter" in name)
    parts = {} if part_of is None else {"Language model alone": told}
    parts |= {
        "Made from": "\n".join(line + f" ({count} of them)" * (count > 1) for line, count in made_from.items()),
        "How": "\n".join(["| | |", "| --- | --- |", *(f"| {label} | {value} |" for label, value in how.items())]),
        "Held out": _held_out(rows, kind, "ema_" if role == "actor_ema" else ""),
        "Made with": _made_with(start.get("versions") or {}, start.get("git")),
    }
    base = [] if role.startswith("critic") else _hub_names([models[0][1]])
    datasets = [hub for _, path in data if is_hub_name(hub := name_and_split(path)[0])]
    return _card(role, "adapter" in name, base, datasets, parts)


def merge_card(source: Mapping, versions: Mapping[str, str | None], git: Mapping | None) -> str:
    """The text of the card of a merged model. source: the content of merged_from.json, which the merge program writes.
    versions, git: as in run.json."""
    sft = source["sft"]
    trained = source["trained"]
    measured = source.get("measured")
    held_out = "Not measured."
    if measured:
        score, kl = (cell(measured, name) for name in ("score", "kl"))
        held_out = f"score {score}, KL to the SFT model {kl} nats a response, on the prompts that chose the scale"
    origins = [("SFT model", sft), *(("trained from it", path) for path in trained)]
    parts = {
        "Made from": "\n".join(f"- {label}: {_public(path)}" for label, path in origins),
        "How": f"SFT model + {source['scale']:g} x the {source['method']} change of {len(trained)}.",
        "Held out": held_out,
        "Made with": _made_with(versions, git),
    }
    return _card("merged", False, _hub_names([sft, *trained]), [], parts)


def _card(role: str, adapter: bool, base: Sequence[str], datasets: Sequence[str], parts: Mapping[str, str]) -> str:
    """The text of a card. base, datasets: names on the Hub. parts: {heading: text}."""
    title, tags, task = ROLES[role]
    data = ModelCardData(
        library_name="peft" if adapter else "transformers",
        tags=["rlhf", *tags, *["lora"] * adapter],
        pipeline_tag=task,
        base_model=list(base) if role == "merged" and base else next(iter(base), None),
        base_model_relation=None if not base else "merge" if role == "merged" else "adapter" if adapter else "finetune",
        datasets=list(datasets) or None,
    )
    text = "\n\n".join(f"## {head}\n\n{part}" for head, part in parts.items())
    return f"---\n{data.to_yaml()}\n---\n\n# {title}{', LoRA adapter' * adapter}\n\n{LIMITS}\n\n{text}\n"


def _held_out(rows: Sequence[Mapping], kind: str, averaged: str) -> str:
    """A table of held-out metrics before the first step and after the last one. averaged: the prefix of the metrics of
    averaged weights; "" for the trained ones."""
    first, last = evaluations(rows, [f"eval/{HELD_OUT[kind][0][1]}"])
    lines = ["| | before | after | change |", "| --- | --- | --- | --- |"]
    for label, key in HELD_OUT[kind]:
        before = "" if key == "score" and scored_otherwise(last) else cell(first, f"eval/{key}")
        after, change = cell(last, f"eval/{averaged}{key}"), cell(last, f"eval/{averaged}{key}_change", "+")
        if before or after:
            lines.append(f"| {label} | {before} | {after} | {change} |")
    lines.append("\n± is one standard error; a change's is paired, of the differences example by example.")
    return "\n".join(lines) if first or last else "Not measured."


def _made_with(versions: Mapping[str, str | None], git: Mapping | None) -> str:
    named = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    commit = f"; commit {git['commit']}{' with changes of its own' if git['dirty'] else ''}" if git else ""
    return f"{named}{commit}"


# Names on the Hub. In a run's flags the path of anything that is on the disk is absolute (training/config/flags.py).
# Therefore a value that could be a name on the Hub is one.
_NAME = re.compile(r"\w[\w.-]{0,95}(/\w[\w.-]{0,95})?")


def is_hub_name(given: str) -> bool:
    """Whether the value of a flag for a model or data set, as run.json has it, is a name on the Hub."""
    return _NAME.fullmatch(given) is not None and given != DEEPSPEED_CHAT_FILES and not is_path(given)


def hub_origin(path: str) -> str | None:
    """The name on the Hub of a model, or of the model that a local one was trained from; None if it is not known. A
    local model tells it by an adapter's base, or by a card that this program wrote."""
    if is_hub_name(path):
        return path
    with contextlib.suppress(OSError, UserError, ValueError):
        name = base_of(path, "model")
        if name == path and _SIGNED.search(text := read_text(Path(path) / CARD)):
            name = ModelCard(text).data.to_dict().get("base_model")
        if isinstance(name, str) and is_hub_name(name):
            return name
    return None


def _hub_names(paths: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(name for path in paths if (name := hub_origin(path))))


def _public(given: str) -> str:
    """What may be published about a model or a data set."""
    if is_hub_name(name_and_split(given)[0]):
        return given
    name = hub_origin(given)
    return "local, not on the Hub" + (f", began as {name}" if name else "")


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
    """Write the card of the model `name` of the run in `output_dir` into `folder`, if nobody has edited the card there.
    If it cannot be made, a note says so: a missing card ends no run.

    steps: the last step that counts; None for the whole run. Without run.json, no card is written.
    """
    try:
        if (output_dir / RUN_FILE).is_file() and not is_edited(folder / CARD):
            metrics = output_dir / METRICS_FILE
            rows = read_metrics(metrics) if metrics.is_file() else []
            rows = [row for row in rows if steps is None or row["step"] <= steps]
            start = read_run_record(output_dir / RUN_FILE)[-1]
            write_whole(folder / CARD, signed(model_card(start, rows, name, _whole_model(folder))))
    except Exception as error:  # also an error in the content of a file
        note_unwritten(f"the model card {output_dir / name / CARD}", error)


def _whole_model(folder: Path) -> str | None:
    """The type of the composite model of which the model in a folder, or an adapter's base, is the language model; None
    for other models."""
    file = Path(base_of(str(folder), "model")) / "config.json"
    config = parsed_json(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return config.get("text_part_of") or (config["model_type"] if "text_config" in config else None)


def add_merge_card(folder: Path, source: Mapping) -> None:
    """Write the card of a merged model into its folder. source: the content of its merged_from.json."""
    write_whole(folder / CARD, signed(merge_card(source, versions(), git_state(Path(__file__).parent))))


class Cards(Callback):
    """Writes a card with each saved model, and writes it again when the run ends, with the last evaluation."""

    def saved(self, name: str, folder: Path, run: Any) -> None:
        """See Callback."""
        if not is_edited(run.output_dir / name / CARD):  # an edited card moves into the model's new folder
            add_card(folder, run.output_dir, name)

    def ended(self, run: Any) -> None:
        """See Callback."""
        for name, folder in run.saved_models.items() if distributed.is_main() else ():
            add_card(folder, run.output_dir, name)


# The upload.

UPLOADED = ("actor", "actor_adapter", ".", "adapter")
"""Names of saved models. The first of them that was saved is uploaded: a whole model rather than an adapter."""
LONGEST = timedelta(days=7)  # longest time of an upload, during which the other ranks wait


class Upload(Callback):
    """Uploads the trained model if --push_to_hub is given. Before the run, it asks the Hub whether that will be
    possible."""

    def planned(self, args: HubFlags, plan: Any) -> None:
        """See Callback. Raises: UserError on all ranks."""
        if args.push_to_hub and not args.dry_run:
            checked(lambda: check_hub(args))

    def ended(self, run: Any) -> None:
        """See Callback. A broken model is not uploaded."""
        if not run.args.push_to_hub or run.verdict.kind == Kind.BROKEN:
            return
        with phase("uploading"), distributed.waiting(LONGEST):
            if distributed.is_main():
                folder = next(run.saved_models[name] for name in UPLOADED if name in run.saved_models)
                upload(run.args, folder, [*dict.fromkeys([*model_files.get(folder, ["*"]), CARD])])


def check_hub(args: HubFlags) -> None:
    """Raise UserError if there is no token or an invalid one, or if the repository is public although --hub_private is
    true. If the Hub cannot be reached, a line says so."""
    api = huggingface_hub.HfApi()
    try:
        user = api.whoami()["name"]
        _refuse_public(api, args)
        print(f"the trained model will be uploaded to {args.hub_model_id} by {user}", flush=True)
    except UserError:
        raise
    except Exception as error:  # also errors of the HTTP library
        refused = isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403)
        if refused or isinstance(error, LocalTokenNotFoundError | OfflineModeIsEnabled):
            raise UserError(
                f"--push_to_hub to {args.hub_model_id} cannot work ({one_line(error)}). Log in with `hf auth login` or "
                "set HF_TOKEN, or leave --push_to_hub out."
            ) from None
        print(f"the Hub cannot be asked now ({one_line(error)}); the upload is tried at the end", flush=True)


def upload(args: HubFlags, folder: Path, files: Sequence[str]) -> None:
    """Upload these files of a model's folder; prints the model's address, or why it was not uploaded. Other files in
    the folder, such as run.json beside an SFT model, contain this machine's paths and names."""
    api, repository = huggingface_hub.HfApi(), str(args.hub_model_id)
    try:
        if is_adapter(folder) and not is_hub_name(base_of(str(folder), "adapter")):
            raise UserError(
                "the adapter's model is a folder on this machine, which nobody else has: upload that, write its name "
                "into adapter_config.json, and try again; or have the run save merged models, --save_merged true"
            )
        address = api.create_repo(repository, private=args.hub_private, exist_ok=True)
        _refuse_public(api, args)
        api.upload_folder(repo_id=repository, folder_path=folder, allow_patterns=list(files))
        print(f"uploaded: {address}", flush=True)
    except Exception as error:  # the HTTP library's own kinds, the Hub's, a file that cannot be read
        included = [word for file in files for word in ("--include", file)]
        private = "--private" if args.hub_private else "--no-private"
        again = shlex.join(["hf", "upload", repository, str(folder), ".", private, *included])
        print(f"WARNING: the model was not uploaded ({one_line(error)}). To try again:\n  {again}", flush=True)


def _refuse_public(api: huggingface_hub.HfApi, args: HubFlags) -> None:
    with contextlib.suppress(RepositoryNotFoundError):
        if args.hub_private and not api.model_info(str(args.hub_model_id)).private:
            raise UserError(f"{args.hub_model_id} is there and public. Give another name, or --hub_private false.")
