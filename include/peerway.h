// Peerway for C and C++: bytes between the memories of two processes, by one-sided reads and writes.
//
// Written by `cargo xtask c-header` from crates/peerway-c/src; changes belong there.
//
// - Calls answer with a peerway_status; peerway_last_error() is a sentence about the last one of the thread that failed. Nothing is
//   thrown and nothing ends the process: what should not happen inside is PEERWAY_STATUS_PANIC.
// - Handles (pointers to structs that have no members) are made by calls and freed by the calls that end in _free, in any order. They
//   are numbers and not addresses: one that was freed, or is of another kind, is PEERWAY_STATUS_BAD_HANDLE. Any thread may use any
//   handle, several at once too; one that is freed while another thread is in a call with it stays until that call returns.
// - Results go where the last arguments say; these must not be null unless it is said that they may. A handle that is not made is null.
// - Structs with a `size` grow in later versions. Set all of them to zero and `size` to sizeof the struct; zero means "as usual".
// - Times are in nanoseconds, PEERWAY_FOREVER among them.
// - Numbers that name one of several things are passed as uint32_t, and a number that names none is PEERWAY_STATUS_BAD_ARGUMENT.
// - After a fork the child's handles to endpoints and to what belongs to them are of no more use: calls say PEERWAY_STATUS_FORKED.
//
// What a caller owes: pointers lead to memory of the length that is given, which nobody else changes meanwhile, and texts end with a
// zero byte. Everything else is checked.
//
//   struct peerway_endpoint *endpoint;
//   if (peerway_endpoint_new(NULL, &endpoint) != PEERWAY_STATUS_OK) fprintf(stderr, "%s\n", peerway_last_error());


#ifndef PEERWAY_H
#define PEERWAY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// The version that this header is of.
#define PEERWAY_VERSION_MAJOR 0

// The version that this header is of.
#define PEERWAY_VERSION_MINOR 1

// The version that this header is of.
#define PEERWAY_VERSION_PATCH 0

// A time-out that never passes.
#define PEERWAY_FOREVER UINT64_MAX

// Bytes of a descriptor.
#define PEERWAY_DESCRIPTOR_LEN 64

// The longest notification.
#define PEERWAY_MAX_NOTIFICATION (1 << 20)

// How a call went. Everything but OK, PENDING and NOTHING has a sentence in peerway_last_error().
//
// Numbers stay what they are; later versions may add some.
typedef enum peerway_status {
    // Done.
    PEERWAY_STATUS_OK = 0,
    // Not yet: the transfer has not ended, the counter is not there, nobody has connected in the time given.
    PEERWAY_STATUS_PENDING = 1,
    // There is none: no notification, no fault, nothing of that number.
    PEERWAY_STATUS_NOTHING = 2,
    // A pointer that must not be null was.
    PEERWAY_STATUS_NULL_ARGUMENT = 10,
    // A handle that was freed, is of another kind, or never was one.
    PEERWAY_STATUS_BAD_HANDLE = 11,
    // A struct's size is none that this library knows, or it has fields set that this library does not know.
    PEERWAY_STATUS_BAD_SIZE = 12,
    // A value that cannot be meant.
    PEERWAY_STATUS_BAD_ARGUMENT = 13,
    // The buffer is too small; its length argument says what is needed.
    PEERWAY_STATUS_TOO_SMALL = 14,
    // More handles of one kind than there can be.
    PEERWAY_STATUS_TOO_MANY_HANDLES = 15,
    // The library failed in a way it should not have; the sentence says where. The handle that was used may be of no more use.
    PEERWAY_STATUS_PANIC = 16,
    // A setting makes no sense.
    PEERWAY_STATUS_INVALID_SETTING = 20,
    // The pinned transport is not part of this build.
    PEERWAY_STATUS_TRANSPORT_UNAVAILABLE = 21,
    // RDMA is pinned and cannot be used.
    PEERWAY_STATUS_NO_RDMA = 22,
    // The address cannot be listened on.
    PEERWAY_STATUS_LISTEN = 23,
    // No network interface has that name.
    PEERWAY_STATUS_NO_INTERFACE = 24,
    // The operating system refused something.
    PEERWAY_STATUS_OS = 25,
    // The endpoint is closed.
    PEERWAY_STATUS_ENDPOINT_CLOSED = 26,
    // The endpoint belongs to the parent process.
    PEERWAY_STATUS_FORKED = 27,
    // A range that leaves its region.
    PEERWAY_STATUS_OUTSIDE = 30,
    // Not a range of memory.
    PEERWAY_STATUS_BAD_RANGE = 31,
    // The table of advertisements is full.
    PEERWAY_STATUS_TOO_MANY_ADVERTISEMENTS = 32,
    // Memory could not be allocated.
    PEERWAY_STATUS_ALLOCATE = 33,
    // The operating system gave no random bytes.
    PEERWAY_STATUS_NO_RANDOMNESS = 34,
    // No driver for GPUs, or none that can be used.
    PEERWAY_STATUS_NO_DRIVER = 40,
    // No GPU of that number.
    PEERWAY_STATUS_NO_SUCH_GPU = 41,
    // A GPU, or memory that is said to be one's.
    PEERWAY_STATUS_GPU = 42,
    // The bytes are no metadata.
    PEERWAY_STATUS_INVALID_METADATA = 50,
    // Nobody answers at the peer's addresses.
    PEERWAY_STATUS_UNREACHABLE = 51,
    // The peer did not answer in time.
    PEERWAY_STATUS_TIMED_OUT = 52,
    // The peer speaks another version.
    PEERWAY_STATUS_PEER_INCOMPATIBLE = 53,
    // The peer does not follow the protocol.
    PEERWAY_STATUS_PEER_MISBEHAVED = 54,
    // Another life of the endpoint: it was restarted.
    PEERWAY_STATUS_OTHER_INCARNATION = 55,
    // The peer takes no more sessions.
    PEERWAY_STATUS_PEER_FULL = 56,
    // A pinned path cannot be had.
    PEERWAY_STATUS_PATH_UNAVAILABLE = 57,
    // The peer refuses.
    PEERWAY_STATUS_PEER_REFUSES = 58,
    // The bytes are no descriptor.
    PEERWAY_STATUS_INVALID_DESCRIPTOR = 59,
    // The peer's memory cannot be mapped.
    PEERWAY_STATUS_MAP = 60,
    // The work makes no sense: lengths differ, lists are of different length, or too long.
    PEERWAY_STATUS_INVALID_WORK = 70,
    // All transfer slots are in use.
    PEERWAY_STATUS_BUSY = 71,
    // The region was not advertised for that direction.
    PEERWAY_STATUS_ACCESS = 72,
    // A region of another peer.
    PEERWAY_STATUS_OTHER_PEER = 73,
    // A notification over the cap.
    PEERWAY_STATUS_NOTIFICATION_TOO_LONG = 74,
    // Local memory of several GPUs in one transfer.
    PEERWAY_STATUS_MIXED_GPUS = 75,
    // No stage of that number.
    PEERWAY_STATUS_NO_SUCH_STAGE = 76,
    // The stage was released already.
    PEERWAY_STATUS_ALREADY_RELEASED = 77,
    // The peer is gone.
    PEERWAY_STATUS_PEER_GONE = 80,
    // The peer has been silent for too long.
    PEERWAY_STATUS_PEER_SILENT = 81,
    // The owner refused: no such region, another token or direction, or not for us.
    PEERWAY_STATUS_REMOTE_ACCESS = 82,
    // Outside what the peer advertised.
    PEERWAY_STATUS_OUT_OF_BOUNDS = 83,
    // The peer took its region back.
    PEERWAY_STATUS_REVOKED = 84,
    // The peer's queue of notifications is full.
    PEERWAY_STATUS_NOTIFICATIONS_FULL = 85,
    // The peer has no room for another counter.
    PEERWAY_STATUS_COUNTERS_FULL = 86,
    // Registered memory was unmapped.
    PEERWAY_STATUS_FAULT = 87,
    // A lane broke, and whether the notification was delivered is not known.
    PEERWAY_STATUS_DELIVERY_UNKNOWN = 88,
    // A device refused or failed the request.
    PEERWAY_STATUS_DEVICE = 89,
    // The transfer was cancelled.
    PEERWAY_STATUS_CANCELLED = 90,
    // The transfer's deadline passed.
    PEERWAY_STATUS_DEADLINE = 91,
    // A number for a proxy is out of its range.
    PEERWAY_STATUS_OUT_OF_RANGE = 100,
    // A rule about arrivals makes no sense.
    PEERWAY_STATUS_BAD_RULE = 101,
    // No room for another window.
    PEERWAY_STATUS_NO_ROOM = 102,
    // The peer's number is taken.
    PEERWAY_STATUS_TAKEN = 103,
    // The bytes are not the peer info of a proxy.
    PEERWAY_STATUS_NOT_PEER_INFO = 104,
    // The endpoint has no room for another proxy.
    PEERWAY_STATUS_TOO_MANY_PROXIES = 105,
    // A thread could not be started.
    PEERWAY_STATUS_THREAD = 106,
    // The proxy is not armed.
    PEERWAY_STATUS_NOT_ARMED = 107,
    // An error of a kind that this library's header does not know; the sentence says what.
    PEERWAY_STATUS_OTHER = 127,
} peerway_status;

