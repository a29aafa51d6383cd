"""Traces in all their formats, as they are published, and lines that are no requests."""

import io
from zlib import crc32

import pytest

from longhelix.errors import UserError
from longhelix.scheduler.request import ServiceLevel
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


def test_hash_ids_of_64_bits_stay_apart():
    hash_ids = [5, 5 + 2**30, 5 + 2**31, 5 + 2**32, 2**63, 2**63 + 5, 2**64 - 1, 0, 5]
    tokens = 512 * len(hash_ids)
    (arrival,) = read_jsonl(
        lines(f'{{"timestamp": 0, "input_length": {tokens}, "output_length": 1, "hash_ids": {hash_ids}}}'), ANY
    )
    pieces = arrival.request(0).prompt_token_ids[0:tokens:512]
    assert len(set(pieces)) == len(set(hash_ids))
    assert pieces[0] == pieces[-1]


def test_prefix_ids_of_one_checksum_stay_apart():
    assert crc32(b"plumless") == crc32(b"buckeroo")
    text = "".join(
        f'{{"arrival_s": 0, "prompt_tokens": 9, "output_tokens": 1, "prefix_id": "{name}"}}\n'
        for name in ("plumless", "buckeroo", "plumless")
    )
    first, other, again = (one.request(id).prompt_token_ids[0:9] for id, one in enumerate(read_jsonl(lines(text), ANY)))
    assert first == again != other


def test_no_piece_is_alike_with_what_a_request_has_alone():
    """An answer's tokens are 0, and prompts end with tokens of their own: hash id 0 is neither."""
    text = '{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [0]}\n' * 3
    prompts = [one.request(id).prompt_token_ids for id, one in enumerate(read_jsonl(lines(text), ANY))]
    assert len({0, *(prompt[511:512][0] for prompt in prompts), *(prompt[512:513][0] for prompt in prompts)}) == 5


VIDUR = """arrived_at,num_prefill_tokens,num_decode_tokens
0.0,4808,10
0.052,3180.0,8
"""
BURST_GPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45.5,GPT-4,1087,0,1087,API log
"""
BURST_GPT_SESSIONS = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
5,,,ChatGPT,472,18,490,Conversation log
45,c1,3.5,"GPT-4, long",1087,230,1317,API log
"""
BAILIAN = (
    '{"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.5, "input_length": 33, "output_length": 132, '
    '"type": "text", "turn": 1, "hash_ids": [1089, 1090, 1091]}\n'
    '{"chat_id": 160, "parent_chat_id": 159, "timestamp": 62.5, "input_length": 40, "output_length": 80, '
    '"type": "text", "turn": 2, "hash_ids": [1089, 1090, 7]}\n'
)


@pytest.mark.parametrize(
    ("read", "text", "expected"),
    [
        (read_csv, VIDUR, [(0.0, 4808, 10), (0.052, 3180, 8)]),
        (read_csv, BURST_GPT, [(0.0, 472, 18), (40.5, 1087, 1)]),
        (read_csv, BURST_GPT_SESSIONS, [(0.0, 472, 18), (40.0, 1087, 230)]),
        (read_csv, AZURE.replace(",44", ",0"), [(0.0, 374, 1), (4.314579, 396, 109), (15.0, 879, 55)]),
        (read_csv, "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n2024-10-15 00:00:00,1,9,5\n", [(0.0, 9, 5)]),
        (read_csv, "arrival_s,prompt_tokens,output_tokens\n0,5,0\n", [(0.0, 5, 1)]),
        (read_jsonl, BAILIAN, [(0.0, 33, 132), (1.0, 40, 80)]),
        (read_jsonl, '{"timestamp": 7.5, "input_length": 5, "output_length": 0}', [(0.0, 5, 1)]),
    ],
)
def test_published_columns(read, text, expected):
    assert shapes(read(lines(text), ANY)) == expected


def test_bailian_shares_blocks_of_16_tokens():
    first, second = (one.request(id).prompt_token_ids for id, one in enumerate(read_jsonl(lines(BAILIAN), ANY)))
    alike = [one == other for one, other in zip(first[0:33], second[0:33], strict=True)]
    assert alike == [True] * 32 + [False]


