"""pytest plugin: which acceptance cases held in this run, from `@pytest.mark.case("A01", ..)`.

A full run also fails when a case that is not listed as open had no test.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.acceptance.cases import CASES, OPEN

_outcomes: dict[str, list[bool]] = {}
_PROPERTY = "acceptance-case"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--acceptance",
        action="store_true",
        help="print the table of cases and demand the closed ones",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    for item in items:
        for mark in item.iter_markers("case"):
            for case in mark.args:
                if case not in CASES:
                    raise pytest.UsageError(f"{item.nodeid}: no acceptance case {case!r}")
                item.user_properties.append((_PROPERTY, case))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when != "call" and report.passed:
        return
    for name, case in report.user_properties:
        if name == _PROPERTY and not report.skipped:
            _outcomes.setdefault(str(case), []).append(report.passed)


def state_of(case: str) -> str:
    """held: at least one test ran and all passed."""
    outcomes = _outcomes.get(case)
    if not outcomes:
        return "open" if case in OPEN else "NO TEST"
    return "held" if all(outcomes) else "FAILED"


def pytest_sessionfinish(session: pytest.Session) -> None:
    wanted = session.config.getoption("--acceptance")
    if wanted and session.exitstatus == 0 and any(state_of(c) == "NO TEST" for c in CASES):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if not config.getoption("--acceptance"):
        return
    terminalreporter.section("founding bugs and acceptance cases")
    for case, title in CASES.items():
        count = len(_outcomes.get(case, ()))
        tests = f"{count} test{'s' if count != 1 else ''}" if count else ""
        terminalreporter.write_line(f"  {case}  {state_of(case):8}{tests:>10}  {title}")
