"""Which layers of a run's models get LoRA factors, found out from configurations before anything is loaded."""

from engine.algorithms import Dialect
from engine.models.lora import LoraSpec
from engine.models.lora_check import AdaptedModel
from training.flags.lora_flags import LoraFlags
from training.flags.rlhf_arguments import RLHFFlags
from training.flags.supervised_arguments import SupervisedFlags


def adapted_lines(found: dict[str, AdaptedModel]) -> list[str]:
    """A line for each of them; found: by the models' names in the line."""
    return [f"LoRA of the {name}: {model.told()}" for name, model in found.items()]


def adapted_model(args: SupervisedFlags, scorer: bool) -> dict[str, AdaptedModel]:
    """The model of step 1 or (scorer) 2, if it has an adapter and is here; raises UserError where no layer is meant."""
    found = _adapted(args, args.lora(), "", "model_name_or_path", args.model_name_or_path, scorer)
    return {"model": found} if found else {}


def adapted_roles(args: RLHFFlags, dialect: Dialect) -> dict[str, AdaptedModel]:
    """Those of step 3 that have an adapter and are here; raises UserError where no layer is meant."""
    flags, spec = {"actor": "actor_model_name_or_path"}, args.engine_spec(dialect)
    specs = {"actor": spec.actor_lora, "critic": spec.critic_lora}
    if dialect.has_critic:
        own = dialect.critic_start == "reward_model" and args.critic_model_name_or_path is not None
        flags["critic"] = "critic_model_name_or_path" if own else flags["actor"]
    found = {
        role: _adapted(args, specs[role], f"{role}_", flag, getattr(args, flag), scorer=role == "critic")
        for role, flag in flags.items()
    }
    return {role: model for role, model in found.items() if model}


def _adapted(
    args: LoraFlags, spec: LoraSpec | None, model: str, path_flag: str, path: str, scorer: bool
) -> AdaptedModel | None:
    if spec is None or not args.looks_at(path):
        return None
    given = f"--{model}lora_dim {spec.dim}"
    if getattr(args, f"{model}lora_module_name"):
        given = f"--{model}lora_module_name {spec.targets}"
    elif args.lora_target_modules:
        given = f"--lora_target_modules {' '.join(args.lora_target_modules)}"
    return AdaptedModel.of(path, spec, f"{given}: --{path_flag}", scorer, args.trust_remote_code)
