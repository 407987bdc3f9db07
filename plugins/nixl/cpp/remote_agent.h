// An agent that transfers go to, and its memory.
#pragma once

#include <array>
#include <memory>
#include <mutex>
#include <string>

#include "handle.h"
#include "nixl_abi.h"

using Descriptor = std::array<uint8_t, PEERWAY_DESCRIPTOR_LEN>;

// Who it is, and the session with it, which is made when it is first needed.
class RemoteAgent {
    const std::string metadata;
    std::mutex connecting;
    std::shared_ptr<Peer> connected;

  public:
    explicit RemoteAgent(std::string conn_info) : metadata(std::move(conn_info)) {}

    const std::string &conn_info() const { return metadata; }

    // The session: connects where there is none, or where it broke. One agent's silence holds up nobody else's.
    peerway_status peer(const Endpoint &endpoint, std::shared_ptr<Peer> &peer);
};

// Memory of ours.
class LocalMemory : public nixlBackendMD {
  public:
    LocalMemory() : nixlBackendMD(true) {}

    Region region;
    uintptr_t addr = 0;
    size_t len = 0;
    Descriptor descriptor{};
};

// Memory of an agent's, ours too where it is for transfers to ourselves.
class RemoteMemory : public nixlBackendMD {
    std::mutex importing;
    // Of the session it was imported in: a new one has to ask again.
    std::shared_ptr<Peer> session;
    std::shared_ptr<Remote> imported;

  public:
    RemoteMemory() : nixlBackendMD(false) {}

    std::shared_ptr<RemoteAgent> agent;
    uintptr_t addr = 0;
    size_t len = 0;
    Descriptor descriptor{};

    // What transfers name it by. The first call in a session asks the agent.
    peerway_status remote(const std::shared_ptr<Peer> &peer, std::shared_ptr<Remote> &remote);
};
