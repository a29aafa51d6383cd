"""What is read of a system's file, and what is refused."""

from copy import deepcopy

import pytest

from longhelix.errors import UserError
from longhelix.spec import HardwareSpec, Link

pytestmark = pytest.mark.unit


def constant(value, source="a data sheet"):
    return {"value": value, "source": source}


SYSTEM = {
    "memory_bytes_per_s": constant(1e12, "measured"),
    "memory_bytes": constant(64e9),
    "reserve_bytes": constant(6e9),
    "memory_efficiency": constant(0.9),
    "compute_efficiency": constant(1),
    "attention_efficiency": constant(1),
    "kernel_s": constant(1e-6),
    "collective_s": constant(4e-6),
    "step_s": constant(0.0),
    "part_fixed_share": constant(0),
    "part_s": constant(1e-6),
    "swap_bytes_per_s": constant(5e10),
    "in_switch_reduction": constant(True),
    "shared": constant(False),
    "cores": constant(64),
    "node_ranks": constant(8),
    "flops_per_s": {"bfloat16": constant(4e14), "float32": constant(2e13)},
    "scale_up": {"latency_s": constant(1e-6, "guessed"), "bytes_per_s": constant(450e9), "ranks": constant(8)},
    "scale_out": {"latency_s": constant(5e-6), "bytes_per_s": constant(50e9), "ranks": constant(1024)},
}


def changed(path: str, value) -> dict:
    """SYSTEM with the entry at a dotted path replaced, or, for None, without it."""
    system = deepcopy(SYSTEM)
    *tables, key = path.split(".")
    table = system
    for name in tables:
        table = table[name]
    if value is None:
        del table[key]
    else:
        table[key] = value
    return system


def refused(system, *words: str) -> None:
    with pytest.raises(UserError) as caught:
        HardwareSpec.from_mapping("mine", system)
    assert caught.value.code == "invalid_system"
    for word in ("mine", *words):
        assert word in str(caught.value)


def test_a_system_is_its_values_with_their_sources_beside():
    spec = HardwareSpec.from_mapping("mine", SYSTEM)
    assert (spec.name, spec.memory.bytes_per_s, spec.memory.efficiency, spec.fixed.step_s) == ("mine", 1e12, 0.9, 0.0)
    assert (spec.network.scale_up, spec.network.scale_out) == (Link(1e-6, 450e9, 8), Link(5e-6, 50e9, 1024))
    assert (spec.network.in_switch_reduction, spec.shared) == (True, False)
    assert spec.arithmetic.flops_per_s == {"float32": 2e13, "bfloat16": 4e14}
    assert (spec.sources["memory_bytes_per_s"], spec.sources["scale_up.latency_s"]) == ("measured", "guessed")
    assert len(spec.sources) == 16 + 2 + 3 + 3


OPTIONAL = {"part_s": 0.0, "swap_bytes_per_s": 1e9, "reserve_bytes": 0.0, "node_ranks": 1, "cores": 2**20}


def test_a_file_that_is_older_than_a_constant_is_read():
    spec = HardwareSpec.from_mapping("mine", {key: value for key, value in SYSTEM.items() if key not in OPTIONAL})
    assert {key: spec.constants[key] for key in OPTIONAL} == OPTIONAL
    assert {spec.sources[key] for key in OPTIONAL} == {"assumed: the system file does not set it"}
    assert spec.usable_bytes == spec.memory.size_bytes == 64e9


def test_a_reserve_is_no_part_of_what_may_be_filled():
    assert HardwareSpec.from_mapping("mine", SYSTEM).usable_bytes == 58e9


@pytest.mark.parametrize("reserve_bytes", [64e9, 1e12])
def test_a_reserve_that_leaves_nothing_is_refused(reserve_bytes):
    refused(changed("reserve_bytes", constant(reserve_bytes)), f"reserve_bytes = {reserve_bytes!r}", "64000000000.0")
    with pytest.raises(UserError, match="below memory_bytes"):
        HardwareSpec.from_mapping("mine", SYSTEM).replaced({"reserve_bytes": reserve_bytes}, "a guess")


def test_a_spec_is_a_key_of_caches():
    again = HardwareSpec.from_mapping("mine", changed("step_s", constant(0.0, "elsewhere")))
    assert len({HardwareSpec.from_mapping("mine", SYSTEM), again}) == 1
    assert HardwareSpec.from_mapping("mine", changed("flops_per_s.float32", constant(1e13))) != again


def test_dtypes_that_products_convert_run_at_bfloat16s_rate():
    spec = HardwareSpec.from_mapping("mine", SYSTEM)
    assert (spec.rate("bfloat16"), spec.rate("float32")) == (4e14, 2e13)
    assert spec.rate("int8") == spec.rate("int4") == 4e14
    own = HardwareSpec.from_mapping("mine", changed("flops_per_s.int8", constant(8e14)))
    assert (own.rate("int8"), own.rate("int4")) == (8e14, 4e14)


@pytest.mark.parametrize("dtype", ["fp8", "fp4", "float16", "nonsense"])
def test_a_dtype_without_a_rate_is_refused_with_those_that_have_one(dtype):
    with pytest.raises(UserError, match=f"no arithmetic in {dtype}: use one of float32, bfloat16$") as caught:
        HardwareSpec.from_mapping("mine", SYSTEM).rate(dtype)
    assert caught.value.code == "unsupported_dtype"


