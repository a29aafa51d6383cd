#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "kernels.hpp"

namespace longhelix {

#if defined(__x86_64__)
namespace avx512 { extern const Kernels table; }
namespace avx2 { extern const Kernels table; }
#endif
namespace portable { extern const Kernels table; }

std::vector<const Kernels*> usable_kernels() {
    std::vector<const Kernels*> tables{&portable::table};
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
        tables.push_back(&avx2::table);
    }
    if (__builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi") &&
        __builtin_cpu_supports("avx512vnni") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq")) {
        tables.push_back(&avx512::table);
    }
#endif
    return tables;
}

namespace {

// The fastest, or the ones that are asked for, so that tests can run what other processors run.
const Kernels& chosen_kernels() {
    const char* wanted = std::getenv("LONGHELIX_INSTRUCTION_SET");
    auto usable = usable_kernels();
    if (!wanted || !*wanted) return *usable.back();
    std::string names;
    for (const Kernels* table : usable) {
        if (std::string(wanted) == table->name) return *table;
        names += (names.empty() ? "" : ", ") + std::string(table->name);
    }
    throw std::invalid_argument("LONGHELIX_INSTRUCTION_SET is " + std::string(wanted) + ": this processor has " + names);
}

}  // namespace

const Kernels& kernels() {
    static const Kernels& chosen = chosen_kernels();
    return chosen;
}

std::size_t tile_bytes(const Pool& pool) {
    std::size_t channels = static_cast<std::size_t>(pool.key_size) + (pool.shared ? 0 : pool.value_size);
    std::size_t scales = (pool.shared ? 1 : 2) * 16 * 2;
    switch (pool.number) {
        case Number::float32: return channels * 64;
        case Number::bfloat16:
        case Number::float16: return channels * 32;
        case Number::int8:
        case Number::float8: return channels * 16 + scales;
        case Number::int4: return channels * 8 + scales;
        case Number::nvfp4: return channels * 9 + scales / 2;
        default: throw std::invalid_argument("a pool does not hold numbers of this type");
    }
}

ExpertSet::ExpertSet(const std::vector<int>& ids, std::vector<Weight> gate_up, std::vector<Weight> down)
    : gate_up(std::move(gate_up)), down(std::move(down)) {
    if (ids.size() != this->gate_up.size() || ids.size() != this->down.size()) {
        throw std::invalid_argument("every expert has a gate_up and a down product");
    }
    for (std::size_t place = 0; place < ids.size(); ++place) {
        index_of.resize(std::max<std::size_t>(index_of.size(), ids[place] + 1), -1);
        index_of[ids[place]] = static_cast<int>(place);
    }
}

}  // namespace longhelix
