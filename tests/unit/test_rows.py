"""Rows of JSONL, parquet and reasoning-gym: what is read, what is skipped and counted, and what is refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from common.config import Config
from common.config_loading import load_config
from services.coordinator.row import Row, RowError
from services.coordinator.rows import Rows, Split, load_rows

ROOT = Path(__file__).resolve().parents[2]
VERL: list[dict[str, Any]] = [
    {
        "data_source": "arithmetic",
        "prompt": [{"role": "user", "content": f"{n}+1="}],
        "ability": "math",
        "reward_model": {"ground_truth": str(n + 1), "style": "rule"},
        "extra_info": {"index": n, "split": "train"},
    }
    for n in range(3)
]


def jsonl(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def config(files: list[Path], *overrides: str) -> Config:
    return load_config("tiny", [f"prompts.train={[str(file) for file in files]}", *overrides])


def rows_of(files: list[Path], *overrides: str, split: Split = "train") -> Rows:
    return load_rows(config(files, *overrides), split)


def listed(rows: Rows) -> list[Row]:
    return [rows[index] for index in range(len(rows))]


def value(raw: msgspec.Raw) -> Any:
    return msgspec.json.decode(raw)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_the_verl_layout_is_read_as_it_is(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"rows.{kind}"
    if kind == "jsonl":
        jsonl(path, [json.dumps(row) for row in VERL])
    else:
        parquet(path, VERL)
    rows = listed(rows_of([path]))
    assert [row.prompt for row in rows] == [row["prompt"] for row in VERL]
    assert [value(row.ground_truth) for row in rows] == ["1", "2", "3"]
    assert [value(row.metadata) for row in rows] == [row["extra_info"] for row in VERL]
    assert {row.source for row in rows} == {"arithmetic"}
    assert [row.origin for row in rows] == [f"{path}:{line}" for line in (1, 2, 3)]


def test_the_embedded_files() -> None:
    rows = load_rows(load_config("tiny"), "train")
    assert len(rows) > 1000
    assert isinstance(rows[0].prompt, str)
    assert rows[len(rows) - 1].origin == f"quartet:tiny/train.jsonl:{len(rows)}"
    with pytest.raises(IndexError):
        rows[len(rows)]


def test_configured_field_names_with_dots(tmp_path: Path) -> None:
    one = jsonl(
        tmp_path / "a.jsonl",
        ['{"q": {"text": "2+2="}, "out": {"a": {"b": [4]}}, "a.b": 7, "n": 3, "m": {"x": 1.50}}'],
    )
    names = ["prompts.fields.prompt=q.text", "prompts.fields.source=n", "prompts.fields.metadata=m"]
    row = rows_of([one], *names, "prompts.fields.ground_truth=out.a.b")[0]
    assert (row.prompt, value(row.ground_truth), row.source) == ("2+2=", [4], "3")
    assert bytes(row.metadata) == b'{"x": 1.50}'
    assert value(rows_of([one], *names, "prompts.fields.ground_truth=a.b")[0].ground_truth) == 7


def test_the_top_level_ground_truth_is_read_where_the_configured_field_is_absent(tmp_path: Path) -> None:
    path = jsonl(
        tmp_path / "a.jsonl",
        [
            '{"prompt": "a", "ground_truth": 1}',
            '{"prompt": "b", "ground_truth": 1, "reward_model": {"ground_truth": 2}}',
            '{"prompt": "c", "ground_truth": 3, "reward_model": {"ground_truth": null}}',
        ],
    )
    assert [value(row.ground_truth) for row in listed(rows_of([path]))] == [1, 2, 3]


def test_several_files_blank_lines_and_a_byte_order_mark(tmp_path: Path) -> None:
    first = tmp_path / "a.jsonl"
    first.write_bytes(b'\xef\xbb\xbf{"prompt": "1", "ground_truth": 1}\r\n\r\n{"prompt": "2", "ground_truth": 2}\r\n')
    second = parquet(tmp_path / "b.parquet", [{"prompt": "3", "ground_truth": 3}])
    third = jsonl(tmp_path / "c.jsonl", ["", '{"prompt": "4", "ground_truth": 4}'])
    rows = listed(rows_of([first, second, third]))
    assert [row.prompt for row in rows] == ["1", "2", "3", "4"]
    assert [row.origin.rpartition("/")[2] for row in rows] == ["a.jsonl:1", "a.jsonl:3", "b.parquet:1", "c.jsonl:2"]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_row_without_its_ground_truth(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"rows.{kind}"
    data = [{"prompt": str(n), "ground_truth": None if n % 2 else "x"} for n in range(16)]
    if kind == "jsonl":
        jsonl(path, [json.dumps(row) for row in data])
    else:
        parquet(path, data)
    rows = rows_of([path])
    assert [row.prompt for row in listed(rows)] == [str(n) for n in range(0, 16, 2)]
    assert rows.skipped.count == 8
    assert rows.skipped.named == [f"{path}:{line}" for line in (2, 4, 6, 8, 10)]
    allowed = listed(rows_of([path], "prompts.missing_ground_truth=allow"))
    assert [bytes(row.ground_truth) for row in allowed[:2]] == [b'"x"', b"null"]
    with pytest.raises(RowError, match=rf"rows\.{kind}:2: no ground truth in field 'reward_model\.ground_truth'"):
        rows_of([path], "prompts.missing_ground_truth=error")


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (['{"prompt": "a", "ground_truth": 1}', '{"prompt": "b'], r"a\.jsonl:2: not a JSON object"),
        (['{"prompt": "a", "ground_truth": NaN}'], r"a\.jsonl:1: not a JSON object"),
        (['["a"]'], r"a\.jsonl:1: not a JSON object"),
        (['{"prompt": "a", "ground_truth": "\\ud800 and more"}'], r"a\.jsonl:1: not a JSON object"),
        (['{"question": "a", "answer": 1}'], r"a\.jsonl:1: no prompt in field 'prompt'; found answer, question"),
        (['{"prompt": null}'], r"a\.jsonl:1: no prompt in field 'prompt'"),
        (['{"prompt": 3}'], r"a\.jsonl:1: prompt: expected a string or a list"),
        (['{"prompt": [{"role": "user"}]}'], r"a\.jsonl:1: prompt: .*content"),
        (['{"prompt": ""}'], r"a\.jsonl:1: prompt: the prompt is empty"),
        (['{"prompt": []}'], r"a\.jsonl:1: prompt: the prompt is empty"),
        ([], r"a\.jsonl: the file is empty"),
        (["", " "], r"a\.jsonl: the file is empty"),
        (['{"prompt": "a"}'], r"prompts\.train: no usable row in .*a\.jsonl: 1 without ground truth \(.*a\.jsonl:1\)"),
    ],
)
def test_broken_lines_are_named(tmp_path: Path, lines: list[str], words: str) -> None:
    path = jsonl(tmp_path / "a.jsonl", lines)
    with pytest.raises(RowError, match=words):
        rows_of([path])


def test_a_line_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "a", "ground_truth": "\xff"}')
    with pytest.raises(RowError, match=r"a\.jsonl:1: not a JSON object in UTF-8"):
        rows_of([path])


def test_broken_parquet_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1 and nothing")
    with pytest.raises(RowError, match=r"a\.parquet: not a parquet file"):
        rows_of([path])
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), path)
    with pytest.raises(RowError, match=r"a\.parquet: the file has no rows"):
        rows_of([path])
    parquet(path, [{"question": "a"}])
    with pytest.raises(RowError, match=r"a\.parquet: no prompt in field 'prompt'; found question"):
        rows_of([path])
    parquet(path, [{"prompt": "a", "ground_truth": 1}, {"prompt": None, "ground_truth": 1}])
    with pytest.raises(RowError, match=r"a\.parquet:2: no prompt"):
        rows_of([path])
    with pytest.raises(RowError, match=r"gone\.jsonl: cannot be read: No such file"):
        rows_of([tmp_path / "gone.jsonl"])


def test_evaluation_takes_its_first_rows(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [json.dumps({"prompt": str(n), "ground_truth": n}) for n in range(9)])
    data = f"eval.data=['{path}']"
    assert [row.prompt for row in listed(rows_of([], data, "eval.rows=4", split="eval"))] == list("0123")
    assert len(rows_of([], data, "eval.rows=40", split="eval")) == 9
    assert len(rows_of([], data, "eval.rows=0", split="eval")) == 0
    assert len(rows_of([], "eval.data=[]", split="eval")) == 0


def test_reasoning_gym_holds_evaluation_out_of_training() -> None:
    loaded = load_config("smollm2", ["prompts.reasoning_gym.size=300", "eval.rows=16"])
    train, held_out = listed(load_rows(loaded, "train")), listed(load_rows(loaded, "eval"))
    assert len(held_out) == 16
    assert 100 < len(train) < 300
    assert {str(row.prompt) for row in train}.isdisjoint(str(row.prompt) for row in held_out)
    row = train[0]
    expression = value(row.metadata)["expression"]
    assert isinstance(row.prompt, str)
    assert expression in row.prompt
    left, sign, right = expression.split()
    assert int(value(row.ground_truth)) == int(left) + (int(right) if sign == "+" else -int(right))
    assert row.source == "chain_sum"
    assert row.origin == "chain_sum-train:0"


def test_reasoning_gym_follows_the_seed_and_keeps_its_held_out_problems() -> None:
    def prompts(seed: int, split: Split) -> list[object]:
        loaded = load_config("smollm2", ["prompts.reasoning_gym.size=100", f"run.seed={seed}"])
        return [row.prompt for row in listed(load_rows(loaded, split))]

    assert prompts(1, "train") == prompts(1, "train")
    one, two = prompts(1, "train"), prompts(2, "train")
    assert one[:20] != two[:20]
    assert one[1:21] != two[:20]
    assert prompts(1, "eval") == prompts(2, "eval")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["task=chain_sm"], r"refuses task 'chain_sm'.*not registered"),
        (["options.max_term=3"], r"refuses task 'chain_sum' with options .*max_term"),
        (["options.max_terms=1"], r"refuses task 'chain_sum' with options .*max_terms must be"),
        (["options={min_terms=2,max_terms=2,min_digits=1,max_digits=1}", "size=1"], r"all 1 problems .*held-out"),
    ],
)
def test_reasoning_gym_refusals(overrides: list[str], words: str) -> None:
    loaded = load_config("smollm2", ["eval.rows=3000", *(f"prompts.reasoning_gym.{entry}" for entry in overrides)])
    with pytest.raises(RowError, match=words):
        load_rows(loaded, "train")


def test_rows_load_neither_torch_nor_transformers() -> None:
    code = (
        "import sys\nfrom common.config_loading import load_config\nfrom services.coordinator.rows import load_rows\n"
        "load_rows(load_config('tiny'), 'eval')\n"
        "assert not {'pyarrow', 'reasoning_gym'} & set(sys.modules)\n"
        "load_rows(load_config('smollm2', ['prompts.reasoning_gym.size=20']), 'train')\n"
        "print([name for name in ('torch', 'transformers', 'pandas', 'datasets') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
