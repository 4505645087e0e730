"""Files -> rows -> splits."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from predictor.dataset import Columns, Row, length_sample, load_rows, split_rows
from predictor.errors import DatasetError
from predictor.text import head_and_tail

RECORDS = [
    {"prompt": "count to 3", "model": "demo", "output_tokens": 5, "finish_reason": "stop"},
    {"prompt": "count to 999", "model": "demo", "output_tokens": 512, "finish_reason": "length"},
]
ROWS = [Row("count to 3", "demo", 5, capped=False), Row("count to 999", "demo", 512, capped=True)]


def write_jsonl(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def row(prompt: str, output_tokens: int = 1) -> Row:
    return Row(prompt, "", output_tokens, capped=False)


def test_jsonl_gives_rows(tmp_path: Path) -> None:
    found = load_rows([write_jsonl(tmp_path / "a.jsonl", RECORDS)])
    assert found.rows == ROWS
    assert not found.bad


def test_compressed_jsonl_gives_the_same_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(write_jsonl(tmp_path / "a.jsonl", RECORDS).read_bytes()))
    assert load_rows([path]).rows == ROWS


def test_parquet_gives_the_same_rows(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(RECORDS), tmp_path / "a.parquet")
    assert load_rows([tmp_path / "a.parquet"]).rows == ROWS


def test_a_hub_dataset_gives_the_same_rows_by_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    repository = tmp_path / "answers"  # load_dataset takes a folder for a hub repository
    repository.mkdir()
    write_jsonl(repository / "train.jsonl", RECORDS)
    write_jsonl(repository / "test.jsonl", RECORDS[:1])
    assert load_rows([f"hub:{repository}"]).rows == ROWS
    assert load_rows([f"hub:{repository}:test"]).rows == ROWS[:1]


def test_a_hub_dataset_that_cannot_be_parsed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "train.jsonl").write_text('{"prompt": "cut of')
    with pytest.raises(DatasetError, match="broken"):
        load_rows([f"hub:{tmp_path / 'broken'}"])


def test_several_sources_are_read_in_order(tmp_path: Path) -> None:
    sources = [write_jsonl(tmp_path / f"{i}.jsonl", [RECORDS[i]]) for i in (1, 0)]
    assert load_rows(sources).rows == [ROWS[1], ROWS[0]]


def test_columns_may_have_other_names_and_the_optional_ones_may_be_missing(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"question": "hello", "tokens": 3.0}])
    assert load_rows([path], Columns(prompt="question", output_tokens="tokens")).rows == [row("hello", 3)]


def test_bad_rows_are_counted_by_reason_and_the_others_kept(tmp_path: Path) -> None:
    bad = [
        [1, 2],
        {"output_tokens": 4},
        {"prompt": " \n", "output_tokens": 4},
        {"prompt": "a", "output_tokens": "4"},
        {"prompt": "a", "output_tokens": True},
        {"prompt": "a", "output_tokens": 0},
        {"prompt": "a", "output_tokens": 2.5},
        {"prompt": "a", "output_tokens": float("nan")},
    ]
    path = write_jsonl(tmp_path / "a.jsonl", [*bad, *RECORDS])
    path.write_bytes(path.read_bytes() + b'{"prompt": "cut off\n\xff\xfe\n\n')
    found = load_rows([path])
    assert found.rows == ROWS
    assert found.bad == {
        "not a JSON object": 3,
        "no text in 'prompt'": 1,
        "empty text in 'prompt'": 1,
        "no number in 'output_tokens'": 2,
        "not a whole number above 0 in 'output_tokens'": 3,
    }


def test_no_usable_row_is_an_error_that_says_why(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "hello"}])
    with pytest.raises(DatasetError, match=r"no usable row in .*a\.jsonl \(1 x no text in 'prompt'\)"):
        load_rows([path])


@pytest.mark.parametrize("name", ["absent.jsonl", "absent.parquet", "hub:./absent", "answers.csv"])
def test_a_source_that_cannot_be_read_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DatasetError, match=name.removeprefix("hub:")):
        load_rows([name])


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    for name in ("a.parquet", "a.jsonl.gz"):
        (tmp_path / name).write_bytes(b"not what the name says")
        with pytest.raises(DatasetError, match=name):
            load_rows([tmp_path / name])


def test_a_prompt_falls_on_one_side_whatever_its_case_and_spacing() -> None:
    rows = [row(f"{prefix} {i}", n) for i in range(300) for n, prefix in enumerate(["Count to", "count  TO"], 1)]
    splits = split_rows(rows, seed=0)
    sides = [{r.prompt.split()[-1] for r in side} for side in (splits.train, splits.validation, splits.held_out)]
    assert sum(map(len, sides)) == 300
    assert set.union(*sides) == {str(i) for i in range(300)}


def test_a_prompts_side_depends_on_the_seed_but_not_on_the_other_rows() -> None:
    rows = [row(f"prompt {i}") for i in range(500)]
    splits = split_rows(rows, seed=1)
    again = split_rows([*rows[::-1], row("one more")], seed=1)
    assert set(splits.held_out) <= set(again.held_out) <= {*splits.held_out, row("one more")}
    assert set(split_rows(rows, seed=2).held_out) != set(splits.held_out)


def test_the_sides_have_the_shares_that_were_asked_for() -> None:
    splits = split_rows([row(f"prompt {i}") for i in range(10_000)], 0, validation_share=0.1, held_out_share=0.2)
    assert len(splits.validation) == pytest.approx(1000, abs=5 * 30)  # 5 standard deviations
    assert len(splits.held_out) == pytest.approx(2000, abs=5 * 40)


def test_too_few_prompts_to_split_are_an_error() -> None:
    with pytest.raises(DatasetError, match="too few different prompts"):
        split_rows([row("one"), row("two")], seed=0)


def test_the_length_sample_is_sorted_bounded_and_keeps_the_quantiles() -> None:
    rows = [row("", length) for length in range(5000, 0, -1)]
    assert length_sample(rows[:3]) == [4998, 4999, 5000]
    assert length_sample(rows, size_max=5) == [501, 1501, 2501, 3501, 4501]


def test_a_long_text_keeps_its_two_ends() -> None:
    assert head_and_tail("abcdefgh", 8) == "abcdefgh"
    assert head_and_tail("abcdefgh", 5) == "ab gh"
    assert len(head_and_tail("x" * 10_000, 101)) == 101


def test_half_a_surrogate_pair_becomes_encodable() -> None:
    assert head_and_tail("a\ud800b", 10) == "a?b"
