// Kernels that measure and test the GPU-driven engine. What a user's kernel calls is peerway_device.cuh; these only call it.
//
// `cargo xtask kernels` makes driven.ptx of it.

#include "peerway_device.cuh"

typedef peerway_u32 u32;
typedef peerway_u64 u64;

static __device__ __forceinline__ u64 cycles() {
    u64 now;
    asm volatile("mov.u64 %0, %%clock64;" : "=l"(now));
    return now;
}

// How long this GPU takes for a cycle: two clocks at the start and the end of a kernel.
struct Clocks {
    u64 cycles;
    u64 nanoseconds;
};

static __device__ void begin(Clocks *clocks) {
    clocks->cycles = cycles();
    clocks->nanoseconds = peerway__nanoseconds();
}

static __device__ void end(Clocks *clocks) {
    clocks->cycles = cycles() - clocks->cycles;
    clocks->nanoseconds = peerway__nanoseconds() - clocks->nanoseconds;
}

// Pushes of one command by one thread: cycles of each.
extern "C" __global__ void driven_push_one(const peerway_proxy *proxy, u64 rounds, u64 *times, Clocks *clocks, int *status) {
    begin(clocks);
    for (u64 i = 0; i < rounds; i++) {
        u64 start = cycles();
        int pushed = peerway__one(proxy, 0, PEERWAY_OP_NOP, 0, 0, 0, 0, 0);
        times[i] = cycles() - start;
        if (pushed != PEERWAY_OK) *status = pushed;
    }
    end(clocks);
}

// Pushes of 32 by one warp.
extern "C" __global__ void driven_push_warp(const peerway_proxy *proxy, u64 rounds, u64 *times, Clocks *clocks, int *status) {
    if (threadIdx.x == 0) begin(clocks);
    for (u64 i = 0; i < rounds; i++) {
        u64 start = cycles();
        int pushed = peerway__warp(proxy, 0, PEERWAY_OP_NOP, 0, 0, 0, 0, 0, true);
        if (threadIdx.x == 0) times[i] = cycles() - start;
        if (pushed != PEERWAY_OK) *status = pushed;
    }
    if (threadIdx.x == 0) end(clocks);
}

// All warps push commands that do nothing, as fast as they can.
extern "C" __global__ void driven_flood(const peerway_proxy *proxy, u64 batches, int *status) {
    u32 ring = peerway_ring_for_warp(proxy);
    for (u64 i = 0; i < batches; i++) {
        int pushed = peerway__warp(proxy, ring, PEERWAY_OP_NOP, 0, 0, 0, 0, 0, true);
        if (pushed != PEERWAY_OK) *status = pushed;
    }
}

// Commands that are answered: cycles until the answer is seen.
extern "C" __global__ void driven_round_trip(const peerway_proxy *proxy, u32 peer, u64 rounds, u64 *times, Clocks *clocks, int *status) {
    begin(clocks);
    for (u64 i = 0; i < rounds; i++) {
        u64 start = cycles();
        int answered = peerway_quiet(proxy, 0, peer);
        times[i] = cycles() - start;
        if (answered != PEERWAY_OK) *status = answered;
    }
    end(clocks);
}

// Puts of `len` bytes: each lane of each warp has slots of its own, `stride` apart, on both sides; then quiet.
extern "C" __global__ void driven_puts(const peerway_proxy *proxy, u32 peer, u64 dst, u64 src, u64 len, u64 stride, u64 slots,
                                       u64 batches, u32 counter, int *status) {
    u32 ring = peerway_ring_for_warp(proxy);
    u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    u64 threads = (u64)gridDim.x * blockDim.x;
    for (u64 i = 0; i < batches; i++) {
        u64 at = (thread + i * threads) % slots * stride;
        int pushed = counter == ~0u ? peerway_put_warp(proxy, ring, peer, dst + at, src + at, len)
                                    : peerway_put_with_count_warp(proxy, ring, peer, dst + at, src + at, len, counter);
        if (pushed != PEERWAY_OK) *status = pushed;
    }
    if (threadIdx.x % 32 == 0) {
        int quiet = peerway_quiet(proxy, ring, peer);
        if (quiet != PEERWAY_OK) *status = quiet;
    }
}

