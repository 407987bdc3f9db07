// The interface between kernels and the proxy. `cargo xtask device-header` generates this file
// from crates/peerway-core/src/abi.rs; edit that file.
#ifndef PEERWAY_ABI_H
#define PEERWAY_ABI_H

typedef unsigned int peerway_u32;
typedef unsigned long long peerway_u64;

#define PEERWAY_MAGIC 0x50574456ull
#define PEERWAY_VERSION 0x1ull
#define PEERWAY_LINES 0x4ull
#define PEERWAY_LINE 0x40ull
#define PEERWAY_DEAD 0x8000000000000000ull
#define PEERWAY_UNIT 0x4ull
#define PEERWAY_MAX_LEN 0xfffffcull
#define PEERWAY_MAX_SPACE 0x4000000000ull
#define PEERWAY_PHASE 0x8000000000000000ull
#define PEERWAY_OP_NOP 0x0ull
#define PEERWAY_OP_PUT 0x1ull
#define PEERWAY_OP_PUT_COUNT 0x2ull
#define PEERWAY_OP_SIGNAL 0x3ull
#define PEERWAY_OP_QUIET 0x4ull
#define PEERWAY_PEER_AT 0x4ull
#define PEERWAY_COUNTER_AT 0x10ull
#define PEERWAY_LEN_AT 0x20ull
#define PEERWAY_DST_HIGH_AT 0x36ull
#define PEERWAY_DST_LOW_AT 0x24ull
#define PEERWAY_DST_LOW_BITS 0x1bull
#define PEERWAY_FAULT_OPERATION 0x1ull
#define PEERWAY_FAULT_PEER 0x2ull
#define PEERWAY_FAULT_SOURCE 0x3ull
#define PEERWAY_FAULT_DESTINATION 0x4ull
#define PEERWAY_FAULT_COUNTER 0x5ull
#define PEERWAY_FAULT_PEER_GONE 0x6ull
#define PEERWAY_FAULT_REFUSED 0x7ull
#define PEERWAY_FAULT_TIMED_OUT 0x8ull
#define PEERWAY_FAULT_FAILED 0x9ull
#define PEERWAY_FAULT_UNFENCED 0xaull

// One ring. Addresses are those of the kernel.
struct peerway_ring {
    // Slots of 16 bytes, in host memory.
    peerway_u64 slots;
    // The number of consumed positions, in host memory.
    peerway_u64 credit;
    // Answers to `quiet` for this ring: PEERWAY_LINES lines for each peer, in host memory.
    peerway_u64 completed;
    // The number of claimed positions, in the kernel's memory.
    peerway_u64 claim;
    // The credit as last read, in the kernel's memory. The top bit is set if the ring is dead.
    peerway_u64 cached;
    // The ring has 1 << log2_slots slots.
    peerway_u32 log2_slots;
    // Always zero.
    peerway_u32 reserved;
};
static_assert(sizeof(peerway_ring) == 48, "layout");

// The structure that a kernel receives.
struct peerway_proxy {
    // PEERWAY_MAGIC.
    peerway_u32 magic;
    // PEERWAY_VERSION.
    peerway_u32 version;
    // The number of rings.
    peerway_u32 rings;
    // The number of peers. Valid peer numbers are below this.
    peerway_u32 peers;
    // The number of local counters that a kernel can wait for.
    peerway_u32 counters;
    // Always zero.
    peerway_u32 reserved;
    // The rings: an array of peerway_ring.
    peerway_u64 ring_table;
    // Counters, PEERWAY_LINES lines each, in host memory.
    peerway_u64 counter_words;
    // For each peer, a word that becomes nonzero when the peer fails, in host memory.
    peerway_u64 peer_faults;
    // The first fault, in host memory: a peerway_fault.
    peerway_u64 fault;
    // The maximum duration of a wait in nanoseconds.
    peerway_u64 timeout_ns;
};
static_assert(sizeof(peerway_proxy) == 64, "layout");

// The first fault. The proxy writes the code last.
struct peerway_fault {
    // One of PEERWAY_FAULT_*, or zero.
    peerway_u32 code;
    // The peer of the failed command.
    peerway_u32 peer;
    // The ring of the command.
    peerway_u32 ring;
    // The operation of the command.
    peerway_u32 op;
    // The position of the command in the ring.
    peerway_u64 position;
    // The number of faults so far, including this one.
    peerway_u64 count;
};
static_assert(sizeof(peerway_fault) == 32, "layout");

#endif
