// A request: prepared once, posted many times.
#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "handle.h"
#include "nixl_abi.h"
#include "remote_agent.h"

class Request : public nixlBackendReqH {
    const std::string agent;
    const std::string about;
    std::shared_ptr<Peer> peer;
    Prepared prepared;

    std::mutex changing;
    Transfer transfer;
    // Somebody was told that it is not over yet, and has come again.
    bool asked_before = false;
    // The memory was taken back. `transfer` is a question to its owner from then on: whether it is still there.
    bool taken_back = false;

    nixl_status_t ended(peerway_status status, const peerway_end &end);

  public:
    Request(std::string our_agent, const std::string &remote_agent)
        : agent(std::move(our_agent)), about("transfer with agent '" + remote_agent + "'") {}

    // Has it ready to be posted.
    nixl_status_t prepare(const std::shared_ptr<Peer> &to, const Batch &batch);
    // Posts it, with a notification after its bytes where there is one.
    nixl_status_t post(const std::string *notification);
    // Where it is.
    nixl_status_t check();
    // Stops it, if it is under way. True where nothing of it can change memory any more, or nothing more can be done about that.
    bool stop();
};
