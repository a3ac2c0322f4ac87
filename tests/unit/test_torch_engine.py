"""Engine ``torch`` against plain transformers, and what a sample becomes whatever is generated beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.config import ModelConfig
from common.model import load_causal_lm
from services.rollout.engines.interface import Request
from services.rollout.engines.torch import bucket_width
from tests.unit.engine_support import (
    LENGTHS,
    SOME_ENDS,
    bits,
    greedy,
    make_engine,
    plain_model,
    request,
    run,
    sampled,
)
from tests.unit.model_support import (
    CPU,
    FAMILIES,
    MAX_NEW,
    MAX_PROMPT,
    PAD,
    engine_config,
    full_logits,
    model_path,
    random_ids,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


# ---------------------------------------------------------------- against transformers


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_is_what_transformers_generates(family: str, attention: str, folder: Path) -> None:
    """All in row 0, one after the other, beside rows of dummies that run on for longer than the model has positions."""
    path = model_path(family, folder)
    engine = make_engine(engine_config(path, attention=attention))
    requests = [request(4 * i, length, i) for i, length in enumerate(LENGTHS)]
    found = run(engine, requests, greedy())
    assert engine.decode_steps == len(LENGTHS) * MAX_NEW > MAX_PROMPT + MAX_NEW
    model = plain_model(path)
    for item in requests:
        prompt = torch.from_numpy(item.prompt_ids.astype(np.int64)).unsqueeze(0)
        expected = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=MAX_NEW,
            eos_token_id=None,
            pad_token_id=PAD,
        )
        assert found[item.index].ids.tolist() == expected[0, len(item.prompt_ids) :].tolist(), (
            f"{len(item.prompt_ids)} tokens"
        )
        assert found[item.index].finish_reason == "length"


def test_prefill_may_be_wider_than_the_model_has_positions(tmp_path: Path) -> None:
    """The longest prompt is prefilled 40 wide; GPT-2 has learned positions, here 36 of them."""
    path = model_path("gpt2", tmp_path, max_position_embeddings=MAX_PROMPT + 1)
    item = request(0, MAX_PROMPT)
    found = run(make_engine(engine_config(path, max_new=1)), [item], greedy(1))[0]
    assert found.ids.tolist() == full_logits(plain_model(path), item.prompt_ids, found.ids).argmax(-1).tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_behaviour_logprobs_are_those_of_a_plain_forward(family: str, folder: Path) -> None:
    """Sampled at a temperature, all rows busy with prompts of different lengths, rows refilled."""
    path = model_path(family, folder)
    engine = make_engine(engine_config(path), SOME_ENDS)
    requests = [request(i, length) for i, length in enumerate((*LENGTHS, *LENGTHS))]
    found = run(engine, requests, sampled(temperature=0.7))
    model = plain_model(path)
    for item in requests:
        response = found[item.index]
        logits = full_logits(model, item.prompt_ids, response.ids)
        expected = torch.log_softmax(logits.double() / 0.7, -1)[
            torch.arange(len(response.ids)), torch.from_numpy(response.ids).long()
        ]
        assert response.logprobs == pytest.approx(expected.numpy(), abs=1e-4)
    assert len({len(response.ids) for response in found.values()}) > 2, "the lengths do not differ: nothing is tested"


def test_sampling_inverts_the_distribution_of_a_plain_forward(folder: Path) -> None:
    """Which token comes out is decided by the sample's own random numbers, not only its logprob."""
    from services.rollout.engines.sampling import draw, sample_uniforms

    path = model_path("llama", folder)
    model, how = plain_model(path), sampled()
    found = run(make_engine(engine_config(path)), [request(i) for i in range(10)], how, step=5)
    for sample, response in found.items():
        logits = full_logits(model, request(sample).prompt_ids, response.ids)
        expected, _ = draw(logits, torch.from_numpy(sample_uniforms(how.seed, 5, sample, MAX_NEW)), how)
        assert response.ids.tolist() == expected.tolist()


