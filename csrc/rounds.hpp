// The rounds of which collectives are made, and the segment that they go over: the inside of Channel.
#pragma once

#include "collectives.hpp"

namespace longhelix {

constexpr std::size_t kSlotBytes = 256 * 1024;

// A rank's own cache lines in the segment: only it writes `posted`; those that wait for it count themselves.
struct alignas(128) Channel::Post {
    std::atomic<std::uint32_t> posted;
    std::atomic<std::uint32_t> waiters;
    // Beside each slot: how many rounds an all-to-all takes, by this rank's largest piece; what the round belongs to.
    std::uint32_t rounds[2];
    Call calls[2];
};

struct alignas(4096) Channel::Rank {
    Post post;
    alignas(4096) std::byte slots[2][kSlotBytes];
};

// Bits of all inputs in all bits of the result (the finaliser of MurmurHash3).
inline std::uint64_t mix_bits(std::uint64_t bits) {
    bits = (bits ^ bits >> 33) * 0xff51afd7ed558ccd;
    bits = (bits ^ bits >> 33) * 0xc4ceb9fe1a85ec53;
    return bits ^ bits >> 33;
}

// From its begin to its end a collective is what the channel's rounds belong to.
class Channel::Running {
  public:
    Running(Channel& channel, Collective kind, std::uint64_t size) : channel_(channel) {
        channel.call_ = {channel.call_.ordinal + 1, size, kind};
        std::uint64_t bits = mix_bits(size << 8 | static_cast<std::uint64_t>(kind));
        channel.fingerprint_ = channel.fingerprint_ * kFingerprintFactor + bits;
        show(kind);
    }
    ~Running() { show(Collective::none); }
    Running(const Running&) = delete;
    Running& operator=(const Running&) = delete;

  private:
    void show(Collective kind) {
        channel_.progress_.store(channel_.call_.ordinal << 8 | static_cast<std::uint64_t>(kind),
                                 std::memory_order_relaxed);
    }

    Channel& channel_;
};

inline std::byte* Channel::slot(int rank) const { return reinterpret_cast<Rank*>(segment_)[rank].slots[round_ & 1]; }

inline Channel::Post& Channel::post(int rank) const { return reinterpret_cast<Rank*>(segment_)[rank].post; }

template <typename Write, typename Read>
void Channel::round(Write write, Read read) {
    ++round_;
    write(slot(rank_));
    meet();
    read();
}

}  // namespace longhelix
