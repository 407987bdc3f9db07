// A remote agent and its memory.
#pragma once

#include <array>
#include <memory>
#include <mutex>
#include <string>

#include "handle.h"
#include "nixl_abi.h"

using Descriptor = std::array<uint8_t, PEERWAY_DESCRIPTOR_LEN>;

// The identity of an agent, and the session with it. The session is opened when it is first needed.
class RemoteAgent {
    const std::string metadata;
    std::mutex connecting;
    std::shared_ptr<Peer> connected;

  public:
    explicit RemoteAgent(std::string conn_info) : metadata(std::move(conn_info)) {}

    const std::string &conn_info() const { return metadata; }

    // Returns the session. Connects if there is none, or if it broke. The lock is per agent, so an
    // unresponsive agent does not delay connections to others.
    peerway_status peer(const Endpoint &endpoint, std::shared_ptr<Peer> &peer);
};

// Local memory.
class LocalMemory : public nixlBackendMD {
  public:
    LocalMemory() : nixlBackendMD(true) {}

    Region region;
    uintptr_t addr = 0;
    size_t len = 0;
    Descriptor descriptor{};
};

// Memory of an agent. For transfers of an agent to itself, it is local memory.
class RemoteMemory : public nixlBackendMD {
    std::mutex importing;
    // The session of the import. A new session needs a new import.
    std::shared_ptr<Peer> session;
    std::shared_ptr<Remote> imported;

  public:
    RemoteMemory() : nixlBackendMD(false) {}

    std::shared_ptr<RemoteAgent> agent;
    uintptr_t addr = 0;
    size_t len = 0;
    Descriptor descriptor{};

    // Returns the imported memory for transfers. The first call in a session sends a request to the
    // agent.
    peerway_status remote(const std::shared_ptr<Peer> &peer, std::shared_ptr<Remote> &remote);
};
