// The collectives between processes: real ones, over one shared segment, against what each rank knows that it must get.
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <numeric>
#include <optional>
#include <stdexcept>

#include "../../csrc/collectives.hpp"
#include "testing.hpp"

namespace longhelix {

namespace {

constexpr std::size_t kCounts[] = {0, 1, 999, 70'000};  // of none to more than a slot
constexpr auto kNumbers = {Number::float32,  Number::float64, Number::bfloat16,
                           Number::float16, Number::int32,   Number::int64};

// A rank's number: every type holds it exactly, as it does sums of a few.
int piece(int rank, std::size_t index) { return static_cast<int>((index * 5 + rank * 3) % 7) - 3; }

Matrix pieces(Number number, int rank, std::size_t count) {
    Matrix values(number, 1, static_cast<std::int64_t>(count));
    for (std::size_t i = 0; i < count; ++i) values.set(0, i, piece(rank, i));
    return values;
}

template <typename Expected>
void check_all(const char* name, const Matrix& values, Expected expected) {
    for (std::int64_t i = 0; i < values.columns; ++i) {
        check_near(values.get(0, i), expected(i), 0, std::string(name) + " gives a number that");
    }
}

void run_sums(Channel& channel, int rank, int size, Number number, std::size_t count) {
    auto total = [&](std::size_t index) {
        int sum = 0;
        for (int peer = 0; peer < size; ++peer) sum += piece(peer, index);
        return sum;
    };
    Matrix values = pieces(number, rank, count);
    channel.all_reduce(values.data(), count, number);
    check_all("all_reduce", values, total);

    Matrix more = pieces(number, rank, count), residual = pieces(number, size, count), out = pieces(number, 0, count);
    channel.all_reduce_add(more.data(), residual.data(), out.data(), count, number);
    check_all("all_reduce_add", out, [&](std::size_t i) { return total(i) + piece(size, i); });

    Matrix whole = pieces(number, rank, count * size), share = pieces(number, 0, count);
    channel.reduce_scatter(whole.data(), share.data(), count, number);
    check_all("reduce_scatter", share, [&](std::size_t i) { return total(rank * count + i); });
}

void run_copies(Channel& channel, int rank, int size, std::size_t count) {
    Matrix own = pieces(Number::int32, rank, count), all(Number::int32, 1, static_cast<std::int64_t>(count * size));
    channel.all_gather(own.data(), all.data(), count * 4);
    check_all("all_gather", all, [&](std::size_t i) { return piece(static_cast<int>(i / count), i % count); });
    for (int root = 0; root < size; ++root) {
        Matrix values = pieces(Number::int32, rank, count);
        channel.broadcast(values.data(), count * 4, root);
        check_all("broadcast", values, [&](std::size_t i) { return piece(root, i); });
    }
}

// Pieces of all lengths; rank `idle` sends nothing.
void run_all_to_all(Channel& channel, int rank, int size, int idle) {
    auto count = [&](int from, int to) { return from == idle ? 0 : kCounts[(from + 2 * to + idle) % 4]; };
    std::vector<std::size_t> sent, received;
    std::vector<int> sends, expected;
    for (int peer = 0; peer < size; ++peer) {
        sent.push_back(count(rank, peer) * 4), received.push_back(count(peer, rank) * 4);
        for (std::size_t i = 0; i < count(rank, peer); ++i) sends.push_back(piece(rank + peer, i));
        for (std::size_t i = 0; i < count(peer, rank); ++i) expected.push_back(piece(peer + rank, i));
    }
    sends.shrink_to_fit();
    Matrix out(Number::int32, 1, static_cast<std::int64_t>(expected.size()));
    channel.all_to_all(reinterpret_cast<const std::byte*>(sends.data()), sent, static_cast<std::byte*>(out.data()),
                       received);
    check_all("all_to_all", out, [&](std::size_t i) { return expected[i]; });
}

// Helix's exchange; all ranks make all ranks' inputs, so each knows what it must get. `some`: a rank has a part of two
// rows in three, and its own rows lie one after the other.
void run_exchange(Channel& channel, int rank, Number number, int rows, int head_size, const std::vector<int>& heads,
                  bool some) {
    Random random{};
    int size = static_cast<int>(heads.size()), all_heads = std::accumulate(heads.begin(), heads.end(), 0);
    int first = std::accumulate(heads.begin(), heads.begin() + rank, 0);
    std::vector<Matrix> outs, lses;
    for (int peer = 0; peer < size; ++peer) {
        Matrix& out = outs.emplace_back(number, rows, static_cast<std::int64_t>(all_heads) * head_size);
        Matrix& lse = lses.emplace_back(Number::float32, rows, all_heads);
        out.fill(random, 0.25, 7), lse.fill(random, 0.5, 9);
        for (int row = 0; row < rows; ++row) {
            for (int head = 0; head < all_heads; ++head) {
                if (!random.one_in(4)) continue;
                lse.set(row, head, -INFINITY);
                for (int c = 0; c < head_size; ++c) out.set(row, head * head_size + c, NAN);
            }
        }
    }
    auto has = [&](int peer, int row) { return !some || (row + peer) % 3; };
    std::vector<std::int64_t> places;
    for (int peer = 0; peer < size; ++peer) {
        for (int row = 0, place = 0; row < rows; ++row) places.push_back(has(peer, row) ? place++ : -1);
    }
    std::int64_t own_rows = std::count_if(places.begin() + rank * rows, places.begin() + (rank + 1) * rows,
                                          [](std::int64_t place) { return place >= 0; });
    Matrix out(number, own_rows, static_cast<std::int64_t>(all_heads) * head_size), lse(Number::float32, own_rows, all_heads);
    for (int row = 0; row < rows; ++row) {
        std::int64_t place = places[rank * rows + row];
        if (place < 0) continue;
        for (int c = 0; c < all_heads * head_size; ++c) out.set(place, c, outs[rank].get(row, c));
        for (int head = 0; head < all_heads; ++head) lse.set(place, head, lses[rank].get(row, head));
    }
    Matrix merged(number, rows, static_cast<std::int64_t>(heads[rank]) * head_size);
    std::uint64_t before = channel.exchanged_bytes();
    channel.exchange(out.data(), lse.floats(), rows, some ? places.data() : nullptr, heads, head_size, number,
                     merged.data());
    std::uint64_t head_bytes = head_size * (number == Number::float32 ? 4 : 2) + 4;
    check(channel.exchanged_bytes() - before == own_rows * (all_heads - heads[rank]) * head_bytes,
          "the exchange sends what it should not");
    for (int row = 0; row < rows; ++row) {
        for (int c = 0; c < heads[rank] * head_size; ++c) {
            double sum = 0, total = 0;
            for (int peer = 0; peer < size; ++peer) {
                double weight = std::exp(lses[peer].get(row, first + c / head_size));
                if (weight > 0 && has(peer, row)) sum += weight * outs[peer].get(row, first * head_size + c), total += weight;
            }
            check_near(merged.get(row, c), total ? sum / total : 0.0, number == Number::float32 ? 1e-5 : 0x1p-7,
                       "the exchange gives a number that");
        }
    }
}

void run_all(Channel& channel, int rank, int size) {
    for (std::size_t count : kCounts) {
        for (Number number : kNumbers) run_sums(channel, rank, size, number, count);
        run_copies(channel, rank, size, count);
    }
    for (int idle = 0; idle <= size; ++idle) run_all_to_all(channel, rank, size, idle);
    for (Number number : {Number::float32, Number::bfloat16, Number::float16}) {
        std::vector<int> few{1, 3, 0}, many{7, 0, 16}, most{140, 1, 140};  // whose state is larger than a window
        for (auto heads : {&few, &many, &most}) heads->resize(size);
        for (bool some : {false, true}) {
            run_exchange(channel, rank, number, 0, 16, few, some);
            run_exchange(channel, rank, number, 5, 16, few, some);
            run_exchange(channel, rank, number, 150, 64, many, some);
            run_exchange(channel, rank, number, 2, 512, most, some);
        }
    }
    channel.barrier();
}

// While it lives, the system has no descriptor to give, of a process or anything else.
class NoDescriptors {
  public:
    NoDescriptors() {
        getrlimit(RLIMIT_NOFILE, &before_);
        rlimit none{0, before_.rlim_max};
        setrlimit(RLIMIT_NOFILE, &none);
    }
    ~NoDescriptors() { setrlimit(RLIMIT_NOFILE, &before_); }

  private:
    rlimit before_;
};

// Forks `size - 1` processes; all of them, and this one, run `body` as ranks of one channel. `sees_processes`: by a
// descriptor of each.
void on_ranks(int size, const std::function<void(Channel&, int rank)>& body, bool sees_processes = true) {
    what = std::to_string(size) + " ranks";
    int fd = memfd_create("longhelix", 0);
    check(fd >= 0 && ftruncate(fd, static_cast<off_t>(Channel::segment_bytes(size))) == 0, "there is no segment");
    void* shared = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    auto* pids = static_cast<std::atomic<int>*>(shared);
    int rank = 0;
    for (int peer = 1; peer < size && rank == 0; ++peer) rank = fork() ? 0 : peer;
    pids[rank] = getpid();
    for (int peer = 0; peer < size; ++peer) {
        while (pids[peer] == 0) usleep(100);
    }
    std::vector<int> names(size);
    std::iota(names.begin(), names.end(), 10);
    try {
        std::optional<NoDescriptors> limit;
        if (!sees_processes) limit.emplace();
        Channel channel(fd, rank, std::vector<int>(pids, pids + size), names, 60.0);
        limit.reset();
        body(channel, rank);
    } catch (const std::exception& error) {
        fail(error.what());
    }
    if (rank) std::_Exit(0);
    for (int peer = 1; peer < size; ++peer) {
        int status = 0;
        check(wait(&status) > 0 && status == 0, "a rank has failed");
    }
    munmap(shared, 4096);
    close(fd);
}

// That `call` throws an E of whose message `part` is a part.
template <typename E>
void check_throws(const std::function<void()>& call, const std::string& part) {
    try {
        call();
    } catch (const E& error) {
        return check(std::string(error.what()).find(part) != std::string::npos, error.what());
    }
    fail("there is no error that says " + part);
}

// A peer that is late by several looks at whether it lives, and one that ended before.
void run_without_descriptors() {
    on_ranks(
        2,
        [](Channel& channel, int rank) {
            if (rank) usleep(350'000);
            channel.barrier();
        },
        false);
    what = "a process that has ended";
    int fd = memfd_create("longhelix", 0), gone = fork();
    if (gone == 0) std::_Exit(0);
    check(fd >= 0 && ftruncate(fd, static_cast<off_t>(Channel::segment_bytes(2))) == 0, "there is no segment");
    check(waitpid(gone, nullptr, 0) == gone, "a process does not end");
    Channel channel(fd, 0, {getpid(), gone}, {10, 11}, 60.0);
    check_throws<PeerLost>([&] { channel.barrier(); }, "rank 11 (process " + std::to_string(gone) + ") has ended");
    close(fd);
}

// Ranks in different collectives, or in the same of different sizes: all of them learn it.
void run_differences() {
    on_ranks(3, [](Channel& channel, int rank) {
        std::vector<float> values(64);
        channel.barrier();
        check_throws<CollectivesDiffer>(
            [&] {
                if (rank == 1) {
                    channel.all_gather(values.data(), values.data(), 16);
                } else {
                    channel.all_reduce(values.data(), 64, Number::float32);
                }
            },
            rank == 1 ? "rank 10 is in all-reduce 2 of 256 bytes where rank 11 is in all-gather 2 of 16 bytes"
                      : "rank 11 is in all-gather 2 of 16 bytes where rank " + std::to_string(10 + rank) + " is in all-reduce 2");
    });
    on_ranks(2, [](Channel& channel, int rank) {
        std::vector<float> values(64);
        check_throws<CollectivesDiffer>([&] { channel.all_reduce(values.data(), 64 - rank, Number::float32); },
                                        rank ? "of 256 bytes where rank 11" : "of 252 bytes where rank 10");
    });
}

// What every rank refuses before it begins: they stay together.
void run_too_long_heads() {
    on_ranks(2, [](Channel& channel, int) {
        std::vector<float> out(1026), merged(513), lse(2);
        check_throws<std::invalid_argument>(
            [&] { channel.exchange(out.data(), lse.data(), 1, nullptr, {1, 1}, 513, Number::float32, merged.data()); },
            "more than 512 channels");
        channel.barrier();
        check(channel.progress().begun == 1, "an exchange that was refused counts");
    });
}

}  // namespace

void test_collectives() {
    for (int size : {1, 2, 3}) {
        on_ranks(size, [&](Channel& channel, int rank) { run_all(channel, rank, size); });
    }
    on_ranks(2, [](Channel& channel, int rank) {
        if (rank == 0) check_throws<PeerLost>([&] { channel.barrier(); }, "rank 11 (process ");
    });
    run_without_descriptors();
    run_differences();
    run_too_long_heads();
    std::printf("collectives of 1, 2 and 3 ranks\n");
}

}  // namespace longhelix
