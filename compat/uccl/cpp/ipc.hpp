// What describes memory of a GPU to processes of the host. The handle in it is an item, which is just as long, and is all that a transfer needs.
#pragma once

#include "uccl_engine.h"

namespace shim {

// IPC_INFO_SIZE bytes of it are sent; the rest of them is zero.
struct IpcInfo {
    FifoItem handle;
    uint64_t offset;
    uint64_t size;
    int32_t gpu;
    char unused[IPC_INFO_SIZE - 64 - 8 - 8 - 4];
};
static_assert(sizeof(IpcInfo) == IPC_INFO_SIZE, "the layout is what peers are sent");

// The item of the part that IPC info names.
FifoItem item_of(const char *ipc_buf);

} // namespace shim
