// Transfers that a kernel issues itself.
//
// The host creates a proxy (peerway.gpu, the C library or the Rust crate) and passes a `const
// peerway_proxy *` to the kernel. The kernel writes commands into one of the proxy's rings, and
// threads of the host carry them out. Offsets refer to windows: source offsets to the windows that
// the host registered, destination offsets to the windows that the peer advertised. The host knows
// them.
//
//   peerway_put(proxy, ring, peer, dst, src, bytes)
//       Writes bytes to the peer's memory.
//   peerway_put_with_count(..., counter)
//       The same, and then raises a counter of the peer by one.
//   peerway_signal(proxy, ring, peer, counter)
//       Raises a counter of the peer by one. It does not wait for earlier puts: call peerway_quiet
//       first if the order matters.
//   peerway_put_warp / _with_count_warp / _signal_warp
//       The same by all 32 lanes, with one command per lane, one claim and one fence.
//   peerway_quiet(proxy, ring, peer)
//       Waits until all earlier commands of that ring to that peer are in the peer's memory.
//   peerway_wait_counter(proxy, counter, value, peer)
//       Waits until a counter of this proxy reaches a value.
//
// Every call returns PEERWAY_OK or an error code within the proxy's time-out. No call traps.
// Offsets and lengths are multiples of four bytes, and a put is shorter than 16 MiB. A put sends
// all stores that the calling thread made before it (for the _warp calls: the stores of all lanes).
//
// Any number of threads may use a ring. A ring for every few warps is much faster than one ring for
// all: see peerway_ring_for_warp. Positions are claimed when the kernel runs, so a captured graph
// can be launched again.
//
// While a kernel waits, CUDA cannot do work that requires an idle GPU. Therefore load the code of
// every kernel before (cudaFuncGetAttributes does), allocate no memory while a kernel waits, and
// set CUDA_DEVICE_MAX_CONNECTIONS=32 under MPS.
//
// This header needs no CUDA header, so NVRTC compiles it as it is. A host compiler can compile it
// too: it then implements the same protocol on plain memory.
#ifndef PEERWAY_DEVICE_CUH
#define PEERWAY_DEVICE_CUH

#include "peerway_abi.h"

#define PEERWAY_OK 0
// The ring was full for longer than the time-out. Check that the proxy is armed.
#define PEERWAY_FULL 1
// A push was abandoned while the ring was full. The ring can no longer be used.
#define PEERWAY_RING_DEAD 2
// The answer did not arrive, or the counter did not reach its value, within the time-out.
#define PEERWAY_TIMED_OUT 3
// An earlier command failed. The proxy's fault describes the first such command.
#define PEERWAY_FAILED 4
// An argument is invalid: no such ring, peer or counter, or an offset or length out of range.
#define PEERWAY_BAD_ARGUMENT 5

// For peerway_wait_counter: any peer may raise the counter.
#define PEERWAY_ANY_PEER 0xffffffffu

// Cycles before the first poll for an answer. On an H200 the answer arrives after about 0.9 µs.
#ifndef PEERWAY_ANSWER_CYCLES
#define PEERWAY_ANSWER_CYCLES 900
#endif

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define PEERWAY_CALL static __device__ __forceinline__

// Loads a value that the host wrote before the kernel began and that never changes. The load is not
// volatile, so that the compiler does not repeat it after every fence.
PEERWAY_CALL peerway_u64 peerway__fixed(const peerway_u64 *at) {
    peerway_u64 value;
    asm("ld.global.nc.u64 %0, [%1];" : "=l"(value) : "l"(at));
    return value;
}
PEERWAY_CALL peerway_u32 peerway__fixed(const peerway_u32 *at) {
    peerway_u32 value;
    asm("ld.global.nc.u32 %0, [%1];" : "=r"(value) : "l"(at));
    return value;
}
PEERWAY_CALL peerway_u64 peerway__load(peerway_u64 at) {
    peerway_u64 value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
    return value;
}
// Acquire: later reads are at least as new as the loaded value.
PEERWAY_CALL peerway_u64 peerway__load_acquire(peerway_u64 at) {
    peerway_u64 value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
    return value;
}
PEERWAY_CALL peerway_u32 peerway__load_u32(peerway_u64 at) {
    peerway_u32 value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}
