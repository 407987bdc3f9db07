// Kernels that measure and test the GPU-driven engine. User kernels include peerway_device.cuh;
// these kernels only call it.
//
// `cargo xtask kernels` compiles this file to driven.ptx.

#include "peerway_device.cuh"

typedef peerway_u32 u32;
typedef peerway_u64 u64;

static __device__ __forceinline__ u64 cycles() {
    u64 now;
    asm volatile("mov.u64 %0, %%clock64;" : "=l"(now));
    return now;
}

// Readings of two clocks at the start and end of a kernel, which give the duration of a cycle on
// this GPU.
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

// One thread pushes one command at a time. Records the cycles of each push.
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

// One warp pushes 32 commands at a time.
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

// All warps push no-op commands as fast as they can.
extern "C" __global__ void driven_flood(const peerway_proxy *proxy, u64 batches, int *status) {
    u32 ring = peerway_ring_for_warp(proxy);
    for (u64 i = 0; i < batches; i++) {
        int pushed = peerway__warp(proxy, ring, PEERWAY_OP_NOP, 0, 0, 0, 0, 0, true);
        if (pushed != PEERWAY_OK) *status = pushed;
    }
}

// Commands with a reply. Records the cycles until the reply is visible.
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

// Puts of `len` bytes, then quiet. Each lane of each warp has its own slots, `stride` apart, on
// both sides.
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

// A pattern whose words encode their position and the seed.
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

// One block sends `len` bytes with a count and waits for a reply of the same kind. Records the
// cycles of each round trip. Every payload is new, and the other side checks it. Messages alternate
// between two places, so that the next one does not overwrite one that is still being checked.
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
        // Fill the reply before the request comes, so that only the round trip is measured.
        fill(source, len / 4, ~(u32)(first + i), threadIdx.x, blockDim.x);
        __syncthreads();
        u64 place = (first + i) % 2 * len;
        if (threadIdx.x == 0) {
            int came = peerway_wait_counter(proxy, counter, first + i + 1, peer);
            int pushed = peerway_put_with_count(proxy, 0, peer, dst + place, src, len, counter);
            // The source is filled again next.
            if (pushed == PEERWAY_OK) pushed = peerway_quiet(proxy, 0, peer);
            if (pushed != PEERWAY_OK || came != PEERWAY_OK) *status = stop = came ? came : pushed;
        }
        __syncthreads();
        if (stop) break;
        u32 found = wrong(landing + place / 4, len / 4, (u32)(first + i), threadIdx.x, blockDim.x);
        if (found) atomicAdd(bad, found);
    }
}

// A layer of a model: fills its part of a window and sends it with a count. It reads the step from
// memory, so that each launch of a captured graph sends new data.
extern "C" __global__ void driven_layer(const peerway_proxy *proxy, u32 peer, u64 dst, u64 src, u32 *source, u64 len, u32 counter,
                                        const u64 *step, u32 layer, int *status) {
    fill(source, len / 4, (u32)(*step * 1000 + layer), threadIdx.x, blockDim.x);
    __syncthreads();
    if (threadIdx.x == 0) {
        int pushed = peerway_put_with_count(proxy, peerway_ring_for_warp(proxy), peer, dst, src, len, counter);
        if (pushed != PEERWAY_OK) *status = pushed;
    }
}

// The same without sending, to measure the cost of sending.
extern "C" __global__ void driven_layer_alone(u32 *source, u64 len, const u64 *step, u32 layer) {
    fill(source, len / 4, (u32)(*step * 1000 + layer), threadIdx.x, blockDim.x);
}

// Advances the step at the end of a graph. A layer may be written again only after the other side
// has read it.
extern "C" __global__ void driven_next_step(const peerway_proxy *proxy, u32 peer, u32 counter, u64 *step, int *status) {
    if (proxy) {
        int came = peerway_wait_counter(proxy, counter, *step + 1, peer);
        if (came != PEERWAY_OK) *status = came;
    }
    *step += 1;
}

// The other side: waits for each layer, checks it, and signals the end of each step.
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

// Waits for a counter and stores the result of the wait.
extern "C" __global__ void driven_wait(const peerway_proxy *proxy, u32 counter, u64 value, u32 peer, int *status) {
    *status = peerway_wait_counter(proxy, counter, value, peer);
}

// Does one put and a quiet, and stores the result of the quiet.
extern "C" __global__ void driven_put_quiet(const peerway_proxy *proxy, u32 peer, u64 dst, u64 src, u64 len, int *status) {
    int pushed = peerway_put(proxy, 0, peer, dst, src, len);
    *status = pushed ? pushed : peerway_quiet(proxy, 0, peer);
}

// Sends one put at a time with a count, and waits for an answer on another counter. Measures a
// forwarded arrival.
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
