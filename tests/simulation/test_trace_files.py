"""Traces in the forms in which they are published: each test writes a few lines as a file of that form has them."""

import bz2
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llmserve.errors import ConfigError
from llmserve.simulation.trace_files import read_rows
from llmserve.simulation.workload import read_lengths

AZURE_2023 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:17:03.9799600,4808,10\r\n2023-11-16 18:17:04.0319600,3180,8"
)
AZURE_2024 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:00.061930+00:00,2399,6\n"
)
AZURE_IMAGES = (
    "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n2024-10-15 12:00:00.5,1,1000,7\n2024-10-15 12:00:02,0,20,9\n"
)
BURSTGPT = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5184005,ChatGPT,472,18,490,Conversation log\n"
    "5184045,GPT-4,1087,0,1087,API log\n5184118,GPT-4,417,276,693,API log\n"
)
BURSTGPT_3 = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "0.5,,1.2,ChatGPT,5,6,11,API log\n2.0,7,3.4,ChatGPT,7,8,15,Conversation log\n"
)
MOONCAKE = (
    '{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}\n'
    '{"timestamp": 30535, "input_length": 6472, "output_length": 26, "hash_ids": [46, 2366]}\n'
)
BAILIAN = (
    '{"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.5, "input_length": 521, "output_length": 132, "turn": 1, '
    '"hash_ids": [1]}\n{"chat_id": 160, "parent_chat_id": 159, "timestamp": 63, "input_length": 400, '
    '"output_length": 80, "turn": 2, "hash_ids": [2]}\n'
)
VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens\n1.5,374,44\n3.5,396,109\n"
SPLITWISE = (
    "request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size\n"
    "0,2,0,0.25,1,374,44\n1,2,0,0.5,1,396,109\n"
)
SERVING_SIM = (
    '{"input_toks": 25, "output_toks": 5, "arrival_time_ns": 1000000000}\n'
    '{"input_toks": 9, "output_toks": 4, "arrival_time_ns": 1500000000}\n'
)
VLLM_BENCH = json.dumps(
    {
        **{"date": "20260101-120000", "completed": 2, "input_lens": [8, 9, 10], "output_lens": [4, 0, 6]},
        **{"start_times": [99.5, 99.75, 101.5], "ttfts": [0.1, 0.0, 0.1], "errors": ["", "Timeout", ""]},
    }
)
GUIDELLM = json.dumps(
    [
        {"type_": "generative_request_stats", "request_start_time": at_s, "prompt_tokens": 256, "output_tokens": tokens}
        for at_s, tokens in ((1767225600.5, 128), (1767225601.25, 64))
    ],
    indent=2,
)
AIPERF = "\n".join(
    json.dumps(record)
    for record in (
        {
            "metadata": {"request_start_ns": 1767225600500000000, "benchmark_phase": "profiling"},
            "metrics": {
                "input_sequence_length": {"value": 550, "unit": "tokens"},
                "output_sequence_length": {"value": 48, "unit": "tokens"},
            },
            "error": None,
        },
        {
            "metadata": {"request_start_ns": 1767225600600000000},
            "metrics": {"error_isl": {"value": 550, "unit": "tokens"}},
            "error": {"code": 503, "message": "no"},
        },
        {
            "metadata": {"request_start_ns": 1767225601500000000},
            "metrics": {
                "input_sequence_length": {"value": 3, "unit": "tokens"},
                "output_sequence_length": {"value": 5, "unit": "tokens"},
            },
        },
    )
)


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., list[list[float]]]:
    """Writes a file and returns its arrivals, input and output tokens."""

    def of(content: str | bytes, name: str = "trace.csv", count_max: int | None = None) -> list[list[float]]:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        rows = read_rows(str(path), count_max)
        arrivals_s = [round(at_s, 4) for at_s in rows.arrivals_s.tolist()]
        return [arrivals_s, rows.input_tokens.tolist(), rows.output_tokens.tolist()]

    return of


Read = Callable[..., list[list[float]]]


