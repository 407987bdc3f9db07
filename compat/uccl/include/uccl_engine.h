// UCCL's interface for C++, implemented by Peerway: libuccl_p2p.so, which uses libpeerway.
//
// Programs and plugins for UCCL's header of this name compile and link with this one unchanged.
// compat/uccl/README.md describes the limits of the interface. New programs should use peerway.h.
//
// - Calls that return an int return 0 for success and -1 for failure. Calls that return a handle
//   return null for failure. The reason is written to standard error, unless PEERWAY_LOG_LEVEL (or
//   UCCL_P2P_LOG_LEVEL) is off.
// - Handles are numbers and not addresses. A destroyed handle is refused, and its number is never
//   used again.
// - Any thread may make any call at any time.
#ifndef PEERWAY_UCCL_ENGINE_H
#define PEERWAY_UCCL_ENGINE_H

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "common.h"

// Bytes of each text of a notify_msg_t, of a FifoItem, and of IPC info, which describes GPU memory
// to processes on the same host.
#define MSG_SIZE 256
#define FIFO_SIZE 64
#define IPC_INFO_SIZE 128

// One end of transfers.
typedef struct uccl_engine uccl_engine_t;
// A connection to a peer, opened by either side. Transfers and notifications go both ways.
typedef struct uccl_conn uccl_conn_t;
// Registered memory: a number other than 0. The process never uses it for another registration.
typedef uint64_t uccl_mr_t;

// A notification of fixed length. The name ends with a zero byte or fills its array. The message is
// the whole array.
typedef struct notify_msg {
    char name[MSG_SIZE];
    char msg[MSG_SIZE];
} notify_msg_t;

// A notification of any length. Name and message together have at most 64 MiB minus
// NOTIFY_MSG_HDR_SIZE bytes.
typedef struct notify_msg_v {
    std::string name;
    std::string msg;
} notify_msg_v_t;

typedef struct md {
    notify_msg_t notify_data;
} md_t;

// Creates an engine. It listens when this call returns. It needs no GPU. Both arguments are UCCL's
// and have no effect.
uccl_engine_t *uccl_engine_create(int num_cpus, bool in_python);

// Ends an engine: its transfers end, and calls with its connections fail.
void uccl_engine_destroy(uccl_engine_t *engine);

// The address of the engine: "ip:port?gpu", or "[ip]:port?gpu" for IPv6. Free it with delete[].
int uccl_engine_get_metadata(uccl_engine_t *engine, char **metadata);

// Connects to the engine that listens at an address. An IPv6 address may be in brackets. The
// connection uses the best path to that engine, which may be in this process or be this engine
// itself. remote_gpu and same_process have no effect.
uccl_conn_t *uccl_engine_connect(uccl_engine_t *engine, char const *ip_addr, char const *remote_gpu, int remote_port, bool same_process = false);

// Waits for a peer to connect. Returns null after uccl_engine_stop_accept or uccl_engine_destroy.
// The buffer receives the peer's address without its port. remote_gpu_idx receives the number of
// the peer's GPU, or -1 if the peer does not send it. Buffer and number may be null.
uccl_conn_t *uccl_engine_accept(uccl_engine_t *engine, char *ip_addr_buf, size_t ip_addr_buf_len, int *remote_gpu_idx);

// From now on, every uccl_engine_accept returns null, within a tenth of a second. Peers can still
// connect.
void uccl_engine_stop_accept(uccl_engine_t *engine);

// Notifications arrive without a listener, so these calls have no effect. They return 0 for a valid
// connection.
int uccl_engine_start_listener(uccl_conn_t *conn);
int uccl_engine_stop_listener(uccl_conn_t *conn);

// Whether the peer is on this host.
bool uccl_engine_conn_is_local(uccl_conn_t *conn);

// Destroys a connection. Its transfers in flight may fail. The session with the peer ends with the
// last connection that this engine opened, unless the peer has connected to this engine too.
void uccl_engine_conn_destroy(uccl_conn_t *conn);

// Registers host or GPU memory. The caller keeps the memory valid until uccl_engine_mr_destroy.
int uccl_engine_reg(uccl_engine_t *engine, uintptr_t data, size_t size, uccl_mr_t &mr_id);

