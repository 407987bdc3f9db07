// Opens, accepts and destroys connections.
#include "engine.hpp"

#include <cstring>

#include "greeting.hpp"

namespace shim {

// How long the greeting after a connect may take. The session exists already, so only a stopped
// peer needs longer.
static constexpr uint64_t GREETING_NS = 5'000'000'000;

std::shared_ptr<Conn> conn_of(uccl_conn_t *handle, const char *call) {
    auto conn = Handles<Conn>::all().get(handle);
    if (!conn) complain(call, "no such connection: the handle is null or was destroyed");
    return conn;
}

static uccl_conn_t *handle_to(std::shared_ptr<Conn> conn) { return reinterpret_cast<uccl_conn_t *>(Handles<Conn>::all().add(std::move(conn))); }

static peerway_status greet(const peerway_peer *peer) {
    const std::string message = greeting();
    Transfer transfer;
    const auto status = peerway_peer_notify(peer, message.data(), message.size(), out(transfer));
    return status == PEERWAY_STATUS_OK ? peerway_transfer_wait(transfer.get(), GREETING_NS, nullptr) : status;
}

static Peer connect_to(const peerway_endpoint *endpoint, const std::string &address) {
    Peer peer;
    // The connect may find an old session that is closing. The second attempt then opens a new
    // session, or fails because the peer is gone.
    for (int attempt = 0; attempt < 2; ++attempt) {
        if (peerway_endpoint_connect_address(endpoint, address.c_str(), 0, out(peer)) != PEERWAY_STATUS_OK) return {};
        const auto status = greet(peer.get());
        if (status == PEERWAY_STATUS_OK) return peer;
        if (status != PEERWAY_STATUS_PEER_GONE) {
            // The session works. The accept on the other side only returns later.
            complain("uccl_engine_connect", "connected to " + address + ", but the greeting failed: " + peerway_last_error());
            return peer;
        }
    }
    return {};
}

// "host:port" in libpeerway's format, with IPv6 addresses in brackets.
static std::string address_of(const std::string &host, int port) {
    const bool bare = host.find(':') != host.npos && host.front() != '[';
    return (bare ? "[" + host + "]" : host) + ":" + std::to_string(port);
}

// "host:port" without the port and without brackets.
static std::string host_of(const std::string &address) {
    const std::string host = address.substr(0, address.rfind(':'));
    return host.size() > 1 && host.front() == '[' ? host.substr(1, host.size() - 2) : host;
}

} // namespace shim

using namespace shim;

uccl_conn_t *uccl_engine_connect(uccl_engine_t *handle, char const *ip_addr, char const *, int remote_port, bool) {
    static const char *const CALL = "uccl_engine_connect";
    const auto engine = engine_of(handle, CALL);
    if (!engine) return nullptr;
    if (!ip_addr || !*ip_addr || remote_port < 1 || remote_port > 65535) {
        complain(CALL, "\"" + std::string(ip_addr ? ip_addr : "") + "\" and " + std::to_string(remote_port) + " are not an address and a port");
        return nullptr;
    }
    Peer peer = connect_to(engine->endpoint(), address_of(ip_addr, remote_port));
    const auto name = peer ? who(peer.get()) : std::nullopt;
    if (!name) {
        complain_of_engine(CALL);
        return nullptr;
    }
    engine->opened(*name);
    return handle_to(std::make_shared<Conn>(engine, std::move(peer), *name, true));
}

uccl_conn_t *uccl_engine_accept(uccl_engine_t *handle, char *ip_addr_buf, size_t ip_addr_buf_len, int *remote_gpu_idx) {
    static const char *const CALL = "uccl_engine_accept";
    const auto engine = engine_of(handle, CALL);
    if (!engine) return nullptr;
    // Skip a peer that is gone already.
    for (;;) {
        auto arrival = engine->reception().next_arrival();
        if (!arrival) return nullptr;
        char address[256];
        size_t len;
        const auto name = who(arrival->peer.get());
        if (!name || peerway_peer_address(arrival->peer.get(), address, sizeof address, &len) != PEERWAY_STATUS_OK) continue;
        const std::string host = host_of(address);
        const bool fits = host.size() < ip_addr_buf_len;
        if (ip_addr_buf && ip_addr_buf_len) std::memcpy(ip_addr_buf, fits ? host.c_str() : "", fits ? host.size() + 1 : 1);
        if (ip_addr_buf && !fits) complain(CALL, "the buffer has no room for " + host);
        if (remote_gpu_idx) *remote_gpu_idx = arrival->gpu;
        return handle_to(std::make_shared<Conn>(engine, std::move(arrival->peer), *name, false));
    }
}

void uccl_engine_stop_accept(uccl_engine_t *handle) {
    if (const auto engine = engine_of(handle, "uccl_engine_stop_accept")) engine->reception().stop();
}

int uccl_engine_start_listener(uccl_conn_t *conn) { return conn_of(conn, "uccl_engine_start_listener") ? 0 : -1; }

int uccl_engine_stop_listener(uccl_conn_t *conn) { return conn_of(conn, "uccl_engine_stop_listener") ? 0 : -1; }

bool uccl_engine_conn_is_local(uccl_conn_t *handle) {
    const auto conn = conn_of(handle, "uccl_engine_conn_is_local");
    auto facts = sized<peerway_peer_facts>();
    if (!conn || peerway_peer_describe(conn->peer.get(), &facts) != PEERWAY_STATUS_OK) return false;
    switch (facts.path) {
    case PEERWAY_PATH_SAME_PROCESS:
    case PEERWAY_PATH_LOCAL_MAP:
    case PEERWAY_PATH_LOCAL_CMA:
    case PEERWAY_PATH_LOCAL_RING:
    case PEERWAY_PATH_GPU_IPC:
        return true;
    default:
        return false;
    }
}

void uccl_engine_conn_destroy(uccl_conn_t *handle) {
    const auto conn = Handles<Conn>::all().remove(handle);
    if (!conn || !conn->opened || conn->engine->closed(conn->name) != 0) return;
    // If the peer has connected too, the session may carry the peer's transfers. It then stays open
    // until one of the engines is destroyed.
    if (!conn->engine->reception().has_greeted(conn->name)) peerway_peer_remove(conn->peer.get());
}
