// The next rows of sequences that decode, of the numbers that are kept for each (compute/runner/sequence_state.py).
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

namespace longhelix {

struct Advance {
    std::int64_t* numbers;  // a line for each sequence
    std::int64_t columns;   // of a line: those below, then one for each KVP rank, 1 if it keeps KV of the sequence
    const std::int64_t* lines;  // of the B sequences
    std::int64_t num_rows;      // B
    const std::int64_t* bounds;  // by extent: where a sequence's blocks begin and end
    const std::int64_t* blocks;  // (G, group_stride): ids of the blocks here, by KV group
    std::int64_t num_groups;     // G
    std::int64_t group_stride;
    const std::int64_t* places;  // which of its sequence's blocks each of them is, counted over all KVP ranks
    std::int64_t block_tokens;
    std::int64_t kvp_rank;
    const std::int64_t* limits_of_views;  // (V, 2): tokens of a window, or of a chunk; the other one is 0
    std::int64_t num_views;               // V
    std::int64_t* rows;                   // what is written: see below

    // kShift is what is added to the length for the next row's position.
    enum Column { kLength, kLocalLength, kLastOwner, kLastToken, kExtent, kShift, kHeld };

    // Every sequence goes on by a token. Writes B last tokens; then, of the b sequences that keep KV here, the position,
    // the slot and the limit of the next row, each with room for B; b + 1 first rows, with room for B + 1; and where
    // their blocks begin and end; and for each view the first local token that the next row sees, with room for B; and
    // the slots in each group but the first one, with room for B.
    // Returns b, and whether all KVP ranks keep KV of all of them.
    std::pair<std::int64_t, bool> run() const {
        std::int64_t *tokens = rows, *positions = tokens + num_rows, *slots = positions + num_rows,
                     *limits = slots + num_rows, *starts = limits + num_rows, *extents = starts + num_rows + 1,
                     *firsts = extents + 2 * num_rows, *window_slots = firsts + num_views * num_rows;
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
            slots[held] = mine ? slot(0, bound, local) : -1;
            for (std::int64_t group = 1; group < num_groups; ++group) {
                window_slots[(group - 1) * num_rows + held] = mine ? slot(group, bound, local) : -1;
            }
            limits[held] = line[kLocalLength] = local + mine;
            starts[held] = held;
            extents[2 * held] = bound[0];
            extents[2 * held + 1] = bound[1];
            for (std::int64_t view = 0; view < num_views; ++view) {
                firsts[view * num_rows + held] = first_local(bound, first_seen(view, position));
            }
            ++held;
        }
        starts[held] = held;
        return {held, everywhere};
    }

    // Where a sequence's local token is in the pool of a group.
    std::int64_t slot(std::int64_t group, const std::int64_t* bound, std::int64_t local) const {
        std::int64_t block = blocks[group * group_stride + bound[0] + local / block_tokens];
        return block * block_tokens + local % block_tokens;
    }

    // The first position that a row sees.
    std::int64_t first_seen(std::int64_t view, std::int64_t position) const {
        std::int64_t window = limits_of_views[2 * view], chunk = limits_of_views[2 * view + 1];
        return window ? std::max<std::int64_t>(position + 1 - window, 0) : position / chunk * chunk;
    }

    // How many of a sequence's tokens before a position lie here.
    std::int64_t first_local(const std::int64_t* bound, std::int64_t position) const {
        const std::int64_t *begin = places + bound[0], *end = places + bound[1];
        const std::int64_t* found = std::lower_bound(begin, end, position / block_tokens);
        bool is_here = found != end && *found == position / block_tokens;
        return (found - begin) * block_tokens + (is_here ? position % block_tokens : 0);
    }
};

}  // namespace longhelix
