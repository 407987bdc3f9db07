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
    // The last answer of post() or check(). While it is NIXL_IN_PROG, NIXL heeds how releaseReqH
    // ends. Otherwise NIXL calls it from a destructor.
    nixl_status_t told = NIXL_ERR_NOT_POSTED;
    // Whether the lines were logged that a post has once: its end, and that its fence is open.
    bool said_end = false;
    bool said_open = false;
    // The memory was taken back. `transfer` is a question to its owner from then on: whether it is still there.
    bool taken_back = false;
    // NIXL wants it released, so whether the agent is still there is of no interest.
    bool given_up = false;

    nixl_status_t answer(peerway_status status);

  public:
    Request(std::string our_agent, const std::string &remote_agent)
        : agent(std::move(our_agent)), about("transfer with agent '" + remote_agent + "'") {}

    // Has it ready to be posted.
    nixl_status_t prepare(const std::shared_ptr<Peer> &to, const Batch &batch);
    // Posts it, with a notification after its bytes where there is one.
    nixl_status_t post(const std::string *notification);
    // Where it is.
    nixl_status_t check();
    // Stops it, if it is under way, and waits for its end, at most for the fence deadline.
    // True: it can be deleted. Throws nixlRepostActiveError where bytes of it may still land.
    // False: they may still land, and NIXL heeds no answer, so the request must be kept.
    bool stop();
};
