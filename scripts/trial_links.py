"""PPO steps over a slow link, with and without each option that spares it: seconds and bytes by phase.

    python scripts/trial_links.py                          # all options; a quarter of an hour on two cores
    python scripts/trial_links.py --options plain hpZ --rounds 1 --json FILE

Two hosts with networks of their own on this machine (scripts/harness/hosts.py), two ranks each, and a link of 1 Gb/s
and 5 ms one way between them; actor, critic, reference and reward model at ZeRO-3, on CPUs. Options take turns,
`--rounds` times, each in processes of its own; medians over all steps of an option count. Bytes are those that the
busier host received, headers included. With --json everything that was counted is kept: of each step and phase seconds,
bytes in both directions, and collective calls with their bytes.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # before imports from this repository, when run as a script

from scripts.harness.host_launches import run_ranks  # noqa: E402
from scripts.harness.hosts import Link, TwoHosts  # noqa: E402

RANKS_PER_HOST = 2
PHASES = ("step", "generate", "make_experience", "train", "gather")
SLOW: dict = {"reward_seconds": 0.25, "turns": 2}  # of each response; a rank's responses are drawn in two turns
RELEASED = {"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
HPZ = {"zero_hpz_partition_size": RANKS_PER_HOST}
OPTIONS: dict[str, dict] = {
    "plain": {"by_node": "nothing"},
    "gathers by node": {},
    "all by node": {"by_node": "all"},
    "overlapped gather": {"overlap_gather": True},
    "hpZ": {"zero": HPZ},
    "bf16": {"dtype": "bf16"},
    "slow rewards": SLOW,
    "slow rewards, overlapped": SLOW | {"overlap_rewards": True},
    "partitions": {"rollout_backend": "zero3", "zero": RELEASED},
    "partitions, hpZ": {"rollout_backend": "zero3", "zero": RELEASED | HPZ},
}
"""What is changed, by the option's name, of the settings that scripts/trial_links_rank.py runs with. Partitions: there
are no copies, and no weight stays gathered from one use to the next, as with models that leave no room for that."""
NOT_SIMULATED = ("partitions", "partitions, hpZ")


def main() -> int:
    """Run all options by turns and print the table of those that ran; returns the exit code."""
    args = parse()
    if reason := TwoHosts.refusal():
        print(f"two hosts cannot be had here: {reason}", file=sys.stderr)
        return 2
    import torch

    from scripts.benchmark_models import make_models

    counted: dict[str, list[list]] = {name: [] for name in args.options}
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        actor, critic = make_models(Path(folder) / "models", args.size, args.critic_size or args.size, torch.float32)
        settings = vars(args) | {"actor": actor, "critic": critic}
        link = Link(args.bits_per_s, args.delay_s)
        with TwoHosts(link=link) as hosts:
            for turn in range(args.rounds):
                for number, name in enumerate(args.options if turn % 2 == 0 else reversed(args.options)):
                    port = args.master_port + (turn * len(args.options) + number) % 90
                    try:
                        steps = run(hosts, settings | OPTIONS[name], Path(folder), port)
                    except RuntimeError as error:
                        print(f"turn {turn + 1}, {name}: {error}", file=sys.stderr, flush=True)
                        failed = 1
                        continue
                    counted[name].append(steps)
                    print(f"turn {turn + 1}, {name}: {seconds_of(steps, 'step'):.2f} s a step", flush=True)
    counted = {name: turns for name, turns in counted.items() if turns}
    report = {"settings": vars(args), "ranks_per_host": RANKS_PER_HOST, "hosts": 2, "options": counted}
    if args.json:
        Path(args.json).write_text(json.dumps(report))
    if counted:
        print(table(report))
    return failed


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--options", nargs="+", choices=OPTIONS, default=list(OPTIONS), help="the first is the base")
    parser.add_argument("--bits_per_s", type=float, default=1e9, help="of the link, in each direction (1e9)")
    parser.add_argument("--delay_s", type=float, default=0.005, help="of the link, one way (0.005)")
    parser.add_argument("--size", default="9m", help="of actor and reference (9m)")
    parser.add_argument("--critic_size", help="of critic and reward model (as the actor)")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="(fp32)")
    parser.add_argument("--rollout_backend", choices=("auto", "replica"), default="auto", help="(auto)")
    parser.add_argument("--prompts", type=int, default=8, help="of a step, over all ranks (8)")
    parser.add_argument("--prompt_length", type=int, default=8, help="tokens (8)")
    parser.add_argument("--response_length", type=int, default=8, help="tokens (8)")
    parser.add_argument("--micro_batch", type=int, default=2, help="responses of a rank in one pass (2)")
    parser.add_argument("--ppo_epochs", type=int, default=2, help="passes over a step's responses (2)")
    parser.add_argument("--steps", type=int, default=3, help="that count, in each turn of an option (3)")
    parser.add_argument("--warmup", type=int, default=1, help="steps before them (1)")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each option (2)")
    parser.add_argument("--master_port", type=int, default=29500, help="the first of 90 (29500)")
    parser.add_argument("--json", help="a file for all that was counted")
    return parser.parse_args()


def run(hosts: TwoHosts, settings: Mapping, folder: Path, port: int) -> list[list[dict]]:
    """What the first rank of each host counted in each step of one run, by step.

    Raises: RuntimeError where a rank failed, with the end of what it printed.
    """
    output = Path(tempfile.mkdtemp(dir=folder))
    files = {}
    if "zero" in settings:
        files = dict.fromkeys(("actor", "critic"), str(output / "zero.json"))
        zero = json.loads((ROOT / "configs" / "ds" / "zero3.json").read_text())
        zero["zero_optimization"] |= settings["zero"]
        (output / "zero.json").write_text(json.dumps(zero))
    argv = [sys.executable, str(ROOT / "scripts" / "trial_links_rank.py")]
    argv.append(json.dumps({**settings, "output": str(output), "files": files}))
    run_ranks(hosts, argv, output, port, RANKS_PER_HOST)
    firsts = range(0, RANKS_PER_HOST * len(hosts.names), RANKS_PER_HOST)
    by_host = [json.loads((output / f"host_{rank}.json").read_text()) for rank in firsts]
    return [list(step) for step in zip(*by_host, strict=True)]


def seconds_of(steps: list[list[dict]], phase: str) -> float:
    """The median over steps of what the slower host took."""
    return median(max(host["phases"].get(phase, {"seconds": 0.0})["seconds"] for host in step) for step in steps)


def megabytes_of(steps: list[list[dict]], phase: str) -> float:
    """The median over steps of what the busier host received, in 10^6 bytes."""
    return median(max(host["phases"].get(phase, {"received": 0})["received"] for host in step) for step in steps) / 1e6


def table(report: Mapping) -> str:
    """Seconds and megabytes of each option, and the ratio of its steps to the first option's."""
    head = ["option", *(f"{phase}, s" for phase in PHASES), *(f"{phase}, MB" for phase in PHASES), "step / first"]
    lines = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    base = None
    for name, turns in report["options"].items():
        steps = [step for turn in turns for step in turn]
        seconds = [seconds_of(steps, phase) for phase in PHASES]
        base = base or seconds[0]
        cells = [name, *(f"{value:.2f}" for value in seconds)]
        cells += [f"{megabytes_of(steps, phase):.1f}" for phase in PHASES] + [f"{seconds[0] / base:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    agreement = median(host["agreement"] for turns in report["options"].values() for host in turns[0][0])
    lines.append(f"\nAn agreement of all ranks takes {1e3 * agreement:.0f} ms.")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
