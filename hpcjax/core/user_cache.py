"""The folder in a user's home for what can be made again, shared by all clones."""

import os
import pathlib

import platformdirs

_VARIABLE = "HPCJAX_CACHE"


def find() -> pathlib.Path | None:
    """Returns hpcjax's folder of the user's cache; None if the user has no home.

    `HPCJAX_CACHE`, else where the system keeps such things: on Linux
    `$XDG_CACHE_HOME/hpcjax`, which is `~/.cache/hpcjax` where nothing else is said.
    """
    if chosen := os.environ.get(_VARIABLE):
        return pathlib.Path(chosen).absolute()
    try:
        folder = platformdirs.user_cache_path("hpcjax", appauthor=False)
    except RuntimeError:  # older versions answer with a path that is not absolute
        return None
    return folder if folder.is_absolute() else None
