// UCCL's interface for C++, carried out by Peerway: libuccl_p2p.so, on libpeerway.
//
// Programs and plugins that were written for UCCL's header of this name are compiled and linked with this one unchanged. What the
// interface cannot say, and what is done about it, is in compat/uccl/README.md; who writes something new takes peerway.h.
//
// - Calls that return an int say 0 for success and -1 for failure; calls that return a handle say null. Why is written to standard error,
//   unless PEERWAY_LOG_LEVEL (or UCCL_P2P_LOG_LEVEL) is off.
// - Handles are numbers and not addresses: one that was destroyed is refused, and never stands for anything else.
// - Any thread may call anything at any time.
#ifndef PEERWAY_UCCL_ENGINE_H
#define PEERWAY_UCCL_ENGINE_H

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "common.h"

// Bytes of each text of a notify_msg_t, of a FifoItem, and of what describes GPU memory to processes of the host.
#define MSG_SIZE 256
#define FIFO_SIZE 64
#define IPC_INFO_SIZE 128

// One end of transfers.
typedef struct uccl_engine uccl_engine_t;
// A peer that was connected to, or that connected to us. Transfers and notifications go both ways, whoever connected.
typedef struct uccl_conn uccl_conn_t;
// Registered memory: a number, never 0, that no other registration of the process has or gets.
typedef uint64_t uccl_mr_t;

// A notification of a fixed length: the name ends with a zero byte or fills its room, the message is all of its bytes.
typedef struct notify_msg {
    char name[MSG_SIZE];
    char msg[MSG_SIZE];
} notify_msg_t;

// A notification of any length: name and message together up to 64 MiB less NOTIFY_MSG_HDR_SIZE bytes.
typedef struct notify_msg_v {
    std::string name;
    std::string msg;
} notify_msg_v_t;

typedef struct md {
    notify_msg_t notify_data;
} md_t;

// Makes an engine, which listens when this returns. No GPU is needed. Both arguments are UCCL's and change nothing.
uccl_engine_t *uccl_engine_create(int num_cpus, bool in_python);

// Ends an engine: its transfers end, and calls with its connections fail.
void uccl_engine_destroy(uccl_engine_t *engine);

// Where the engine listens: "ip:port?gpu", or "[ip]:port?gpu" for IPv6. To be freed with delete[].
int uccl_engine_get_metadata(uccl_engine_t *engine, char **metadata);

// Connects to the engine that listens at an address; IPv6 ones may be in brackets. The best way there is to that engine is taken, also where
// it is this one or one of this process: which GPU it is of, and same_process, are not looked at.
uccl_conn_t *uccl_engine_connect(uccl_engine_t *engine, char const *ip_addr, char const *remote_gpu, int remote_port, bool same_process = false);

// Waits for a peer to connect. Null after uccl_engine_stop_accept or uccl_engine_destroy. The peer's address, without its port, goes into
// the buffer; the number of its GPU is -1 for a peer that does not tell it. Buffer and number may be null.
uccl_conn_t *uccl_engine_accept(uccl_engine_t *engine, char *ip_addr_buf, size_t ip_addr_buf_len, int *remote_gpu_idx);

// Has every uccl_engine_accept return null, within a tenth of a second, from now on. Peers can connect all the same.
void uccl_engine_stop_accept(uccl_engine_t *engine);

// Nothing needs to be started or stopped for notifications to come: 0 for a connection.
int uccl_engine_start_listener(uccl_conn_t *conn);
int uccl_engine_stop_listener(uccl_conn_t *conn);

// Whether the peer is on this host.
bool uccl_engine_conn_is_local(uccl_conn_t *conn);

// Lets a connection go; its transfers that are under way may fail. The session with the peer ends with the last connection that was made
// from here, unless the peer has connected to us too.
void uccl_engine_conn_destroy(uccl_conn_t *conn);

// Registers memory of the host or of a GPU, which the caller keeps until uccl_engine_mr_destroy.
int uccl_engine_reg(uccl_engine_t *engine, uintptr_t data, size_t size, uccl_mr_t &mr_id);

