// Native calls as they come from Python: kept while a tape is recorded, timed while somebody asks for it.
#pragma once

#include <time.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <vector>

namespace longhelix {

// What the time of a call counts as.
enum class Kind { attention, products, rotation, collectives, other };
inline constexpr std::array<const char*, 5> kKindNames{"attention", "products", "rotation", "collectives", "other"};

inline std::int64_t monotonic_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * std::int64_t{1'000'000'000} + now.tv_nsec;
}

inline std::atomic<bool> timing{false};
inline std::array<std::atomic<std::int64_t>, kKindNames.size()> spent_ns{};

// Runs a call, and counts its time if that is asked for.
template <typename F>
void timed(Kind kind, const F& call) {
    if (!timing.load(std::memory_order_relaxed)) return call();
    std::int64_t start_ns = monotonic_ns();
    call();
    spent_ns[static_cast<std::size_t>(kind)] += monotonic_ns() - start_ns;
}

// The native calls of one step, to be run again without Python between them. What they point to must stay where it is.
class Tape {
  public:
    std::size_t size() const { return calls_.size(); }

    template <typename F>
    void keep(Kind kind, F call) {
        calls_.push_back({kind, call});
    }

    void run() const {
        for (const auto& [kind, call] : calls_) timed(kind, call);
    }

  private:
    struct Call {
        Kind kind;
        std::function<void()> call;
    };
    std::vector<Call> calls_;
};

// That of each thread, so that what another thread calls meanwhile is not on it.
inline thread_local Tape* recording = nullptr;

// Runs a call, and keeps it if a tape is being recorded.
template <typename F>
void perform(Kind kind, F call) {
    if (recording) recording->keep(kind, call);
    timed(kind, call);
}

}  // namespace longhelix