// Ends a registration. From now on, its items are refused.
void uccl_engine_mr_destroy(uccl_engine_t *engine, uccl_mr_t mr);

// Makes the 64-byte item with which peers read and write a part of registered memory.
int uccl_engine_prepare_fifo(uccl_engine_t *engine, uccl_mr_t mr, void const *data, size_t size, char *fifo_buf);

// Makes an item name a part of its memory. The transfer checks the range.
int uccl_engine_update_fifo(FifoItem &fifo_item, uint64_t remote_addr, uint32_t size);

// Starts to read from, or to write to, a peer's memory. The local range must be inside its
// registration. A piece that is longer than its item is refused.
int uccl_engine_read(uccl_conn_t *conn, uccl_mr_t mr, void const *data, size_t size, FifoItem fifo_item, uint64_t *transfer_id);
int uccl_engine_write(uccl_conn_t *conn, uccl_mr_t mr, void const *data, size_t size, FifoItem fifo_item, uint64_t *transfer_id);

// The same for several pieces as one transfer. Every list has at least num_iovs entries. If a piece
// has no item (the list is empty, or the item is all zeros), the peer's IPC info names its memory.
int uccl_engine_read_vector(uccl_conn_t *conn, std::vector<uccl_mr_t> mr_ids, std::vector<void *> dst_v, std::vector<size_t> size_v,
                            std::vector<FifoItem> fifo_items, int num_iovs, uint64_t *transfer_id, std::vector<char *> ipc_bufs = {});
int uccl_engine_write_vector(uccl_conn_t *conn, std::vector<uccl_mr_t> mr_ids, std::vector<void *> dst_v, std::vector<size_t> size_v,
                             std::vector<FifoItem> fifo_items, int num_iovs, uint64_t *transfer_id, std::vector<char *> ipc_bufs = {});

// Whether a transfer has ended, with success or not. The end is reported once. An id without a
// transfer in flight counts as ended.
//
// A failure is written to standard error, and the next notification that the same thread sends on
// this connection is refused. So a peer gets no "done" for bytes that did not arrive.
bool uccl_engine_xfer_status(uccl_conn_t *conn, uint64_t transfer_id);

// UCCL no longer has two-sided transfers. These calls always return -1.
int uccl_engine_send(uccl_conn_t *conn, uccl_mr_t mr, void const *data, size_t size, uint64_t *transfer_id);
int uccl_engine_send_vector(uccl_conn_t *conn, std::vector<uccl_mr_t> mr_ids, std::vector<void const *> src_v, std::vector<size_t> size_v,
                            int num_iovs, uint64_t *transfer_id);
int uccl_engine_recv(uccl_conn_t *conn, uccl_mr_t mr, void *data, size_t max_size);

// Sends a notification and waits until it is in the peer's queue. Returns -1 if it is too long, the
// peer is gone, the peer's queue is full, or a previous transfer failed (see
// uccl_engine_xfer_status).
int uccl_engine_send_notif(uccl_conn_t *conn, notify_msg_t *notify_msg);
int uccl_engine_send_notif_v(uccl_conn_t *conn, notify_msg_v_t const *notify_msg);

// Returns the notifications that have arrived at any engine of this process, each once.
// uccl_engine_get_notifs truncates names and messages to MSG_SIZE bytes, and then logs an error.
std::vector<notify_msg_t> uccl_engine_get_notifs();
std::vector<notify_msg_v_t> uccl_engine_get_notifs_v();

// Makes the IPC info of registered GPU memory, for processes on this host. addr is the registered
// address. Host memory has no IPC info, and UCCL_P2P_DISABLE_IPC disables it: the call then
// succeeds with has_ipc false. IPC info is not faster than an item: a GPU copies whenever it can
// access both buffers.
int uccl_engine_get_ipc_info(uccl_engine_t *engine, uintptr_t addr, char *ipc_buf, bool *has_ipc);

// Makes IPC info name a part of its memory. The memory starts at base_addr.
int uccl_engine_update_ipc_info(char *ipc_buf, uintptr_t addr, uintptr_t base_addr, size_t size);

#endif
