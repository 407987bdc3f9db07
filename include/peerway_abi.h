// What kernels and the proxy agree on. Written by `cargo xtask device-header` from crates/peerway-core/src/abi.rs;
// changes belong there.
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

// One ring. Addresses are the kernel's.
struct peerway_ring {
    // Slots of 16 bytes, in host memory.
    peerway_u64 slots;
    // Positions consumed, in host memory.
    peerway_u64 credit;
    // Answers to `quiet`, of this ring: for each peer PEERWAY_LINES lines, in host memory.
    peerway_u64 completed;
    // Positions claimed, in the kernel's memory.
    peerway_u64 claim;
    // Credit as last read, in the kernel's memory; its top bit: the ring is dead.
    peerway_u64 cached;
    // There are 1 << log2_slots slots.
    peerway_u32 log2_slots;
    // Zero.
    peerway_u32 reserved;
};
static_assert(sizeof(peerway_ring) == 48, "layout");

// All that a kernel is given.
struct peerway_proxy {
    // PEERWAY_MAGIC.
    peerway_u32 magic;
    // PEERWAY_VERSION.
    peerway_u32 version;
    // How many rings.
    peerway_u32 rings;
    // Peers that may be named: numbers below this.
    peerway_u32 peers;
    // Counters of our own that may be waited for.
    peerway_u32 counters;
    // Zero.
    peerway_u32 reserved;
    // The rings: an array of peerway_ring.
    peerway_u64 ring_table;
    // Counters, PEERWAY_LINES lines each, in host memory.
    peerway_u64 counter_words;
    // For each peer a word that is not zero once it has failed, in host memory.
    peerway_u64 peer_faults;
    // The first fault, in host memory: a peerway_fault.
    peerway_u64 fault;
    // Nanoseconds that a wait takes at most.
    peerway_u64 timeout_ns;
};
static_assert(sizeof(peerway_proxy) == 64, "layout");

// The first thing that went wrong, written by the proxy, the code last.
struct peerway_fault {
    // One of PEERWAY_FAULT_*, or zero.
    peerway_u32 code;
    // Whom the command was for.
    peerway_u32 peer;
    // The ring it came from.
    peerway_u32 ring;
    // Its operation.
    peerway_u32 op;
    // Its position in that ring.
    peerway_u64 position;
    // Faults so far, this one included.
    peerway_u64 count;
};
static_assert(sizeof(peerway_fault) == 32, "layout");

#endif