// What a peer may do with advertised memory.
typedef enum peerway_access {
    // Read it.
    PEERWAY_ACCESS_READ = 1,
    // Write it.
    PEERWAY_ACCESS_WRITE = 2,
    // Both.
    PEERWAY_ACCESS_READ_WRITE = 3,
} peerway_access;

// Which lane a transfer takes.
typedef enum peerway_class {
    // By size: small ones take the latency lane.
    PEERWAY_CLASS_AUTO = 0,
    // Ahead of bulk.
    PEERWAY_CLASS_LATENCY = 1,
    // Never in the way of latency.
    PEERWAY_CLASS_BULK = 2,
} peerway_class;

// How a GPU copies what it reaches.
typedef enum peerway_copier {
    // A kernel is launched for every list.
    PEERWAY_COPIER_LAUNCHED = 0,
    // A kernel stays on the GPU while there is something to do: sooner, and takes two multiprocessors for each thread of the proxy.
    PEERWAY_COPIER_RESIDENT = 1,
    // The driver copies, by copy engines where it can.
    PEERWAY_COPIER_ENGINES = 2,
} peerway_copier;

// Which way bytes go.
typedef enum peerway_direction {
    // From our memory into the peer's.
    PEERWAY_DIRECTION_WRITE = 0,
    // From the peer's memory into ours.
    PEERWAY_DIRECTION_READ = 1,
} peerway_direction;

// Whether bytes of a transfer that has ended may still change memory.
typedef enum peerway_fence {
    // No byte of it changes memory any more.
    PEERWAY_FENCE_HELD = 0,
    // Bytes of it may still change memory. Ask again: the answer turns to HELD when the peer drains
    // or dies.
    PEERWAY_FENCE_OPEN = 1,
    // Bytes of it may still change memory, and no proof can arrive any more that they cannot.
    PEERWAY_FENCE_LOST = 2,
} peerway_fence;

// A way to a peer.
typedef enum peerway_path {
    // Both endpoints live in this process.
    PEERWAY_PATH_SAME_PROCESS = 0,
    // The peer's memory is mapped here.
    PEERWAY_PATH_LOCAL_MAP = 1,
    // The kernel copies between the two processes.
    PEERWAY_PATH_LOCAL_CMA = 2,
    // A ring in shared memory.
    PEERWAY_PATH_LOCAL_RING = 3,
    // TCP connections.
    PEERWAY_PATH_TCP = 4,
    // RDMA devices, by reliable connections (InfiniBand, RoCE).
    PEERWAY_PATH_VERBS = 5,
    // RDMA devices, by reliable datagrams (AWS EFA).
    PEERWAY_PATH_EFA = 6,
    // A GPU copies.
    PEERWAY_PATH_GPU_IPC = 7,
    // One that this library's header does not know.
    PEERWAY_PATH_OTHER = 127,
} peerway_path;

// Work to be posted: checked once, posted any number of times, by any thread.
typedef struct peerway_batch peerway_batch;

