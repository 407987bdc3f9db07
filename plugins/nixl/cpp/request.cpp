#include "request.h"

#include <thread>

#include "notifications.h"
#include "words.h"

namespace {

// Long enough for a peer that answers to say that it has stopped, which takes microseconds where both have a core to run on.
constexpr uint64_t A_MOMENT_NS = 20'000'000;
// A stopped transfer ends within the fence's deadline. This is for an engine that breaks its word.
constexpr uint64_t AT_MOST_NS = 60'000'000'000;
// Agents have no use for counters, so counting one does nothing but be answered.
constexpr uint32_t UNUSED_COUNTER = 0;

peerway_end blank() {
    peerway_end end{};
    end.size = sizeof end;
    return end;
}

} // namespace

nixl_status_t Request::prepare(const std::shared_ptr<Peer> &to, const Batch &batch) {
    peer = to;
    const auto status = peerway_peer_prepare(peer->get(), batch.get(), prepared.made());
    return status == PEERWAY_STATUS_OK ? NIXL_SUCCESS : failed(agent, about, status);
}

nixl_status_t Request::post(const std::string *notification) {
    const std::lock_guard lock(changing);
    if (transfer) {
        return NIXL_ERR_REPOST_ACTIVE;
    }
    asked_before = taken_back = false;
    peerway_status status;
    if (notification == nullptr) {
        status = peerway_prepared_post(prepared.get(), transfer.made());
    } else {
        const auto messages = packed(agent, *notification);
        if (messages.empty()) {
            say(agent, about, "a notification of " + std::to_string(notification->size()) + " bytes is too long");
            return NIXL_ERR_INVALID_PARAM;
        }
        const auto &last = messages.back();
        for (size_t i = 0; i + 1 < messages.size(); ++i) {
            Transfer ahead;
            status = peerway_peer_notify(peer->get(), messages[i].data(), messages[i].size(), ahead.made());
            if (status != PEERWAY_STATUS_OK) {
                return failed(agent, about, status);
            }
        }
        status = peerway_prepared_post_notifying(prepared.get(), last.data(), last.size(), transfer.made());
    }
    if (status != PEERWAY_STATUS_OK) {
        return failed(agent, about, status);
    }
    auto end = blank();
    return ended(peerway_transfer_poll(transfer.get(), &end), end);
}

nixl_status_t Request::check() {
    const std::lock_guard lock(changing);
    if (!transfer) {
        return NIXL_ERR_NOT_POSTED;
    }
    auto end = blank();
    const auto answer = ended(peerway_transfer_poll(transfer.get(), &end), end);
    if (answer == NIXL_IN_PROG) {
        // Programs ask in a loop. The thread that serves the transfer at the other end, on this host, may be waiting for this very core.
        std::this_thread::yield();
    }
    return answer;
}

// NIXL does not ask again once it was told the end, so the transfer is let go of.
nixl_status_t Request::ended(peerway_status status, const peerway_end &end) {
    if (status == PEERWAY_STATUS_PENDING) {
        return NIXL_IN_PROG;
    }
    if (status != PEERWAY_STATUS_OK && status != PEERWAY_STATUS_CANCELLED) {
        say(agent, about, peerway_last_error());
    }
    if (end.fence_open != 0) {
        say(agent, about, "bytes of it may still land: the agent did not answer for them in time");
    }
    transfer = Transfer();
    if (taken_back) {
        return status == PEERWAY_STATUS_OK ? NIXL_ERR_NOT_ALLOWED : in_nixls_words(status);
    }
    if (status != PEERWAY_STATUS_REVOKED && status != PEERWAY_STATUS_REMOTE_ACCESS) {
        return in_nixls_words(status);
    }
    // An agent that leaves takes its memory back first, and may be gone by now without our having heard of it. NIXL is to know which it is:
    // a disconnect has it forget the agent.
    taken_back = true;
    status = peerway_peer_count(peer->get(), UNUSED_COUNTER, transfer.made());
    return status == PEERWAY_STATUS_OK ? NIXL_IN_PROG : failed(agent, about, status);
}

bool Request::stop() {
    const std::lock_guard lock(changing);
    if (!transfer) {
        return true;
    }
    auto end = blank();
    peerway_transfer_cancel(transfer.get());
    // Who was sent away once and comes again wants it to be over, and NIXL asks no third time.
    const uint64_t patience = asked_before ? AT_MOST_NS : A_MOMENT_NS;
    asked_before = true;
    const auto status = peerway_transfer_wait(transfer.get(), patience, &end);
    if (status == PEERWAY_STATUS_PENDING && patience != AT_MOST_NS) {
        return false;
    }
    ended(status, end);
    return true;
}