@pytest.mark.parametrize(
    ("content", "arrivals_s", "input_tokens", "output_tokens"),
    [
        pytest.param(AZURE_2023, [0, 0.052], [4808, 3180], [10, 8], id="azure-2023"),
        pytest.param(AZURE_2024, [0, 0.052], [2162, 2399], [5, 6], id="azure-2024"),
        pytest.param(AZURE_IMAGES, [0, 1.5], [1000, 20], [7, 9], id="azure-multimodal"),
        pytest.param(BURSTGPT, [0, 113], [472, 417], [18, 276], id="burstgpt"),
        pytest.param(BURSTGPT_3, [0, 1.5], [5, 7], [6, 8], id="burstgpt-3"),
        pytest.param(MOONCAKE, [0, 3.053], [6955, 6472], [52, 26], id="mooncake"),
        pytest.param(
            BAILIAN.replace(', "hash_ids": [1]', "").replace(', "hash_ids": [2]', ""),
            [0, 1.5],
            [521, 400],
            [132, 80],
            id="bailian",
        ),
        pytest.param(VIDUR, [0, 2], [374, 396], [44, 109], id="vidur"),
        pytest.param(SPLITWISE, [0, 0.25], [374, 396], [44, 109], id="splitwise"),
        pytest.param(SERVING_SIM, [0, 0.5], [25, 9], [5, 4], id="llmservingsim"),
        pytest.param(VLLM_BENCH, [0, 2], [8, 10], [4, 6], id="vllm-bench"),
        pytest.param(GUIDELLM, [0, 0.75], [256, 256], [128, 64], id="guidellm"),
        pytest.param(AIPERF, [0, 1], [550, 3], [48, 5], id="aiperf"),
    ],
)
def test_a_published_trace_is_known_by_its_columns(
    read: Read, content: str, arrivals_s: list[float], input_tokens: list[float], output_tokens: list[float]
) -> None:
    assert read(content, "any.name") == [arrivals_s, input_tokens, output_tokens]


def test_bailians_seconds_are_no_milliseconds_although_the_file_has_mooncakes_columns_too(read: Read) -> None:
    assert read(BAILIAN)[0] == [0, 1.5]


@pytest.mark.parametrize("column", ["chat_id", "hash_ids"])
def test_without_a_column_that_says_the_unit_mooncakes_columns_are_refused(read: Read, column: str) -> None:
    line = '{"timestamp": 61, "input_length": 521, "output_length": 132}\n'
    with pytest.raises(ConfigError, match=rf"line 1: no column .*{column}.* unit of timestamp is unknown.*arrival_s"):
        read(line)


@pytest.mark.parametrize(
    "pack",
    [
        pytest.param(gzip.compress, id="gzip"),
        pytest.param(bz2.compress, id="bzip2"),
        pytest.param(lambda data: b"\xef\xbb\xbf" + data, id="byte order mark"),
        pytest.param(lambda data: data.decode().encode("utf-16"), id="UTF-16, as PowerShell writes"),
        pytest.param(lambda data: data.replace(b"\n", b"\r\n") + b"\r\n\r\n", id="line ends of Windows"),
        pytest.param(lambda data: data.replace(b",", b";"), id="semicolons"),
        pytest.param(lambda data: data.replace(b",", b"\t"), id="tabs"),
        pytest.param(lambda data: b"\n" + data.replace(b"ContextTokens", b" contextTokens "), id="spaces"),
        pytest.param(lambda data: data.replace(b"+00:00", b"Z").replace(b" 0", b"T0"), id="ISO 8601"),
        pytest.param(lambda data: data.replace(b"+00:00", b" UTC"), id="UTC"),
    ],
)
def test_a_trace_may_be_packed_and_spelled_in_other_ways(read: Read, pack: Callable[[bytes], bytes]) -> None:
    assert read(pack(AZURE_2024.encode()), "trace") == [[0, 0.052], [2162, 2399], [5, 6]]


@pytest.mark.parametrize("unit_per_s", [1, 1_000, 1_000_000, 1_000_000_000])
def test_unix_times_may_have_any_unit(read: Read, unit_per_s: int) -> None:
    rows = "".join(f"{at * unit_per_s},5,7\n" for at in (1_715_299_200, 1_715_299_203))
    assert read("arrival_s,input_tokens,output_tokens\n" + rows)[0] == [0, 3]


def test_own_arrivals_count_from_the_begin_of_the_run(read: Read) -> None:
    assert read("arrival_s,input_tokens,output_tokens\n0.5,5,7\n2,5,7\n")[0] == [0.5, 2]


def test_parquet_is_read_whatever_its_name_is(read: Read, tmp_path: Path) -> None:
    columns: dict[str, list[Any]] = {
        "arrived_at": [2.0, 3.0],
        "num_prefill_tokens": [4, 5],
        "num_decode_tokens": [6, 7],
    }
    pq.write_table(pa.Table.from_pydict(columns), tmp_path / "p")
    assert read((tmp_path / "p").read_bytes()) == [[0, 1], [4, 5], [6, 7]]


