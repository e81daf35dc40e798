"""What every suite has. What MPI needs is in tests/mpi/conftest.py."""

import pytest


def pytest_addoption(parser):
    parser.addoption("--matrix", action="store_true", help="all combinations instead of a pairwise sample")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session, exitstatus):
    """A suite in which nothing passed has tested nothing."""
    reporter = session.config.pluginmanager.getplugin("terminalreporter")
    if exitstatus == pytest.ExitCode.OK and not session.config.option.collectonly:
        if not reporter.stats.get("passed"):
            reporter.write_line("no test passed: every one was skipped or deselected")
            session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
