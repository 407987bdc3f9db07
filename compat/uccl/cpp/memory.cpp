// Local memory: registration, items for peers, and the end of a registration.
#include "engine.hpp"

#include <cstdio>
#include <fstream>

namespace shim {

// Whether the whole range is memory of this process. True if /proc/self/maps cannot be read.
static bool is_mapped(uintptr_t address, size_t len) {
    if (len > UINTPTR_MAX - address) return false;
    std::ifstream maps("/proc/self/maps");
    if (!maps) return true;
    // The mappings are sorted by address. Several mappings together may cover the range.
    const uintptr_t end = address + len;
    uintptr_t start, stop;
    for (std::string line; address < end && std::getline(maps, line);) {
        if (std::sscanf(line.c_str(), "%zx-%zx", &start, &stop) != 2 || stop <= address) continue;
        if (start > address) return false;
        address = stop;
    }
    return address >= end;
}

static std::string range(uintptr_t address, size_t len) {
    char text[96];
    std::snprintf(text, sizeof text, "%zu bytes from %#zx", len, static_cast<size_t>(address));
    return text;
}

} // namespace shim

using namespace shim;

int uccl_engine_reg(uccl_engine_t *handle, uintptr_t data, size_t size, uccl_mr_t &mr_id) {
    static const char *const CALL = "uccl_engine_reg";
    mr_id = 0;
    const auto engine = engine_of(handle, CALL);
    if (!engine) return -1;
    Region region;
    if (peerway_region_register(engine->endpoint(), reinterpret_cast<void *>(data), size, out(region)) != PEERWAY_STATUS_OK)
        return complain_of_engine(CALL);
    auto facts = sized<peerway_region_facts>();
    if (peerway_region_describe(region.get(), &facts) != PEERWAY_STATUS_OK) return complain_of_engine(CALL);
    // GPU memory does not appear in /proc/self/maps. The driver has checked it.
    if (!facts.on_gpu && !is_mapped(data, size)) return complain(CALL, range(data, size) + " belong neither to this process nor to a GPU");
    mr_id = engine->add(std::make_shared<Registration>(Registration{std::move(region), data, size, facts.on_gpu != 0, facts.gpu}));
    return 0;
}

void uccl_engine_mr_destroy(uccl_engine_t *handle, uccl_mr_t mr) {
    static const char *const CALL = "uccl_engine_mr_destroy";
    const auto engine = engine_of(handle, CALL);
    if (!engine) return;
    const auto registration = engine->remove(mr);
    bool open = false;
    if (!registration)
        complain(CALL, "this engine has no registration " + std::to_string(mr));
    else if (peerway_region_revoke(registration->region.get(), &open) != PEERWAY_STATUS_OK)
        complain_of_engine(CALL);
    else if (open)
        complain(CALL, "registration " + std::to_string(mr) + " ended, but a peer may still access its memory");
}

int uccl_engine_prepare_fifo(uccl_engine_t *handle, uccl_mr_t mr, void const *data, size_t size, char *fifo_buf) {
    static const char *const CALL = "uccl_engine_prepare_fifo";
    const auto engine = engine_of(handle, CALL);
    if (!engine) return -1;
    if (!fifo_buf) return complain(CALL, "fifo_buf is null");
    const auto registration = engine->registration(mr);
    if (!registration) return complain(CALL, "this engine has no registration " + std::to_string(mr));
    const auto address = reinterpret_cast<uintptr_t>(data);
    const size_t offset = address - registration->address;
    if (address < registration->address || offset > registration->len || size > registration->len - offset)
        return complain(CALL, range(address, size) + " are not inside registration " + std::to_string(mr) + " (" +
                                  range(registration->address, registration->len) + ")");
    const auto status = peerway_region_advertise(registration->region.get(), offset, size, PEERWAY_ACCESS_READ_WRITE, nullptr,
                                                 reinterpret_cast<uint8_t *>(fifo_buf));
    return status == PEERWAY_STATUS_OK ? 0 : complain_of_engine(CALL);
}