// Ends of transfers, in the order in which they came.
typedef struct peerway_completions peerway_completions;

// One end of transfers: it listens, connects, and owns registered memory.
typedef struct peerway_endpoint peerway_endpoint;

// A transfer that was put into a CUDA stream.
typedef struct peerway_enqueued peerway_enqueued;

// A message from a peer.
typedef struct peerway_notification peerway_notification;

// A connected peer: one life of one remote endpoint.
typedef struct peerway_peer peerway_peer;

// A batch that is ready to be posted to its peer, any number of times, by any thread.
typedef struct peerway_prepared peerway_prepared;

// What a kernel is given: its layout is in peerway_abi.h, for peerway_device.cuh. The host only hands its address on.
typedef struct peerway_proxy peerway_proxy;

// The host's handle to a proxy: rings that kernels write commands into, threads that carry them out, windows (registered memory that
// commands name by offset), and counters that peers raise and kernels wait for. It has another name than what kernels are given,
// because that is a struct of its own.
typedef struct peerway_proxy_host peerway_proxy_host;

// Registered memory of this process, on the host or on a GPU.
typedef struct peerway_region peerway_region;

// Memory of a peer that it advertised.
typedef struct peerway_remote peerway_remote;

// Parts of one transfer, checked in advance: layer `i` goes while layer `i + 1` is still being computed.
typedef struct peerway_staged peerway_staged;

// A posted transfer. It goes on when its handle is freed; every transfer has a deadline.
typedef struct peerway_transfer peerway_transfer;

// A setting by its name in the environment. This struct stays as it is.
typedef struct peerway_setting {
    // The name ("PEERWAY_DEADLINE"): docs/configuration.md lists them.
    const char *name;
    // The value as it would be in the environment ("5s"). Empty is as usual.
    const char *value;
} peerway_setting;

// Settings of an endpoint. What is zero or null comes from the environment (`peerway doctor --config` lists the variables), and
// where that says nothing, from the defaults.
typedef struct peerway_endpoint_options {
    // sizeof(struct peerway_endpoint_options).
    size_t size;
    // Where to listen: an IP address, with or without a port ("10.0.0.1:5000", "[::1]:0").
    const char *bind;
    // The IP address that peers are told instead.
    const char *advertise;
    // Network interfaces to use: prefixes of names, separated by commas.
    const char *interfaces;
    // RDMA devices to use: names or numbers, separated by commas.
    const char *rdma_devices;
    // The one transport that is allowed: auto, local, local-map, local-cma, local-ring, tcp, ib or efa.
    const char *transport;
    // Deadline of transfers that name none.
    uint64_t deadline_ns;
    // Silence after which a peer is held dead.
    uint64_t detect_ns;
    // How long a cancel or revoke waits for its fence.
    uint64_t fence_ns;
    // How long a connect or an import may take.
    uint64_t connect_timeout_ns;
    // How long a waiter polls before it sleeps.
    uint64_t spin_ns;
    // Bytes of notifications kept until they are taken.
    uint64_t notify_bytes;
    // Transfers that can be in flight.
    uint32_t slots;
    // Bulk lanes per TCP peer, at most 64, as for the next two.
    uint16_t lanes;
    // Service threads; peers are spread over them.
    uint16_t shards;
    // Threads that may copy for one large local transfer.
    uint16_t copy_threads;
    // Zero.
    uint16_t reserved[3];
    // Any other setting, or one of the above as text; null for none. What is given above wins.
    const struct peerway_setting *settings;
    // How many.
    size_t settings_count;
} peerway_endpoint_options;

// The name of one life of an endpoint: a restarted one has another.
typedef struct peerway_incarnation {
    // Random bytes.
    uint8_t bytes[16];
} peerway_incarnation;

// How an endpoint runs.
typedef struct peerway_endpoint_stats {
    // sizeof(struct peerway_endpoint_stats).
    size_t size;
    // How many processors its threads may run on: peerway_endpoint_cpus says which. 0 where the kernel does not tell.
    uint64_t cpus;
} peerway_endpoint_stats;

// Facts about a peer.
typedef struct peerway_peer_facts {
    // sizeof(struct peerway_peer_facts).
    size_t size;
    // The name of this life of it.
    struct peerway_incarnation incarnation;
    // The best way to it: a peerway_path. Memory that is not shareable takes the next one.
    uint32_t path;
    // Whether limits that the owner of memory sets bind honest peers only on that path.
    uint32_t trusted;
    // Whether transfers can be posted.
    uint32_t alive;
    // Whether we connected to it, and not it to us.
    uint32_t initiator;
} peerway_peer_facts;

// What went to and from a peer. Bytes that this process copied by itself count under `transfers` alone.
typedef struct peerway_peer_stats {
    // sizeof(struct peerway_peer_stats).
    size_t size;
    // Transfers posted.
    uint64_t transfers;
    // Bytes that lanes wrote to the peer.
    uint64_t bytes_written;
    // Bytes that lanes read from it.
    uint64_t bytes_read;
    // Bytes that it read from us by lanes.
    uint64_t bytes_served;
    // Bytes that it wrote to us by lanes.
    uint64_t bytes_landed;
    // Lanes that broke.
    uint64_t lanes_lost;
} peerway_peer_stats;

// How a transfer ended.
typedef struct peerway_end {
    // sizeof(struct peerway_end).
    size_t size;
    // Why: a peerway_status. OK where every byte is where it was meant to be.
    int32_t status;
    // Not zero: bytes of it may still change memory, because the peer did not answer for them in time. Memory that the library
    // allocated is kept until they cannot; other memory must be. peerway_transfer_fence() tells
    // when they no longer can.
    uint32_t fence_open;
} peerway_end;

// Facts about a region.
typedef struct peerway_region_facts {
    // sizeof(struct peerway_region_facts).
    size_t size;
    // Its first byte; for memory of a GPU an address that only GPUs can use.
    uint64_t address;
    // Its bytes.
    uint64_t len;
    // Whether it is memory of a GPU.
    uint32_t on_gpu;
    // And which, by its number in this process.
    uint32_t gpu;
    // Whether peers on this host can map it.
    uint32_t shareable;
    // Zero.
    uint32_t reserved;
} peerway_region_facts;

