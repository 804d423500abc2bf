"""PPO steps of a size that people train, in 16 bits, whose rows have other lengths in each step: what a phase takes, of
the GPU's arithmetic and memory too, and which kernels take it.
"""

import math
from collections.abc import Iterable
from unittest import mock

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from engine.experience import PromptBatch
from scripts.gpu_checks import steps
from scripts.gpu_checks.attention import ISSUE, allowed
from scripts.gpu_checks.check import Trial
from scripts.gpu_checks.decoding import sixteen_bits, told
from scripts.gpu_checks.machine import device
from scripts.gpu_checks.models import MICRO_BATCH, new_trainer, prompts, sizes_here
from training.ppo_trainer import PPOTrainer

# {name: settings of new_trainer}. The first is what a run on one GPU does if nothing is asked for.
USUAL = "stage 1"
PADDED = "stage 1, padded"
LARGER = "stage 1, 32 rows a micro-batch"
SETTINGS: dict[str, dict] = {
    USUAL: {"stage": 1},
    "stage 1, equal lengths": {"stage": 1, "ragged": False},  # as docs/performance.md counts a step
    LARGER: {"stage": 1, "micro_batch": 32},
    "stage 0": {"stage": 0},
    PADDED: {"stage": 1, "packing": "padded"},
    "stage 3": {"stage": 3},  # the last, because DeepSpeed keeps its partitions
}
# of a step; the longest prompt, and the longest response; of a setting
ROWS = 64
LENGTH = 256
STEPS = 3
PHASES = {"generate": "generate", "make_experience": "experience", "train": "train"}
MFU = 0.4  # model FLOPs utilisation of training that is aimed at
LARGEST = 25  # kernels that are told
BUSY = 0.85  # of the time, in which the GPU computes or copies, at least
PASSES = 6  # of a micro-batch in experience and training: four models, then actor and critic
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")  # beginnings of names in a profile
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def at_stages(trial: Trial) -> None:
    """Steps of 64 responses of up to 256 tokens in each setting, and a profile of one."""
    size, critic_size = sizes_here(trial)
    trial.tell({"models": f"{size} and {critic_size}"})
    first, seconds = {}, {}
    for name, setting in SETTINGS.items():
        trainer = None
        with trial.part(name):
            if not trial.dry:
                torch.cuda.reset_peak_memory_stats()
            with trial.first_time(f"{name}, engines"):
                trainer = new_trainer(
                    trial,
                    size=size,
                    critic_size=critic_size,
                    dtype="fp32" if trial.dry else sixteen_bits(trial),
                    tokens=LENGTH,
                    count=ROWS,
                    **{"ragged": True} | setting,
                )
            trial.tell({f"{name}, why": trainer.rollouts.why or "", f"{name}, packs": trainer.models.packs})
            if trial.needs_gpu("whether loading a model leaves cuDNN's attention off"):
                on = torch.backends.cuda.cudnn_sdp_enabled()
                trial.expect(not on, f"{name}: cuDNN's attention is on", f"Training may end in NaN: {ISSUE}.")
            with trial.first_time(f"{name}, its first step"):
                begin = step(trial, name, trainer, 0)
            several = [step(trial, name, trainer, number) for number in range(1, STEPS)]
            first = first or begin
            if setting.get("ragged", True):
                steps.compared(trial, name, begin, first)
            told(trial, name, trainer.rollouts)
            seconds[name] = min(each["time/step"] for each in several)
            advised(trial, name, several[-1])
            if name == USUAL:
                with trial.first_time("a profile"):
                    profiled(trial, trainer)
            if name == PADDED and trial.needs_gpu("steps with cuDNN's attention"):
                with_cudnn(trial, trainer, seconds[name])
        if trainer is not None:
            trainer.models.destroy()
        trainer = None
        steps.give_back()
    slower(trial, seconds)


def with_cudnn(trial: Trial, trainer: PPOTrainer, without: float) -> None:
    """The same padded steps where torch may choose cuDNN's attention. without: seconds of one if it may not."""
    with allowed(True), trial.first_time("steps with cuDNN's attention"):
        least = min(step(trial, "with cuDNN", trainer, number)["time/step"] for number in range(1, STEPS))
    trial.find(
        least < 0.95 * without,
        f"a padded step takes {least:.2f} s with cuDNN's attention, {without:.2f} without",
        f"--attn_implementation cudnn is faster; take it only if {ISSUE} is mended here: `attention` says so.",
    )


