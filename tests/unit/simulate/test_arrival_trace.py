"""Traces in all their formats, as they are published, and lines that are no requests."""

import io

import pytest

from longhelix.errors import UserError
from longhelix.request import ServiceLevel
from longhelix.simulate.arrival import rate_per_s
from longhelix.simulate.trace import read_csv, read_jsonl

pytestmark = pytest.mark.unit

ANY = ServiceLevel()
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:16:01.6805900,879,55
"""
MOONCAKE = """{"timestamp": 0, "input_length": 1100, "output_length": 500, "hash_ids": [0, 1, 2]}
{"timestamp": 3052, "input_length": 1024, "output_length": 490, "hash_ids": [0, 3]}
"""


def lines(text):
    return io.StringIO(text, newline="")


def shapes(arrivals):
    return [(round(one.arrival_s, 6), one.prompt_tokens, one.output_tokens) for one in arrivals]


def test_azure():
    arrivals = read_csv(lines(AZURE), ANY)
    assert shapes(arrivals) == [(0.0, 374, 44), (4.314579, 396, 109), (15.0, 879, 55)]
    assert rate_per_s(arrivals) == pytest.approx(2 / 15)


def test_azure_with_a_zone_and_windows_ends_of_lines():
    text = "\ufeffTIMESTAMP,ContextTokens,GeneratedTokens\r\n2024-05-10 00:00:00.009930+00:00,2162,5\r\n"
    assert shapes(read_csv(lines(text), ANY)) == [(0.0, 2162, 5)]


def test_mooncake_shares_blocks_of_512_tokens():
    arrivals = read_jsonl(lines(MOONCAKE), ANY)
    assert shapes(arrivals) == [(0.0, 1100, 500), (3.052, 1024, 490)]
    first, second = (arrival.request(id).prompt_token_ids for id, arrival in enumerate(arrivals))
    assert first[0:512] == second[0:512]
    assert all(one != other for one, other in zip(first[512:1024], second[512:1024], strict=True))


def test_own_columns_in_both_formats_and_in_any_order():
    csv = (
        "prompt_tokens,arrival_s,output_tokens,prefix_id,prefix_tokens,client,priority,ttft_slo_s,tbt_slo_s\n"
        "100,7.5,10,a,50,me,2,1.5,\n"
        "\n"
        "80,7,5,a,,,,,0.02\n"
    )
    jsonl = (
        '{"arrival_s": 7.5, "prompt_tokens": 100, "output_tokens": 10, "prefix_id": "a", "prefix_tokens": 50, '
        '"client": "me", "priority": 2, "ttft_slo_s": 1.5}\n'
        '{"arrival_s": 7, "prompt_tokens": 80, "output_tokens": 5, "prefix_id": "a", "tbt_slo_s": 0.02}\n'
    )
    arrivals = read_csv(lines(csv), ServiceLevel(tbt_slo_s=0.05))
    assert arrivals == read_jsonl(lines(jsonl), ServiceLevel(tbt_slo_s=0.05))
    assert shapes(arrivals) == [(0.0, 80, 5), (0.5, 100, 10)]
    assert arrivals[0].service == ServiceLevel(tbt_slo_s=0.02)
    assert arrivals[1].service == ServiceLevel(1.5, 0.05, priority=2, client="me")
    first, second = (arrival.request(id).prompt_token_ids for id, arrival in enumerate(arrivals))
    alike = [one == other for one, other in zip(first[0:80], second[0:80], strict=True)]
    assert alike == [True] * 50 + [False] * 30


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "first line is ''"),
        ("a,b\n1,2\n", "first line is 'a,b': begin with columns such as arrival_s,prompt_tokens"),
        ("arrival_s,prompt_tokens,output_tokens\n", "no requests"),
        ("arrival_s,prompt_tokens,output_tokens\n0,1,1\n0,1\n", "line 3 .* 2 columns"),
        ("arrival_s,prompt_tokens,output_tokens\n0,,1\n", "line 2 .*prompt_tokens is missing"),
        ("arrival_s,prompt_tokens,output_tokens\n0,0,1\n", "line 2 .*prompt_tokens is 0: set it to a whole number"),
        ("arrival_s,prompt_tokens,output_tokens\n0,5,1.5\n", r"line 2 .*output_tokens is 1\.5"),
        ("arrival_s,prompt_tokens,output_tokens\n0,5,many\n", "line 2 .*output_tokens is 'many'"),
        ("arrival_s,prompt_tokens,output_tokens\nnan,5,1\n", "line 2 .*arrival_s is nan"),
        ("arrival_s,prompt_tokens,output_tokens\n-1,5,1\n", "line 2 .*arrival_s is -1"),
        ("arrival_s,prompt_tokens,output_tokens,ttft_slo_s\n0,5,1,0\n", "line 2 .*ttft_slo is 0"),
        ("arrival_s,prompt_tokens,output_tokens,tbt\n0,5,1,0\n", "line 2 .*'tbt' is not known"),
        ("arrival_s,prompt_tokens,output_tokens,prefix_id,prefix_tokens\n0,5,1,a,6\n", "line 2 .*prefix_tokens is 6"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1\n", "line 2 .*TIMESTAMP is 'yesterday'"),
    ],
)
def test_lines_of_csv_that_are_no_requests(text, said):
    with pytest.raises(UserError, match=said):
        read_csv(lines(text), ANY)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no requests"),
        ("{}\n", "line 1 .*arrival_s is missing"),
        ('\n{"arrival_s": 0', "line 2 .*not JSON"),
        ("[1, 2]\n", "line 1 .*not a JSON object"),
        (MOONCAKE + '{"timestamp": 1, "input_length": true, "output_length": 1}', "line 3 .*input_length is True"),
        (MOONCAKE + '{"timestamp": "x", "input_length": 1, "output_length": 1}', "line 3 .*timestamp is 'x'"),
        (MOONCAKE + '{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": 5}', "line 3 .*hash_ids is 5"),
        (MOONCAKE + '{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [-5]}', "line 3 .*hash id"),
        (MOONCAKE + '{"arrival_s": 1, "prompt_tokens": 1, "output_tokens": 1}', "line 3 .*timestamp is missing"),
    ],
)
def test_lines_of_jsonl_that_are_no_requests(text, said):
    with pytest.raises(UserError, match=said):
        read_jsonl(lines(text), ANY)