// Memory of this process that was released while a peer may still reach it. It stays allocated, or
// its release function is not called, until the peer leaves it, closes its link or dies.
typedef struct peerway_quarantine_stats {
    // sizeof(struct peerway_quarantine_stats).
    size_t size;
    // Regions in quarantine now.
    uint64_t regions;
    // Bytes of those regions.
    uint64_t bytes;
    // Entries since the process started, including those that have been released.
    uint64_t entries_ever;
} peerway_quarantine_stats;

// Facts about a remote region.
typedef struct peerway_remote_facts {
    // sizeof(struct peerway_remote_facts).
    size_t size;
    // Its bytes.
    uint64_t len;
    // What we may do: a peerway_access.
    uint32_t access;
    // Whether its owner has taken it back.
    uint32_t revoked;
    // Whether this process reaches it by itself.
    uint32_t is_direct;
    // And how: a peerway_path.
    uint32_t path;
} peerway_remote_facts;

// What else there is to say about a batch.
typedef struct peerway_batch_options {
    // sizeof(struct peerway_batch_options).
    size_t size;
    // Ends the transfer, whatever its state, so long after it was posted; zero for the endpoint's.
    uint64_t deadline_ns;
    // A message that the peer sees after the bytes, once; null for none. It is copied.
    const void *notify;
    // Its bytes.
    size_t notify_len;
    // Not zero: a counter of the peer goes up by one after the bytes, once.
    uint32_t counts;
    // And which.
    uint32_t counter;
    // A peerway_class.
    uint32_t lane_class;
    // Zero.
    uint32_t reserved;
} peerway_batch_options;

// One range of a vector. This struct stays as it is.
typedef struct peerway_pair {
    // Our memory.
    const struct peerway_region *local;
    // The first byte in it.
    uint64_t local_offset;
    // The peer's memory.
    const struct peerway_remote *remote;
    // The first byte in it.
    uint64_t remote_offset;
    // Bytes.
    uint64_t len;
} peerway_pair;

// Equal blocks of a region: block `i` starts at base + indices[i] * stride.
typedef struct peerway_blocks {
    // sizeof(struct peerway_blocks).
    size_t size;
    // Where block 0 starts.
    uint64_t base;
    // From one block to the next.
    uint64_t stride;
    // Bytes of a block.
    uint64_t len;
    // Which blocks, in which order. They are copied.
    const uint32_t *indices;
    // How many.
    size_t count;
} peerway_blocks;

// Bytes and times of a transfer.
typedef struct peerway_transfer_stats {
    // sizeof(struct peerway_transfer_stats).
    size_t size;
    // Bytes known to have arrived.
    uint64_t bytes_done;
    // Bytes asked for.
    uint64_t bytes_total;
    // From the post to the first byte that was handed to the path; zero where that is not known.
    uint64_t until_sent_ns;
    // From the post to the end; zero where that is not known.
    uint64_t until_ended_ns;
    // The path it took: a peerway_path.
    uint32_t path;
    // Zero.
    uint32_t reserved;
} peerway_transfer_stats;

// Settings of a proxy. What is zero is as usual.
typedef struct peerway_proxy_options {
    // sizeof(struct peerway_proxy_options).
    size_t size;
    // Not zero: rings for kernels of a GPU. Else for processors, with peerway_device.cuh compiled for them.
    uint32_t on_gpu;
    // And which.
    uint32_t gpu;
    // Threads that drain rings: a quarter of the processors, at most four, as usual.
    uint32_t threads;
    // Rings, dealt to the threads: eight for each, as usual.
    uint32_t rings;
    // Commands that a ring holds: 2048 as usual.
    uint32_t slots;
    // Peers that can be numbered: 64 as usual.
    uint32_t peers;
    // Counters that peers can raise: 1024 as usual.
    uint32_t counters;
    // How GPUs copy what they reach: a peerway_copier.
    uint32_t copier;
    // The longest that a kernel waits for room, an answer or a counter: 10 s as usual.
    uint64_t timeout_ns;
} peerway_proxy_options;

// Where a window is in its side's space of offsets. This struct stays as it is.
typedef struct peerway_window {
    // What a kernel adds to an offset in the window.
    uint64_t base;
    // Bytes.
    uint64_t len;
} peerway_window;

// A part of a region. This struct stays as it is.
typedef struct peerway_place {
    // The region.
    const struct peerway_region *region;
    // The first byte in it.
    uint64_t offset;
    // Bytes.
    uint64_t len;
} peerway_place;

// A counter of a numbered peer. This struct stays as it is.
typedef struct peerway_answer {
    // The peer's number.
    uint16_t peer;
    // The peer's counter.
    uint16_t counter;
} peerway_answer;

// What is to happen when a counter of ours rises: what has arrived is copied on, and then others are told.
typedef struct peerway_forward {
    // sizeof(struct peerway_forward).
    size_t size;
    // What has arrived when the counter rises.
    struct peerway_place from;
    // It is copied to all of these, which are as long.
    const struct peerway_place *to;
    // How many.
    size_t to_count;
    // Then these counters of ours go up by one.
    const uint16_t *then;
    // How many.
    size_t then_count;
    // And these of peers: how a sender learns that the bytes went all the way.
    const struct peerway_answer *answers;
    // How many.
    size_t answer_count;
    // The counter. One counter has one rule.
    uint16_t counter;
    // Zero.
    uint16_t reserved[3];
} peerway_forward;

// A command that failed.
typedef struct peerway_proxy_fault {
    // sizeof(struct peerway_proxy_fault).
    size_t size;
    // Its position in the ring. Of commands that went together, the first.
    uint64_t position;
    // Why: one of PEERWAY_FAULT_* in peerway_abi.h. peerway_fault_text has its words.
    uint32_t code;
    // Whom it was for, by number.
    uint32_t peer;
    // The ring it came from.
    uint32_t ring;
    // Its operation: one of PEERWAY_OP_* in peerway_abi.h.
    uint32_t op;
} peerway_proxy_fault;

