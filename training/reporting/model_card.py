"""The README.md of a saved model, a model card as the Hugging Face Hub reads it: text from a run's record and metrics.

    run = RunFacts(start=read_run_record("out/run.json")[-1], rows=read_metrics("out/metrics.jsonl"), steps=200)
    text = model_card(run, "actor")

Only what may be public is in it: names of models and data on the Hub, and of what stands on the user's disk the kind
alone. Paths, file names, commands, host names and names of the user's functions stay in run.json.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from engine.algorithms import get_dialect
from engine.errors import UserError
from training.reporting.card_snippets import snippet
from training.reporting.health.curves import FINE
from training.reporting.hub_names import hub_names, publicly
from training.reporting.standard_errors import ENDINGS, with_error
from training.reporting.summary import EVALUATED, RunSummary

ADAPTER = "_adapter"
MODEL_FLAGS = {
    "model_name_or_path": "started from",
    "actor_model_name_or_path": "SFT model",
    "critic_model_name_or_path": "critic began as",
    "reward_model_name_or_path": "reward model",
}
DATA_FLAGS = ("data_path", "unsupervised_dataset_name")
HELD_OUT = {
    "sft": (("loss, nats a token", "loss"), ("perplexity", "perplexity")),
    "reward": (("accuracy on pairs", "accuracy"), ("loss, nats a pair", "pair_loss"), ("margin", "margin")),
    "ppo": EVALUATED,
}
SIZES = {
    "sft": ("max_seq_len", "per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs"),
    "ppo": (
        *("max_prompt_seq_len", "max_answer_seq_len", "per_device_generation_batch_size", "generation_batches"),
        *("per_device_training_batch_size", "actor_zero_stage", "critic_zero_stage", "enable_ema"),
        *("actor_lora_dim", "critic_lora_dim", "only_optimize_lora", "critic_pretrain_steps"),
    ),
}
SIZES["sft"] += ("learning_rate", "lr_scheduler_type", "num_warmup_steps", "weight_decay", "zero_stage", "lora_dim")
SIZES["reward"] = (*SIZES["sft"], "pairwise_loss", "max_prompt_seq_len", "max_answer_seq_len", "normalization_samples")
EVERY = ("dtype", "seed")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What a card is made from.

    start: the last entry of run.json. rows: metrics.jsonl's. steps: after how many of them the model was taken.
    known: Hub names of models on disk, by path, where their own cards give them.
    """

    start: Mapping
    rows: Sequence[Mapping] = ()
    steps: int | None = None
    known: Mapping[str, str] = field(default_factory=dict)

    @property
    def flags(self) -> Mapping:
        """The run's, by name."""
        return self.start["flags"]

    @property
    def kind(self) -> str:
        """Of the run: sft, reward or ppo."""
        if "actor_model_name_or_path" in self.flags:
            return "ppo"
        return "reward" if "pairwise_loss" in self.flags else "sft"


def role_of(run: RunFacts, name: str) -> str:
    """What a model is that the run saved as the folder `name`: sft, reward, actor, actor_ema, critic or
    critic_pretrained."""
    return name.removesuffix(ADAPTER) if run.kind == "ppo" else run.kind


def model_card(run: RunFacts, name: str) -> str:
    """The card of the model that the run saved as the folder `name` ("." for the output folder itself)."""
    role, adapter = role_of(run, name), name.endswith("adapter")
    blocks = [
        front_matter(run, role, adapter),
        f"# {TITLES[role]}{', LoRA adapter' if adapter else ''}",
        ABOUT[role] + (" This folder holds the adapter alone; its base is loaded with it." if adapter else ""),
        "## Trained from",
        "\n".join(_origins(run)),
        "## How",
        "\n".join(_how(run)),
        "## Held out, before and after",
        "\n".join(_held_out(run, role)),
        "## How to load it",
        snippet(role, adapter),
        "## Limits",
        "\n".join(f"- {text}" for text in _limits(run, role)),
        "## Made with",
        made_with(run.start.get("versions") or {}, run.start.get("git")),
    ]
    return "\n\n".join(blocks) + "\n"


