#include "collectives.hpp"

#include <algorithm>
#include <cstring>

#include "numbers.hpp"
#include "rounds.hpp"

namespace longhelix {

namespace {

// Below this every rank sums all slots by itself, one round; above, each sums its share and gathers the others'.
constexpr std::size_t kDirectBytes = 32 * 1024;

struct Share {
    std::size_t first, count;
};

// Rank's share of `count` items, in whole cache lines where they suffice, so that ranks write apart.
Share share_of(std::size_t count, std::size_t item_bytes, int rank, int size) {
    std::size_t line = std::max<std::size_t>(1, 64 / item_bytes);
    std::size_t each = (count / size + line - 1) / line * line;
    std::size_t first = std::min(count, each * rank);
    std::size_t stop = rank == size - 1 ? count : std::min(count, first + each);
    return {first, stop - first};
}

}  // namespace

void Channel::all_reduce(void* values, std::size_t count, Number number) {
    dispatch(number, [&]<typename T>(T) {
        Running running(*this, Collective::all_reduce, count * sizeof(T));
        T* next = static_cast<T*>(values);
        std::size_t chunk = (count * sizeof(T) <= kDirectBytes ? kDirectBytes : kSlotBytes) / sizeof(T);
        for (std::size_t left = count; left > 0;) {
            std::size_t now = std::min(left, chunk);
            bool direct = now * sizeof(T) <= kDirectBytes;
            Share own = direct ? Share{0, now} : share_of(now, sizeof(T), rank_, size_);
            std::vector<const T*> terms(size_);
            round([&](std::byte* slot) { std::memcpy(slot, next, now * sizeof(T)); },
                  [&] {
                      for (int rank = 0; rank < size_; ++rank) {
                          terms[rank] = reinterpret_cast<const T*>(slot(rank)) + own.first;
                      }
                      sum(terms.data(), size_, next + own.first, own.count);
                  });
            if (!direct) {
                round([&](std::byte* slot) { std::memcpy(slot, next + own.first, own.count * sizeof(T)); },
                      [&] {
                          for (int rank = 0; rank < size_; ++rank) {
                              Share other = share_of(now, sizeof(T), rank, size_);
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
    if (head_size > kLongestHead) {
        throw std::invalid_argument("heads of more than " + std::to_string(kLongestHead) + " channels are not merged");
    }
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
                            int holders = 0;
                            for (int rank = 0; rank < size_; ++rank) {
                                std::int64_t row_there = place_of(rank, first_row + row);
                                if (row_there < 0) continue;
                                std::size_t own = row_there * all_heads + before + first_head + head;
                                const std::byte* place = slot(rank) + rank_ * window + row * row_bytes;
                                states[holders] = rank == rank_
                                                    ? from + own * head_size
                                                    : reinterpret_cast<const T*>(place + head * head_bytes);
                                std::memcpy(&seen[holders],
                                            rank == rank_ ? reinterpret_cast<const std::byte*>(lse + own)
                                                          : place + count * head_bytes + head * sizeof(float),
                                            sizeof(float));
                                ++holders;
                            }
                            std::size_t at = (first_row + row) * heads[rank_] + first_head + head;
                            merge(states.data(), seen.data(), holders, to + at * head_size, head_size);
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
        // A slot holds a window of every rank's share, one after the other.
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
                    std::vector<const T*> terms(size_);
                    for (int rank = 0; rank < size_; ++rank) {
                        terms[rank] = reinterpret_cast<const T*>(slot(rank)) + rank_ * window;
                    }
                    sum(terms.data(), size_, out + first, now);
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
