"""A run without a reward model: scores from a function of the data's rows, a critic from the actor's model."""

from engine import distributed
from engine.errors import RunStopped
from engine.reward.base import CombinedReward
from engine.reward.function import FunctionReward
from engine.rlhf_engine import EngineSpec, RLHFEngine
from engine.rollout import build_rollouts
from engine.zero.config import EngineConfig
from tests.distributed.tiny_run import DIALECT, SAMPLING, TinyPrompts, prompt_tokens
from tests.engine.zero.inspecting import weights
from training.ppo_trainer import PPOConfig, PPOTrainer
from training.reporting.evaluation import Evaluator

PER_STEP = 8
TRAINING, HELD_OUT = 2 * PER_STEP, 5
ROWS = [{"bonus": 10 * index} for index in range(TRAINING)] + [{"bonus": -10 * index} for index in range(HELD_OUT)]
PENALTY, A_TOKEN = 0.5, 0.25  # of a response without an end, which the dialect subtracts, and for each token
UNCLIPPED = DIALECT.replaced(score_clip=None, missing_end="subtract", missing_end_value=PENALTY)


def words_and_bonus(prompts: list[str], responses: list[str], rows: list[dict]) -> list[float]:
    """Words of the response, and what the prompt's row adds."""
    return [len(response.split()) + row["bonus"] for response, row in zip(responses, rows, strict=True)]


def bonus_alone(prompts: list[str], responses: list[str], bonus: list[int]) -> list[float]:
    """What the column of the prompts' rows says."""
    return [float(each) for each in bonus]


def run(actor: str, stage: int) -> dict:
    """The critic as it starts; two steps, weights after each; held-out rows; what comes of a function that fails."""
    choices = {role: EngineConfig(role, stage) for role in ("actor", "critic")}
    engine = RLHFEngine.from_pretrained(
        EngineSpec(actor_path=actor, critic_path=None, with_reward_model=False, **choices)
    )
    function = FunctionReward(words_and_bonus, engine.tokenizer, ROWS)
    column = FunctionReward(bonus_alone, engine.tokenizer, ROWS)
    rollouts = build_rollouts("replica", engine.actor, engine.tokenizer)
    trainer = PPOTrainer(
        models=engine,
        rollouts=rollouts,
        dialect=UNCLIPPED,
        sampling=SAMPLING,
        config=PPOConfig(total_steps=2, micro_batch_size=3),
        reward=CombinedReward({"function": (function, 1.0), "bonus": (column, 0.0)}, length_penalty=A_TOKEN),
    )
    result = {"reward_engine": engine.reward, "critic": [weights(engine.critic)], "steps": []}
    evaluator = Evaluator(
        [prompt_tokens(1000 + index) for index in range(HELD_OUT)],
        rollouts=rollouts,
        experience_maker=trainer.experience_maker,
        sampling=SAMPLING,
        tokenizer=engine.tokenizer,
        first_index=TRAINING,
    )
    result["eval_before"] = evaluator.run(step=0)
    for report in trainer.fit(TinyPrompts(PER_STEP)):
        result["critic"].append(weights(engine.critic))
        result["steps"].append({"batch": report.batch, "metrics": report.metrics})
    result["eval_metrics"], result["eval_rows"] = evaluator.run(step=1)
    if distributed.rank() == distributed.world_size() - 1:
        function.function = lambda prompts, responses, rows: rows[0]["no such column"]
    try:
        trainer.step(TinyPrompts(PER_STEP).prompts(0))
    except RunStopped as stop:
        result["stop"] = str(stop)
    return result | {"steps_done": trainer.steps_done}