// The _near functions access words in GPU memory that only threads of this GPU use.
PEERWAY_CALL peerway_u64 peerway__load_near(peerway_u64 at) {
    peerway_u64 value;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
    return value;
}
PEERWAY_CALL peerway_u64 peerway__add_near(peerway_u64 at, peerway_u64 count) {
    peerway_u64 before;
    asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], %2;" : "=l"(before) : "l"(at), "l"(count) : "memory");
    return before;
}
PEERWAY_CALL bool peerway__swap_near(peerway_u64 at, peerway_u64 from, peerway_u64 to) {
    peerway_u64 was;
    asm volatile("atom.relaxed.gpu.global.cas.b64 %0, [%1], %2, %3;" : "=l"(was) : "l"(at), "l"(from), "l"(to) : "memory");
    return was == from;
}
PEERWAY_CALL void peerway__max_near(peerway_u64 at, peerway_u64 value) {
    asm volatile("red.relaxed.gpu.global.max.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}
PEERWAY_CALL void peerway__or_near(peerway_u64 at, peerway_u64 bits) {
    asm volatile("red.relaxed.gpu.global.or.b64 [%0], %1;" ::"l"(at), "l"(bits) : "memory");
}
// Stores both halves of a slot. They may become visible one after the other: each has a phase bit.
PEERWAY_CALL void peerway__store_slot(peerway_u64 at, peerway_u64 first, peerway_u64 second) {
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(at), "l"(first), "l"(second) : "memory");
}
// The host and every device see all accesses before the fence before those after it.
PEERWAY_CALL void peerway__fence() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
PEERWAY_CALL peerway_u64 peerway__nanoseconds() {
    peerway_u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}
PEERWAY_CALL void peerway__pause(peerway_u32 cycles) {
    peerway_u32 start, now;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(start));
    do asm volatile("mov.u32 %0, %%clock;" : "=r"(now));
    while (now - start < cycles);
}