TITLES = {
    "sft": "A supervised fine-tuned language model",
    "reward": "A reward model",
    "actor": "A language model trained by PPO",
    "actor_ema": "A language model trained by PPO: the moving average of its weights",
    "critic": "A critic of PPO",
    "critic_pretrained": "A critic, pretrained before the first step of PPO",
}
ABOUT = {
    "sft": "Fine-tuned on texts, or on prompts and their responses: step 1 of RLHF.",
    "reward": (
        "Scores a prompt with a response by one number; trained on pairs of responses, of which one was preferred: "
        "step 2 of RLHF. The score is the classifier's plus `score_offset` of config.json."
    ),
    "actor": "The policy of a PPO run, which maximised a reward and was held to its SFT model by a KL penalty.",
    "actor_ema": "The exponential moving average over the training of a PPO run's policy.",
    "critic": "Estimates what reward is still to come at each token. It gives no scores: it is no reward model.",
    "critic_pretrained": "Estimates what reward is still to come at each token, of the SFT model's own responses.",
}


def front_matter(run: RunFacts, role: str, adapter: bool) -> str:
    """The YAML between two lines of dashes.

    base_model and datasets have names on the Hub alone; results stand there where their data do, and what was measured
    means the same for every model (accuracy, loss), which a reward model's scores do not.
    """
    flags = run.flags
    base = hub_names([_base(run, role)], run.known)
    data = hub_names([path for name in DATA_FLAGS for path in _listed(flags.get(name))])
    found: dict[str, Any] = {"library_name": "peft" if adapter else "transformers"}
    found["tags"] = ["rlhf", *TAGS[role], *(["lora"] if adapter else [])]
    if role in PIPELINES:
        found["pipeline_tag"] = PIPELINES[role]
    if base:
        found |= {"base_model": base[0], "base_model_relation": "adapter" if adapter else "finetune"}
    if data:
        found["datasets"] = list(dict.fromkeys(data))
    results = _results(run, data)
    if results:
        found |= {"model_name": TITLES[role], "eval_results": results}
    return f"---\n{ModelCardData(**found).to_yaml()}\n---"


TAGS = {
    "sft": ["sft"],
    "reward": ["reward-model"],
    **{role: ["ppo"] for role in ("actor", "actor_ema")},
    **{role: ["ppo", "critic"] for role in ("critic", "critic_pretrained")},
}
PIPELINES = {"reward": "text-classification", **dict.fromkeys(("sft", "actor", "actor_ema"), "text-generation")}


def _results(run: RunFacts, data: Sequence[str]) -> list[EvalResult]:
    """Of steps 1 and 2 on one data set of the Hub, part of which was held out."""
    after = _last(run)
    wanted = {"sft": ("text-generation", "loss"), "reward": ("text-classification", "accuracy")}
    if run.kind not in wanted or len(data) != 1 or len(_listed(run.flags["data_path"])) != 1:
        return []
    task, metric = wanted[run.kind]
    if f"eval/{metric}" not in after or run.flags.get("eval_data_path"):
        return []
    value = round(after[f"eval/{metric}"], 4)
    where: dict[str, Any] = {"dataset_type": data[0], "dataset_name": f"{data[0]}, held out"}
    return [EvalResult(task_type=task, metric_type=metric, metric_value=value, **where)]


def _base(run: RunFacts, role: str) -> str:
    """The path or name of the model that this one's weights began as."""
    flags = run.flags
    if run.kind != "ppo":
        return flags["model_name_or_path"]
    critic = flags.get("critic_model_name_or_path")
    if role.startswith("critic") and critic is not None and run.start["dialect"]["critic_start"] == "reward_model":
        return critic
    return flags["actor_model_name_or_path"]


def _origins(run: RunFacts) -> Iterator[str]:
    for name, label in MODEL_FLAGS.items():
        if run.flags.get(name) is not None:
            yield f"- {label}: {publicly(run.flags[name], 'model', run.known)}"
    if run.flags.get("reward_function"):
        yield "- reward: by a function, alone or beside the model"
    for name in DATA_FLAGS:
        for path in _listed(run.flags.get(name)):
            yield f"- {'data' if name == 'data_path' else 'texts for mixed pretraining'}: {publicly(path, 'data')}"


