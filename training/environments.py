"""From --environment to a backend that draws conversations. Step 3 and the measuring programs use this file.

form, with_dialogues = prompts_for(args)               # how its prompts are read
environments = environments_of(args, tokenizer, [prompts, held_out])
rollouts = conversations(args, rollouts, environments)
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

from torch.utils.data import ConcatDataset

from engine.errors import UserError
from engine.rollout import Conversations, Environments, RolloutBackend
from engine.rollout.environments import is_own, response_template, tool_schemas
from training.config.environment import EnvironmentFlags
from training.config.reward import load_named
from training.data.examples import Prompts
from training.data.record_forms import PROMPTS, Form, prompts_with


def load_environment(args: EnvironmentFlags, text_reward_paths: Sequence[str] = ()) -> Callable | None:
    """The class that --environment names; None without the flag. text_reward_paths: the reward models that read texts.
    Raises: UserError if it cannot be loaded, or if there are such models."""
    if args.environment is None:
        return None
    if text_reward_paths:
        raise UserError(
            f"--environment with --reward_model_name_or_path {text_reward_paths[0]}: that model reads texts by its own "
            "chat template, and a response of several turns is no single answer. Leave the model out, give one with "
            "the actor's tokens, or a --reward_function."
        )
    return load_named(args.environment, args.word("environment"), "class")


def prompts_for(args: EnvironmentFlags) -> tuple[Form, bool]:
    """(the form of the prompts, which describes the environment's tools; whether their dialogues are kept)."""
    if (made := load_environment(args)) is None:
        return PROMPTS, False
    return prompts_with(tool_schemas(made, args.word("environment"))), not is_own(made)


def environments_of(args: EnvironmentFlags, tokenizer, parts: Sequence[Prompts | None]) -> Environments | None:
    """The environments of these prompts, which are numbered one part after the other; None without --environment. Tries
    one with the first row. Raises: UserError if that fails."""
    if (made := load_environment(args)) is None:
        return None
    prompts = [part for part in parts if part is not None]
    starts = [0, *accumulate(map(len, prompts))]

    def opening(index: int, said: str) -> list[int]:
        part = bisect_right(starts, index) - 1
        return prompts[part].opened(index - starts[part], said)

    rows, dialogues = (ConcatDataset([getattr(part, name) for part in prompts]) for name in ("rows", "dialogues"))
    template = response_template(args.response_template, tokenizer)
    schemas = tool_schemas(made, args.word("environment"))
    environments = Environments(made, tokenizer, rows, schemas, dialogues, template=template, opening=opening)
    others = ("reward_model_name_or_path", "reward_function", "reward_url")
    environments.check(args.word("environment"), alone=not any(getattr(args, name, None) for name in others))
    return environments


def conversations(
    args: EnvironmentFlags, rollouts: RolloutBackend, environments: Environments | None
) -> RolloutBackend:
    """A backend whose responses are conversations, of turns that `rollouts` draws; `rollouts` without environments."""
    if environments is None:
        return rollouts
    return Conversations(
        rollouts,
        environments,
        turns=args.max_turns,
        turn_tokens=args.max_turn_tokens,
        seconds=args.environment_timeout,
        threads=args.environment_threads,
    )


def environment_line(args: EnvironmentFlags) -> list[str]:
    """A line about the conversations of a run; [] without an environment."""
    given = args.environment, args.max_turns, args.environment_threads
    return ["environment {}: up to {} turns a response, {} at a time on each rank".format(*given)] * bool(given[0])
