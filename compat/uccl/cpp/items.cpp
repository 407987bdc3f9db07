// Items: 64 bytes that name a piece of a peer's memory.
#include "log.hpp"
#include "uccl_engine.h"

using shim::complain;

void serialize_fifo_item(FifoItem const &item, char *buf) {
    if (buf) std::memcpy(buf, &item, sizeof item);
}

void deserialize_fifo_item(char const *buf, FifoItem *item) {
    if (buf && item) std::memcpy(item, buf, sizeof *item);
}

int uccl_engine_update_fifo(FifoItem &fifo_item, uint64_t remote_addr, uint32_t size) {
    if (remote_addr > UINT64_MAX - size) return complain("uccl_engine_update_fifo", "the range goes beyond the address space");
    fifo_item.addr = remote_addr;
    fifo_item.size = size;
    return 0;
}
