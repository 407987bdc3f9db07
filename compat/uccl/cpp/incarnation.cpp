#include "incarnation.hpp"

#include <algorithm>

#include "owned.hpp"

namespace shim {

Incarnation incarnation(const peerway_incarnation &from) {
    Incarnation made;
    std::copy(std::begin(from.bytes), std::end(from.bytes), made.begin());
    return made;
}

std::optional<Incarnation> who(const peerway_peer *peer) {
    auto facts = sized<peerway_peer_facts>();
    if (peerway_peer_describe(peer, &facts) != PEERWAY_STATUS_OK) return {};
    return incarnation(facts.incarnation);
}

} // namespace shim