#else // compiled for the CPU
#include <sched.h>
#include <time.h>
#define PEERWAY_CALL static inline
PEERWAY_CALL peerway_u64 peerway__fixed(const peerway_u64 *at) { return *at; }
PEERWAY_CALL peerway_u32 peerway__fixed(const peerway_u32 *at) { return *at; }
PEERWAY_CALL peerway_u64 peerway__load(peerway_u64 at) { return __atomic_load_n((peerway_u64 *)at, __ATOMIC_ACQUIRE); }
PEERWAY_CALL peerway_u64 peerway__load_acquire(peerway_u64 at) { return peerway__load(at); }
PEERWAY_CALL peerway_u32 peerway__load_u32(peerway_u64 at) { return __atomic_load_n((peerway_u32 *)at, __ATOMIC_ACQUIRE); }
PEERWAY_CALL peerway_u64 peerway__load_near(peerway_u64 at) { return peerway__load(at); }
PEERWAY_CALL peerway_u64 peerway__add_near(peerway_u64 at, peerway_u64 count) {
    return __atomic_fetch_add((peerway_u64 *)at, count, __ATOMIC_RELAXED);
}
PEERWAY_CALL bool peerway__swap_near(peerway_u64 at, peerway_u64 from, peerway_u64 to) {
    return __atomic_compare_exchange_n((peerway_u64 *)at, &from, to, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}
PEERWAY_CALL void peerway__max_near(peerway_u64 at, peerway_u64 value) {
    peerway_u64 was = peerway__load(at);
    while (was < value && !__atomic_compare_exchange_n((peerway_u64 *)at, &was, value, true, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
    }
}
PEERWAY_CALL void peerway__or_near(peerway_u64 at, peerway_u64 bits) { __atomic_fetch_or((peerway_u64 *)at, bits, __ATOMIC_ACQ_REL); }
PEERWAY_CALL void peerway__store_slot(peerway_u64 at, peerway_u64 first, peerway_u64 second) {
    __atomic_store_n((peerway_u64 *)at, first, __ATOMIC_RELEASE);
    __atomic_store_n((peerway_u64 *)at + 1, second, __ATOMIC_RELEASE);
}
PEERWAY_CALL void peerway__fence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
PEERWAY_CALL peerway_u64 peerway__nanoseconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (peerway_u64)now.tv_sec * 1000000000ull + (peerway_u64)now.tv_nsec;
}
PEERWAY_CALL void peerway__pause(peerway_u32) {}
#endif

// Reads a ring into registers.
PEERWAY_CALL peerway_ring peerway__ring(const peerway_proxy *proxy, peerway_u32 number) {
    const peerway_ring *at = (const peerway_ring *)peerway__fixed(&proxy->ring_table) + number;
    peerway_ring ring;
    ring.slots = peerway__fixed(&at->slots);
    ring.credit = peerway__fixed(&at->credit);
    ring.completed = peerway__fixed(&at->completed);
    ring.claim = peerway__fixed(&at->claim);
    ring.cached = peerway__fixed(&at->cached);
    ring.log2_slots = peerway__fixed(&at->log2_slots);
    ring.reserved = 0;
    return ring;
}

// Whether positions [first, first + count) have room at this credit.
PEERWAY_CALL bool peerway__fits(const peerway_ring &ring, peerway_u64 first, peerway_u32 count, peerway_u64 credit) {
    return first + count <= credit + (1ull << ring.log2_slots);
}

// Waits for room for a claim, or takes the claim back after the time-out.
PEERWAY_CALL int peerway__wait_for_room(const peerway_proxy *proxy, const peerway_ring &ring, peerway_u64 first, peerway_u32 count) {
    peerway_u64 start = peerway__nanoseconds(), bound = peerway__fixed(&proxy->timeout_ns);
    for (;;) {
        if (peerway__load_near(ring.cached) & PEERWAY_DEAD) {
            peerway__swap_near(ring.claim, first + count, first);
            return PEERWAY_RING_DEAD;
        }
        peerway_u64 credit = peerway__load(ring.credit);
        if (peerway__fits(ring, first, count, credit)) {
            peerway__max_near(ring.cached, credit);
            return PEERWAY_OK;
        }
        peerway_u64 waited = peerway__nanoseconds() - start;
        // The swap succeeds only for the last claim. Later claims wait for the same room, and are
        // taken back first.
        if (waited > bound && peerway__swap_near(ring.claim, first + count, first)) return PEERWAY_FULL;
        if (waited > 2 * bound) {
            peerway__or_near(ring.cached, PEERWAY_DEAD);
            return PEERWAY_FULL;
        }
    }
}

// Claims positions. With `fenced`, all earlier stores of the thread are visible to the host and
// every device before the command is stored.
PEERWAY_CALL int peerway__claim(const peerway_proxy *proxy, const peerway_ring &ring, peerway_u32 count, bool fenced, peerway_u64 *first) {
    *first = peerway__add_near(ring.claim, count);
    peerway_u64 cached = peerway__load_near(ring.cached);
    // The fence overlaps with the latency of the two accesses above.
    if (fenced) peerway__fence();
    if (!(cached & PEERWAY_DEAD) && peerway__fits(ring, *first, count, cached)) return PEERWAY_OK;
    return peerway__wait_for_room(proxy, ring, *first, count);
}

PEERWAY_CALL void peerway__store(const peerway_ring &ring, peerway_u64 position, peerway_u64 first, peerway_u64 second) {
    peerway_u64 phase = (position >> ring.log2_slots) & 1 ? 0 : PEERWAY_PHASE;
    peerway_u64 slot = position & ((1ull << ring.log2_slots) - 1);
    peerway__store_slot(ring.slots + 16 * slot, first | phase, second | phase);
}

PEERWAY_CALL peerway_u64 peerway__first(peerway_u64 op, peerway_u32 peer, peerway_u32 counter, peerway_u64 dst, peerway_u64 bytes) {
    return op | (peerway_u64)peer << PEERWAY_PEER_AT | (peerway_u64)counter << PEERWAY_COUNTER_AT |
           bytes / PEERWAY_UNIT << PEERWAY_LEN_AT | dst / PEERWAY_UNIT >> PEERWAY_DST_LOW_BITS << PEERWAY_DST_HIGH_AT;
}

PEERWAY_CALL peerway_u64 peerway__second(peerway_u64 dst, peerway_u64 src) {
    peerway_u64 low = dst / PEERWAY_UNIT & ((1ull << PEERWAY_DST_LOW_BITS) - 1);
    return src / PEERWAY_UNIT | low << PEERWAY_DST_LOW_AT;
}

PEERWAY_CALL bool peerway__sound(const peerway_proxy *proxy, peerway_u32 ring, peerway_u32 peer, peerway_u64 dst, peerway_u64 src,
                                 peerway_u64 bytes, peerway_u32 counter) {
    return ring < peerway__fixed(&proxy->rings) && peer < peerway__fixed(&proxy->peers) && ((dst | src | bytes) & (PEERWAY_UNIT - 1)) == 0 && dst < PEERWAY_MAX_SPACE &&
           src < PEERWAY_MAX_SPACE && bytes <= PEERWAY_MAX_LEN && counter <= 0xffff;
}

// Pushes one command from one thread, `fenced` if bytes go with it. peerway_quiet needs the
// position.
PEERWAY_CALL int peerway__push(const peerway_proxy *proxy, peerway_u32 ring, peerway_u64 first, peerway_u64 second, bool fenced,
                               peerway_u64 *position) {
    const peerway_ring to = peerway__ring(proxy, ring);
    int claimed = peerway__claim(proxy, to, 1, fenced, position);
    if (claimed == PEERWAY_OK) peerway__store(to, *position, first, second);
    return claimed;
}

PEERWAY_CALL int peerway__one(const peerway_proxy *proxy, peerway_u32 ring, peerway_u64 op, peerway_u32 peer, peerway_u64 dst,
                              peerway_u64 src, peerway_u64 bytes, peerway_u32 counter) {
    if (!peerway__sound(proxy, ring, peer, dst, src, bytes, counter)) return PEERWAY_BAD_ARGUMENT;
    peerway_u64 position;
    return peerway__push(proxy, ring, peerway__first(op, peer, counter, dst, bytes), peerway__second(dst, src), true, &position);
}

PEERWAY_CALL int peerway_put(const peerway_proxy *proxy, peerway_u32 ring, peerway_u32 peer, peerway_u64 dst, peerway_u64 src,
                             peerway_u64 bytes) {
    return peerway__one(proxy, ring, PEERWAY_OP_PUT, peer, dst, src, bytes, 0);
}

PEERWAY_CALL int peerway_put_with_count(const peerway_proxy *proxy, peerway_u32 ring, peerway_u32 peer, peerway_u64 dst, peerway_u64 src,
                                        peerway_u64 bytes, peerway_u32 counter) {
    return peerway__one(proxy, ring, PEERWAY_OP_PUT_COUNT, peer, dst, src, bytes, counter);
}

PEERWAY_CALL int peerway_signal(const peerway_proxy *proxy, peerway_u32 ring, peerway_u32 peer, peerway_u32 counter) {
    return peerway__one(proxy, ring, PEERWAY_OP_SIGNAL, peer, 0, 0, 0, counter);
}

// Whether a wait must end without success: PEERWAY_OK means that it goes on. `failed` is the
// address of a word that is not zero after a failure, or zero for none.
PEERWAY_CALL int peerway__given_up(const peerway_proxy *proxy, peerway_u64 failed, peerway_u64 start) {
    if (failed && peerway__load_u32(failed)) return PEERWAY_FAILED;
    if (peerway__nanoseconds() - start > peerway__fixed(&proxy->timeout_ns)) return PEERWAY_TIMED_OUT;
#if !defined(__CUDACC__) && !defined(__CUDACC_RTC__)
    sched_yield();
#endif
    return PEERWAY_OK;
}

// The copy of a word that this thread polls. Reads of one cache line by many threads are
// serialised, so threads are spread over several copies.
PEERWAY_CALL peerway_u64 peerway__copy_of(peerway_u64 words) {
    peerway_u32 spread = 0;
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
    peerway_u32 warp, unit;
    asm("mov.u32 %0, %%warpid;" : "=r"(warp));
    asm("mov.u32 %0, %%smid;" : "=r"(unit));
    spread = warp + unit;
#endif
    return words + spread % PEERWAY_LINES * PEERWAY_LINE;
}

// Waits until a word is at least `want`. Later reads are at least as new. Only one read is in
// flight, and a read across PCIe takes 1.2 µs. A first read that is too early costs another one,
// hence the pause before it.
PEERWAY_CALL int peerway__await(const peerway_proxy *proxy, peerway_u64 words, peerway_u64 want, peerway_u64 failed, peerway_u32 pause,
                                peerway_u64 *seen) {
    peerway_u64 word = peerway__copy_of(words), start = peerway__nanoseconds();
    peerway__pause(pause);
    for (peerway_u32 round = 1;; round++) {
        *seen = peerway__load_acquire(word);
        if (*seen >= want) return PEERWAY_OK;
        if (round % 16 == 0) {
            int over = peerway__given_up(proxy, failed, start);
            if (over != PEERWAY_OK) return over;
        }
    }
}

// Call it from one thread. If this kernel then notifies the peer (by a signal or a counter), the
// peer sees the bytes.
PEERWAY_CALL int peerway_quiet(const peerway_proxy *proxy, peerway_u32 ring, peerway_u32 peer) {
    if (!peerway__sound(proxy, ring, peer, 0, 0, 0, 0)) return PEERWAY_BAD_ARGUMENT;
    peerway_u64 position, seen;
    // A quiet sends no bytes, so it needs no fence.
    int pushed = peerway__push(proxy, ring, peerway__first(PEERWAY_OP_QUIET, peer, 0, 0, 0), 0, false, &position);
    if (pushed != PEERWAY_OK) return pushed;
    peerway_u64 words = peerway__ring(proxy, ring).completed + (peerway_u64)peer * PEERWAY_LINES * PEERWAY_LINE;
    // The answer is twice the position after the quiet. It is odd if a command failed.
    int answered = peerway__await(proxy, words, 2 * (position + 1), 0, PEERWAY_ANSWER_CYCLES, &seen);
    if (answered != PEERWAY_OK) return answered;
    return seen & 1 ? PEERWAY_FAILED : PEERWAY_OK;
}

// Call it from one thread. After a barrier, the other threads of its block may read the arrived
// bytes too. If `peer` is given, a failure of that peer ends the wait.
PEERWAY_CALL int peerway_wait_counter(const peerway_proxy *proxy, peerway_u32 counter, peerway_u64 value, peerway_u32 peer) {
    bool any = peer == PEERWAY_ANY_PEER;
    if (counter >= peerway__fixed(&proxy->counters) || (!any && peer >= peerway__fixed(&proxy->peers))) return PEERWAY_BAD_ARGUMENT;
    peerway_u64 words = peerway__fixed(&proxy->counter_words) + (peerway_u64)counter * PEERWAY_LINES * PEERWAY_LINE, seen;
    return peerway__await(proxy, words, value, any ? 0 : peerway__fixed(&proxy->peer_faults) + 4ull * peer, 0, &seen);
}

// The current value of a counter of this proxy.
PEERWAY_CALL peerway_u64 peerway_counter(const peerway_proxy *proxy, peerway_u32 counter) {
    if (counter >= peerway__fixed(&proxy->counters)) return 0;
    return peerway__load_acquire(peerway__fixed(&proxy->counter_words) + (peerway_u64)counter * PEERWAY_LINES * PEERWAY_LINE);
}

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)

