// Codes of checkpoints and their scales as panels. No number is changed.
#pragma once

#include <algorithm>
#include <cstring>

#include "pack.hpp"

namespace longhelix::ISA {

template <typename E>
struct PackCodes {
    const CodePacking& call;
    PackedPanel panel_of;

    explicit PackCodes(const CodePacking& packing) : call(packing), panel_of(packing.weight) {}

    void run() const {
        each_panel(call.first, call.num_rows, [&](std::int64_t panel) { pack(panel); });
    }

  private:
    using Four [[gnu::vector_size(16)]] = u32;
    using Eight [[gnu::vector_size(16)]] = std::uint16_t;

    static constexpr int kBits = E::kPackedBits == 6 ? 4 : E::kPackedBits;  // of the codes, or of the lower part of each
    static constexpr int kUnitInputs = 32 / kBits;                            // of a row that are 32 bits
    static constexpr int kHighInputs = 16;                                    // whose two high bits are
    static constexpr int kUnitsAtOnce = 4;

    void pack(std::int64_t panel) const {
        std::int64_t begin = std::max(panel * kLanes, call.first);
        std::int64_t stop = std::min((panel + 1) * kLanes, call.first + call.num_rows);
        u8* to = call.panels + panel * panel_of.bytes;
        std::int64_t row = begin - call.first;
        int lane = static_cast<int>(begin - panel * kLanes), count = static_cast<int>(stop - begin);
        pack_units<kUnitInputs>(0, row, lane, count, to);
        if constexpr (E::kPackedBits == 6) pack_units<kHighInputs>(panel_of.depth / 2, row, lane, count, to);
        switch (scale_bytes(call.weight.scale)) {
            case 1: pack_sides<1>(row, lane, count, to); break;
            case 2: pack_sides<2>(row, lane, count, to); break;
            default: pack_sides<4>(row, lane, count, to);
        }
        if (!call.output_scales) return;
        std::memcpy(to + panel_of.bytes - (kLanes - lane) * 4, call.output_scales + row, count * 4);
    }

    // Where the codes of a unit of 32 bits, and of the same unit in other lanes, begin.
    template <int kInputs>
    std::int64_t place(std::int64_t input) const {
        std::int64_t in_group = 0;  // of the inputs that are read at once
        if constexpr (E::kPackedBits == 6) {
            in_group = kInputs == kHighInputs ? E::kHighBytes : input % kHighInputs / kUnitInputs * 64;
            input -= input % kHighInputs;
        }
        return input * static_cast<std::int64_t>(panel_of.input_bytes) + in_group +
               static_cast<std::int64_t>(panel_of.bytes_before(panel_of.block_of(input)));
    }

    // Units of `kInputs` inputs each, which begin at a byte of each row.
    template <int kInputs>
    void pack_units(std::int64_t byte, std::int64_t row, int lane, int count, u8* to) const {
        if (count == kLanes) return pack_rows<kInputs>(byte, row, to);
        for (int i = 0; i < count; ++i) pack_row<kInputs>(codes_of(row + i) + byte, lane + i, to);
    }

    const u8* codes_of(std::int64_t row) const { return call.codes + row * call.code_stride; }

    // Sixteen rows from `row` on, a few units of each at a time: as a matrix is transposed.
    template <int kInputs>
    void pack_rows(std::int64_t byte, std::int64_t row, u8* panel) const {
        std::int64_t units = panel_of.depth / kInputs, unit = 0;
        for (; unit + kUnitsAtOnce <= units; unit += kUnitsAtOnce) {
            std::int64_t places[kUnitsAtOnce];
            for (int i = 0; i < kUnitsAtOnce; ++i) places[i] = place<kInputs>((unit + i) * kInputs);
            for (int lane = 0; lane < kLanes; lane += 4) {
                Four of_lane[4];
                for (int i = 0; i < 4; ++i) of_lane[i] = load<Four>(codes_of(row + lane + i) + byte + unit * 4);
                put_units<kInputs>(of_lane, places, kUnitsAtOnce, panel + lane * 4);
            }
        }
        if (unit == units) return;
        std::int64_t places[kUnitsAtOnce] = {}, left = units - unit;
        for (int i = 0; i < left; ++i) places[i] = place<kInputs>((unit + i) * kInputs);
        for (int lane = 0; lane < kLanes; lane += 4) {
            Four of_lane[4] = {};
            for (int i = 0; i < 4; ++i) std::memcpy(&of_lane[i], codes_of(row + lane + i) + byte + unit * 4, left * 4);
            put_units<kInputs>(of_lane, places, static_cast<int>(left), panel + lane * 4);
        }
    }