// What a proxy did.
typedef struct peerway_proxy_stats {
    // sizeof(struct peerway_proxy_stats).
    size_t size;
    // Commands taken out of rings.
    uint64_t commands;
    // Puts submitted.
    uint64_t puts;
    // And their bytes.
    uint64_t bytes;
    // Counters of peers raised.
    uint64_t counts;
    // Submissions that puts went in; those that a thread of the proxy copied by itself are not among them.
    uint64_t flights;
    // Commands that failed.
    uint64_t faults;
} peerway_proxy_stats;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// The version of the library: major, minor and patch in eight bits each, from the third byte down.
uint32_t peerway_version(void);

// The version of the library as text.
const char *peerway_version_text(void);

// What went wrong in the last call of this thread that failed: a sentence, never null, and empty where none has. It stays until
// the next call that fails in this thread.
const char *peerway_last_error(void);

// The name of a status (PEERWAY_STATUS_BUSY is "BUSY"); "?" for a number that is none.
const char *peerway_status_name(int32_t status);

// Makes an endpoint, which listens when this returns. Options may be null.
enum peerway_status peerway_endpoint_new(const struct peerway_endpoint_options *options,
                                         struct peerway_endpoint **endpoint);

// Closes an endpoint: its transfers end, its threads stop, its sockets close. The handle stays until it is freed.
enum peerway_status peerway_endpoint_close(const struct peerway_endpoint *endpoint);

// Closes an endpoint and frees its handle. Null is nothing to free, here and in all such calls.
enum peerway_status peerway_endpoint_free(struct peerway_endpoint *endpoint);

// Whether an endpoint was closed, or belongs to the parent process.
enum peerway_status peerway_endpoint_is_closed(const struct peerway_endpoint *endpoint, bool *closed);

// What others need to connect, to be handed over by any means: some hundred bytes. *len becomes their number whether or not
// there is room for them.
enum peerway_status peerway_endpoint_metadata(const struct peerway_endpoint *endpoint,
                                              void *buffer,
                                              size_t room,
                                              size_t *len);

// The name of this life of the endpoint.
enum peerway_status peerway_endpoint_incarnation(const struct peerway_endpoint *endpoint,
                                                 struct peerway_incarnation *incarnation);

// Where peers can connect, best first: address number `nth` as text ("10.0.0.1:5000"), with its zero byte. NOTHING where there
// are not so many.
enum peerway_status peerway_endpoint_address(const struct peerway_endpoint *endpoint,
                                             size_t nth,
                                             char *buffer,
                                             size_t room,
                                             size_t *len);

// How an endpoint runs.
enum peerway_status peerway_endpoint_statistics(const struct peerway_endpoint *endpoint,
                                                struct peerway_endpoint_stats *stats);

// The processors that the endpoint's threads may run on, as text ("0-3,8"), with its zero byte. Empty where the kernel
// does not tell.
enum peerway_status peerway_endpoint_cpus(const struct peerway_endpoint *endpoint,
                                          char *buffer,
                                          size_t room,
                                          size_t *len);

// Checks metadata without connecting: the name of the life of the endpoint that gave it.
enum peerway_status peerway_metadata_incarnation(const void *metadata,
                                                 size_t len,
                                                 struct peerway_incarnation *incarnation);

// Connects to the endpoint that gave this metadata; a second connect to the same life of it gives a second handle to the same
// peer. A time-out of zero is the endpoint's own.
enum peerway_status peerway_endpoint_connect(const struct peerway_endpoint *endpoint,
                                             const void *metadata,
                                             size_t len,
                                             uint64_t timeout_ns,
                                             struct peerway_peer **peer);

// Connects to whichever endpoint listens at "host:port" ("[::1]:5000").
enum peerway_status peerway_endpoint_connect_address(const struct peerway_endpoint *endpoint,
                                                     const char *address,
                                                     uint64_t timeout_ns,
                                                     struct peerway_peer **peer);

// The next peer that connected to us, waiting for one for so long: PENDING where none came. Peers are accepted whether or not
// anybody asks; this only hands them out.
enum peerway_status peerway_endpoint_accept(const struct peerway_endpoint *endpoint,
                                            uint64_t timeout_ns,
                                            struct peerway_peer **peer);

// A handle to every live peer, each to be freed. *count becomes their number; where there is not room for so many there is none.
enum peerway_status peerway_endpoint_peers(const struct peerway_endpoint *endpoint,
                                           struct peerway_peer **peers,
                                           size_t room,
                                           size_t *count);

// The oldest notification, waiting for one for so long: PENDING where there is none.
enum peerway_status peerway_endpoint_notification(const struct peerway_endpoint *endpoint,
                                                  uint64_t timeout_ns,
                                                  struct peerway_notification **notification);

// Arrivals counted under this id.
enum peerway_status peerway_endpoint_counter(const struct peerway_endpoint *endpoint, uint32_t id, uint64_t *value);

// Waits until at least `wanted` arrivals have been counted; PENDING where they have not in time. *value, which may be null, becomes
// how many have.
enum peerway_status peerway_endpoint_wait_counter(const struct peerway_endpoint *endpoint,
                                                  uint32_t id,
                                                  uint64_t wanted,
                                                  uint64_t timeout_ns,
                                                  uint64_t *value);

// Forgets a counter, so that its id can be used afresh. *value, which may be null, becomes what it had.
enum peerway_status peerway_endpoint_reset_counter(const struct peerway_endpoint *endpoint,
                                                   uint32_t id,
                                                   uint64_t *value);

// The name of a peerway_path ("local-map"); "?" for a number that is none.
const char *peerway_path_name(uint32_t path);

// Who a peer is and how it is reached.
enum peerway_status peerway_peer_describe(const struct peerway_peer *peer, struct peerway_peer_facts *facts);

// The way to a peer and why it is this one, as a sentence with its zero byte.
enum peerway_status peerway_peer_path(const struct peerway_peer *peer, char *buffer, size_t room, size_t *len);

// The address that the session was made with, as text with its zero byte.
enum peerway_status peerway_peer_address(const struct peerway_peer *peer, char *buffer, size_t room, size_t *len);

// What went to and fro.
enum peerway_status peerway_peer_statistics(const struct peerway_peer *peer, struct peerway_peer_stats *stats);

