"""The findings of a host or container, in words."""

from __future__ import annotations

from collections.abc import Sequence

from common.config import Config
from common.config_values import uses_gpu
from tools.doctor import gpu, host
from tools.doctor.finding import Finding, errors
from tools.doctor.folder import CannotMeet
from tools.doctor.meeting import Meeting
from tools.resume import CannotStart


def examine(config: Config, meet_s: float = 0.0) -> list[Finding]:
    """Every check that means something here; for ``meet_s`` seconds also with doctors in other containers."""
    if meet_s <= 0:
        return [*host.examine(config), *gpu.examine(config)]
    try:
        with Meeting(uses_gpu(config)) as meeting:  # the others wait while this one is examined
            seen = gpu.examine(config)
            alone = gpu.cannot_lend(config, seen)
            met = [alone] if alone else meeting.hold(meet_s)
    except CannotMeet as refused:
        seen, met = gpu.examine(config), [refused.finding]
    return [*host.examine(config), *seen, *met]


def lines(findings: Sequence[Finding]) -> list[str]:
    """One line where all is well, two where something is to be changed."""
    text: list[str] = []
    for finding in findings:
        text.append(f"{finding.level:7} {finding.check}: {finding.found}")
        if finding.why:
            text.append(f"        {finding.why}; change: {finding.change}")
    return text


def require_health(config: Config) -> None:
    """Raises CannotStart with what of this host or container would break the run, one line each."""
    found = [f"{one.check}: {one.found}; {one.why}; change: {one.change}" for one in errors(host.examine(config))]
    if found:
        raise CannotStart("\n".join(found))
