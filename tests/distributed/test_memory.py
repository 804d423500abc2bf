"""The plan of memory against the tensors of whole steps: bytes of storages, counted at every operation."""

import gc
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from engine.engine_spec import EngineSpec
from engine.experience import PromptBatch
from engine.models.lora import LoraSpec
from engine.rlhf_engine import RLHFEngine
from engine.rollout import SamplingConfig, build_rollouts
from engine.zero.config import EngineConfig
from scripts.benchmark_models import make_models
from scripts.harness.ranks import run_ranks
from tests.distributed.tiny_run import DIALECT
from tests.engine.meters import LiveBytes
from training.config.parsing import parse_flags
from training.data.examples import collate_prompts
from training.ppo_trainer import PPOConfig, PPOTrainer
from training.reporting import step_metrics
from training.reporting.step_metrics import PhaseMemory
from training.tools.memory.cluster import Cluster
from training.tools.memory.flags import MemoryFlags
from training.tools.memory.plan import PHASES, MemoryPlan, plan

SIZE = "34m"  # of actor and critic, by the names of scripts/benchmark_models.py


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run on `world` ranks.

    lora: the dimension of the adapters of actor and critic, which train alone; 0 for none. average: of the actor's
    weights. rows: responses of a rank; micro: those of one pass; prompt, response: tokens of each. backend,
    between_steps: as `build_rollouts` has them.
    """

    name: str
    world: int = 1
    stage: int = 0
    dtype: str = "fp32"
    checkpointing: bool = False
    average: bool = False
    lora: int = 0
    rows: int = 4
    micro: int = 2
    prompt: int = 64
    response: int = 16
    backend: str = "replica"
    between_steps: str = "keep"

    def models(self, folder: Path) -> tuple[str, str]:
        """Folders of its actor and its critic.

        The files are in float16, which no case computes in: weights of their file's own dtype stay where the file is
        mapped, on CPUs, and take no memory until they change.
        """
        return make_models(folder / SIZE, SIZE, SIZE, torch.float16)

    def spec(self, actor: str, critic: str) -> EngineSpec:
        """The engines of this case, of these folders' models."""
        lora = LoraSpec(dim=self.lora, only=True) if self.lora else None
        return EngineSpec(
            actor_path=actor,
            critic_path=critic,
            dtype=self.dtype,
            actor=EngineConfig("actor", self.stage),
            critic=EngineConfig("critic", self.stage),
            actor_gradient_checkpointing=self.checkpointing,
            critic_gradient_checkpointing=self.checkpointing,
            micro_batch_size=self.micro,
            ema_decay=DIALECT.ema_decay if self.average else None,
            actor_lora=lora,
            critic_lora=lora,
        )

    def planned(self, actor: str, critic: str) -> MemoryPlan:
        """What is planned for this case, on CPUs, from the models' configurations."""
        words = f"""--actor_model_name_or_path {actor} --critic_model_name_or_path {critic} --dtype {self.dtype}
            --actor_zero_stage {self.stage} --critic_zero_stage {self.stage} --num_gpus {self.world}
            --max_prompt_seq_len {self.prompt} --max_answer_seq_len {self.response} --num_eval_prompts 0
            --per_device_generation_batch_size {self.rows} --per_device_training_batch_size {self.micro}
            --gradient_accumulation_steps {self.rows // self.micro} --ppo_epochs 1
            --rollout_backend {self.backend} --replicas_between_steps {self.between_steps}"""
        if self.lora:
            words += f" --actor_lora_dim {self.lora} --critic_lora_dim {self.lora} --only_optimize_lora"
        if self.checkpointing:
            words += " --actor_gradient_checkpointing --critic_gradient_checkpointing"
        if self.average:
            words += " --enable_ema"
        return plan(parse_flags(MemoryFlags, words.split(), ""), Cluster(gpus=self.world, on_gpu=False))


CASES = [
    Case(name="stage 0, bf16", dtype="bf16", checkpointing=True, average=True),
    Case(name="stage 3", stage=3, world=2),
    Case(name="adapters, stage 3", lora=16, stage=3, world=2),
]


EOS = 2


class LivePeak(PhaseMemory):
    """Counts the most bytes alive within a phase by `LiveBytes`."""

    def __init__(self, live: LiveBytes):
        super().__init__()
        self.live = live

    def begin(self) -> None:
        """Count from what is alive now, without what only circles hold."""
        gc.collect()
        self.live.peak = self.live.live

    def end(self) -> int:
        """The peak since."""
        return self.live.peak


def counted(case: Case, actor: str, critic: str) -> dict[str, int]:
    """By phase the most bytes alive at once on this rank, of two steps: Adam has its moments in the second; what stays
    frozen is copied in the first."""
    with LiveBytes() as live:
        memory = step_metrics.phase_memory = LivePeak(live)
        memory.counting = True
        models = RLHFEngine.from_pretrained(case.spec(actor, critic))
        trainer = _trainer(case, models)
        trainer.step(_prompts(case))
        first = dict(memory.bytes)
        trainer.step(_prompts(case))
        memory.bytes |= {phase: max(first[phase], count) for phase, count in memory.bytes.items()}
        memory.bytes |= {"experience": memory.bytes["make_experience"]}
    return memory.bytes


def _prompts(case: Case) -> PromptBatch:
    """As long as they may be, so that nothing that is planned for stays unused."""
    tokens = [[5 + row] * case.prompt for row in range(case.rows)]
    return collate_prompts(tokens, torch.arange(case.rows), torch.zeros(case.rows, dtype=torch.int64), 0)


def _trainer(case: Case, models: RLHFEngine) -> PPOTrainer:
    rollouts = build_rollouts(
        case.backend,
        models.actor,
        models.tokenizer,
        others=models.engines,
        rows_at_once=case.rows,
        row_length=case.prompt + case.response,
        between_steps=case.between_steps,
    )
    return PPOTrainer(
        models=models,
        rollouts=rollouts,
        dialect=DIALECT,
        sampling=SamplingConfig(max_new_tokens=case.response, pad_token_id=0, stop_token_ids=(EOS,), seed=3),
        config=PPOConfig(total_steps=3, micro_batch_size=case.micro),
    )


MOST_OFF = 0.1


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_plan_says_what_tensors_take(case, folder):
    actor, critic = case.models(folder)
    counted = run_ranks(
        "tests.distributed.test_memory:counted",
        world=case.world,
        timeout=1200,
        case=case,
        actor=actor,
        critic=critic,
    )
    planned = case.planned(actor, critic)
    main = counted[0]
    tops = {phase: planned.peak_of(phase) for phase in PHASES}  # on a CPU all memory is the host's
    off = {phase: round((top.device + top.host).total() / main[phase] - 1, 3) for phase, top in tops.items()}
    assert all(abs(difference) <= MOST_OFF for difference in off.values()), (off, main)