// Closes the session with a peer: its transfers end, and connecting again makes a new one. The handle stays until it is freed.
enum peerway_status peerway_peer_remove(const struct peerway_peer *peer);

// Frees a handle to a peer. The session stays.
enum peerway_status peerway_peer_free(struct peerway_peer *peer);

// Turns a descriptor that the peer advertised into memory that can be read and written. The first import of one asks the peer.
enum peerway_status peerway_peer_import(const struct peerway_peer *peer,
                                        const void *descriptor,
                                        size_t len,
                                        struct peerway_remote **remote);

// Writes one range of our memory into the peer's and waits.
enum peerway_status peerway_peer_write(const struct peerway_peer *peer,
                                       const struct peerway_region *local,
                                       uint64_t local_offset,
                                       const struct peerway_remote *remote,
                                       uint64_t remote_offset,
                                       uint64_t len);

// Reads one range of the peer's memory into ours and waits.
enum peerway_status peerway_peer_read(const struct peerway_peer *peer,
                                      const struct peerway_region *local,
                                      uint64_t local_offset,
                                      const struct peerway_remote *remote,
                                      uint64_t remote_offset,
                                      uint64_t len);

// Posts a batch; returns within microseconds whatever its size.
enum peerway_status peerway_peer_post(const struct peerway_peer *peer,
                                      const struct peerway_batch *batch,
                                      struct peerway_transfer **transfer);

// Posts a batch and waits for its end, which the status is of. `ended` may be null.
enum peerway_status peerway_peer_run(const struct peerway_peer *peer,
                                     const struct peerway_batch *batch,
                                     struct peerway_end *ended);

// Keeps a checked batch to be posted many times, with everything made ready that can be.
enum peerway_status peerway_peer_prepare(const struct peerway_peer *peer,
                                         const struct peerway_batch *batch,
                                         struct peerway_prepared **prepared);

// Sends a message of up to PEERWAY_MAX_NOTIFICATION bytes to the peer's queue of notifications.
enum peerway_status peerway_peer_notify(const struct peerway_peer *peer,
                                        const void *message,
                                        size_t len,
                                        struct peerway_transfer **transfer);

// Adds one to a counter of the peer.
enum peerway_status peerway_peer_count(const struct peerway_peer *peer,
                                       uint32_t id,
                                       struct peerway_transfer **transfer);

// The oldest notification of this peer, waiting for one for so long: PENDING where there is none.
enum peerway_status peerway_peer_notification(const struct peerway_peer *peer,
                                              uint64_t timeout_ns,
                                              struct peerway_notification **notification);

// Allocates zeroed memory that peers on this host can map: the fastest path there is.
enum peerway_status peerway_region_allocate(const struct peerway_endpoint *endpoint,
                                            size_t len,
                                            struct peerway_region **region);

// Allocates memory on a GPU that peers on this host can map.
enum peerway_status peerway_region_allocate_gpu(const struct peerway_endpoint *endpoint,
                                                uint32_t gpu,
                                                uint64_t len,
                                                struct peerway_region **region);

// Registers memory that the caller keeps: the host's, or a GPU's where the process uses one already.
//
// It must stay valid until the region is freed and every transfer that uses it has ended, with its fence held: peers read and write
// it at any time. peerway_region_register_owned says when that is.
enum peerway_status peerway_region_register(const struct peerway_endpoint *endpoint,
                                            void *memory,
                                            size_t len,
                                            struct peerway_region **region);

// Registers memory of a GPU that the caller keeps, as peerway_region_register; which GPU's it is, the driver is asked.
enum peerway_status peerway_region_register_gpu(const struct peerway_endpoint *endpoint,
                                                uint64_t address,
                                                size_t len,
                                                struct peerway_region **region);

// Registers memory that the library lets go of by `release(context)`: once the region is freed and nothing, not a transfer
// whose fence is open either, can touch it any more. It is called once, by any thread, must not call the library and not throw;
// never where this call fails.
enum peerway_status peerway_region_register_owned(const struct peerway_endpoint *endpoint,
                                                  void *memory,
                                                  size_t len,
                                                  void (*release)(void *context),
                                                  void *context,
                                                  struct peerway_region **region);

// Where a region is, and what it is.
enum peerway_status peerway_region_describe(const struct peerway_region *region, struct peerway_region_facts *facts);

// Copies bytes out of a region, the memory of a GPU too. Bytes that a peer changes meanwhile may be torn.
enum peerway_status peerway_region_copy_out(const struct peerway_region *region,
                                            uint64_t offset,
                                            void *into,
                                            size_t len);

// Copies bytes into a region.
enum peerway_status peerway_region_copy_in(const struct peerway_region *region,
                                           uint64_t offset,
                                           const void *from,
                                           size_t len);

// Sets bytes of a region.
enum peerway_status peerway_region_fill(const struct peerway_region *region,
                                        uint64_t offset,
                                        uint64_t len,
                                        uint8_t value);

// Advertises a part of a region, by PEERWAY_DESCRIPTOR_LEN bytes: to one peer, or, where that is null, to whoever holds them. The
// same part, rights and peer give the same bytes again. `access` is a peerway_access; a length of UINT64_MAX means all from the offset on.
enum peerway_status peerway_region_advertise(const struct peerway_region *region,
                                             uint64_t offset,
                                             uint64_t len,
                                             uint32_t access,
                                             const struct peerway_peer *to,
                                             uint8_t *descriptor);

// Takes back everything that was advertised of a region. *open, which may be null, becomes whether somebody could not be kept from
// it within the fence's deadline.
enum peerway_status peerway_region_revoke(const struct peerway_region *region,
                                          bool *open);

// Ends a registration and what was advertised of it. Transfers that use the memory go on; memory that the library allocated stays
// until they have ended.
enum peerway_status peerway_region_free(struct peerway_region *region);

// What is in quarantine in this process, over all its endpoints and those it had.
enum peerway_status peerway_quarantine(struct peerway_quarantine_stats *stats);

// What a remote region is.
enum peerway_status peerway_remote_describe(const struct peerway_remote *remote, struct peerway_remote_facts *facts);

