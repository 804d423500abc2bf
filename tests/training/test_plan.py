"""What a run that goes on says of the choices that have changed meanwhile."""
import dataclasses
import json

from engine.dialects import get_dialect
from training.plan import changes_since


def test_changed_choices_are_named_and_unchanged_ones_are_not():
    dialect = get_dialect("default")
    written = json.loads(json.dumps({"dialect": dataclasses.asdict(dialect)}))  # as the state file has it, no tuples
    assert changes_since(written, dialect) == []
    assert changes_since(written, dialect.override(kl_coef=0.5, betas=(0.9, 0.99))) == [
        "changed since the restart point: kl_coef 0.1 -> 0.5",
        "changed since the restart point: betas [0.9, 0.95] -> [0.9, 0.99]"]
    assert changes_since({}, dialect) == [], "a restart point that does not say"
