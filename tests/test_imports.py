"""The direction of imports and the owners of names, read from the syntax trees; and that a breach would be seen."""

import ast
import functools
import graphlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.zero.private_names import PRIVATE_NAMES

ROOT = Path(__file__).resolve().parents[1]

# A module may import from its own layer, if no circle closes, and from those above it in this list.
LAYERS = [
    ["engine.files", "engine.gpus", "engine.host_memory", "engine.lazy", "engine.options", "engine.atomic_files"],
    ["engine.algo"],
    ["engine.algorithms", "engine.experience"],
    ["engine.trace", "engine.zero.accelerator"],
    ["engine.distributed"],
    ["engine.zero"],
    ["engine.models", "engine.packing"],
    ["engine.actor_copy"],
    ["engine.engine_spec", "engine.optim"],
    ["engine.reference", "engine.reward", "engine.rlhf_engine", "engine.rollout"],
    ["engine.experience_maker"],
    ["training.commands", "training.runtime.environment", "training.runtime.processes", "training.runtime.stopping"],
    ["training.runtime.callbacks", "training.data"],
    ["training.reward_texts"],
    ["training.runtime.ranks"],  # whose `agreed` hands tables of the data over
    ["training.checkpoints.files", "training.reporting"],
    ["training.config"],
    ["training.environments"],
    ["training.checkpoints", "training.runtime.import_errors", "training.runtime.first_look"],
    ["training.group_sampling", "training.learner", "training.reporting.evaluation"],
    ["training.runtime"],
    ["training.critic_pretraining", "training.ppo_trainer", "training.process_rewards", "training.supervised"],
    ["training.step1_sft", "training.step2_reward", "training.step3_rlhf"],
    ["training.tools"],
]
TOOLS = "training.tools"  # nothing imports a tool, but the programs where they are started as such
FOR_ALL = "engine.errors"  # imports nothing of ours; everything but the pure math may import it
OWNERS = {
    "torch.distributed": "engine.distributed",
    "deepspeed": "engine.zero",
    "deepspeed.initialize": "engine.zero.engines",
    "transformers.integrations": "engine.zero.partitioned_loading",
    "peft": "engine.models",
    "transformers.AutoTokenizer": "engine.models.config_and_tokenizer",  # whose tokenizers decode texts as they are
}
# Names of DeepSpeed's insides, whether as names, attributes or strings.
OWNED_WORDS = {"HfDeepSpeedConfig": "engine.zero.partitioned_loading", "get_accelerator": "engine.zero"} | {
    entry.name: "engine.zero" for entry in PRIVATE_NAMES
}


def project() -> dict[str, str]:
    """The source of every module, by its full name; a package's is that of its __init__.py."""
    modules = {}
    for path in [*(ROOT / "engine").rglob("*.py"), *(ROOT / "training").rglob("*.py")]:
        parts = path.relative_to(ROOT).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text(encoding="utf-8")
    return modules


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def layer_of(module: str) -> int | None:
    """The number of the layer that names the module, or the innermost of its packages."""
    found = [(len(name), number) for number, names in enumerate(LAYERS) for name in names if within(module, name)]
    return max(found)[1] if found else None


parsed = functools.cache(ast.parse)


@functools.cache
def imported_part(tree: ast.Module) -> ast.Module:
    """The tree without the blocks that run only where the file is started as a program."""
    return ast.Module([node for node in tree.body if not is_start(node)], type_ignores=[])