// Frees a remote region. Transfers that use it go on.
enum peerway_status peerway_remote_free(struct peerway_remote *remote);

// One range. `direction` is a peerway_direction; options may be null.
enum peerway_status peerway_batch_range(uint32_t direction,
                                        const struct peerway_region *local,
                                        uint64_t local_offset,
                                        const struct peerway_remote *remote,
                                        uint64_t remote_offset,
                                        uint64_t len,
                                        const struct peerway_batch_options *options,
                                        struct peerway_batch **batch);

// Many ranges.
enum peerway_status peerway_batch_vector(uint32_t direction,
                                         const struct peerway_pair *pairs,
                                         size_t count,
                                         const struct peerway_batch_options *options,
                                         struct peerway_batch **batch);

// Blocks of one region from or into blocks of another: as many on both sides, and of the same length.
enum peerway_status peerway_batch_blocks(uint32_t direction,
                                         const struct peerway_region *local,
                                         const struct peerway_blocks *local_blocks,
                                         const struct peerway_remote *remote,
                                         const struct peerway_blocks *remote_blocks,
                                         const struct peerway_batch_options *options,
                                         struct peerway_batch **batch);

// Bytes of a batch.
enum peerway_status peerway_batch_total(const struct peerway_batch *batch, uint64_t *bytes);

// Frees a batch. What was posted or prepared of it goes on.
enum peerway_status peerway_batch_free(struct peerway_batch *batch);

// How a transfer ended: OK, or why not; PENDING where it has not. Moves it along a little. `ended` may be null.
enum peerway_status peerway_transfer_poll(const struct peerway_transfer *transfer, struct peerway_end *ended);

// Waits for the end, for so long; the calling thread works for the transfer meanwhile. Answers as peerway_transfer_poll.
enum peerway_status peerway_transfer_wait(const struct peerway_transfer *transfer,
                                          uint64_t timeout_ns,
                                          struct peerway_end *ended);

// Whether bytes of a transfer that has ended may still change memory: *fence becomes a
// peerway_fence. PENDING where it has not ended.
enum peerway_status peerway_transfer_fence(const struct peerway_transfer *transfer, uint32_t *fence);

// Asks for a transfer to stop. It ends within the fence's deadline, and says then whether anything of it can still change memory.
enum peerway_status peerway_transfer_cancel(const struct peerway_transfer *transfer);

// Adds one to an eventfd when the transfer ends, at once where it has. The descriptor is duplicated: closing it is the
// caller's own affair, at any time.
enum peerway_status peerway_transfer_signal(const struct peerway_transfer *transfer, int eventfd);

// The path that a transfer took, its bytes and its times.
enum peerway_status peerway_transfer_statistics(const struct peerway_transfer *transfer,
                                                struct peerway_transfer_stats *stats);

// Frees a handle to a transfer, which goes on. Its slot is free once it has ended.
enum peerway_status peerway_transfer_free(struct peerway_transfer *transfer);

// A queue of ends with its descriptor.
enum peerway_status peerway_completions_new(struct peerway_completions **completions);

// The descriptor, which is readable while ends are there to be taken, and now and then once too often, when an end was taken while it
// was being told. It belongs to the queue and is closed with it; to be polled, not read.
enum peerway_status peerway_completions_fd(const struct peerway_completions *completions,
                                           int *fd);

// Has a transfer's token in the queue when it ends, at once where it has. The transfer's handle may be freed before.
enum peerway_status peerway_completions_watch(const struct peerway_completions *completions,
                                              const struct peerway_transfer *transfer,
                                              uint64_t token);

// Takes tokens out of the queue, at most `room`; *count becomes their number. Does not wait.
enum peerway_status peerway_completions_take(const struct peerway_completions *completions,
                                             uint64_t *tokens,
                                             size_t room,
                                             size_t *count);

// Frees a queue and closes its descriptor, once no transfer is left whose end it is to hear of.
enum peerway_status peerway_completions_free(struct peerway_completions *completions);

// Posts it.
enum peerway_status peerway_prepared_post(const struct peerway_prepared *prepared, struct peerway_transfer **transfer);

// Posts it with this message after its bytes, whatever it was prepared with.
enum peerway_status peerway_prepared_post_notifying(const struct peerway_prepared *prepared,
                                                    const void *message,
                                                    size_t len,
                                                    struct peerway_transfer **transfer);

// Posts it and waits for its end, which the status is of. `ended` may be null.
enum peerway_status peerway_prepared_run(const struct peerway_prepared *prepared, struct peerway_end *ended);

// Bytes of it.
enum peerway_status peerway_prepared_total(const struct peerway_prepared *prepared, uint64_t *bytes);

// Puts it into a CUDA stream (a CUstream or cudaStream_t, alive and of the GPU whose memory is transferred): it begins when the
// stream has come to it, and what is put there later waits for its end. In a stream that is being captured it becomes part of
// the graph. A transfer that fails lets the stream go on; the handle says how it ended.
enum peerway_status peerway_prepared_enqueue(const struct peerway_prepared *prepared,
                                             void *stream,
                                             struct peerway_enqueued **enqueued);

// Frees it. What was posted goes on.
enum peerway_status peerway_prepared_free(struct peerway_prepared *prepared);

// How often it has come to its end: more than once only in a graph that is launched again.
enum peerway_status peerway_enqueued_runs(const struct peerway_enqueued *enqueued, uint64_t *runs);

// How it ended the last time, waiting for so long for the first. Answers as peerway_transfer_poll.
enum peerway_status peerway_enqueued_wait(const struct peerway_enqueued *enqueued,
                                          uint64_t timeout_ns,
                                          struct peerway_end *ended);

// Frees the handle. What was captured into a graph is kept for it.
enum peerway_status peerway_enqueued_free(struct peerway_enqueued *enqueued);

// Frees the handle and what was kept for graphs: none that it was captured into is launched, or running, any more.
enum peerway_status peerway_enqueued_release(struct peerway_enqueued *enqueued);

// Has everything ready on a GPU that a stream which is being captured may not ask for.
enum peerway_status peerway_gpu_warm_up(uint32_t gpu);

