// Copies of many pieces by the GPU's own threads.
//
// Addresses are of GPU memory or of pinned host memory; lists may lie in pinned host memory and are read
// from there once. A warp takes GROUP entries, whose description its first lanes fetch together, and copies
// one after the other, 16 bytes a lane where both ends are aligned alike. No header is needed to compile this.
//
// `cargo xtask kernels` makes copy.ptx of it, which is what the engine loads.

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

// Bytes [0, len) by `lanes` threads of which this is `lane`. Vectors of `T` from the first aligned byte on,
// eight of them under way per thread; what is before and after goes byte by byte.
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

// Pieces of any length, listed.
extern "C" __global__ void __launch_bounds__(256) peerway_copy_runs(const Run *runs, u32 count) {
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

// Blocks of one length on both sides, named by index.
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

// A few small pieces, described in the launch itself, by one block. Their end is told by a word in host
// memory, which is seen sooner than an event.
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
    // Every thread's stores before the flag, for the host and for other GPUs.
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) {
        *(volatile u32 *)flag = value;
    }
}
