// IPC info: describes GPU memory to processes on the same host. Its handle is an item, which has
// the same length and suffices for a transfer.
#pragma once

#include "uccl_engine.h"

namespace shim {

// IPC_INFO_SIZE bytes are sent. The unused bytes are zero.
struct IpcInfo {
    FifoItem handle;
    uint64_t offset;
    uint64_t size;
    int32_t gpu;
    char unused[IPC_INFO_SIZE - 64 - 8 - 8 - 4];
};
static_assert(sizeof(IpcInfo) == IPC_INFO_SIZE, "peers receive this layout");

// The item for the memory that IPC info describes.
FifoItem item_of(const char *ipc_buf);

} // namespace shim
