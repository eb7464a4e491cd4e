"""Holds a run to its budget; tests/run.sh runs it last, on the run's own junit.

TEST_REPORTS names the directory of these files.
"""

import os

from tests import report


def test_what_takes_long_says_why():
    broken = report.over_budget(report.read(os.environ["TEST_REPORTS"]))
    assert not broken, (
        f"over {report.BUDGET_SECS:.0f} s: mark it "
        '@pytest.mark.slow("why"), make it faster, or @pytest.mark.deep:\n'
        + "\n".join(broken)
    )
