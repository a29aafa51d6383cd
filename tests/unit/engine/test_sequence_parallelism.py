"""Which steps are sequence-parallel: the defaults as vLLM resolves them, its spelling, and what contradicts itself."""

from types import SimpleNamespace

import pytest

from builtin import builtin
from longhelix import UserError
from longhelix.compute.runner.token_ranges import TokenRanges
from longhelix.engine.options import EngineOptions
from longhelix.engine.resolution import resolve
from longhelix.engine.sequence_parallelism import token_ranges
from longhelix.spec.layout import Layout

pytestmark = pytest.mark.unit


def ranges(layout=Layout(kvp=2), **options):  # noqa: B008 - frozen
    sound = {"kv_cache_tokens": 1024, "device": "cpu", "execution": "compiled"}
    return resolve(builtin(), layout, EngineOptions.of(sound | options)).execution.token_ranges


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, TokenRanges()),
        ({"execution": "recorded"}, TokenRanges()),
        ({"enable_sp": True}, TokenRanges((1000,), 1000)),
        ({"enable_sp": True, "sp_min_token_num": 64}, TokenRanges((64,), 64)),
        ({"sp_min_token_num": 64}, TokenRanges((64,), 64)),
        ({"enable_sp": False, "sp_min_token_num": 64}, TokenRanges()),
        ({"flash_comm_v1": True}, TokenRanges((1000,), 1000, flash_comm=True)),
        ({"flash_comm_v1": True, "execution": "eager"}, TokenRanges((1000,), 1000, flash_comm=True)),
        ({"flash_comm_v1": True, "sp_min_token_num": 64}, TokenRanges((64,), 64, flash_comm=True)),
        ({"compilation_config": {}}, TokenRanges()),
        ({"compilation_config": {"pass_config": {"enable_sp": True}}}, TokenRanges((1000,), 1000)),
        (
            {"compilation_config": {"pass_config": {"enable_sp": True, "sp_min_token_num": 512}}},
            TokenRanges((512,), 512),
        ),
        ({"compilation_config": {"pass_config": {"enable_sp": None, "sp_min_token_num": None}}}, TokenRanges()),
        ({"compilation_config": {"compile_ranges_split_points": [4096, 16, 16]}}, TokenRanges((16, 4096))),
        (
            {"enable_sp": True, "compilation_config": {"compile_ranges_split_points": [4096, 16]}},
            TokenRanges((16, 1000, 4096), 1000),
        ),
        (
            {"enable_sp": True, "compilation_config": {"pass_config": {"enable_sp": True, "sp_min_token_num": 7}}},
            TokenRanges((7,), 7),
        ),
    ],
)
def test_defaults(options, expected):
    assert ranges(**options) == expected


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"enable_sp": True, "batch_invariant": True}, "batch_invariant does not work with sequence parallelism"),
        ({"flash_comm_v1": True, "batch_invariant": True}, "batch_invariant does not work with sequence parallelism"),
        ({"enable_sp": True, "execution": "eager"}, "needs compiled layers, but execution is eager"),
        ({"sp_min_token_num": 5, "execution": "recorded"}, "but execution is recorded: set execution to compiled"),
        ({"enable_sp": True, "flash_comm_v1": True}, "two ways to get sequence parallelism"),
        ({"flash_comm_v1": "yes"}, "flash_comm_v1 is 'yes': set it to True or False"),
        ({"sp_min_token_num": 0}, "sp_min_token_num is 0: set it to an integer from 1"),
        ({"enable_sp": 1}, "enable_sp is 1: set it to True or False"),
        ({"compilation_config": 3}, "compilation_config is 3: set it to settings such as"),
        ({"compilation_config": {"level": 3}}, "unknown setting 'level'"),
        ({"compilation_config": {"pass_config": {"enable_spp": True}}}, "did you mean enable_sp?"),
        ({"compilation_config": {"pass_config": [1]}}, "pass_config is [1]: set it to settings"),
        ({"compilation_config": {"pass_config": {"sp_min_token_num": -1}}}, "sp_min_token_num is -1"),
        ({"compilation_config": {"compile_ranges_split_points": 5}}, "compile_ranges_split_points is 5: set it to a"),
        ({"compilation_config": {"compile_ranges_split_points": [0]}}, "a split point is 0"),
        (
            {"execution": "eager", "compilation_config": {"compile_ranges_split_points": [5]}},
            "needs compiled layers, but execution is eager",
        ),
        (
            {"enable_sp": False, "compilation_config": {"pass_config": {"enable_sp": True}}},
            "enable_sp is False, but compilation_config sets it to True",
        ),
    ],
)
def test_contradictions(options, words):
    with pytest.raises(UserError) as refused:
        ranges(**options)
    assert words in str(refused.value)


def test_one_rank_is_off():
    with pytest.warns(UserWarning, match="sequence parallelism is off because each rank has the whole FFN"):
        assert ranges(Layout(), enable_sp=True) == TokenRanges()
    with pytest.warns(UserWarning, match="sequence parallelism is off because each rank has the whole FFN"):
        assert ranges(Layout(), flash_comm_v1=True) == TokenRanges()


def test_models_with_experts_begin_at_one_token_and_want_to_be_asked():
    spec = SimpleNamespace(moes=(SimpleNamespace(),))
    options = EngineOptions(execution="compiled", enable_sp=True)
    assert token_ranges(spec, Layout(kvp=2), options, compile=True) == TokenRanges((1,), 1)
    flash = EngineOptions(execution="eager", flash_comm_v1=True)
    assert token_ranges(spec, Layout(kvp=2), flash, compile=False) == TokenRanges((1,), 1, flash_comm=True)
    with pytest.raises(UserError, match="set enable_sp too"):
        token_ranges(spec, Layout(kvp=2), EngineOptions(execution="compiled", sp_min_token_num=4), compile=True)
