// Sorts what arrives at an endpoint: new peers, and notifications from its single queue.
//
// It has no thread. Every call first sorts everything that has arrived. If the application does not
// fetch its notes, further notifications stay in the endpoint's queue, which is bounded, and whose
// senders get an error when it is full.
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

// A peer that connected to this endpoint, and the number of its GPU. -1 if unknown.
struct Arrival {
    Peer peer;
    int gpu = -1;
};

class Reception {
  public:
    explicit Reception(const peerway_endpoint *endpoint) : endpoint_(endpoint) {}

    // Waits for the next peer that connects. None after `stop`, or if the endpoint cannot accept
    // any more.
    std::optional<Arrival> next_arrival();

    // From now on, every `next_arrival` returns none.
    void stop();

    // The notes that have arrived so far.
    std::vector<NotifyMsg> notes();

    // Whether this peer has connected to this endpoint.
    bool has_greeted(const Incarnation &peer);

  private:
    // The caller of each of these holds the lock.
    void sort();
    void met(Peer peer);
    void tell_of_silent();
    void greeted_by(const Incarnation &peer, std::string_view message);
    Peer find(const Incarnation &peer);
    void noted(std::string message);
    bool is_full() const;

    const peerway_endpoint *const endpoint_;
    // Protects all members below. No thread holds it while it waits.
    std::mutex lock_;
    // Peers that opened a session and have not greeted yet, with the time of the session's start.
    std::map<Incarnation, std::pair<Peer, std::chrono::steady_clock::time_point>> silent_;
    std::set<Incarnation> greeted_;
    std::deque<Arrival> arrivals_;
    Unfinished unfinished_;
    std::vector<NotifyMsg> notes_;
    size_t note_bytes_ = 0;
    bool stopped_ = false;
};

} // namespace shim
