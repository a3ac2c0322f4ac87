"""More prompts at a time than engine ``vllm`` computes in one pass: on CPU it must not cut one of them in pieces."""

from __future__ import annotations

import pytest

from common.config_loading import load_config
from services.rollout.engines.interface import EngineError
from services.rollout.engines.vllm.arguments import BLOCKS, MIB, batched_tokens, kv_bytes_per_token
from tests.process.vllm_support import CLOSE, SMALL_ENGINE, engine_pair, prompts, sampled

ROWS, KV_MIB, PASS_TOKENS = 192, 6, 200


def test_more_prompts_than_one_pass_takes_are_sampled_with_their_seeds() -> None:
    """And more samples than the KV cache holds: some are put off in the middle, and computed again from their prompt.

    vLLM 0.32 sets the generator of a prompt that was cut back by an offset, which generators on CPU do not have.
    """
    requests = prompts(ROWS, length=26)
    limits = f"rollout.vllm.kv_cache_mib={KV_MIB}", f"rollout.vllm.max_num_batched_tokens={PASS_TOKENS}"
    with engine_pair(f"rollout.rows={ROWS}", *limits) as pair:
        assert pair.engine.llm.vllm_config.scheduler_config.max_num_batched_tokens == PASS_TOKENS
        block_bytes = BLOCKS["cpu"] * kv_bytes_per_token(pair.engine.place.source, pair.config.model)
        assert 1.5 * KV_MIB * MIB / block_bytes < ROWS, "all samples fit the KV cache: nothing is tested"
        pair.apply()
        assert pair.worst_difference(requests, sampled()) < CLOSE


@pytest.mark.parametrize(("given", "on_gpu", "refused"), [(87, False, True), (88, False, False), (87, True, False)])
def test_a_pass_that_is_shorter_than_a_sample_is_refused_on_cpu(given: int, on_gpu: bool, refused: bool) -> None:
    config = load_config("tiny", [*SMALL_ENGINE, f"rollout.vllm.max_num_batched_tokens={given}"])
    if not refused:
        assert batched_tokens(config, on_gpu) == given
        return
    with pytest.raises(
        EngineError, match=r"^rollout\.vllm\.max_num_batched_tokens = 87, expected at least 88, the len"
    ):
        batched_tokens(config, on_gpu)