def test_failed_requests_are_left_out_and_counted(read: Read, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(read(BURSTGPT, count_max=2)[0]) == 2, "the failed request does not count"
    assert "left out requests that have failed, or whose answers are empty: 1" in capsys.readouterr().err


def test_rows_out_of_order_are_sorted_and_counted(read: Read, capsys: pytest.CaptureFixture[str]) -> None:
    rows = "arrived_at,num_prefill_tokens,num_decode_tokens\n7,1,3\n5,2,4\n6,3,5\n"
    assert read(rows) == [[0, 1, 2], [2, 3, 1], [4, 5, 3]]
    assert "rows that came before the row above them: 1" in capsys.readouterr().err
    assert read(rows, count_max=2) == [[0, 1], [2, 3], [4, 5]], "the first requests, not the first rows"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "TIMESTAMP,ContextTokens\n2023-11-16 18:17:03,4\n",
            "line 2: no column GeneratedTokens of TIMESTAMP, ContextTok",
        ),
        ("Timestamp,Model,Request tokens,Total tokens\n5,m,4,9\n", "no column Response tokens of .*BurstGPT"),
        (
            "HashOwner,HashApp,HashFunction,Trigger,1,2\na,b,c,http,3,4\n",
            "it has HashOwner, HashApp.*one of these forms",
        ),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n17,4,5\n", "line 2: TIMESTAMP must be a date and time, not '17'"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n05/10/2024 00:00,4,5\n", r"line 2: .*ISO 8601.*, not '05/10/2024"),
        (AZURE_2023 + "\n17,4,5\n", "line 4: TIMESTAMP must be a number or a date and time"),
        (MOONCAKE + '{"timestamp": 1\n', "line 3: not JSON"),
        (MOONCAKE + '\n{"timestamp": 40000, "input_length": 1}\n', "line 4: output_length must be a number, not None"),
        (VIDUR.replace("44", "4.4.4"), "line 2: num_decode_tokens must be a number, not '4.4.4'"),
        (
            "arrived_at,num_prefill_tokens,num_decode_tokens,arrival_s,input_tokens,output_tokens\n1,1,1,1,1,1\n",
            "those of",
        ),
        ("<!DOCTYPE html><html>", "download the raw file"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:4\n", "git lfs pull"),
        (b"\x28\xb5\x2f\xfd\x04\x00", "zstd -d"),
        (b"PK\x03\x04\x14\x00", "ZIP archive or a spreadsheet"),
        ("a,a\n1,2\n", "two columns have the same name: a"),
        ('[{"arrival_s": 1}, {"arr', "line 1: the JSON array is damaged or cut off"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_line_and_the_nearest_form(
    read: Read, content: str | bytes, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        read(content)
    assert "trace.csv" in str(error.value)


@pytest.mark.parametrize(
    ("content", "lengths"),
    [
        (AZURE_2023, [10, 8]),
        (BURSTGPT, [18, 276]),
        (MOONCAKE, [52, 26]),
        ('{"output_tokens": 5}\n{"output_tokens": 6}', [5, 6]),
    ],
)
def test_lengths_alone_are_read_from_the_same_files(content: str, lengths: list[float], tmp_path: Path) -> None:
    (tmp_path / "lengths").write_text(content)
    assert read_lengths(str(tmp_path / "lengths")).tolist() == lengths


def test_a_column_of_lengths_may_be_named(tmp_path: Path) -> None:
    (tmp_path / "burst.csv").write_text(BURSTGPT)
    assert read_lengths(f"{tmp_path}/burst.csv:Request tokens").tolist() == [472, 1087, 417]


def test_rows_may_say_what_their_prompts_share(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "arrival_s,input_tokens,output_tokens,session,prefix,prefix_tokens\n"
        "1,150,5,a,tools,100\n0,40,5,,tools,100\n2,300,5,a,tools,100\n3,7,5,,,\n"
    )
    tools, session = ("prefix", "tools"), ("session", "a")
    assert read_rows(str(path)).texts == (
        ((tools, 40), (("row", 1), 0)),
        ((tools, 100), (session, 50)),
        ((tools, 100), (session, 200)),
        ((("prefix", ""), 0), (("row", 3), 7)),
    )


def test_a_trace_without_such_columns_says_nothing_of_what_prompts_share(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n1,150,5\n")
    assert read_rows(str(path)).texts is None
