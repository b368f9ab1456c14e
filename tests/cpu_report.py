"""Says where the suite spends its time: a new system has least of that."""

import collections
import os
import pathlib

import pytest

SLOWEST = 20
PAPERS = pathlib.Path(__file__).parents[1] / "experiments"


def budget():
    """Returns the seconds that `make test` may take with nothing compiled before.

    900 for the seventeen papers that stood on 2026-11-26, 30 for each one since.
    """
    return 900 + 30 * (len([*PAPERS.glob("*/tables.py")]) - 17)


_NAME = "cpu seconds"
_now = {}


def _spent():
    """Returns the processor seconds of this process and of those it has waited for."""
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Adds to each report the processor seconds since the one before."""
    report = yield
    before, _now[_NAME] = _now.get(_NAME, 0.0), _spent()
    report.user_properties = [(_NAME, _now[_NAME] - before)]
    return report


def pytest_terminal_summary(terminalreporter, config):
    """Prints processor seconds by folder, and the files that take most of them."""
    files = collections.Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name == _NAME:
                    files[report.nodeid.partition("::")[0]] += value
    if len(files) < SLOWEST:
        return
    folders = collections.Counter()
    for file, seconds in files.items():
        folders["/".join(file.split("/")[:2])] += seconds
    total = sum(files.values())
    terminalreporter.section("processor seconds")
    terminalreporter.write_line(f"{total:7.0f}  all; budget of `make test` {budget()}")
    for name, seconds in (*folders.most_common(), *files.most_common(SLOWEST)):
        terminalreporter.write_line(f"{seconds:7.0f}  {name}")
