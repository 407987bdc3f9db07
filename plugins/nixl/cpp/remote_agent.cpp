#include "remote_agent.h"

peerway_status RemoteAgent::peer(const Endpoint &endpoint, std::shared_ptr<Peer> &peer) {
    const std::lock_guard lock(connecting);
    if (connected) {
        peerway_peer_facts facts{};
        facts.size = sizeof facts;
        if (peerway_peer_describe(connected->get(), &facts) == PEERWAY_STATUS_OK && facts.alive != 0) {
            peer = connected;
            return PEERWAY_STATUS_OK;
        }
    }
    auto made = std::make_shared<Peer>();
    const auto status = peerway_endpoint_connect(endpoint.get(), metadata.data(), metadata.size(), 0, made->made());
    if (status == PEERWAY_STATUS_OK) {
        peer = connected = std::move(made);
    }
    return status;
}

peerway_status RemoteMemory::remote(const std::shared_ptr<Peer> &peer, std::shared_ptr<Remote> &remote) {
    const std::lock_guard lock(importing);
    if (!imported || session != peer) {
        auto made = std::make_shared<Remote>();
        const auto status = peerway_peer_import(peer->get(), descriptor.data(), descriptor.size(), made->made());
        if (status != PEERWAY_STATUS_OK) {
            return status;
        }
        imported = std::move(made);
        session = peer;
    }
    remote = imported;
    return PEERWAY_STATUS_OK;
}
