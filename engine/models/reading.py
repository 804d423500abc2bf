"""A model's configuration and its tokenizer, read before anything large is loaded."""

from pathlib import Path

from jinja2 import TemplateSyntaxError
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase
from transformers.utils import import_utils, is_kernels_available
from transformers.utils.chat_template_utils import render_jinja_template

from engine.errors import UserError, shortened
from engine.files import read_text
from engine.git_lfs import refuse_pointers
from engine.models.output_head import has_own_head
from engine.models.pad_tokens import set_pad_token
from engine.models.places import base_of, one_line, require_model

VOCABULARIES = ("tokenizer.model", "spiece.model", "vocab.json", "merges.txt", "vocab.txt")


def read_config(path: str, what: str, trust_remote_code: bool = False):
    """The model configuration at `path`, of an adapter's folder its base's; output head and embedding are tied in it
    only if they are in the weight files too.

    trust_remote_code: whether code in the model's folder may run, where its `auto_map` names some, and code that its
    config.json would have fetched from the Hub.

    Raises: UserError, naming `what` (a flag), if there is none, or it cannot be read or built without such code.
    """
    require_model(path, what)
    path = base_of(path, what)
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        config.output_attentions = False  # torch's attention has none to give, and transformers would refuse
    except Exception as error:  # whatever a broken config.json leads transformers to
        _refuse_code(error, path, what)
        if Path(path).is_dir():
            raise UserError(
                f"{what}: {path}/config.json describes no model ({one_line(error)}). Mend it, or give another model."
            ) from None
        raise UserError(
            f"{what}: no model at {path!r} ({one_line(error)}). Give a Hugging Face folder or hub name."
        ) from None
    if not trust_remote_code:
        _refuse_fetched_code(config, path, what)
    names = config.architectures
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise UserError(
            f"{what}: {path}/config.json names no class of its weights: architectures is {shortened(names)}. Make it a "
            'list of one name, such as ["LlamaForCausalLM"].'
        )
    if has_own_head(config, path, what, trust_remote_code):
        config.tie_word_embeddings = False
    return config


def read_tokenizer(
    path: str,
    what: str,
    pad_token: str = "tokenizer",
    trust_remote_code: bool = False,
    chat_template: str | None = None,
) -> PreTrainedTokenizerBase:
    """The tokenizer at `path`, left-padding, with the pad token that the rule `pad_token` gives it (`set_pad_token`).

    An adapter's folder need not have one: then it is that of its base.

    trust_remote_code: as for `read_config`. chat_template: a file whose template takes the place of its own.

    Raises: UserError, naming `what` (a flag), if there is none or it has neither pad nor EOS.
    """
    require_model(path, what)
    if not has_tokenizer(path):
        path = base_of(path, what)
    refuse_pointers(_tokenizer_files(Path(path)), what)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left", trust_remote_code=trust_remote_code)
        # Some settings of wrong kinds are found in use alone.
        tokenizer.decode(tokenizer("a text").input_ids + tokenizer.all_special_ids)
        ends = tokenizer.pad_token_id, tokenizer.eos_token_id
    except Exception as error:  # whatever broken files lead transformers to
        _refuse_code(error, path, what)
        raise UserError(f"{what}: no tokenizer at {path!r} ({one_line(error)}). Save one beside the model.") from None
    if ends == (None, None):
        raise UserError(f"{what}: the tokenizer at {path!r} has neither a pad nor an EOS token. Set one.")
    rows = read_config(path, what, trust_remote_code).get_text_config().vocab_size if pad_token != "tokenizer" else 0
    set_pad_token(tokenizer, pad_token, path, room=vocabulary_size(tokenizer) < rows)
    if chat_template is not None:
        tokenizer.chat_template = read_chat_template(chat_template)
    return tokenizer


def read_chat_template(path: str) -> str:
    """The chat template in the file that --chat_template names. Raises: UserError where there is none."""
    what = f"--chat_template {path}"
    refuse_pointers([Path(path)], what)
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{what}: cannot be read ({reason}). Give a text file with a chat template (Jinja).") from None
    if not text.strip():
        raise UserError(f"{what}: the file is empty. Give a text file with a chat template (Jinja).")
    try:
        render_jinja_template([], chat_template=text)  # of no dialogues: it is compiled and not run
    except Exception as error:  # whatever a broken template leads Jinja to
        line = f", line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
        raise UserError(f"{what}{line}: no valid Jinja ({one_line(error)}). Mend the template.") from None
    return text


def has_tokenizer(path: str) -> bool:
    """Whether a tokenizer stands in the folder `path`."""
    return any((Path(path) / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json"))


def _tokenizer_files(folder: Path) -> list[Path]:
    """The files of a tokenizer; beside tokenizer.json vocabularies of the older kinds are passed over."""
    whole = folder / "tokenizer.json"
    always = [folder / name for name in ("tokenizer_config.json", "chat_template.jinja")]
    return [*always, *([whole] if whole.exists() else map(folder.joinpath, VOCABULARIES))]


def _refuse_code(error: Exception, path: str, what: str) -> None:
    """Raise UserError where what failed is that code of the folder's own may not run."""
    if "trust_remote_code" in str(error):
        raise UserError(
            f"{what}: {path} brings code of its own (`auto_map` in its JSON files), without which it cannot be read. "
            "None of it was run. Look at its .py files, and give --trust_remote_code if you trust them."
        ) from None


def _refuse_fetched_code(config: PretrainedConfig, path: str, what: str) -> None:
    """Raise UserError where transformers would fetch code from the Hub for what config.json names, and run it."""
    for name in ("attn_implementation", "experts_implementation"):
        for part in (config, *(getattr(config, key, None) for key in config.sub_configs)):
            value = getattr(part, f"_{name}", None)
            if value is not None and _is_fetched(value):
                raise UserError(
                    f"{what}: {path}/config.json has {shortened(value)} as its {name}, code that would be fetched from "
                    "the Hugging Face Hub and run. None was. Take it out of the file, or give --trust_remote_code if "
                    "you trust it."
                )


def _is_fetched(implementation: object) -> bool:
    """Whether it is a repository's name, or one of those for which transformers has a repository where `kernels` is
    installed, and the package that has its code is not."""
    if not isinstance(implementation, str) or "/" in implementation:
        return True
    name = implementation.removeprefix("paged|")
    if name.startswith("flash_attention_"):
        return is_kernels_available() and not getattr(import_utils, f"is_flash_attn_{name[-1]}_available", bool)()
    return is_kernels_available() and name in ("deepgemm", "sonicmoe")


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """One more than the largest id that the tokenizer knows."""
    return max(tokenizer.get_vocab().values()) + 1
