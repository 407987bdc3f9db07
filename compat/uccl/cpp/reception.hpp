// Who arrived and what they said: an endpoint's one queue of notifications, sorted.
//
// It has no thread of its own: whoever asks for something puts all that has come where it belongs. What nobody fetches stays below, where
// it is bounded and senders are told.
#pragma once

#include <chrono>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string_view>
#include <vector>

#include "common.h"
#include "incarnation.hpp"
#include "owned.hpp"
#include "parts.hpp"

namespace shim {

// A peer that connected to us, and the number of its GPU, -1 where it is not known.
struct Arrival {
    Peer peer;
    int gpu = -1;
};

class Reception {
  public:
    explicit Reception(const peerway_endpoint *endpoint) : endpoint_(endpoint) {}

    // Waits for the next peer that connects; none once this was stopped, or where the endpoint is of no use.
    std::optional<Arrival> next_arrival();

    // Has everybody who waits give up, from now on.
    void stop();

    // What peers have said until now.
    std::vector<NotifyMsg> notes();

    // Whether this peer has connected to us.
    bool has_greeted(const Incarnation &peer);

  private:
    // All with the lock held.
    void sort();
    void met(Peer peer);
    void tell_of_silent();
    void greeted_by(const Incarnation &peer, std::string_view message);
    Peer find(const Incarnation &peer);
    void noted(std::string message);
    bool is_full() const;

    const peerway_endpoint *const endpoint_;
    // For all that follows. Never held while something is waited for.
    std::mutex lock_;
    // Peers that opened a session and have not greeted yet, with when that was.
    std::map<Incarnation, std::pair<Peer, std::chrono::steady_clock::time_point>> silent_;
    std::set<Incarnation> greeted_;
    std::deque<Arrival> arrivals_;
    Unfinished unfinished_;
    std::vector<NotifyMsg> notes_;
    size_t note_bytes_ = 0;
    bool stopped_ = false;
};

} // namespace shim
