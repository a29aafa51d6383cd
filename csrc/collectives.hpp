// Collectives between processes of one host, over one shared segment.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels.hpp"

namespace longhelix {

// One rank's end of a group. Every rank of the group makes the same calls in the same order.
//
// A collective is a sequence of rounds. In a round each rank fills its own slot, posts the round's number, waits until
// all have posted, and reads the others' slots. A rank has two slots and alternates: who has posted round r + 1 has
// read round r, so the slot of round r is free again at round r + 2 without a second synchronisation.
//
// Sums run in rank order in float32 (or wider), rounded once: all ranks get the same bits, whatever the message size.
class Channel {
  public:
    static std::size_t segment_bytes(int size);

    // `fd` is a zeroed file of segment_bytes that all ranks share; `pids` are the processes of ranks 0, 1, ...
    Channel(int fd, int rank, std::vector<int> pids, double timeout_s);
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
    // negative where it has no part of it, which then is neither sent nor merged; null: every rank has all rows.
    void exchange(const void* out, const float* lse, std::size_t rows, const std::int64_t* places,
                  const std::vector<int>& heads, std::size_t head_size, Number number, void* merged);
    void broadcast(void* values, std::size_t bytes, int root);
    void barrier();

    // What `exchange` has written for other ranks since the beginning.
    std::uint64_t exchanged_bytes() const { return exchanged_bytes_; }

  private:
    struct Post;
    struct Rank;

    template <typename Write, typename Read>
    void round(Write write, Read read);
    std::byte* slot(int rank) const;
    Post& post(int rank) const;
    void wait_for(int rank, std::uint32_t round);
    void check_alive(int rank) const;

    int rank_;
    int size_;
    double timeout_s_;
    bool fits_cores_;
    std::uint32_t round_ = 0;
    std::uint64_t exchanged_bytes_ = 0;
    std::byte* segment_;
    std::vector<int> pids_;
    std::vector<int> pidfds_;
};

}  // namespace longhelix
