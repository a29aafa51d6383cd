// The next rows of sequences that decode, of the numbers that are kept for each (compute/runner/sequence_state.py).
#pragma once

#include <cstdint>
#include <utility>

namespace longhelix {

struct Advance {
    std::int64_t* numbers;  // a line for each sequence
    std::int64_t columns;   // of a line: those below, then one for each KVP rank, 1 if it keeps KV of the sequence
    const std::int64_t* lines;  // of the B sequences
    std::int64_t num_rows;      // B
    const std::int64_t* bounds;  // by extent: where a sequence's blocks begin and end
    const std::int64_t* blocks;
    std::int64_t block_tokens;
    std::int64_t kvp_rank;
    std::int64_t* rows;  // what is written: see below

    // kShift is what is added to the length for the next row's position.
    enum Column { kLength, kLocalLength, kLastOwner, kLastToken, kExtent, kShift, kHeld };

    // Every sequence goes on by a token. Writes B last tokens; then, of the b sequences that keep KV here, the position,
    // the slot and the limit of the next row, each with room for B; b + 1 first rows, with room for B + 1; and where
    // their blocks begin and end. Returns b, and whether all KVP ranks keep KV of all of them.
    std::pair<std::int64_t, bool> run() const {
        std::int64_t *tokens = rows, *positions = tokens + num_rows, *slots = positions + num_rows,
                     *limits = slots + num_rows, *starts = limits + num_rows, *extents = starts + num_rows + 1;
        std::int64_t held = 0;
        bool everywhere = true;
        for (std::int64_t row = 0; row < num_rows; ++row) {
            std::int64_t* line = numbers + lines[row] * columns;
            tokens[row] = line[kLastToken];
            std::int64_t position = line[kLength]++;
            for (std::int64_t i = kHeld; i < columns; ++i) everywhere &= line[i] != 0;
            if (!line[kHeld + kvp_rank]) continue;
            const std::int64_t* bound = bounds + 2 * line[kExtent];
            std::int64_t local = line[kLocalLength];
            bool mine = line[kLastOwner] == kvp_rank;
            positions[held] = position + line[kShift];
            slots[held] = mine ? blocks[bound[0] + local / block_tokens] * block_tokens + local % block_tokens : -1;
            limits[held] = line[kLocalLength] = local + mine;
            starts[held] = held;
            extents[2 * held] = bound[0];
            extents[2 * held + 1] = bound[1];
            ++held;
        }
        starts[held] = held;
        return {held, everywhere};
    }
};

}  // namespace longhelix
