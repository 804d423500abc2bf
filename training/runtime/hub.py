"""The trained model on the Hugging Face Hub: what can be looked at before a run, and the upload behind its end.

An upload that fails costs nothing: the model is saved by then, and the run's exit code stays 0, since the same command
need not be run again for it, as code 1 would have schedulers do. The command that tries again stands in the warning.
"""

import contextlib
import json
import shlex
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

from engine import distributed
from engine.errors import UserError
from engine.models.places import ADAPTER_CONFIG, is_adapter, one_line
from training.config.flags import HubFlags
from training.reporting.model_card import is_hub_name
from training.runtime.output_folder import WRITTEN_FILE, Written
from training.runtime.phases import phase

UPLOADED = ("actor", "actor_adapter", ".", "adapter")
"""The folder that is uploaded: the first of these that was saved, the whole model before the adapter."""
LONGEST = timedelta(days=7)  # that an upload may take while the other ranks wait
REFUSED = (401, 403)  # statuses: the token is none, or not for this; others say that the Hub has troubles of its own
LOG_IN = "Log in with `hf auth login` or set HF_TOKEN, or leave --push_to_hub out."


class NotUploaded(Exception):
    """Why a model was not uploaded, where the Hub has not been asked."""


def check_hub(args: HubFlags) -> None:
    """What an upload needs that can be looked at before the run, by one process: a token that the Hub knows, and no
    public repository where a private one is meant. Without a network the token alone is looked at.

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
                raise UserError(f"{given}: {_public(args)}")
    except UserError:
        raise
    except Exception as error:  # the HTTP library's own kinds too, whichever that is
        if isinstance(error, HfHubHTTPError) and error.response.status_code in REFUSED:
            raise UserError(f"{given}: the Hub does not take the token ({one_line(error)}). {LOG_IN}") from None
        _say(f"{given}: the Hub cannot be asked now ({one_line(error)}); it is tried when the run has ended")
    else:
        _say(f"the trained model will be uploaded to {args.hub_model_id} by {user}")


def push(args: HubFlags, saved: Mapping[str, Path]) -> None:
    """Upload the trained model if that was asked for, and say where it is, or why it is not (all ranks call this).

    saved: the folders of the run's models by name. Only files that are the model's are uploaded: other files in the
    folder, such as run.json beside an SFT model, hold paths and names of the machine.
    """
    if not args.push_to_hub:
        return
    with phase("uploading"), distributed.waiting(LONGEST):
        if distributed.is_main():
            name = next(name for name in UPLOADED if name in saved)
            folder, again = saved[name], ""
            output_dir = Path(args.output_dir)
            try:
                files = Written.read(output_dir).models.get(name)
                if not files:
                    raise NotUploaded(f"{output_dir / WRITTEN_FILE} does not say which files are the model's")
                again = f" To try again:\n  {command(args, folder, files)}"
                print(f"uploaded: {upload(args, folder, files)}", flush=True)
            except Exception as error:  # the HTTP library's own kinds, the Hub's, a file that cannot be read
                _say(f"WARNING: the model was not uploaded ({one_line(error)}). It is saved in {folder}.{again}")


def upload(args: HubFlags, folder: Path, files: list[str]) -> str:
    """Upload these files of the folder; returns the address. Raises whatever goes wrong."""
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
        raise NotUploaded(_public(args))
    api.upload_folder(
        repo_id=str(args.hub_model_id),
        folder_path=folder,
        allow_patterns=files,
        commit_message="Upload the trained model",
    )
    return str(address)


def _is_public(api: huggingface_hub.HfApi, args: HubFlags) -> bool:
    return args.hub_private and not api.model_info(str(args.hub_model_id)).private


def _public(args: HubFlags) -> str:
    return f"{args.hub_model_id} is there and public. Give another name, or --hub_private false."


def command(args: HubFlags, folder: Path, files: list[str]) -> str:
    """The command line of the Hub's own program that uploads the same."""
    words = ["hf", "upload", str(args.hub_model_id), str(folder), "."]
    words += ["--private" if args.hub_private else "--no-private"]
    return shlex.join(words + [word for file in files for word in ("--include", file)])


def _say(text: str) -> None:
    print(text, flush=True)