def test_bfloat16_model_generates_within_its_precision(folder: Path) -> None:
    path = model_path("llama", folder)
    config = engine_config(path, dtype="bfloat16")
    response = run(make_engine(config), [request(1, 17)], greedy())[1]
    model = load_causal_lm(ModelConfig(path=path, dtype="bfloat16"), CPU)
    logits = full_logits(model, request(1, 17).prompt_ids, response.ids).float()
    expected = torch.log_softmax(logits, -1)[torch.arange(MAX_NEW), torch.from_numpy(response.ids).long()]
    assert response.logprobs == pytest.approx(expected.numpy(), abs=0.15)


# ---------------------------------------------------------------- whatever is beside it


@pytest.mark.parametrize("family", ["tiny", "llama", "gpt2"])
def test_a_sample_is_the_same_bit_for_bit_whatever_is_beside_it(family: str, folder: Path) -> None:
    engine = make_engine(engine_config(model_path(family, folder)), SOME_ENDS)
    requests = [request(sample) for sample in range(14)]
    how = sampled(temperature=1.3)
    together = bits(run(engine, requests, how))
    assert len({len(ids) for ids, _, _ in together.values()}) > 2, "the lengths do not differ: rows are never refilled"
    assert bits(run(engine, requests[::-1], how)) == together, "the other way round"
    shuffled = [requests[i] for i in np.random.default_rng(0).permutation(14)]
    assert bits(run(engine, shuffled, how)) == together, "another order"
    for chosen in ({5}, {13}, {0, 7, 9}, set(range(1, 14, 2))):
        some = [item for item in requests if item.sample in chosen]
        assert bits(run(engine, some, how)) == {i: together[i] for i in chosen}, "handed out again by itself"
    neighbours = [request(sample) for sample in range(20, 32) if sample % 4 != 2]
    beside = bits(run(engine, [requests[6], *neighbours], how))
    assert beside[6] == together[6], "beside other samples"
    assert bits(run(make_engine(engine_config(model_path(family, folder)), SOME_ENDS), requests, how)) == together, (
        "another engine"
    )


