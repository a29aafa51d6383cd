#include "threads.hpp"

#include <cstdlib>
#include <new>

#include <dlfcn.h>

namespace longhelix {

namespace {

using GompParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
using GompNumber = int (*)();

GompParallel gomp_parallel = nullptr;
GompNumber gomp_thread = nullptr;
GompNumber gomp_threads = nullptr;
int count = 1;

struct Call {
    void (*body)(void*, int);
    void* context;
};

struct Buffer {
    void* data = nullptr;
    std::size_t bytes = 0;
    ~Buffer() { std::free(data); }
};

}  // namespace

void set_threads(int number) { count = number; }

int threads() { return gomp_parallel ? count : 1; }

bool use_openmp(const char* library) {
    void* handle = dlopen(library, RTLD_NOW | RTLD_NOLOAD);
    if (!handle) return false;
    auto start = reinterpret_cast<GompParallel>(dlsym(handle, "GOMP_parallel"));
    auto thread = reinterpret_cast<GompNumber>(dlsym(handle, "omp_get_thread_num"));
    auto threads = reinterpret_cast<GompNumber>(dlsym(handle, "omp_get_num_threads"));
    if (!start || !thread || !threads) return false;
    gomp_parallel = start;
    gomp_thread = thread;
    gomp_threads = threads;
    return true;
}

void parallel(void (*body)(void*, int), void* context) {
    if (threads() == 1) return body(context, 0);
    Call call{body, context};
    gomp_parallel(
        [](void* data) {
            Call* call = static_cast<Call*>(data);
            // The runtime may give fewer threads than were asked for; the work of all is done all the same.
            for (int thread = gomp_thread(); thread < count; thread += gomp_threads()) {
                call->body(call->context, thread);
            }
        },
        &call, static_cast<unsigned>(count), 0);
}

void* scratch(int slot, std::size_t bytes) {
    thread_local Buffer buffers[9];
    Buffer& buffer = buffers[slot];
    if (buffer.bytes < bytes) {
        std::free(buffer.data);
        buffer.bytes = (bytes + 63) / 64 * 64;
        buffer.data = std::aligned_alloc(64, buffer.bytes);
        if (!buffer.data) {
            buffer.bytes = 0;
            throw std::bad_alloc();
        }
    }
    return buffer.data;
}

}  // namespace longhelix
