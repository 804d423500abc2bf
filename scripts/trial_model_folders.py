"""Whether a run trains the very model that transformers makes of a folder, at ZeRO stages 0 and 3 on two ranks.

    python scripts/trial_model_folders.py                       all, about a quarter of an hour on two cores
    python scripts/trial_model_folders.py llama gpt2 --only runs

Folders of ten families (scripts/harness/models.py, FAMILIES), with output heads of all kinds (FORMS): tied and not,
config.json and weight files agreeing on that and not, and adapters of peft's. Each is trained for one step at a
learning rate of 1e-9. A line for each has the largest difference of a log-prob from transformers' own load of the
folder: of actor and reference as their engines compute, of the saved actor, its adapter and its moving average, of what
a restart point is exported to and gone on from; and of the hidden states of a critic with the actor's trunk. More than
MOST_OFF is wrong.

Of PROGRAMS' folders the command lines are tried too: step 3, its restart point exported, merged, compared and served.
Exit code 1 where something is otherwise.
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

os.environ["DS_ACCELERATOR"] = "cpu"
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for tests/, which is not installed

NAMES = ("llama", "mistral", "mixtral", "qwen2", "gemma2", "phi", "gpt2", "gpt_neox", "opt", "falcon")
MOST_OFF = 1e-5
PROGRAMS = {"llama": "tied_two", "gpt2": "silent_two"}
REFUSED = ("untied_none", "tied_head_alone")


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
    import torch
    from safetensors.torch import load_file

    tied_two(folder, family)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def tied_two_in_shards(folder: Path, family: str) -> None:
    """As tied_two, in many files."""
    _save(folder, family, False, max_shard_size="8KB")
    _say(folder, tie_word_embeddings=True)


def tied_copies(folder: Path, family: str) -> None:
    """One matrix that is in the file under both names, as torch.save leaves it."""
    import torch
    from transformers import AutoModelForCausalLM

    tied(folder, family)
    torch.save(AutoModelForCausalLM.from_pretrained(folder).state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def tied_head_alone(folder: Path, family: str) -> None:
    """One matrix, in the file under the head's name: to be refused as what a critic, which has no head, is made of."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

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
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

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
    from transformers import AutoModelForCausalLM

    from scripts.harness.models import family_config, save_random

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
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = folder.with_name(f"base_of_{folder.name}")
    form(base, family)
    torch.manual_seed(3)
    layers = ["q_proj", "v_proj"] if family == "mixtral" else "all-linear"  # its experts are parameters of no layer
    config = LoraConfig(target_modules=layers, r=4, init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(folder)


def try_family(family: str, folder: Path, timeout: float) -> list[bool]:
    """A line for each of a family's folders; returns whether each is right."""
    from scripts.harness.models import make_family
    from tests.distributed.conftest import write_stage_files
    from tests.distributed.harness import run_ranks

    make_family(family, folder)
    write_stage_files(folder)
    whole = family in PROGRAMS
    names = list(FORMS if whole else EVERY)
    for name in names:
        FORMS[name](folder / name, family)
    verdicts = []
    for ways, of_them in ((["whole"], names), (["hydra", "lora"], [n for n in names if whole and "two" in n])):
        if not of_them:
            continue
        places = {"folder": str(folder), "output": str(folder / "out")}
        ranks = run_ranks(
            "tests.distributed.work_model_folders:trial",
            timeout=timeout,
            names=of_them,
            stages=[0, 3],
            ways=ways,
            **places,
        )
        for (name, stage, way), found in ranks[0].items():
            if isinstance(found, str):
                right, text = name in REFUSED, f"refused: {found.replace(str(folder), '')[:150]}"
            else:
                right = name not in REFUSED and max(found.values()) <= MOST_OFF
                text = ", ".join(f"{what} {gap:.1e}" for what, gap in found.items())
            verdicts.append(right)
            print(f"| {family} | {name} | {stage} | {way} | {'yes' if right else 'NO'} | {text} |", flush=True)
    return verdicts


def try_programs(family: str, form: str, folder: Path) -> list[bool]:
    """A line for each program at the command line, tried on one folder; returns whether each is right."""
    from safetensors.torch import load_file, save_file

    from scripts.harness import free_port
    from scripts.harness.models import make_family
    from tests.distributed.work_model_folders import greedy, logprobs
    from tests.serving import serving

    make_family(family, folder)
    given, verdicts = folder / "given", []
    FORMS[form](given, family)
    prompts = [{"prompt": f"w{10 + row} w{30 + row}"} for row in range(16)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    common = ["--data_path", folder / "prompts.jsonl", "--max_prompt_seq_len", "8", "--max_answer_seq_len", "8"]

    def program(words: list, ranks: int = 1) -> None:
        start = [sys.executable, "-m"] if ranks == 1 else ["deepspeed", "--num_gpus", str(ranks), "--master_port"]
        where = [] if ranks == 1 else [str(free_port()), "--module"]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [*start, *where, *map(str, words)], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
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
        program(["training.step3_rlhf", *step3, *common, *few, *stages, *rows, "--output_dir", out], ranks=2)
        near("step 3", out / "actor")
        near("step 3, average", out / "actor_ema")
        for words in ([], ["--ema"]):
            program(["training.restarts.export", out, folder / f"exported{''.join(words)}", *words])
            near(f"export {' '.join(words)}", folder / f"exported{''.join(words)}")
        # An actor that differs from the SFT model, so that there is something to merge.
        shutil.copytree(out / "actor", folder / "moved")
        weights = folder / "moved" / "model.safetensors"
        save_file({name: 1.01 * tensor for name, tensor in load_file(weights).items()}, weights, {"format": "pt"})
        models = ["--sft_model_name_or_path", given, "--trained_model_name_or_path", folder / "moved"]
        reward = ["--reward_model_name_or_path", folder / "reward", "--num_eval_prompts", "8"]
        merge = ["--scales", "1", "--scale", "1", "--output_dir", folder / "merged"]
        program(["training.merge", *models, *common, *reward, *merge, "--zero_stage", "3"])
        near("merge", folder / "merged" / "model", folder / "moved")
        for stage in ("0", "3"):
            named = ["--models", f"given={given}", f"saved={out / 'actor'}", "--greedy", "--zero_stage", stage]
            program(["training.compare", *named, *common, *reward, "--output_dir", folder / f"compared{stage}"])
            samples = json.loads((folder / f"compared{stage}" / "comparison.json").read_text())["samples"]
            wrong = [
                sample["prompt"]
                for sample in samples
                for response in sample["responses"].values()
                if response["response"].split() != greedy(given, sample["prompt"], 8)
            ]
            right = bool(samples) and not wrong
            say(f"compare, stage {stage}", right, f"{len(wrong)} of {2 * len(samples)} answers not transformers'")
        with serving({"one": str(given)}, folder / "serve.log") as service:
            body = {"prompt": prompts[0]["prompt"], "temperature": 0, "max_tokens": 8}
            response = service.request("PUT", "/", body)[1]["one"]["response"].split()
        expected = greedy(given, prompts[0]["prompt"], 8)
        say("serve", response == expected, f"{' '.join(response)}; transformers: {' '.join(expected)}")
    except RuntimeError as error:
        say("a program failed", False, str(error).replace("\n", " / ")[-600:])
    return verdicts


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"by default {', '.join(NAMES)}")
    parser.add_argument("--only", choices=("folders", "programs"), help="leave the other part out")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one family")
    options = parser.parse_args(arguments)
    print(f"| family | folder | stage | way | right | largest differences |\n{'| --- ' * 6}|", flush=True)
    verdicts: list[bool] = []
    for family in options.families or NAMES:
        with tempfile.TemporaryDirectory() as folder:
            if options.only != "programs":
                verdicts += try_family(family, Path(folder) / "folders", options.timeout)
            if family in PROGRAMS and options.only != "folders":
                verdicts += try_programs(family, PROGRAMS[family], Path(folder) / "programs")
    print(f"\n{sum(verdicts)} of {len(verdicts)} are right")
    return int(not all(verdicts))


if __name__ == "__main__":
    sys.exit(main())
