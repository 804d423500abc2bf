"""The flags by which a trained model is uploaded to the Hugging Face Hub, which all three steps share."""

from dataclasses import dataclass

from huggingface_hub.utils import HFValidationError, validate_repo_id

from engine.errors import UserError
from training.flags.arguments import RunFlags, flag


@dataclass(kw_only=True)
class HubFlags(RunFlags):
    """Whether, and where to, the trained model is uploaded."""

    push_to_hub: bool = flag(
        False,
        "upload the trained model (step 3: the actor) to the Hugging Face Hub when the run has ended well; one that "
        "cannot be uploaded stays in its folder, and the command is printed that tries again",
        group="sharing",
    )
    hub_model_id: str | None = flag(None, "where to, as OWNER/NAME; a repository that is not there is made")
    hub_private: bool = flag(True, "make it for its owner alone; a public one is only written to with false")

    def validate_hub(self) -> None:
        """Raise UserError for an upload without a place, a place without an upload, or a name that is none."""
        if self.push_to_hub != (self.hub_model_id is not None):
            raise UserError("--push_to_hub and --hub_model_id OWNER/NAME go together: give both or neither.")
        if self.hub_model_id is None:
            return
        given = f"--hub_model_id {self.hub_model_id}"
        try:
            validate_repo_id(self.hub_model_id)
        except HFValidationError as error:
            raise UserError(f"{given}: no name of the Hub ({error}). Give OWNER/NAME.") from None
        if "/" not in self.hub_model_id:
            raise UserError(f"{given}: whose it is to be does not stand there. Give OWNER/NAME.")
