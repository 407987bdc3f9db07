// Copies of many pieces by the GPU's threads: by a kernel launched for them, or by one that waits
// for them.
//
// Addresses are GPU memory or pinned host memory. Lists may be in pinned host memory, and each
// entry is read once. A warp takes GROUP entries. Its first lanes fetch them together, and the warp
// copies one entry after the other, 16 bytes per lane if both sides have the same alignment.
// Compiling this file needs no header.
//
// `cargo xtask kernels` compiles it to copy.ptx, which the engine loads.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

struct Run {
    u64 src;
    u64 dst;
    u64 len;
};

struct Few {
    u32 count;
    u32 reserved;
    Run runs[64];
};

#define WARP 32u
#define GROUP 4u
#define ALL 0xffffffffu

struct alignas(16) Vector {
    u32 x, y, z, w;
};

// Copies bytes [0, len) with `lanes` threads, of which this is thread `lane`. It uses vectors of
// `T` from the first aligned byte on, with eight in flight per thread. Bytes before and after the
// vectors are copied one by one.
template <typename T>
__device__ __forceinline__ void copy_as(u8 *dst, const u8 *src, u64 len, u32 lane, u32 lanes) {
    u64 head = (sizeof(T) - ((u64)dst & (sizeof(T) - 1))) & (sizeof(T) - 1);
    if (head > len) head = len;
    for (u64 i = lane; i < head; i += lanes) dst[i] = src[i];
    T *to = (T *)(dst + head);
    const T *from = (const T *)(src + head);
    u64 whole = (len - head) / sizeof(T);
    u64 i = lane;
    for (; i + 7 * (u64)lanes < whole; i += 8 * (u64)lanes) {
        T part[8];
#pragma unroll
        for (u32 k = 0; k < 8; k++) part[k] = from[i + k * lanes];
#pragma unroll
        for (u32 k = 0; k < 8; k++) to[i + k * lanes] = part[k];
    }
    for (; i < whole; i += lanes) to[i] = from[i];
    for (u64 j = head + whole * sizeof(T) + lane; j < len; j += lanes) dst[j] = src[j];
}

__device__ __forceinline__ void copy(u64 dst, u64 src, u64 len, u32 lane, u32 lanes) {
    u8 *to = (u8 *)dst;
    const u8 *from = (const u8 *)src;
    u32 apart = (u32)(dst ^ src);
    if ((apart & 15) == 0) {
        copy_as<Vector>(to, from, len, lane, lanes);
    } else if ((apart & 3) == 0) {
        copy_as<u32>(to, from, len, lane, lanes);
    } else {
        copy_as<u8>(to, from, len, lane, lanes);
    }
}