// Writes words of a pattern; a word tells its place and the seed.
static __device__ __forceinline__ u32 pattern(u64 word, u32 seed) { return (u32)(word * 2654435761u) ^ seed; }

static __device__ void fill(u32 *at, u64 words, u32 seed, u32 thread, u32 threads) {
    for (u64 i = thread; i < words; i += threads) at[i] = pattern(i, seed);
}

static __device__ u32 wrong(const u32 *at, u64 words, u32 seed, u32 thread, u32 threads) {
    u32 bad = 0;
    for (u64 i = thread; i < words; i += threads) bad += ((volatile const u32 *)at)[i] != pattern(i, seed);
    return bad;
}

extern "C" __global__ void driven_fill(u32 *at, u64 words, u32 seed) {
    fill(at, words, seed, blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x);
}

extern "C" __global__ void driven_check(const u32 *at, u64 words, u32 seed, u32 *bad) {
    u32 found = wrong(at, words, seed, blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x);
    if (found) atomicAdd(bad, found);
}

// One block: sends `len` bytes with a count, and waits for the same back; cycles of a whole round. Every payload is new and is
// checked by the other side. Messages land in two places in turn, so that the next one does not fall into what is still being checked.
extern "C" __global__ void driven_ping(const peerway_proxy *proxy, u32 peer, u64 dst, u64 src, u32 *source, const u32 *landing, u64 len,
                                       u32 counter, u64 first, u64 rounds, u64 *times, Clocks *clocks, u32 *bad, int *status) {
    __shared__ int stop;
    if (threadIdx.x == 0) stop = 0, begin(clocks);
    for (u64 i = 0; i < rounds; i++) {
        fill(source, len / 4, (u32)(first + i), threadIdx.x, blockDim.x);
        __syncthreads();
        u64 place = (first + i) % 2 * len;
        if (threadIdx.x == 0) {
            u64 start = cycles();
            int pushed = peerway_put_with_count(proxy, 0, peer, dst + place, src, len, counter);
            int came = peerway_wait_counter(proxy, counter, first + i + 1, peer);
            times[i] = cycles() - start;
            if (pushed != PEERWAY_OK || came != PEERWAY_OK) *status = stop = pushed ? pushed : came;
        }
        __syncthreads();
        if (stop) break;
        u32 found = wrong(landing + place / 4, len / 4, ~(u32)(first + i), threadIdx.x, blockDim.x);
        if (found) atomicAdd(bad, found);
    }
    if (threadIdx.x == 0) end(clocks);
}

extern "C" __global__ void driven_pong(const peerway_proxy *proxy, u32 peer, u64 dst, u64 src, u32 *source, const u32 *landing, u64 len,
                                       u32 counter, u64 first, u64 rounds, u32 *bad, int *status) {
    __shared__ int stop;
    if (threadIdx.x == 0) stop = 0;
    for (u64 i = 0; i < rounds; i++) {
        // Made before it is asked for, so that only the way is measured.
        fill(source, len / 4, ~(u32)(first + i), threadIdx.x, blockDim.x);
        __syncthreads();
        u64 place = (first + i) % 2 * len;
        if (threadIdx.x == 0) {
            int came = peerway_wait_counter(proxy, counter, first + i + 1, peer);
            int pushed = peerway_put_with_count(proxy, 0, peer, dst + place, src, len, counter);
            // It is filled anew next.
            if (pushed == PEERWAY_OK) pushed = peerway_quiet(proxy, 0, peer);
            if (pushed != PEERWAY_OK || came != PEERWAY_OK) *status = stop = came ? came : pushed;
        }
        __syncthreads();
        if (stop) break;
        u32 found = wrong(landing + place / 4, len / 4, (u32)(first + i), threadIdx.x, blockDim.x);
        if (found) atomicAdd(bad, found);
    }
}

