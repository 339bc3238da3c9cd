"""What every test runs under: Triton's interpreter where there is no GPU, and a pinned number of skips."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before any test imports one

# Streams that share a hardware queue wait for each other, and a virtual rank polls until another rank's kernel has run.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

# A skip is a test that did not run: this many are known. GPU tests are deselected by their marks and never skipped.
KNOWN_SKIPS = 0


def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:  # a worker of pytest-xdist: its controller counts
        return
    skipped = len(reporter.stats.get("skipped", []))
    if skipped != KNOWN_SKIPS:
        reporter.write_line(
            f"{skipped} tests were skipped, {KNOWN_SKIPS} are known: see KNOWN_SKIPS in tests/conftest.py"
        )
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
