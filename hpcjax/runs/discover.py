"""Finding configs, experiments and tables in the search path, without importing JAX."""

import dataclasses
import inspect
import pathlib
import re
import sys
import types
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from hpcjax.core.config import replace_parts, smoke_of
from hpcjax.core.errors import ConfigError, DataFormatError, DataMissing, nearest
from hpcjax.core.files import check_name, inside, read_json
from hpcjax.runs import config as configs
from hpcjax.runs import overrides as override
from hpcjax.runs.places import activate, import_file, search_path

if TYPE_CHECKING:
    from hpcjax.runs.tables import Table


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConfigEntry:
    """One file of `configs/`.

    Attributes:
      name: `paper/config`.
      path: the file.
      doc: its docstring.
      variants: the configs it defines, by name.
      base: name of the variant that `hpcjax run paper/config` runs.
      smoke: overrides under which it runs in seconds, besides those that its config
        and parts say themselves; see `small`.
      sweep: what `hpcjax sweep` varies by default: `{key: values}`, not checked.
      needs: what it needs besides a CPU, such as a data set to be downloaded.
      problem: why the file cannot be used; empty if it can.
    """

    name: str
    path: pathlib.Path
    doc: str = ""
    variants: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    base: str = ""
    smoke: Mapping[str, str] = dataclasses.field(default_factory=dict)
    sweep: Any = dataclasses.field(default_factory=dict)
    needs: tuple[str, ...] = ()
    problem: str = ""

    @property
    def summary(self) -> str:
        """The first line of the docstring."""
        return self.doc.partition("\n")[0]

    def small(self, variant: str | None = None) -> dict[str, str]:
        """Returns the overrides under which a variant, or the base, is tiny."""
        said = smoke_of(self.variants[variant or self.base])
        return replace_parts(said, self.smoke)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loaded:
    """A config that is ready to run.

    Attributes:
      name: `paper/config`.
      variant: name of the variant; empty for a file without one.
      config: the variant with its overrides.
      base: the config's base variant.
    """

    name: str
    variant: str
    config: Any
    base: Any

    @property
    def title(self) -> str:
        """Name and variant as the command line takes them."""
        return f"{self.name}:{self.variant}" if self.variant else self.name

    @property
    def steps(self) -> int | None:
        """The number of training steps; None for an experiment that does not train."""
        return getattr(getattr(self.config, "train", None), "steps", None)

    def check_devices(self, devices: int) -> None:
        """Raises ConfigError if the config says that so many devices cannot run it.

        Loads no JAX, so that this is said at once.
        """
        check = getattr(self.config, "check_devices", None)
        if check is not None:
            check(devices)

    @property
    def experiment(self) -> types.ModuleType:
        """The module of the config's class, which has `run(cfg, ctx)`."""
        return experiment(self.config)


def find_configs(
    root: pathlib.Path, paper: str | None = None
) -> tuple[ConfigEntry, ...]:
    """Returns all configs sorted by name; `problem` tells why a file cannot be used.

    Args:
      root: folder searched first.
      paper: restricts the search to a paper.

    Raises:
      ConfigError: no such paper.
    """
    files = _config_files(root)
    if paper is not None:
        papers = {name.partition("/")[0] for name in files}
        if check_name(paper, "paper") not in papers:
            raise ConfigError(f"unknown system {paper!r}{nearest(paper, papers)}")
        files = {name: f for name, f in files.items() if name.startswith(f"{paper}/")}
    return tuple(_try_entry(name, file) for name, file in files.items())


def _config_files(root: pathlib.Path) -> dict[str, pathlib.Path]:
    configs_by_name = {
        f"{file.parent.name}/{file.stem}": file
        for part in activate(root)
        for file in part.glob("configs/*/*.py")
        if _is_config(file)
    }
    return dict(sorted(configs_by_name.items()))


def _is_config(file: pathlib.Path) -> bool:
    return file.stem.isidentifier() and not file.stem.startswith("_")


def _try_entry(name: str, file: pathlib.Path) -> ConfigEntry:
    try:
        return _entry(name, file)
    except ConfigError as error:
        return ConfigEntry(name=name, path=file, problem=str(error))


def _entry(name: str, file: pathlib.Path) -> ConfigEntry:
    module = import_file(f"configs.{name.replace('/', '.')}", file)
    variants = dict(_variants(module))
    base = getattr(module, "base", None)
    if base is None and len(variants) == 1:
        base = next(iter(variants.values()))
    names = [key for key, value in variants.items() if value is base]
    if base is not None and not names:
        names = ["base"]
        variants["base"] = base
    if not names:
        raise ConfigError(f"{file} must define `base`, one of: {', '.join(variants)}")
    needs = getattr(module, "needs", ())
    return ConfigEntry(
        name=name,
        path=file,
        doc=inspect.getdoc(module) or "",
        variants=variants,
        base=names[0],
        smoke=getattr(module, "smoke", {}),
        sweep=getattr(module, "sweep", {}),
        needs=(needs,) if isinstance(needs, str) else tuple(needs),
    )


def _variants(module: types.ModuleType) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        hidden = name.startswith("_") or name == "base" or isinstance(value, type)
        if not hidden and dataclasses.is_dataclass(value) and _has_run(value):
            yield name, value


