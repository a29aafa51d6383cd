// Work over threads, on the OpenMP runtime that torch has already started, where there is one.
#pragma once

#include <cstddef>

namespace longhelix {

// How many threads `parallel` uses; torch's own number, told by the Python side.
void set_threads(int count);
int threads();

// Take the runtime that `library` (a path of an already loaded library) belongs to: a second one beside torch's would
// have threads of its own, and twice as many threads as cores would spin. False if it has no GOMP_parallel.
bool use_openmp(const char* library);

// body(context, thread) on every thread; returns when all have.
void parallel(void (*body)(void* context, int thread), void* context);

template <typename F>
void on_all_threads(F f) {
    parallel([](void* context, int thread) { (*static_cast<F*>(context))(thread); }, &f);
}

// Memory of the calling thread that grows to what was asked and stays; aligned to 64 bytes.
void* scratch(int slot, std::size_t bytes);

}  // namespace longhelix