// Ends a registration: what was given out of it is refused from now on.
void uccl_engine_mr_destroy(uccl_engine_t *engine, uccl_mr_t mr);

// Makes the 64 bytes by which peers read and write a part of registered memory.
int uccl_engine_prepare_fifo(uccl_engine_t *engine, uccl_mr_t mr, void const *data, size_t size, char *fifo_buf);

// Has an item name a part of its memory. The transfer checks whether it is one.
int uccl_engine_update_fifo(FifoItem &fifo_item, uint64_t remote_addr, uint32_t size);

// Starts to read from, or to write to, a peer's memory. The local side lies in its registration. Longer pieces than their item are refused.
int uccl_engine_read(uccl_conn_t *conn, uccl_mr_t mr, void const *data, size_t size, FifoItem fifo_item, uint64_t *transfer_id);
int uccl_engine_write(uccl_conn_t *conn, uccl_mr_t mr, void const *data, size_t size, FifoItem fifo_item, uint64_t *transfer_id);

// The same for several pieces as one transfer. Lists are at least num_iovs long. Where a piece has no item (the list is empty, or it is all zeros),
// the peer's IPC info names its memory.
int uccl_engine_read_vector(uccl_conn_t *conn, std::vector<uccl_mr_t> mr_ids, std::vector<void *> dst_v, std::vector<size_t> size_v,
                            std::vector<FifoItem> fifo_items, int num_iovs, uint64_t *transfer_id, std::vector<char *> ipc_bufs = {});
int uccl_engine_write_vector(uccl_conn_t *conn, std::vector<uccl_mr_t> mr_ids, std::vector<void *> dst_v, std::vector<size_t> size_v,
                             std::vector<FifoItem> fifo_items, int num_iovs, uint64_t *transfer_id, std::vector<char *> ipc_bufs = {});

// Whether a transfer has ended, well or not: an end is reported once, and an id that nothing is under way for is one that has ended.
//
// A transfer that failed is written to standard error, and the next notification that the same thread sends on this connection is refused:
// "done" does not reach a peer for bytes that did not.
bool uccl_engine_xfer_status(uccl_conn_t *conn, uint64_t transfer_id);

// UCCL has no two-sided transfers any more: always -1.
int uccl_engine_send(uccl_conn_t *conn, uccl_mr_t mr, void const *data, size_t size, uint64_t *transfer_id);
int uccl_engine_send_vector(uccl_conn_t *conn, std::vector<uccl_mr_t> mr_ids, std::vector<void const *> src_v, std::vector<size_t> size_v,
                            int num_iovs, uint64_t *transfer_id);
int uccl_engine_recv(uccl_conn_t *conn, uccl_mr_t mr, void *data, size_t max_size);

// Sends a notification and waits until it is in the peer's queue. -1 where it is not: it is too long, the peer is gone, its queue is
// full, or the transfer that it would follow has failed (see uccl_engine_xfer_status).
int uccl_engine_send_notif(uccl_conn_t *conn, notify_msg_t *notify_msg);
int uccl_engine_send_notif_v(uccl_conn_t *conn, notify_msg_v_t const *notify_msg);

// The notifications that have come to any engine of this process, once. The first call cuts names and messages to MSG_SIZE bytes, and writes
// to standard error where it does.
std::vector<notify_msg_t> uccl_engine_get_notifs();
std::vector<notify_msg_v_t> uccl_engine_get_notifs_v();

// What a process of this host needs for registered memory of a GPU, by the address that was registered. There is none for memory of
// the host, and none with UCCL_P2P_DISABLE_IPC: that is success, and has_ipc is false. It gives no faster way than an item: GPUs copy by themselves
// wherever they reach both memories.
int uccl_engine_get_ipc_info(uccl_engine_t *engine, uintptr_t addr, char *ipc_buf, bool *has_ipc);

// Has IPC info name a part of its memory, which starts at base_addr.
int uccl_engine_update_ipc_info(char *ipc_buf, uintptr_t addr, uintptr_t base_addr, size_t size);

#endif
