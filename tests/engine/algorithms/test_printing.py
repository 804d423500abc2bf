"""Dialects side by side, as `python -m engine.algorithms` prints them."""

import dataclasses
import subprocess
import sys

import pytest

from engine.algorithms import DIALECTS, Dialect
from engine.algorithms.__main__ import main


# What each system's source says, in every field; a new field needs a value here too.
def test_the_table_has_all_fields_of_all_dialects():
    table, meanings = main([], width=1000).split("\n\n")
    head, rule, *rows = table.splitlines()
    assert [line.split(maxsplit=1)[0] for line in meanings.splitlines()] == [row.split()[0] for row in rows]
    assert "\nlam                     lambda of GAE\n" in meanings
    assert head.split() == list(DIALECTS) and set(rule) == {"-", " "}
    assert [row.split()[0] for row in rows] == [field.name for field in dataclasses.fields(Dialect)][1:]
    by_name = {row.split()[0]: row.split()[1:] for row in rows}
    assert by_name["kl_coef"] == (
        ["0.1", "0.1", "0.02", "0.15", "0.05", "0.001", "0.05", "0.05", "0.04", *["0"] * 4, "0.01", "1e-05", "0.05"]
    )
    assert by_name["score_clip"] == ["5", "5", "5", "-", "-", "10", *["-"] * 7, "10", "-", "-"]
    assert by_name["whiten_rewards"] == ["no", "no", "no", "yes", *["no"] * 12]


def test_two_dialects_only_where_they_differ():
    head, _, *rows = main(["summarize", "trl_ppo"]).split("\n\n")[0].splitlines()
    assert head.split() == ["summarize", "trl_ppo"]
    assert {tuple(row.split()) for row in rows} == {
        ("truncate_token", "eos", "-"),
        ("missing_end", "replace", "none"),
        ("missing_end_value", "-1", "0"),
        ("whiten_variance", "biased", "unbiased"),
        ("eps", "1e-05", "1e-08"),
        ("actor_weight_decay", "0.01", "0"),
        ("critic_weight_decay", "0.01", "0"),
    }


def test_a_narrow_terminal_gets_several_tables():
    for width, printed in ((90, main([], width=90)), (160, main([]))):
        *tables, _ = printed.split("\n\n")
        assert [name for table in tables for name in table.splitlines()[0].split()] == list(DIALECTS)
        assert max(len(line) for table in tables for line in table.splitlines()) <= width


@pytest.mark.slow
def test_the_command_prints_and_refuses():
    def run(*words):
        return subprocess.run([sys.executable, "-m", "engine.algorithms", *words], capture_output=True, text=True)

    assert run("trlx").stdout.splitlines()[0].split() == ["trlx"]
    refused = run("openai", "opeanai")
    assert refused.returncode == 2 and refused.stdout == "" and len(refused.stderr.splitlines()) == 1
    assert "'opeanai': known are default, deepspeed_chat," in refused.stderr
