// Peerway for C and C++: transfers between the memories of two processes, by one-sided reads and
// writes.
//
// `cargo xtask c-header` generates this file from crates/peerway-c/src; edit those files.
//
// - Calls return a peerway_status. peerway_last_error() describes the last failed call of the
//   thread. No call throws an exception or ends the process: an internal error is
//   PEERWAY_STATUS_PANIC.
// - Calls create handles (pointers to structs without members). The calls that end in _free free
//   them, in any order. Handles are numbers, not addresses: a freed handle or one of another kind
//   gives PEERWAY_STATUS_BAD_HANDLE. Any thread may use any handle, and several threads may use one
//   at once. A handle that is freed during a call of another thread stays until that call returns.
// - The last arguments receive the results. They must not be null unless the call allows it. If a
//   call creates no handle, it sets the handle to null.
// - Structs with a `size` grow in later versions. Set all bytes to zero and `size` to sizeof the
//   struct. Zero means the default.
// - Times are in nanoseconds, including PEERWAY_FOREVER.
// - Enumerations are passed as uint32_t. A number without a meaning gives
//   PEERWAY_STATUS_BAD_ARGUMENT.
// - After a fork, the child cannot use its handles to endpoints and to the objects that belong to
//   them: calls return PEERWAY_STATUS_FORKED.
//
// The caller guarantees that pointers lead to memory of the given length, that no other thread
// changes this memory during the call, and that texts end with a zero byte. The library checks
// everything else.
//
//     struct peerway_endpoint *endpoint;
//     if (peerway_endpoint_new(NULL, &endpoint) != PEERWAY_STATUS_OK) {
//         fprintf(stderr, "%s\n", peerway_last_error());
//     }


#ifndef PEERWAY_H
#define PEERWAY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// The version of this header.
#define PEERWAY_VERSION_MAJOR 0

// The version of this header.
#define PEERWAY_VERSION_MINOR 1

// The version of this header.
#define PEERWAY_VERSION_PATCH 0

// A time-out that never expires.
#define PEERWAY_FOREVER UINT64_MAX

// The length of a descriptor in bytes.
#define PEERWAY_DESCRIPTOR_LEN 64

// The maximum length of a notification in bytes.
#define PEERWAY_MAX_NOTIFICATION (1 << 20)

