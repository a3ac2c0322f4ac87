"""The findings of a host or container, in words."""

from __future__ import annotations

from collections.abc import Sequence

from common.config import Config
from tools.doctor import gpu, host
from tools.doctor.finding import Finding


def examine(config: Config) -> list[Finding]:
    """Every check that means something here."""
    return [*host.examine(config), *gpu.examine(config)]


def lines(findings: Sequence[Finding]) -> list[str]:
    """One line where all is well, two where something is to be changed."""
    text: list[str] = []
    for finding in findings:
        text.append(f"{finding.level:7} {finding.check}: {finding.found}")
        if finding.why:
            text.append(f"        {finding.why}; change: {finding.change}")
    return text


def errors(findings: Sequence[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.level == "error"]
