// All kernels for one instruction set; compiled once for each (CMakeLists.txt says with what flags).
#include "angles.hpp"
#include "attention.hpp"
#include "blocks.hpp"
#include "candidates.hpp"
#include "draw.hpp"
#include "experts.hpp"
#include "expand.hpp"
#include "linear.hpp"
#include "pack.hpp"
#include "pack_codes.hpp"
#include "route.hpp"
#include "split_blocks.hpp"
#include "write.hpp"

namespace longhelix::ISA {

namespace {

// Of keys and values that are integers, as many planes of units as `kNumPlanes`.
template <typename Call, template <typename> typename Kernel, int kNumPlanes = 2>
auto on_pool(const Call& call) {
    switch (call.pool.number) {
        case Number::float32: return Kernel<Float32>(call).run();
        case Number::float16: return Kernel<Float16>(call).run();
        case Number::int8: return Kernel<PoolInt8<kNumPlanes>>(call).run();
        case Number::float8: return Kernel<Float8>(call).run();
        case Number::int4: return Kernel<PoolInt4<kNumPlanes>>(call).run();
        case Number::nvfp4: return Kernel<Nvfp4>(call).run();
        default: return Kernel<BFloat16>(call).run();
    }
}

bool attend(const Attention& call) {
    if (call.pool.rounded) return on_pool<Attention, Attend, 1>(call);
    return on_pool<Attention, Attend>(call);
}

void expand(const Expansion& call) {
    switch (call.latents.number) {
        case Number::float32: return Expand<Float32>(call).run();
        case Number::float16: return Expand<Float16>(call).run();
        case Number::nvfp4: return Expand<Nvfp4>(call).run();
        default: return Expand<BFloat16>(call).run();
    }
}

template <typename Call, template <typename> typename Kernel>
void with_codes(Number number, const Call& call) {
    switch (number) {
        case Number::e4m3: return Kernel<E4M3>(call).run();
        case Number::e2m1: return Kernel<E2M1>(call).run();
        case Number::code8: return Kernel<Code8>(call).run();
        case Number::code6: return Kernel<Code6>(call).run();
        case Number::nl4: return Kernel<Nl4>(call).run();
        default: return Kernel<Code4>(call).run();
    }
}

// Weights that are made from rows of numbers.
template <typename Call, template <typename> typename Kernel>
void with_numbers(Number number, const Call& call) {
    switch (number) {
        case Number::float32: return Kernel<Float32>(call).run();
        case Number::float16: return Kernel<Float16>(call).run();
        case Number::int8: return Kernel<Int8>(call).run();
        case Number::int4: return Kernel<Int4>(call).run();
        case Number::w8a8: return Kernel<W8A8>(call).run();
        default: return Kernel<BFloat16>(call).run();
    }
}

template <typename Call, template <typename> typename Kernel>
void with_weight(const Weight& weight, const Call& call) {
    if (weight.rounds_inputs) return Kernel<Rounded>(call).run();
    if (is_code(weight.number)) return with_codes<Call, Kernel>(weight.number, call);
    with_numbers<Call, Kernel>(weight.number, call);
}

void linear(const Linear& call) { with_weight<Linear, Multiply>(call.weight, call); }

void round(const Rounding& call) { RoundRows(call).run(); }

void route(const Route& call) { RouteRows(call).run(); }

void experts(const Experts& call) {
    const std::vector<Weight>& down = call.set->down;
    with_weight<Experts, RunExperts>(down.empty() ? Weight{nullptr, Number::bfloat16, 0} : down[0], call);
}

void angles(const Angles& call) { TakeAngles(call).run(); }

void penalise(const Penalty& call) { PenaliseRows(call).run(); }

void candidates(const Candidates& call) { TakeCandidates(call).run(); }

void draw(const Draws& call) { TakeDraws(call).run(); }

void dequantise(const Blocks& call) { Dequantise(call).run(); }

void split_blocks(const BlockSplit& call) { SplitBlocks(call).run(); }

void pack(const Packing& call) { with_numbers<Packing, PackRows>(call.number, call); }

void pack_codes(const CodePacking& call) { with_codes<CodePacking, PackCodes>(call.weight.number, call); }

// Every thread reads from several places in turn: alone, a stream waits at the end of each page.
double read(const void* data, std::size_t bytes) {
    constexpr int kStreams = 4, kLine = 512;
    double sum = 0.0;
    on_all_threads([&](int thread) {
        std::size_t lines = bytes / (kLine * kStreams * threads());
        const u8* from = static_cast<const u8*>(data) + thread * kStreams * lines * kLine;
        u32x16 sums[8] = {};
        for (std::size_t line = 0; line < lines; ++line) {
            for (int stream = 0; stream < kStreams; ++stream) {
                const u8* place = from + (stream * lines + line) * kLine;
                for (int i = 0; i < 8; ++i) sums[i] += load<u32x16>(place + i * 64);
            }
        }
        double own = 0.0;
        for (int i = 0; i < 8; ++i) {
            u32 lanes[kLanes];
            store(lanes, sums[i]);
            own += lanes[2 * i];
        }
        std::atomic_ref(sum).fetch_add(own);
    });
    return sum;
}

}  // namespace

extern const Kernels table{LONGHELIX_ISA_NAME,
                           attend,
                           expand,
                           on_pool<Write, WriteRows>,
                           on_pool<Rotate, RotateRows>,
                           linear,
                           round,
                           route,
                           experts,
                           angles,
                           penalise,
                           candidates,
                           draw,
                           dequantise,
                           split_blocks,
                           pack,
                           pack_codes,
                           read};

}  // namespace longhelix::ISA
