// Reads and writes of a peer's memory.
#include <algorithm>

#include "engine.hpp"
#include "ipc.hpp"

namespace shim {

// One piece of a transfer.
struct Piece {
    uccl_mr_t mr;
    const void *data;
    size_t len;
    FifoItem item;
};

static std::string nth(size_t piece) { return "piece " + std::to_string(piece); }

static int post(const char *call, Conn &conn, peerway_direction direction, const std::vector<Piece> &pieces, uint64_t *transfer_id) {
    std::vector<std::shared_ptr<const Registration>> kept;
    std::vector<Remote> remotes(pieces.size());
    std::vector<peerway_pair> pairs;
    for (size_t i = 0; i < pieces.size(); ++i) {
        const Piece &piece = pieces[i];
        // Consecutive pieces often have the same registration.
        auto registration = i > 0 && pieces[i - 1].mr == piece.mr ? kept.back() : conn.engine->registration(piece.mr);
        if (!registration) return complain(call, nth(i) + ": the engine has no registration " + std::to_string(piece.mr));
        // The size of an item has 32 bits. This check catches a truncated size, which would
        // otherwise succeed with fewer bytes.
        if (piece.len > piece.item.size && piece.item.size != UINT32_MAX)
            return complain(call, nth(i) + " has " + std::to_string(piece.len) + " bytes, but its item has only " + std::to_string(piece.item.size));
        if (conn.imports.import(piece.item, remotes[i]) != PEERWAY_STATUS_OK) return complain(call, nth(i) + ": " + peerway_last_error());
        // libpeerway refuses a range outside the registration when the batch is made. A range below
        // it wraps to a large offset.
        const uint64_t offset = reinterpret_cast<uintptr_t>(piece.data) - registration->address;
        pairs.push_back({registration->region.get(), offset, remotes[i].get(), 0, piece.len});
        kept.push_back(std::move(registration));
    }
    Batch batch;
    if (peerway_batch_vector(direction, pairs.data(), pairs.size(), nullptr, out(batch)) != PEERWAY_STATUS_OK) return complain_of_engine(call);
    Transfer transfer;
    auto status = peerway_peer_post(conn.peer.get(), batch.get(), out(transfer));
    if (status == PEERWAY_STATUS_BUSY) {
        // Ended transfers that were not polled occupy slots. Polling them frees the slots.
        conn.transfers.look();
        status = peerway_peer_post(conn.peer.get(), batch.get(), out(transfer));
    }
    if (status != PEERWAY_STATUS_OK) return complain_of_engine(call);
    *transfer_id = conn.transfers.add(std::move(transfer));
    return 0;
}

static int post_one(const char *call, uccl_conn_t *handle, peerway_direction direction, const Piece &piece, uint64_t *transfer_id) {
    const auto conn = conn_of(handle, call);
    if (!conn) return -1;
    if (!transfer_id) return complain(call, "transfer_id is null");
    return post(call, *conn, direction, {piece}, transfer_id);
}

static bool is_blank(const FifoItem &item) {
    static const FifoItem BLANK{};
    return std::memcmp(&item, &BLANK, sizeof item) == 0;
}

static int post_vector(const char *call, uccl_conn_t *handle, peerway_direction direction, const std::vector<uccl_mr_t> &mrs,
                       const std::vector<void *> &data, const std::vector<size_t> &lens, const std::vector<FifoItem> &items, int count,
                       uint64_t *transfer_id, const std::vector<char *> &infos) {
    const auto conn = conn_of(handle, call);
    if (!conn) return -1;
    if (!transfer_id) return complain(call, "transfer_id is null");
    if (count <= 0) return complain(call, "num_iovs is " + std::to_string(count) + ": expected at least 1");
    const size_t wanted = static_cast<size_t>(count);
    if (mrs.size() < wanted || data.size() < wanted || lens.size() < wanted || std::max(items.size(), infos.size()) < wanted)
        return complain(call, "a list is shorter than the " + std::to_string(count) + " pieces of num_iovs");
    std::vector<Piece> pieces;
    for (size_t i = 0; i < wanted; ++i) {
        const bool has_item = i < items.size() && !is_blank(items[i]);
        if (!has_item && (i >= infos.size() || !infos[i])) return complain(call, nth(i) + " has neither an item nor IPC info");
        pieces.push_back({mrs[i], data[i], lens[i], has_item ? items[i] : item_of(infos[i])});
    }
    return post(call, *conn, direction, pieces, transfer_id);
}

} // namespace shim

using namespace shim;

int uccl_engine_read(uccl_conn_t *conn, uccl_mr_t mr, void const *data, size_t size, FifoItem fifo_item, uint64_t *transfer_id) {
    return post_one("uccl_engine_read", conn, PEERWAY_DIRECTION_READ, {mr, data, size, fifo_item}, transfer_id);
}

int uccl_engine_write(uccl_conn_t *conn, uccl_mr_t mr, void const *data, size_t size, FifoItem fifo_item, uint64_t *transfer_id) {
    return post_one("uccl_engine_write", conn, PEERWAY_DIRECTION_WRITE, {mr, data, size, fifo_item}, transfer_id);
}

int uccl_engine_read_vector(uccl_conn_t *conn, std::vector<uccl_mr_t> mr_ids, std::vector<void *> dst_v, std::vector<size_t> size_v,
                            std::vector<FifoItem> fifo_items, int num_iovs, uint64_t *transfer_id, std::vector<char *> ipc_bufs) {
    return post_vector("uccl_engine_read_vector", conn, PEERWAY_DIRECTION_READ, mr_ids, dst_v, size_v, fifo_items, num_iovs, transfer_id, ipc_bufs);
}

int uccl_engine_write_vector(uccl_conn_t *conn, std::vector<uccl_mr_t> mr_ids, std::vector<void *> dst_v, std::vector<size_t> size_v,
                             std::vector<FifoItem> fifo_items, int num_iovs, uint64_t *transfer_id, std::vector<char *> ipc_bufs) {
    return post_vector("uccl_engine_write_vector", conn, PEERWAY_DIRECTION_WRITE, mr_ids, dst_v, size_v, fifo_items, num_iovs, transfer_id,
                       ipc_bufs);
}

bool uccl_engine_xfer_status(uccl_conn_t *handle, uint64_t transfer_id) {
    // A destroyed connection has no transfers in flight. "Ended" keeps a polling caller from
    // waiting forever.
    const auto conn = conn_of(handle, "uccl_engine_xfer_status");
    return !conn || conn->transfers.has_ended(transfer_id);
}
