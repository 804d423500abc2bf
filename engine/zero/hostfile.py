"""The hosts that the deepspeed launcher would start on."""


def slots_by_host(path: str) -> dict[str, int]:
    """The processes that the launcher starts on each host of a hostfile, in its order.

    Raises: OSError, ValueError for a file that the launcher would not read.
    """
    from deepspeed.launcher.runner import fetch_hostfile

    return dict(fetch_hostfile(path))
