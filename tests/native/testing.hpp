// What the tests of the native code share: checks, random choices, and operands in memory of exactly their size.
//
// Operands lie in heap blocks of their own, and what a call has no business with (gaps between rows, tiles of other
// sequences) is poisoned: the address sanitizer finds a wrong access even where its result would not show.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <sanitizer/asan_interface.h>

#include "../../csrc/numbers.hpp"

namespace longhelix {

inline std::string what;  // the case that runs

[[noreturn]] inline void fail(const std::string& words) {
    std::fprintf(stderr, "FAILED: %s: %s\n", what.c_str(), words.c_str());
    std::_Exit(1);
}

inline void check(bool holds, const std::string& words) {
    if (!holds) fail(words);
}

inline void check_near(double actual, double expected, double tolerance, const std::string& words) {
    if (std::abs(actual - expected) <= tolerance || actual == expected) return;  // false for NaN
    fail(words + " is " + std::to_string(actual) + ", not " + std::to_string(expected));
}

struct Random {
    std::mt19937_64 engine;

    int below(int count) { return static_cast<int>(engine() % count); }
    bool one_in(int count) { return below(count) == 0; }
    template <typename T>
    T of(std::initializer_list<T> choices) {
        return choices.begin()[below(static_cast<int>(choices.size()))];
    }
    Number number() { return of({Number::float32, Number::bfloat16, Number::float16}); }
};

// A heap block of exactly `size` bytes, all ones: NaN, whichever float they are read as. Without any it is null, as
// torch's are.
struct Bytes {
    std::size_t size;
    std::unique_ptr<std::uint8_t[]> data;

    explicit Bytes(std::size_t size) : size(size), data(size ? new std::uint8_t[size] : nullptr) { reset(); }

    void reset() {
        if (size > 0) std::memset(data.get(), 0xff, size);
    }
    void forbid(std::size_t first, std::size_t count) { ASAN_POISON_MEMORY_REGION(data.get() + first, count); }
    void allow_all() { ASAN_UNPOISON_MEMORY_REGION(data.get(), size); }
    std::vector<std::uint8_t> copy() const { return {data.get(), data.get() + size}; }
};

inline std::int64_t bytes_of(Number number) {
    std::int64_t bytes = 0;
    dispatch(number, [&]<typename T>(T) { bytes = sizeof(T); });
    return bytes;
}

// A matrix that ends with its last number, its rows apart by a gap that nobody may read.
struct Matrix {
    Number number;
    std::int64_t rows, columns, stride;
    Bytes bytes;

    Matrix(Number number, std::int64_t rows, std::int64_t columns, std::int64_t gap = 0)
        : number(number),
          rows(rows),
          columns(columns),
          stride(columns + gap),
          bytes(rows ? ((rows - 1) * stride + columns) * bytes_of(number) : 0) {
        for (std::int64_t row = 0; row + 1 < rows; ++row) {
            bytes.forbid((row * stride + columns) * bytes_of(number), gap * bytes_of(number));
        }
    }

    void* data() const { return bytes.data.get(); }
    float* floats() const { return static_cast<float*>(data()); }
    Rows as_rows() const { return {data(), number, stride}; }
    void set(std::int64_t row, std::int64_t column, double value) {
        std::int64_t at = row * stride + column;
        dispatch(number, [&]<typename T>(T) { static_cast<T*>(data())[at] = static_cast<T>(value); });
    }
    double get(std::int64_t row, std::int64_t column) const {
        std::int64_t at = row * stride + column;
        double value = 0;
        dispatch(number, [&]<typename T>(T) { value = static_cast<const T*>(data())[at]; });
        return value;
    }
    std::vector<double> get_run(std::int64_t row, std::int64_t first, std::int64_t count) const {
        std::vector<double> values(count);
        for (std::int64_t i = 0; i < count; ++i) values[i] = get(row, first + i);
        return values;
    }
    // Multiples of `step` of either sign, `most` of them at most.
    void fill(Random& random, double step, int most) {
        for (std::int64_t row = 0; row < rows; ++row) {
            for (std::int64_t column = 0; column < columns; ++column) {
                set(row, column, step * (random.below(2 * most + 1) - most));
            }
        }
    }
};

void test_collectives();

}  // namespace longhelix
