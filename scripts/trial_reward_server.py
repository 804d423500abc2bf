"""What becomes of PPO on two ranks when its reward server is slow, dies, or answers nonsense; prints a table.

    python scripts/trial_reward_server.py                       # about three minutes on two cores
    python scripts/trial_reward_server.py --only dies slow

Each line is a run of step 3 on tiny models whose score is a server's, in a process of its own. What the server gets
over has to leave metrics and weights as with a well one, to the last bit; what it does not has to stop the run with
code 1, one message and a restart point of the step before; a server that is not there is refused with code 2. Exit code
1 if anything is otherwise.
"""

import argparse
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for tests/, which is not installed

from tests.e2e.faults import differences
from tests.e2e.programs import Result, Tiny, launch
from tests.reward_server_process import process_serving

STEPS, IN_STEP_2 = 3, 4  # requests before: the probe, and one of each rank in step 1


@dataclass(frozen=True)
class Case:
    """What the server does, and what is to come of it.

    behaviours: as in tests/reward_server.py. comes_back: whether it is started again where it dies. code: the run's.
    says: stands in what the run says.
    """

    what: str
    behaviours: dict[int, str]
    code: int = 0
    says: str = ""
    comes_back: bool = True
    patience: float = 60.0
    form: str = "items"


CASES = {
    "well": Case("nothing", {}),
    "openrlhf": Case("nothing, in OpenRLHF's form", {}, form="openrlhf"),
    "slow": Case("takes a second for each answer", {0: "slow 1"}),
    "dies": Case("dies in step 2, and is started again", {IN_STEP_2: "die"}, says="answers again"),
    "busy": Case("answers 429, then 500, then 503", {4: "busy 1", 5: "500", 6: "503"}, says="answers again"),
    "reversed": Case("answers in another order", {0: "reversed"}),
    "short": Case("answers too short in step 2", {IN_STEP_2: "short"}, 1, "answered 3 scores for 4 responses"),
    "nan": Case("answers NaN in step 2", {IN_STEP_2: "nan"}, 1, "which is not finite"),
    "html": Case("answers a page in step 2", {IN_STEP_2: "not json"}, 1, "which is no JSON"),
    "away": Case(
        "dies in step 2, and stays away", {IN_STEP_2: "die"}, 1, "cannot be reached", comes_back=False, patience=3.0
    ),
    "nonsense": Case("answers nonsense from the start", {0: "short"}, 2, "asked for the score of one text"),
}


def main() -> int:
    """Run the trials; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=list(CASES), nargs="+", help="some of the trials, beside the well server")
    chosen = ["well", *(name for name in parser.parse_args().only or CASES if name != "well")]
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
        tiny = Tiny(Path(folder))
        print("| the server | code | seconds | the run said | as it should be |")
        print("| --- | --- | --- | --- | --- |", flush=True)
        for name in chosen:
            case, out = CASES[name], Path(folder) / name
            began = time.monotonic()
            result = run(tiny, case, out)
            wrong = problems(case, result, out, Path(folder) / "well")
            failed |= bool(wrong)
            cells = [case.what, result.code, f"{time.monotonic() - began:.0f}", said(result), ", ".join(wrong) or "yes"]
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    return int(failed)


def run(tiny: Tiny, case: Case, out: Path) -> Result:
    """The run's end."""
    with process_serving(case.behaviours, case.comes_back) as server:
        flags = tiny.flags(
            3,
            output_dir=out,
            critic_model_name_or_path=None,
            reward_url=server.url,
            reward_url_form=case.form,
            reward_url_patience=case.patience,
            max_steps=STEPS,
            num_eval_prompts=0,
            save_steps=100,
            dtype="fp32",
        )
        return launch(3, flags)


def problems(case: Case, result: Result, out: Path, well: Path) -> list[str]:
    """What is not as it should be."""
    printed = result.stdout + result.stderr
    wrong = [] if result.code == case.code else [f"code {result.code}, not {case.code}"]
    wrong += [f"does not say {case.says!r}"] if case.says not in printed else []
    wrong += ["a stack trace"] if "Traceback" in printed else []
    if case.code == 0 and out != well:
        wrong += [f"{name} differs" for name in differences(well, out)]
    if case.code == 1 and not (out / "checkpoints" / "step_000001").is_dir():
        wrong.append("no restart point of step 1")
    if case.code == 2 and out.exists():
        wrong.append("something was written")
    return wrong


def said(result: Result) -> str:
    """The line about the server, shortened to stand in a table."""
    lines = [line for line in (result.stdout + result.stderr).splitlines() if "reward server" in line or "URL" in line]
    told = [line for line in lines if not line.startswith("scores from")]
    return told[-1][:150].replace("|", "\\|") if told else ""


if __name__ == "__main__":
    sys.exit(main())
