#include "rounds.hpp"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <system_error>

#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace longhelix {

namespace {

// Spinning pays while a peer is about to post. It ends soon, so that an idle or overbooked core is given away.
constexpr auto kSpin = std::chrono::microseconds(20);
constexpr auto kYield = std::chrono::microseconds(200);
constexpr long kSleepNs = 100'000'000;  // between looks at whether a silent peer still lives

using Clock = std::chrono::steady_clock;

void pause_core() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb");
#endif
}

void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t value) {
    timespec timeout{0, kSleepNs};
    syscall(SYS_futex, &word, FUTEX_WAIT, value, &timeout, nullptr, 0);
}

void futex_wake(std::atomic<std::uint32_t>& word) {
    syscall(SYS_futex, &word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

// Round numbers wrap around; they are never further apart than two.
bool reached(std::uint32_t posted, std::uint32_t round) { return static_cast<std::int32_t>(posted - round) >= 0; }

const char* words(Collective kind) {
    switch (kind) {
        case Collective::none: return "no collective";
        case Collective::all_reduce: return "all-reduce";
        case Collective::reduce_scatter: return "reduce-scatter";
        case Collective::all_gather: return "all-gather";
        case Collective::all_to_all: return "all-to-all";
        case Collective::exchange: return "exchange";
        case Collective::exchange_among_holders: return "exchange among holders";
        case Collective::broadcast: return "broadcast";
        case Collective::barrier: return "barrier";
    }
    return "unknown collective";
}

std::string describe(const Call& call) {
    bool rows = call.kind == Collective::exchange || call.kind == Collective::exchange_among_holders;
    std::string size = call.size ? " of " + std::to_string(call.size) + (rows ? " rows" : " bytes") : "";
    return title(call.kind, call.ordinal) + size;
}

}  // namespace

std::string title(Collective kind, std::uint64_t ordinal) {
    return std::string(words(kind)) + " " + std::to_string(ordinal);
}

std::size_t Channel::segment_bytes(int size) { return size * sizeof(Rank); }

Channel::Channel(int fd, int rank, std::vector<int> pids, std::vector<int> names, double timeout_s)
    : rank_(rank),
      size_(static_cast<int>(pids.size())),
      timeout_s_(timeout_s),
      pids_(std::move(pids)),
      names_(std::move(names)) {
    cpu_set_t cores;
    fits_cores_ = sched_getaffinity(0, sizeof cores, &cores) == 0 && size_ <= CPU_COUNT(&cores);
    void* mapped = mmap(nullptr, segment_bytes(size_), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (mapped == MAP_FAILED) {
        throw std::system_error(errno, std::generic_category(), "cannot map the shared segment");
    }
    segment_ = static_cast<std::byte*>(mapped);
    for (int pid : pids_) {
        // A process id can be given to another process; a descriptor of the process cannot. Systems that have none, or
        // have no more of them, leave the id.
        pidfds_.push_back(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
    }
}

Channel::~Channel() {
    for (int pidfd : pidfds_) {
        if (pidfd >= 0) close(pidfd);
    }
    munmap(segment_, segment_bytes(size_));
}

Channel::Progress Channel::progress() const {
    std::uint64_t now = progress_.load(std::memory_order_relaxed);
    return {now >> 8, static_cast<Collective>(now & 0xff)};
}

std::string Channel::name(int rank) const { return "rank " + std::to_string(names_[rank]); }

bool Channel::has_ended(int rank) const {
    if (pidfds_[rank] < 0) return kill(pids_[rank], 0) != 0 && errno == ESRCH;
    pollfd ended{pidfds_[rank], POLLIN, 0};
    return poll(&ended, 1, 0) > 0;
}

void Channel::check_alive(int rank) const {
    if (!has_ended(rank)) return;
    throw PeerLost(name(rank) + " (process " + std::to_string(pids_[rank]) + ") has ended before " + describe(call_));
}

void Channel::check_same(int rank) const {
    const Call& other = post(rank).calls[round_ & 1];
    if (other == call_) return;
    throw CollectivesDiffer(name(rank) + " is in " + describe(other) + " where " + name(rank_) + " is in " +
                            describe(call_) + ": all ranks must run the same collectives");
}

void Channel::wait_for(int rank, std::uint32_t round) {
    Post& peer = post(rank);
    auto arrived = [&] { return reached(peer.posted.load(std::memory_order_acquire), round); };
    if (arrived()) return;
    auto start = Clock::now();
    if (fits_cores_) {
        while (Clock::now() - start < kSpin) {
            for (int i = 0; i < 32; ++i) {
                if (arrived()) return;
                pause_core();
            }
        }
    }
    while (Clock::now() - start < kYield) {
        if (arrived()) return;
        sched_yield();
    }
    peer.waiters.fetch_add(1);
    double waited_s = 0;
    for (;;) {
        std::uint32_t posted = peer.posted.load();
        if (reached(posted, round)) break;
        auto before = Clock::now();
        futex_wait(peer.posted, posted);
        if (arrived()) break;
        // A look takes no longer unless this process was stopped, and then the peer most likely was as well.
        std::chrono::duration<double> look = Clock::now() - before;
        waited_s += std::min(look.count(), 2e-9 * kSleepNs);
        try {
            check_alive(rank);
            if (waited_s > timeout_s_) {
                throw PeerLost(name(rank) + " did not take part in " + describe(call_) + " for " +
                               std::to_string(static_cast<int>(timeout_s_)) + " s");
            }
        } catch (...) {
            peer.waiters.fetch_sub(1);
            throw;
        }
    }
    peer.waiters.fetch_sub(1);
}

void Channel::meet() {
    Post& own = post(rank_);
    own.calls[round_ & 1] = call_;
    own.posted.store(round_);  // sequentially consistent against the waiters that are read next
    if (own.waiters.load() > 0) futex_wake(own.posted);
    for (int peer = 0; peer < size_; ++peer) {
        if (peer == rank_) continue;
        wait_for(peer, round_);
        check_same(peer);
    }
}

}  // namespace longhelix
