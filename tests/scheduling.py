"""Which tests stay in one process where several run them; for pytest-xdist."""

from xdist.scheduler import LoadFileScheduling

OF_ONE_CHAIN = {f"tests/e2e/test_{name}.py" for name in ("damaged_points", "programs", "recordings", "samples")}


class ByFile(LoadFileScheduling):
    """Those of a file, which share what it starts; and those of several files that look at the same launches."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "chain" if file in OF_ONE_CHAIN else file