def _has_run(config: Any) -> bool:
    module = sys.modules.get(type(config).__module__)
    return callable(getattr(module, "run", None))


def experiment(config: Any) -> types.ModuleType:
    """Returns the module that defines a config's class.

    Raises:
      ConfigError: it has no function `run(cfg, ctx)`.
    """
    cls = type(config)
    module = sys.modules.get(cls.__module__)
    if module is None or not _has_run(config):
        raise ConfigError(
            f"{cls.__module__} must define run(cfg, ctx) beside {cls.__qualname__}"
        )
    return module


def experiment_folder(paper: str, root: pathlib.Path) -> pathlib.Path:
    """Returns the folder `experiments/<paper>`."""
    folders = {
        folder.name: folder
        for part in search_path(root)
        for folder in part.glob("experiments/*")
        if folder.is_dir() and folder.name.isidentifier()
    }
    if check_name(paper, "paper") not in folders:
        raise ConfigError(f"unknown system {paper!r}{nearest(paper, folders)}")
    return folders[paper]


def load(name: str, overrides: Mapping[str, Any], root: pathlib.Path) -> Loaded:
    """Returns a config with its overrides applied.

    Args:
      name: `paper/config`, `paper/config:variant`, or the path of a `config.json`.
      overrides: `{key: text}`.
      root: folder searched first; a relative path starts here.

    Raises:
      ConfigError: no such config or variant (names the nearest), or an override that
        cannot be applied.
    """
    if name.endswith(".json"):
        loaded = _load_json(name, root)
    else:
        entry, variant = find(name, root)
        loaded = Loaded(
            name=entry.name,
            variant=variant,
            config=entry.variants[variant],
            base=entry.variants[entry.base],
        )
    experiment(loaded.config)
    config = override.parse(loaded.config, overrides)
    return dataclasses.replace(loaded, config=config)


def find(name: str, root: pathlib.Path) -> tuple[ConfigEntry, str]:
    """Returns the entry and the variant's name of `paper/config[:variant]`.

    Raises:
      ConfigError: malformed name, no such config or variant, or a file that fails.
    """
    plain, colon, variant = name.partition(":")
    parts = plain.split("/")
    for part in [*parts, variant] if colon else parts:
        check_name(part, "config name")
    paths = [part / "configs" / f"{plain}.py" for part in activate(root)]
    found = [path for path in paths if path.is_file() and _is_config(path)]
    if not found or len(parts) != 2:
        files = _config_files(root)
        inside_paper = [key for key in files if key.startswith(f"{plain}/")]
        if inside_paper:
            raise ConfigError(
                f"{plain!r} is a paper; its configs: {', '.join(inside_paper)}"
            )
        named = [key for key in files if key.endswith(f"/{plain}")]
        near = f"; did you mean {' or '.join(named)}?" if named else ""
        own = [key for key in files if key.startswith(f"{parts[0]}/")]
        near = near or nearest(plain, own or files)
        raise ConfigError(f"unknown config {plain!r}{near}")
    (file,) = found
    inside(file.parents[1], file.parent.name, file.name)
    entry = _entry(plain, file)
    variant = variant if colon else entry.base
    if variant == "base":
        variant = entry.base
    if variant not in entry.variants:
        near = nearest(variant, entry.variants)
        raise ConfigError(f"{plain} has no variant {variant!r}{near}")
    return entry, variant


def _load_json(name: str, root: pathlib.Path) -> Loaded:
    activate(root)
    path = root / name
    try:
        data = read_json(path)
    except (DataMissing, DataFormatError) as error:
        raise ConfigError(str(error)) from error
    try:
        config = configs.from_json(data)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    title = data.get("name", path.stem)
    if not isinstance(title, str) or not re.fullmatch(r"[\w.:/-]+", title):
        raise ConfigError(f"{path}: name must be paper/config[:variant]: got {title!r}")
    plain, _, variant = title.partition(":")
    for part in (*plain.split("/"), variant or "base"):
        check_name(part, f"{path}: name")
    base = config
    if plain in _config_files(root):
        entry = _try_entry(plain, _config_files(root)[plain])
        base = entry.variants.get(entry.base, config)
    return Loaded(name=plain, variant=variant, config=config, base=base)


def find_tables(root: pathlib.Path, paper: str = "*") -> "dict[str, Table]":
    """Returns the tables of every `experiments/*/tables.py`, or of one paper's, by id.

    Raises:
      ConfigError: an id is given twice or does not start with its paper's name.
    """
    from hpcjax.runs.tables import Table

    tables: dict[str, Table] = {}
    pattern = f"experiments/{paper}/tables.py"
    files = [f for part in activate(root) for f in part.glob(pattern)]
    for file in sorted(files, key=lambda file: file.parent.name):
        paper = file.parent.name
        module = import_file(f"experiments.{paper}.tables", file)
        for table in vars(module).values():
            if not isinstance(table, Table):
                continue
            if not table.id.startswith(f"{paper}/"):
                raise ConfigError(
                    f"{file}: a table's id must start with '{paper}/': got {table.id!r}"
                )
            check_name(table.id.partition("/")[2], f"{file}: table name")
            if tables.get(table.id, table) is not table:
                raise ConfigError(f"{file}: table {table.id!r} is defined twice")
            tables[table.id] = table
    return tables
