"""Prints a failure when it happens: a suite that is cut off has no summary."""

import pytest

_LAST = 3_000  # characters of a failure


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    """Prints in the process that the user sees, not in those that run the tests."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Printer(config))


class _Printer:
    def __init__(self, config):
        self.config = config

    def pytest_runtest_logreport(self, report):
        """Prints the test's name, its seconds and the end of what it says.

        Of a test that is run once more, too.
        """
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        if report.outcome not in ("failed", "rerun") or terminal is None:
            return
        terminal.ensure_newline()
        terminal.write_line(
            f"{report.outcome.upper()} in {report.when}: {report.nodeid}, "
            f"{report.duration:.0f} s"
        )
        terminal.write_line(report.longreprtext[-_LAST:])
