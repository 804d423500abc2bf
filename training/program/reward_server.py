"""Whether the reward servers of a run are there and give scores, looked at before a model is loaded."""

from engine import distributed
from engine.errors import UserError, without_query
from engine.reward.server import FORMS, probe
from training.config.step3 import RLHFFlags
from training.program.plan import Plan, by_part


def check_server(args: RLHFFlags, plan: Plan) -> dict[str, float]:
    """What each server says of one text, asked from each node, whose ranks will all ask it; by URL.

    Raises: UserError where data lack a column that is to be sent, and where a server cannot be reached or gives no
    score.
    """
    settings = args.reward_server()
    if settings is None or distributed.local_rank() != 0:
        return {}
    for where, part in by_part(plan.prompts, plan.held_out).items():
        part.refuse_unread(settings.columns, f"--reward_url_columns {' '.join(settings.columns)} asks {where} for")
        row = part.rows[0]
        missing = [name for name in settings.columns if row.get(name) is None]
        if missing:
            raise UserError(
                f"--reward_url_columns {' '.join(settings.columns)}: {where} lack {missing[0]}: they have "
                f"{', '.join(row)}. Add the column, or name those that are there."
            )
    special_tokens = FORMS[settings.form].special_tokens
    prompt = plan.tokenizer.decode(plan.prompts[0], skip_special_tokens=not special_tokens)
    return probe(settings, prompt, plan.prompts.rows[0])


def server_lines(args: RLHFFlags) -> list[str]:
    """Who gives the scores, as a run's first lines have it; none without a server."""
    if not args.reward_url:
        return []
    columns = f", with {', '.join(args.reward_url_columns)}" if args.reward_url_columns else ""
    return [f"scores from {' and '.join(map(without_query, args.reward_url))} (form {args.reward_url_form}{columns})"]
