"""One rank of scripts/trial_links.py: PPO steps at ZeRO-3, with seconds, bytes over the network and collective calls of
each phase."""

import contextlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.harness.hosts import DEVICE  # noqa: E402

COLLECTIVES = {  # by name: the argument whose bytes are counted, None where it is an object
    "broadcast": 0,
    "all_reduce": 0,
    "all_gather_into_tensor": 0,
    "all_gather_single": 0,
    "reduce_scatter_tensor": 1,
    "all_gather": 1,
    "all_gather_object": None,
    "broadcast_object_list": None,
    "barrier": None,
}
AGREEMENTS = 20  # of all ranks on nothing, to tell what one takes


def counters() -> dict[str, tuple[int, int]]:
    """Bytes that each interface of this process's network has received and sent; proc(5)."""
    lines = [line.split(":") for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]]
    return {name.strip(): (int(numbers.split()[0]), int(numbers.split()[8])) for name, numbers in lines}


class Ledger:
    """What is spent by phase: seconds, bytes received and sent by the host, and collective calls with their bytes."""

    def __init__(self, device: str):
        self.device, self._open = device, []
        self.phases: dict[str, dict] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what happens within the block for a phase, and for those around it."""
        entry = self.phases.setdefault(name, {"seconds": 0.0, "received": 0, "sent": 0, "calls": Counter()})
        self._open.append(entry)
        received, sent = self._bytes()
        started = time.perf_counter()
        try:
            yield
        finally:
            entry["seconds"] += time.perf_counter() - started
            now = self._bytes()
            entry["received"] += now[0] - received
            entry["sent"] += now[1] - sent
            self._open.remove(entry)

    def _bytes(self) -> tuple[int, int]:
        return counters().get(self.device, (0, 0))

    def watch(self) -> None:
        """Count collective calls from now on."""
        import torch.distributed as dist

        for name, place in COLLECTIVES.items():
            if hasattr(dist, name):
                setattr(dist, name, self._counted(name, getattr(dist, name), place))

    def _counted(self, name: str, function, place: int | None):
        def call(*args, **kwargs):
            size = 0
            if place is not None:
                value = args[place] if len(args) > place else next(iter(kwargs.values()))
                size = value.numel() * value.element_size()
            for entry in self._open:
                entry["calls"][name] += 1
                entry["calls"][f"{name} bytes"] += size
            return function(*args, **kwargs)

        return call

    def taken(self) -> dict[str, dict]:
        """What has been counted since the last time, by phase."""
        phases, self.phases = self.phases, {}
        return {name: {**entry, "calls": dict(entry["calls"])} for name, entry in phases.items()}


def main(options: dict) -> None:
    """Run the steps; the first rank of each host writes what it counted."""
    os.environ["GLOO_SOCKET_IFNAME"] = DEVICE
    import torch

    from engine import distributed
    from engine.zero.communication import init

    torch.set_num_threads(1)
    init(timeout_minutes=10, what_by_node=options.get("by_node", "gathers"))
    ledger = Ledger(DEVICE)
    ledger.watch()
    trainer = build(options, ledger)
    steps = []
    for step in range(options["steps"] + options["warmup"]):
        prompts = make_prompts(options, step)
        distributed.barrier()
        with ledger.phase("step"):
            report = trainer.step(prompts)
            distributed.barrier()
        steps.append({"phases": ledger.taken(), "entropy": report.metrics["objective/entropy"]})
    agreements = []
    for _ in range(AGREEMENTS):
        started = time.perf_counter()
        distributed.any_rank(False)
        agreements.append(time.perf_counter() - started)
    for step in steps:
        step["agreement"] = median(agreements)
    if distributed.local_rank() == 0:
        path = Path(options["output"]) / f"host_{distributed.rank()}.json"
        path.write_text(json.dumps(steps[options["warmup"] :]))
    distributed.barrier()
    distributed.shutdown()
    sys.stdout.flush()
    os._exit(0)  # in an orderly exit gloo's threads may abort


def build(options: dict, ledger: Ledger):
    """The trainer of four engines, whose phases and gathers the ledger counts."""
    import engine.whole_copies
    import training.ppo_trainer
    from engine.algorithms import get_dialect
    from engine.reward.function import FunctionReward
    from engine.rlhf_engine import EngineSpec, RLHFEngine
    from engine.rollout import SamplingConfig, build_rollouts
    from engine.zero.config import EngineConfig
    from training.ppo_trainer import PPOConfig, PPOTrainer

    configs = {role: EngineConfig(role, 3, path=options.get("files", {}).get(role)) for role in ("actor", "critic")}
    spec = EngineSpec(
        actor_path=options["actor"],
        critic_path=options["critic"],
        dtype=options["dtype"],
        micro_batch_size=options["micro_batch"],
        **configs,
    )
    models = RLHFEngine.from_pretrained(spec)
    length = options["prompt_length"] + options["response_length"]
    rows = options["prompts"] // int(os.environ["WORLD_SIZE"]) // options.get("turns", 1)
    rollouts = build_rollouts(
        options["rollout_backend"],
        models.actor,
        models.tokenizer,
        others=models.engines,
        rows_at_once=rows,
        row_length=length,
        decoding="plain",
    )
    dialect = get_dialect("default").override(ppo_epochs=options["ppo_epochs"], actor_lr=1e-6, critic_lr=1e-6)
    fill = engine.whole_copies._fill

    def counted_fill(*args, **kwargs):
        with ledger.phase("gather"):
            return fill(*args, **kwargs)

    engine.whole_copies._fill = counted_fill

    class CountedClock(training.ppo_trainer.PhaseClock):
        """A PhaseClock whose phases the ledger counts, too."""

        @contextlib.contextmanager
        def __call__(self, phase: str) -> Iterator[None]:
            with ledger.phase(phase), super().__call__(phase):
                yield

    training.ppo_trainer.PhaseClock = CountedClock
    exact = options["dtype"] == "fp32"
    sampling = SamplingConfig(
        max_new_tokens=options["response_length"],
        pad_token_id=models.tokenizer.pad_token_id,
        stop_token_ids=(),
        logprob_temperature=dialect.logprob_temperature,
        with_entropy=dialect.takes_sampled_logprobs(exact),
    )
    config = PPOConfig(
        total_steps=10**6,
        micro_batch_size=options["micro_batch"],
        exact_sampler=exact,
        overlap_gather=options.get("overlap_gather", False),
    )
    reward = None
    if "reward_seconds" in options:
        reward = FunctionReward(slow(options["reward_seconds"]), models.tokenizer)
        if options.get("overlap_rewards"):
            rollouts.finished = reward.begin
    return PPOTrainer(
        models=models, rollouts=rollouts, dialect=dialect, config=config, sampling=sampling, reward=reward
    )


def slow(seconds: float) -> Callable[[list[str], list[str]], list[float]]:
    """A reward function that waits so long for each response, as for a server."""

    def scores(prompts: list[str], responses: list[str]) -> list[float]:
        time.sleep(seconds * len(responses))
        return [float(len(response) % 7) for response in responses]

    return scores


def make_prompts(options: dict, step: int):
    """This rank's share of a step's prompts, as the benchmark makes them."""
    from scripts import benchmark_ours

    setting = benchmark_ours.Setting(
        name="links",
        actor=options["actor"],
        critic=options["critic"],
        prompts=options["prompts"],
        prompt_length=options["prompt_length"],
        response_length=options["response_length"],
    )
    return benchmark_ours.make_prompts(setting, step)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