// A ring for this warp. Neighbouring warps in the grid use different rings.
PEERWAY_CALL peerway_u32 peerway_ring_for_warp(const peerway_proxy *proxy) {
    peerway_u32 warps = (blockDim.x * blockDim.y * blockDim.z + 31) / 32;
    peerway_u32 thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    peerway_u32 block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    return (block * warps + thread / 32) % peerway__fixed(&proxy->rings);
}

// Pushes one command per lane whose `mine` is set, with one claim and one fence for all. All 32
// lanes must call it. All commands go to the ring of the first lane that sends.
PEERWAY_CALL int peerway__warp(const peerway_proxy *proxy, peerway_u32 ring, peerway_u64 op, peerway_u32 peer, peerway_u64 dst,
                               peerway_u64 src, peerway_u64 bytes, peerway_u32 counter, bool mine) {
    const peerway_u32 all = 0xffffffffu;
    bool sound = peerway__sound(proxy, ring, peer, dst, src, bytes, counter);
    peerway_u32 senders = __ballot_sync(all, mine && sound);
    int status = mine && !sound ? PEERWAY_BAD_ARGUMENT : PEERWAY_OK;
    if (senders == 0) return status;
    peerway_u32 lane;
    asm("mov.u32 %0, %%laneid;" : "=r"(lane));
    // Order the stores of every lane before the single fence.
    __syncwarp(all);
    peerway_u64 first = 0;
    int claimed = PEERWAY_OK;
    // Use the ring of a lane that sends, because its arguments have been checked.
    peerway_u32 leader = __ffs(senders) - 1;
    ring = __shfl_sync(all, ring, leader);
    const peerway_ring to = peerway__ring(proxy, ring);
    if (lane == leader) {
        claimed = peerway__claim(proxy, to, __popc(senders), true, &first);
    }
    __syncwarp(all);
    claimed = __shfl_sync(all, claimed, leader);
    first = __shfl_sync(all, first, leader);
    if (!(senders >> lane & 1)) return status;
    if (claimed != PEERWAY_OK) return claimed;
    peerway_u64 position = first + __popc(senders & ((1u << lane) - 1));
    peerway__store(to, position, peerway__first(op, peer, counter, dst, bytes), peerway__second(dst, src));
    return PEERWAY_OK;
}

PEERWAY_CALL int peerway_put_warp(const peerway_proxy *proxy, peerway_u32 ring, peerway_u32 peer, peerway_u64 dst, peerway_u64 src,
                                  peerway_u64 bytes, bool mine = true) {
    return peerway__warp(proxy, ring, PEERWAY_OP_PUT, peer, dst, src, bytes, 0, mine);
}

PEERWAY_CALL int peerway_put_with_count_warp(const peerway_proxy *proxy, peerway_u32 ring, peerway_u32 peer, peerway_u64 dst,
                                             peerway_u64 src, peerway_u64 bytes, peerway_u32 counter, bool mine = true) {
    return peerway__warp(proxy, ring, PEERWAY_OP_PUT_COUNT, peer, dst, src, bytes, counter, mine);
}

PEERWAY_CALL int peerway_signal_warp(const peerway_proxy *proxy, peerway_u32 ring, peerway_u32 peer, peerway_u32 counter, bool mine = true) {
    return peerway__warp(proxy, ring, PEERWAY_OP_SIGNAL, peer, 0, 0, 0, counter, mine);
}

#endif
#endif