def is_start(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"


@functools.cache
def nodes(tree: ast.Module) -> list[ast.AST]:
    return list(ast.walk(tree))


def statements(tree: ast.Module) -> Iterator[ast.AST]:
    """All nodes that are no expressions, where no import stands."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        yield (node := waiting.pop())
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):
            waiting += getattr(node, part, [])


@functools.cache
def imported_names(tree: ast.Module) -> set[str]:
    """All that is imported anywhere in the file, "a.b" for `from a import b`; relative ones begin with a dot."""
    names = set()
    for node in statements(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = "." * node.level + (node.module or "")
            names |= {f"{start}.{alias.name}" for alias in node.names}
    return names


@functools.cache
def mentioned_names(tree: ast.Module) -> set[str]:
    """All dotted names in the file, imports and expressions, with what the file calls them by undone."""
    called = {}
    for node in statements(tree):
        if isinstance(node, ast.Import):
            called |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            called |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}

    def dotted(node) -> str | None:
        if isinstance(node, ast.Name):
            return called.get(node.id, node.id)
        start = dotted(node.value) if isinstance(node, ast.Attribute) else None
        return start and f"{start}.{node.attr}"

    return imported_names(tree) | {dotted(node) or "" for node in nodes(tree)}


@functools.cache
def words(tree: ast.Module) -> set[str]:
    """Every name, attribute and whole string in the file, and every part of what it imports."""
    found = {part for name in imported_names(tree) for part in name.split(".")}
    for node in nodes(tree):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


def teardown_module() -> None:
    """Forget the trees: each later collection of garbage would walk through them."""
    for kept in (parsed, imported_part, nodes, imported_names, mentioned_names, words):
        kept.cache_clear()


def names_of_others(module: str, tree: ast.Module) -> list[str]:
    """What the file names that another module or package owns."""
    mentions, said = mentioned_names(tree), words(tree)
    found = [
        name
        for name, owner in OWNERS.items()
        if not within(module, owner) and any(within(mention, name) for mention in mentions)
    ]
    return found + [word for word, owner in OWNED_WORDS.items() if not within(module, owner) and word in said]


def own_module(name: str, modules: dict[str, str]) -> str | None:
    """The module of ours that an imported name is or stands in."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name or None


def breaches(modules: dict[str, str]) -> list[str]:
    """Every breach of the rules above, as "module: what"."""
    found, graph = [], {}
    siblings = {module.split(".")[1] for module in modules if module.startswith("training.")}
    for module, source in modules.items():
        tree = imported_part(parsed(source))
        imports, mentions = imported_names(tree), mentioned_names(tree)
        targets = {own_module(name, modules) for name in imports} - {None, module}
        graph[module] = targets
        packages = module in ("engine", "training")
        if layer_of(module) is None and module != FOR_ALL and not packages:
            found.append(f"{module}: stands in no layer")
            continue
        for target in sorted(targets):
            if target == FOR_ALL and not within(module, "engine.algo"):
                continue
            if (
                module == FOR_ALL
                or packages
                or target in ("engine", "training")
                or layer_of(target) is None
                or layer_of(target) > layer_of(module)
                or (within(target, TOOLS) and not within(module, TOOLS))
            ):
                found.append(f"{module}: imports {target}")
        for name in sorted(imports):
            root = name.split(".")[0]
            if name.startswith("."):
                found.append(f"{module}: relative import {name}")
            elif root in siblings:
                found.append(f"{module}: {name} instead of training.{name}")
            elif within(module, "engine.algo") and root not in ("torch", "engine", *sys.stdlib_module_names):
                found.append(f"{module}: {root} in the pure math")
        found += [f"{module}: names {name}" for name in names_of_others(module, tree)]
        if within(module, "engine") and mentions & {"importlib.import_module", "__import__"}:
            found.append(f"{module}: imports at run time")
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        found.append(f"circle: {' <- '.join(error.args[1])}")
    return found


EMPTY = dict.fromkeys(project(), "")  # the project's modules without their imports, to put a made-up one among them


def test_the_project_keeps_its_direction():
    modules = project()
    assert {"engine.algo.masked", "engine.rollout", "engine.reward.base", "training.ppo_trainer"} <= set(modules)
    assert breaches(modules) == []


def test_the_owners_do_name_what_they_own():
    modules = {name: parsed(source) for name, source in project().items()}
    for name, owner in OWNERS.items():
        own = [tree for module, tree in modules.items() if within(module, owner)]
        assert any(within(mention, name) for tree in own for mention in mentioned_names(tree)), name
    for word, owner in OWNED_WORDS.items():
        own = [t for module, t in modules.items() if within(module, owner)]
        assert any(word in words(tree) for tree in own), word


def test_tests_and_scripts_look_into_deepspeed_by_the_tests_of_engine_zero_alone():
    breaches = {}
    for path in [*(ROOT / "tests").rglob("*.py"), *(ROOT / "scripts").rglob("*.py")]:
        module, source = ".".join(path.relative_to(ROOT).with_suffix("").parts), path.read_text(encoding="utf-8")
        if not any(word in source for word in ("deepspeed", *OWNED_WORDS)):
            continue
        named = names_of_others(module, parsed(source))
        inner = [name for name in named if name in OWNED_WORDS or within(name, "deepspeed")]
        if inner and not within(module, "tests.engine.zero") and path != Path(__file__):
            breaches[module] = inner
    assert breaches == {}


PRODUCT = ("harness", "benchmark_", "comparison", "compare_dialects", "gpu_checks")


def test_no_script_imports_a_test_and_no_test_a_script_that_is_only_a_trial():
    breaches = {}
    for path in [*(ROOT / "tests").rglob("*.py"), *(ROOT / "scripts").rglob("*.py")]:
        names = imported_names(parsed(path.read_text(encoding="utf-8")))
        if path.is_relative_to(ROOT / "scripts"):
            wrong = [name for name in names if within(name, "tests")]
        else:
            scripts = [name.removeprefix("scripts.") for name in names if within(name, "scripts")]
            wrong = [name for name in scripts if not name.startswith(PRODUCT)]
        if wrong:
            breaches[str(path.relative_to(ROOT))] = wrong
    assert breaches == {}


@pytest.mark.parametrize(
    "module, source, breach",
    [
        ("engine.algo.new", "from engine.experience import Rollout", "imports engine.experience"),
        ("engine.algo.new", "from engine.errors import UserError", "imports engine.errors"),
        ("engine.algo.new", "import numpy as np", "numpy in the pure math"),
        ("engine.algo.new", "def f():\n    import transformers.utils", "transformers in the pure math"),
        ("engine.algorithms", "from engine import optim", "imports engine.optim"),
        ("engine.experience", "import engine.models.policy", "imports engine.models.policy"),
        ("engine.zero.engines", "from engine.models.policy import Policy", "imports engine.models.policy"),
        (
            "engine.distributed",
            "def f():\n    from engine.zero.gathering import full_shape",
            "imports engine.zero.gathering",
        ),
        ("engine.zero.engines", "from engine.reference import EMA", "imports engine.reference"),
        ("engine.reward.new", "import engine.experience_maker as maker", "imports engine.experience_maker"),
        (
            "engine.rollout.new",
            "from training.reporting.metrics import Accumulator",
            "imports training.reporting.metrics",
        ),
        ("engine.experience_maker", "import training", "imports training"),
        ("engine.errors", "from engine.algo import masked", "imports engine.algo.masked"),
        ("engine", "from engine.rlhf_engine import RLHFEngine", "imports engine.rlhf_engine"),
        ("engine.reward.new", "from engine import anything", "imports engine"),
        ("training.learner", "from training.tools.measuring import HeldOut", "imports training.tools.measuring"),
        ("training.step3_rlhf", "def f():\n    from training import tools", "imports training.tools"),
        ("training.data.order", "from training.runtime.loop import Run", "imports training.runtime.loop"),
        ("training.reporting.sinks", "from training.config import flags", "imports training.config.flags"),
        ("engine.new", "import torch", "stands in no layer"),
        ("training.new", "import torch", "stands in no layer"),
        ("engine.zero.engines", "import torch.distributed as dist", "names torch.distributed"),
        ("engine.zero.engines", "from torch import distributed", "names torch.distributed"),
        ("engine.zero.engines", "from torch.distributed import all_reduce", "names torch.distributed"),
        ("training.data.order", "import torch\nworld = torch.distributed.get_world_size()", "names torch.distributed"),
        ("training.data.order", "import torch as t\nt.distributed.barrier()", "names torch.distributed"),
        ("training.data.order", "import deepspeed.comm as dist", "names deepspeed"),
        ("engine.distributed", "def f():\n    from deepspeed import comm", "names deepspeed"),
        ("engine.optim", "def f(p):\n    return p.ds_shape", "names ds_shape"),
        ("engine.optim", "def f(p):\n    return getattr(p, 'ds_shape', p.shape)", "names ds_shape"),
        ("engine.reference", "def f(actor):\n    return actor.ds_engine.optimizer.fp32_groups", "names fp32_groups"),
        ("engine.models.policy", "def f(g):\n    return g(0)[0]._update_scale", "names _update_scale"),
        ("engine.models.loading", "from transformers.integrations import deepspeed", "names transformers.integrations"),
        ("engine.rlhf_engine", "import deepspeed\ndeepspeed.initialize(model=1)", "names deepspeed.initialize"),
        ("engine.rlhf_engine", "import deepspeed as ds\nstart = ds.initialize", "names deepspeed.initialize"),
        ("training.data.order", "from deepspeed import initialize as start", "names deepspeed.initialize"),
        (
            "engine.models.policy",
            "from transformers.integrations.deepspeed import HfDeepSpeedConfig",
            "names HfDeepSpeedConfig",
        ),
        (
            "engine.models.policy",
            "import transformers\ntransformers.integrations.HfDeepSpeedConfig",
            "names HfDeepSpeedConfig",
        ),
        (
            "training.runtime.loop",
            "from reporting import Sum",
            "reporting.Sum instead of training.reporting.Sum",
        ),
        ("training.runtime.loop", "import reporting", "reporting instead of training.reporting"),
        ("training.data.order", "from . import row_selection", "relative import ..row_selection"),
        ("training.data.order", "from .row_selection import load_rows", "relative import .row_selection.load_rows"),
        (
            "engine.reward.new",
            "import importlib\nimportlib.import_module('training.data.row_selection')",
            "imports at run time",
        ),
    ],
)
def test_a_breach_would_be_seen(module, source, breach):
    assert f"{module}: {breach}" in breaches({**EMPTY, module: source})


@pytest.mark.parametrize(
    "module, source",
    [
        ("engine.algo.new", "import math\nimport torch.nn.functional as F\nfrom engine.algo.masked import masked_sum"),
        ("engine.reward.new", "import numpy\nfrom engine.errors import UserError\nfrom engine.reward import base"),
        ("engine.zero.engines", "import deepspeed\nfrom engine import distributed\nrank = distributed.rank()"),
        (
            "training.data.order",
            "from engine import distributed, rlhf_engine\nfrom training.data.row_selection import load_rows",
        ),
        ("training.data.new", "'torch.distributed'\n'deepspeed --num_gpus 2'  # deepspeed.comm"),
        ("training.step3_rlhf", "if __name__ == '__main__':\n    from training import tools"),
        ("engine.zero.new", "import deepspeed.comm\nshape = getattr(1, 'ds_shape', None)"),
    ],
)
def test_what_is_allowed_passes(module, source):
    assert breaches({**EMPTY, module: source}) == []


def test_a_circle_within_a_layer_would_be_seen():
    circle = {"engine.reward.a": "from engine.reward import b", "engine.reward.b": "import engine.reward.a"}
    assert any(breach.startswith("circle: ") and "engine.reward.a" in breach for breach in breaches(EMPTY | circle))
