// Codes of checkpoints and their scales as panels. No number is changed.
#pragma once

#include <algorithm>
#include <cstring>

#include "pack.hpp"

namespace longhelix::ISA {

template <typename E>
struct PackCodes {
    const CodePacking& call;
    PackedPanel<E> panel_of;

    explicit PackCodes(const CodePacking& packing) : call(packing), panel_of(packing.weight) {}

    void run() const {
        each_panel(call.first, call.num_rows, [&](std::int64_t panel) { pack(panel); });
    }

  private:
    using Four [[gnu::vector_size(16)]] = u32;
    using Eight [[gnu::vector_size(16)]] = std::uint16_t;

    static constexpr int kUnitInputs = 32 / E::kPackedBits;  // of a row that are 32 bits
    static constexpr int kUnitsAtOnce = 4;

    void pack(std::int64_t panel) const {
        std::int64_t begin = std::max(panel * kLanes, call.first);
        std::int64_t stop = std::min((panel + 1) * kLanes, call.first + call.num_rows);
        u8* to = call.panels + panel * panel_of.bytes;
        std::int64_t row = begin - call.first;
        int lane = static_cast<int>(begin - panel * kLanes), count = static_cast<int>(stop - begin);
        if (count == kLanes) {
            pack_rows(row, to);
        } else {
            for (int i = 0; i < count; ++i) pack_row(row + i, lane + i, to);
        }
        switch (scale_bytes(call.weight.scale)) {
            case 1: pack_sides<1>(row, lane, count, to); break;
            case 2: pack_sides<2>(row, lane, count, to); break;
            default: pack_sides<4>(row, lane, count, to);
        }
        if (!call.output_scales) return;
        std::memcpy(to + panel_of.bytes - (kLanes - lane) * 4, call.output_scales + row, count * 4);
    }

    // Where the codes of a unit of 32 bits, and of the same unit in other lanes, begin.
    std::int64_t place(std::int64_t input) const {
        std::int64_t block = (input + panel_of.lead) / panel_of.block;
        return input * static_cast<std::int64_t>(panel_of.kInputBytes) + block * static_cast<std::int64_t>(panel_of.side_bytes);
    }

    const u8* codes_of(std::int64_t row) const { return call.codes + row * call.code_stride; }

    // Sixteen rows from `row` on, a few units of each at a time: as a matrix is transposed.
    void pack_rows(std::int64_t row, u8* panel) const {
        std::int64_t units = panel_of.depth / kUnitInputs, unit = 0;
        for (; unit + kUnitsAtOnce <= units; unit += kUnitsAtOnce) {
            std::int64_t places[kUnitsAtOnce];
            for (int i = 0; i < kUnitsAtOnce; ++i) places[i] = place((unit + i) * kUnitInputs);
            for (int lane = 0; lane < kLanes; lane += 4) {
                Four of_lane[4];
                for (int i = 0; i < 4; ++i) of_lane[i] = load<Four>(codes_of(row + lane + i) + unit * 4);
                put_units(of_lane, places, kUnitsAtOnce, panel + lane * 4);
            }
        }
        if (unit == units) return;
        std::int64_t places[kUnitsAtOnce] = {}, left = units - unit;
        for (int i = 0; i < left; ++i) places[i] = place((unit + i) * kUnitInputs);
        for (int lane = 0; lane < kLanes; lane += 4) {
            Four of_lane[4] = {};
            for (int i = 0; i < 4; ++i) std::memcpy(&of_lane[i], codes_of(row + lane + i) + unit * 4, left * 4);
            put_units(of_lane, places, static_cast<int>(left), panel + lane * 4);
        }
    }

    // Units of four lanes, as `byte_offset` has them.
    INLINE void put_units(const Four (&lanes)[4], const std::int64_t (&places)[kUnitsAtOnce], int count, u8* to) {
        Four ab[] = {__builtin_shufflevector(lanes[0], lanes[1], 0, 4, 1, 5), __builtin_shufflevector(lanes[0], lanes[1], 2, 6, 3, 7)};
        Four cd[] = {__builtin_shufflevector(lanes[2], lanes[3], 0, 4, 1, 5), __builtin_shufflevector(lanes[2], lanes[3], 2, 6, 3, 7)};
        for (int i = 0; i < count; ++i) {
            Four both = i % 2 ? __builtin_shufflevector(ab[i / 2], cd[i / 2], 2, 3, 6, 7)
                              : __builtin_shufflevector(ab[i / 2], cd[i / 2], 0, 1, 4, 5);
            Eight pairs = (Eight)stored_units(both);
            store(to + places[i], __builtin_shufflevector(pairs, pairs, 0, 2, 4, 6, 1, 3, 5, 7));
        }
    }

    // Each unit as E stores it: one unit row in the low half, the next one in the high half.
    INLINE Four stored_units(Four units) {
        if constexpr (E::kPackedBits == 8) {
            return E::stored_bytes(units);
        } else {
            // A byte has the two inputs of a unit row. Unit rows two apart share bytes.
            Four low = units & 0x0f0f0f0fu, high = (units >> 4) & 0x0f0f0f0fu;
            low = low | low >> 12, high = high | high >> 12;
            return (low & 0xffu) | (high & 0xffu) << 8 | (low & 0xff00u) << 8 | (high & 0xff00u) << 16;
        }
    }

    void pack_row(std::int64_t row, int lane, u8* panel) const {
        const u8* codes = codes_of(row);
        for (std::int64_t input = 0; input < panel_of.depth; input += kUnitInputs, codes += 4) {
            u32 unit;
            std::memcpy(&unit, codes, 4);
            unit = stored_units(Four{} + unit)[0];
            u8* to = panel + place(input);
            std::uint16_t rows[2] = {static_cast<std::uint16_t>(unit), static_cast<std::uint16_t>(unit >> 16)};
            std::memcpy(to + byte_offset(0, lane, 0), rows, 2);
            std::memcpy(to + byte_offset(1, lane, 0), rows + 1, 2);
        }
    }

    // The scales and zero points of `count` rows, from `row` on. `lane` is the lane of the first row.
    template <int kBytes>
    void pack_sides(std::int64_t row, int lane, int count, u8* panel) const {
        for (std::int64_t block = 0; block < panel_of.num_blocks; ++block) {
            u8* to = panel + panel_of.offset(block) + (panel_of.stop(block) - panel_of.start(block)) * panel_of.kInputBytes;
            const u8* from = call.scales + row * call.scale_stride + block * kBytes;
            for (int i = 0; i < count; ++i) std::memcpy(to + (lane + i) * kBytes, from + i * call.scale_stride, kBytes);
            if (!call.zeros) continue;
            const u8* zeros = call.zeros + row * call.zero_stride + block;
            for (int i = 0; i < count; ++i) to[kLanes * kBytes + lane + i] = zeros[i * call.zero_stride];
        }
    }
};

}  // namespace longhelix::ISA