def test_without_bfloat16_nothing_is_converted():
    spec = HardwareSpec.from_mapping("mine", changed("flops_per_s", {"float32": constant(2e13)}))
    with pytest.raises(UserError, match=r"use one of float32$"):
        spec.rate("int8")


@pytest.mark.parametrize("path", ["memory_byte", "flops_per_s.fp16", "scale_up.width", "scale_in.ranks"])
def test_an_unknown_key_is_refused_with_the_known_ones(path):
    top, _, leaf = path.partition(".")
    entry = constant(1) if not leaf else SYSTEM.get(top, {}) | {leaf: constant(1)}
    refused(SYSTEM | {top: entry}, repr(path), "memory_bytes_per_s, ")


@pytest.mark.parametrize("path", [key for key in SYSTEM if key not in (*OPTIONAL, "flops_per_s")] + ["scale_up.ranks"])
def test_a_missing_key_is_refused_by_name(path):
    refused(changed(path, None), f"has no {path}", "{ value = ...")


@pytest.mark.parametrize("rates", [None, {}])
def test_a_system_without_arithmetic_is_refused(rates):
    refused(changed("flops_per_s", rates), "has no flops_per_s.bfloat16")


@pytest.mark.parametrize(
    "entry",
    [1e12, "fast", {"value": 1e12}, {"source": "a data sheet"}, constant(1e12, ""), constant(1e12, 5),
     constant(1e12) | {"unit": "bytes"}],
)  # fmt: skip
def test_a_constant_without_its_source_is_refused(entry):
    refused(changed("memory_bytes_per_s", entry), "memory_bytes_per_s", "a value and its source")


@pytest.mark.parametrize(
    ("path", "values", "words"),
    [
        ("memory_bytes_per_s", (0, -1.0, float("nan"), float("inf"), True, "1e12"), "a number above 0"),
        ("flops_per_s.bfloat16", (0, -1.0), "a number above 0"),
        ("scale_out.bytes_per_s", (0, -5e9), "a number above 0"),
        ("reserve_bytes", (-1.0, float("nan"), True), "a number of bytes, 0 or more"),
        ("node_ranks", (0, 4.0, True), "an integer above 0"),
        ("cores", (0, 1.5, True), "an integer above 0"),
        ("kernel_s", (-1e-9, float("inf"), False), "seconds, 0 or more"),
        ("scale_up.latency_s", (-1e-9,), "seconds, 0 or more"),
        ("memory_efficiency", (0, -0.5, 1.01), "a number above 0, at most 1"),
        ("part_fixed_share", (-0.1, 1.1, True), "a number from 0 to 1"),
        ("scale_up.ranks", (0, -8, 8.0, True), "an integer above 0"),
        ("in_switch_reduction", (1, "yes"), "true or false"),
    ],
)
def test_values_out_of_range_are_refused(path, values, words):
    for value in values:
        refused(changed(path, constant(value)), f"{path} = {value!r}", words)


def test_constants_are_replaced_by_name_and_keep_their_sources():
    spec = HardwareSpec.from_mapping("mine", SYSTEM)
    assert spec.constants["scale_up.ranks"] == 8
    assert spec.constants["flops_per_s.float32"] == 2e13
    assert set(spec.constants) == set(spec.sources)
    changed_spec = spec.replaced({"scale_up.latency_s": 3e-6, "flops_per_s.bfloat16": 1e14, "step_s": 0.5}, "fitted")
    assert changed_spec.network.scale_up == Link(3e-6, 450e9, 8)
    assert (changed_spec.arithmetic.flops_per_s, changed_spec.fixed.step_s) == (
        {"float32": 2e13, "bfloat16": 1e14},
        0.5,
    )
    assert changed_spec.sources == {
        **spec.sources,
        **dict.fromkeys(("scale_up.latency_s", "flops_per_s.bfloat16", "step_s"), "fitted"),
    }
    assert changed_spec.replaced(spec.constants, "again") == spec


def test_several_machines_have_the_rates_memory_and_cores_of_all():
    spec = HardwareSpec.from_mapping("mine", SYSTEM).replaced({"cores": 3}, "test")
    two = spec.of_machines(2)
    assert (two.memory.bytes_per_s, two.usable_bytes) == (2 * spec.memory.bytes_per_s, 2 * spec.usable_bytes)
    assert (two.cores, two.rate("float32")) == (6, 2 * spec.rate("float32"))
    assert (two.network.scale_up, two.fixed.kernel_s, two.sources["cores"]) == (
        spec.network.scale_up,
        spec.fixed.kernel_s,
        "2 machines",
    )
    assert spec.of_machines(0.25).cores == 1


def test_what_older_files_say_and_nothing_asks_for_is_passed_over():
    older = SYSTEM | {"cache_bytes": constant(40e6), "prefetch": constant(False)}
    assert HardwareSpec.from_mapping("mine", older) == HardwareSpec.from_mapping("mine", SYSTEM)
    assert not {"cache_bytes", "prefetch"} & set(HardwareSpec.from_mapping("mine", older).sources)