// A layer of a model: fills its part of a window, and sends it with a count. The step is read from memory, so that a captured graph
// does something new each time.
extern "C" __global__ void driven_layer(const peerway_proxy *proxy, u32 peer, u64 dst, u64 src, u32 *source, u64 len, u32 counter,
                                        const u64 *step, u32 layer, int *status) {
    fill(source, len / 4, (u32)(*step * 1000 + layer), threadIdx.x, blockDim.x);
    __syncthreads();
    if (threadIdx.x == 0) {
        int pushed = peerway_put_with_count(proxy, peerway_ring_for_warp(proxy), peer, dst, src, len, counter);
        if (pushed != PEERWAY_OK) *status = pushed;
    }
}

// The same without sending, to know what sending adds.
extern "C" __global__ void driven_layer_alone(u32 *source, u64 len, const u64 *step, u32 layer) {
    fill(source, len / 4, (u32)(*step * 1000 + layer), threadIdx.x, blockDim.x);
}

// The next step, at the end of a graph. A layer may only be written again when the other side has read it.
extern "C" __global__ void driven_next_step(const peerway_proxy *proxy, u32 peer, u32 counter, u64 *step, int *status) {
    if (proxy) {
        int came = peerway_wait_counter(proxy, counter, *step + 1, peer);
        if (came != PEERWAY_OK) *status = came;
    }
    *step += 1;
}

// The other side: takes each layer as it comes, checks it, and at the end of a step says so.
extern "C" __global__ void driven_consume(const peerway_proxy *proxy, u32 peer, const u32 *landing, u64 len, u32 layers, u32 first_counter,
                                          u32 done_counter, u64 steps, u32 *bad, int *status) {
    __shared__ int stop;
    if (threadIdx.x == 0) stop = 0;
    __syncthreads();
    for (u64 step = 0; step < steps; step++) {
        for (u32 layer = 0; layer < layers; layer++) {
            if (threadIdx.x == 0) {
                int came = peerway_wait_counter(proxy, first_counter + layer, step + 1, peer);
                if (came != PEERWAY_OK) *status = stop = came;
            }
            __syncthreads();
            if (stop) return;
            u32 found = wrong(landing + layer * (len / 4), len / 4, (u32)(step * 1000 + layer), threadIdx.x, blockDim.x);
            if (found) atomicAdd(bad, found);
            __syncthreads();
        }
        if (threadIdx.x == 0) {
            int pushed = peerway_signal(proxy, 0, peer, done_counter);
            if (pushed != PEERWAY_OK) *status = stop = pushed;
        }
        __syncthreads();
        if (stop) return;
    }
}

// Waits for a counter; what the wait said.
extern "C" __global__ void driven_wait(const peerway_proxy *proxy, u32 counter, u64 value, u32 peer, int *status) {
    *status = peerway_wait_counter(proxy, counter, value, peer);
}

// One put and a quiet; what quiet said.
extern "C" __global__ void driven_put_quiet(const peerway_proxy *proxy, u32 peer, u64 dst, u64 src, u64 len, int *status) {
    int pushed = peerway_put(proxy, 0, peer, dst, src, len);
    *status = pushed ? pushed : peerway_quiet(proxy, 0, peer);
}

// Sends one put at a time with a count and waits for an answer on another counter: what a forwarded arrival takes.
extern "C" __global__ void driven_relay(const peerway_proxy *proxy, u32 peer, u64 dst, u64 src, u64 len, u32 counter, u32 answer, u64 first,
                                        u64 rounds, u64 *times, Clocks *clocks, int *status) {
    begin(clocks);
    for (u64 i = 0; i < rounds; i++) {
        u64 start = cycles();
        int pushed = peerway_put_with_count(proxy, 0, peer, dst, src, len, counter);
        int came = peerway_wait_counter(proxy, answer, first + i + 1, peer);
        times[i] = cycles() - start;
        if (pushed != PEERWAY_OK || came != PEERWAY_OK) {
            *status = pushed ? pushed : came;
            break;
        }
    }
    end(clocks);
}
