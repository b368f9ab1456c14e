"""A plugin of pytest: modules that are written in Triton have no tests without it."""

import importlib.util

WRITTEN = ("kernel.py", "interpreter.py", "pairs.py")


def pytest_ignore_collect(collection_path, config):
    """Leaves out what could not be imported, or answers nothing."""
    del config
    written = collection_path.name in WRITTEN and "kernels" in collection_path.parts
    return True if written and not importlib.util.find_spec("triton") else None
