// Collectives between processes of one host, over one shared segment.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.hpp"

namespace longhelix {

// A peer has ended, or takes no part.
struct PeerLost : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// A peer is in another collective than this rank.
struct CollectivesDiffer : std::runtime_error {
    using std::runtime_error::runtime_error;
};

enum class Collective : std::uint8_t {
    none, all_reduce, reduce_scatter, all_gather, all_to_all, exchange, exchange_among_holders, broadcast, barrier
};

// A collective as all ranks see it. `ordinal`: how many the group has begun with it. `size`: rows of an exchange, else
// bytes; 0 where ranks differ in it.
struct Call {
    std::uint64_t ordinal;
    std::uint64_t size;
    Collective kind;

    bool operator==(const Call&) const = default;
};

// One rank's end of a group. Every rank of the group makes the same calls in the same order; where one does not, all of
// them throw CollectivesDiffer.
//
// A collective is a sequence of rounds. In a round each rank fills its own slot, posts the round's number, waits until
// all have posted, and reads the others' slots. A rank has two slots and alternates: who has posted round r + 1 has
// read round r, so the slot of round r is free again at round r + 2 without a second synchronisation.
//
// Sums run in rank order in float32 (or wider), rounded once: all ranks get the same bits, whatever the message size.
class Channel {
  public:
    static constexpr std::uint64_t kFingerprintFactor = 0x100000001b3;

    static std::size_t segment_bytes(int size);

    // `fd` is a zeroed file of segment_bytes that all ranks share; `pids` are the processes of ranks 0, 1, ..., `names`
    // the numbers by which errors call them.
    Channel(int fd, int rank, std::vector<int> pids, std::vector<int> names, double timeout_s);
    ~Channel();
    Channel(const Channel&) = delete;
    Channel& operator=(const Channel&) = delete;

    void all_reduce(void* values, std::size_t count, Number number);
    // sum over the ranks of `values`, which it uses as memory, plus `residual`, in `out`.
    void all_reduce_add(void* values, const void* residual, void* out, std::size_t count, Number number);
    void reduce_scatter(const void* input, void* output, std::size_t count, Number number);
    void all_gather(const void* input, void* output, std::size_t bytes);
    void all_to_all(const std::byte* send, const std::vector<std::size_t>& send_bytes, std::byte* received,
                    const std::vector<std::size_t>& received_bytes);
    // Helix's exchange: every rank sends each other one that one's query heads of its partial attention, its rows x q x
    // `head_size` of `number` and rows x q LSEs, and merges what it receives into (rows, own heads, head_size).
    // `heads` is how the q heads fall to the ranks. `places` (ranks x rows): where among its own rows a rank has a row,
    // negative where it has none of it, which then is neither sent nor merged; null: every rank has all rows.
    void exchange(const void* out, const float* lse, std::size_t rows, const std::int64_t* places,
                  const std::vector<int>& heads, std::size_t head_size, Number number, void* merged);
    void broadcast(void* values, std::size_t bytes, int root);
    void barrier();

    // What `exchange` has written for other ranks since the beginning.
    std::uint64_t exchanged_bytes() const { return exchanged_bytes_; }

    // How many collectives have begun, and which of them runs now; for any thread, at any time.
    struct Progress {
        std::uint64_t begun;
        Collective current;
    };
    Progress progress() const;

    // Of the kinds and sizes of all collectives so far, in order: a polynomial in kFingerprintFactor, modulo 2^64.
    std::uint64_t fingerprint() const { return fingerprint_; }

  private:
    struct Post;
    struct Rank;
    class Running;

    template <typename Write, typename Read>
    void round(Write write, Read read);
    void meet();  // post the round, and wait until all have
    std::byte* slot(int rank) const;
    Post& post(int rank) const;
    void wait_for(int rank, std::uint32_t round);
    void check_alive(int rank) const;
    bool has_ended(int rank) const;
    void check_same(int rank) const;
    std::string name(int rank) const;

    int rank_;
    int size_;
    double timeout_s_;
    bool fits_cores_;
    std::uint32_t round_ = 0;
    std::uint64_t exchanged_bytes_ = 0;
    std::uint64_t fingerprint_ = 0;
    Call call_{};                              // what runs, or ran last
    std::atomic<std::uint64_t> progress_{0};  // begun << 8 | current
    std::byte* segment_;
    std::vector<int> pids_;
    std::vector<int> names_;
    std::vector<int> pidfds_;
};

// "all-reduce 57"
std::string title(Collective kind, std::uint64_t ordinal);

}  // namespace longhelix
