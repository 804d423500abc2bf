"""Steps 1, 2 and 3, and what came of them, for tests that ask the same of one process and of several."""

import gc
from collections.abc import Callable
from pathlib import Path

import torch

from engine import distributed
from engine.algo.masked import masked_sum
from engine.algorithms import Dialect
from engine.engine_spec import OptimizerSpec
from engine.experience import PromptBatch, Rollout, position_ids
from engine.models.config_and_tokenizer import read_tokenizer
from engine.models.loading import load_policy, new_scorer
from engine.models.policy import Scorer
from engine.rlhf_engine import EngineSpec, RLHFEngine, trained_model
from engine.rollout import SamplingConfig, build_rollouts
from engine.zero.communication import init
from engine.zero.config import EngineConfig
from engine.zero.engines import TrainedModel
from scripts.harness.models import EOS, PAD
from scripts.harness.weights import full_state
from training.data.examples import Pair, SFTExample, collate_pairs, collate_sft
from training.learner import accumulate_gradients
from training.ppo_trainer import PPOConfig, PPOTrainer
from training.runtime import model_folders
from training.step2_reward import pairs_loss

PROMPTS = ([5, 9, 33], [17], [40, 41, 42, 43, 44], [6, 60])
INDICES = (12, 7, 3, 30)
LEARNING_RATE = 1e-3
SEED = 11
OFFSET = -0.7
TEXTS = [SFTExample([5, 9, 33, 17, 40, 2], 2), SFTExample([41, 7, 63, 22, 4, 11, 30, 12, 9, 2], 1)]
PAIRS = [Pair([5, 9, 33, 2], [5, 9, 17, 40, 41, 2]), Pair([7, 63, 22, 4, 11, 30, 12, 9, 2], [7, 63, 2])]


def own_prompts() -> PromptBatch:
    """This rank's share of PROMPTS, left-padded."""
    rows = range(len(PROMPTS))[distributed.rank_share(len(PROMPTS))]
    width = max(len(PROMPTS[row]) for row in rows)
    ids = torch.tensor([[PAD] * (width - len(PROMPTS[row])) + PROMPTS[row] for row in rows])
    return PromptBatch(
        ids,
        (ids != PAD).long(),
        torch.tensor([INDICES[row] for row in rows]),
        torch.zeros(len(rows), dtype=torch.int64),
    )


def three_steps(base: str, output: str, stage: int, config: str | None = None, ranks: int = 1) -> dict:
    """Steps 1, 2 and 3, one update each. Every step starts from the folders that the steps before it have saved in
    `output`: sft, reward, actor and critic.

    config: a DeepSpeed file. ranks: how many of them hold the copy that draws. Returns, for each step, what came of it.
    """
    init()
    spec = EngineSpec(actor_path=base, critic_path=None, reward_paths=())
    tokenizer = read_tokenizer(base, "base")
    engine, adam = EngineConfig("model", stage, path=config), OptimizerSpec(lr=LEARNING_RATE)
    sft, reward = f"{output}/sft", f"{output}/reward"
    policy = trained_model(load_policy, base, engine, adam, spec)
    found = {"sft": {"loss": _updated(policy, sft_loss, TEXTS), "weights": full_state(policy.module.model)}}
    model_folders.save(policy, tokenizer, Path(output), "sft")
    scorer = trained_model(new_reward_model, sft, engine, adam, spec)
    head = full_state(scorer.module.model.score)
    found["reward"] = {"head": head, "loss": _updated(scorer, pair_loss, PAIRS)}
    found["reward"]["weights"] = full_state(scorer.module.model)
    scorer.module.model.config.score_offset = OFFSET  # as normalisation sets it
    model_folders.save(scorer, tokenizer, Path(output), "reward")
    return found | {"ppo": one_step(sft, reward, stage, config, ranks, output)}


def new_reward_model(path: str, dtype: torch.dtype, ds_config: dict, **how) -> Scorer:
    return new_scorer(path, dtype, PAD, SEED, ds_config, **how)