// A transfer in parts, which are released one by one. The batches may be freed.
enum peerway_status peerway_peer_stage(const struct peerway_peer *peer,
                                       const struct peerway_batch *const *batches,
                                       size_t count,
                                       struct peerway_staged **staged);

// Lets a part go.
enum peerway_status peerway_staged_release(const struct peerway_staged *staged, size_t stage);

// Lets a part go when a CUDA stream has come so far. The stream is alive, of the GPU whose memory is transferred, and not being
// captured.
enum peerway_status peerway_staged_release_in(const struct peerway_staged *staged,
                                              size_t stage,
                                              void *stream);

// Lets a part go when a CUDA event has happened. The event is alive, was recorded, and is of the GPU whose memory is transferred.
enum peerway_status peerway_staged_release_when(const struct peerway_staged *staged,
                                                size_t stage,
                                                void *event);

// How a part ended; PENDING where it was not released or has not. Answers as peerway_transfer_poll.
enum peerway_status peerway_staged_poll(const struct peerway_staged *staged, size_t stage, struct peerway_end *ended);

// Waits for all parts that were released, and for those that a stream or an event will release. The first that did not end as done
// is the answer, and the fence is open if any part's is.
enum peerway_status peerway_staged_wait(const struct peerway_staged *staged,
                                        uint64_t timeout_ns,
                                        struct peerway_end *ended);

// Stops every part that was released; the others never go.
enum peerway_status peerway_staged_cancel(const struct peerway_staged *staged);

// Frees it. Parts that were released go on.
enum peerway_status peerway_staged_free(struct peerway_staged *staged);

// What a notification says, until it is freed, and who sent it, where that is not null.
enum peerway_status peerway_notification_message(const struct peerway_notification *notification,
                                                 const void **message,
                                                 size_t *len,
                                                 struct peerway_incarnation *from);

// Frees a notification.
enum peerway_status peerway_notification_free(struct peerway_notification *notification);

// Makes a proxy of an endpoint, with its threads asleep. Options may be null.
enum peerway_status peerway_proxy_new(const struct peerway_endpoint *endpoint,
                                      const struct peerway_proxy_options *options,
                                      struct peerway_proxy_host **proxy);

// Stops a proxy's threads and frees it. No kernel uses it any more.
enum peerway_status peerway_proxy_free(struct peerway_proxy_host *proxy);

// What kernels are given, until the proxy is freed.
enum peerway_status peerway_proxy_handle(const struct peerway_proxy_host *proxy, const struct peerway_proxy **kernel);

// How many rings there are.
enum peerway_status peerway_proxy_rings(const struct peerway_proxy_host *proxy, uint32_t *rings);

// Makes registered memory a window, which the proxy keeps registered: commands name it from then on, and so do those of peers that
// are given peer info made after this.
enum peerway_status peerway_proxy_window(const struct peerway_proxy_host *proxy,
                                         const struct peerway_region *region,
                                         struct peerway_window *window);

// What a peer needs to send to us, to be handed over by any means: it grants the windows, for writing, and the counters. *len becomes
// the number of bytes whether or not there is room for them.
enum peerway_status peerway_proxy_peer_info(const struct peerway_proxy_host *proxy,
                                            void *buffer,
                                            size_t room,
                                            size_t *len);

// The former name of peerway_proxy_peer_info.
enum peerway_status peerway_proxy_card(const struct peerway_proxy_host *proxy, void *buffer, size_t room, size_t *len);

// Has commands to `number` go to this peer, whose proxy gave the info. *windows, which may be null, becomes how many it has.
enum peerway_status peerway_proxy_add_peer(const struct peerway_proxy_host *proxy,
                                           uint16_t number,
                                           const struct peerway_peer *peer,
                                           const void *info,
                                           size_t len,
                                           size_t *windows);

// A window of a peer: number `nth` in the order in which the peer made them. NOTHING where there is none.
enum peerway_status peerway_proxy_peer_window(const struct peerway_proxy_host *proxy,
                                              uint16_t number,
                                              size_t nth,
                                              struct peerway_window *window);

// Has the proxy's threads look for commands: from before a kernel is launched until after it has ended. While it is armed by nobody
// they sleep. To be taken back as often as it was done.
enum peerway_status peerway_proxy_arm(const struct peerway_proxy_host *proxy);

// Takes one peerway_proxy_arm back.
enum peerway_status peerway_proxy_disarm(const struct peerway_proxy_host *proxy);

// From now on, whenever the rule's counter rises, what has arrived is copied on, and then others are told; by the proxy's threads,
// while it is armed.
enum peerway_status peerway_proxy_forward(const struct peerway_proxy_host *proxy,
                                          const struct peerway_forward *rule);

// Takes the rule of a counter away; NOTHING where it had none.
enum peerway_status peerway_proxy_stop_forwarding(const struct peerway_proxy_host *proxy, uint16_t counter);

// Where a counter of ours is.
enum peerway_status peerway_proxy_counter(const struct peerway_proxy_host *proxy, uint16_t counter, uint64_t *value);

// Waits until a counter of ours has come to a value; PENDING where it has not in time. *value, which may be null, becomes where it is.
enum peerway_status peerway_proxy_wait_counter(const struct peerway_proxy_host *proxy,
                                               uint16_t counter,
                                               uint64_t wanted,
                                               uint64_t timeout_ns,
                                               uint64_t *value);

// The first command that failed since this was asked last; NOTHING where none has. The call starts a new fault epoch: a later quiet of a kernel
// reports only commands that fail after it, except for peers that are gone.
enum peerway_status peerway_proxy_take_fault(const struct peerway_proxy_host *proxy,
                                             struct peerway_proxy_fault *fault);

// What a fault's code means, as text with its zero byte; NOTHING for a number that is none.
enum peerway_status peerway_fault_text(uint32_t code, char *buffer, size_t room, size_t *len);

// What a proxy did so far.
enum peerway_status peerway_proxy_statistics(const struct peerway_proxy_host *proxy, struct peerway_proxy_stats *stats);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* PEERWAY_H */

// Former names.
#define PEERWAY_STATUS_NOT_A_CARD PEERWAY_STATUS_NOT_PEER_INFO
