"""The folder in a user's home for what can be made again, shared by all clones."""

import os
import pathlib


def find() -> pathlib.Path | None:
    """Returns hpcjax's folder below the user's cache; None if the user has no home."""
    home = pathlib.Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not home.is_absolute():  # as the XDG specification asks
        try:
            home = pathlib.Path.home() / ".cache"
        except RuntimeError:
            return None
    return home / "hpcjax"
