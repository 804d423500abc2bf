"""Recordings by torch.profiler of a run of two ranks: which steps and what stands in them."""

import gzip
import itertools
import json
from collections import Counter
from pathlib import Path

import pytest


@pytest.mark.parametrize("name", ("ppo", "resumed"))
def test_the_steps_asked_for_are_recorded_on_each_rank(chain, name):
    recorded = [f"step_00000{step}_rank{rank}.json.gz" for step in (3, 4) for rank in (0, 1)]
    # The resumed run began from step 2 with the other's recordings of steps 3 and 4 in its folder.
    left = [f"{file}.abandoned" for file in recorded] if name == "resumed" else []
    assert sorted(path.name for path in chain[f"{name}/profile"].iterdir()) == sorted(recorded + left)
    told = chain.results[name].stderr
    for step in (3, 4):
        assert told.count(f"step {step} recorded: {chain[name]}/profile/step_00000{step}_rank*.json.gz") == 1
    assert "ui.perfetto.dev" in told and "profiler_start" not in told
    for file in recorded:
        # The weights of actor and critic have moved since the step before; a process's first step needs all copies,
        # unless an evaluation came before it.
        first = name == "resumed" and file.startswith("step_000003")
        ranges = ranges_of(chain[f"{name}/profile/{file}"])
        # 4 responses of a rank in one micro-batch: a pass of each model, then an optimizer step in each of 2 epochs.
        assert {phase: Counter(inner) for phase, inner in ranges.items()} == {
            # The longest response has 8 tokens, the first of which comes with the prompts. Once others are read to try
            # out the recording of single tokens.
            "generate": Counter({"prompts": 2 if first else 1, "token": 7, "gather of weights": 1}),
            # The old log-probs are the sampler's: the actor is only asked about one response, to compare.
            "make_experience": Counter(
                2 * ["policy forward", "scorer forward"]
                + ["reference", "reward model"]
                + (3 if first else 1) * ["gather of weights"]
            ),
            "train": Counter(
                2
                * [
                    "policy forward",
                    "actor backward",
                    "actor optimizer step",
                    "scorer forward",
                    "critic backward",
                    "critic optimizer step",
                    "EMA update",
                ]
            ),
        }


def ranges_of(trace: Path) -> dict[str, list[str]]:
    """The names of a recording's ranges within each phase, in order of time; each stands in exactly one phase."""
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert any(event.get("cat") == "cpu_op" for event in events)
    marks = sorted((event for event in events if event.get("cat") == "user_annotation"), key=lambda event: event["ts"])
    phases = [mark for mark in marks if mark["name"] in ("generate", "make_experience", "train")]
    assert [phase["name"] for phase in phases] == ["generate", "make_experience", "train"]
    assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in itertools.pairwise(phases))
    ours = [
        mark
        for mark in marks
        if mark["tid"] == phases[0]["tid"]
        and mark not in phases
        and not mark["name"].startswith(("gloo:", "Optimizer."))
    ]  # these are torch's own
    assert all(mark["dur"] > 0 for mark in phases + ours)
    found = {
        phase["name"]: [
            mark["name"]
            for mark in ours
            if phase["ts"] <= mark["ts"] and mark["ts"] + mark["dur"] <= phase["ts"] + phase["dur"]
        ]
        for phase in phases
    }
    assert sum(map(len, found.values())) == len(ours)
    return found
