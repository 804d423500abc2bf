"""Which small mistakes in a file no test notices: makes them one at a time in a copy of the repository, and runs tests.

    python scripts/mutate.py engine/packing.py --list
    python scripts/mutate.py engine/packing.py tests/engine/test_packing.py
    python scripts/mutate.py engine/rollout/decode.py --only 3 17 -- tests/engine/rollout -m "not slow"

Signs, bounds, comparisons, conditions and numbers are changed, arguments exchanged or left out, calls skipped, and
reductions over ranks and masks left out. What survives shows that a test is missing, or changes nothing that anyone
sees. Other words go to pytest: first the quick tests of the file, then the slow ones for what these do not notice.
"""

import argparse
import ast
import copy
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAIRS = [(ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn)]
PAIRS += [(ast.And, ast.Or), (ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.BitAnd, ast.BitOr), (ast.FloorDiv, ast.Mod)]
OPERATORS = {one: other for pair in PAIRS for one, other in (pair, pair[::-1])}
NAMES = {"max": "min", "min": "max", "any": "all", "all": "any"}
LEFT_OUT = {"agree", "any_rank", "data_parallel_sum", "largest", "abs", "clamp", "clone", "double", "masked_fill"}
UNSEEN = (ast.arguments, ast.Raise, ast.Assert, ast.JoinedStr)


def _changed(node: ast.AST, **fields) -> ast.AST:
    vars(other := copy.copy(node)).update(fields)
    return other


def mutated(node: ast.AST) -> Iterator[ast.AST]:
    """Copies of the node, each with one mistake."""
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in OPERATORS:
            yield _changed(node, ops=[OPERATORS[type(operator)]()])
        case ast.BinOp() | ast.BoolOp() | ast.AugAssign() if type(node.op) in OPERATORS:
            yield _changed(node, op=OPERATORS[type(node.op)]())
        case ast.UnaryOp():
            yield node.operand
        case ast.Constant(value=bool() | int() | float()):
            yield _changed(node, value=not node.value if isinstance(node.value, bool) else node.value + 1)
        case ast.If() | ast.While() | ast.IfExp() if not isinstance(node.test, ast.Compare | ast.UnaryOp):
            yield _changed(node, test=ast.UnaryOp(ast.Not(), node.test))
        case ast.Expr(value=ast.Call()):
            yield ast.Pass()
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=args, keywords=words):
            if name in NAMES:
                yield _changed(node, func=_changed(node.func, id=NAMES[name], attr=NAMES[name]))
            elif len(args) > 1 and not any(isinstance(arg, ast.Starred) for arg in args[:2]):
                yield _changed(node, args=[args[1], args[0], *args[2:]])
            if name in LEFT_OUT:
                yield args[0] if args else node.func.value
            for word in words:
                yield _changed(node, keywords=[other for other in words if other is not word])


def below(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below this one, without annotations, decorators, arguments' defaults and what is said of errors."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, UNSEEN):
                yield child
                yield from below(child)


def mutations(source: bytes) -> Iterator[tuple[str, bytes]]:
    """(what is changed, the changed source) of every mutation."""
    lines = source.splitlines(keepends=True)
    for node in below(ast.parse(source)):
        for other in mutated(node):
            old, new = (node.test, other.test) if isinstance(node, ast.If | ast.While) else (node, other)
            start = sum(map(len, lines[: old.lineno - 1])) + old.col_offset
            end = sum(map(len, lines[: old.end_lineno - 1])) + old.end_col_offset
            text = ast.unparse(ast.fix_missing_locations(new))
            code = f"({text})" if isinstance(new, ast.expr) else text
            yield f"line {old.lineno}: {ast.unparse(old)} -> {text}", source[:start] + code.encode() + source[end:]


def outcome(tree: Path, words: list[str], timeout: float) -> str:
    """What pytest says of the first test that fails in this tree; "" if none does."""
    with tempfile.TemporaryFile("w+") as log:
        child = os.fork()  # has the libraries that this process has imported, which takes longer than many tests
        if child == 0:
            os.setsid()
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            os.chdir(tree)
            sys.path.insert(0, str(tree))
            os.environ["PYTHONPATH"] = str(tree)  # for programs that tests start
            sys.dont_write_bytecode = True  # of two mutations in one second, it would be the first one's
            os._exit(pytest.main(["-x", "-n", "0", "-p", "no:cacheprovider", *words]))
        end = time.monotonic() + timeout
        while not os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) and time.monotonic() < end:
            time.sleep(0.05)
        os.killpg(child, signal.SIGKILL)  # and the ranks that tests have started
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        log.seek(0)
        lines = log.read().splitlines()
    failed = (line for line in lines if line.startswith(("FAILED", "ERROR")))
    return next(failed, f"exit code {code}: {lines[-1:]}") if code else ""


def main() -> None:
    """Print each mutation, and the test that fails with it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="the file that is changed, in a copy")
    parser.add_argument("--list", action="store_true", help="print the mutations with their numbers, and make none")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of the mutations to make (default: all)")
    args, words = parser.parse_known_args()
    found = enumerate(mutations((ROOT / args.file).read_bytes()))
    chosen = [(number, *one) for number, one in found if not args.only or number in args.only]
    if args.list:
        print("\n".join(f"{number} {what}" for number, what, _ in chosen))
        return
    for library in ("deepspeed", "transformers"):
        pytest.importorskip(library)
    words, began = [word for word in words if word != "--"], time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT, tree := Path(folder) / "tree", ignore=shutil.ignore_patterns(".*", "__pycache__"))
        assert not (failed := outcome(tree, words, math.inf)), f"without a mutation: {failed}"
        timeout = 60 + 5 * (time.monotonic() - began)
        for number, what, source in chosen:
            (tree / args.file).write_bytes(source)
            print(f"{number} {what}: {outcome(tree, words, timeout) or 'SURVIVED'}", flush=True)


if __name__ == "__main__":
    main()
