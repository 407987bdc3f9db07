#include "ipc.hpp"

#include <algorithm>
#include <cstdlib>
#include <strings.h>

#include "engine.hpp"

namespace shim {

FifoItem item_of(const char *ipc_buf) {
    IpcInfo info;
    std::memcpy(&info, ipc_buf, sizeof info);
    info.handle.addr += info.offset;
    // A size that does not fit becomes UINT32_MAX, which means the rest of the memory.
    info.handle.size = static_cast<uint32_t>(std::min<uint64_t>(info.size, UINT32_MAX));
    return info.handle;
}

// Reads the variables as libpeerway does, which then also avoids local paths.
static bool is_disabled() {
    for (const char *name : {"PEERWAY_DISABLE_IPC", "UCCL_P2P_DISABLE_IPC"})
        if (const char *set = std::getenv(name); set && *set) {
            const auto is = [&](const char *no) { return strcasecmp(set, no) == 0; };
            return !is("0") && !is("false") && !is("no") && !is("off");
        }
    return false;
}

} // namespace shim

using namespace shim;

int uccl_engine_get_ipc_info(uccl_engine_t *handle, uintptr_t addr, char *ipc_buf, bool *has_ipc) {
    static const char *const CALL = "uccl_engine_get_ipc_info";
    if (!ipc_buf || !has_ipc) return complain(CALL, "ipc_buf or has_ipc is null");
    *has_ipc = false;
    const auto engine = engine_of(handle, CALL);
    if (!engine) return -1;
    const auto registration = engine->registered_at(addr);
    if (!registration) return complain(CALL, "no registration starts at this address");
    if (!registration->on_gpu || is_disabled()) return 0;
    IpcInfo info{};
    if (peerway_region_advertise(registration->region.get(), 0, registration->len, PEERWAY_ACCESS_READ_WRITE, nullptr,
                                 reinterpret_cast<uint8_t *>(&info.handle)) != PEERWAY_STATUS_OK)
        return complain_of_engine(CALL);
    info.size = registration->len;
    info.gpu = static_cast<int32_t>(registration->gpu);
    std::memcpy(ipc_buf, &info, sizeof info);
    *has_ipc = true;
    return 0;
}

int uccl_engine_update_ipc_info(char *ipc_buf, uintptr_t addr, uintptr_t base_addr, size_t size) {
    static const char *const CALL = "uccl_engine_update_ipc_info";
    if (!ipc_buf) return complain(CALL, "ipc_buf is null");
    if (addr < base_addr) return complain(CALL, "addr is below base_addr");
    IpcInfo info;
    std::memcpy(&info, ipc_buf, sizeof info);
    info.offset += addr - base_addr;
    info.size = size;
    std::memcpy(ipc_buf, &info, sizeof info);
    return 0;
}
