// The part of UCCL's common.h that programs for uccl_engine.h use: items that name a piece of a
// peer's memory, and the format of notifications. It needs no RDMA or CUDA header.
//
// The names and layouts are UCCL's. The meaning of the bytes is Peerway's.
#ifndef PEERWAY_UCCL_COMMON_H
#define PEERWAY_UCCL_COMMON_H

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

// A piece of a peer's memory: 64 bytes that the owner made with uccl_engine_prepare_fifo.
//
// A caller may change `addr` and `size` to name a part of it (uccl_engine_update_fifo). A size of
// UINT32_MAX means the rest of the memory from `addr` on. The other bytes are the owner's grant,
// and must not be changed.
struct FifoItem {
    uint64_t addr;
    uint32_t size;
    uint32_t rkey;
    uint32_t nmsgs;
    uint32_t rid;
    uint64_t idx;
    char padding[32];
};
static_assert(sizeof(FifoItem) == 64, "a FifoItem is 64 bytes");

// Copies an item into 64 bytes, to be sent to the peer that may use the memory.
void serialize_fifo_item(FifoItem const &item, char *buf);

// Copies an item out of 64 bytes.
void deserialize_fifo_item(char const *buf, FifoItem *item);

// The format of a notification: magic, type, length of the name, length of the message (32 bits
// each), name, message.
static constexpr uint32_t NOTIFY_MSG_MAGIC = 0xDEADDEAD;
static constexpr size_t NOTIFY_MSG_HDR_SIZE = 16;

// A decoded notification.
struct NotifyMsg {
    uint32_t msg_type = 0;
    std::string name;
    std::string msg;
};

// Encodes a notification. Name and message must be shorter than 4 GiB.
inline std::string serialize_notify_msg(NotifyMsg const &note) {
    uint32_t const head[4] = {NOTIFY_MSG_MAGIC, note.msg_type, static_cast<uint32_t>(note.name.size()),
                              static_cast<uint32_t>(note.msg.size())};
    std::string bytes(reinterpret_cast<char const *>(head), sizeof head);
    return bytes.append(note.name).append(note.msg);
}

// Decodes a notification. Returns false unless all bytes form exactly one notification.
inline bool deserialize_notify_msg(std::string const &bytes, NotifyMsg &note) {
    uint32_t head[4];
    if (bytes.size() < sizeof head) return false;
    std::memcpy(head, bytes.data(), sizeof head);
    size_t const name = head[2], message = head[3];
    if (head[0] != NOTIFY_MSG_MAGIC || bytes.size() - sizeof head != name + message) return false;
    note.msg_type = head[1];
    note.name = bytes.substr(sizeof head, name);
    note.msg = bytes.substr(sizeof head + name);
    return true;
}

#endif
