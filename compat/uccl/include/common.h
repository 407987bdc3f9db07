// What programs that are written for uccl_engine.h use of UCCL's common.h: how a piece of a peer's memory is named, and how a
// notification travels. Nothing of RDMA or CUDA is needed for it.
//
// The names and layouts are UCCL's; what the bytes mean is Peerway's.
#ifndef PEERWAY_UCCL_COMMON_H
#define PEERWAY_UCCL_COMMON_H

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

// A piece of a peer's memory: 64 bytes that its owner made with uccl_engine_prepare_fifo.
//
// `addr` and `size` may be changed to name a part of it (uccl_engine_update_fifo); a size of UINT32_MAX means all that follows. The other
// bytes are the owner's leave to use the memory, and are of no use when they are changed.
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

// Puts an item into 64 bytes, to be sent to whoever may use the memory.
void serialize_fifo_item(FifoItem const &item, char *buf);

// Takes an item out of 64 bytes.
void deserialize_fifo_item(char const *buf, FifoItem *item);

// How a notification travels: magic, type, length of the name, length of the message (32 bits each), name, message.
static constexpr uint32_t NOTIFY_MSG_MAGIC = 0xDEADDEAD;
static constexpr size_t NOTIFY_MSG_HDR_SIZE = 16;

// A notification, whole.
struct NotifyMsg {
    uint32_t msg_type = 0;
    std::string name;
    std::string msg;
};

// A notification as bytes. Names and messages are shorter than 4 GiB.
inline std::string serialize_notify_msg(NotifyMsg const &note) {
    uint32_t const head[4] = {NOTIFY_MSG_MAGIC, note.msg_type, static_cast<uint32_t>(note.name.size()),
                              static_cast<uint32_t>(note.msg.size())};
    std::string bytes(reinterpret_cast<char const *>(head), sizeof head);
    return bytes.append(note.name).append(note.msg);
}

// Whether bytes are a notification, from the first to the last of them; and which.
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
