// GPU memory, with the driver that PEERWAY_CUDA_SO names. The tests use a stand-in driver, which
// needs no GPU. IPC info works like an item.
#include "check.hpp"

#include <cstring>
#include <vector>

#include <peerway.h>

static const size_t BYTES = 65536;

// GPU memory and its address.
struct Gpu {
    peerway_region *region = nullptr;
    uintptr_t address = 0;

    explicit Gpu(const peerway_endpoint *endpoint) {
        peerway_region_facts facts{};
        facts.size = sizeof facts;
        TRUE(peerway_region_allocate_gpu(endpoint, 0, BYTES, &region) == PEERWAY_STATUS_OK);
        TRUE(peerway_region_describe(region, &facts) == PEERWAY_STATUS_OK && facts.on_gpu);
        address = facts.address;
    }
    void fill(unsigned char value) { TRUE(peerway_region_fill(region, 0, BYTES, value) == PEERWAY_STATUS_OK); }
    unsigned char at(uint64_t offset) const {
        unsigned char byte = 0;
        TRUE(peerway_region_copy_out(region, offset, &byte, 1) == PEERWAY_STATUS_OK);
        return byte;
    }
};

int main() {
    watch();
    peerway_endpoint *endpoint = nullptr;
    TRUE(peerway_endpoint_new(nullptr, &endpoint) == PEERWAY_STATUS_OK);
    Gpu ours(endpoint), theirs(endpoint);
    ours.fill(4), theirs.fill(1);
    uccl_engine_t *one = uccl_engine_create(4, false), *two = uccl_engine_create(4, false);
    uccl_conn_t *conn = connect_to(one, Address(two));
    auto *mine = reinterpret_cast<void *>(ours.address);
    const uccl_mr_t mr = registered(one, mine, BYTES);
    const uccl_mr_t their_mr = registered(two, reinterpret_cast<void *>(theirs.address), BYTES);

    // A write by item.
    uint64_t id = 0;
    const FifoItem item = prepared(two, their_mr, reinterpret_cast<void *>(theirs.address), BYTES);
    TRUE(uccl_engine_write(conn, mr, mine, 4096, item, &id) == 0);
    finish(conn, id);
    TRUE(theirs.at(0) == 4 && theirs.at(4095) == 4 && theirs.at(4096) == 1);

    // A write to a part of the memory, by IPC info alone.
    char info[IPC_INFO_SIZE];
    bool has = false;
    TRUE(uccl_engine_get_ipc_info(two, theirs.address, info, &has) == 0 && has);
    TRUE(uccl_engine_update_ipc_info(info, theirs.address + 8192, theirs.address, 4096) == 0);
    TRUE(uccl_engine_write_vector(conn, {mr}, {mine}, {4096}, {}, 1, &id, {info}) == 0);
    finish(conn, id);
    TRUE(theirs.at(8191) == 1 && theirs.at(8192) == 4 && theirs.at(8192 + 4095) == 4 && theirs.at(8192 + 4096) == 1);
    SAYS("its item has only 4096", TRUE(uccl_engine_write_vector(conn, {mr}, {mine}, {4097}, {FifoItem{}}, 1, &id, {info}) == -1));
    setenv("UCCL_P2P_DISABLE_IPC", "1", 1);
    TRUE(uccl_engine_get_ipc_info(two, theirs.address, info, &has) == 0 && !has);

    uccl_engine_mr_destroy(one, mr);
    uccl_engine_mr_destroy(two, their_mr);
    uccl_engine_conn_destroy(conn);
    uccl_engine_destroy(one);
    uccl_engine_destroy(two);
    for (peerway_region *region : {ours.region, theirs.region}) TRUE(peerway_region_free(region) == PEERWAY_STATUS_OK);
    TRUE(peerway_endpoint_free(endpoint) == PEERWAY_STATUS_OK);
    std::puts("ok");
}
