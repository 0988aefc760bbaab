import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

torch.set_num_threads(1)


def pytest_terminal_summary(terminalreporter):
    """The time each lesson took, which has a budget."""
    for report in terminalreporter.stats.get("passed", []):
        found = dict(report.user_properties)
        if "cpu_seconds" in found:
            terminalreporter.write_line(f"{found['lesson']}: {found['seconds']} s, processor {found['cpu_seconds']} s")
