// Items that threads share: each has a run of them, which lie one after the other in memory, and helps others when its
// own is done. A thread that waits for its core does not keep the rest.
#pragma once

#include <atomic>
#include <cstdint>

#include "threads.hpp"

namespace longhelix {

class Runs {
public:
    explicit Runs(std::int64_t num_items)
        : count_(threads()), runs_(static_cast<Run*>(scratch(7, static_cast<std::size_t>(count_) * sizeof(Run)))) {
        for (int t = 0; t < count_; ++t) runs_[t] = {num_items * t / count_, num_items * (t + 1) / count_};
    }

    // f(item) for what `thread` gets; all threads together get all items.
    template <typename F>
    void take(int thread, F f) const {
        for (int other = 0; other < count_; ++other) {
            Run& run = runs_[(thread + other) % count_];
            std::atomic_ref next(run.next);
            for (std::int64_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < run.stop;) f(item);
        }
    }

private:
    struct alignas(64) Run {
        std::int64_t next, stop;
    };

    int count_;
    Run* runs_;
};

}  // namespace longhelix