def test_a_sample_keeps_its_place_in_prefill_and_decode(folder: Path) -> None:
    """What the last bits depend on: shapes are constant, and a sample's place in them is its number's alone."""
    engine = make_engine(engine_config(model_path("llama", folder)), SOME_ENDS)
    calls: list[torch.Tensor] = []

    def record(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(kwargs["input_ids"].clone())

    engine.model.register_forward_pre_hook(record, with_kwargs=True)
    requests = [request(sample) for sample in (9, 2, 13, 4, 7, 0, 11, 1, 5)]
    found = run(engine, requests, sampled())
    prefills = [ids for ids in calls if ids.shape[1] > 1]
    decodes = [ids[:, 0].tolist() for ids in calls if ids.shape[1] == 1]
    assert {len(ids) for ids in decodes} == {4}
    for item in requests:
        prompt, response = item.prompt_ids.tolist(), found[item.index].ids.tolist()
        column = [ids[item.sample % 4] for ids in decodes]
        fed = [prompt[-1], *response[:-1]]
        found_there = any(column[i : i + len(fed)] == fed for i in range(len(column)))
        assert found_there, f"sample {item.sample} is not in its row"
        if len(prompt) > 1:
            shape = (3, bucket_width(len(prompt)))
            rows = [ids[item.sample % 3] for ids in prefills if tuple(ids.shape) == shape]
            assert any(row[: len(prompt) - 1].tolist() == prompt[:-1] for row in rows), f"sample {item.sample}"


def test_an_abandoned_generation_leaves_nothing_behind(folder: Path) -> None:
    engine = make_engine(engine_config(model_path("llama", folder)), SOME_ENDS)
    requests = [request(sample) for sample in range(9)]
    expected = bits(run(engine, requests, sampled()))
    abandoned: Any = engine.generate([request(sample) for sample in range(30, 40)], sampled(), 1)
    next(abandoned)
    abandoned.close()
    assert bits(run(engine, requests, sampled())) == expected


def test_step_seed_and_sample_decide_the_random_numbers(folder: Path) -> None:
    engine = make_engine(engine_config(model_path("llama", folder)))
    prompt = random_ids(1, 9)
    same_prompt = [Request(i, sample, prompt) for i, sample in enumerate((0, 4, 8))]
    found = run(engine, same_prompt, sampled(), step=1)
    assert len({response.ids.tobytes() for response in found.values()}) == 3, "samples of one prompt are copies"
    later = run(engine, same_prompt, sampled(), step=2)
    assert bits(later) != bits(found)
    assert bits(run(engine, same_prompt, sampled(seed=12), step=1)) != bits(found)
    assert bits(run(engine, same_prompt, sampled(), step=1)) == bits(found)


# ---------------------------------------------------------------- rows


def test_every_row_is_refilled_the_moment_it_is_free(folder: Path) -> None:
    """As many decode steps as the busiest row has tokens, not the sum of the longest of each wave."""
    engine = make_engine(engine_config(model_path("llama", folder), max_new=MAX_NEW), SOME_ENDS)
    requests = [request(sample, 5) for sample in range(160)]
    lengths = {i: len(response.ids) for i, response in run(engine, requests, sampled()).items()}
    chosen: list[Request] = []
    for row in range(4):
        mine = [item for item in requests if item.sample % 4 == row]
        long = next(item for item in mine if lengths[item.sample] == MAX_NEW)
        short = [item for item in mine if lengths[item.sample] == 1][:2]
        # The long one comes at another place in each row, so that every wave would wait for one.
        chosen += [*short[: row % 3], long, *short[row % 3 :]]
    assert len(chosen) == 12
    before = engine.decode_steps
    run(engine, chosen, sampled())
    assert engine.decode_steps - before == MAX_NEW + 2 < 3 * MAX_NEW


def test_responses_are_yielded_the_moment_they_end(folder: Path) -> None:
    engine = make_engine(engine_config(model_path("llama", folder)), SOME_ENDS)
    seen: list[int] = []
    for responses in engine.generate([request(sample) for sample in range(12)], sampled(), 3):
        for response in responses:
            row_total = len(response.ids) + sum(
                length for sample, length in _by_sample(seen) if sample % 4 == response.index % 4
            )
            assert row_total == engine.decode_steps, "handed out later than the step in which it ended"
            seen += [response.index, len(response.ids)]
    assert len(seen) == 24


def _by_sample(seen: list[int]) -> list[tuple[int, int]]:
    return list(zip(seen[::2], seen[1::2], strict=True))


# ---------------------------------------------------------------- ends


def test_response_of_one_token_by_the_end_token(folder: Path) -> None:
    engine = make_engine(engine_config(model_path("llama", folder)), range(97))
    for response in run(engine, [request(sample) for sample in range(9)], sampled()).values():
        assert (len(response.ids), len(response.logprobs), response.finish_reason) == (1, 1, "stop")
    assert engine.decode_steps == 3


def test_response_of_one_token_by_the_length_limit(folder: Path) -> None:
    engine = make_engine(engine_config(model_path("llama", folder)))
    for response in run(engine, [request(sample) for sample in range(9)], sampled(max_new=1)).values():
        assert (len(response.ids), response.finish_reason) == (1, "length")


def test_end_token_is_part_of_the_response_and_ends_it(folder: Path) -> None:
    path = model_path("llama", folder)
    free = run(make_engine(engine_config(path)), [request(3, 17)], greedy())[3]
    end = int(free.ids[MAX_NEW - 1])
    first = free.ids.tolist().index(end)
    stopped = run(make_engine(engine_config(path), {end}), [request(3, 17)], greedy())[3]
    assert stopped.ids.tolist() == free.ids[: first + 1].tolist()
    assert stopped.logprobs.tolist() == free.logprobs[: first + 1].tolist()
    assert stopped.finish_reason == "stop"


def test_end_token_at_the_limit_is_a_stop(folder: Path) -> None:
    path = model_path("llama", folder)
    free = run(make_engine(engine_config(path)), [request(3, 17)], greedy(1))[3]
    stopped = run(make_engine(engine_config(path), {int(free.ids[0])}), [request(3, 17)], greedy(1))[3]
    assert (free.finish_reason, stopped.finish_reason) == ("length", "stop")


def test_no_requests_is_no_work(folder: Path) -> None:
    engine = make_engine(engine_config(model_path("llama", folder)))
    assert list(engine.generate([], sampled(), 1)) == []
    assert engine.decode_steps == 0