def step(trial: Trial, name: str, trainer: PPOTrainer, number: int) -> dict[str, float]:
    """One step; tells its phases' seconds, their share of the GPU's arithmetic, and its memory. Returns its metrics."""
    found = trainer.step(batch_of(trial, trainer, number)).metrics
    phases = [
        f"{short} {found[f'time/{phase}']:.3f}" + (f" ({found[f'mfu/{phase}']:.0%})" if f"mfu/{phase}" in found else "")
        for phase, short in PHASES.items()
    ]
    held, reserved = (0, 0) if trial.dry else (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
    memory = f"{held / 1e9:.1f} GB held, {reserved / 1e9:.1f} reserved"
    length = found["rollout/response_length"]
    words = f"{' + '.join(phases)} = {found['time/step']:.3f} s (MFU); {memory}; {length:.0f} tokens a response"
    trial.tell({f"{name}, step {number}": words})
    odd = [key for key in ("policy/grad_norm", "value/grad_norm") if not math.isfinite(found[key])]
    trial.expect(
        not odd,
        f"{name}, step {number}: {', '.join(odd)} not finite",
        "If a kernel of attention is not finite above, it is that (engine/models/attention.py); else look at the loss.",
    )
    return found


def batch_of(trial: Trial, trainer: PPOTrainer, number: int) -> PromptBatch:
    """The prompts of a step."""
    vocabulary = trainer.models.actor.module.model.config.vocab_size
    count, length = 4 if trial.dry else ROWS, trainer.sampling.max_new_tokens
    ragged = bool(trainer.sampling.stop_token_ids)
    return prompts(count, length, vocabulary, first=1000 * number, ragged=ragged).to(device())


def advised(trial: Trial, name: str, found: dict[str, float]) -> None:
    """What to change where a step does not use what the GPU has. found: its metrics."""
    mfu = found.get("mfu/train")
    if mfu is not None:
        trial.find(
            mfu < MFU,
            f"{name}: training uses {mfu:.0%} of the GPU's arithmetic, not {MFU:.0%}",
            "See the kernels of the profile and how long the GPU was idle; raise --per_device_training_batch_size "
            "while memory allows.",
        )
    if not trial.dry:
        held, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        trial.find(
            reserved > 1.2 * held,
            f"{name}: torch reserved {reserved / 1e9:.0f} GB, of which tensors held {held / 1e9:.0f} at most",
            "Rows of many lengths leave holes: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.",
        )


def slower(trial: Trial, seconds: dict[str, float]) -> None:
    """Settings that take another time beside the first than they should. seconds: of the fastest step, by setting."""
    if USUAL not in seconds or not trial.needs_gpu("which setting is faster"):
        return
    least = seconds[USUAL]
    trial.tell({f"{name}, s a step": round(taken, 3) for name, taken in seconds.items()})
    for name, then in (
        (LARGER, "Raise --per_device_training_batch_size: a micro-batch is too small for this GPU."),
        (PADDED, "--packing padded is faster: engine/models/attention.py should not take varlen on this GPU."),
        ("stage 0", "--actor_zero_stage 0 is faster: let chosen_stage in engine/zero/config.py choose it."),
    ):
        taken = seconds.get(name, math.inf)
        trial.find(taken < 0.98 * least, f"a step takes {taken:.2f} s ({name}), {least:.2f} ({USUAL})", then)
    third = seconds.get("stage 3", 0.0)
    trial.find(
        third > 1.3 * least,
        f"a step takes {third:.2f} s at stage 3, {least:.2f} ({USUAL})",
        "On one GPU nothing is partitioned: the rest is hooks and waits (engine/zero/gathering.py, and DeepSpeed's).",
    )


def profiled(trial: Trial, trainer: PPOTrainer) -> None:
    """The largest kernels of making experience and training, how often the host launches and waits, and how long the
    GPU does neither. Decoding is left out: its graphs launch a hundred thousand kernels, and `decoding` times it."""
    activity = ProfilerActivity.CPU if trial.dry else ProfilerActivity.CUDA
    recorded = profile(activities=[activity])
    maker = trainer.experience_maker

    def recorded_from_here(*args, make=maker.make_experience):
        recorded.start()
        return make(*args)

    with mock.patch.object(maker, "make_experience", recorded_from_here):
        found = trainer.step(batch_of(trial, trainer, STEPS)).metrics
    recorded.stop()
    tell_profile(trial, recorded.key_averages(), found["time/make_experience"] + found["time/train"])


def tell_profile(trial: Trial, events: Iterable, seconds: float) -> None:
    """Tell what is in a profile. events: averages of torch's profiler. seconds: that were profiled."""
    events = [event for event in events if not event.is_user_annotation]
    kernels = [event for event in events if (event.device_type == DeviceType.CPU) == trial.dry]
    time_of = "self_cpu_time_total" if trial.dry else "self_device_time_total"
    kernels.sort(key=lambda event: -getattr(event, time_of))
    for number, event in enumerate(kernels[:LARGEST], 1):
        trial.tell({f"kernel {number}: {event.key[:80]}": f"{getattr(event, time_of) / 1e3:.2f} ms of {event.count}"})
    busy = sum(getattr(event, time_of) for event in kernels) / 1e6
    launches, waits = (counted(events, names) for names in (LAUNCHES, WAITS))
    copies = {event.key: event.count for event in kernels if event.key.startswith("Memcpy")}
    trial.tell({"launches": launches, "waits": waits, "copies": ", ".join(f"{n} {key}" for key, n in copies.items())})
    trial.tell({"the GPU is busy": f"{busy:.2f} of {seconds:.2f} s"})
    if not trial.needs_gpu("how much of a profile may be waiting"):
        return
    trial.find(
        busy < BUSY * seconds,
        f"the GPU is idle for {1 - busy / seconds:.0%} of making experience and training ({launches} launches)",
        "The host launches too slowly: raise --per_device_training_batch_size, so that a kernel does more; then look "
        "for what is launched once a parameter: the kernels with the highest counts.",
    )
    passes = PASSES * -(-ROWS // MICRO_BATCH)
    trial.find(
        waits > 2 * passes,
        f"the host waits {waits} times for the GPU in {passes} passes",
        'Who asks: torch.cuda.set_sync_debug_mode("warn") before a step prints each line that waits.',
    )


def counted(events: Iterable, names: tuple[str, ...]) -> int:
    """How many calls of these names, or of names that begin so, there were."""
    return sum(event.count for event in events if event.key.startswith(names))
