// The Python face of the native code. Tensors come as addresses, so that no torch header is needed to build it.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "collectives.hpp"
#include "kernels.hpp"
#include "threads.hpp"
#include "work.hpp"

using namespace nb::literals;
using longhelix::Address;
using longhelix::at;
using longhelix::Channel;
using longhelix::check_weight_number;
using longhelix::Collective;
using longhelix::ExpertSet;
using longhelix::Function;
using longhelix::Kind;
using longhelix::Number;
using longhelix::perform;
using longhelix::Pool;
using longhelix::Rows;
using longhelix::rows_at;
using longhelix::Tape;
using longhelix::Weight;

namespace {

void bind_calls(nb::module_& module) {
    nb::class_<Tape>(module, "Tape")
        .def(nb::init<>())
        .def("__len__", &Tape::size)
        .def("run", &Tape::run, nb::call_guard<nb::gil_scoped_release>());
    module.def(
        "record", [](Tape* tape) { longhelix::recording = tape; }, "tape"_a.none(),
        "From here on calls of this thread are kept on `tape`; None ends it.");
    module.def(
        "mark",
        [](Address ns) { perform(Kind::other, [ns] { *at<std::int64_t>(ns) = longhelix::monotonic_ns(); }); }, "ns"_a,
        "Write CLOCK_MONOTONIC, int64 nanoseconds, to `ns`: now, and whenever a tape comes by.");
    module.def(
        "time_calls", [](bool on) { longhelix::timing = on; }, "on"_a, "Whether `seconds` counts from here on.");
    module.def(
        "seconds",
        [] {
            nb::dict seconds;
            for (std::size_t kind = 0; kind < longhelix::kKindNames.size(); ++kind) {
                seconds[longhelix::kKindNames[kind]] = 1e-9 * longhelix::spent_ns[kind];
            }
            return seconds;
        },
        "Seconds inside of calls so far, those of tapes too, by what they do.");
}

void bind_numbers(nb::module_& module) {
    nb::enum_<Number>(module, "Number")
        .value("float32", Number::float32)
        .value("float64", Number::float64)
        .value("bfloat16", Number::bfloat16)
        .value("float16", Number::float16)
        .value("int32", Number::int32)
        .value("int64", Number::int64)
        .value("int8", Number::int8)
        .value("fp8", Number::float8)
        .value("int4", Number::int4)
        .value("w8a8", Number::w8a8)
        .value("e4m3", Number::e4m3)
        .value("e2m1", Number::e2m1)
        .value("code8", Number::code8)
        .value("code6", Number::code6)
        .value("code4", Number::code4)
        .value("nl4", Number::nl4)
        .value("e8m0", Number::e8m0)
        .value("nvfp4", Number::nvfp4);
    nb::enum_<Function>(module, "Function")
        .value("none", Function::none)
        .value("silu", Function::silu)
        .value("gelu", Function::gelu)
        .value("gelu_tanh", Function::gelu_tanh)
        .value("relu_squared", Function::relu_squared)
        .value("clamped_swiglu", Function::clamped_swiglu);
}

void bind_collectives(nb::module_& module) {
    auto unlocked = nb::call_guard<nb::gil_scoped_release>();
    nb::class_<Channel>(module, "Channel")
        .def(nb::init<int, int, std::vector<int>, std::vector<int>, double>(), "fd"_a, "rank"_a, "pids"_a, "names"_a,
             "timeout_s"_a)
        .def_static("segment_bytes", &Channel::segment_bytes, "size"_a)
        .def(
            "all_reduce",
            [](Channel& self, Address values, std::size_t count, Number number) {
                perform(Kind::collectives,
                        [&self, values, count, number] { self.all_reduce(at<void>(values), count, number); });
            },
            unlocked)
        .def(
            "all_reduce_add",
            [](Channel& self, Address values, Address residual, Address out, std::size_t count, Number number) {
                perform(Kind::collectives, [&self, values, residual, out, count, number] {
                    self.all_reduce_add(at<void>(values), at<const void>(residual), at<void>(out), count, number);
                });
            },
            unlocked)
        .def(
            "exchange",
            [](Channel& self, Address out, Address lse, std::size_t rows, Address places, const std::vector<int>& heads,
               std::size_t head_size, Number number, Address merged) {
                perform(Kind::collectives, [&self, out, lse, rows, places, heads, head_size, number, merged] {
                    self.exchange(at<const void>(out), at<const float>(lse), rows, at<const std::int64_t>(places), heads,
                                  head_size, number, at<void>(merged));
                });
            },
            unlocked)
        .def(
            "reduce_scatter",
            [](Channel& self, Address input, Address output, std::size_t count, Number number) {
                perform(Kind::collectives, [&self, input, output, count, number] {
                    self.reduce_scatter(at<const void>(input), at<void>(output), count, number);
                });
            },
            unlocked)
        .def(
            "all_gather",
            [](Channel& self, Address input, Address output, std::size_t bytes) {
                perform(Kind::collectives, [&self, input, output, bytes] {
                    self.all_gather(at<const void>(input), at<void>(output), bytes);
                });
            },
            unlocked)
        .def(
            "all_to_all",
            [](Channel& self, Address send, const std::vector<std::size_t>& send_bytes, Address received,
               const std::vector<std::size_t>& received_bytes) {
                perform(Kind::collectives, [&self, send, send_bytes, received, received_bytes] {
                    self.all_to_all(at<const std::byte>(send), send_bytes, at<std::byte>(received), received_bytes);
                });
            },
            unlocked)
        .def(
            "broadcast",
            [](Channel& self, Address values, std::size_t bytes, int root) {
                perform(Kind::collectives,
                        [&self, values, bytes, root] { self.broadcast(at<void>(values), bytes, root); });
            },
            unlocked)
        .def(
            "barrier", [](Channel& self) { perform(Kind::collectives, [&self] { self.barrier(); }); }, unlocked)
        .def_prop_ro("exchanged_bytes", &Channel::exchanged_bytes)
        .def_prop_ro("fingerprint", &Channel::fingerprint)
        .def(
            "progress",
            [](const Channel& self) {
                auto [begun, current] = self.progress();
                bool runs = current != Collective::none;
                return std::pair(begun, runs ? longhelix::title(current, begun) : std::string());
            },
            "How many collectives have begun, and which of them runs now; for any thread.");
}

// What Python's own errors of these names catch.
void bind_errors(nb::module_& module) {
    nb::object errors = nb::module_::import_("longhelix.errors");
    nb::exception<longhelix::PeerLost>(module, "PeerLostError", errors.attr("PeerLostError"));
    nb::exception<longhelix::CollectivesDiffer>(module, "CollectivesDifferError",
                                                errors.attr("CollectivesDifferError"));
}

void bind_kernels(nb::module_& module) {
    module.def("use_openmp", [](const char* library) { return longhelix::use_openmp(library); }, "library"_a);
    module.def("set_threads", &longhelix::set_threads, "count"_a);
    module.def("instruction_set", [] { return longhelix::kernels().name; });

    nb::class_<Pool>(module, "Pool")
        .def(
            "__init__",
            [](Pool* self, Address data, Number number, int num_kv_heads, std::int64_t num_blocks,
               int tiles_per_block, int key_size, int value_size, bool shared, bool rounded) {
                new (self) Pool{at<std::uint8_t>(data), number,     num_kv_heads, num_blocks, tiles_per_block,
                                key_size,               value_size, shared,       rounded};
                longhelix::tile_bytes(*self);  // throws where a pool does not hold numbers of this type
            },
            "data"_a, "number"_a, "num_kv_heads"_a, "num_blocks"_a, "tiles_per_block"_a, "key_size"_a, "value_size"_a, "shared"_a,
            "rounded"_a)
        .def_prop_ro("tile_bytes", [](const Pool& self) { return longhelix::tile_bytes(self); });
    nb::class_<Weight>(module, "Weight")
        .def(
            "__init__",
            [](Weight* self, Address data, Number number, std::int64_t depth, Number scale, std::int64_t block,
               std::int64_t lead, bool zeros, bool output_scales, bool offsets, float zero, std::int64_t superblock,
               bool rounds_inputs) {
                check_weight_number(number);
                if (rounds_inputs && (!longhelix::is_code(number) || number == Number::e4m3)) {
                    throw std::invalid_argument("only codes of whole numbers are multiplied by bytes");
                }
                new (self) Weight{at<const std::uint8_t>(data), number, depth, scale, block, lead, zeros, output_scales,
                                  offsets, zero, superblock, rounds_inputs};
            },
            "data"_a, "number"_a, "depth"_a, "scale"_a = Number::float32, "block"_a = 1, "lead"_a = 0, "zeros"_a = false,
            "output_scales"_a = false, "offsets"_a = false, "zero"_a = 0.0f, "superblock"_a = 0,
            "rounds_inputs"_a = false);

    nb::class_<ExpertSet>(module, "ExpertSet")
        .def(nb::init<const std::vector<int>&, std::vector<Weight>, std::vector<Weight>>(), "ids"_a, "gate_up"_a,
             "down"_a);

    auto unlocked = nb::call_guard<nb::gil_scoped_release>();
    module.def(
        "attend",
        [](Address q, Number number, std::int64_t q_stride, const Pool& pool, int num_query_heads, int num_sequences,
           Address blocks, Address extents, Address row_starts, Address firsts, Address limits, float scale, float cap,
           Address out, Address lse, bool onto) {
            longhelix::Attention call{rows_at(q, number, q_stride),
                                         pool,
                                         num_query_heads,
                                         num_sequences,
                                         at<const std::int64_t>(blocks),
                                         at<const std::int64_t>(extents),
                                         at<const std::int64_t>(row_starts),
                                         at<const std::int64_t>(firsts),
                                         at<const std::int64_t>(limits),
                                         scale,
                                         cap,
                                         at<void>(out),
                                         at<float>(lse),
                                         onto};
            perform(Kind::attention, [call] {
                if (longhelix::kernels().attend(call)) return;
                throw std::invalid_argument("a row sees more tokens than its sequence has KV blocks for here");
            });
        },
        unlocked);
    module.def(
        "expand",
        [](Address up, Number number, std::int64_t up_stride, const Pool& latents, Address blocks,
           std::int64_t first_tile, const Pool& made) {
            longhelix::Expansion call{
                rows_at(up, number, up_stride), latents, at<const std::int64_t>(blocks), first_tile, made};
            perform(Kind::attention, [call] { longhelix::kernels().expand(call); });
        },
        unlocked);
    module.def(
        "write",
        [](Address k, std::int64_t k_stride, Address v, std::int64_t v_stride, Number number, const Pool& pool,
           Address slots, std::int64_t num_rows) {
            longhelix::Write call{rows_at(k, number, k_stride),
                                        rows_at(v, number, v_stride),
                                        pool,
                                        at<const std::int64_t>(slots),
                                        num_rows};
            perform(Kind::other, [call] { longhelix::kernels().write(call); });
        },
        unlocked);
    module.def(
        "rotate",
        [](Address qkv, std::int64_t stride, Number number, Address q_norm, Address k_norm, float norm_eps, Address cos,
           Address sin, int num_pairs, const Pool& pool, int num_query_heads, Address slots, std::int64_t num_rows, Address q) {
            longhelix::Rotate call{rows_at(qkv, number, stride),
                                         at<const void>(q_norm),
                                         at<const void>(k_norm),
                                         norm_eps,
                                         at<const float>(cos),
                                         at<const float>(sin),
                                         num_pairs,
                                         pool,
                                         num_query_heads,
                                         at<const std::int64_t>(slots),
                                         num_rows,
                                         at<void>(q)};
            perform(Kind::rotation, [call] { longhelix::kernels().rotate(call); });
        },
        unlocked);
    module.def(
        "linear",
        [](Address x, Number number, std::int64_t x_stride, Address scales, std::int64_t num_rows, Address norm,
           float norm_eps, const Weight& weight, Address bias, Function function, bool gated, Address residual,
           std::int64_t residual_stride, Address out, Number out_number, std::int64_t outputs) {
            bool rounded = number == Number::int8 && weight.number == Number::w8a8 && (scales || !num_rows) && !norm;
            if (scales && !rounded) {
                throw std::invalid_argument("scales are of rows of int8 for a weight of w8a8, without a norm");
            }
            longhelix::Linear call{rounded ? Rows{at<const void>(x), number, x_stride} : rows_at(x, number, x_stride),
                                         num_rows,
                                         at<const void>(norm),
                                         norm_eps,
                                         weight,
                                         at<const void>(bias),
                                         {function, gated},
                                         rows_at(residual, out_number, residual_stride),
                                         at<void>(out),
                                         out_number,
                                         outputs,
                                         at<const float>(scales)};
            perform(Kind::products, [call] { longhelix::kernels().linear(call); });
        },
        unlocked);
    module.def(
        "round",
        [](Address x, Number number, std::int64_t x_stride, std::int64_t num_rows, std::int64_t depth, Address norm,
           float norm_eps, Address bytes, Address scales) {
            longhelix::Rounding call{rows_at(x, number, x_stride), num_rows, depth, at<const void>(norm), norm_eps,
                                     at<std::int8_t>(bytes), at<float>(scales)};
            perform(Kind::products, [call] { longhelix::kernels().round(call); });
        },
        unlocked);
    module.def(
        "route",
        [](Address logits, std::int64_t num_rows, Address bias, int num_experts, int per_token, int num_groups,
           int groups_per_token, bool sigmoid, bool normalised, float scale, bool shared, bool shared_gate,
           Address weights, Address experts) {
            longhelix::Route call{at<const float>(logits),
                                  num_rows,
                                  at<const float>(bias),
                                  num_experts,
                                  per_token,
                                  num_groups,
                                  groups_per_token,
                                  sigmoid,
                                  normalised,
                                  scale,
                                  shared,
                                  shared_gate,
                                  at<float>(weights),
                                  at<std::int64_t>(experts)};
            perform(Kind::other, [call] { longhelix::kernels().route(call); });
        },
        unlocked);
    module.def(
        "experts",
        [](Address x, Number number, Address scales, std::int64_t num_rows, std::int64_t hidden, Address norm,
           float norm_eps, const ExpertSet& set, Address weights, Address experts, int per_row, Function function,
           bool gated, Address residual, Address out, Number out_number, Address rows_of) {
            bool of_bytes = set.down.empty() || set.down[0].number == Number::w8a8;
            bool rounded = number == Number::int8 && of_bytes && (scales || !num_rows) && !norm;
            if (scales && !rounded) {
                throw std::invalid_argument("scales are of rows of int8 for weights of w8a8, without a norm");
            }
            longhelix::Experts call{rounded ? Rows{at<const void>(x), number, hidden} : rows_at(x, number, hidden),
                                    num_rows,
                                    hidden,
                                    at<const void>(norm),
                                    norm_eps,
                                    &set,
                                    at<const float>(weights),
                                    at<const std::int64_t>(experts),
                                    per_row,
                                    {function, gated},
                                    rows_at(residual, out_number, hidden),
                                    at<void>(out),
                                    out_number,
                                    at<std::int64_t>(rows_of),
                                    at<const float>(scales)};
            perform(Kind::products, [call] { longhelix::kernels().experts(call); });
        },
        unlocked);
    module.def(
        "take_rows",
        [](Address from, std::int64_t stride_bytes, std::size_t row_bytes, Address rows, std::int64_t num_rows, Address to) {
            perform(Kind::other, [from, stride_bytes, row_bytes, rows, num_rows, to] {
                for (std::int64_t row = 0; row < num_rows; ++row) {
                    std::memcpy(at<std::byte>(to) + row * row_bytes,
                                at<const std::byte>(from) + at<const std::int64_t>(rows)[row] * stride_bytes, row_bytes);
                }
            });
        },
        unlocked);
    module.def(
        "take_columns",
        [](Address from, std::int64_t stride, Number number, Address columns, std::int64_t num_columns, std::int64_t num_rows,
           Address to) {
            rows_at(from, number, stride);
            perform(Kind::other, [=] {
                auto take = [&](auto one) {
                    using Item = decltype(one);
                    auto* taken = at<Item>(to);
                    for (std::int64_t row = 0; row < num_rows; ++row) {
                        auto* items = at<const Item>(from) + row * stride;
                        for (std::int64_t i = 0; i < num_columns; ++i) {
                            std::int32_t column = at<const std::int32_t>(columns)[i];
                            *taken++ = column < 0 ? Item{} : items[column];
                        }
                    }
                };
                if (number == Number::float32) {
                    take(std::uint32_t{});
                } else {
                    take(std::uint16_t{});
                }
            });
        },
        unlocked);
    module.def("work", [] {
        return nb::make_tuple(longhelix::done.multiplied.load(), longhelix::done.attended.load());
    });
    module.def(
        "read", [](Address data, std::size_t bytes) { return longhelix::kernels().read(at<const void>(data), bytes); },
        unlocked);
}

}  // namespace

NB_MODULE(_native, module) {
    // torch's caches of compiled code keep pools and weights to the end of the process.
    nb::set_leak_warnings(false);
    bind_errors(module);
    bind_numbers(module);
    bind_collectives(module);
    bind_kernels(module);
    longhelix::bind_loading(module);
    longhelix::bind_rows(module);
    longhelix::bind_sampling(module);
    bind_calls(module);
}
