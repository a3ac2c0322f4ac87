"""The reward service: scores finished responses. Any number of replicas may come and go."""

from __future__ import annotations

import sys

from common.service_main import run_replica
from services.reward.service import RewardService

ABOUT = "Scores finished responses with the functions named in the config's [reward] section."

if __name__ == "__main__":
    sys.exit(run_replica("reward", ABOUT, RewardService))
