// Cosines and sines of the angles by which rows' queries and keys are rotated.
//
// Angles are doubles: at position 16,000,000 a float would be off by half a radian.
#pragma once

#include <algorithm>
#include <cmath>

#include "linear.hpp"

namespace longhelix::ISA {

struct TakeAngles {
    const Angles& call;

    // A thread's share: fewer are done before other threads would begin.
    static constexpr std::int64_t kRows = 32;

    explicit TakeAngles(const Angles& angles) : call(angles) {}

    void run() const {
        each_row((call.num_rows + kRows - 1) / kRows, [&](std::int64_t share) {
            std::int64_t end = std::min((share + 1) * kRows, call.num_rows);
            for (std::int64_t row = share * kRows; row < end; ++row) take(row);
        });
    }

  private:
    void take(std::int64_t row) const {
        auto position = static_cast<double>(call.positions[row]);
        double factor = call.factor;
        std::int64_t num_pairs = call.num_pairs;
        const double* frequencies = call.frequencies + row * call.stride;
        float *__restrict cos = call.cos + row * num_pairs, *__restrict sin = call.sin + row * num_pairs;
        for (std::int64_t i = 0; i < num_pairs; ++i) {
            Turn turn = turned(position * frequencies[i]);
            cos[i] = static_cast<float>(turn.cos * factor);
            sin[i] = static_cast<float>(turn.sin * factor);
        }
    }

    struct Turn {
        double cos, sin;
    };

    // To 1e-15, for angles below 2^40. Without branches, so that compilers make vectors of it.
    static Turn turned(double angle) {
        double shifted = angle * 0.6366197723675814 + 0x1.8p52;  // rounds to quarters of a circle
        double quarters = shifted - 0x1.8p52;
        std::uint64_t quarter;
        std::memcpy(&quarter, &shifted, sizeof quarter);
        // The quarter in two parts: the first product is exact before its difference is rounded.
        double x = std::fma(-quarters, 0x1.921fb54442d18p0, angle);
        x = std::fma(-quarters, 0x1.1a62633145c07p-54, x);
        // Taylor's series: on an eighth of a circle to either side their next terms are below 1e-16.
        double z = x * x, sin = -1.0 / 1307674368000, cos = 1.0 / 20922789888000;
        for (double term : {1.0 / 6227020800, -1.0 / 39916800, 1.0 / 362880, -1.0 / 5040, 1.0 / 120, -1.0 / 6}) {
            sin = sin * z + term;
        }
        for (double term : {-1.0 / 87178291200, 1.0 / 479001600, -1.0 / 3628800, 1.0 / 40320, -1.0 / 720, 1.0 / 24,
                            -0.5}) {
            cos = cos * z + term;
        }
        sin = x + x * z * sin;
        cos = 1.0 + z * cos;
        double first = quarter & 1 ? -sin : cos, second = quarter & 1 ? cos : sin;
        return quarter & 2 ? Turn{-first, -second} : Turn{first, second};
    }
};

}  // namespace longhelix::ISA
