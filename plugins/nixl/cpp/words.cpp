#include "words.h"

#include <cstdio>

nixl_status_t in_nixls_words(peerway_status status) {
    switch (status) {
    case PEERWAY_STATUS_OK:
        return NIXL_SUCCESS;
    case PEERWAY_STATUS_PENDING:
        return NIXL_IN_PROG;
    // The peer does not exist, or no longer exists. NIXL then forgets the agent.
    case PEERWAY_STATUS_PEER_GONE:
    case PEERWAY_STATUS_PEER_SILENT:
    case PEERWAY_STATUS_UNREACHABLE:
    case PEERWAY_STATUS_TIMED_OUT:
    case PEERWAY_STATUS_OTHER_INCARNATION:
        return NIXL_ERR_REMOTE_DISCONNECT;
    // NIXL has no status for a deadline. A deadline stops the transfer with a fence, like a cancel.
    case PEERWAY_STATUS_DEADLINE:
    case PEERWAY_STATUS_CANCELLED:
        return NIXL_ERR_CANCELED;
    case PEERWAY_STATUS_BAD_ARGUMENT:
    case PEERWAY_STATUS_INVALID_SETTING:
    case PEERWAY_STATUS_OUTSIDE:
    case PEERWAY_STATUS_BAD_RANGE:
    case PEERWAY_STATUS_INVALID_METADATA:
    case PEERWAY_STATUS_INVALID_DESCRIPTOR:
    case PEERWAY_STATUS_INVALID_WORK:
    case PEERWAY_STATUS_OUT_OF_BOUNDS:
        return NIXL_ERR_INVALID_PARAM;
    case PEERWAY_STATUS_PEER_INCOMPATIBLE:
    case PEERWAY_STATUS_OTHER_PEER:
        return NIXL_ERR_MISMATCH;
    case PEERWAY_STATUS_ACCESS:
    case PEERWAY_STATUS_REMOTE_ACCESS:
    case PEERWAY_STATUS_REVOKED:
    case PEERWAY_STATUS_PEER_REFUSES:
        return NIXL_ERR_NOT_ALLOWED;
    case PEERWAY_STATUS_MIXED_GPUS:
    case PEERWAY_STATUS_NO_DRIVER:
    case PEERWAY_STATUS_NO_SUCH_GPU:
        return NIXL_ERR_NOT_SUPPORTED;
    default:
        return NIXL_ERR_BACKEND;
    }
}

void say(const std::string &agent, const std::string &about, const std::string &sentence) {
    // A single write, so that lines of several threads do not interleave.
    const std::string line = "[PEERWAY] agent '" + agent + "': " + about + ": " + sentence + "\n";
    std::fputs(line.c_str(), stderr);
}

nixl_status_t failed(const std::string &agent, const std::string &about, peerway_status status) {
    say(agent, about, peerway_last_error());
    return in_nixls_words(status);
}
