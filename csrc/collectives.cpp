#include "collectives.hpp"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <system_error>
#include <thread>

#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "numbers.hpp"

namespace longhelix {

namespace {

constexpr std::size_t kSlotBytes = 256 * 1024;
// Below this every rank sums all slots by itself, one round; above, each sums its share and gathers the others'.
constexpr std::size_t kDirectBytes = 32 * 1024;
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

struct Span {
    std::size_t first, count;
};

// Rank's share of `count` items, in whole cache lines where they suffice, so that ranks write apart.
Span share(std::size_t count, std::size_t item_bytes, int rank, int size) {
    std::size_t line = std::max<std::size_t>(1, 64 / item_bytes);
    std::size_t each = (count / size + line - 1) / line * line;
    std::size_t first = std::min(count, each * rank);
    std::size_t stop = rank == size - 1 ? count : std::min(count, first + each);
    return {first, stop - first};
}

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

// Bits of all inputs in all bits of the result (the finaliser of MurmurHash3).
std::uint64_t mix(std::uint64_t bits) {
    bits = (bits ^ bits >> 33) * 0xff51afd7ed558ccd;
    bits = (bits ^ bits >> 33) * 0xc4ceb9fe1a85ec53;
    return bits ^ bits >> 33;
}

}  // namespace

std::string title(Collective kind, std::uint64_t ordinal) {
    return std::string(words(kind)) + " " + std::to_string(ordinal);
}

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

// From its begin to its end a collective is what the channel's rounds belong to.
class Channel::Running {
  public:
    Running(Channel& channel, Collective kind, std::uint64_t size) : channel_(channel) {
        channel.call_ = {channel.call_.ordinal + 1, size, kind};
        std::uint64_t bits = mix(size << 8 | static_cast<std::uint64_t>(kind));
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

std::byte* Channel::slot(int rank) const { return reinterpret_cast<Rank*>(segment_)[rank].slots[round_ & 1]; }

Channel::Post& Channel::post(int rank) const { return reinterpret_cast<Rank*>(segment_)[rank].post; }

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

template <typename Write, typename Read>
void Channel::round(Write write, Read read) {
    ++round_;
    write(slot(rank_));
    Post& own = post(rank_);
    own.calls[round_ & 1] = call_;
    own.posted.store(round_);  // sequentially consistent against the waiters that are read next
    if (own.waiters.load() > 0) futex_wake(own.posted);
    for (int peer = 0; peer < size_; ++peer) {
        if (peer == rank_) continue;
        wait_for(peer, round_);
        check_same(peer);
    }
    read();
}

void Channel::all_reduce(void* values, std::size_t count, Number number) {
    dispatch(number, [&]<typename T>(T) {
        Running running(*this, Collective::all_reduce, count * sizeof(T));
        T* next = static_cast<T*>(values);
        std::size_t chunk = (count * sizeof(T) <= kDirectBytes ? kDirectBytes : kSlotBytes) / sizeof(T);
        for (std::size_t left = count; left > 0;) {
            std::size_t now = std::min(left, chunk);
            bool direct = now * sizeof(T) <= kDirectBytes;
            Span own = direct ? Span{0, now} : share(now, sizeof(T), rank_, size_);
            std::vector<const T*> parts(size_);
            round([&](std::byte* slot) { std::memcpy(slot, next, now * sizeof(T)); },
                  [&] {
                      for (int rank = 0; rank < size_; ++rank) {
                          parts[rank] = reinterpret_cast<const T*>(slot(rank)) + own.first;
                      }
                      sum(parts.data(), size_, next + own.first, own.count);
                  });
            if (!direct) {
                round([&](std::byte* slot) { std::memcpy(slot, next + own.first, own.count * sizeof(T)); },
                      [&] {
                          for (int rank = 0; rank < size_; ++rank) {
                              Span other = share(now, sizeof(T), rank, size_);
                              if (rank != rank_) {
                                  std::memcpy(next + other.first, slot(rank), other.count * sizeof(T));
                              }
                          }
                      });
            }
            next += now;
            left -= now;
        }
    });
}

void Channel::all_reduce_add(void* values, const void* residual, void* out, std::size_t count, Number number) {
    all_reduce(values, count, number);
    dispatch(number, [&]<typename T>(T) {
        add(static_cast<const T*>(residual), static_cast<const T*>(values), static_cast<T*>(out), count);
    });
}

void Channel::exchange(const void* out, const float* lse, std::size_t rows, const std::int64_t* places,
                       const std::vector<int>& heads, std::size_t head_size, Number number, void* merged) {
    Running running(*this, places ? Collective::exchange_among_holders : Collective::exchange, rows);
    auto place_of = [&](int rank, std::size_t row) {
        return places ? places[rank * rows + row] : static_cast<std::int64_t>(row);
    };
    dispatch(number, [&]<typename T>(T) {
        const T* from = static_cast<const T*>(out);
        T* to = static_cast<T*>(merged);
        std::size_t all_heads = 0, before = 0, most = 1;
        for (int rank = 0; rank < size_; ++rank) {
            if (rank < rank_) before += heads[rank];
            all_heads += heads[rank];
            most = std::max<std::size_t>(most, heads[rank]);
        }
        // A slot has one window for every receiver: some rows of some of its heads, each row's outputs before its LSEs.
        std::size_t head_bytes = head_size * sizeof(T), window = kSlotBytes / size_ / 64 * 64;
        std::size_t heads_at_once = std::min(most, window / (head_bytes + sizeof(float)));
        if (heads_at_once == 0) throw std::invalid_argument("a head is too large for a group of this many ranks");
        std::size_t rows_at_once = window / (heads_at_once * (head_bytes + sizeof(float)));
        std::vector<const T*> states(size_);
        std::vector<float> seen(size_);
        auto exchange_some = [&](std::size_t first_row, std::size_t num_rows, std::size_t first_head) {
            auto heads_of = [&](int rank) {
                std::size_t all = heads[rank];
                return all > first_head ? std::min(heads_at_once, all - first_head) : 0;
            };
            round(
                [&](std::byte* slot) {
                    std::size_t head = first_head;
                    for (int rank = 0; rank < size_; ++rank, slot += window) {
                        std::size_t count = heads_of(rank), row_bytes = count * (head_bytes + sizeof(float));
                        if (rank != rank_) {
                            for (std::size_t row = 0; row < num_rows; ++row) {
                                std::int64_t own_row = place_of(rank_, first_row + row);
                                if (own_row < 0) continue;
                                std::size_t at = own_row * all_heads + head;
                                std::byte* place = slot + row * row_bytes;
                                std::memcpy(place, from + at * head_size, count * head_bytes);
                                std::memcpy(place + count * head_bytes, lse + at, count * sizeof(float));
                                exchanged_bytes_ += row_bytes;
                            }
                        }
                        head += heads[rank];
                    }
                },
                [&] {
                    std::size_t count = heads_of(rank_), row_bytes = count * (head_bytes + sizeof(float));
                    for (std::size_t row = 0; row < num_rows; ++row) {
                        for (std::size_t head = 0; head < count; ++head) {
                            int parts = 0;
                            for (int rank = 0; rank < size_; ++rank) {
                                std::int64_t row_there = place_of(rank, first_row + row);
                                if (row_there < 0) continue;
                                std::size_t own = row_there * all_heads + before + first_head + head;
                                const std::byte* place = slot(rank) + rank_ * window + row * row_bytes;
                                states[parts] = rank == rank_
                                                    ? from + own * head_size
                                                    : reinterpret_cast<const T*>(place + head * head_bytes);
                                std::memcpy(&seen[parts],
                                            rank == rank_ ? reinterpret_cast<const std::byte*>(lse + own)
                                                          : place + count * head_bytes + head * sizeof(float),
                                            sizeof(float));
                                ++parts;
                            }
                            std::size_t at = (first_row + row) * heads[rank_] + first_head + head;
                            merge(states.data(), seen.data(), parts, to + at * head_size, head_size);
                        }
                    }
                });
        };
        for (std::size_t head = 0; head < most; head += heads_at_once) {
            for (std::size_t row = 0; row < rows; row += rows_at_once) {
                exchange_some(row, std::min(rows_at_once, rows - row), head);
            }
        }
    });
}

void Channel::reduce_scatter(const void* input, void* output, std::size_t count, Number number) {
    dispatch(number, [&]<typename T>(T) {
        Running running(*this, Collective::reduce_scatter, count * sizeof(T));
        // A slot holds a window of every rank's part, one after the other.
        std::size_t window = kSlotBytes / sizeof(T) / size_;
        const T* in = static_cast<const T*>(input);
        T* out = static_cast<T*>(output);
        for (std::size_t first = 0; first < count; first += window) {
            std::size_t now = std::min(window, count - first);
            round(
                [&](std::byte* slot) {
                    for (int rank = 0; rank < size_; ++rank) {
                        std::memcpy(reinterpret_cast<T*>(slot) + rank * window, in + rank * count + first,
                                    now * sizeof(T));
                    }
                },
                [&] {
                    std::vector<const T*> parts(size_);
                    for (int rank = 0; rank < size_; ++rank) {
                        parts[rank] = reinterpret_cast<const T*>(slot(rank)) + rank_ * window;
                    }
                    sum(parts.data(), size_, out + first, now);
                });
        }
    });
}

void Channel::all_gather(const void* input, void* output, std::size_t bytes) {
    Running running(*this, Collective::all_gather, bytes);
    const std::byte* in = static_cast<const std::byte*>(input);
    std::byte* out = static_cast<std::byte*>(output);
    for (std::size_t first = 0; first < bytes; first += kSlotBytes) {
        std::size_t now = std::min(kSlotBytes, bytes - first);
        round([&](std::byte* slot) { std::memcpy(slot, in + first, now); },
              [&] {
                  for (int rank = 0; rank < size_; ++rank) {
                      std::memcpy(out + rank * bytes + first, slot(rank), now);
                  }
              });
    }
}

void Channel::all_to_all(const std::byte* send, const std::vector<std::size_t>& send_bytes, std::byte* received,
                         const std::vector<std::size_t>& received_bytes) {
    Running running(*this, Collective::all_to_all, 0);
    // A slot has one window for every receiver; whoever has the largest piece of all sets the number of rounds.
    std::size_t window = kSlotBytes / size_ / 64 * 64;
    std::size_t largest = *std::max_element(send_bytes.begin(), send_bytes.end());
    std::uint32_t rounds = static_cast<std::uint32_t>(std::max<std::size_t>(1, (largest + window - 1) / window));
    for (std::uint32_t done = 0; done < rounds; ++done) {
        std::size_t first = done * window;
        auto length = [&](std::size_t bytes) { return bytes > first ? std::min(window, bytes - first) : 0; };
        round(
            [&](std::byte* slot) {
                post(rank_).rounds[round_ & 1] = rounds;
                const std::byte* piece = send;
                for (int rank = 0; rank < size_; ++rank) {
                    std::size_t now = length(send_bytes[rank]);
                    if (now > 0) std::memcpy(slot + rank * window, piece + first, now);
                    piece += send_bytes[rank];
                }
            },
            [&] {
                std::byte* piece = received;
                for (int rank = 0; rank < size_; ++rank) {
                    std::size_t now = length(received_bytes[rank]);
                    if (now > 0) std::memcpy(piece + first, slot(rank) + rank_ * window, now);
                    piece += received_bytes[rank];
                    rounds = std::max(rounds, post(rank).rounds[round_ & 1]);
                }
            });
    }
}

void Channel::broadcast(void* values, std::size_t bytes, int root) {
    Running running(*this, Collective::broadcast, bytes);
    std::byte* all = static_cast<std::byte*>(values);
    for (std::size_t first = 0; first < bytes; first += kSlotBytes) {
        std::size_t now = std::min(kSlotBytes, bytes - first);
        round(
            [&](std::byte* slot) {
                if (rank_ == root) std::memcpy(slot, all + first, now);
            },
            [&] {
                if (rank_ != root) std::memcpy(all + first, slot(root), now);
            });
    }
}

void Channel::barrier() {
    Running running(*this, Collective::barrier, 0);
    round([](std::byte*) {}, [] {});
}

}  // namespace longhelix
