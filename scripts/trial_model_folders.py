"""Whether a run trains the very model that transformers makes of a folder, at ZeRO stages 0 and 3 on two ranks.

    python scripts/trial_model_folders.py                       all, about a quarter of an hour on two cores
    python scripts/trial_model_folders.py llama gpt2 --only folders

Folders of ten families, with output heads of all kinds (FORMS): tied and not, config.json and weight files agreeing on
that and not, and adapters of peft's. Step 3 trains each for a step at a learning rate of 1e-9, and for another one from
its checkpoint. A line for each has the largest difference of a log-prob from transformers' own load of the
folder: of actor and reference as their engines compute, before and after the restart; of the saved actor, its adapter
and its moving average; and of what the checkpoint is exported to. So has the hidden state of a critic that begins
with the actor's trunk. More than MOST_OFF is wrong.

Of PROGRAMS' folders the command lines are tried too: step 3, its checkpoint exported, merged and compared. Exit code
1 where something is otherwise.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, it finds the project
os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}  # before torch is imported

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.utils import logging

from engine import distributed
from engine.experience import position_ids
from engine.models.model_paths import base_of, is_adapter
from engine.zero.communication import init
from scripts.harness import ROOT
from scripts.harness.models import UNK, VOCABULARY, family_config, make_family, save_random
from scripts.harness.programs import (
    PIPES,
    begun,
    by_torchrun,
    command_line,
    ended,
    launch_words,
    run_caught,
    write_partitioned,
)
from training import step3_rlhf
from training.checkpoints.resuming import Checkpoint
from training.tools.export.model_folder import export

NAMES = ("llama", "mistral", "mixtral", "qwen2", "gemma2", "phi", "gpt2", "gpt_neox", "opt", "falcon")
MOST_OFF = 1e-5
PROGRAMS = {"llama": "tied_two", "gpt2": "silent_two"}
REFUSED = ("untied_none", "tied_head_alone")
SEQUENCES = (torch.arange(4 * 12).view(4, 12) * 7919) % VOCABULARY
WAYS = {  # flags beside those of all runs
    "whole": {"set": "critic_start=zero_head"},  # a critic with the actor's trunk
    "hydra": {"set": "hydra_layers=1"},
    # adapters that go on from the folder's, or new ones
    "lora": {"actor_lora_dim": 4, "only_optimize_lora": True, "actor_lora_learning_rate": 1e-9},
}


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"by default {', '.join(NAMES)}")
    parser.add_argument("--only", choices=("folders", "programs"), help="leave the other part out")
    options = parser.parse_args(arguments)
    print(f"| family | folder | stage | way | right | largest differences |\n{'| --- ' * 6}|", flush=True)
    verdicts: list[bool] = []
    for family in options.families or NAMES:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"  # tokenised data
            if options.only != "programs":
                verdicts += try_family(family, Path(folder) / "folders")
            if family in PROGRAMS and options.only != "folders":
                verdicts += try_programs(family, PROGRAMS[family], Path(folder) / "programs")
    print(f"\n{sum(verdicts)} of {len(verdicts)} are right")
    return int(not all(verdicts))


def tied(folder: Path, family: str) -> None:
    """One matrix, as config.json says."""
    _save(folder, family, True)


def untied(folder: Path, family: str) -> None:
    """Two matrices, as config.json says."""
    _save(folder, family, False)


def tied_two(folder: Path, family: str) -> None:
    """Two matrices, and config.json says that they are one."""
    _save(folder, family, False)
    _say(folder, tie_word_embeddings=True)


def silent_two(folder: Path, family: str) -> None:
    """Two matrices, and config.json says nothing, so that the family's default counts."""
    _save(folder, family, False)
    config = json.loads((folder / "config.json").read_text())
    del config["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(config))


def tied_two_pickled(folder: Path, family: str) -> None:
    """As tied_two, by torch.save."""
    tied_two(folder, family)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def tied_two_in_shards(folder: Path, family: str) -> None:
    """As tied_two, in many files."""
    _save(folder, family, False, max_shard_size="8KB")
    _say(folder, tie_word_embeddings=True)


def tied_copies(folder: Path, family: str) -> None:
    """One matrix that is in the file under both names, as torch.save leaves it."""
    tied(folder, family)
    torch.save(AutoModelForCausalLM.from_pretrained(folder).state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def tied_head_alone(folder: Path, family: str) -> None:
    """One matrix, in the file under the head's name: to be refused as what a critic, which has no head, is made of."""
    tied(folder, family)
    ((head, embedding),) = AutoModelForCausalLM.from_pretrained(folder)._tied_weights_keys.items()
    state = load_file(folder / "model.safetensors")
    save_file(state | {head: state.pop(embedding)}, folder / "model.safetensors", {"format": "pt"})


def untied_none(folder: Path, family: str) -> None:
    """One matrix, and config.json says that there are two: to be refused."""
    tied(folder, family)
    _say(folder, tie_word_embeddings=False)


def adapter_of_two(folder: Path, family: str) -> None:
    """An adapter of all layers, of a base as of tied_two."""
    _adapter(folder, family, tied_two)


def adapter_of_tied(folder: Path, family: str) -> None:
    """An adapter of all layers, of a tied base."""
    _adapter(folder, family, tied)


def merged_by_peft(folder: Path, family: str) -> None:
    """What peft's merge_and_unload leaves of a tied model with a trained head."""
    tied(folder, family)
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_pretrained(folder)
    config = LoraConfig(target_modules="all-linear", r=4, modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    model = get_peft_model(model, config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    model.merge_and_unload().save_pretrained(folder)


FORMS: dict[str, Callable[[Path, str], None]] = {
    form.__name__: form
    for form in (
        tied,
        untied,
        tied_two,
        silent_two,
        tied_two_pickled,
        tied_two_in_shards,
        tied_copies,
        tied_head_alone,
        untied_none,
        adapter_of_two,
        adapter_of_tied,
        merged_by_peft,
    )
}
EVERY = ("tied", "untied", "tied_two", "adapter_of_two")
"""Forms that are tried of every family; all are of llama and gpt2."""


def _save(folder: Path, family: str, tie: bool, **how) -> None:
    config = family_config(family)
    config.tie_word_embeddings = tie
    model = AutoModelForCausalLM.from_config(config)
    save_random(model, folder)
    if how:
        (folder / "model.safetensors").unlink()
        model.save_pretrained(folder, **how)


def _say(folder: Path, **settings) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def _adapter(folder: Path, family: str, form: Callable[[Path, str], None]) -> None:
    base = folder.with_name(f"base_of_{folder.name}")
    form(base, family)
    torch.manual_seed(3)
    layers = ["q_proj", "v_proj"] if family == "mixtral" else "all-linear"  # its experts are parameters of no layer
    config = LoraConfig(target_modules=layers, r=4, init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(folder)


def write_prompts(folder: Path) -> Path:
    """Sixteen prompts of two words."""
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"w{10 + row} w{30 + row}"}) + "\n" for row in range(16)))
    return path


def try_family(family: str, folder: Path) -> list[bool]:
    """A line for each of a family's folders; returns whether each is right."""
    make_family(family, folder)
    prompts, whole = write_prompts(folder), family in PROGRAMS
    names = list(FORMS if whole else EVERY)
    for name in names:
        FORMS[name](folder / name, family)
    tried = [(name, "whole") for name in names]
    tried += [(name, way) for way in ("hydra", "lora") for name in names if whole and "two" in name]
    jobs = {
        f"{name} {stage} {way}": flags_of(folder, prompts, name, stage, way) for name, way in tried for stage in (0, 3)
    }
    ended_by = run_on_ranks(jobs, folder)
    verdicts = []
    for job, flags in jobs.items():
        name, stage, way = job.split()
        code, said = ended_by[job]
        if code:
            right, text = name in REFUSED and code == 2, f"exit code {code}: {said.replace(str(folder), '')[-150:]}"
        else:
            gaps = gaps_of(folder / name, flags["output_dir"], way)
            right = name not in REFUSED and max(gaps.values()) <= MOST_OFF
            text = ", ".join(f"{what} {gap:.1e}" for what, gap in gaps.items())
        verdicts.append(right)
        print(f"| {family} | {name} | {stage} | {way} | {'yes' if right else 'NO'} | {text} |", flush=True)
    return verdicts


def flags_of(folder: Path, prompts: Path, name: str, stage: int, way: str) -> dict:
    """Step 3's flags for the folder of this name."""
    flags = {
        "actor_model_name_or_path": folder / name,
        "critic_model_name_or_path": folder / "reward",
        "data_path": prompts,
        "output_dir": folder / "out" / f"{name}_{stage}_{way}",
        "max_prompt_seq_len": 6,
        "max_answer_seq_len": 6,
        "num_eval_prompts": 0,
        "per_device_generation_batch_size": 4,
        "per_device_training_batch_size": 4,
        "actor_learning_rate": 1e-9,
        "critic_learning_rate": 1e-9,
        "actor_zero_stage": stage,
        "critic_zero_stage": stage,
        "dtype": "fp32",
        "enable_ema": True,
        "max_steps": 2,
        "save_steps": 1,
    }
    if stage == 3:
        config = write_partitioned(folder / "zero3.json")
        flags |= {"actor_ds_config": config, "critic_ds_config": config}
    return flags | WAYS[way]


def run_on_ranks(jobs: dict[str, dict], folder: Path) -> dict[str, tuple[int, str]]:
    """Run step 3 with each of these flags on two ranks: a step, and from its checkpoint another.

    Returns the exit code of each, with the last line of its standard error.
    """
    words = {job: command_line(flags) for job, flags in jobs.items()}
    (folder / "jobs.json").write_text(json.dumps(words))
    process = begun(by_torchrun(__file__, [str(folder / "jobs.json")]), 2, **PIPES)
    result = ended(process, timeout=300.0 + 60.0 * len(jobs))
    if result.code:
        raise RuntimeError(result.stdout + result.stderr)
    return json.loads((folder / "ended.json").read_text())


def run_jobs(path: Path) -> None:
    """What each of the two ranks does."""
    init()
    train, found = step3_rlhf.train, {}

    def compute_and_train(args, plan, trainer, session) -> None:
        models = {"actor": trainer.models.actor, "reference": trainer.models.reference.model}
        mask, width = torch.ones_like(SEQUENCES), SEQUENCES.shape[1] - 1
        inputs = (SEQUENCES, mask, position_ids(mask))
        with torch.no_grad():
            computed = {role: model(*inputs, response_length=width)[0] for role, model in models.items()}
        if distributed.is_main():
            torch.save(computed, f"{args.output_dir}.{'resumed' if args.resume else 'begun'}")
        train(args, plan, trainer, session)

    with mock.patch("training.step3_rlhf.train", compute_and_train):
        for job, words in json.loads(path.read_text()).items():
            for more in (["--enable_test_mode", "--test_stop_step", "1"], ["--resume", "auto"]):
                result = run_caught(3, [*words, *more])
                distributed.barrier()
                if result.code:
                    break
            found[job] = result.code, (result.stderr.strip().splitlines() or [""])[-1]
    if distributed.is_main():
        path.with_name("ended.json").write_text(json.dumps(found))


@torch.no_grad()
def gaps_of(given: Path, output: Path, way: str) -> dict[str, float]:
    """How far log-probs are from those that transformers computes with the folder `given`, by what computed them."""
    computed = {
        f"{role}, {when}": logprobs
        for when in ("begun", "resumed")
        for role, logprobs in torch.load(f"{output}.{when}").items()
    }
    checkpoint = Checkpoint.find(str(output), str(output), with_ema=True)
    saved = {"saved actor": "actor", "saved adapter": "actor_adapter", "saved average": "actor_ema"}
    config = json.loads((Path(base_of(str(given), "model")) / "config.json").read_text())
    if not get_checkpoint_conversion_mapping(config["model_type"]):  # else an export is refused
        for name, ema in {"exported": False, "exported average": True}.items():
            export(checkpoint, output / name, ema=ema)
            saved[name] = name
    computed |= {what: logprobs(output / name) for what, name in saved.items() if (output / name).is_dir()}
    expected = logprobs(given)
    gaps = {what: float((numbers - expected).abs().max()) for what, numbers in computed.items()}
    if way == "whole":
        trunks = [by_transformers(path).base_model(SEQUENCES)[0] for path in (given, output / "critic")]
        gaps["saved critic"] = float((trunks[1] - trunks[0]).abs().max() / trunks[0].abs().max())
    return gaps


def logprobs(folder: Path) -> torch.Tensor:
    """Of SEQUENCES' tokens from the second on, by transformers and peft alone."""
    found = by_transformers(folder)(SEQUENCES).logits[:, :-1].log_softmax(-1)
    return found.gather(-1, SEQUENCES[:, 1:, None]).squeeze(-1)


def by_transformers(folder: Path):
    """The model that transformers makes of a folder, and peft of an adapter's."""
    config = json.loads((Path(base_of(str(folder), "model")) / "config.json").read_text())
    scores = config["architectures"][0].endswith("ForSequenceClassification")
    kind = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    model = kind.from_pretrained(base_of(str(folder), "model"), dtype=torch.float32)
    if is_adapter(folder):
        config = LoraConfig.from_pretrained(folder)
        config.task_type = None  # of a classifier too
        model = PeftModel.from_pretrained(model, folder, config=config).merge_and_unload()
    return model.eval()


def greedy(folder: Path, prompt: str, count: int) -> list[str]:
    """The words of the response that transformers' own `generate` gives."""
    ids = AutoTokenizer.from_pretrained(folder)(prompt, return_tensors="pt").input_ids
    found = by_transformers(folder).generate(ids, do_sample=False, max_new_tokens=count)[0, ids.shape[1] :].tolist()
    return [f"w{token:02d}" for token in found if token > UNK]


def try_programs(family: str, form: str, folder: Path) -> list[bool]:
    """A line for each program at the command line, tried on one folder; returns whether each is right."""
    make_family(family, folder)
    given, verdicts = folder / "given", []
    FORMS[form](given, family)
    common = ["--data_path", write_prompts(folder), "--max_prompt_seq_len", "8", "--max_answer_seq_len", "8"]

    def program(module: str, *words) -> None:
        done = subprocess.run(
            [sys.executable, "-m", module, *map(str, words)], cwd=ROOT, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError("\n".join((done.stdout + done.stderr).strip().splitlines()[-5:]))

    def say(what: str, right: bool, text: str) -> None:
        verdicts.append(right)
        print(f"| {family} | {form} | | {what} | {'yes' if right else 'NO'} | {text} |", flush=True)

    def near(what: str, path: Path, expected: Path = given) -> None:
        gap = float((logprobs(path) - logprobs(expected)).detach().abs().max())
        own = not json.loads((path / "config.json").read_text())["tie_word_embeddings"]
        say(what, gap <= MOST_OFF and own, f"log-probs {gap:.1e}, tie_word_embeddings {'false' if own else 'TRUE'}")

    out = folder / "run"
    try:
        step3 = ["--actor_model_name_or_path", given, "--critic_model_name_or_path", folder / "reward"]
        few = ["--max_steps", "1", "--num_eval_prompts", "0", "--save_steps", "1", "--enable_ema"]
        stages = ["--actor_zero_stage", "3", "--critic_zero_stage", "3", "--actor_learning_rate", "1e-9"]
        rows = ["--per_device_generation_batch_size", "4", "--per_device_training_batch_size", "4"]
        words = list(map(str, [*step3, *common, *few, *stages, *rows, "--output_dir", out]))
        result = launch_words(3, words)
        if result.code:
            raise RuntimeError(result.stderr[-600:])
        near("step 3", out / "actor")
        near("step 3, average", out / "actor_ema")
        for words in ([], ["--ema"]):
            program("training.tools.export", out, folder / f"exported{''.join(words)}", *words)
            near(f"export {' '.join(words)}", folder / f"exported{''.join(words)}")
        # An actor that differs from the SFT model, so that there is something to merge.
        shutil.copytree(out / "actor", folder / "moved")
        weights = folder / "moved" / "model.safetensors"
        save_file({name: 1.01 * tensor for name, tensor in load_file(weights).items()}, weights, {"format": "pt"})
        models = ["--sft_model_name_or_path", given, "--trained_model_name_or_path", folder / "moved"]
        reward = ["--reward_model_name_or_path", folder / "reward", "--num_eval_prompts", "8"]
        merge = ["--scales", "1", "--scale", "1", "--output_dir", folder / "merged"]
        program("training.tools.merge", *models, *common, *reward, *merge, "--zero_stage", "3")
        near("merge", folder / "merged" / "model", folder / "moved")
        for stage in ("0", "3"):
            named = ["--models", f"given={given}", f"saved={out / 'actor'}", "--greedy", "--zero_stage", stage]
            program("training.tools.compare", *named, *common, *reward, "--output_dir", folder / f"compared{stage}")
            samples = json.loads((folder / f"compared{stage}" / "comparison.json").read_text())["samples"]
            wrong = [
                sample["prompt"]
                for sample in samples
                for response in sample["responses"].values()
                if response["response"].split() != greedy(given, sample["prompt"], 8)
            ]
            right = bool(samples) and not wrong
            say(f"compare, stage {stage}", right, f"{len(wrong)} of {2 * len(samples)} answers not transformers'")
    except RuntimeError as error:
        say("a program failed", False, str(error).replace("\n", " / ")[-600:])
    return verdicts


if __name__ == "__main__":
    if "RANK" in os.environ:
        run_jobs(Path(sys.argv[1]))
    else:
        sys.exit(main())