// Copies a list of pieces of any length with all warps of the grid.
__device__ __forceinline__ void copy_listed(const Run *runs, u32 count) {
    u32 lane = threadIdx.x % WARP;
    u64 warps = (u64)gridDim.x * blockDim.x / WARP;
    u64 warp = ((u64)blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    for (u64 first = warp * GROUP; first < count; first += warps * GROUP) {
        u32 here = (u32)(count - first < GROUP ? count - first : GROUP);
        Run mine = {0, 0, 0};
        if (lane < here) mine = runs[first + lane];
        for (u32 k = 0; k < here; k++) {
            u64 src = __shfl_sync(ALL, mine.src, k);
            u64 dst = __shfl_sync(ALL, mine.dst, k);
            u64 len = __shfl_sync(ALL, mine.len, k);
            copy(dst, src, len, lane, WARP);
        }
    }
}

// Copies a list of pieces of any length.
extern "C" __global__ void __launch_bounds__(256) peerway_copy_runs(const Run *runs, u32 count) {
    copy_listed(runs, count);
}

// The same, but reports its end by a word in host memory. The last block to finish writes the word;
// the blocks determine the last one by a counter in device memory. The counter is zero again for
// the next launch, which follows in the same stream.
extern "C" __global__ void __launch_bounds__(256)
    peerway_copy_list(const Run *runs, u32 count, u32 *ended, u32 *flag, u32 value) {
    copy_listed(runs, count);
    __syncthreads();
    if (threadIdx.x != 0) return;
    // After the barrier, this thread's fence also publishes the other threads' stores.
    __threadfence_system();
    if (gridDim.x > 1) {
        if (atomicAdd(ended, 1) != gridDim.x - 1) return;
        *(volatile u32 *)ended = 0;
        // Stores that the other blocks published before they counted also precede the word.
        __threadfence_system();
    }
    *(volatile u32 *)flag = value;
}

// Copies blocks of one length, which are given by index on both sides.
extern "C" __global__ void __launch_bounds__(256)
    peerway_copy_blocks(u64 src, u64 src_stride, const u32 *src_index, u64 dst, u64 dst_stride,
                        const u32 *dst_index, u64 len, u32 count) {
    u32 lane = threadIdx.x % WARP;
    u64 warps = (u64)gridDim.x * blockDim.x / WARP;
    u64 warp = ((u64)blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    for (u64 first = warp * GROUP; first < count; first += warps * GROUP) {
        u32 here = (u32)(count - first < GROUP ? count - first : GROUP);
        u32 from = 0, to = 0;
        if (lane < here) {
            from = src_index[first + lane];
            to = dst_index[first + lane];
        }
        for (u32 k = 0; k < here; k++) {
            u64 s = __shfl_sync(ALL, from, k);
            u64 d = __shfl_sync(ALL, to, k);
            copy(dst + d * dst_stride, src + s * src_stride, len, lane, WARP);
        }
    }
}

// Copies a few small pieces, described in the launch itself, with one block. It reports its end by
// a word in host memory, which becomes visible sooner than an event.
extern "C" __global__ void __launch_bounds__(1024) peerway_copy_few(Few few, u32 *flag, u32 value) {
    u32 lane = threadIdx.x % WARP;
    u32 warps = blockDim.x / WARP;
    if (few.count == 1) {
        copy(few.runs[0].dst, few.runs[0].src, few.runs[0].len, threadIdx.x, blockDim.x);
    } else {
        for (u32 i = threadIdx.x / WARP; i < few.count; i += warps) {
            copy(few.runs[i].dst, few.runs[i].src, few.runs[i].len, lane, WARP);
        }
    }
    // Order every thread's stores before the flag, for the host and for other GPUs.
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) {
        *(volatile u32 *)flag = value;
    }
}

// The resident copier: blocks that wait for tasks in rings in host memory. peer_copy/resident.rs is
// the host side, and explains why no task is lost when the kernel leaves.
//
// At `base`, each block has a line with the number of tasks that it has done in total, and the last
// launch that it has left. After the lines, each block has a ring of slots of four words. The
// highest bit of every used word is a phase that flips with every lap. Words may arrive one by one,
// and the phase distinguishes them from words of the previous lap.

struct Together {
    u64 active;   // The last time that a block had a task.
    u32 leaving;  // The launch that is ending.
    u32 reserved;
};

#define LINE 128u
#define SLOT 32u
#define PHASE 63u
#define VALUE 0x7fffffffffffffffull
// A flag in the word with the length: the task is no copy, but asks the launch named by the first
// word to end.
#define LEAVE (1ull << 62)
// Slots read at once while no tasks come: one line of the bus. After a full read, as many as a warp
// can read.
#define NARROW 4u
#define WIDE 16u
#define GONE 0xffffffffu

__device__ __forceinline__ u64 now() {
    u64 time;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
    return time;
}

__device__ __forceinline__ u64 load_host(u64 at) {
    u64 value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
    return value;
}

__device__ __forceinline__ void load_host_two(u64 at, u64 &first, u64 &second) {
    asm volatile("ld.acquire.sys.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(first), "=l"(second)
                 : "l"(at)
                 : "memory");
}

__device__ __forceinline__ void store_host(u64 at, u64 value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}

__device__ __forceinline__ u64 load_near(const u64 *at) {
    u64 value;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
    return value;
}

__device__ __forceinline__ u32 load_near(const u32 *at) {
    u32 value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}

__device__ __forceinline__ void store_near(u64 *at, u64 value) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}

__device__ __forceinline__ void store_near(u32 *at, u32 value) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

// Orders everything that this thread has observed before its next store, for the host and for other
// GPUs. It is lighter than __threadfence_system, which also orders reads.
__device__ __forceinline__ void release() {
    asm volatile("fence.acq_rel.sys;" ::: "memory");
}

