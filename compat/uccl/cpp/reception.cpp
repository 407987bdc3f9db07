#include "reception.hpp"

#include <thread>
#include <utility>

#include "greeting.hpp"
#include "log.hpp"

namespace shim {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// How long a connected peer may take to greet. A peer that does not is another kind of endpoint:
// accept returns it without a GPU.
static constexpr milliseconds GRACE(1000);
// How often a waiting caller checks for `stop`, and for peers that connected through an existing
// session.
static constexpr milliseconds LOOK(100);
// The same, while a greeting is expected.
static constexpr milliseconds SOON(2);
// The most notes and bytes that are kept for the application. Further notifications stay in the
// endpoint's queue, whose senders get an error when it is full.
static constexpr size_t MOST_NOTES = 1 << 16;
static constexpr size_t MOST_BYTES = 64 << 20;
// From this number of greeted peers on, peers that are gone are removed.
static constexpr size_t MOST_GREETED = 4096;

std::optional<Arrival> Reception::next_arrival() {
    for (;;) {
        std::chrono::nanoseconds wait;
        {
            std::unique_lock lock(lock_);
            if (stopped_) return {};
            sort();
            if (!arrivals_.empty()) {
                Arrival arrival = std::move(arrivals_.front());
                arrivals_.pop_front();
                return arrival;
            }
            wait = silent_.empty() ? LOOK : SOON;
        }
        Peer peer;
        const auto status = peerway_endpoint_accept(endpoint_, static_cast<uint64_t>(wait.count()), out(peer));
        std::unique_lock lock(lock_);
        if (status == PEERWAY_STATUS_OK) {
            met(std::move(peer));
        } else if (status != PEERWAY_STATUS_PENDING && !stopped_) {
            // The endpoint cannot accept any more, for example after a fork. Sleep, so that a
            // caller that retries at once does not spin.
            lock.unlock();
            complain_of_engine("uccl_engine_accept");
            std::this_thread::sleep_for(LOOK);
            return {};
        }
    }
}

void Reception::stop() {
    std::unique_lock lock(lock_);
    stopped_ = true;
}

std::vector<NotifyMsg> Reception::notes() {
    std::unique_lock lock(lock_);
    sort();
    note_bytes_ = 0;
    return std::exchange(notes_, {});
}

bool Reception::has_greeted(const Incarnation &peer) {
    std::unique_lock lock(lock_);
    sort();
    return greeted_.count(peer) != 0;
}

// Sorts everything that has arrived.
void Reception::sort() {
    for (Peer peer; peerway_endpoint_accept(endpoint_, 0, out(peer)) == PEERWAY_STATUS_OK;) met(std::move(peer));
    while (!is_full()) {
        Notification notification;
        const void *bytes;
        size_t len;
        peerway_incarnation from;
        if (peerway_endpoint_notification(endpoint_, 0, out(notification)) != PEERWAY_STATUS_OK) break;
        if (peerway_notification_message(notification.get(), &bytes, &len, &from) != PEERWAY_STATUS_OK) break;
        const std::string_view message(static_cast<const char *>(bytes), len);
        if (is_greeting(message))
            greeted_by(incarnation(from), message);
        else if (!is_part(message))
            noted(std::string(message));
        else if (auto whole = unfinished_.take(incarnation(from), message))
            noted(std::move(*whole));
    }
    tell_of_silent();
}

// A peer opened a session. If it has greeted already, the greeting has announced it.
void Reception::met(Peer peer) {
    const auto name = who(peer.get());
    if (name && !greeted_.count(*name)) silent_[*name] = {std::move(peer), steady_clock::now()};
}

void Reception::tell_of_silent() {
    const auto now = steady_clock::now();
    for (auto at = silent_.begin(); at != silent_.end();) {
        auto &[peer, since] = at->second;
        if (now - since < GRACE) {
            ++at;
            continue;
        }
        auto facts = sized<peerway_peer_facts>();
        if (peerway_peer_describe(peer.get(), &facts) == PEERWAY_STATUS_OK && facts.alive) arrivals_.push_back({std::move(peer), -1});
        at = silent_.erase(at);
    }
}

void Reception::greeted_by(const Incarnation &from, std::string_view message) {
    const auto gpu = gpu_in_greeting(message);
    if (!gpu) {
        complain("uccl_engine_accept", "dropped a malformed greeting");
        return;
    }
    silent_.erase(from);
    greeted_.insert(from);
    if (Peer peer = find(from)) arrivals_.push_back({std::move(peer), *gpu});
}

// The live peer with that identity. If there are many, it also removes greeted peers that are gone.
Peer Reception::find(const Incarnation &wanted) {
    std::vector<peerway_peer *> peers(64);
    size_t count = 0;
    while (peerway_endpoint_peers(endpoint_, peers.data(), peers.size(), &count) == PEERWAY_STATUS_TOO_SMALL) peers.resize(count + 64);
    Peer found;
    std::set<Incarnation> alive;
    for (size_t i = 0; i < count; ++i) {
        Peer peer(peers[i]);
        const auto name = who(peer.get());
        if (name) alive.insert(*name);
        if (name == wanted) found = std::move(peer);
    }
    if (greeted_.size() >= MOST_GREETED)
        for (auto at = greeted_.begin(); at != greeted_.end();) at = alive.count(*at) ? std::next(at) : greeted_.erase(at);
    return found;
}

// A notification in another format becomes a note without a name.
void Reception::noted(std::string message) {
    NotifyMsg note;
    if (!deserialize_notify_msg(message, note)) note.msg = std::move(message);
    note_bytes_ += note.name.size() + note.msg.size();
    notes_.push_back(std::move(note));
}

bool Reception::is_full() const { return notes_.size() >= MOST_NOTES || note_bytes_ >= MOST_BYTES; }

} // namespace shim
