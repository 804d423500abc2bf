"""The model card of a merged model: text from the note of where it comes from."""

from collections.abc import Mapping
from typing import Any

from huggingface_hub import ModelCardData

from training.reporting.card_snippets import snippet
from training.reporting.hub_names import hub_names, publicly
from training.reporting.model_card import made_with
from training.reporting.standard_errors import with_error


def merge_card(
    source: Mapping, versions: Mapping[str, str | None], git: Mapping | None, known: Mapping[str, str] | None = None
) -> str:
    """The card's text.

    source: the note (`training.merge`'s merged_from.json). versions, git: as run.json has them. known: Hub names of
    models on disk, by path. As in a run's card nothing of paths and file names is told.
    """
    trained = source["trained"]
    found: dict[str, Any] = {"library_name": "transformers", "tags": ["rlhf", "merge"]}
    found["pipeline_tag"] = "text-generation"
    base = list(dict.fromkeys(hub_names([source["sft"], *trained], known)))
    if base:
        found |= {"base_model": base, "base_model_relation": "merge"}
    measured = source.get("measured")
    rows = "Not measured."
    if measured:
        score, kl = (with_error(measured[name], measured.get(f"{name}_se")) for name in ("score", "kl"))
        rows = (
            f"| | |\n| --- | --- |\n| score | {score} |\n| KL to the SFT model, nats a response | {kl} |\n\n"
            "± is one standard error. Scores are of the reward that chose it, in its own units."
        )
    lines = [f"- SFT model: {publicly(source['sft'], 'model', known)}"]
    lines += [f"- trained from it: {publicly(path, 'model', known)}" for path in trained]
    blocks = [
        f"---\n{ModelCardData(**found).to_yaml()}\n---",
        "# A language model on the line through its SFT model and what was trained from it",
        f"SFT model + {source['scale']:g} x the {source['method']} change of {len(trained)}: merged, not trained.",
        "## Merged from",
        "\n".join(lines),
        "## Held out",
        rows,
        "## How to load it",
        snippet("actor", adapter=False),
        "## Limits",
        "- The licence and the limits of the models that it was merged from are its own, too. None is given here.",
        "## Made with",
        made_with(versions, git),
    ]
    return "\n\n".join(blocks) + "\n"