def test_mooncake_sessions_wait_for_the_delay_after_their_last_answer():
    text = (
        '{"session_id": "a", "input_length": 300, "output_length": 40, "hash_ids": [123]}\n'
        '{"session_id": 7, "timestamp": 2000, "input_length": 9, "output_length": 4, "delay": null}\n'
        '{"session_id": "a", "delay": 1500, "input_length": 500, "output_length": 20, "hash_ids": [123]}\n'
        '{"session_id": 7, "delay": 250.5, "input_length": 15, "output_length": 2}\n'
        '{"delay": 3000, "input_length": 16, "output_length": 2}\n'
        '{"session_id": null, "timestamp": 4000, "input_length": 17, "output_length": 2}\n'
    )
    arrivals = read_jsonl(lines(text), ANY)
    assert [(one.arrival_s, one.prompt_tokens, one.session, one.think_s) for one in arrivals] == [
        (0.0, 300, "a", 0.0),
        (0.0, 500, "a", 1.5),
        (2.0, 9, "7", 0.0),
        (2.0, 15, "7", 0.2505),
        (3.0, 16, "", 0.0),
        (4.0, 17, "", 0.0),
    ]


@pytest.mark.parametrize(
    ("read", "text", "said"),
    [
        (
            read_csv,
            "TIMESTAMP,ContextTokens\n2024-01-01,5\n",
            "line 2 .* in Azure's format: GeneratedTokens is missing",
        ),
        (read_csv, "TIMESTAMP,ContextTokens,GeneratedTokens\n,5,5\n", "line 2 .*Azure's format: TIMESTAMP is missing"),
        (read_csv, BURST_GPT + "1,x,-5,1,1,y\n", r"line 4 .*BurstGPT's format: Request tokens is -5"),
        (read_csv, BURST_GPT + "1,x,5,1\n", r"line 4 .*BurstGPT's format: it has 4 columns, but the header has 6"),
        (read_csv, VIDUR + "-0.5,3,4\n", r"line 4 .*Vidur's format: arrived_at is -0\.5"),
        (read_csv, VIDUR + "0.5,3.5,4\n", r"line 4 .*Vidur's format: num_prefill_tokens is 3\.5"),
        (
            read_csv,
            "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n3772,54,3826,69.8\n",
            "line 2 .*Vidur's format: arrived_at is missing",
        ),
        (read_jsonl, '{"timestamp": 0, "input_length": 5}', "line 1 .*Mooncake's format: output_length is missing"),
        (read_jsonl, '\n{"input_length": 5, "output_length": 5}', "line 2 .*Mooncake's format: timestamp is missing"),
        (read_jsonl, '{"timestamp": 0, "input_length": 5, "output_length": null}', "Mooncake's .*output_length is mis"),
        (read_jsonl, MOONCAKE + '{"delay": -1, "input_length": 5, "output_length": 5}', "line 3 .*delay is -1"),
        (
            read_jsonl,
            MOONCAKE + f'{{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": [{2**64}]}}',
            f"line 3 .*Mooncake's format: a hash id is {2**64}",
        ),
        (read_jsonl, BAILIAN + '{"chat_id": 1, "timestamp": 0}', "line 3 .*Bailian's format: input_length is missing"),
        (read_jsonl, '{"arrival_s": 0, "prompt_tokens": 5}', "line 1 .*longhelix's format: output_tokens is missing"),
    ],
)
def test_mistakes_name_format_line_and_field(read, text, said):
    with pytest.raises(UserError, match=said):
        read(lines(text), ANY)


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (read_csv, '\ufeff\r\n"arrival_s" , prompt_tokens,"output_tokens"\r\n\r\n 1 , 5 ,"7"\r\n  \r\n0,5.0,7e0\r\n'),
        (read_csv, "arrival_s,prompt_tokens,output_tokens\r1,5,7\r0,5,7"),
        (read_csv, "arrival_s,prompt_tokens,output_tokens,session,client\n1e9,5,7,,\n1000000001,5,7, ,\n"),
        (
            read_jsonl,
            '\ufeff\r\n{"arrival_s": 1, "prompt_tokens": 5, "output_tokens": 7, "session": null, "client": null, '
            '"prefix_id": null, "prefix_tokens": null, "think_s": null, "priority": null}\r\n\r\n'
            '{"arrival_s": 0.0, "prompt_tokens": 5, "output_tokens": 7}',
        ),
    ],
)
def test_odd_files_that_are_right(read, text):
    arrivals = read(lines(text), ANY)
    assert shapes(arrivals) == [(0.0, 5, 7), (1.0, 5, 7)]
    assert {one.session for one in arrivals} == {""}


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
        ("", "first line of the trace is ''"),
        ("a,b\n1,2\n", "trace is 'a,b': start with a header such as arrival_s,prompt_tokens"),
        ("arrival_s,prompt_tokens,output_tokens\n", "no requests"),
        ("arrival_s,prompt_tokens,output_tokens\n0,1,1\n0,1\n", "line 3 .* 2 columns"),
        ("arrival_s,prompt_tokens,output_tokens\n0,,1\n", "line 2 .*prompt_tokens is missing"),
        ("arrival_s,prompt_tokens,output_tokens\n0,0,1\n", "line 2 .*prompt_tokens is 0: set it to an integer"),
        ("arrival_s,prompt_tokens,output_tokens\n0,5,1.5\n", r"line 2 .*output_tokens is 1\.5"),
        ("arrival_s,prompt_tokens,output_tokens\n0,5,many\n", "line 2 .*output_tokens is 'many'"),
        ("arrival_s,prompt_tokens,output_tokens\nnan,5,1\n", "line 2 .*arrival_s is nan"),
        ("arrival_s,prompt_tokens,output_tokens\n-1,5,1\n", "line 2 .*arrival_s is -1"),
        ("arrival_s,prompt_tokens,output_tokens,ttft_slo_s\n0,5,1,0\n", "line 2 .*ttft_slo is 0"),
        ("arrival_s,prompt_tokens,output_tokens,tbt\n0,5,1,0\n", "line 2 .*'tbt' is not known"),
        ("arrival_s,prompt_tokens,output_tokens,prefix_id,prefix_tokens\n0,5,1,a,6\n", "line 2 .*prefix_tokens is 6"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1\n", "line 2 .*TIMESTAMP is 'yesterday'"),
        ("0,5,5\n1,5,5\n", "trace is '0,5,5': start with a header such as arrival_s"),
        ("arrival_s,prompt_tokens,prompt_tokens,output_tokens\n0,5,6,1\n", "name the column 'prompt_tokens' only once"),
        ("arrival_s,prompt_tokens,output_tokens\n0,5,-1\n", "line 2 .*output_tokens is -1"),
        ("arrival_s,prompt_tokens,output_tokens\n0,1_0,1\n", "line 2 .*prompt_tokens is '1_0'"),
        ("arrival_s,prompt_tokens,output_tokens\n0,inf,1\n", "line 2 .*prompt_tokens is inf"),
        (f"arrival_s,prompt_tokens,output_tokens\n0,{'9' * 5000},1\n", "line 2 .*prompt_tokens is inf"),
        ("arrival_s,prompt_tokens,output_tokens\n1e400,5,1\n", "line 2 .*arrival_s is inf"),
        ("arrival_s,prompt_tokens,output_tokens,think_s\n0,5,1,2\n", "line 2 .*think_s is set, but session is not"),
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
        ('{"arrival_s": 1e400, "prompt_tokens": 1, "output_tokens": 1}', "line 1 .*not JSON"),
        ('{"arrival_s": NaN, "prompt_tokens": 1, "output_tokens": 1}', "line 1 .*not JSON"),
        ('{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1, "session": [1]}', r"line 1 .*session is \[1\]"),
        ('{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1, "client": true}', "line 1 .*client is True"),
        ('{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1, "prefix_id": {}}', "line 1 .*prefix_id is {}"),
        ("[" * 5000, "line 1 .*not JSON"),
    ],
)
def test_lines_of_jsonl_that_are_no_requests(text, said):
    with pytest.raises(UserError, match=said):
        read_jsonl(lines(text), ANY)