    // Units of four lanes, as `byte_offset` has them.
    template <int kInputs>
    INLINE void put_units(const Four (&lanes)[4], const std::int64_t (&places)[kUnitsAtOnce], int count, u8* to) {
        Four ab[] = {__builtin_shufflevector(lanes[0], lanes[1], 0, 4, 1, 5), __builtin_shufflevector(lanes[0], lanes[1], 2, 6, 3, 7)};
        Four cd[] = {__builtin_shufflevector(lanes[2], lanes[3], 0, 4, 1, 5), __builtin_shufflevector(lanes[2], lanes[3], 2, 6, 3, 7)};
        for (int i = 0; i < count; ++i) {
            Four both = i % 2 ? __builtin_shufflevector(ab[i / 2], cd[i / 2], 2, 3, 6, 7)
                              : __builtin_shufflevector(ab[i / 2], cd[i / 2], 0, 1, 4, 5);
            Eight pairs = (Eight)stored_units<kInputs>(both);
            store(to + places[i], __builtin_shufflevector(pairs, pairs, 0, 2, 4, 6, 1, 3, 5, 7));
        }
    }

    // Each unit as E stores it: one unit row in the low half, the next one in the high half.
    template <int kInputs>
    INLINE Four stored_units(Four units) {
        if constexpr (kInputs == kHighInputs) {
            return turned(units);
        } else if constexpr (E::kPackedBits == 8) {
            return E::stored_bytes(units);
        } else {
            // A byte has the two inputs of a unit row. Unit rows two apart share bytes.
            Four low = units & 0x0f0f0f0fu, high = (units >> 4) & 0x0f0f0f0fu;
            low = low | low >> 12, high = high | high >> 12;
            return (low & 0xffu) | (high & 0xffu) << 8 | (low & 0xff00u) << 8 | (high & 0xff00u) << 16;
        }
    }

    // Two bits of sixteen inputs, four in a byte: what is byte b and two bits p of it becomes byte p and two bits b.
    INLINE Four turned(Four units) {
        Four other = (units >> 6 ^ units) & 0x00cc00ccu;
        units = units ^ other ^ other << 6;
        other = (units >> 12 ^ units) & 0x0000f0f0u;
        return units ^ other ^ other << 12;
    }

    template <int kInputs>
    void pack_row(const u8* codes, int lane, u8* panel) const {
        for (std::int64_t input = 0; input < panel_of.depth; input += kInputs, codes += 4) {
            u32 unit;
            std::memcpy(&unit, codes, 4);
            unit = stored_units<kInputs>(Four{} + unit)[0];
            u8* to = panel + place<kInputs>(input);
            std::uint16_t rows[2] = {static_cast<std::uint16_t>(unit), static_cast<std::uint16_t>(unit >> 16)};
            std::memcpy(to + byte_offset(0, lane, 0), rows, 2);
            std::memcpy(to + byte_offset(1, lane, 0), rows + 1, 2);
        }
    }

    // The scales, zero points and offsets of `count` rows, from `row` on. `lane` is the lane of the first row.
    template <int kBytes>
    void pack_sides(std::int64_t row, int lane, int count, u8* panel) const {
        std::int64_t superblock = 0;
        for (std::int64_t block = 0; block < panel_of.num_blocks; ++block) {
            u8* codes = panel + panel_of.offset(block);
            u8* to = codes + (panel_of.stop(block) - panel_of.start(block)) * panel_of.input_bytes;
            copy_side<kBytes>(call.scales, call.scale_stride, block, row, count, to + lane * kBytes);
            if (call.weight.zeros) copy_side<1>(call.zeros, call.zero_stride, block, row, count, to + kLanes * kBytes + lane);
            if (call.weight.offsets) {
                copy_side<kBytes>(call.zeros, call.zero_stride, block, row, count, to + (kLanes + lane) * kBytes);
            }
            if (!panel_of.begins_superblock(block)) continue;
            u8* before = codes - panel_of.superblock_bytes;
            copy_side<2>(call.superblock_scales, call.superblock_scale_stride, superblock, row, count, before + lane * 2);
            if (call.weight.offsets) {
                copy_side<2>(call.superblock_offsets, call.superblock_offset_stride, superblock, row, count,
                             before + (kLanes + lane) * 2);
            }
            ++superblock;
        }
    }

    // What `count` rows have at an index, side by side.
    template <int kBytes>
    static void copy_side(const u8* from, std::int64_t stride, std::int64_t index, std::int64_t row, int count, u8* to) {
        from += row * stride + index * kBytes;
        for (int i = 0; i < count; ++i) std::memcpy(to + i * kBytes, from + i * stride, kBytes);
    }
};

}  // namespace longhelix::ISA