def _how(run: RunFacts) -> Iterator[str]:
    if run.kind == "ppo":
        dialect = run.start["dialect"]
        yield f"Dialect `{dialect['name']}`{_departures(dialect)}."
        yield ""
    last = run.rows[-1] if run.rows else {}
    ranks = run.start["machine"]["world_size"]
    yield "| | |\n| --- | --- |"
    yield f"| steps | {last.get('step', 0) if run.steps is None else run.steps} |"
    yield f"| {'responses' if run.kind == 'ppo' else 'examples'} learned from | {last.get('samples', 0)} |"
    yield f"| ranks | {ranks}, {run.start['machine']['accelerator']} |"
    for name in (*SIZES[run.kind], *EVERY):
        value = run.flags.get(name)
        if value not in (None, False) and (value or not name.endswith("lora_dim")):
            yield f"| `{name}` | {value} |"
    if run.kind == "ppo":
        trained = [row for row in run.rows if "objective/kl_coef" in row]
        if trained:
            yield f"| KL coefficient, first and last | {_first_and_last(trained, 'objective/kl_coef')} |"
            yield f"| KL of a step's responses, nats a response | {_first_and_last(trained, 'objective/kl')} |"
        for name in ("actor_lr", "critic_lr", "ppo_epochs", "mini_batches", "samples_per_prompt"):
            yield f"| {name} | {run.start['dialect'][name]} |"


def _first_and_last(rows: Sequence[Mapping], name: str) -> str:
    values = [row[name] for row in rows if name in row]
    return f"{values[0]:.4g}, {values[-1]:.4g}" if values else ""


def _departures(resolved: Mapping) -> str:
    """What a run's dialect departs in from the one that it names."""
    try:
        named = get_dialect(resolved["name"])
    except UserError:
        return ", one of the run's own"
    changed = [
        f"`{name}={value}` ({getattr(named, name)})"
        for name, value in resolved.items()
        if hasattr(named, name) and _plain(getattr(named, name)) != _plain(value)
    ]
    return f", but (the dialect's in brackets) {', '.join(changed)}" if changed else ", as it is"


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value  # as JSON has it


def _held_out(run: RunFacts, role: str) -> Iterator[str]:
    first, after = next((row for row in run.rows if _measured(row) and row["step"] == 0), {}), _last(run)
    averaged = role == "actor_ema"
    summary = RunSummary.from_metrics(run.rows)
    if not first and not after:
        yield "Not measured."
        return
    yield "| | before | after | change |\n| --- | --- | --- | --- |"
    for label, key in HELD_OUT[run.kind]:
        name = f"eval/{key}"
        end = f"eval/ema_{key}" if averaged else name
        before = {} if summary.other_reward and key == "score" else first
        numbers = [_number(before, name), _number(after, end), "" if averaged else _number(after, f"{name}_change")]
        if any(numbers):
            yield f"| {label} | {' | '.join(numbers)} |"
    yield ""
    yield "± is one standard error; a change's is paired, of the differences example by example."
    if not after:
        yield "After training nothing was measured yet when this was written."


def _number(row: Mapping, name: str) -> str:
    sign = "+" if name.endswith("_change") else ""
    return with_error(row[name], row.get(f"{name}_se"), sign=sign) if name in row else ""


def _measured(row: Mapping) -> bool:
    return any(name.startswith("eval/") and not name.endswith(ENDINGS) for name in row)


def _last(run: RunFacts) -> Mapping:
    return next((row for row in reversed(run.rows) if _measured(row) and row["step"] > 0), {})


def _limits(run: RunFacts, role: str) -> Iterator[str]:
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


def made_with(versions: Mapping[str, str | None], git: Mapping | None) -> str:
    """A line of versions and commit; arguments as run.json has them."""
    versions = dict(versions)
    own = f"four-engine-rlhf {versions.pop('four-engine-rlhf', None) or 'not installed'}"
    commit = f", commit {git['commit']}{' with changes of its own' if git['dirty'] else ''}" if git else ""
    return f"{own}{commit}; {', '.join(f'{name} {version}' for name, version in versions.items() if version)}"


def _listed(value: str | Sequence[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else list(value or [])
