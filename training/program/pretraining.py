"""The critic's pretraining as a run does it: progress, metrics, restart points, and the folder of the critic."""

import json

from engine import distributed
from engine.errors import without_query
from engine.host_memory import give_back_at
from engine.whole_files import write_whole
from training.critic_pretraining import CriticPretraining
from training.group_sampling import PromptFeed
from training.ppo_trainer import StepReport
from training.program import model_folders, output_folder, output_lock, stopping
from training.program.model_files import PRETRAINING_RECORD
from training.program.phases import phase, place
from training.program.session import Session
from training.program.unwritten import going_on

FOLDER = output_folder.PRETRAINED[0]


def pretrain(session: Session, pretraining: CriticPretraining, feed: PromptFeed) -> None:
    """Every step of it that is not done, and the folder of the critic.

    Steps are numbered up to 0, which the held-out scores before the first PPO step have too: the last one's metrics
    wait for them (`Session.before_first_step`).
    """
    trainer, writer = pretraining.trainer, session.writer
    shown = {"loss": "critic_pretrain/loss", "explained variance": "critic_pretrain/explained_variance"}
    how = {"unit": "critic pretraining step", "below": pretraining.steps}
    writer.count(pretraining.steps, shown=shown, first_step=pretraining.steps_done, **how)
    with stopping.at_borders():
        while trainer.steps_done < 0:
            place.step = trainer.steps_done + 1
            with phase("pretraining the critic"):
                report = pretraining.step(feed.prompts(pretraining.steps_done))
            _after_step(session, pretraining, report)
    writer.count(session.plan.last_step, shown=session.view.bar)


def _after_step(session: Session, pretraining: CriticPretraining, report: StepReport) -> None:
    output_lock.check_held()
    session.owed = {**report.metrics, **session.checkpoints.take_metrics()}
    if report.step == 0:
        _save(session, pretraining, report.metrics)
    reason = stopping.agreed()
    if reason:
        session.end_early(reason, report)
    if report.step < 0:
        session.log_step(report.step, 0)
        session.checkpoints.save_if_due(report.step)
    stopping.request.saved = session.checkpoints.newest
    give_back_at(report.step)


@phase("saving models")
def _save(session: Session, pretraining: CriticPretraining, metrics: dict[str, float]) -> None:
    """Write the critic, as those of a run's end are written, with a record of how it came to be (all ranks call
    this)."""
    critic, output_dir = session.models.critic, session.output_dir
    merged = model_folders.merged_wanted(session.args.save_merged, [critic], output_dir)
    saved = model_folders.save_forms(critic, session.own_tokenizer, output_dir, FOLDER, merged)
    if not distributed.is_main():
        return
    args, dialect = session.args, session.plan.dialect
    record = {
        "steps": pretraining.steps,
        "learning_rate": args.critic_pretrain_learning_rate or dialect.critic_lr,
        "gamma": dialect.gamma,
        "actor": args.actor_model_name_or_path,
        "critic": args.critic_model_name_or_path,
        "reward_model": args.reward_path,
        "reward_function": args.reward_function,
        "reward_url": list(map(without_query, args.reward_url)),
        **metrics,
    }
    for name, folder in saved.items():
        with going_on(folder / PRETRAINING_RECORD):
            output_folder.list_model(output_dir, name, [PRETRAINING_RECORD])
            write_whole(folder / PRETRAINING_RECORD, json.dumps(record, indent=2) + "\n")
    explained = metrics.get("critic_pretrain/explained_variance")
    told = f", explained variance {explained:.2f}" if explained is not None else ""
    session.writer.write(f"critic pretrained in {pretraining.steps} steps{told}: {', '.join(map(str, saved.values()))}")