// `slots` is a power of two. Times are in nanoseconds. A launch ends when no block had a task for
// `idle`, and in any case after `stay`, which bounds the time that callers wait for all work on the
// GPU. The kernel uses at most half of a multiprocessor's registers, because other kernels run
// there too.
extern "C" __global__ void __launch_bounds__(512, 2)
    peerway_copy_resident(u64 base, Together *together, u32 slots, u32 launch, u64 idle, u64 stay) {
    __shared__ Run tasks[WIDE];
    __shared__ u32 taken;
    u32 lane = threadIdx.x % WARP;
    u32 warp = threadIdx.x / WARP;
    u32 warps = blockDim.x / WARP;
    u64 line = base + (u64)blockIdx.x * LINE;
    u64 ring = base + (u64)gridDim.x * LINE + (u64)blockIdx.x * slots * SLOT;
    // Only the first warp uses these variables.
    u64 position = warp == 0 ? load_host(line) : 0;
    u64 start = now();
    u32 width = NARROW;
    bool asked = false;
    if (threadIdx.x == 0) store_near(&together->active, start);
    for (bool first = true;; first = false) {
        if (warp == 0) {
            u32 found = 0;
            // Two lanes per slot, so that one read fetches the whole slot: a second read of the
            // same line would wait for the first.
            u32 place = lane / 2;
            u64 one = 0, two = 0;
            // A block looks at its ring at least once, however late it starts.
            bool over = __any_sync(ALL, !first && (asked || now() - start > stay));
            while (!over) {
                // Fetch these along with the slots, which are farther away. One lane loads them,
                // because it sees its own stores.
                u64 active = lane == 0 ? load_near(&together->active) : 0;
                u32 leaving = lane == 0 ? load_near(&together->leaving) : 0;
                bool ready = false;
                if (place < width) {
                    u64 at = position + place;
                    u64 phase = (at / slots & 1) ^ 1;
                    // An acquiring load, so that everything that the host wrote before the task is
                    // visible too.
                    load_host_two(ring + (at & (slots - 1)) * SLOT + lane % 2 * 16, one, two);
                    // The last word of a slot is unused.
                    ready = one >> PHASE == phase && (lane % 2 || two >> PHASE == phase);
                }
                u32 halves = __ballot_sync(ALL, ready);
                // Count the ready slots from the first one on, without a gap.
                u32 missing = ~(halves & halves >> 1) & 0x55555555u;
                found = missing == 0 ? WIDE : (__ffs(missing) - 1) / 2;
                if (found > 0) break;
                width = NARROW;
                u64 time = now();
                // Another block may have been active after this block read its clock.
                bool quiet = time > active && time - active > idle;
                bool end = quiet || leaving == launch || time - start > stay;
                over = __any_sync(ALL, lane == 0 && end);
            }
            one &= VALUE;
            two &= VALUE;
            u64 src = __shfl_sync(ALL, one, lane & ~1u);
            bool wish = lane % 2 && place < found && (one & LEAVE) != 0;
            if (place < found && lane % 2) tasks[place].len = wish ? 0 : one;
            if (place < found && lane % 2 == 0) tasks[place].src = one, tasks[place].dst = two;
            asked = __any_sync(ALL, wish && src == launch);
            width = found == width ? WIDE : NARROW;
            if (lane == 0) taken = over ? GONE : found;
            position += found;
        }
        __syncthreads();
        u32 count = taken;
        if (count == GONE) break;
        // One warp per task, or several if there are fewer tasks than warps.
        u32 each = count < warps ? warps / count : 1;
        for (u32 i = warp / each; i < count; i += warps / each) {
            Run task = tasks[i];
            copy(task.dst, task.src, task.len, warp % each * WARP + lane, each * WARP);
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            // After the barrier, this thread's fence also publishes the other threads' stores.
            release();
            store_host(line, position);
            store_near(&together->active, now());
        }
    }
    if (threadIdx.x == 0) {
        store_near(&together->leaving, launch);
        // A host thread that sees that the block has left also sees all of its copies.
        release();
        store_host(line + 8, launch);
    }
}
