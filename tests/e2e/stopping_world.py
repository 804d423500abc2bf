"""A reward function that asks its run to end, in a test: at which call, on which rank, by what, stands in a file.

    flags = tiny.flags(3, reward_function=asking_function(folder, call=2, signal="SIGTERM", to="deepspeed"), ...)

Calls count from 0 on each rank: the first is the evaluation before the first step.
"""

import json
from pathlib import Path

FUNCTION = """
import json, os, signal, sys, time
from pathlib import Path
import psutil

calls = -1


def score(prompts, responses):
    global calls
    calls += 1
    file = Path(__file__).with_name("plan.json")
    if file.exists():
        plan = json.loads(file.read_text())
        if calls == plan["call"] and int(os.environ.get("RANK", 0)) == plan["rank"]:
            file.rename(file.with_name("plan_done.json"))
            if plan["signal"] == "exit":
                sys.exit(0)
            target = next(
                process for process in [psutil.Process(), *psutil.Process().parents()]
                if plan["to"] in " ".join(process.cmdline()[:4]) or plan["to"] == "self"
            )
            target.send_signal(getattr(signal, plan["signal"]))
            if plan["to"] != "self":
                time.sleep(5)  # until the ranks have noticed: steps are short here
    return [len(set(response.split())) for response in responses]
"""


def asking_function(folder: Path, call: int, signal: str, to: str = "self", rank: int = 0) -> str:
    """Write the function and when it asks; returns what --reward_function is given.

    signal: its name, or "exit" for sys.exit(0). to: "self", or a part of a launcher's command.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"asking_{folder.name}.py"  # a process imports a name once
    file.write_text(FUNCTION)
    (folder / "plan.json").write_text(json.dumps({"call": call, "rank": rank, "signal": signal, "to": to}))
    return f"{file}:score"
