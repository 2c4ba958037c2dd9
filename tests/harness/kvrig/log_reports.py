"""Reports of pytest: what a `conftest.py` imports is a hook of its tests."""

import pytest

from . import logs


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    """A failed test's report has the ends of its servers' logs."""
    report = yield
    if report.failed:
        report.sections += [("log of a server", logs.tail(path)) for path in logs.all_open()]
    return report
