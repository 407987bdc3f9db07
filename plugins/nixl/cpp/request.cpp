#include "request.h"

#include <thread>

#include "notifications.h"
#include "words.h"

namespace {

// A cancelled transfer ends within the fence deadline. This bound is a safeguard against a bug in
// the engine.
constexpr uint64_t AT_MOST_NS = 60'000'000'000;
// Agents do not use counters, so raising one only tests whether the peer answers.
constexpr uint32_t UNUSED_COUNTER = 0;

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
    taken_back = given_up = said_end = said_open = false;
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
    return told = answer(peerway_transfer_poll(transfer.get(), nullptr));
}

nixl_status_t Request::check() {
    const std::lock_guard lock(changing);
    if (!transfer) {
        return NIXL_ERR_NOT_POSTED;
    }
    told = answer(peerway_transfer_poll(transfer.get(), nullptr));
    if (told == NIXL_IN_PROG) {
        // Programs poll in a loop. On one host, the thread that serves the transfer at the other
        // end may need this core.
        std::this_thread::yield();
    }
    return told;
}

// The answer for NIXL. Once NIXL knows the end of a request, it frees the request even if the
// backend refuses the release. So a transfer is in progress for NIXL until its fence is held, or
// until no proof can arrive any more.
nixl_status_t Request::answer(peerway_status status) {
    if (status == PEERWAY_STATUS_PENDING) {
        return NIXL_IN_PROG;
    }
    if (!said_end && status != PEERWAY_STATUS_OK && status != PEERWAY_STATUS_CANCELLED) {
        say(agent, about, peerway_last_error());
    }
    said_end = true;
    uint32_t fence = PEERWAY_FENCE_LOST;
    const auto asked = peerway_transfer_fence(transfer.get(), &fence);
    if (asked == PEERWAY_STATUS_PENDING || fence == PEERWAY_FENCE_OPEN) {
        if (!said_open) {
            say(agent, about,
                "its bytes may still land, because the agent did not confirm in time. "
                "The request stays in progress until the agent answers or dies");
        }
        said_open = true;
        return NIXL_IN_PROG;
    }
    if (fence == PEERWAY_FENCE_LOST) {
        say(agent, about,
            "the session ended, and the agent never confirmed that no byte can land any more");
    } else if (said_open) {
        say(agent, about, "its bytes can no longer land");
    }
    // NIXL does not poll this transfer again, so free it.
    transfer = Transfer();
    if (taken_back) {
        return status == PEERWAY_STATUS_OK ? NIXL_ERR_NOT_ALLOWED : in_nixls_words(status);
    }
    if (given_up || (status != PEERWAY_STATUS_REVOKED && status != PEERWAY_STATUS_REMOTE_ACCESS)) {
        return in_nixls_words(status);
    }
    // An agent that shuts down revokes its memory first, so it may be gone already. NIXL must know
    // which case it is, because it forgets an agent after a disconnect. Raise a counter to find
    // out.
    taken_back = true;
    said_end = said_open = false;
    status = peerway_peer_count(peer->get(), UNUSED_COUNTER, transfer.made());
    return status == PEERWAY_STATUS_OK ? NIXL_IN_PROG : failed(agent, about, status);
}

bool Request::stop() {
    const std::lock_guard lock(changing);
    if (!transfer) {
        return true;
    }
    given_up = true;
    peerway_transfer_cancel(transfer.get());
    if (answer(peerway_transfer_wait(transfer.get(), AT_MOST_NS, nullptr)) != NIXL_IN_PROG) {
        return true;
    }
    if (told == NIXL_IN_PROG) {
        throw nixlRepostActiveError("bytes of the transfer may still land: release the request again later");
    }
    // NIXL frees its handle now, and ignores both a status and an exception.
    say(agent, about,
        "the request was released while its bytes may still land; the backend keeps it until the process ends");
    return false;
}