// The result of a call. For every status but OK, PENDING and NOTHING, peerway_last_error() returns
// a message.
//
// The numbers never change. Later versions may add some.
typedef enum peerway_status {
    // Success.
    PEERWAY_STATUS_OK = 0,
    // Not yet: within the time-out the transfer has not ended, the counter has not reached its
    // value, or no peer has connected.
    PEERWAY_STATUS_PENDING = 1,
    // There is none: no fault, or no object of that number.
    PEERWAY_STATUS_NOTHING = 2,
    // A pointer is null that must not be null.
    PEERWAY_STATUS_NULL_ARGUMENT = 10,
    // The handle was freed, has another type, or is not a handle.
    PEERWAY_STATUS_BAD_HANDLE = 11,
    // The size field of a struct is wrong, or fields are set that this library does not know.
    PEERWAY_STATUS_BAD_SIZE = 12,
    // An argument has an invalid value.
    PEERWAY_STATUS_BAD_ARGUMENT = 13,
    // The buffer is too small. The length argument holds the needed size.
    PEERWAY_STATUS_TOO_SMALL = 14,
    // The maximum number of handles of one type exists already.
    PEERWAY_STATUS_TOO_MANY_HANDLES = 15,
    // The library has a bug and panicked. The message says where. The handle that was used may no
    // longer work.
    PEERWAY_STATUS_PANIC = 16,
    // A setting has an unknown name or an invalid value.
    PEERWAY_STATUS_INVALID_SETTING = 20,
    // The pinned transport is not part of this build.
    PEERWAY_STATUS_TRANSPORT_UNAVAILABLE = 21,
    // RDMA is pinned but cannot be used.
    PEERWAY_STATUS_NO_RDMA = 22,
    // The endpoint cannot listen on the address.
    PEERWAY_STATUS_LISTEN = 23,
    // No network interface has that name.
    PEERWAY_STATUS_NO_INTERFACE = 24,
    // A system call failed.
    PEERWAY_STATUS_OS = 25,
    // The endpoint is closed.
    PEERWAY_STATUS_ENDPOINT_CLOSED = 26,
    // The endpoint belongs to the parent process.
    PEERWAY_STATUS_FORKED = 27,
    // The range exceeds its region.
    PEERWAY_STATUS_OUTSIDE = 30,
    // The pointer and the length are not a range of memory.
    PEERWAY_STATUS_BAD_RANGE = 31,
    // The table of advertisements is full.
    PEERWAY_STATUS_TOO_MANY_ADVERTISEMENTS = 32,
    // Memory cannot be allocated.
    PEERWAY_STATUS_ALLOCATE = 33,
    // The operating system returned no random bytes.
    PEERWAY_STATUS_NO_RANDOMNESS = 34,
    // There is no usable GPU driver.
    PEERWAY_STATUS_NO_DRIVER = 40,
    // There is no GPU with that number.
    PEERWAY_STATUS_NO_SUCH_GPU = 41,
    // A GPU operation failed, or the address is not GPU memory.
    PEERWAY_STATUS_GPU = 42,
    // The bytes are not endpoint metadata.
    PEERWAY_STATUS_INVALID_METADATA = 50,
    // No address of the peer can be reached.
    PEERWAY_STATUS_UNREACHABLE = 51,
    // The peer did not answer in time.
    PEERWAY_STATUS_TIMED_OUT = 52,
    // The peer has an incompatible version.
    PEERWAY_STATUS_PEER_INCOMPATIBLE = 53,
    // The peer violated the protocol.
    PEERWAY_STATUS_PEER_MISBEHAVED = 54,
    // The metadata or descriptor comes from another incarnation: the endpoint was restarted.
    PEERWAY_STATUS_OTHER_INCARNATION = 55,
    // The peer accepts no more sessions.
    PEERWAY_STATUS_PEER_FULL = 56,
    // A pinned path is not available.
    PEERWAY_STATUS_PATH_UNAVAILABLE = 57,
    // The peer refused the connection.
    PEERWAY_STATUS_PEER_REFUSES = 58,
    // The bytes are not a descriptor.
    PEERWAY_STATUS_INVALID_DESCRIPTOR = 59,
    // The peer's memory cannot be mapped.
    PEERWAY_STATUS_MAP = 60,
    // The connection cannot be secured: the peer did not prove its identity, or bytes were
    // changed.
    PEERWAY_STATUS_NOT_SECURE = 61,
    // One of the two endpoints does not admit the other (PEERWAY_IDENTITY).
    PEERWAY_STATUS_NOT_ADMITTED = 62,
    // The batch is invalid: lengths or list lengths differ, or a list is too long.
    PEERWAY_STATUS_INVALID_WORK = 70,
    // All transfer slots are in use.
    PEERWAY_STATUS_BUSY = 71,
    // The region was not advertised for that direction.
    PEERWAY_STATUS_ACCESS = 72,
    // The remote region belongs to another peer.
    PEERWAY_STATUS_OTHER_PEER = 73,
    // The notification is longer than PEERWAY_MAX_NOTIFICATION.
    PEERWAY_STATUS_NOTIFICATION_TOO_LONG = 74,
    // One transfer uses local memory of several GPUs.
    PEERWAY_STATUS_MIXED_GPUS = 75,
    // There is no stage with that number.
    PEERWAY_STATUS_NO_SUCH_STAGE = 76,
    // The stage was released already.
    PEERWAY_STATUS_ALREADY_RELEASED = 77,
    // The peer is gone: its process ended, or every lane to it broke.
    PEERWAY_STATUS_PEER_GONE = 80,
    // The peer has sent nothing for too long.
    PEERWAY_STATUS_PEER_SILENT = 81,
    // The owner refused: it has no such region, the token or the direction is wrong, or the region
    // is advertised to another peer.
    PEERWAY_STATUS_REMOTE_ACCESS = 82,
    // The range exceeds the memory that the peer advertised.
    PEERWAY_STATUS_OUT_OF_BOUNDS = 83,
    // The peer revoked its region.
    PEERWAY_STATUS_REVOKED = 84,
    // The peer's queue of notifications is full.
    PEERWAY_STATUS_NOTIFICATIONS_FULL = 85,
    // The peer has no room for another counter.
    PEERWAY_STATUS_COUNTERS_FULL = 86,
    // Registered memory was unmapped.
    PEERWAY_STATUS_FAULT = 87,
    // A lane broke. The notification may or may not have been delivered.
    PEERWAY_STATUS_DELIVERY_UNKNOWN = 88,
    // A device refused or failed the request.
    PEERWAY_STATUS_DEVICE = 89,
    // The transfer was cancelled.
    PEERWAY_STATUS_CANCELLED = 90,
    // The transfer's deadline passed.
    PEERWAY_STATUS_DEADLINE = 91,
    // A number for a proxy is out of range.
    PEERWAY_STATUS_OUT_OF_RANGE = 100,
    // A forwarding rule is invalid.
    PEERWAY_STATUS_BAD_RULE = 101,
    // There is no room for another window.
    PEERWAY_STATUS_NO_ROOM = 102,
    // The peer number is in use.
    PEERWAY_STATUS_TAKEN = 103,
    // The bytes are not the peer info of a proxy.
    PEERWAY_STATUS_NOT_PEER_INFO = 104,
    // The endpoint has no room for another proxy.
    PEERWAY_STATUS_TOO_MANY_PROXIES = 105,
    // A thread cannot be started.
    PEERWAY_STATUS_THREAD = 106,
    // The proxy is not armed.
    PEERWAY_STATUS_NOT_ARMED = 107,
    // An error that this header has no number for. The message describes it.
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

// The lane of a transfer.
typedef enum peerway_class {
    // By size: small transfers take the latency lane.
    PEERWAY_CLASS_AUTO = 0,
    // The latency lane, which goes ahead of bulk transfers.
    PEERWAY_CLASS_LATENCY = 1,
    // A bulk lane, which does not delay latency transfers.
    PEERWAY_CLASS_BULK = 2,
} peerway_class;

// How a GPU copies between buffers that it can access.
typedef enum peerway_copier {
    // Launch a kernel for every list of copies.
    PEERWAY_COPIER_LAUNCHED = 0,
    // Keep a kernel on the GPU while there is work. It starts copies sooner, but takes two
    // multiprocessors per proxy thread.
    PEERWAY_COPIER_RESIDENT = 1,
    // Use the driver's copies, with copy engines where possible.
    PEERWAY_COPIER_ENGINES = 2,
} peerway_copier;

// The direction of a transfer.
typedef enum peerway_direction {
    // From local memory to the peer's memory.
    PEERWAY_DIRECTION_WRITE = 0,
    // From the peer's memory to local memory.
    PEERWAY_DIRECTION_READ = 1,
} peerway_direction;

// Whether bytes of an ended transfer may still change memory.
typedef enum peerway_fence {
    // No byte of the transfer changes memory any more.
    PEERWAY_FENCE_HELD = 0,
    // Bytes of the transfer may still change memory. Call again: the result becomes HELD when the
    // peer drains or dies.
    PEERWAY_FENCE_OPEN = 1,
    // Bytes of the transfer may still change memory, and no proof of the contrary can arrive any
    // more.
    PEERWAY_FENCE_LOST = 2,
} peerway_fence;

// What a transfer does.
typedef enum peerway_operation {
    // Writes memory of the peer. A notification or a count may follow the bytes.
    PEERWAY_OPERATION_WRITE = 0,
    // Reads memory of the peer.
    PEERWAY_OPERATION_READ = 1,
    // Sends a notification alone.
    PEERWAY_OPERATION_NOTIFY = 2,
    // Adds one to a counter of the peer, and does nothing else.
    PEERWAY_OPERATION_COUNT = 3,
} peerway_operation;

// A path to a peer.
typedef enum peerway_path {
    // Both endpoints live in this process.
    PEERWAY_PATH_SAME_PROCESS = 0,
    // This process maps the peer's memory.
    PEERWAY_PATH_LOCAL_MAP = 1,
    // The kernel copies between the two processes.
    PEERWAY_PATH_LOCAL_CMA = 2,
    // A ring in shared memory.
    PEERWAY_PATH_LOCAL_RING = 3,
    // TCP connections.
    PEERWAY_PATH_TCP = 4,
    // RDMA devices with reliable connections (InfiniBand, RoCE).
    PEERWAY_PATH_VERBS = 5,
    // RDMA devices with reliable datagrams (AWS EFA).
    PEERWAY_PATH_EFA = 6,
    // A GPU copies.
    PEERWAY_PATH_GPU_IPC = 7,
    // A path that this header does not know.
    PEERWAY_PATH_OTHER = 127,
} peerway_path;

// The work of a transfer. It is checked once, and any thread may post it any number of times.
typedef struct peerway_batch peerway_batch;

// A queue of completions, in the order of arrival.
typedef struct peerway_completions peerway_completions;

// One end of transfers. An endpoint listens, connects, and owns registered memory.
typedef struct peerway_endpoint peerway_endpoint;

// A transfer that was enqueued in a CUDA stream.
typedef struct peerway_enqueued peerway_enqueued;

// A message from a peer.
typedef struct peerway_notification peerway_notification;

// A connected peer: one incarnation of a remote endpoint.
typedef struct peerway_peer peerway_peer;

// A batch that is prepared for its peer. Any thread may post it any number of times.
typedef struct peerway_prepared peerway_prepared;

// The argument of a kernel. peerway_abi.h has its layout, for peerway_device.cuh. The host only
// passes its address on.
typedef struct peerway_proxy peerway_proxy;

// The host's handle to a proxy. A proxy has rings that kernels write commands into, threads that
// carry them out, windows (registered memory that commands name by offset), and counters that
// peers raise and kernels wait for.
//
// The kernels' argument is a different struct, peerway_proxy.
typedef struct peerway_proxy_host peerway_proxy_host;

// Registered memory of this process, on the host or on a GPU.
typedef struct peerway_region peerway_region;

// Memory that a peer advertised.
typedef struct peerway_remote peerway_remote;

// A transfer in stages that are checked in advance. For example, the transfer of layer `i` runs
// while layer `i + 1` is computed.
typedef struct peerway_staged peerway_staged;

// A posted transfer. It continues after its handle is freed. Every transfer has a deadline.
typedef struct peerway_transfer peerway_transfer;

// A setting by the name of its environment variable. This struct never changes.
typedef struct peerway_setting {
    // The name ("PEERWAY_DEADLINE"). docs/configuration.md lists the names.
    const char *name;
    // The value, as in the environment ("5s"). Empty means the default.
    const char *value;
} peerway_setting;

// Settings of an endpoint. A field that is zero or null takes its value from the environment
// (`peerway doctor --config` lists the variables), or else the default.
typedef struct peerway_endpoint_options {
    // sizeof(struct peerway_endpoint_options).
    size_t size;
    // The address to listen on: an IP address, with or without a port ("10.0.0.1:5000",
    // "[::1]:0").
    const char *bind;
    // The IP address to advertise to peers instead of the bound one.
    const char *advertise;
    // Network interfaces to use: prefixes of names, separated by commas.
    const char *interfaces;
    // RDMA devices to use: names or numbers, separated by commas.
    const char *rdma_devices;
    // The only allowed transport: auto, local, local-map, local-cma, local-ring, tcp, ib or efa.
    const char *transport;
    // The deadline of transfers that set none.
    uint64_t deadline_ns;
    // The time of silence after which a peer counts as dead.
    uint64_t detect_ns;
    // How long a cancel or revoke waits for its fence.
    uint64_t fence_ns;
    // How long a connect or an import may take.
    uint64_t connect_timeout_ns;
    // How long a waiting thread polls before it blocks.
    uint64_t spin_ns;
    // Bytes of notifications that the endpoint keeps for the application.
    uint64_t notify_bytes;
    // The most transfers in flight.
    uint32_t slots;
    // Bulk lanes per TCP peer. At most 64, as for the next two fields.
    uint16_t lanes;
    // The number of progress threads. Peers are spread over them.
    uint16_t shards;
    // Threads that may copy for one large local transfer.
    uint16_t copy_threads;
    // Must be zero.
    uint16_t reserved[3];
    // Any other setting, or a setting above as text. Null if there are none. The fields above take
    // precedence.
    const struct peerway_setting *settings;
    // The number of settings.
    size_t settings_count;
} peerway_endpoint_options;

// The identity of one life of an endpoint. A restarted endpoint has another one.
typedef struct peerway_incarnation {
    // Random bytes.
    uint8_t bytes[16];
} peerway_incarnation;

// Statistics of an endpoint.
typedef struct peerway_endpoint_stats {
    // sizeof(struct peerway_endpoint_stats).
    size_t size;
    // The number of processors that its threads may run on. peerway_endpoint_cpus lists them. 0 if
    // unknown.
    uint64_t cpus;
    // Peers with an open session.
    uint64_t peers;
    // Transfers posted to all peers. This and the numbers below count peers that are gone too.
    uint64_t transfers;
    // Bytes written to peers.
    uint64_t bytes_written;
    // Bytes read from peers.
    uint64_t bytes_read;
    // Bytes that peers read from this endpoint.
    uint64_t bytes_served;
    // Bytes that peers wrote to this endpoint.
    uint64_t bytes_landed;
    // Lanes that broke.
    uint64_t lanes_lost;
} peerway_endpoint_stats;

// Facts about a peer.
typedef struct peerway_peer_facts {
    // sizeof(struct peerway_peer_facts).
    size_t size;
    // The identity of its incarnation.
    struct peerway_incarnation incarnation;
    // The best path to the peer: a peerway_path. Memory that is not shareable takes the next best
    // path.
    uint32_t path;
    // Whether an owner's limits on its memory bind only peers that follow the protocol, on that
    // path.
    uint32_t trusted;
    // Whether transfers can be posted.
    uint32_t alive;
    // Whether this endpoint opened the connection. Zero if the peer did.
    uint32_t initiator;
    // How the TCP connections to the peer protect what they carry (PEERWAY_DATA): 0 off,
    // 1 integrity, 2 encrypt. The path says what that covers.
    uint32_t data;
    // Zero.
    uint32_t reserved;
} peerway_peer_facts;

// Statistics of a peer, on every path. The peer tells what it moved without this side's processor:
// with each notification and count, and otherwise within an eighth of the detection time.
typedef struct peerway_peer_stats {
    // sizeof(struct peerway_peer_stats).
    size_t size;
    // Posted transfers.
    uint64_t transfers;
    // Bytes that this endpoint wrote to the peer.
    uint64_t bytes_written;
    // Bytes that this endpoint read from the peer.
    uint64_t bytes_read;
    // Bytes that the peer read from this endpoint.
    uint64_t bytes_served;
    // Bytes that the peer wrote to this endpoint.
    uint64_t bytes_landed;
    // Lanes that broke.
    uint64_t lanes_lost;
    // Lanes that were closed, because a record on them was not what the peer sent (PEERWAY_DATA).
    uint64_t corrupt_records;
    // TCP lanes that took the place of broken ones.
    uint64_t lanes_reopened;
} peerway_peer_stats;

// The end of a transfer.
typedef struct peerway_end {
    // sizeof(struct peerway_end).
    size_t size;
    // The result: a peerway_status. OK if every byte has arrived.
    int32_t status;
    // If not zero, bytes of the transfer may still change memory, because the peer did not answer
    // in time. The library keeps memory that it allocated until they cannot. The caller must keep
    // other memory valid until peerway_transfer_fence() returns HELD.
    uint32_t fence_open;
} peerway_end;

// Facts about a region.
typedef struct peerway_region_facts {
    // sizeof(struct peerway_region_facts).
    size_t size;
    // The address of the first byte. Only GPUs can use the address of GPU memory.
    uint64_t address;
    // The length in bytes.
    uint64_t len;
    // Whether it is GPU memory.
    uint32_t on_gpu;
    // The number of the GPU in this process, for GPU memory.
    uint32_t gpu;
    // Whether peers on this host can map it.
    uint32_t shareable;
    // Zero.
    uint32_t reserved;
} peerway_region_facts;

// Memory of this process that was released while a peer may still access it. It stays allocated,
// or its release function is not called, until the peer stops using it, closes its link or dies.
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

// What an endpoint has refused to peers, by reason. The numbers only rise. The settings of the
// limits are PEERWAY_MAX_HANDSHAKES, PEERWAY_MAX_SESSIONS, PEERWAY_MAX_SESSIONS_PER_ADDRESS,
// PEERWAY_MAX_LANES, PEERWAY_MESSAGE_BYTES, PEERWAY_NOTIFY_BYTES and PEERWAY_FREE_DESCRIPTORS.
typedef struct peerway_refusal_stats {
    // sizeof(struct peerway_refusal_stats).
    size_t size;
    // Half-open connections that were dropped, because the endpoint or their address had too many
    // handshakes in progress.
    uint64_t handshakes;
    // Sessions, because the endpoint or their address had too many.
    uint64_t sessions;
    // Lanes, because their session had too many.
    uint64_t lanes;
    // Times at which the endpoint accepted no connection to keep file descriptors free.
    uint64_t descriptors;
    // Connections of other users to the local socket.
    uint64_t other_users;
    // Notifications, because too many bytes of messages were arriving.
    uint64_t message_bytes;
    // Lanes that were closed, because a message on them did not arrive in time.
    uint64_t slow_messages;
    // Notifications, because the queue or the peer's share of it was full.
    uint64_t notifications;
    // Counts, because the counters or the peer's share of them were full.
    uint64_t counters;
    // Counts by peers without a right to count.
    uint64_t counts_without_right;
    // Lanes that were closed, because a record on them was not what the peer sent (PEERWAY_DATA).
    uint64_t corrupt_records;
    // Keys to memory for one queue pair alone, because an RDMA device had no memory window left.
    // The peer got a key that is valid for all peers, or none (PEERWAY_RDMA_WINDOWS).
    uint64_t windows;
} peerway_refusal_stats;

// Facts about a remote region.
typedef struct peerway_remote_facts {
    // sizeof(struct peerway_remote_facts).
    size_t size;
    // The length in bytes.
    uint64_t len;
    // The granted access: a peerway_access.
    uint32_t access;
    // Whether the owner has revoked it.
    uint32_t revoked;
    // Whether this process can access the memory directly, without lanes.
    uint32_t is_direct;
    // The path of direct access: a peerway_path. 0 without direct access.
    uint32_t path;
} peerway_remote_facts;

// Options of a batch.
typedef struct peerway_batch_options {
    // sizeof(struct peerway_batch_options).
    size_t size;
    // The transfer ends this long after its post, whatever its state. Zero means the endpoint's
    // deadline.
    uint64_t deadline_ns;
    // A notification that the peer receives once, after the bytes. Null for none. The library
    // copies it.
    const void *notify;
    // The length of the notification in bytes.
    size_t notify_len;
    // If not zero, a counter of the peer rises by one, once, after the bytes.
    uint32_t counts;
    // The id of that counter.
    uint32_t counter;
    // A peerway_class.
    uint32_t lane_class;
    // Must be zero.
    uint32_t reserved;
} peerway_batch_options;

// One range of a vector. This struct never changes.
typedef struct peerway_pair {
    // Local memory.
    const struct peerway_region *local;
    // The offset of the first byte in it.
    uint64_t local_offset;
    // The peer's memory.
    const struct peerway_remote *remote;
    // The offset of the first byte in it.
    uint64_t remote_offset;
    // The length in bytes.
    uint64_t len;
} peerway_pair;

// Blocks of equal length in a region. Entry `i` starts at base + indices[i] * stride.
typedef struct peerway_blocks {
    // sizeof(struct peerway_blocks).
    size_t size;
    // The offset of block 0.
    uint64_t base;
    // The distance from one block to the next, in bytes.
    uint64_t stride;
    // The length of a block in bytes.
    uint64_t len;
    // The blocks, in the order of the transfer. The library copies the list.
    const uint32_t *indices;
    // The number of indices.
    size_t count;
} peerway_blocks;

// What is known of a transfer that failed.
typedef struct peerway_failure {
    // sizeof(struct peerway_failure).
    size_t size;
    // The incarnation of the peer.
    struct peerway_incarnation incarnation;
    // Bytes that are known to have arrived.
    uint64_t bytes_done;
    // Bytes of the batch. Zero for a notification or a count alone.
    uint64_t bytes_total;
    // The result: a peerway_status.
    int32_t status;
    // Whether bytes of the transfer may still change memory: a peerway_fence.
    uint32_t fence;
    // The path of the transfer: a peerway_path.
    uint32_t path;
    // What the transfer did: a peerway_operation.
    uint32_t operation;
    // The address of the peer, as text with its zero byte.
    char peer[64];
    // The last end of a lane or of the session, with the operating system's reason, as text with
    // its zero byte. Cut if it is longer; empty if there was none.
    char last_event[256];
} peerway_failure;

// Bytes and times of a transfer.
typedef struct peerway_transfer_stats {
    // sizeof(struct peerway_transfer_stats).
    size_t size;
    // Bytes that are known to have arrived.
    uint64_t bytes_done;
    // Bytes of the batch.
    uint64_t bytes_total;
    // Time from the post to the first byte on the path. Zero if unknown.
    uint64_t until_sent_ns;
    // Time from the post to the end. Zero if unknown.
    uint64_t until_ended_ns;
    // The path of the transfer: a peerway_path.
    uint32_t path;
    // Zero.
    uint32_t reserved;
} peerway_transfer_stats;

// Settings of a proxy. Zero means the default.
typedef struct peerway_proxy_options {
    // sizeof(struct peerway_proxy_options).
    size_t size;
    // If not zero, the rings are for kernels of a GPU. Otherwise they are for CPU threads, which
    // compile peerway_device.cuh for the CPU.
    uint32_t on_gpu;
    // The number of that GPU.
    uint32_t gpu;
    // Threads that drain rings. Default: a quarter of the processors, at most four.
    uint32_t threads;
    // Rings, which are divided among the threads. Default: eight per thread.
    uint32_t rings;
    // Commands that a ring holds. Default: 2048.
    uint32_t slots;
    // The most peers. Default: 64.
    uint32_t peers;
    // Counters that peers can raise. Default: 1024.
    uint32_t counters;
    // How a GPU copies between buffers that it can access: a peerway_copier.
    uint32_t copier;
    // The longest wait of a kernel for room, an answer or a counter. Default: 10 s.
    uint64_t timeout_ns;
} peerway_proxy_options;

// The place of a window in the offset space of its side. This struct never changes.
typedef struct peerway_window {
    // The base that a kernel adds to an offset in the window.
    uint64_t base;
    // The length in bytes.
    uint64_t len;
} peerway_window;

// A part of a region. This struct never changes.
typedef struct peerway_place {
    // The region.
    const struct peerway_region *region;
    // The offset of the first byte in it.
    uint64_t offset;
    // The length in bytes.
    uint64_t len;
} peerway_place;

// A counter of a numbered peer. This struct never changes.
typedef struct peerway_answer {
    // The peer's number.
    uint16_t peer;
    // The peer's counter.
    uint16_t counter;
} peerway_answer;

// A forwarding rule. When a counter of this proxy rises, the proxy copies the arrived bytes on,
// and then raises other counters.
typedef struct peerway_forward {
    // sizeof(struct peerway_forward).
    size_t size;
    // The bytes that have arrived when the counter rises.
    struct peerway_place from;
    // The destinations of the copies. Each has the same length as `from`.
    const struct peerway_place *to;
    // The number of destinations.
    size_t to_count;
    // Counters of this proxy that rise by one after the copies.
    const uint16_t *then;
    // The number of these counters.
    size_t then_count;
    // Counters of peers that rise by one after the copies. They tell a sender that its bytes have
    // reached all destinations.
    const struct peerway_answer *answers;
    // The number of these counters.
    size_t answer_count;
    // The counter that triggers the rule. A counter has at most one rule.
    uint16_t counter;
    // Must be zero.
    uint16_t reserved[3];
} peerway_forward;

// A command that failed.
typedef struct peerway_proxy_fault {
    // sizeof(struct peerway_proxy_fault).
    size_t size;
    // The position of the command in its ring. If several commands were submitted together, the
    // first position.
    uint64_t position;
    // The reason: one of PEERWAY_FAULT_* in peerway_abi.h. peerway_fault_text describes it.
    uint32_t code;
    // The number of the command's peer.
    uint32_t peer;
    // The ring of the command.
    uint32_t ring;
    // The operation: one of PEERWAY_OP_* in peerway_abi.h.
    uint32_t op;
} peerway_proxy_fault;

// Statistics of a proxy.
typedef struct peerway_proxy_stats {
    // sizeof(struct peerway_proxy_stats).
    size_t size;
    // Commands taken out of rings.
    uint64_t commands;
    // Submitted puts.
    uint64_t puts;
    // Bytes of these puts.
    uint64_t bytes;
    // How often counters of peers were raised.
    uint64_t counts;
    // Requests that carried puts. Puts that a proxy thread copied itself are not included.
    uint64_t flights;
    // Commands that failed.
    uint64_t faults;
} peerway_proxy_stats;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// The version of the library: major << 16 | minor << 8 | patch.
uint32_t peerway_version(void);

// The version of the library as text.
const char *peerway_version_text(void);

// The error message of the last call of this thread that failed. Never null; empty if no call has
// failed. The text stays valid until the next call of this thread that fails.
const char *peerway_last_error(void);

// The name of a status ("BUSY" for PEERWAY_STATUS_BUSY). "?" if the number is not a status.
const char *peerway_status_name(int32_t status);

// Creates an endpoint. It listens when this call returns. `options` may be null.
enum peerway_status peerway_endpoint_new(const struct peerway_endpoint_options *options,
                                         struct peerway_endpoint **endpoint);

// Closes an endpoint: its transfers end, its threads stop, its sockets close. The handle stays
// valid until it is freed.
enum peerway_status peerway_endpoint_close(const struct peerway_endpoint *endpoint);

// Closes an endpoint and frees its handle. Here and in all _free calls, null has no effect.
enum peerway_status peerway_endpoint_free(struct peerway_endpoint *endpoint);

// Sets *closed to whether an endpoint is closed or belongs to the parent process.
enum peerway_status peerway_endpoint_is_closed(const struct peerway_endpoint *endpoint, bool *closed);

// Copies the metadata that other endpoints need to connect: a few hundred bytes, to be sent by any
// means. Sets *len to the number of bytes whether or not they fit.
enum peerway_status peerway_endpoint_metadata(const struct peerway_endpoint *endpoint,
                                              void *buffer,
                                              size_t room,
                                              size_t *len);

// The identity of this life of the endpoint.
enum peerway_status peerway_endpoint_incarnation(const struct peerway_endpoint *endpoint,
                                                 struct peerway_incarnation *incarnation);

// The nth address that peers can connect to, best first, as text with its zero byte
// ("10.0.0.1:5000"). Returns NOTHING if there are fewer addresses.
enum peerway_status peerway_endpoint_address(const struct peerway_endpoint *endpoint,
                                             size_t nth,
                                             char *buffer,
                                             size_t room,
                                             size_t *len);

// Fills in the statistics of an endpoint.
enum peerway_status peerway_endpoint_statistics(const struct peerway_endpoint *endpoint,
                                                struct peerway_endpoint_stats *stats);

// The processors that the endpoint's threads may run on, as text with its zero byte ("0-3,8").
// Empty if unknown.
enum peerway_status peerway_endpoint_cpus(const struct peerway_endpoint *endpoint,
                                          char *buffer,
                                          size_t room,
                                          size_t *len);

// Checks metadata without connecting, and sets *incarnation to the identity of its endpoint.
enum peerway_status peerway_metadata_incarnation(const void *metadata,
                                                 size_t len,
                                                 struct peerway_incarnation *incarnation);

// Connects to the endpoint that gave this metadata. A second connect to the same incarnation gives
// a second handle to the same peer. If timeout_ns is zero, the endpoint's connect time-out
// applies.
enum peerway_status peerway_endpoint_connect(const struct peerway_endpoint *endpoint,
                                             const void *metadata,
                                             size_t len,
                                             uint64_t timeout_ns,
                                             struct peerway_peer **peer);

// Connects to the endpoint that listens at "host:port" ("[::1]:5000"), whatever its identity.
enum peerway_status peerway_endpoint_connect_address(const struct peerway_endpoint *endpoint,
                                                     const char *address,
                                                     uint64_t timeout_ns,
                                                     struct peerway_peer **peer);

// Returns the next peer that connected to this endpoint. Waits at most timeout_ns; PENDING if none
// connected. The endpoint accepts peers in any case; this call only returns them.
enum peerway_status peerway_endpoint_accept(const struct peerway_endpoint *endpoint,
                                            uint64_t timeout_ns,
                                            struct peerway_peer **peer);

// Fills in a handle to every live peer. The caller frees each. Sets *count to the number of peers.
// If there is not enough room, no handle is made.
enum peerway_status peerway_endpoint_peers(const struct peerway_endpoint *endpoint,
                                           struct peerway_peer **peers,
                                           size_t room,
                                           size_t *count);

// Returns the oldest notification. Waits at most timeout_ns; PENDING if there is none.
enum peerway_status peerway_endpoint_notification(const struct peerway_endpoint *endpoint,
                                                  uint64_t timeout_ns,
                                                  struct peerway_notification **notification);

// Sets *value to the number of arrivals that the counter has counted.
enum peerway_status peerway_endpoint_counter(const struct peerway_endpoint *endpoint, uint32_t id, uint64_t *value);

// Waits until the counter has counted at least `wanted` arrivals. PENDING if it has not within
// timeout_ns. Sets *value to the count. `value` may be null.
enum peerway_status peerway_endpoint_wait_counter(const struct peerway_endpoint *endpoint,
                                                  uint32_t id,
                                                  uint64_t wanted,
                                                  uint64_t timeout_ns,
                                                  uint64_t *value);

// Removes a counter, so that its id can be used again from zero. Sets *value to its last count.
// `value` may be null.
enum peerway_status peerway_endpoint_reset_counter(const struct peerway_endpoint *endpoint,
                                                   uint32_t id,
                                                   uint64_t *value);

// The name of a peerway_path ("local-map"). "?" if the number is not a path.
const char *peerway_path_name(uint32_t path);

// Fills in the facts about a peer.
enum peerway_status peerway_peer_describe(const struct peerway_peer *peer, struct peerway_peer_facts *facts);

// The path to a peer and the reason for its choice, as text with its zero byte.
enum peerway_status peerway_peer_path(const struct peerway_peer *peer, char *buffer, size_t room, size_t *len);

// The address of the peer in this session, as text with its zero byte.
enum peerway_status peerway_peer_address(const struct peerway_peer *peer, char *buffer, size_t room, size_t *len);

// Fills in the statistics of a peer.
enum peerway_status peerway_peer_statistics(const struct peerway_peer *peer, struct peerway_peer_stats *stats);

// Closes the session with a peer. Its transfers end, and a new connect opens a new session. The
// handle stays valid until it is freed.
enum peerway_status peerway_peer_remove(const struct peerway_peer *peer);

// Frees a handle to a peer. The session stays open.
enum peerway_status peerway_peer_free(struct peerway_peer *peer);

// Turns a descriptor of the peer into remote memory that transfers can use. The first import of a
// descriptor sends a request to the peer.
enum peerway_status peerway_peer_import(const struct peerway_peer *peer,
                                        const void *descriptor,
                                        size_t len,
                                        struct peerway_remote **remote);

// Writes one range of local memory to the peer's memory, and waits for the end.
enum peerway_status peerway_peer_write(const struct peerway_peer *peer,
                                       const struct peerway_region *local,
                                       uint64_t local_offset,
                                       const struct peerway_remote *remote,
                                       uint64_t remote_offset,
                                       uint64_t len);

// Reads one range of the peer's memory into local memory, and waits for the end.
enum peerway_status peerway_peer_read(const struct peerway_peer *peer,
                                      const struct peerway_region *local,
                                      uint64_t local_offset,
                                      const struct peerway_remote *remote,
                                      uint64_t remote_offset,
                                      uint64_t len);

// Posts a batch. Returns within microseconds for any size.
enum peerway_status peerway_peer_post(const struct peerway_peer *peer,
                                      const struct peerway_batch *batch,
                                      struct peerway_transfer **transfer);

// Posts a batch, waits for the transfer's end and returns its status. `ended` may be null.
enum peerway_status peerway_peer_run(const struct peerway_peer *peer,
                                     const struct peerway_batch *batch,
                                     struct peerway_end *ended);

// Prepares a batch that is posted many times: checks it, and does all work that a post can reuse.
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

// Returns the oldest notification of this peer. Waits at most timeout_ns; PENDING if there is
// none.
enum peerway_status peerway_peer_notification(const struct peerway_peer *peer,
                                              uint64_t timeout_ns,
                                              struct peerway_notification **notification);

// Allocates zeroed memory that peers on this host can map. This allows the fastest path.
enum peerway_status peerway_region_allocate(const struct peerway_endpoint *endpoint,
                                            size_t len,
                                            struct peerway_region **region);

// Allocates memory on a GPU that peers on this host can map.
enum peerway_status peerway_region_allocate_gpu(const struct peerway_endpoint *endpoint,
                                                uint32_t gpu,
                                                uint64_t len,
                                                struct peerway_region **region);

// Registers memory that the caller owns: host memory, or GPU memory if the process already uses a
// GPU.
//
// The memory must stay valid until the region is freed and every transfer that uses it has ended
// with a held fence. Until then, peers may read and write it at any time.
// peerway_region_register_owned reports that moment.
enum peerway_status peerway_region_register(const struct peerway_endpoint *endpoint,
                                            void *memory,
                                            size_t len,
                                            struct peerway_region **region);

// Registers GPU memory that the caller owns, as peerway_region_register does. The driver tells
// which GPU it belongs to.
enum peerway_status peerway_region_register_gpu(const struct peerway_endpoint *endpoint,
                                                uint64_t address,
                                                size_t len,
                                                struct peerway_region **region);

// Registers memory that the library releases with `release(context)`. The library calls it once
// the region is freed and nothing can access the memory any more, not even a transfer with an open
// fence.
//
// Any thread may make the call, and makes it only once. `release` must not call the library and
// must not throw. If this call fails, `release` is never called.
enum peerway_status peerway_region_register_owned(const struct peerway_endpoint *endpoint,
                                                  void *memory,
                                                  size_t len,
                                                  void (*release)(void *context),
                                                  void *context,
                                                  struct peerway_region **region);

// Fills in the facts about a region.
enum peerway_status peerway_region_describe(const struct peerway_region *region, struct peerway_region_facts *facts);

// Copies bytes out of a region, also from GPU memory. Bytes that a peer changes during the call
// may be torn.
enum peerway_status peerway_region_copy_out(const struct peerway_region *region,
                                            uint64_t offset,
                                            void *into,
                                            size_t len);

// Copies bytes into a region.
enum peerway_status peerway_region_copy_in(const struct peerway_region *region,
                                           uint64_t offset,
                                           const void *from,
                                           size_t len);

// Sets bytes of a region to a value.
enum peerway_status peerway_region_fill(const struct peerway_region *region,
                                        uint64_t offset,
                                        uint64_t len,
                                        uint8_t value);

// Advertises a part of a region, and fills in a descriptor of PEERWAY_DESCRIPTOR_LEN bytes. Only
// `to` can use it; if `to` is null, any peer that has the bytes can use it.
//
// The same part, rights and peer give the same descriptor again. `access` is a peerway_access. A
// length of UINT64_MAX means the rest of the region from the offset on.
enum peerway_status peerway_region_advertise(const struct peerway_region *region,
                                             uint64_t offset,
                                             uint64_t len,
                                             uint32_t access,
                                             const struct peerway_peer *to,
                                             uint8_t *descriptor);

// Revokes all advertisements of a region. Sets *open to whether a peer may still access it after
// the fence's deadline. `open` may be null.
enum peerway_status peerway_region_revoke(const struct peerway_region *region, bool *open);

// Ends a registration and its advertisements. Transfers that use the memory continue. Memory that
// the library allocated stays allocated until they end.
enum peerway_status peerway_region_free(struct peerway_region *region);

// Fills in what this process has in quarantine, for all its current and former endpoints.
enum peerway_status peerway_quarantine(struct peerway_quarantine_stats *stats);

// Fills in what an endpoint has refused to peers.
enum peerway_status peerway_endpoint_refusals(const struct peerway_endpoint *endpoint,
                                              struct peerway_refusal_stats *stats);

// Fills in the facts about a remote region.
enum peerway_status peerway_remote_describe(const struct peerway_remote *remote, struct peerway_remote_facts *facts);

// Frees a remote region. Transfers that use it continue.
enum peerway_status peerway_remote_free(struct peerway_remote *remote);

// Creates a batch of one range. `direction` is a peerway_direction. `options` may be null.
enum peerway_status peerway_batch_range(uint32_t direction,
                                        const struct peerway_region *local,
                                        uint64_t local_offset,
                                        const struct peerway_remote *remote,
                                        uint64_t remote_offset,
                                        uint64_t len,
                                        const struct peerway_batch_options *options,
                                        struct peerway_batch **batch);

// Creates a batch of many ranges.
enum peerway_status peerway_batch_vector(uint32_t direction,
                                         const struct peerway_pair *pairs,
                                         size_t count,
                                         const struct peerway_batch_options *options,
                                         struct peerway_batch **batch);

// Creates a batch that copies blocks of one region from or to blocks of another. Both sides have
// the same number of blocks, of the same length.
enum peerway_status peerway_batch_blocks(uint32_t direction,
                                         const struct peerway_region *local,
                                         const struct peerway_blocks *local_blocks,
                                         const struct peerway_remote *remote,
                                         const struct peerway_blocks *remote_blocks,
                                         const struct peerway_batch_options *options,
                                         struct peerway_batch **batch);

// Sets *bytes to the total bytes of a batch.
enum peerway_status peerway_batch_total(const struct peerway_batch *batch, uint64_t *bytes);

// Frees a batch. Its posted transfers continue, and its prepared transfers stay usable.
enum peerway_status peerway_batch_free(struct peerway_batch *batch);

// Returns how a transfer ended: OK, or the status of its failure. PENDING if it still runs. The
// call also makes progress on the transfer. `ended` may be null.
enum peerway_status peerway_transfer_poll(const struct peerway_transfer *transfer, struct peerway_end *ended);

// Waits at most timeout_ns for the end of a transfer, and makes progress on it. Returns the same
// as peerway_transfer_poll.
enum peerway_status peerway_transfer_wait(const struct peerway_transfer *transfer,
                                          uint64_t timeout_ns,
                                          struct peerway_end *ended);

// Sets *fence to whether bytes of an ended transfer may still change memory: a peerway_fence.
// PENDING if the transfer has not ended.
enum peerway_status peerway_transfer_fence(const struct peerway_transfer *transfer, uint32_t *fence);

// Fills in what is known of a transfer that failed: the peer, the path, the bytes, the fence, and
// the last end of a lane. PENDING if the transfer has not ended, NOTHING if it succeeded. The
// calls that wait put the same into a sentence: see peerway_last_error.
enum peerway_status peerway_transfer_failure(const struct peerway_transfer *transfer, struct peerway_failure *failure);

// Cancels a transfer. It ends within the fence's deadline. Its end tells whether its bytes may
// still change memory.
enum peerway_status peerway_transfer_cancel(const struct peerway_transfer *transfer);

// Adds one to an eventfd when the transfer ends, or at once if it has ended. The library
// duplicates the file descriptor, so the caller may close it at any time.
enum peerway_status peerway_transfer_signal(const struct peerway_transfer *transfer, int eventfd);

// Fills in the path, the bytes and the times of a transfer.
enum peerway_status peerway_transfer_statistics(const struct peerway_transfer *transfer,
                                                struct peerway_transfer_stats *stats);

// Frees a handle to a transfer. The transfer continues, and its slot becomes free when it ends.
enum peerway_status peerway_transfer_free(struct peerway_transfer *transfer);

// Creates a queue of completions with its file descriptor.
enum peerway_status peerway_completions_new(struct peerway_completions **completions);

// Sets *fd to the queue's file descriptor. It is readable while the queue is not empty. Rarely it
// is readable once although the queue is empty, when a token is taken while it is being signalled.
//
// The descriptor belongs to the queue and is closed with it. Poll it, but do not read it.
enum peerway_status peerway_completions_fd(const struct peerway_completions *completions, int *fd);

// Puts `token` into the queue when the transfer ends, or at once if it has ended. The transfer's
// handle may be freed before.
enum peerway_status peerway_completions_watch(const struct peerway_completions *completions,
                                              const struct peerway_transfer *transfer,
                                              uint64_t token);

// Takes at most `room` tokens out of the queue, and sets *count to their number. Does not wait.
enum peerway_status peerway_completions_take(const struct peerway_completions *completions,
                                             uint64_t *tokens,
                                             size_t room,
                                             size_t *count);

// Frees the handle to a queue. The queue and its file descriptor go away once all watched
// transfers have ended.
enum peerway_status peerway_completions_free(struct peerway_completions *completions);

// Posts a prepared transfer.
enum peerway_status peerway_prepared_post(const struct peerway_prepared *prepared, struct peerway_transfer **transfer);

// Posts a prepared transfer with this notification after its bytes, instead of the prepared one.
enum peerway_status peerway_prepared_post_notifying(const struct peerway_prepared *prepared,
                                                    const void *message,
                                                    size_t len,
                                                    struct peerway_transfer **transfer);

// Posts a prepared transfer, waits for its end and returns its status. `ended` may be null.
enum peerway_status peerway_prepared_run(const struct peerway_prepared *prepared, struct peerway_end *ended);

// Sets *bytes to the total bytes of a prepared transfer.
enum peerway_status peerway_prepared_total(const struct peerway_prepared *prepared, uint64_t *bytes);

// Enqueues a prepared transfer in a CUDA stream. The stream is a valid CUstream or cudaStream_t of
// the GPU whose memory is transferred.
//
// The transfer starts when the stream reaches it, and later work in the stream waits for its end.
// In a stream that is being captured, the transfer becomes part of the graph. If the transfer
// fails, the stream continues, and the handle tells how the transfer ended.
enum peerway_status peerway_prepared_enqueue(const struct peerway_prepared *prepared,
                                             void *stream,
                                             struct peerway_enqueued **enqueued);

// Frees a prepared transfer. Its posted transfers continue.
enum peerway_status peerway_prepared_free(struct peerway_prepared *prepared);

// Sets *runs to how often the enqueued transfer has ended. More than once is possible only in a
// graph that is launched several times.
enum peerway_status peerway_enqueued_runs(const struct peerway_enqueued *enqueued, uint64_t *runs);

// Returns how the last run of an enqueued transfer ended. Waits at most timeout_ns for the first
// run. Returns the same as peerway_transfer_poll.
enum peerway_status peerway_enqueued_wait(const struct peerway_enqueued *enqueued,
                                          uint64_t timeout_ns,
                                          struct peerway_end *ended);

// Frees the handle. If a graph captured the transfer, the library keeps what the graph needs.
enum peerway_status peerway_enqueued_free(struct peerway_enqueued *enqueued);

// Frees the handle and what the library keeps for graphs. No graph that captured the transfer may
// run or be launched any more.
enum peerway_status peerway_enqueued_release(struct peerway_enqueued *enqueued);

// Prepares a GPU for stream capture: allocates everything now that must not be allocated during a
// capture.
enum peerway_status peerway_gpu_warm_up(uint32_t gpu);

// Creates a staged transfer. Each batch is a stage, and the stages are released one by one. The
// batches may be freed.
enum peerway_status peerway_peer_stage(const struct peerway_peer *peer,
                                       const struct peerway_batch *const *batches,
                                       size_t count,
                                       struct peerway_staged **staged);

// Releases a stage: its transfer starts.
enum peerway_status peerway_staged_release(const struct peerway_staged *staged, size_t stage);

// Releases a stage when a CUDA stream reaches this point. The stream must be valid, belong to the
// GPU whose memory is transferred, and not be in capture.
enum peerway_status peerway_staged_release_in(const struct peerway_staged *staged, size_t stage, void *stream);

// Releases a stage when a CUDA event completes. The event must be valid, recorded, and belong to
// the GPU whose memory is transferred.
enum peerway_status peerway_staged_release_when(const struct peerway_staged *staged, size_t stage, void *event);

// Returns how a stage ended. PENDING if it was not released or still runs. Otherwise the same as
// peerway_transfer_poll.
enum peerway_status peerway_staged_poll(const struct peerway_staged *staged, size_t stage, struct peerway_end *ended);

// Waits for all stages that were released, and for those that a stream or an event will release.
// Returns the status of the first stage that failed. The fence is open if the fence of any stage
// is open.
enum peerway_status peerway_staged_wait(const struct peerway_staged *staged,
                                        uint64_t timeout_ns,
                                        struct peerway_end *ended);

// Cancels every released stage. The other stages never start.
enum peerway_status peerway_staged_cancel(const struct peerway_staged *staged);

// Frees a staged transfer. Released stages continue.
enum peerway_status peerway_staged_free(struct peerway_staged *staged);

// Sets *message and *len to the bytes of a notification, which stay valid until it is freed. Sets
// *from to its sender. `from` may be null.
enum peerway_status peerway_notification_message(const struct peerway_notification *notification,
                                                 const void **message,
                                                 size_t *len,
                                                 struct peerway_incarnation *from);

// Frees a notification.
enum peerway_status peerway_notification_free(struct peerway_notification *notification);

// Creates a proxy of an endpoint. Its threads sleep until it is armed. `options` may be null.
enum peerway_status peerway_proxy_new(const struct peerway_endpoint *endpoint,
                                      const struct peerway_proxy_options *options,
                                      struct peerway_proxy_host **proxy);

// Stops the threads of a proxy and frees it. No kernel may use it any more.
enum peerway_status peerway_proxy_free(struct peerway_proxy_host *proxy);

// Sets *kernel to the argument for kernels. It is valid until the proxy is freed.
enum peerway_status peerway_proxy_handle(const struct peerway_proxy_host *proxy, const struct peerway_proxy **kernel);

// Sets *rings to the number of rings.
enum peerway_status peerway_proxy_rings(const struct peerway_proxy_host *proxy, uint32_t *rings);

// Makes a region a window. The proxy keeps the memory registered. Local commands can name the
// window at once. Commands of a peer can name it if the peer received peer info that was made
// after this call.
enum peerway_status peerway_proxy_window(const struct peerway_proxy_host *proxy,
                                         const struct peerway_region *region,
                                         struct peerway_window *window);

// Copies the peer info that a peer needs to send to this proxy, to be sent by any means. It grants
// write access to the windows, and access to the counters. Sets *len to the number of bytes
// whether or not they fit.
enum peerway_status peerway_proxy_peer_info(const struct peerway_proxy_host *proxy,
                                            void *buffer,
                                            size_t room,
                                            size_t *len);

// The former name of peerway_proxy_peer_info.
enum peerway_status peerway_proxy_card(const struct peerway_proxy_host *proxy, void *buffer, size_t room, size_t *len);

// Makes `number` stand for this peer in commands. The peer's proxy made `info`. Sets *windows to
// the number of the peer's windows. `windows` may be null.
enum peerway_status peerway_proxy_add_peer(const struct peerway_proxy_host *proxy,
                                           uint16_t number,
                                           const struct peerway_peer *peer,
                                           const void *info,
                                           size_t len,
                                           size_t *windows);

// The nth window of a peer, in the order in which the peer made them. NOTHING if there is none.
enum peerway_status peerway_proxy_peer_window(const struct peerway_proxy_host *proxy,
                                              uint16_t number,
                                              size_t nth,
                                              struct peerway_window *window);

// Arms the proxy: its threads poll the rings for commands. Arm it before a kernel is launched, and
// disarm it after the kernel has ended. The threads sleep while the proxy is not armed. Each arm
// needs one disarm.
enum peerway_status peerway_proxy_arm(const struct peerway_proxy_host *proxy);

// Undoes one peerway_proxy_arm.
enum peerway_status peerway_proxy_disarm(const struct peerway_proxy_host *proxy);

// Adds a forwarding rule. From now on, whenever the rule's counter rises, the proxy copies the
// arrived bytes on and then raises the rule's counters. The proxy's threads do this while the
// proxy is armed.
enum peerway_status peerway_proxy_forward(const struct peerway_proxy_host *proxy, const struct peerway_forward *rule);

// Removes the rule of a counter. NOTHING if it has none.
enum peerway_status peerway_proxy_stop_forwarding(const struct peerway_proxy_host *proxy, uint16_t counter);

// Sets *value to the value of a counter of this proxy.
enum peerway_status peerway_proxy_counter(const struct peerway_proxy_host *proxy, uint16_t counter, uint64_t *value);

// Waits until a counter of this proxy reaches `wanted`. PENDING if it does not within timeout_ns.
// Sets *value to the counter's value. `value` may be null.
enum peerway_status peerway_proxy_wait_counter(const struct peerway_proxy_host *proxy,
                                               uint16_t counter,
                                               uint64_t wanted,
                                               uint64_t timeout_ns,
                                               uint64_t *value);

// Fills in the first command that failed since the last such call. NOTHING if none has failed.
//
// The call starts a new fault epoch. A later quiet of a kernel reports only commands that fail
// after this call, except for peers that are gone.
enum peerway_status peerway_proxy_take_fault(const struct peerway_proxy_host *proxy, struct peerway_proxy_fault *fault);

// Describes the code of a fault, as text with its zero byte. NOTHING if the number is not a code.
enum peerway_status peerway_fault_text(uint32_t code, char *buffer, size_t room, size_t *len);

// Fills in the statistics of a proxy.
enum peerway_status peerway_proxy_statistics(const struct peerway_proxy_host *proxy, struct peerway_proxy_stats *stats);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* PEERWAY_H */

// Former names.
#define PEERWAY_STATUS_NOT_A_CARD PEERWAY_STATUS_NOT_PEER_INFO
