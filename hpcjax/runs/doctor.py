"""Examining what works on this machine, what does not, and how to repair it."""

import dataclasses
import importlib.metadata
import pathlib
import platform
import sys
from collections.abc import Iterator
from typing import Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from rich.console import Group, RenderableType
from rich.text import Text

from hpcjax import kernels
from hpcjax.runs import directory, places
from hpcjax.runs.frames import Frame

Verdict = Literal["ok", "wrong", "missing"]
_SHOWN = ("jax", "jaxlib", "flax", "optax")
_COSTS = {
    "jax-cuda13-pjrt": "JAX does not see an NVIDIA GPU",
    "jax-cuda13-plugin": "JAX does not see an NVIDIA GPU",
    "jax-triton": "kernels run in their plain JAX, also on a GPU",
    "triton": "kernels run in their plain JAX, also on a GPU",
    "llvmlite": "programs in LLVM-IR are refused",
    "mpi4py": "`hostcomm.MpiTransport` is refused",
    "mlflow-skinny": "`--log mlflow` is refused",
    "tensorboardX": "`--log tensorboard` is refused",
    "tokenizers": "byte-pair tokens and `tokenizer.json` are refused",
    "wandb": "`--log wandb` is refused",
    "docs": "the documentation cannot be built",
    "dev": "the checks and tests cannot be run",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """A line of the report.

    Attributes:
      part: what was examined.
      found: version, device or place; empty if there is none.
      verdict: `missing` is allowed, `wrong` is not.
      advice: the consequences, and what to do.
    """

    part: str
    found: str
    verdict: Verdict
    advice: str = ""


def examine(root: pathlib.Path) -> tuple[Check, ...]:
    """Examines Python, packages, devices, extras and data sets; starts JAX."""
    return (
        python(),
        *packages(),
        *devices(),
        *kernels_here(),
        *extras(),
        *data_sets(directory.data_root(root)),
    )


def healthy(checks: tuple[Check, ...]) -> bool:
    """Returns whether nothing that is needed is wrong."""
    return all(check.verdict != "wrong" for check in checks)


def render(checks: tuple[Check, ...]) -> RenderableType:
    """Returns the report."""
    rows = [(c.part, c.found or "-", c.verdict, c.advice) for c in checks]
    wrong = [check.part for check in checks if check.verdict == "wrong"]
    end = f"Wrong: {', '.join(wrong)}" if wrong else "Everything needed is here."
    columns = ("part", "found", "verdict", "advice")
    return Group(Frame("", columns, rows, whole=columns[:1]), Text(end))


def python() -> Check:
    """Compares the interpreter with the versions that the package supports."""
    found = platform.python_version()
    allowed = ",".join(_stated("Requires-Python"))
    good = Version(found) in SpecifierSet(allowed)
    advice = f"supported: {allowed}" if allowed else "hpcjax is not installed"
    return Check(
        part="python", found=found, verdict="ok" if good else "wrong", advice=advice
    )


def packages() -> Iterator[Check]:
    """Yields the central packages, and every other one that is wrong."""
    needed = {name: Requirement(name) for name in _SHOWN}
    for need in _requirements():
        if need.marker is None or need.marker.evaluate({"extra": ""}):
            needed[need.name] = need
    for name, need in needed.items():
        check = _package(need)
        if name in _SHOWN or check.verdict == "wrong":
            yield check


def _package(need: Requirement) -> Check:
    found = _version(need.name)
    good = found is not None and need.specifier.contains(found, prereleases=True)
    wanted = f"{need.name}{need.specifier}"
    advice = f"supported: {need.specifier}" if need.specifier else ""
    if not good:
        advice = f"{sys.executable} -m pip install '{wanted}'"
    return Check(
        part=need.name,
        found=found or "",
        verdict="ok" if good else "wrong",
        advice=advice,
    )


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _stated(field: str) -> list[str]:
    """Returns a field of the package's metadata; empty if it is not installed."""
    try:
        return importlib.metadata.metadata("hpcjax").get_all(field) or []
    except importlib.metadata.PackageNotFoundError:
        return []


def _requirements() -> list[Requirement]:
    return [Requirement(line) for line in _stated("Requires-Dist")]


def devices() -> Iterator[Check]:
    """Yields the devices that JAX finds; starts it."""
    try:
        import jax

        found = jax.devices()
    except Exception as error:
        line = str(error).partition("\n")[0]
        yield Check(
            part="devices",
            found="",
            verdict="wrong",
            advice=f"JAX does not start: {type(error).__name__}: {line}",
        )
        return
    kinds = [device.device_kind for device in found]
    text = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    advice = "" if jax.default_backend() != "cpu" else "simulate several: --devices n"
    yield Check(part="devices", found=text, verdict="ok", advice=advice)


def kernels_here() -> Iterator[Check]:
    """Yields what computes each operation that has a kernel, and why; starts JAX."""
    for choice in kernels.choices_here():
        yield Check(
            part=f"kernel {choice.operation}",
            found=choice.implementation,
            verdict="ok",
            advice=choice.reason,
        )


def extras() -> Iterator[Check]:
    """Yields the optional extras, with the consequences of missing ones."""
    by_extra: dict[str, list[Requirement]] = {}
    for need in _requirements():
        for extra in _stated("Provides-Extra"):
            if need.marker is not None and need.marker.evaluate({"extra": extra}):
                by_extra.setdefault(extra, []).append(need)
    for extra, needs in by_extra.items():
        names = list(dict.fromkeys(name for need in needs for name in _parts(need)))
        absent = [name for name in names if _version(name) is None]
        costs = dict.fromkeys(
            _COSTS.get(name) or _COSTS.get(extra, "less") for name in absent
        )
        yield Check(
            part=f"extra {extra}",
            found=f"{len(names) - len(absent)} of {len(names)} packages",
            verdict="missing" if absent else "ok",
            advice=f"without {', '.join(absent)}: {'; '.join(costs)}; {_install(extra)}"
            if absent
            else "",
        )


def _parts(need: Requirement) -> Iterator[str]:
    """Yields the distributions that a requirement brings, extras of JAX included."""
    yield from (
        f"{need.name}-{extra}-{part}"
        for extra in sorted(need.extras)
        for part in ("pjrt", "plugin")
        if need.name == "jax"
    )
    if need.name == "jax-triton":
        yield "triton"
    if need.name != "jax":
        yield need.name


def _install(extra: str) -> str:
    source = places.checkout()
    what = f"-e '{source}[{extra}]'" if source else f"'hpcjax[{extra}]'"
    return f"{sys.executable} -m pip install {what}"


def data_sets(root: pathlib.Path) -> Iterator[Check]:
    """Yields the data sets of the catalogue."""
    from hpcjax.data import catalog

    for row in catalog.list_entries(root):
        here = row["present"] == "yes"
        yield Check(
            part=f"data {row['name']}",
            found=row["size"] if here else "",
            verdict="ok" if here else "missing",
            advice="" if here else row["get"],
        )
