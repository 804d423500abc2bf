"""Several runs side by side: a table of held-out scores, and a picture of score against KL.

A rise has its standard error, paired prompt by prompt, where the run has measured it.

python -m training.reporting.compare_runs out/ppo_seed1 out/ppo_seed2 --output score_against_kl.png
"""

import argparse
import math
import sys
from pathlib import Path

from engine.errors import UserError
from training.reporting.metrics_file import METRICS_FILE, read_metrics
from training.reporting.reward_change import comparable_scores
from training.reporting.standard_errors import NOISE

COLUMNS = ("score", "kl", "response_length", "distinct_bigrams")


def evaluations(folder: Path) -> list[dict]:
    """The records of a run that hold held-out scores of one reward, its last; raises UserError if there are fewer than
    two."""
    found = comparable_scores(read_metrics(folder / METRICS_FILE))
    if len(found) < 2:
        raise UserError(f"{folder}: its {METRICS_FILE} holds {len(found)} evaluations; before and after are needed.")
    return found


def named(folders: list[Path]) -> dict[str, Path]:
    """The folders by their own names, or by their paths where two have the same name."""
    names = [folder.resolve().name for folder in folders]
    return {str(folder) if names.count(name) > 1 else name: folder for name, folder in zip(names, folders)}


def table(runs: dict[str, list[dict]]) -> str:
    """Each run's first and last evaluation, with the rise in score and the share of distinct bigrams kept."""
    width = max(24, *(len(name) + 2 for name in runs))
    errors = [rows[-1].get("eval/score_change_se") for rows in runs.values()]
    rise = 7 if errors.count(None) == len(errors) else 14
    lines = [
        f"{'run':<{width}}{'responses':>10}{'score':>17}{'rise':>{rise}}{'KL':>8}{'length':>16}{'bigrams kept':>14}"
    ]
    for (name, rows), error in zip(runs.items(), errors):
        risen = f"{rows[-1]['eval/score'] - rows[0]['eval/score']:+.2f}" + ("" if error is None else f" ± {error:.2f}")
        before, after = ({column: row[f"eval/{column}"] for column in COLUMNS} for row in (rows[0], rows[-1]))
        lines.append(
            f"{name:<{width}}{rows[-1]['samples']:>10}{before['score']:>8.2f} ->{after['score']:>6.2f}"
            f"{risen:>{rise}}{after['kl']:>8.2f}"
            f"{before['response_length']:>7.1f} ->{after['response_length']:>6.1f}"
            f"{after['distinct_bigrams'] / max(before['distinct_bigrams'], 1):>14.2f}"
        )
    return "\n".join(lines)


def plot(runs: dict[str, list[dict]], path: Path) -> None:
    """Held-out score against held-out KL, a line a run through its evaluations; bars are two standard errors to either
    side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for name, rows in runs.items():
        kl, score = ([row[name] for row in rows] for name in ("eval/kl", "eval/score"))
        bars = {
            axis: [NOISE * row.get(f"eval/{name}_se", math.nan) for row in rows]
            for axis, name in (("xerr", "kl"), ("yerr", "score"))
        }
        axes.errorbar(kl, score, **bars, fmt="o-", markersize=3, elinewidth=0.8, capsize=2, label=name)
    axes.set(
        xlabel="KL to the reference, nats a response", ylabel="normalised score", title="held-out score against KL"
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=130)


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m training.reporting.compare_runs", description=__doc__.splitlines()[0]
    )
    parser.add_argument("folders", type=Path, nargs="+", help="output folders of step 3")
    parser.add_argument("--output", type=Path, help="where the picture goes")
    args = parser.parse_args(arguments)
    try:
        runs = {name: evaluations(folder) for name, folder in named(args.folders).items()}
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table(runs))
    if args.output is not None:
        plot(runs, args.output)
        print(f"picture: {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
