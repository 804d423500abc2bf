"""YAML files of settings: one mapping, read safely, in which no key stands twice."""

import reprlib

from engine.errors import UserError
from engine.files import read_text
from training.reporting.sample_tables import visible


def read_yaml(path: str) -> dict:
    """The mapping in the file; raises UserError for a file that holds none."""
    import yaml

    class UniqueKeys(yaml.SafeLoader):
        """YAML in which a key that comes twice is a mistake, and not the later value."""

        def construct_mapping(self, node, deep=False):
            seen = set()
            for key_node, _ in node.value:
                if key_node.value in seen if isinstance(key_node.value, str) else False:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key_node.value} stands there twice", key_node.start_mark
                    )
                seen.add(str(key_node.value))
            return super().construct_mapping(node, deep)

    try:
        found = yaml.load(read_text(path), UniqueKeys)
    except (OSError, ValueError) as error:
        raise UserError(f"--config {path}: cannot be read ({getattr(error, 'strerror', None) or error}).") from None
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise UserError(f"--config {path}{where}: no valid YAML ({_yaml_problem(error)}).") from None
    if not isinstance(found, dict):
        raise UserError(
            f"--config {path}: found {'nothing' if found is None else reprlib.repr(found)}; needed lines "
            "like `output_dir: out`."
        )
    return found


def _yaml_problem(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "brackets within brackets, too deep"
    return visible(getattr(error, "problem", None) or getattr(error, "reason", None) or str(error))
