// Engines and connections.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "handles.hpp"
#include "imports.hpp"
#include "log.hpp"
#include "owned.hpp"
#include "reception.hpp"
#include "transfers.hpp"
#include "uccl_engine.h"

namespace shim {

// Registered memory.
struct Registration {
    Region region;
    uintptr_t address;
    size_t len;
    bool on_gpu;
    uint32_t gpu;
};

class Engine {
  public:
    explicit Engine(Endpoint endpoint) : endpoint_(std::move(endpoint)), reception_(endpoint_.get()) {}

    const peerway_endpoint *endpoint() const { return endpoint_.get(); }
    Reception &reception() { return reception_; }

    uccl_mr_t add(std::shared_ptr<const Registration> registration);
    std::shared_ptr<const Registration> registration(uccl_mr_t mr) const;
    // The newest registration that starts at this address.
    std::shared_ptr<const Registration> registered_at(uintptr_t address) const;
    std::shared_ptr<const Registration> remove(uccl_mr_t mr);

    // Counts the connections that this engine opened to a peer. `closed` returns how many are left.
    void opened(const Incarnation &peer);
    size_t closed(const Incarnation &peer);

    // Closes the endpoint and ends all registrations. Calls in progress with the engine fail.
    void close();

  private:
    const Endpoint endpoint_;
    Reception reception_;
    mutable std::mutex lock_;
    // In order of creation, because the numbers ascend.
    std::map<uccl_mr_t, std::shared_ptr<const Registration>> registrations_;
    std::map<Incarnation, size_t> opened_;
};

// A connection. Several connections may share one session of the endpoint.
struct Conn {
    std::shared_ptr<Engine> engine;
    Peer peer;
    Incarnation name;
    // Whether this engine opened it. False if the peer did.
    bool opened;
    Imports imports;
    Transfers transfers;

    Conn(std::shared_ptr<Engine> of, Peer to, const Incarnation &whose, bool from_here)
        : engine(std::move(of)), peer(std::move(to)), name(whose), opened(from_here), imports(peer.get()) {}
};

// The object of a handle. If there is none, they log an error and return null.
std::shared_ptr<Engine> engine_of(uccl_engine_t *handle, const char *call);
std::shared_ptr<Conn> conn_of(uccl_conn_t *handle, const char *call);

} // namespace shim