def sft_loss(policy: TrainedModel, rows: list[SFTExample]) -> torch.Tensor:
    """The sum over the rows' targets, as step 1 has it."""
    batch = collate_sft(rows, PAD)
    places, length = position_ids(batch.attention_mask), batch.loss_mask.shape[1]
    logprobs, _ = policy(batch.sequences, batch.attention_mask, places, response_length=length)
    return -masked_sum(logprobs, batch.loss_mask)


def pair_loss(scorer: TrainedModel, rows: list[Pair]) -> torch.Tensor:
    """The sum over the rows, as step 2 has it."""
    batch = collate_pairs(rows, PAD)
    token_scores = scorer(batch.sequences, batch.attention_mask, position_ids(batch.attention_mask))
    scores = scorer.module.sequence_scores(token_scores, batch.sequences, batch.attention_mask)
    return pairs_loss("last_token", batch, token_scores, scores)


def _updated(model: TrainedModel, loss: Callable, rows: list) -> float:
    """Make an update with this rank's share of the rows; returns the sum of the loss over all of them."""
    model.module.train()
    total = loss(model, rows[distributed.rank_share(len(rows))])
    accumulate_gradients(model, iter([total]), 1)
    assert model.step(LEARNING_RATE)
    return float(distributed.all_reduce_sum(total.detach()))


def one_step(
    actor: str,
    critic: str,
    stage: int,
    config: str | None = None,
    ranks: int = 1,
    output: str | None = None,
) -> dict:
    """generate, make_experience, one update of actor and critic; this rank's rows and, on rank 0, the new weights.
    config: a DeepSpeed file. ranks: how many of them hold the copy that draws. output: where actor and critic are saved
    then."""
    choices = {role: EngineConfig(role, stage, path=config) for role in ("actor", "critic")}
    engine = RLHFEngine.from_pretrained(EngineSpec(actor_path=actor, critic_path=critic, **choices))
    trainer = PPOTrainer(
        models=engine,
        rollouts=build_rollouts("replica", engine.actor, engine.tokenizer, tensor_parallel=ranks),
        dialect=Dialect(ppo_epochs=1, warmup_steps=0, actor_lr=LEARNING_RATE, critic_lr=LEARNING_RATE),
        config=PPOConfig(total_steps=1, micro_batch_size=1),
        sampling=SamplingConfig(max_new_tokens=6, pad_token_id=PAD, stop_token_ids=(EOS,), seed=SEED),
    )
    report = trainer.step(own_prompts())
    if output is not None:
        trainer.save_models(output)
    experience = report.batch
    names = ("logprobs", "ref_logprobs", "values", "scores", "advantages", "returns")
    columns = {name: getattr(experience, name) for name in names}
    return {
        "rows": rows_of(experience.rollout, columns),
        "metrics": report.metrics,
        "actor": full_state(engine.actor.module.model),
        "critic": full_state(engine.critic.module.model),
        "reference": full_state(engine.reference.model.module.model),
        "reward": full_state(engine.rewards[0].model.module.model),
    }


def rows_of(rollout: Rollout, columns: dict[str, torch.Tensor]) -> list[dict]:
    """Each row without its padding: prompt and response as lists, the columns cut to the response."""
    rows = []
    for row, mask in enumerate(rollout.response_mask):
        prompt = rollout.prompts[row][rollout.attention_mask[row, : rollout.prompt_length].bool()]
        cut = {name: column[row][mask] if column.dim() > 1 else column[row] for name, column in columns.items()}
        rows.append({"prompt": prompt.tolist(), "response": rollout.responses[row][mask].tolist(), **cut})
    return rows


def all_families(families: dict[str, tuple], **how) -> dict[str, dict]:
    """`three_steps` of each family: {family: (base, output, ranks)} -> {family: what came of it}."""
    gc.freeze()  # engines collect garbage as they are made: not each time through all that was imported
    return {name: three_steps(base, output, ranks=ranks, **how) for name, (base, output, ranks) in families.items()}
